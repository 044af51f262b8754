"""The state of a generation: a pytree with the caches of all layers, and functions that create, check and shard it.

Hybrid models have caches in layers with attention, and recurrent states of fixed size in the others. Both belong to the
rows of a state: they are taken, inserted, repeated, saved and sharded together. A recurrent state cannot be cut back to
an earlier token, so that a sequence can only be continued.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

import kvjax
from kvjax.distributed.sharding import shardings
from kvjax.messages import shorten
from kvjax.policy import Policy
from kvjax.quantization import KVDtype
from kvjax.state import count_row_faults, fault, row_randomness, state, static
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.recurrent import RecurrentSizes, RecurrentState
from kvjax_models.runner.sampling import RowSampling, is_finite, with_prompt
from kvjax_models.sharding import constrain_replicated, constrain_states, constrain_to_batch


@state
class GenerationState:
    """The state of a generation between two blocks.

    Rows are independent, so `kvjax.take_rows`, `kvjax.insert_rows` and `kvjax.repeat_rows` apply.

    Attributes:
        layers: one `kvjax.Cache` per layer with attention.
        counters: counters of all layers, which receive the same tokens and compact together.
        logits: logits of the next token, float32.
        positions: number of tokens of each sequence so far, int32.
        done: whether the sequence is finished.
        max_positions: number of tokens with which a sequence is finished, int32.
        sampling: parameters of sampling.
        sampling_keys: random keys of the next sample.
        not_finite: fault counter of steps whose logits were not finite.
        recurrent: the states of the other layers of a hybrid model.
        context_tokens: maximum number of tokens of a sequence, on which some rotary embeddings depend.
    """

    layers: tuple[Any, ...]
    counters: kvjax.Counters
    logits: Float[Array, "B V"]
    positions: Int[Array, "B"]
    done: Bool[Array, "B"]
    max_positions: Int[Array, "B"]
    sampling: RowSampling
    sampling_keys: Key[Array, "B"] = row_randomness()
    not_finite: Int[Array, "B"] = fault("steps had logits that are NaN or infinite")
    recurrent: tuple[RecurrentState, ...] = ()
    context_tokens: int = static(default=0)


def cache_specs(
    model: Llama,
    *,
    batch: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    streaming: bool = False,
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None,
    context_tokens: int | None = None,
) -> tuple[kvjax.CacheSpec, ...]:
    """Returns the cache spec of every layer with attention.

    Args:
        max_prompt_tokens: maximum length of the first prompt.
        max_new_tokens: maximum number of tokens after it.
        streaming: whether the prompt is appended in blocks; its tokens then count as new ones.
        kv_dtype: quantization format of the caches (`kvjax.CacheSpec.kv_dtype`).
        context_tokens: maximum number of tokens of a sequence, also outside these caches; by default their capacity.
    """
    config = model.config
    context_tokens = max_prompt_tokens + max_new_tokens if context_tokens is None else context_tokens
    if streaming:
        max_prompt_tokens, max_new_tokens = 1, max_prompt_tokens + max_new_tokens
    return tuple(
        kvjax.CacheSpec(
            batch=batch,
            query_heads=config.query_heads,
            kv_heads=config.of_layer(number).kv_heads,
            head_dim=config.of_layer(number).head_dim,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            dtype=model.embedding.param_dtype,
            kv_dtype=kv_dtype,
            window=config.window(number),
            logit_cap=config.attention.logit_cap,
            rope_frequencies=config.rotary(number, context_tokens).frequencies,
            layer=index,
            layers=len(config.attention_layers),
        )
        for index, number in enumerate(config.attention_layers)
    )


def init_layers(
    policies: tuple[Policy, ...],
    specs: tuple[kvjax.CacheSpec, ...],
    mesh: Mesh | None,
    seeds: Int[np.ndarray, "B 2"],
) -> Iterator[tuple[kvjax.Cache, kvjax.Counters]]:
    """Creates the empty caches of a state one by one; layers with equal caches share one compiled program.

    Args:
        policies: cache policy of every layer.
        specs: cache spec of every layer.
        seeds: seeds of the rows (`row_seeds`).

    Yields:
        Every layer's cache and counters.
    """
    for number, equal in enumerate(first_equal_layers(policies, specs, mesh)):
        # Its own policy, because equal caches may differ in data that `init` writes (the heads of a `ByHead`).
        yield _init_layer(policies[number], specs[equal], mesh, seeds, np.int32(number))


@functools.lru_cache(maxsize=64)
def first_equal_layers(
    policies: tuple[Policy, ...], specs: tuple[kvjax.CacheSpec, ...], mesh: Mesh | None
) -> tuple[int, ...]:
    """Returns for every layer the first layer whose empty cache has the same structure, static fields and shapes."""
    first: dict[Any, int] = {}
    numbers = []
    for number, (policy, spec) in enumerate(zip(policies, specs, strict=True)):
        init = functools.partial(_init_layer, policy, spec, mesh)
        shapes = jax.eval_shape(init, row_seeds(spec.batch, 0), np.int32(number))
        leaves, structure = jax.tree.flatten(shapes)
        numbers.append(first.setdefault((structure, tuple((x.shape, x.dtype) for x in leaves)), number))
    return tuple(numbers)


# Compiled so that every field gets its own buffer, which donation requires.
@functools.partial(jax.jit, static_argnames=("policy", "spec", "mesh"))
def _init_layer(
    policy: Policy, spec: kvjax.CacheSpec, mesh: Mesh | None, seeds: Int[Array, "B 2"], number: Int[Array, ""]
) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Returns the empty cache of layer `number` and its counters."""
    layer_keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(row_keys(seeds)[0])
    return kvjax.init(policy, spec, layer_keys, mesh)


