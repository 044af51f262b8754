"""The search for partners as a Pallas kernel for Hopper GPUs (Mosaic GPU), in the way of `pallas_kernels.hopper`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.batching import fold_mapped_axes
from pallas_kernels.soft_match.base import Partners
from pallas_kernels.soft_match.reference import LEAST_SQUARE

TYPES = ("float32", "bfloat16")
TILE = hopper.ROWS  # entries of either kind that are multiplied at a time


def check(keys: Float[Array, "S D"], count: Int[Array, ""], *, chunk: int, interpret: Any = False) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    if not interpret:
        hopper.check_device()
    if keys.dtype.name not in TYPES:
        raise NotImplementedError(f"keys are {keys.dtype.name}; the Hopper kernel takes {', '.join(TYPES)}")
    if chunk % 16 or chunk < 2 * TILE:
        raise NotImplementedError(f"chunk={chunk}: the Hopper kernel takes multiples of 16 from {2 * TILE} on")
    hopper.check_head_dim(keys.shape[1])
    hopper.roomiest(lambda _: _scratch(keys.shape[1], keys.dtype), 1)


def soft_match(keys: Float[Array, "S D"], count: Int[Array, ""], *, chunk: int, interpret: Any = False) -> Partners:
    """`reference.soft_match` by tiles of 64 A entries, each against the B entries of its chunk, 64 at a time.

    A tile's partners are sought by one warpgroup; those of one chunk share what they read through the second cache.
    """
    run = fold_mapped_axes(functools.partial(_soft_match, chunk=chunk, interpret=interpret))
    return jax.tree.map(lambda x: x[0], run(keys[None], count[None]))


def _soft_match(keys: Float[Array, "B S D"], count: Int[Array, "B"], *, chunk: int, interpret: Any) -> Partners:
    batch, slots, head_dim = keys.shape
    chunks, pairs = pl.cdiv(slots, chunk), chunk // 2
    tiles = pl.cdiv(pairs, TILE)
    # The copy engine takes multiples of eight pairs.
    pairwise = jnp.pad(keys, ((0, 0), (0, -slots % 16), (0, 0))).reshape(batch, -1, 2, head_dim)
    found = jax.ShapeDtypeStruct((batch, chunks, tiles * TILE), jnp.float32)

    def soft_match(*refs, **scratch):
        _kernel(*refs, **scratch, chunk=chunk)

    cosine, place = plgpu.kernel(
        soft_match,
        out_type=[found, jax.ShapeDtypeStruct(found.shape, jnp.int32)],
        scratch_types=_scratch(head_dim, keys.dtype),
        grid=(tiles, chunks, batch),
        grid_names=("tiles", "chunks", "batch"),
        compiler_params=plgpu.CompilerParams(),
        interpret=interpret,
        **hopper.cost(
            flops=2 * batch * chunks * pairs * pairs * head_dim,
            bytes_accessed=keys.size * keys.dtype.itemsize + 2 * batch * chunks * pairs * 4,
            transcendentals=batch * slots,
        ),
    )(count.astype(jnp.int32), pairwise)
    return Partners(*(x[:, :, :pairs].reshape(batch, -1) for x in (cosine, place)))


def _scratch(head_dim: int, dtype: Any) -> dict[str, Any]:
    operands = hopper.Operands.of(dtype, dtype)
    of_tile = functools.partial(plgpu.SMEM, (TILE,))
    tile = functools.partial(hopper.blocked, dtype=operands.dtype)
    scratch = {
        "stored": hopper.blocked((TILE, head_dim), dtype),
        "sought": tile((operands.row_parts, TILE, head_dim)),
        "came": plgpu.Barrier(),
        "scale": of_tile(jnp.float32),
        "cosine": of_tile(jnp.float32),
        "place": of_tile(jnp.int32),
    }
    if not operands.direct:
        scratch["offered"] = tile((operands.stored_parts, TILE, head_dim))
    return scratch


def _kernel(
    count_ref, keys_ref, cosine_ref, place_ref, *, stored, sought, came, scale, cosine, place, chunk, offered=None
):
    """A tile of A entries against their chunk's B entries."""
    batch, number, tile = (lax.axis_index(name) for name in ("batch", "chunks", "tiles"))
    pairs = chunk // 2
    begin = number * pairs
    left = jnp.minimum(count_ref[batch] - number * chunk, chunk)  # keys of the chunk that are there
    operands = hopper.Operands.of(keys_ref.dtype, keys_ref.dtype)
    in_two = (TILE, TILE)

    def fetch(step, odd):
        entries = keys_ref.at[batch, pl.ds(begin + step * TILE, TILE), odd]
        plgpu.copy_gmem_to_smem(entries, stored, came)

    fetch(tile, 0)
    plgpu.barrier_wait(came)
    of_sought = _one_over_norm(stored)
    hopper.as_operands(stored, sought, operands)
    plgpu.commit_smem()
    fetch(0, 1)

    def step(step, carry):
        best, nearest = carry
        plgpu.barrier_wait(came)
        scale[...] = _one_over_norm(stored)
        right = hopper.as_operands(stored, offered, operands)
        plgpu.commit_smem()
        if not operands.direct:
            pl.when(step + 1 < steps)(lambda: fetch(step + 1, 1))
        similarity = hopper.logits(sought, right, operands)
        if operands.direct:
            pl.when(step + 1 < steps)(lambda: fetch(step + 1, 1))
        similarity = similarity * hopper.of_slots(hopper.load(scale, hopper.OF_SLOTS), in_two)
        entry = step * TILE + plgpu.broadcasted_iota(jnp.int32, in_two, 1, layout=hopper.LAYOUT)
        # What is not there may be NaN: it stays in rows and columns of its own.
        similarity = jnp.where(2 * entry + 1 < left, similarity, -jnp.inf)
        highest, first = hopper.first_highest(similarity, entry)
        return jnp.maximum(best, highest), jnp.where(highest > best, first, nearest)

    steps = pl.cdiv(pairs, TILE)
    constant = lambda x: plgpu.layout_cast(jnp.full((TILE,), x, jnp.float32), hopper.OF_ROWS)  # noqa: E731
    best, nearest = lax.fori_loop(0, steps, step, (constant(-jnp.inf), constant(0.0)))
    entry = tile * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=hopper.OF_ROWS)
    cosine[...] = jnp.where(2 * entry < left, best * of_sought, -jnp.inf)
    place[...] = nearest.astype(jnp.int32)
    plgpu.commit_smem()
    here = pl.ds(tile * TILE, TILE)
    plgpu.copy_smem_to_gmem(cosine, cosine_ref.at[batch, number, here])
    plgpu.copy_smem_to_gmem(place, place_ref.at[batch, number, here])
    plgpu.wait_smem_to_gmem(0)


def _one_over_norm(stored: Any) -> Float[Array, "64"]:
    """Of every row in shared memory."""
    x = hopper.load(stored, hopper.LAYOUT).astype(jnp.float32)
    return lax.rsqrt(jnp.maximum((x * x).sum(axis=1), LEAST_SQUARE))
