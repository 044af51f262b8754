"""`weighted_decode` on whatever the program runs on."""

import functools
from typing import Any, Literal

from jaxtyping import Array, Float

from pallas_kernels import packing
from pallas_kernels.dispatch import Kernel, dispatch
from pallas_kernels.weighted_decode import mosaic_gpu, mosaic_tpu, reference
from pallas_kernels.weighted_decode.base import Entries, Partials, bounds_of_rows

Implementation = Literal["xla", "mosaic_tpu", "mosaic_gpu"]


def weighted_decode(
    rows: Float[Array, "B H R D"],
    entries: Entries,
    *,
    logits: bool = False,
    implementation: Implementation | None = None,
    config: mosaic_tpu.Config | mosaic_gpu.GpuConfig | None = None,
    interpret: Any = False,
) -> Partials:
    """Both sums of attention of the rows of every kv head over its entries, in float32; see `reference`.

    Args:
        rows: queries that share a kv head: R of tokens times grouped heads.
        logits: give the denominator's logits, too: with the sums of all entries that a row attends to they tell how
            its attention falls on these, without a second reading of the keys.
        implementation: None: the kernel of the platform that the program is compiled for, where there is one and it can
            do this, XLA otherwise.
        config: of the kernel that it is made for; None: the default.
        interpret: of the kernel, as `pallas_call` takes it, or `plgpu.InterpretGPUParams`.

    Raises:
        ValueError: for shapes that do not fit, or an implementation that is not known.
        NotImplementedError: where the implementation that was asked for cannot do this, with the reason.
    """
    check(rows, entries)
    entries = bounds_of_rows(entries, rows.shape[2])
    settings: dict[str, Any] = {"interpret": interpret, "logits": logits}
    for_tpu = config if isinstance(config, mosaic_tpu.Config) else None
    for_gpu = config if isinstance(config, mosaic_gpu.GpuConfig) else None
    kernels = {
        "mosaic_tpu": Kernel(
            functools.partial(mosaic_tpu.weighted_decode, config=for_tpu, **settings), mosaic_tpu.check
        ),
        "mosaic_gpu": Kernel(
            functools.partial(mosaic_gpu.weighted_decode, config=for_gpu, **settings),
            functools.partial(mosaic_gpu.check, interpret=interpret),
        ),
    }
    in_xla = functools.partial(reference.weighted_decode, logits=logits)
    return dispatch(implementation, in_xla, kernels, rows, entries)


def check(rows: Float[Array, "B H R D"], entries: Entries) -> None:
    """Raises a ValueError where shapes do not fit."""
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