def init_recurrent(
    config: LlamaConfig, batch: int, dtype: jax.typing.DTypeLike, mesh: Mesh | None = None
) -> tuple[RecurrentState, ...]:
    """Returns the recurrent states of sequences without tokens; () for models that are not hybrid."""
    if config.recurrence is None:
        return ()
    sizes = config.recurrence.sizes
    return tuple(_init_recurrent(sizes, batch, jnp.dtype(dtype), mesh) for _ in config.recurrence.layers)


@functools.partial(jax.jit, static_argnames=("sizes", "batch", "dtype", "mesh"))
def _init_recurrent(sizes: RecurrentSizes, batch: int, dtype: np.dtype, mesh: Mesh | None) -> RecurrentState:
    return constrain_states(sizes.init_state(batch, dtype), mesh)


@functools.partial(jax.jit, static_argnames=("vocab_size", "mesh"))
def init_rows(vocab_size: int, mesh: Mesh | None, seeds: Int[Array, "B 2"]) -> dict[str, Array]:
    """Returns the fields of an empty state that are not caches."""
    batch = seeds.shape[0]
    fields = {
        "logits": jnp.zeros((batch, vocab_size), jnp.float32),
        "positions": jnp.zeros(batch, jnp.int32),
        "done": jnp.zeros(batch, bool),
        "max_positions": jnp.full(batch, jnp.iinfo(jnp.int32).max),
        "sampling_keys": row_keys(seeds)[1],
        "not_finite": jnp.zeros(batch, jnp.int32),
    }
    if mesh is None:
        return fields
    return {
        name: (constrain_to_batch if name == "logits" else constrain_replicated)(field, mesh)
        for name, field in fields.items()
    }


def row_seeds(batch: int, seed: int | Sequence[int]) -> Int[np.ndarray, "B 2"]:
    """Returns the random state of every row: a seed and an index, uint32.

    Args:
        batch: number of rows.
        seed: one seed, with which rows differ in their index, or a seed for every row, which all have index 0: a row
            then has the random numbers that it would have alone.

    Raises:
        ValueError: if a seed is invalid, or there is not one per row.
    """
    if not isinstance(seed, list | tuple):
        return np.stack([np.full(batch, check_seed(seed)), np.arange(batch, dtype=np.uint32)], axis=1)
    if len(seed) != batch:
        raise ValueError(f"seed must have one value per row, got {len(seed)} for {batch} rows")
    return np.array([(check_seed(one), 0) for one in seed], np.uint32)


def row_keys(seeds: Int[Array | np.ndarray, "B 2"]) -> Key[Array, "2 B"]:
    """Returns the keys of every row's caches and of its sampling.

    Args:
        seeds: seeds of the rows (`row_seeds`).
    """
    rows = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed[0]), seed[1]))(jnp.asarray(seeds))
    return jax.vmap(jax.random.split, out_axes=1)(rows)


