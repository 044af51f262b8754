"""Attention of a few queries to weighted entries: logits, weights and both sums in one pass over keys and values."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float

from pallas_kernels.dispatch import Implementation, applicable, select
from pallas_kernels.hopper import GpuConfig as GpuConfig
from pallas_kernels.partials import MASK_VALUE as MASK_VALUE
from pallas_kernels.partials import Partials as Partials
from pallas_kernels.partials import finite_max as finite_max
from pallas_kernels.partials import merge_partials as merge_partials
from pallas_kernels.weighted_decode import mosaic_gpu, mosaic_tpu, oracle, xla
from pallas_kernels.weighted_decode.entries import COMPUTE_BOUND_QUERIES as COMPUTE_BOUND_QUERIES
from pallas_kernels.weighted_decode.entries import SLOT_TILE as SLOT_TILE
from pallas_kernels.weighted_decode.entries import Entries as Entries
from pallas_kernels.weighted_decode.entries import prepare
from pallas_kernels.weighted_decode.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.weighted_decode.xla import SLOT_BLOCK as SLOT_BLOCK


def _part_by_part(attend: Callable[..., Partials], parts: Sequence[tuple[Any, ...]], **options: Any) -> list[Partials]:
    """Returns the partials of every part by an implementation that takes one."""
    return [attend(*part, **options) for part in parts]


_TPU, _XLA, _ORACLE = (functools.partial(_part_by_part, one.weighted_decode) for one in (mosaic_tpu, xla, oracle))

IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", _TPU, ("tpu",), mosaic_tpu.check, TpuConfig, is_kernel=True),
    Implementation("mosaic_gpu", mosaic_gpu.weighted_decode, ("cuda",), mosaic_gpu.check, GpuConfig, is_kernel=True),
    Implementation("xla", _XLA),
    Implementation("oracle", _ORACLE),
)


def weighted_decode(queries: Float[Array, "B H R D"], *stores: Entries, **options: Any) -> Partials:
    """Computes partials of attention of queries to the entries of all stores.

    Args:
        queries: The R queries of each KV head: tokens times grouped query heads.
        *stores: One or more sets of entries, whose union is attended to.
        **options: `logits` (for one store only), `implementation`, `config` and `interpret` of `weighted_decode_many`.

    Returns:
        Partials over the union of the entries, float32.
    """
    return weighted_decode_many([(queries, *stores)], **options)[0]


def weighted_decode_many(
    parts: Sequence[tuple[Any, ...]],
    *,
    logits: bool = False,
    implementation: str | None = None,
    config: TpuConfig | GpuConfig | None = None,
    interpret: Any = False,
) -> list[Partials]:
    """Computes `weighted_decode` of several sets of queries, each with its stores.

    On a TPU every part is one kernel launch. On a GPU, parts with the same shapes and dtypes of queries and the same
    storage format share a launch. Raises NotImplementedError if a requested kernel does not support a part.

    Args:
        parts: Tuples (queries, *stores), with the arguments of `weighted_decode`.
        logits: Whether to return logits; every part must then have one store.
        implementation: A name in `IMPLEMENTATIONS`, or None for the first one that applies to each part.
        config: The configuration of the implementation that it belongs to; None for the defaults.
        interpret: Passed to `pallas_call` or `plgpu.kernel`.

    Returns:
        The partials of every part, float32.

    Raises:
        ValueError: If shapes do not match, logits of several stores are requested, or the implementation is unknown.
    """
    for queries, *stores in parts:
        _check_shapes(queries, *stores)
        if logits and len(stores) > 1:
            raise ValueError(f"logits=True with {len(stores)} stores; pass each store as a part")
    parts = [(queries, *(prepare(entries, queries.shape[2]) for entries in stores)) for queries, *stores in parts]

    options: Any = {"config": config, "interpret": interpret, "static": {"logits": logits}}
    groups: dict[tuple[Implementation, ...], list[int]] = {}
    for index, (queries, *stores) in enumerate(parts):
        first, *others = (
            applicable("weighted_decode", IMPLEMENTATIONS, implementation, queries, entries, **options)
            for entries in stores
        )
        groups.setdefault(tuple(one for one in first if all(one in other for other in others)), []).append(index)
    results: dict[int, Partials] = {}
    for implementations, indices in groups.items():
        partials = select(implementations, **options)([parts[i] for i in indices])
        results |= zip(indices, partials, strict=True)
    return [results[i] for i in range(len(parts))]


def _check_shapes(queries: Float[Array, "B H R D"], *stores: Entries) -> None:
    if not stores:
        raise ValueError("weighted_decode got queries without entries; pass at least one store")
    batch, heads, count, head_dim = queries.shape
    for entries in stores:
        per_slot = (batch, heads, entries.slots)
        expected = {"keys": (*per_slot, head_dim), "values": (*per_slot, entries.value_dim)}
        arrays = {**entries.slot_arrays, "keys": entries.keys, "values": entries.values}
        for name, array in arrays.items():
            if array is not None and array.shape != (shape := expected.get(name, per_slot)):
                raise ValueError(f"{name} has shape {array.shape}; for queries of {queries.shape} it must be {shape}")
        for name, bound in {"start": entries.start, "stop": entries.stop}.items():
            if bound is None:
                continue
            if bound.shape[:1] != (batch,) or bound.ndim > 2 or (bound.ndim == 2 and count % bound.shape[1]):
                raise ValueError(f"{name} has shape {bound.shape}; it must be [B] or [B, T], where T divides R={count}")
    if len({entries.key_dim if entries.value_dim is None else entries.value_dim for entries in stores}) > 1:
        raise ValueError("the values of all stores must have the same dimension")
