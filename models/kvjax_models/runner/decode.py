"""Processes blocks of tokens through the caches: appending, scoring and decoding.

A block is compiled in one of two ways. On accelerators, on meshes and for few layers, one program spans all layers. On
a single CPU, the host calls one program per layer: equal layers share it, so that compilation takes the time of one
layer instead of all, but every call takes a fraction of a millisecond. Both ways run the same functions.
"""

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax_models.model.llama import DecoderLayer, Llama, RecurrentLayer
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.model.rotary import Rotary, rotation
from kvjax_models.runner.sampling import MAX_LOGPROBS, SampledTokens, is_finite, sample, with_answer, with_prompt
from kvjax_models.runner.scorer import predict_log_scores
from kvjax_models.runner.state import GenerationState, constrain_state
from kvjax_models.sharding import constrain_replicated, constrain_to_batch, replicate

# Models with fewer layers compile fast, and the calls would be a larger share of a step: 20 to 30% for 8 of width 512.
MIN_LAYERS = 16
NO_TOKEN = -1  # in blocks of new tokens, after the end of a finished sequence
Scorer: TypeAlias = Float[Array | np.ndarray, "L W+2 H_kv"]  # `profile.Profile.scorer`

Prefixes: TypeAlias = tuple[kvjax.FrozenCache, ...] | None  # the frozen prefixes that rows share, one per cache

M = TypeVar("M", Llama, DecoderLayer, RecurrentLayer)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Flat(Generic[M]):
    """A module that is flattened already, because flattening one takes longer than a call of a layer's program."""

    parameters: tuple[Array, ...]
    structure: Any = dataclasses.field(metadata={"static": True})

    @property
    def module(self) -> M:
        """The module."""
        return jax.tree.unflatten(self.structure, self.parameters)


class _Layer(NamedTuple):
    """A layer's inputs from the model; layers without attention have neither rotary embedding nor scorer."""

    module: _Flat[Any]
    rotary: Rotary | None = None
    scorer: Float[Array, "H_kv W+2"] | None = None


@dataclasses.dataclass(frozen=True)
class SplitModel:
    """A model whose layers can be computed one by one; `split_model` makes one.

    Attributes:
        model: the model.
        outer: the model without layers.
        layers: the layers.
        scorer: coefficients of predicted scores of all layers, for policies that require them.
    """

    model: Llama
    outer: _Flat[Llama]
    layers: tuple[_Layer, ...]
    scorer: Scorer | None


def split_model(model: Llama, scorer: Scorer | None, context_tokens: int) -> SplitModel:
    """Returns a model as the functions below take it. Make it once: flattening takes milliseconds.

    Args:
        model: the decoder.
        scorer: coefficients of predicted scores, for policies that require them.
        context_tokens: maximum number of tokens of a sequence, as in the state.
    """
    layers, attention_layers = [_Layer(_flatten(layer)) for layer in model.layers], model.config.attention_layers
    # The product of one token with rows of coefficients is one kernel; with columns, it would be two.
    scorers = (None,) * len(attention_layers) if scorer is None else tuple(jnp.swapaxes(scorer, 1, 2))
    for number, one in zip(attention_layers, scorers, strict=True):
        layers[number] = layers[number]._replace(rotary=model.config.rotary(number, context_tokens), scorer=one)
    return SplitModel(model, _flatten(model.without_layers()), tuple(layers), scorer)


def _flatten(module: M) -> _Flat[M]:
    leaves, structure = jax.tree.flatten(module)
    return _Flat(tuple(leaves), _shared(structure))


@functools.lru_cache(maxsize=1024)
def _shared(structure: Any) -> Any:
    """Returns one object for equal structures, which calls compare at once; otherwise they compare every field."""
    return structure


