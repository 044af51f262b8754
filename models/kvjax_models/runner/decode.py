"""Processes blocks of tokens through the caches: appending, scoring and decoding.

A block is compiled in one of two ways. On accelerators, on meshes and for few layers, one program spans all layers. On
a single CPU, the host calls one program per layer: equal layers share it, so that compilation takes the time of one
layer instead of all, but every call takes a fraction of a millisecond. Both ways run the same functions.

A step computes one group of rows or several, whose caches have other sizes or other prefixes: projections, MLP and
logits once for the rows of all groups, so that the weights are read once, and attention group by group.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
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
T = TypeVar("T")


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
        mesh: the mesh of the model; None for a single device.
    """

    model: Llama
    outer: _Flat[Llama]
    layers: tuple[_Layer, ...]
    scorer: Scorer | None
    mesh: Mesh | None


def split_model(model: Llama, scorer: Scorer | None, context_tokens: int, mesh: Mesh | None) -> SplitModel:
    """Returns a model as the functions below take it. Make it once: flattening takes milliseconds.

    Args:
        scorer: coefficients of predicted scores, for policies that require them.
        context_tokens: maximum number of tokens of a sequence, as in the state.
    """
    layers, attention_layers = [_Layer(_flatten(layer)) for layer in model.layers], model.config.attention_layers
    # The product of one token with rows of coefficients is one kernel; with columns, it would be two.
    scorers = (None,) * len(attention_layers) if scorer is None else tuple(jnp.swapaxes(scorer, 1, 2))
    for number, one in zip(attention_layers, scorers, strict=True):
        layers[number] = layers[number]._replace(rotary=model.config.rotary(number, context_tokens), scorer=one)
    return SplitModel(model, _flatten(model.without_layers()), tuple(layers), scorer, mesh)


class Group(NamedTuple):
    """Rows that share sizes and policies of their caches.

    Attributes:
        split: the model.
        state: state of the rows, which the functions below donate.
        prefixes: the frozen prefixes that the rows share; None for rows that have all their tokens in their own caches.
    """

    split: SplitModel
    state: GenerationState
    prefixes: Prefixes = None


def _flatten(module: M) -> _Flat[M]:
    leaves, structure = jax.tree.flatten(module)
    return _Flat(tuple(leaves), _shared(structure))


@functools.lru_cache(maxsize=1024)
def _shared(structure: Any) -> Any:
    """Returns one object for equal structures, which calls compare at once; otherwise they compare every field."""
    return structure


def append_block(group: Group, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]) -> GenerationState:
    """Appends a block of prompt tokens to the caches, all at once.

    Args:
        lengths: number of tokens of each row.

    Returns:
        The state after the block.
    """
    split, state, prefixes = group
    if not runs_by_layer(split.model, split.mesh):
        return append_program(split.model, split.mesh, state, tokens, lengths, prefixes, split.scorer)
    return _append(group, *_commit(state, tokens, lengths))[0]


