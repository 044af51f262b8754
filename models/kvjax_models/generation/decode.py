"""Compiled programs that process blocks of tokens through the caches: appending, scoring and decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.cache import with_counters
from kvjax_models.generation.sampling import Sampling, is_finite, sample
from kvjax_models.generation.state import GenerationState, constrain_state
from kvjax_models.model.llama import Llama
from kvjax_models.sharding import constrain_replicated, constrain_to_batch

NO_TOKEN = -1  # in blocks of new tokens, after the end of a finished sequence


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def append_block(
    model: Llama, mesh: Mesh | None, state: GenerationState, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> GenerationState:
    """Appends a block of prompt tokens to the caches, all at once.

    Args:
        model: the decoder.
        mesh: mesh of the model.
        state: state before the block; donated.
        tokens: padded tokens.
        lengths: number of tokens of each row.

    Returns:
        The state after the block.
    """
    x, state = _step_layers(model, state, tokens, lengths)
    return constrain_state(_with_last_logits(model, state, x, lengths), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def score_block(
    model: Llama, mesh: Mesh | None, state: GenerationState, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """Appends a block like `append_block` and scores its tokens.

    Args:
        model: the decoder.
        mesh: mesh of the model.
        state: state before the block; donated.
        tokens: padded tokens.
        lengths: number of tokens of each row.

    Returns:
        The state after the block, the log-probability of each token, and whether it was the most likely one. The first
        token is scored with the state's logits.
    """
    previous_logits = state.logits[:, None]
    x, state = _step_layers(model, state, tokens, lengths)
    logits = jnp.concatenate([previous_logits, model.logits(x[:, :-1])], axis=1)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
    is_greedy = jnp.argmax(logits, axis=-1) == tokens
    state = constrain_state(_with_last_logits(model, state, x, lengths), mesh)
    return state, constrain_replicated(log_probs, mesh), constrain_replicated(is_greedy, mesh)


@functools.partial(jax.jit, static_argnames=("mesh", "sampling", "eos", "block_size"), donate_argnames=("state",))
def decode_block(
    model: Llama,
    mesh: Mesh | None,
    sampling: Sampling,
    eos: tuple[int, ...],
    block_size: int,
    state: GenerationState,
    steps: Int[Array, ""],
    max_positions: Int[Array, "B"] | None = None,
) -> tuple[GenerationState, Int[Array, "B block"], Int[Array, ""]]:
    """Runs decode steps in one compiled loop until all sequences are finished or `steps` is reached.

    Args:
        model: the decoder.
        mesh: mesh of the model.
        sampling: sampling parameters.
        eos: tokens that finish a sequence.
        block_size: maximum number of steps.
        state: state before the block; donated.
        steps: number of steps, at most `block_size`.
        max_positions: number of tokens with which each sequence is finished, including the prompt; None: no limit.

    Returns:
        The state after the block, the new tokens (`NO_TOKEN` after the end of a sequence) and the number of steps.
    """

    def step(carry):
        """Runs one decode step on the `carry`: the number of steps, the state and the tokens of the block."""
        number, state, tokens = carry
        state, token = _decode_step(model, sampling, eos, state, max_positions)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (jnp.zeros_like(number), number))
        return number + 1, constrain_state(state, mesh), tokens

    def is_running(carry):
        """Returns whether the `carry` has steps left and unfinished sequences."""
        number, state, _ = carry
        return (number < steps) & ~jnp.all(state.done)

    tokens = jnp.full((state.done.shape[0], block_size), NO_TOKEN, jnp.int32)
    carry = (jnp.zeros((), jnp.int32), state, tokens)
    num_steps, state, tokens = jax.lax.while_loop(is_running, step, carry)
    return constrain_state(state, mesh), constrain_replicated(tokens, mesh), constrain_replicated(num_steps, mesh)


def _decode_step(
    model: Llama,
    sampling: Sampling,
    eos: tuple[int, ...],
    state: GenerationState,
    max_positions: Int[Array, "B"] | None,
) -> tuple[GenerationState, Int[Array, "B"]]:
    """Samples a token from the logits and computes the next logits; returns the state and the tokens."""
    keys = jax.vmap(jax.random.split)(state.sampling_keys)
    token = sample(state.logits, keys[:, 0], sampling)
    running = ~state.done
    lengths = running.astype(jnp.int32)
    x, state = _step_layers(model, state, jnp.where(running, token, 0)[:, None], lengths)
    logits = model.logits(x[:, 0])
    done = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(state.done)
    positions = state.positions + lengths
    if max_positions is not None:
        done |= positions >= max_positions
    new_keys, old_keys = jax.random.key_data(keys[:, 1]), jax.random.key_data(state.sampling_keys)
    new_state = dataclasses.replace(
        state,
        logits=jnp.where(running[:, None], logits, state.logits),
        positions=positions,
        done=state.done | done,
        sampling_keys=jax.random.wrap_key_data(jnp.where(running[:, None], new_keys, old_keys)),
        not_finite=state.not_finite + (running & ~is_finite(logits)),
    )
    return new_state, jnp.where(running, token, NO_TOKEN)


def _step_layers(
    model: Llama, state: GenerationState, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[Float[Array, "B T W"], GenerationState]:
    """Appends tokens to every layer's cache; returns the residual stream and the state with the new caches."""
    positions = state.positions[:, None] + jnp.arange(tokens.shape[1])
    mesh = state.layers[0].mesh
    x = constrain_to_batch(model.embed(tokens), mesh)
    layers = []
    for number, (layer, layer_cache) in enumerate(zip(model.layers, state.layers, strict=True)):
        cache = with_counters(layer_cache, state.counters)
        query, keys, values = layer.project(x, *model.rotation(positions, number, cache.spec.capacity))
        attended, cache = kvjax.step(
            cache, query, keys, values, lengths, sink_logits=layer.sink_logits, compact_when_full=False
        )
        layers.append(with_counters(cache, None))
        x = constrain_to_batch(layer.finish(x, attended), mesh)
    # Every layer counts the same tokens; XLA computes the counters once.
    return x, dataclasses.replace(state, layers=tuple(layers), counters=cache.counters)


def _with_last_logits(
    model: Llama, state: GenerationState, x: Float[Array, "B T W"], lengths: Int[Array, "B"]
) -> GenerationState:
    """Returns the state after a block of which each row has its first `lengths` tokens."""
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    has_tokens = lengths > 0
    logits = model.logits(last)
    return dataclasses.replace(
        state,
        logits=jnp.where(has_tokens[:, None], logits, state.logits),
        not_finite=state.not_finite + (has_tokens & ~is_finite(logits)),
        positions=state.positions + lengths,
        done=state.done & ~has_tokens,
    )


PROGRAMS = (append_block, score_block, decode_block)
