"""Compiled programs that read blocks of tokens through caches, and write them."""

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

NO_TOKEN = -1  # in returned token blocks, where a row had already ended


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def append_block(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> GenerationState:
    """Reads a block of a later prompt: as decoding would token by token, but all of its tokens at once."""
    x, state = _through_caches(model, state, tokens, lengths)
    return constrain_state(_with_last_logits(model, state, x, lengths), mesh)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def score_block(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """As `append_block`, and the log-probability of each token, the first one's from the state's logits, and whether it
    was the most likely."""
    before = state.logits[:, None]
    x, state = _through_caches(model, state, tokens, lengths)
    logits = jnp.concatenate([before, model.logits(x[:, :-1])], axis=1)
    likelihood = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
    best = jnp.argmax(logits, axis=-1) == tokens
    return (
        constrain_state(_with_last_logits(model, state, x, lengths), mesh),
        constrain_replicated(likelihood, mesh),
        constrain_replicated(best, mesh),
    )


def _through_caches(
    model: Llama,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T W"], GenerationState]:
    """The residual stream behind tokens that every layer's cache takes in, and the state with these caches."""
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
    # Every layer has counted the same tokens; XLA computes the counters once.
    return x, dataclasses.replace(state, layers=tuple(layers), counters=cache.counters)


def _with_last_logits(
    model: Llama, state: GenerationState, x: Float[Array, "B T W"], lengths: Int[Array, "B"]
) -> GenerationState:
    """The state behind a block of which each row read its first `lengths` tokens."""
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    reads = lengths > 0
    logits = model.logits(last)
    return dataclasses.replace(
        state,
        logits=jnp.where(reads[:, None], logits, state.logits),
        not_finite=state.not_finite + (reads & ~is_finite(logits)),
        positions=state.positions + lengths,
        done=state.done & ~reads,
    )


@functools.partial(jax.jit, static_argnames=("mesh", "sampling", "eos", "block"), donate_argnames=("state",))
def decode_block(
    model: Llama,
    mesh: Mesh | None,
    sampling: Sampling,
    eos: tuple[int, ...],
    block: int,
    state: GenerationState,
    steps: Int[Array, ""],
    ends: Int[Array, "B"] | None = None,
) -> tuple[GenerationState, Int[Array, "B block"], Int[Array, ""]]:
    """Up to `steps` decoding steps in one loop: sample from the logits, read the token, get the next logits.

    Args:
        ends: tokens of each row, read and written, with which its turn ends at the latest.

    Returns:
        The state, the tokens (`NO_TOKEN` where a row had ended) and how many steps were taken.
    """

    def step(carry):
        number, state, tokens = carry
        split = jax.vmap(jax.random.split)(state.sampling_keys)
        token = sample(state.logits, split[:, 0], sampling)
        tokens = jax.lax.dynamic_update_slice(
            tokens, jnp.where(state.done, NO_TOKEN, token)[:, None], (jnp.zeros_like(number), number)
        )
        running = ~state.done
        lengths = running.astype(jnp.int32)
        x, state = _through_caches(model, state, jnp.where(running, token, 0)[:, None], lengths)
        logits = model.logits(x[:, 0])
        ended = jnp.isin(token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(state.done)
        positions = state.positions + lengths
        if ends is not None:
            ended |= positions >= ends
        state = dataclasses.replace(
            state,
            logits=jnp.where(running[:, None], logits, state.logits),
            positions=positions,
            done=state.done | ended,
            sampling_keys=jax.random.wrap_key_data(
                jnp.where(
                    running[:, None],
                    jax.random.key_data(split[:, 1]),
                    jax.random.key_data(state.sampling_keys),
                )
            ),
            not_finite=state.not_finite + (running & ~is_finite(logits)),
        )
        return number + 1, constrain_state(state, mesh), tokens

    def running(carry):
        number, state, _ = carry
        return (number < steps) & ~jnp.all(state.done)

    tokens = jnp.full((state.done.shape[0], block), NO_TOKEN, jnp.int32)
    start = (jnp.zeros((), jnp.int32), state, tokens)
    taken, state, tokens = jax.lax.while_loop(running, step, start)
    return constrain_state(state, mesh), constrain_replicated(tokens, mesh), constrain_replicated(taken, mesh)
