"""A combinator that stores keys and values in eight bits, with a scale per slot and head."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.attention import attend, merge
from kvjax.policy import CachePolicy, Segments
from kvjax.recall import attend_recalled
from kvjax.segment import Segment, segment_bytes
from kvjax.state import map_fields, state


class Format(NamedTuple):
    """An eight-bit number format and the largest number that entries are scaled to."""

    dtype: Any
    largest: float


FORMATS = {"int8": Format(jnp.int8, 127.0), "fp8": Format(jnp.float8_e4m3fn, 448.0)}


@state
class Quantized:
    """A policy's cache with its entries in eight bits."""

    cache: Any  # the policy's own state, in whose entries' place the eight-bit numbers stand
    # The same state with nothing but float32 scales in the entries' place: [..., S, 1] for entries [..., S, D], and
    # [..., S, n] where n of them stand side by side.
    scales: Any


def quantized(policy: CachePolicy, storage: Literal["int8", "fp8"] = "int8") -> CachePolicy:
    """The policy with keys and values stored in eight bits where attention reads them in place: symmetric, with one
    float32 scale per slot and kv head, which attention folds into logits and weights. Staged tokens stay as they are.

    Prefill and compaction read the whole store, let the policy work on float32 entries, and store the result again.
    Entries that the policy leaves alone keep their bits: scales have 16 significant bits, so that their products with
    eight-bit numbers are exact in float32, and storing again finds the same scale. Per-layer policies may be inside or
    outside (`by_layer`); policies per kv head are to be outside (`by_head`).

    Bytes are those at rest. XLA:CPU has no products of eight-bit numbers with float32: it converts the keys once per
    compiled loop, to a float32 copy that lives as long as the loop, and the values at every step.

    Args:
        policy: any policy whose attention is attention over segments and no more.
        storage: "int8" for -127 ... 127 (GPU, TPU and CPU), "fp8" for float8_e4m3fn, with 3 bits of mantissa.

    Raises:
        ValueError: for an unknown storage, for a policy that computes more than attention over its segments, and (when
            it attends) for one that computes with its stored entries before attention reads them.
    """
    if storage not in FORMATS:
        raise ValueError(f"storage={storage!r}; known: {', '.join(FORMATS)}")
    if policy.segments is None:
        raise ValueError(
            f"quantized: {policy.name} does more than attend to its segments, which quantised storage cannot follow; "
            "choose another policy, or a variant of it that has segments"
        )
    dtype, largest = FORMATS[storage]
    name = f"quantized({policy.name}, {storage})"

    def store(cache: Any) -> Quantized:
        scales = map_fields(lambda field, x: _scale(x, field.side_by_side, largest) if field.entries else None, cache)
        shrink = lambda field, x, scale: _divide(x, scale, dtype) if field.entries else x  # noqa: E731
        return Quantized(map_fields(shrink, cache, scales), scales)

    def load(state: Quantized) -> Any:
        grow = lambda field, x, scale: x.astype(jnp.float32) * _spread(scale, x) if field.entries else x  # noqa: E731
        return map_fields(grow, state.cache, state.scales)

    def init(spec, row_keys):
        # Of zeros, as empty stores are, without the arithmetic: compiled, it would be done on constants of their size.
        cache = policy.init(spec, row_keys)
        zeros = lambda field, x: jnp.zeros(x.shape, dtype) if field.entries else x  # noqa: E731
        scales = lambda field, x: jnp.zeros((*x.shape[:-1], field.side_by_side)) if field.entries else None  # noqa: E731
        return Quantized(map_fields(zeros, cache), map_fields(scales, cache))

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        cache, shared = policy.prefill(load(state), keys, values, lengths, query_tail, shared)
        return store(cache), shared

    def segments(state: Quantized, query, causal=False) -> tuple[Segment, ...]:
        assert policy.segments is not None
        return scaled(policy.segments, state, query, causal)

    def scaled(shown: Segments, state: Quantized, query, causal) -> tuple[Segment, ...]:
        """What is shown of the entries, with what is shown of their scales."""
        of_scales = map_fields(lambda field, x, scale: scale if field.entries else x, state.cache, state.scales)
        pairs = zip(shown(state.cache, query, causal), shown(of_scales, query, causal), strict=True)
        return tuple(_scaled(one, scales, dtype, name) for one, scales in pairs)

    def attend_cache(state, query, causal=False):
        if policy.plan is None or query.shape[1] > 1:
            return attend(query, segments(state, query, causal)), state
        # Recalled blocks are read where they lie.
        window, plan = policy.plan
        found = plan(state.cache, query)
        partials = attend(query, (*scaled(window, state, query, causal), *found.rest))
        if found.block.shape[2]:
            store, scales = (part.selection.store for part in (state.cache, state.scales))
            partials = merge(partials, attend_recalled(query, store, found.block, found.tokens, scales=scales.entries))
        return partials, state

    def extend(state, *tokens):
        return dataclasses.replace(state, cache=policy.extend(state.cache, *tokens))

    def compact(state):
        return store(policy.compact(load(state)))

    def read_bytes(state):
        # The policy may read more than attention does: an index, sums of scores.
        assert policy.segments is not None
        beside = policy.read_bytes(state.cache) - segment_bytes(*policy.segments(state.cache, None))
        return beside + segment_bytes(*segments(state, None))

    return policy._replace(
        name=name,
        init=init,
        prefill=prefill,
        attend=attend_cache,
        extend=extend,
        compact=compact,
        read_bytes=read_bytes,
        segments=segments,
        plan=None,
    )


def _scale(x: Float[Array, "*A S n*D"], count: int, largest: float) -> Float[Array, "*A S n"]:
    """The scales at which the largest numbers of a slot's entries fit; of 16 significant bits."""
    parts = x.astype(jnp.float32).reshape(*x.shape[:-1], count, x.shape[-1] // count)  # there may be no slots
    peak = jnp.max(jnp.abs(parts), axis=-1)
    return jax.lax.reduce_precision(peak / largest, exponent_bits=8, mantissa_bits=15)


def _divide(x: Float[Array, "*A S n*D"], scale: Float[Array, "*A S n"], dtype: Any) -> Array:
    parts = x.astype(jnp.float32) / _spread(jnp.where(scale == 0, 1.0, scale), x)
    return (jnp.round(parts) if dtype == jnp.int8 else parts).astype(dtype)


def _spread(scale: Float[Array, "*A S n"], x: Float[Array, "*A S n*D"]) -> Float[Array, "*A S n*D"]:
    """Each entry's scale over its columns."""
    return jnp.repeat(scale, x.shape[-1] // scale.shape[-1], axis=-1)


def _scaled(one: Segment, scales: Segment, dtype: Any, name: str) -> Segment:
    """A segment of eight-bit entries with the scales that the same segment of scales holds."""

    def scale_of(entries: Array | None, found: Array | None) -> Array | None:
        # Scales are one wide; what is as wide as a head was not stored by this combinator.
        if entries is None or found is None or found.shape[-1] == entries.shape[-1]:
            return None
        if entries.dtype != dtype:
            raise ValueError(
                f"{name}: the policy computes with its stored entries before attention reads them "
                f"({entries.dtype} where {jnp.dtype(dtype).name} is stored), which loses their scales"
            )
        return found[..., 0]

    return dataclasses.replace(
        one, key_scale=scale_of(one.keys, scales.keys), value_scale=scale_of(one.values, scales.values)
    )