def score_block(
    group: Group, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """Appends a block like `append_block` and scores its tokens.

    Args:
        lengths: number of tokens of each row.

    Returns:
        The state after the block, the log-probability of each token, and whether it was the most likely one. The first
        token is scored with the state's logits.
    """
    split, state, prefixes = group
    if not runs_by_layer(split.model, split.mesh):
        return score_program(split.model, split.mesh, state, tokens, lengths, prefixes, split.scorer)
    return _score(group, *_commit(state, tokens, lengths))


def decode_groups(
    groups: Sequence[Group], eos: tuple[int, ...], block_size: int, steps: int
) -> tuple[tuple[GenerationState, ...], list[SampledTokens]]:
    """Runs decode steps until all sequences are finished or `steps` is reached.

    Args:
        groups: the rows, of one model.
        eos: tokens that finish a sequence.
        block_size: maximum number of steps.
        steps: number of steps, at most `block_size`.

    Returns:
        The states after the steps, and for every group NumPy arrays [B, n, ...] of the tokens in n steps, with
        `NO_TOKEN` after the end of a sequence.
    """
    splits, states, prefixes = zip(*groups, strict=True)
    split, sizes = splits[0], [len(state.positions) for state in states]
    if not runs_by_layer(split.model, split.mesh):
        count, scorers = replicate(np.int32(steps), split.mesh), tuple(one.scorer for one in splits)
        states, block, num_steps = decode_program(
            split.model, split.mesh, eos, block_size, states, count, prefixes, scorers
        )
        return states, _split(SampledTokens(*(np.asarray(part)[:, : int(num_steps)] for part in block)), sizes)
    sampled: list[SampledTokens] = []
    # The first program of a step gives `done`, so that the host calls the next step's while this one's layers run.
    while len(sampled) < steps and not all(np.asarray(state.done).all() for state in states):
        states, tokens = _decode_step(_with_states(groups, states), eos)
        sampled.append(tokens)
    if not sampled:
        sampled, steps = [_no_tokens(states)], 0
    parts = (np.stack([np.asarray(x) for x in part], axis=1)[:, :steps] for part in zip(*sampled, strict=True))
    return states, _split(SampledTokens(*parts), sizes)


def runs_by_layer(model: Llama, mesh: Mesh | None) -> bool:
    """Returns whether the host calls one program per layer: on a single CPU, for at least `MIN_LAYERS` layers."""
    if mesh is not None or model.config.layers < MIN_LAYERS:
        return False
    return all(device.platform == "cpu" for device in jax.tree.leaves(model.norm)[0].devices())


def _commit(state: GenerationState, tokens: Array, lengths: Array) -> tuple[Array, Array]:
    """Commits a block to the state's device; otherwise the first layer's program would be compiled twice."""
    return jax.device_put(tokens, state.positions.sharding), jax.device_put(lengths, state.positions.sharding)


def _with_states(groups: Sequence[Group], states: Sequence[GenerationState]) -> list[Group]:
    return [group._replace(state=state) for group, state in zip(groups, states, strict=True)]


def _append(
    group: Group, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[GenerationState, Float[Array, "B T W"]]:
    """Returns the state after a block, and the residual stream of its tokens."""
    outer, mesh = group.split.outer, group.split.mesh
    x, [state] = step_layers([group], embed_tokens(outer, mesh, tokens), (lengths,))
    [rows] = _without([state], "layers", "recurrent")
    rows = _last_logits(outer, rows, x, tokens, lengths)
    [state] = _with_fields([rows], [state], "layers", "recurrent")
    return constrain_state(state, mesh), x


def _score(
    group: Group, tokens: Int[Array, "B T"], lengths: Int[Array, "B"]
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """Returns the results of `score_block`."""
    state, x = _append(group, tokens, lengths)
    return state, *_token_scores(group.split.outer, group.split.mesh, group.state.logits, x, tokens)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def append_program(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
    scorer: Scorer | None,
) -> GenerationState:
    """Runs `append_block` as one program."""
    group = Group(split_model(model, scorer, state.context_tokens, mesh), state, prefixes)
    return _append(group, tokens, lengths)[0]


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def score_program(
    model: Llama,
    mesh: Mesh | None,
    state: GenerationState,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    prefixes: Prefixes,
    scorer: Scorer | None,
) -> tuple[GenerationState, Float[Array, "B T"], Bool[Array, "B T"]]:
    """Runs `score_block` as one program."""
    return _score(Group(split_model(model, scorer, state.context_tokens, mesh), state, prefixes), tokens, lengths)


@functools.partial(jax.jit, static_argnames=("mesh", "eos", "block_size"), donate_argnames=("states",))
def decode_program(
    model: Llama,
    mesh: Mesh | None,
    eos: tuple[int, ...],
    block_size: int,
    states: tuple[GenerationState, ...],
    steps: Int[Array, ""],
    prefixes: tuple[Prefixes, ...],
    scorers: tuple[Scorer | None, ...],
) -> tuple[tuple[GenerationState, ...], SampledTokens, Int[Array, ""]]:
    """Runs decode steps in one compiled loop; returns the states, the tokens of a full block and the steps."""
    groups = [
        Group(split_model(model, scorer, state.context_tokens, mesh), state, one)
        for scorer, state, one in zip(scorers, states, prefixes, strict=True)
    ]

    def step(carry):
        """Runs one decode step on the `carry`: the number of steps, the states and the tokens of the block."""
        number, states, block = carry
        states, sampled = _decode_step(_with_states(groups, states), eos)

        def write(block: Array, new: Array) -> Array:
            start = (jnp.zeros_like(number), number, *[jnp.zeros_like(number)] * (block.ndim - 2))
            return jax.lax.dynamic_update_slice(block, new[:, None], start)

        return number + 1, constrain(states), jax.tree.map(write, block, sampled)

    def is_running(carry):
        """Returns whether the `carry` has steps left and unfinished sequences."""
        number, states, _ = carry
        return (number < steps) & ~jnp.all(_concatenate([state.done for state in states]))

    def constrain(states: tuple[GenerationState, ...]) -> tuple[GenerationState, ...]:
        return tuple(constrain_state(state, mesh) for state in states)

    block = jax.tree.map(lambda x: jnp.repeat(x[:, None], block_size, axis=1), _no_tokens(states))
    num_steps, states, block = jax.lax.while_loop(is_running, step, (jnp.zeros((), jnp.int32), states, block))
    block = jax.tree.map(lambda x: constrain_replicated(x, mesh), block)
    return constrain(states), block, constrain_replicated(num_steps, mesh)


def _no_tokens(states: Sequence[GenerationState]) -> SampledTokens:
    """Returns the tokens of a step for finished sequences."""
    batch, vocab_size = sum(state.logits.shape[0] for state in states), states[0].logits.shape[1]
    top = (batch, min(MAX_LOGPROBS, vocab_size))
    token = jnp.full(batch, NO_TOKEN, jnp.int32)
    return SampledTokens(token, jnp.zeros(batch), jnp.zeros(top, jnp.int32), jnp.zeros(top))


def _concatenate(groups: Sequence[T]) -> T:
    """Returns the rows of all groups: arrays, or trees of arrays, with batch rows along the first axis."""
    return groups[0] if len(groups) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *groups)


def _split(tree: T, sizes: Sequence[int]) -> list[T]:
    """Returns the rows of every group: the inverse of `_concatenate`."""
    if len(sizes) == 1:
        return [tree]

    def part(start: int, size: int) -> T:
        return jax.tree.map(lambda x: x[start : start + size], tree)

    return [part(end - size, size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


def _decode_step(groups: Sequence[Group], eos: tuple[int, ...]) -> tuple[tuple[GenerationState, ...], SampledTokens]:
    """Samples a token from the logits and computes the next logits; returns the states and the tokens."""
    outer, mesh = groups[0].split.outer, groups[0].split.mesh
    states = [group.state for group in groups]
    rows, sampled, x, lengths = _sample_token(outer, mesh, eos, _without(states, "layers", "recurrent"))
    new_groups = _with_states(groups, _with_fields(rows, states, "layers", "recurrent"))
    x, new_states = step_layers(new_groups, x, lengths)
    # Without `done`, which the host reads while the layers run.
    rest = "layers", "recurrent", "done"
    rows = _next_logits(outer, _without(new_states, *rest), sampled.token, x, lengths)
    return _with_fields(rows, new_states, *rest), sampled


def _without(states: Sequence[GenerationState], *names: str) -> tuple[GenerationState, ...]:
    """Returns states without fields that a program does not take."""
    empty: dict[str, Any] = dict.fromkeys(names, ())
    return tuple(dataclasses.replace(state, **empty) for state in states)


def _with_fields(
    states: Sequence[GenerationState], others: Sequence[GenerationState], *names: str
) -> tuple[GenerationState, ...]:
    """Returns states with fields of others."""
    return tuple(
        dataclasses.replace(state, **{name: getattr(other, name) for name in names})
        for state, other in zip(states, others, strict=True)
    )


# Nested in a larger program, the functions below are traced once and inlined by the compiler.


@functools.partial(jax.jit, static_argnames=("rotaries",), donate_argnames=("caches", "x"))
def step_layer(
    flat: _Flat[DecoderLayer],
    rotaries: tuple[Rotary, ...],
    caches: tuple[kvjax.Cache, ...],
    counters: tuple[kvjax.Counters, ...],
    x: Float[Array, "B T W"],
    positions: tuple[Int[Array, "b"], ...],
    lengths: tuple[Int[Array, "b"], ...],
    prefixes: tuple[kvjax.FrozenCache | None, ...],
    scorers: tuple[Float[Array, "H_kv W+2"] | None, ...],
) -> tuple[Float[Array, "B T W"], tuple[kvjax.Cache, ...], tuple[kvjax.Counters, ...]]:
    """Appends tokens to one layer's caches and computes the layer.

    Args:
        rotaries: its rotary embedding, for every group.
        caches: its caches; donated.
        x: residual stream of the rows of all groups; donated.
        positions: number of tokens of each row before these.
        lengths: number of these tokens of each row.
        prefixes: the frozen prefixes that the rows share.
        scorers: the layer's coefficients of predicted scores, where a policy requires them.

    Returns:
        The residual stream, the caches, and the counters of all layers afterwards.
    """
    layer, sizes = flat.module, [len(one) for one in positions]
    places = [one[:, None] + jnp.arange(x.shape[1]) for one in positions]
    query, keys, values = layer.project(x, _concatenate(list(map(rotation, rotaries, places))))
    queries, new_keys, new_values = (_split(one, sizes) for one in (query, keys, values))
    attended, new_caches, new_counters = [], [], []
    for group, (cache, scorer) in enumerate(zip(caches, scorers, strict=True)):
        scores = None
        if scorer is not None:
            scores = predict_log_scores(scorer.T, _split(layer.normalize(x), sizes)[group], positions[group]).swapaxes(
                1, 2
            )
        output, cache, group_counters = kvjax.step(
            cache,
            counters[group],
            queries[group],
            new_keys[group],
            new_values[group],
            lengths[group],
            sink_logits=layer.sink_logits,
            predicted_scores=scores,
            compact_when_full=False,
            prefix=prefixes[group],
        )
        attended.append(output)
        new_caches.append(cache)
        new_counters.append(group_counters)
    x = constrain_to_batch(layer.finish(x, _concatenate(attended)), caches[0].mesh)
    return x, tuple(new_caches), tuple(new_counters)


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("states", "x"))
def step_recurrent_layer(
    flat: _Flat[RecurrentLayer],
    mesh: Mesh | None,
    states: tuple[RecurrentState, ...],
    x: Float[Array, "B T W"],
    lengths: tuple[Int[Array, "b"], ...],
) -> tuple[Float[Array, "B T W"], tuple[RecurrentState, ...]]:
    """Computes a layer with recurrent states.

    Args:
        states: its states before the tokens, of every group; donated.
        x: residual stream of new tokens of the rows of all groups; donated.
        lengths: number of these tokens of each row.

    Returns:
        The residual stream, and the states after the tokens.
    """
    x, new_states = flat.module(x, _concatenate(states), _concatenate(lengths))
    return constrain_to_batch(x, mesh), tuple(_split(new_states, [len(one) for one in lengths]))


def step_layers(
    groups: Sequence[Group],
    x: Float[Array, "B T W"],
    lengths: tuple[Int[Array, "b"], ...],
    step: Callable[..., Any] = step_layer,
) -> tuple[Float[Array, "B T W"], tuple[GenerationState, ...]]:
    """Computes the layers of new tokens.

    Args:
        x: embeddings of the tokens of all groups; donated.
        lengths: number of the tokens of each row.
        step: called in place of `step_layer`, with its arguments.

    Returns:
        The residual stream, and the states with new caches and recurrent states.
    """
    states = [group.state for group in groups]
    counters, positions = tuple(state.counters for state in states), tuple(state.positions for state in states)
    layers: list[tuple[kvjax.Cache, ...]] = []
    recurrent: list[tuple[RecurrentState, ...]] = []
    for of_groups in zip(*(group.split.layers for group in groups), strict=True):
        module = of_groups[0].module
        if of_groups[0].rotary is None:
            before = tuple(state.recurrent[len(recurrent)] for state in states)
            x, after = step_recurrent_layer(module, groups[0].split.mesh, before, x, lengths)
            recurrent.append(after)
            continue
        rotaries, caches = tuple(layer.rotary for layer in of_groups), tuple(one.layers[len(layers)] for one in states)
        prefixes = tuple(None if one.prefixes is None else one.prefixes[len(layers)] for one in groups)
        scorers = tuple(
            layer.scorer if cache.policy.requires.predicted_scores else None
            for layer, cache in zip(of_groups, caches, strict=True)
        )
        x, caches, new_counters = step(module, rotaries, caches, counters, x, positions, lengths, prefixes, scorers)
        layers.append(caches)
    # Every layer counts the same tokens; XLA computes the counters once.
    return x, tuple(
        dataclasses.replace(
            state,
            layers=tuple(one[group] for one in layers),
            recurrent=tuple(one[group] for one in recurrent),
            counters=new_counters[group],
        )
        for group, state in enumerate(states)
    )


@functools.partial(jax.jit, static_argnames=("mesh",))
def embed_tokens(outer: _Flat[Llama], mesh: Mesh | None, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
    """Returns the embeddings of tokens."""
    return constrain_to_batch(outer.module.embed(tokens), mesh)


@functools.partial(jax.jit, static_argnames=("mesh", "eos"), donate_argnames=("groups",))
def _sample_token(
    outer: _Flat[Llama], mesh: Mesh | None, eos: tuple[int, ...], groups: tuple[GenerationState, ...]
) -> tuple[tuple[GenerationState, ...], SampledTokens, Float[Array, "B 1 W"], tuple[Int[Array, "b"], ...]]:
    """Samples a token per running row; returns the rows, the tokens, their embeddings and their numbers."""
    new_groups, new_tokens, counts = [], [], []
    for rows in groups:
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
        new_groups.append(rows)
        new_tokens.append(sampled._replace(token=jnp.where(running, sampled.token, NO_TOKEN)))
        counts.append(running.astype(jnp.int32))
    sampled = _concatenate(new_tokens)
    x = constrain_to_batch(outer.module.embed(jnp.maximum(sampled.token, 0)[:, None]), mesh)
    return tuple(new_groups), sampled, x, tuple(counts)


@functools.partial(jax.jit, donate_argnames=("groups",))
def _next_logits(
    outer: _Flat[Llama],
    groups: tuple[GenerationState, ...],
    token: Int[Array, "B"],
    x: Float[Array, "B 1 W"],
    lengths: tuple[Int[Array, "b"], ...],
) -> tuple[GenerationState, ...]:
    """Returns the rows after a decode step, without caches and `done`."""
    sizes, new_groups = [len(one) for one in lengths], []
    parts = zip(groups, _split(outer.module.logits(x[:, 0]), sizes), _split(token, sizes), lengths, strict=True)
    for rows, logits, tokens, counts in parts:
        running = counts > 0
        new_groups.append(
            dataclasses.replace(
                rows,
                logits=jnp.where(running[:, None], logits, rows.logits),
                positions=rows.positions + counts,
                sampling=with_answer(rows.sampling, tokens, running),
                not_finite=rows.not_finite + (running & ~is_finite(logits)),
            )
        )
    return tuple(new_groups)


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
    embed_tokens,
    _sample_token,
    _next_logits,
    _last_logits,
    _token_scores,
)
