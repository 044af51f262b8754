"""`weighted_decode` on whatever the program runs on."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Array, Float

from pallas_kernels import packing
from pallas_kernels.dispatch import Kernel, dispatch_parts
from pallas_kernels.weighted_decode import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.weighted_decode.base import Entries, Partials, bounds_of_rows

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]
# Rows, and the stores whose entries they read, one at least.
Part = tuple[Any, ...]


def weighted_decode(
    rows: Float[Array, "B H R D"],
    *stores: Entries,
    logits: bool = False,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | mosaic_gpu.GpuConfig | None = None,
    interpret: Any = False,
) -> Partials:
    """Both sums of attention of the rows of every kv head over its entries in all stores, in float32; see
    `weighted_decode_parts`."""
    options: Any = {"logits": logits, "implementation": implementation, "config": config, "interpret": interpret}
    return weighted_decode_parts([(rows, *stores)], **options)[0]


def weighted_decode_parts(
    parts: Sequence[Part],
    *,
    logits: bool = False,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | mosaic_gpu.GpuConfig | None = None,
    interpret: Any = False,
) -> list[Partials]:
    """Both sums of attention of the rows of every kv head over its entries, in float32, of every part by itself; see
    `reference`. On a TPU a part is one launch, on a GPU all that is stored alike shares one.

    Args:
        parts: rows, [B, H, R, D], and the entries that they read, of one store or of several, which count as one. Rows
            are the queries that share a kv head: R of tokens times grouped heads.
        logits: where every part has one store, give the denominator's logits, too: with the sums of all entries that a
            row attends to they tell how its attention falls on these, without a second reading of the keys.
        implementation: None: the kernel of the platform that the program is compiled for, for the parts that it can
            do, XLA for the others.
        config: of the kernel that it is made for; None: the default.
        interpret: of the kernel, as `pallas_call` takes it, or `plgpu.InterpretGPUParams`.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    for part in parts:
        check(*part)
        if logits and len(part) > 2:
            raise ValueError(f"logits of {len(part) - 1} stores together; give each a part of its own")
    parts = [(rows, *(bounds_of_rows(entries, rows.shape[2]) for entries in stores)) for rows, *stores in parts]
    settings: dict[str, Any] = {"interpret": interpret, "logits": logits}
    for_tpu = config if isinstance(config, mosaic_tpu.Config) else None
    for_gpu = config if isinstance(config, mosaic_gpu.GpuConfig) else None

    def on_tpu(*parts: Part) -> list[Partials]:
        return [mosaic_tpu.weighted_decode(*part, config=for_tpu, **settings) for part in parts]

    def on_gpu(*parts: Part) -> list[Partials]:
        return mosaic_gpu.weighted_decode(parts, config=for_gpu, **settings)

    def in_xla(*parts: Part) -> list[Partials]:
        return [reference.weighted_decode(*part, logits=logits) for part in parts]

    kernels = {
        "mosaic_tpu": Kernel(on_tpu, mosaic_tpu.check),
        "mosaic_gpu": Kernel(on_gpu, functools.partial(mosaic_gpu.check, interpret=interpret)),
    }
    return dispatch_parts("weighted_decode", implementation, in_xla, kernels, *parts)


def check(rows: Float[Array, "B H R D"], *stores: Entries) -> None:
    """Raises a ValueError where shapes do not fit."""
    if not stores:
        raise ValueError("there are rows and no entries; give one store at least")
    for entries in stores:
        _check_store(rows, entries)
    if len({entries.key_dim if entries.value_dim is None else entries.value_dim for entries in stores}) > 1:
        raise ValueError("values of stores that count as one differ in their dimensions")


def _check_store(rows: Float[Array, "B H R D"], entries: Entries) -> None:
    batch, heads, count, head_dim = rows.shape
    slots = entries.keys.shape[2]
    wanted: dict[str, tuple[tuple[int, ...], ...]] = {
        "keys": ((batch, heads, slots, packing.packed_width(head_dim, entries.key_bits)),),
        **dict.fromkeys(("log_num", "log_den", "key_scale", "value_scale"), ((batch, heads, slots),)),
    }
    for name, shapes in wanted.items():
        given = getattr(entries, name)
        if given is not None and given.shape not in shapes:
            raise ValueError(f"{name} has shape {given.shape}; with rows {rows.shape} it must be {shapes[0]}")
    for name in ("start", "stop"):
        bound = getattr(entries, name)
        if bound is not None and (
            bound.shape[:1] != (batch,) or bound.ndim > 2 or count % bound.shape[-1] * (bound.ndim - 1)
        ):
            raise ValueError(
                f"{name} has shape {bound.shape}; with rows {rows.shape} it must be [B] or [B, T], T dividing R"
            )
    if entries.values is not None and (entries.values.ndim != 4 or entries.values.shape[:3] != (batch, heads, slots)):
        raise ValueError(f"values has shape {entries.values.shape}; it must be [B, H, S, D_v], {(batch, heads, slots)}")
    if entries.feeds not in ("both", "numerator", "denominator"):
        raise ValueError(f"feeds={entries.feeds!r}; it must be 'both', 'numerator' or 'denominator'")
    if entries.values is None and entries.feeds != "denominator":
        raise ValueError(f"entries that feed {entries.feeds!r} need values")
