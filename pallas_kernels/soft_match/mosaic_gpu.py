"""`soft_match` as a Pallas kernel for Hopper GPUs (Mosaic GPU); see `pallas_kernels.hopper`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import hopper
from pallas_kernels.batching import run_batched
from pallas_kernels.soft_match.oracle import MIN_SQUARED_NORM, Partners

DTYPES = ("float32", "bfloat16")
TILE = hopper.ROWS  # A keys, and B keys, that are multiplied at a time


def check(keys: Float[Array, "S D"], _num_keys: Int[Array, ""], *, chunk_size: int, interpret: Any) -> None:
    """Checks that the kernel supports the arguments of `soft_match`.

    Args:
        interpret: Whether the kernel is interpreted, on any device.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    if not interpret:
        hopper.check_device()
    if keys.dtype.name not in DTYPES:
        raise NotImplementedError(f"keys are {keys.dtype.name}; the Hopper kernel supports {', '.join(DTYPES)}")
    if chunk_size % 16 or chunk_size < 2 * TILE:
        raise NotImplementedError(
            f"chunk_size={chunk_size}; the Hopper kernel supports multiples of 16 of at least {2 * TILE}"
        )
    hopper.check_head_dim(keys.shape[1])
    hopper.choose_stages(lambda _: _scratch(keys.shape[1], keys.dtype), 1)


def soft_match(keys: Float[Array, "S D"], num_keys: Int[Array, ""], *, chunk_size: int, interpret: Any) -> Partners:
    """`xla.soft_match` by tiles of 64 A keys, each against the B keys of its chunk, 64 at a time.

    One warpgroup matches a tile. The tiles of a chunk share the chunk's B keys through the L2 cache.

    Args:
        keys: The keys of one head; those from `num_keys` on may be NaN.
        num_keys: The number of valid keys, int32.
        interpret: Passed to `plgpu.kernel`.

    Returns:
        The partners of the A keys.
    """
    run = functools.partial(_soft_match, chunk_size=chunk_size, interpret=interpret)
    return run_batched(run, keys, num_keys)


def _soft_match(keys: Float[Array, "B S D"], num_keys: Int[Array, "B"], *, chunk_size: int, interpret: Any) -> Partners:
    batch, slots, head_dim = keys.shape
    chunks, pairs = pl.cdiv(slots, chunk_size), chunk_size // 2
    tiles = pl.cdiv(pairs, TILE)
    # The copy engine needs multiples of eight pairs.
    pairwise = jnp.pad(keys, ((0, 0), (0, -slots % 16), (0, 0))).reshape(batch, -1, 2, head_dim)
    outputs = [jax.ShapeDtypeStruct((batch, chunks, tiles * TILE), dtype) for dtype in (jnp.float32, jnp.int32)]

    def soft_match(*refs, **scratch):
        _kernel(*refs, **scratch, chunk_size=chunk_size)

    results = hopper.launch(
        soft_match, (num_keys.astype(jnp.int32), pairwise), outputs, _scratch(head_dim, keys.dtype),
        grid={"tiles": tiles, "chunks": chunks, "batch": batch}, interpret=interpret,
        flops=2 * batch * chunks * pairs * pairs * head_dim, transcendentals=batch * slots,
    )  # fmt: skip
    return Partners(*(x[:, :, :pairs].reshape(batch, -1) for x in results))


def _scratch(head_dim: int, dtype: Any) -> dict[str, Any]:
    """Returns a program's shared memory."""
    operands = hopper.Operands.create(dtype, dtype)
    per_key = functools.partial(plgpu.SMEM, (TILE,))
    tile = functools.partial(hopper.blocked, dtype=operands.dtype)
    scratch = {
        "stored": hopper.blocked((TILE, head_dim), dtype),
        "a_keys": tile((operands.row_parts, TILE, head_dim)),
        "barrier": plgpu.Barrier(),
        "scale": per_key(jnp.float32),
        "cosine": per_key(jnp.float32),
        "partner": per_key(jnp.int32),
    }
    if not operands.is_direct:
        scratch["b_keys"] = tile((operands.stored_parts, TILE, head_dim))
    return scratch


def _kernel(
    num_keys_ref, keys_ref, cosine_ref, partner_ref,
    *, stored, a_keys, barrier, scale, cosine, partner, chunk_size, b_keys=None,
):  # fmt: skip
    """Matches a tile of A keys with the B keys of their chunk."""
    batch, chunk, tile = (lax.axis_index(name) for name in ("batch", "chunks", "tiles"))
    pairs = chunk_size // 2
    begin = chunk * pairs
    valid = jnp.minimum(num_keys_ref[batch] - chunk * chunk_size, chunk_size)
    operands = hopper.Operands.create(keys_ref.dtype, keys_ref.dtype)
    block_shape = (TILE, TILE)

    def fetch(step, odd):
        """Starts the copy of the tile `step` of the chunk's A keys, or of its B keys if `odd` is 1."""
        source = keys_ref.at[batch, pl.ds(begin + step * TILE, TILE), odd]
        plgpu.copy_gmem_to_smem(source, stored, barrier)

    fetch(tile, 0)
    plgpu.barrier_wait(barrier)
    a_scale = _inverse_norm(stored)
    hopper.as_operands(stored, a_keys, operands)
    plgpu.commit_smem()
    fetch(0, 1)

    def process_step(step, carry):
        """Returns the best cosine and partner, `carry`, updated by the tile of B keys of `step`."""
        best, best_index = carry
        plgpu.barrier_wait(barrier)
        scale[...] = _inverse_norm(stored)
        right = hopper.as_operands(stored, b_keys, operands)
        plgpu.commit_smem()
        if not operands.is_direct:
            pl.when(step + 1 < steps)(lambda: fetch(step + 1, 1))
        similarity = hopper.query_key_products(a_keys, right, operands)
        if operands.is_direct:
            pl.when(step + 1 < steps)(lambda: fetch(step + 1, 1))
        similarity = similarity * hopper.broadcast_slots(hopper.load(scale, hopper.SLOT_LAYOUT), block_shape)
        index = step * TILE + plgpu.broadcasted_iota(jnp.int32, block_shape, 1, layout=hopper.LAYOUT)
        # Rows and columns of missing keys may be NaN; they affect no others.
        similarity = jnp.where(2 * index + 1 < valid, similarity, -jnp.inf)
        highest, first = hopper.max_and_argmax(similarity, index)
        return jnp.maximum(best, highest), jnp.where(highest > best, first, best_index)

    steps = pl.cdiv(pairs, TILE)
    start = hopper.full_rows(-jnp.inf), hopper.full_rows(0.0)
    best, best_index = lax.fori_loop(0, steps, process_step, start)
    index = tile * TILE + plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=hopper.ROW_LAYOUT)
    cosine[...] = jnp.where(2 * index < valid, best * a_scale, -jnp.inf)
    partner[...] = best_index.astype(jnp.int32)
    plgpu.commit_smem()
    tile_slice = pl.ds(tile * TILE, TILE)
    plgpu.copy_smem_to_gmem(cosine, cosine_ref.at[batch, chunk, tile_slice])
    plgpu.copy_smem_to_gmem(partner, partner_ref.at[batch, chunk, tile_slice])
    plgpu.wait_smem_to_gmem(0)


def _inverse_norm(stored: Any) -> Float[Array, "64"]:
    """Returns 1 / norm of every row in shared memory."""
    x = hopper.load(stored, hopper.LAYOUT).astype(jnp.float32)
    return lax.rsqrt(jnp.maximum((x * x).sum(axis=1), MIN_SQUARED_NORM))
