"""The walk as Pallas kernels for TPU (Mosaic)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.balanced_walk.reference import EMPTY_DISTANCE, Block, Signs, ThinnedPairs
from pallas_kernels.batching import fold_mapped_axes

ROWS = 128  # of a matrix that are made at a time


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernels cut their work.

    Attributes:
        blocks_per_step: Blocks that are processed together, fewer if their matrices do not fit on chip. The decisions
            of one walk depend on each other; several walks hide the latency.
        vmem_bytes: On-chip memory that a kernel may use.
    """

    blocks_per_step: int = 16
    vmem_bytes: int = 48 * 2**20

    def __post_init__(self) -> None:
        if self.blocks_per_step < 1:
            raise ValueError(f"blocks_per_step={self.blocks_per_step}; it must be at least 1")


def check(block: Block, *_vectors: Array, config: TpuConfig, **_options: Any) -> None:
    """Raises a NotImplementedError for what the kernels cannot do, with the reason."""
    for name, array in {"keys": block.keys, "values": block.values}.items():
        if array is not None and array.dtype != jnp.float32:
            raise NotImplementedError(f"{name} are {array.dtype.name}; the TPU kernel takes float32")
    if not _fitting(block, config):
        raise NotImplementedError(f"the matrix of {block.keys.shape[-2]} entries does not fit on chip")


def assign_signs(
    block: Block,
    uniforms: Float[Array, "t"],
    gain: Float[Array, "t"],
    weight: Float[Array, "t"],
    *,
    config: TpuConfig,
    interpret: Any,
) -> Signs:
    """`reference.signs` with the matrix on chip."""
    entries = uniforms.shape[0]
    found = {"sign": (entries, jnp.float32), "clipped": (1, jnp.int32)}
    sign, clipped = _run(_signs_kernel, found, config, interpret, block, uniforms, gain, weight)
    return Signs(sign, clipped[0])


def thin_pairs(
    block: Block,
    uniforms: Float[Array, "h"],
    weights: Float[Array, "t"],
    gamma: Float[Array, ""],
    *,
    config: TpuConfig,
    interpret: Any,
) -> ThinnedPairs:
    """`reference.pairs` with the matrix on chip."""
    made = uniforms.shape[0]
    found = {"kept": (made, jnp.int32), "weight": (made, jnp.float32), "clipped": (1, jnp.int32)}
    kept, weight, clipped = _run(_pairs_kernel, found, config, interpret, block, uniforms, weights, gamma[None])
    return ThinnedPairs(kept, weight, clipped[0])


