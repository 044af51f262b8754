"""The state of a generation."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

import kvjax
from kvjax.cache import with_counters
from kvjax.distributed.sharding import shardings
from kvjax.policy import Policy
from kvjax.state import count_row_faults, fault, row_randomness, state
from kvjax.stores.staging import Counters
from kvjax_models.generation.sampling import is_finite
from kvjax_models.sharding import constrain_replicated


@state
class GenerationState:
    """A generation between two blocks. Rows are independent: `kvjax.take_rows` and its kin apply."""

    layers: tuple[Any, ...]  # one `kvjax.Cache` per layer, without counters
    counters: Counters  # of all layers: they take in the same tokens and compact together
    logits: Float[Array, "B V"]  # float32, of the next token
    positions: Int[Array, "B"]  # int32, tokens read or written so far
    done: Bool[Array, "B"]  # whether the row has ended its turn
    sampling_keys: Key[Array, "B"] = row_randomness()
    not_finite: Int[Array, "B"] = fault("steps had logits that are NaN or infinite")


def finish_prefill(
    state: GenerationState,
    caches: Sequence[kvjax.Cache],
    counters: Counters,
    logits: Float[Array, "B V"],
    lengths: Int[Array, "B"],
) -> GenerationState:
    """A fresh state behind prompts that its caches have taken in, with buffers of its own: decoding donates them."""
    return dataclasses.replace(
        state,
        layers=tuple(caches),
        counters=counters,
        logits=jnp.copy(logits),
        positions=jnp.copy(lengths),
        not_finite=state.not_finite + ~is_finite(logits),
    )


def shard_state(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state where it is to lie on a mesh, looked over."""
    state = state if mesh is None else _laid(state, mesh)
    check_finite(state)
    return state


def state_shardings(state: GenerationState, mesh: Mesh | None) -> GenerationState | None:
    """Where a state lies on a mesh: caches and logits in parts, what every process must know of a row everywhere. None
    without a mesh."""
    if mesh is None:
        return None
    known: Any = NamedSharding(mesh, PartitionSpec())
    names = ("positions", "done", "sampling_keys", "not_finite")
    return dataclasses.replace(shardings(state, mesh), **dict.fromkeys(names, known))


def compact_layers(state: GenerationState) -> GenerationState:
    """The state with its layers' staged tokens compact_layers."""
    compacted = [compact_layer(cache, state.counters) for cache in state.layers]
    counters = compacted[-1][1]
    return dataclasses.replace(state, layers=tuple(cache for cache, _ in compacted), counters=counters)


def check_finite(state: GenerationState) -> None:
    """Raises a ValueError where logits were NaN or infinite. Asked after every block, so without a walk over all
    counters."""
    if np.asarray(state.not_finite).any():
        kvjax.raise_faults(state)


def check_faults(state: GenerationState, mesh: Mesh | None) -> None:
    """Raises a ValueError where any counter of faults is not zero; asked where blocks end."""
    if np.asarray(_faults(state, mesh)).any():
        kvjax.raise_faults(state)


@functools.partial(jax.jit, static_argnames=("mesh",))
def _faults(state: GenerationState, mesh: Mesh | None) -> Int[Array, "B"]:
    faults = count_row_faults(state)
    assert faults is not None  # `not_finite` is one
    return constrain_replicated(faults, mesh)


def _commit_to_device(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state bound to the device that it lies on. What lies in host memory always is, and binds all that a program
    makes together with it: if the rest came in unbound, the next call would compile the same program once more."""
    return state if mesh is not None else jax.device_put(state, jax.tree.map(lambda x: x.sharding, state))


def constrain_state(state: GenerationState, mesh: Mesh | None) -> GenerationState:
    """The state where it lay: donated buffers are of use only there."""
    return state if mesh is None else jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))


@functools.partial(jax.jit, static_argnames=("mesh",), donate_argnames=("state",))
def _laid(state: GenerationState, mesh: Mesh) -> GenerationState:
    return constrain_state(state, mesh)


# Compiled so that every field gets a buffer of its own; donation needs that.
@functools.partial(jax.jit, static_argnames=("policies", "specs", "vocabulary", "mesh"))
def _fresh(
    policies: tuple[Policy, ...],
    specs: tuple[kvjax.CacheSpec, ...],
    vocabulary: int,
    mesh: Mesh | None,
    seed: Int[Array, ""] | np.uint32,
) -> GenerationState:
    batch = specs[0].batch
    cache_keys, sampling_keys = _row_keys(batch, seed)
    layers = []
    for number, (policy, spec) in enumerate(zip(policies, specs, strict=True)):
        layer_keys = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(cache_keys)
        cache = kvjax.init(policy, spec, layer_keys, mesh)
        layers.append(with_counters(cache, None))
    return GenerationState(
        layers=tuple(layers),
        counters=cache.counters,
        logits=jnp.zeros((batch, vocabulary), jnp.float32),
        positions=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        sampling_keys=sampling_keys,
        not_finite=jnp.zeros(batch, jnp.int32),
    )


def _row_keys(batch: int, seed: Int[Array, ""] | np.uint32) -> Key[Array, "2 B"]:
    """Every row's keys of its caches, and those that it samples with."""
    rows = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(seed)))(jnp.arange(batch))
    return jax.vmap(jax.random.split, out_axes=1)(rows)


def _seed(seed: int) -> np.uint32:
    """A seed, checked: JAX would take larger ones for smaller."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}; it must be a whole number from 0 to 2^32 - 1")
    return np.uint32(seed)


@functools.partial(jax.jit, donate_argnames=("cache",))
def compact_layer(cache: kvjax.Cache, counters: Counters) -> tuple[kvjax.Cache, Counters]:
    """Compacts one layer's staged tokens. Returns the layer's cache and the counters of all layers afterwards."""
    cache = kvjax.compact(with_counters(cache, counters))
    return with_counters(cache, None), cache.counters