def append_block(
    split: SplitModel,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes = None,
) -> GenerationState:
    """Appends a block of prompt tokens to the caches, all at once.

    Args:
        split: the model.
        mesh: mesh of the model.
        state: state before the block; donated.
        tokens: padded tokens.
        lengths: number of tokens of each row.
        prefixes: the frozen prefixes that the rows share; None for rows that have all their tokens in their own caches.

    Returns:
        The state after the block.
    """
    if not runs_by_layer(state, mesh):
        return append_program(split.model, mesh, state, tokens, lengths, prefixes, split.scorer)
    tokens, lengths = _commit(state, tokens, lengths)
    return _append_by_layer(split, mesh, state, tokens, lengths, prefixes)[0]


def score_block(
    split: SplitModel,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes = None,
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """Appends a block like `append_block` and scores its tokens.

    Args:
        split: the model.
        mesh: mesh of the model.
        state: state before the block; donated.
        tokens: padded tokens.
        lengths: number of tokens of each row.
        prefixes: as for `append_block`.

    Returns:
        The state after the block, the log-probability of each token, and whether it was the most likely one. The first
        token is scored with the state's logits.
    """
    if not runs_by_layer(state, mesh):
        return score_program(split.model, mesh, state, tokens, lengths, prefixes, split.scorer)
    tokens, lengths = _commit(state, tokens, lengths)
    return _score_by_layer(split, mesh, state, tokens, lengths, prefixes)


def decode_block(
    split: SplitModel,
    mesh: Mesh | None,
    eos: tuple[int, ...],
    block_size: int,
    state: GenerationState,
    steps: int,
    prefixes: Prefixes = None,
) -> tuple[GenerationState, SampledTokens]:
    """Runs decode steps until all sequences are finished or `steps` is reached.

    Args:
        split: the model.
        mesh: mesh of the model.
        eos: tokens that finish a sequence.
        block_size: maximum number of steps.
        state: state before the block; donated.
        steps: number of steps, at most `block_size`.
        prefixes: as for `append_block`.

    Returns:
        The state after the block, and NumPy arrays [B, n, ...] of the tokens of its n steps, with `NO_TOKEN` after the
        end of a sequence.
    """
    if not runs_by_layer(state, mesh):
        count = replicate(np.int32(steps), mesh)
        state, block, num_steps = decode_program(
            split.model, mesh, eos, block_size, state, count, prefixes, split.scorer
        )
        return state, SampledTokens(*(np.asarray(part)[:, : int(num_steps)] for part in block))
    sampled: list[SampledTokens] = []
    # The first program of a step gives `done`, so that the host calls the next step's while this one's layers run.
    while len(sampled) < steps and not np.asarray(state.done).all():
        state, tokens = _decode_step(split, mesh, eos, state, prefixes)
        sampled.append(tokens)
    if not sampled:
        sampled, steps = [_no_tokens(state)], 0
    parts = ([np.asarray(x) for x in part] for part in zip(*sampled, strict=True))
    return state, SampledTokens(*(np.stack(part, axis=1)[:, :steps] for part in parts))


def runs_by_layer(state: GenerationState, mesh: Mesh | None) -> bool:
    """Returns whether the host calls one program per layer: on a single CPU, for at least `MIN_LAYERS` layers.

    Args:
        state: a state with arrays.
        mesh: mesh of the state.
    """
    on_cpu = mesh is None and all(device.platform == "cpu" for device in state.positions.devices())
    return on_cpu and len(state.layers) + len(state.recurrent) >= MIN_LAYERS


def _commit(state: GenerationState, tokens: Array, lengths: Array) -> tuple[Array, Array]:
    """Commits a block to the state's device; otherwise the first layer's program would be compiled twice."""
    return jax.device_put(tokens, state.positions.sharding), jax.device_put(lengths, state.positions.sharding)


def _append_by_layer(
    split: SplitModel,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
) -> tuple[GenerationState, Float[Array, "B T W"]]:
    """Returns the state after a block, and the residual stream of its tokens."""
    x, state = _step_layers(split, mesh, state, _embed(split.outer, mesh, tokens), lengths, prefixes)
    rows = _last_logits(split.outer, dataclasses.replace(state, layers=(), recurrent=()), x, tokens, lengths)
    return constrain_state(dataclasses.replace(rows, layers=state.layers, recurrent=state.recurrent), mesh), x


def _append_block(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
    scorer: Scorer | None,
) -> GenerationState:
    return _append_by_layer(split_model(model, scorer, state.context_tokens), mesh, state, tokens, lengths, prefixes)[0]


def _score_by_layer(
    split: SplitModel,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    previous_logits = state.logits
    state, x = _append_by_layer(split, mesh, state, tokens, lengths, prefixes)
    return state, *_token_scores(split.outer, mesh, previous_logits, x, tokens)


def _score_block(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
    scorer: Scorer | None,
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    return _score_by_layer(split_model(model, scorer, state.context_tokens), mesh, state, tokens, lengths, prefixes)


def _decode_block(
    model: Llama,
    mesh: Mesh | None,
    eos: tuple[int, ...],
    block_size: int,
    state: GenerationState,
    steps: Int[Array, ""],
    prefixes: Prefixes,
    scorer: Scorer | None,
) -> tuple[GenerationState, SampledTokens, Int[Array, ""]]:
    """Runs decode steps in one compiled loop; returns the state, the tokens of a full block and the steps."""
    split = split_model(model, scorer, state.context_tokens)

    def step(carry):
        """Runs one decode step on the `carry`: the number of steps, the state and the tokens of the block."""
        number, state, block = carry
        state, sampled = _decode_step(split, mesh, eos, state, prefixes)

        def write(block: Array, new: Array) -> Array:
            start = (jnp.zeros_like(number), number, *[jnp.zeros_like(number)] * (block.ndim - 2))
            return jax.lax.dynamic_update_slice(block, new[:, None], start)

        return number + 1, constrain_state(state, mesh), jax.tree.map(write, block, sampled)

    def is_running(carry):
        """Returns whether the `carry` has steps left and unfinished sequences."""
        number, state, _ = carry
        return (number < steps) & ~jnp.all(state.done)

    block = jax.tree.map(lambda x: jnp.repeat(x[:, None], block_size, axis=1), _no_tokens(state))
    num_steps, state, block = jax.lax.while_loop(is_running, step, (jnp.zeros((), jnp.int32), state, block))
    block = jax.tree.map(lambda x: constrain_replicated(x, mesh), block)
    return constrain_state(state, mesh), block, constrain_replicated(num_steps, mesh)


def _no_tokens(state: GenerationState) -> SampledTokens:
    """Returns what a step gives for finished sequences."""
    batch, vocab_size = state.logits.shape
    top = (batch, min(MAX_LOGPROBS, vocab_size))
    token = jnp.full(batch, NO_TOKEN, jnp.int32)
    return SampledTokens(token, jnp.zeros(batch), jnp.zeros(top, jnp.int32), jnp.zeros(top))


append_program = jax.jit(_append_block, static_argnames=("mesh",), donate_argnames=("state",))
score_program = jax.jit(_score_block, static_argnames=("mesh",), donate_argnames=("state",))
decode_program = jax.jit(_decode_block, static_argnames=("mesh", "eos", "block_size"), donate_argnames=("state",))


def _decode_step(
    split: SplitModel, mesh: Mesh | None, eos: tuple[int, ...], state: GenerationState, prefixes: Prefixes
) -> tuple[GenerationState, SampledTokens]:
    """Samples a token from the logits and computes the next logits; returns the state and the tokens."""
    rows = dataclasses.replace(state, layers=(), recurrent=())
    rows, sampled, x, lengths = _sample_token(split.outer, mesh, eos, rows)
    rows = dataclasses.replace(rows, layers=state.layers, recurrent=state.recurrent)
    x, state = _step_layers(split, mesh, rows, x, lengths, prefixes)
    # Without `done`, which the host reads while the layers run.
    rest: dict[str, Any] = {"layers": (), "recurrent": (), "done": ()}
    rows = _next_logits(split.outer, dataclasses.replace(state, **rest), sampled.token, x, lengths)
    return dataclasses.replace(rows, **{name: getattr(state, name) for name in rest}), sampled


def _step_layers(
    split: SplitModel,
    mesh: Mesh | None,
    state: GenerationState,
    x: Float[Array, "B T W"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
) -> tuple[Float[Array, "B T W"], GenerationState]:
    """Computes the layers of new tokens; returns the residual stream, and the state with new caches and states."""
    layers, recurrent, counters, positions = [], [], state.counters, state.positions
    of_caches = (None,) * len(state.layers) if prefixes is None else prefixes
    caches, states = zip(state.layers, of_caches, strict=True), iter(state.recurrent)
    for module, rotary, scorer in split.layers:
        if rotary is None:
            x, new_state = step_recurrent_layer(module, mesh, next(states), x, lengths)
            recurrent.append(new_state)
            continue
        cache, prefix = next(caches)
        used_scorer = scorer if cache.policy.requires.predicted_scores else None
        x, cache, new_counters = step_layer(module, rotary, cache, counters, x, positions, lengths, prefix, used_scorer)
        layers.append(cache)
    # Every layer counts the same tokens; XLA computes the counters once.
    return x, dataclasses.replace(state, layers=tuple(layers), recurrent=tuple(recurrent), counters=new_counters)


# Nested in a larger program, the functions below are traced once and inlined by the compiler.


@functools.partial(jax.jit, static_argnames=("rotary",), donate_argnames=("cache", "x"))
def step_layer(
    flat: _Flat[DecoderLayer],
    rotary: Rotary,
    cache: kvjax.Cache,
    counters: kvjax.Counters,
    x: Float[Array, "B T W"],
    positions: Int[Array, "B"],
    lengths: Int[Array, "B"],
    prefix: kvjax.FrozenCache | None = None,
    scorer: Float[Array, "H_kv W+2"] | None = None,
) -> tuple[Float[Array, "B T W"], kvjax.Cache, kvjax.Counters]:
    """Appends tokens to one layer's cache and computes the layer.

    Args:
        flat: the layer.
        rotary: its rotary embedding.
        cache: its cache; donated.
        counters: counters of all layers.
        x: residual stream; donated.
        positions: number of tokens of each row before these.
        lengths: number of these tokens of each row.
        prefix: the frozen prefixes that the rows share.
        scorer: the layer's coefficients of predicted scores, if its policy requires them.

    Returns:
        The residual stream, the cache, and the counters of all layers afterwards.
    """
    layer = flat.module
    angles = rotation(rotary, positions[:, None] + jnp.arange(x.shape[1]))
    query, keys, values = layer.project(x, *angles)
    scores = None
    if scorer is not None:
        scores = predict_log_scores(scorer.T, layer.normalize(x), positions).swapaxes(1, 2)
    attended, cache, counters = kvjax.step(
        cache,
        counters,
        query,
        keys,
        values,
        lengths,
        sink_logits=layer.sink_logits,
        predicted_scores=scores,
        compact_when_full=False,
        prefix=prefix,
    )
    return constrain_to_batch(layer.finish(x, attended), cache.mesh), cache, counters


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state", "x"))
def step_recurrent_layer(
    flat: _Flat[RecurrentLayer],
    mesh: Mesh | None,
    state: RecurrentState,
    x: Float[Array, "B T W"],
    lengths: Int[Array, "B"],
) -> tuple[Float[Array, "B T W"], RecurrentState]:
    """Computes a layer with a recurrent state.

    Args:
        flat: the layer.
        mesh: mesh of the model.
        state: its state before the tokens; donated.
        x: residual stream of new tokens; donated.
        lengths: number of these tokens of each row.

    Returns:
        The residual stream, and the state after the tokens.
    """
    x, state = flat.module(x, state, lengths)
    return constrain_to_batch(x, mesh), state


@functools.partial(jax.jit, static_argnames=("mesh",))
def _embed(outer: _Flat[Llama], mesh: Mesh | None, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
    return constrain_to_batch(outer.module.embed(tokens), mesh)


@functools.partial(jax.jit, static_argnames=("mesh", "eos"), donate_argnames=("rows",))
def _sample_token(
    outer: _Flat[Llama], mesh: Mesh | None, eos: tuple[int, ...], rows: GenerationState
) -> tuple[GenerationState, SampledTokens, Float[Array, "B 1 W"], Int[Array, "B"]]:
    """Samples a token per running row; returns the rows, the tokens, their embeddings and their numbers."""
    keys = jax.vmap(jax.random.split)(rows.sampling_keys)
    sampled = sample(rows.logits, keys[:, 0], rows.sampling)
    running = ~rows.done
    new_keys, old_keys = jax.random.key_data(keys[:, 1]), jax.random.key_data(rows.sampling_keys)
    is_end = jnp.isin(sampled.token, jnp.asarray(eos, jnp.int32)) if eos else jnp.zeros_like(running)
    rows = dataclasses.replace(
        rows,
        sampling_keys=jax.random.wrap_key_data(jnp.where(running[:, None], new_keys, old_keys)),
        done=rows.done | is_end | (rows.positions + running >= rows.max_positions),
    )
    x = constrain_to_batch(outer.module.embed(jnp.where(running, sampled.token, 0)[:, None]), mesh)
    sampled = sampled._replace(token=jnp.where(running, sampled.token, NO_TOKEN))
    return rows, sampled, x, running.astype(jnp.int32)


@functools.partial(jax.jit, donate_argnames=("rows",))
def _next_logits(
    outer: _Flat[Llama],
    rows: GenerationState,
    token: Int[Array, "B"],
    x: Float[Array, "B 1 W"],
    lengths: Int[Array, "B"],
) -> GenerationState:
    """Returns the rows after a decode step, without caches and `done`."""
    running, logits = lengths > 0, outer.module.logits(x[:, 0])
    return dataclasses.replace(
        rows,
        logits=jnp.where(running[:, None], logits, rows.logits),
        positions=rows.positions + lengths,
        sampling=with_answer(rows.sampling, token, running),
        not_finite=rows.not_finite + (running & ~is_finite(logits)),
    )


@jax.jit
def _last_logits(
    outer: _Flat[Llama],
    rows: GenerationState,
    x: Float[Array, "B T W"],
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
) -> GenerationState:
    """Returns the rows, without caches, after a block of which each row has its first `lengths` tokens."""
    last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    has_tokens = lengths > 0
    logits = outer.module.logits(last)
    return dataclasses.replace(
        rows,
        logits=jnp.where(has_tokens[:, None], logits, rows.logits),
        not_finite=rows.not_finite + (has_tokens & ~is_finite(logits)),
        positions=rows.positions + lengths,
        done=rows.done & ~has_tokens,
        sampling=with_prompt(rows.sampling, tokens, lengths),
    )


@functools.partial(jax.jit, static_argnames=("mesh",))
def _token_scores(
    outer: _Flat[Llama],
    mesh: Mesh | None,
    previous_logits: Float[Array, "B V"],
    x: Float[Array, "B T W"],
    tokens: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns the log-probability of each token of a block, and whether it was the most likely one."""
    logits = jnp.concatenate([previous_logits[:, None], outer.module.logits(x[:, :-1])], axis=1)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
    is_greedy = jnp.argmax(logits, axis=-1) == tokens
    return constrain_replicated(log_probs, mesh), constrain_replicated(is_greedy, mesh)


PROGRAMS = (
    append_program,
    score_program,
    decode_program,
    step_layer,
    step_recurrent_layer,
    _embed,
    _sample_token,
    _next_logits,
    _last_logits,
    _token_scores,
)