def _fitting(block: Block, config: TpuConfig) -> int:
    """How many blocks fit side by side; a power of two, as tiles of few sublanes are."""
    entries = block.keys.shape[-2]
    whole = lambda size: -(-size // 128) * 128  # noqa: E731
    dims = sum(whole(x.shape[-1]) for x in (block.keys, block.values) if x is not None)
    # A matrix, its entries in two buffers, and the rows that are being made.
    room = config.vmem_bytes - 12 * ROWS * whole(entries)
    fitting = min(config.blocks_per_step, room // (4 * entries * (whole(entries) + 2 * dims)))
    return 1 << fitting.bit_length() - 1 if fitting > 0 else 0


def _run(
    kernel: Callable[..., None],
    found: dict[str, tuple[int, Any]],
    config: TpuConfig,
    interpret: Any,
    block: Block,
    *vectors: Float[Array, "n"],
) -> list[Array]:
    """Runs a kernel on one block; under `jax.vmap` once on all of them."""
    constants = jnp.stack([block.factor, block.shift, block.offset]).astype(jnp.float32)
    stores = [x for x in (block.keys, block.values) if x is not None]
    arrays = [constants, *(vector.astype(jnp.float32) for vector in vectors), *stores]

    def of_blocks(*arrays: Array) -> list[Array]:
        blocks, entries = arrays[0].shape[0], block.keys.shape[0]
        fitting = min(_fitting(block, config), pl.next_power_of_2(blocks))
        steps = pl.cdiv(blocks, fitting)

        def in_steps(x: Array) -> Array:
            # Where the last step holds fewer blocks, entries of zero take their place.
            x = jnp.pad(x, ((0, steps * fitting - blocks), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(steps, fitting, *x.shape[1:])

        def spec(*shape: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, fitting, *shape), lambda i: (i, 0, *(0 for _ in shape)))

        results = pl.pallas_call(
            functools.partial(kernel, stores=len(stores)),
            grid=(steps,),
            in_specs=[spec(*x.shape[1:]) for x in arrays],
            out_specs=[spec(size) for size, _ in found.values()],
            out_shape=[jax.ShapeDtypeStruct((steps, fitting, size), dtype) for size, dtype in found.values()],
            # Row i of all matrices lies side by side: one load, with blocks as sublanes.
            scratch_shapes=[pltpu.VMEM((entries, fitting, entries), jnp.float32)],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",), vmem_limit_bytes=config.vmem_bytes + 16 * 2**20
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * blocks * entries * entries * sum(x.shape[-1] for x in stores),
                bytes_accessed=4 * sum(x.size for x in arrays),
                transcendentals=blocks * entries * entries,
            ),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(*map(in_steps, arrays))
        return [x.reshape(-1, x.shape[2])[:blocks] for x in results]

    return [x[0] for x in fold_mapped_axes(of_blocks)(*(x[None] for x in arrays))]


def _make(matrix_ref, constants_ref, stores) -> None:
    """Writes the matrices of all blocks, some rows at a time."""
    entries, blocks, _ = matrix_ref.shape
    rows = min(ROWS, entries)

    def product(store_ref, number, start):
        return jax.lax.dot_general(
            store_ref[number, pl.ds(start, rows), :],
            store_ref[number],
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def one(step, _):
        # The last rows may be made twice.
        start = jnp.minimum(step * rows, entries - rows)
        for number in range(blocks):
            factor, shift, offset = (constants_ref[number : number + 1, i : i + 1] for i in range(3))
            kernel = jnp.exp(factor * product(stores[0], number, start) - shift)
            if len(stores) == 2:
                kernel = kernel * (product(stores[1], number, start) + offset)
            matrix_ref[pl.ds(start, rows), number, :] = kernel
        return 0

    jax.lax.fori_loop(0, pl.cdiv(entries, rows), one, 0)


def _signs_kernel(constants_ref, uniforms_ref, gain_ref, weight_ref, *refs, stores):
    store_refs, (sign_ref, clipped_ref, matrix_ref) = refs[:stores], refs[stores:]
    _make(matrix_ref, constants_ref, store_refs)
    uniforms, gain, weight = uniforms_ref[...], gain_ref[...], weight_ref[...]
    places = jax.lax.broadcasted_iota(jnp.int32, uniforms.shape, 1)

    def decide(place, carry):
        sums, signs, clipped = carry
        here = places == place
        tilt = _pick(gain * sums, here)
        sign = jnp.where(_pick(uniforms, here) < 0.5 - tilt, 1.0, -1.0)
        sums = sums + sign * _pick(weight, here) * matrix_ref[place]
        return sums, jnp.where(here, sign, signs), clipped + (jnp.abs(tilt) > 0.5).astype(jnp.int32)

    nothing = jnp.zeros_like(uniforms)
    none = jnp.zeros(clipped_ref.shape, jnp.int32)
    _, sign_ref[...], clipped_ref[...] = jax.lax.fori_loop(0, uniforms.shape[1], decide, (nothing, nothing, none))


def _pairs_kernel(constants_ref, uniforms_ref, weights_ref, gamma_ref, *refs, stores):
    store_refs, (kept_ref, weight_ref, clipped_ref, matrix_ref) = refs[:stores], refs[stores:]
    _make(matrix_ref, constants_ref, store_refs)
    uniforms, weights, gamma = uniforms_ref[...], weights_ref[...], gamma_ref[...]
    blocks, entries = weights.shape
    places = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    number = jax.lax.broadcasted_iota(jnp.int32, uniforms.shape, 1)
    present = weights > 0
    turn = jnp.where(present, places, places + entries)  # empty places come last
    scale = weights / jnp.maximum(jnp.max(weights, axis=1, keepdims=True), 1e-30)

    def diagonal(place, own):
        return jnp.where(places == place, matrix_ref[place], own)

    own = jax.lax.fori_loop(0, entries, diagonal, jnp.zeros_like(weights))
    least = 1e-6 * jnp.max(own, axis=1, keepdims=True) + 1e-30

    def rows(place):
        """Every block's own row of its matrix."""
        block = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 0)
        found = matrix_ref[place[0, 0]]
        for other in range(1, blocks):
            found = jnp.where(block == other, matrix_ref[place[other, 0]], found)
        return found

    def decide(step, carry):
        free, sums, kept, weight, clipped = carry
        first = jnp.min(jnp.where(free != 0, turn, 2 * entries), axis=1, keepdims=True)
        first = jnp.where(first >= entries, first - entries, first)
        at_first = places == first
        free = jnp.where(at_first, 0, free)
        row = rows(first)
        away = jnp.where(free != 0, jnp.where(present, own - 2 * row, EMPTY_DISTANCE), jnp.inf)
        nearest = away == jnp.min(away, axis=1, keepdims=True)
        second = jnp.min(jnp.where(nearest, places, entries - 1), axis=1, keepdims=True)
        at_second = places == second
        of_first, of_second = _pick(weights, at_first), _pick(weights, at_second)
        total = of_first + of_second
        share = jnp.where(total > 0, of_first / jnp.maximum(total, 1e-30), 0.5)
        apart = _pick(own, at_first) + _pick(own - 2 * row, at_second)
        turned = _pick(sums, at_first) - _pick(sums, at_second)
        tilt = 4 * share * (1 - share) * gamma * turned / jnp.maximum(apart, least)
        here = number == step
        stays_first = _pick(uniforms, here) < share - tilt
        change = jnp.where(stays_first, _pick(scale, at_second), -_pick(scale, at_first))
        return (
            jnp.where(at_second, 0, free),
            sums + change * (row - rows(second)),
            jnp.where(here, jnp.where(stays_first, first, second), kept),
            jnp.where(here, total, weight),
            clipped + (jnp.abs(share - tilt - 0.5) > 0.5).astype(jnp.int32),
        )

    start = (
        jnp.ones(weights.shape, jnp.int32),
        jnp.zeros_like(weights),
        jnp.zeros(uniforms.shape, jnp.int32),
        jnp.zeros_like(uniforms),
        jnp.zeros(clipped_ref.shape, jnp.int32),
    )
    _, _, kept_ref[...], weight_ref[...], clipped_ref[...] = jax.lax.fori_loop(0, uniforms.shape[1], decide, start)


def _pick(x: Float[Array, "b t"], here: Any) -> Float[Array, "b 1"]:
    """The number at the one place of each row that is marked."""
    return jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True)