def check_seed(seed: Any) -> np.uint32:
    """Returns a seed as uint32; JAX would truncate larger integers silently.

    Raises:
        ValueError: if the seed is not an integer of 32 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={shorten(seed)} must be an integer from 0 to 2**32 - 1")
    return np.uint32(seed)


def finish_prefill(
    state: GenerationState,
    caches: Sequence[kvjax.Cache],
    counters: kvjax.Counters,
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B N"],
    lengths: Int[Array, "B"],
    recurrent: Sequence[RecurrentState],
    mesh: Mesh | None,
) -> GenerationState:
    """Returns the state after prefill, with its own buffers because decoding donates them.

    Args:
        state: state with empty caches.
        logits: logits after each prompt's last token.
        tokens: padded tokens of the prompts.
        recurrent: recurrent states after the prompts.

    Returns:
        The state in its sharding.

    Raises:
        ValueError: if the logits are not finite.
    """
    new_state = dataclasses.replace(
        state,
        layers=tuple(caches),
        recurrent=jax.tree.map(jnp.copy, tuple(recurrent)),
        counters=counters,
        logits=jnp.copy(logits),
        positions=jnp.copy(lengths),
        sampling=_with_prompt(state.sampling, tokens, lengths),
        not_finite=state.not_finite + ~is_finite(logits),
    )
    new_state = shard_state(new_state, mesh)
    check_finite(new_state)
    return new_state


_with_prompt = jax.jit(with_prompt, donate_argnames=("sampling",))


def compact_layers(state: GenerationState) -> GenerationState:
    """Returns the state with the staged tokens of all layers compacted."""
    compacted = [compact_layer(cache, state.counters) for cache in state.layers]
    counters = compacted[-1][1]
    return dataclasses.replace(state, layers=tuple(cache for cache, _ in compacted), counters=counters)


@functools.partial(jax.jit, donate_argnames=("cache",))
def compact_layer(cache: kvjax.Cache, counters: kvjax.Counters) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Compacts one layer's staged tokens.

    Args:
        cache: the layer's cache; donated.

    Returns:
        The cache, and the counters of all layers afterwards.
    """
    return kvjax.compact(cache, counters)


def check_finite(state: GenerationState) -> None:
    """Raises a ValueError if logits were NaN or infinite; reads a single counter, so it is cheap after every block."""
    if np.asarray(state.not_finite).any():
        kvjax.raise_faults(state)


def check_faults(state: GenerationState, mesh: Mesh | None) -> None:
    """Raises a ValueError if any fault counter is not zero."""
    if np.asarray(count_faults(state, mesh)).any():
        kvjax.raise_faults(state)


@functools.partial(jax.jit, static_argnames=("mesh",))
def count_faults(state: GenerationState, mesh: Mesh | None) -> Int[Array, "B"]:
    """Returns the sum of all fault counters per row."""
    faults = count_row_faults(state)
    assert faults is not None  # `not_finite` is a fault counter
    return constrain_replicated(faults, mesh)


def state_shardings(state: GenerationState, mesh: Mesh | None) -> GenerationState | None:
    """Returns the shardings of a state's arrays: caches and logits are sharded, other row values replicated.

    Args:
        mesh: mesh of the state; None gives None.
    """
    if mesh is None:
        return None
    replicated: Any = NamedSharding(mesh, PartitionSpec())
    names = ("positions", "done", "max_positions", "sampling_keys", "not_finite")
    sampling = jax.tree.map(lambda _: replicated, state.sampling)
    return dataclasses.replace(shardings(state, mesh), sampling=sampling, **dict.fromkeys(names, replicated))


def constrain_state(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """Returns the state constrained to its sharding, without which donated buffers could not be reused."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))


def shard_state(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """Returns the state in its sharding.

    Args:
        state: a state; donated on a mesh.
    """
    return state if mesh is None else _shard_on_mesh(state, mesh)


_shard_on_mesh = jax.jit(constrain_state, static_argnames=("mesh",), donate_argnames=("state",))


def commit_to_device(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """Returns the state committed to its device.

    Arrays in host memory are always committed, and so are all results of a program that takes them. If the remaining
    arrays were uncommitted at first, the second call would compile the same program again.
    """
    return state if mesh is not None else jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


PROGRAMS = (_init_layer, init_rows, _init_recurrent, compact_layer, count_faults, _shard_on_mesh)
