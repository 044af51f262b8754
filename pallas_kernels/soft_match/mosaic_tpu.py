"""`soft_match` as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.dispatch import check_config
from pallas_kernels.soft_match.oracle import MIN_SQUARED_NORM, Partners
from pallas_kernels.tpu import dot, launch

DTYPES = ("float32", "bfloat16")
LANES = 128
# The similarities of a chunk are (chunk_size / 2)**2 float32 numbers: 4 MiB, of which a few copies are on chip.
MAX_CHUNK_SIZE = 2048


@dataclasses.dataclass(frozen=True)
class TpuConfig:
    """How the kernel divides its work.

    Attributes:
        block_keys: Keys per step of the pipeline, rounded down to chunks; at least one chunk is read.
    """

    block_keys: int = 2048

    def __post_init__(self) -> None:
        check_config(self, block_keys=1)


def check(keys: Float[Array, "S D"], _num_keys: Int[Array, ""], *, chunk_size: int, **_options: Any) -> None:
    """Checks that the kernel supports the arguments of `soft_match`.

    Raises:
        NotImplementedError: If the kernel does not support them.
    """
    if keys.dtype.name not in DTYPES:
        raise NotImplementedError(f"keys are {keys.dtype.name}; the TPU kernel supports {', '.join(DTYPES)}")
    head_dim = keys.shape[1]
    if head_dim > LANES and head_dim % LANES:
        raise NotImplementedError(f"keys have {head_dim} dimensions; above {LANES} a multiple of it is required")
    if chunk_size > MAX_CHUNK_SIZE:
        raise NotImplementedError(f"chunk_size={chunk_size}; the similarities of {MAX_CHUNK_SIZE} keys fit on chip")


def soft_match(
    keys: Float[Array, "S D"], num_keys: Int[Array, ""], *, chunk_size: int, config: TpuConfig, interpret: Any
) -> Partners:
    """`xla.soft_match` that reads every key once. A step processes several chunks, one after the other.

    Args:
        keys: The keys of one head; those from `num_keys` on may be NaN.
        num_keys: The number of valid keys, int32.
        config: How to divide the work.
        interpret: Passed to `pallas_call`.

    Returns:
        The partners of the A keys.
    """
    slots, head_dim = keys.shape
    chunks, pairs = pl.cdiv(slots, chunk_size), chunk_size // 2
    # Blocks consist of tiles of eight keys.
    min_chunks = 8 // math.gcd(8, chunk_size)
    step_chunks = min_chunks * max(1, min(config.block_keys, slots) // (min_chunks * chunk_size))
    block = step_chunks * chunk_size
    if slots < block:
        keys = jnp.pad(keys, ((0, block - slots), (0, 0)))
    # Strided loads of every other row need rows of 32-bit numbers that are at most one tile wide.
    is_strided = keys.dtype == jnp.float32 and head_dim <= LANES
    column_tiles = (pl.cdiv(head_dim, LANES), block, min(head_dim, LANES))
    num_keys_spec = pl.BlockSpec((1, 1), lambda i: (0, 0), memory_space=pltpu.SMEM)
    key_spec = pl.BlockSpec((block, head_dim), lambda i: (i, 0))
    pair_spec = pl.BlockSpec((step_chunks, 1, pairs), lambda i: (i, 0, 0))
    cosine, partner = launch(
        "soft_match", functools.partial(_kernel, chunk_size=chunk_size, step_chunks=step_chunks),
        [(num_keys.astype(jnp.int32).reshape(1, 1), num_keys_spec), (keys, key_spec)],
        [((chunks, 1, pairs), dtype, pair_spec) for dtype in (jnp.float32, jnp.int32)],
        parallel=(pl.cdiv(chunks, step_chunks),), interpret=interpret, vmem_limit_bytes=64 * 2**20,
        scratch=[] if is_strided else [pltpu.VMEM(column_tiles, jnp.float32)],
        flops=2 * chunks * pairs * pairs * head_dim, transcendentals=slots,
    )  # fmt: skip
    return Partners(cosine.reshape(-1), partner.reshape(-1))


def _kernel(num_keys_ref, keys_ref, cosine_ref, partner_ref, *scratch, chunk_size, step_chunks):
    """Matches the chunks of one block.

    B keys are the rows of the similarities and A keys the columns, so that the maximum is taken along sublanes and is a
    row.
    """
    column_tiles = [keys_ref]
    if scratch:
        column_tiles = [scratch[0].at[tile] for tile in range(scratch[0].shape[0])]
        for tile, ref in enumerate(column_tiles):
            ref[...] = keys_ref[:, tile * LANES : tile * LANES + ref.shape[1]].astype(jnp.float32)
    pairs = chunk_size // 2

    def load_every_other(start):
        """Returns the normalized keys of every other row from `start` on."""
        rows = [ref[pl.ds(start, pairs, stride=2), :] for ref in column_tiles]
        return _normalize(jnp.concatenate(rows, axis=1))

    first_chunk = pl.program_id(0) * step_chunks

    def match_chunk(chunk, _):
        """Returns 0 after writing the partners of `chunk`."""
        start = pl.multiple_of(chunk * chunk_size, math.gcd(chunk_size, 8))
        a_keys, b_keys = load_every_other(start), load_every_other(start + 1)
        similarity = dot(b_keys, a_keys, axis=1)
        valid = num_keys_ref[0, 0] - (first_chunk + chunk) * chunk_size
        row = jax.lax.broadcasted_iota(jnp.int32, similarity.shape, 0)
        # Rows and columns of keys after the last one are undefined and may be NaN; they affect no others.
        similarity = jnp.where(2 * row + 1 < valid, similarity, -jnp.inf)
        best = jnp.max(similarity, axis=0, keepdims=True)
        partner_ref[chunk] = jnp.min(jnp.where(similarity >= best, row, pairs - 1), axis=0, keepdims=True)
        column = jax.lax.broadcasted_iota(jnp.int32, best.shape, 1)
        cosine_ref[chunk] = jnp.where(2 * column < valid, best, -jnp.inf)
        return 0

    jax.lax.fori_loop(0, step_chunks, match_chunk, 0)


def _normalize(x: Float[Array, "P D"]) -> Float[Array, "P D"]:
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1, keepdims=True), MIN_SQUARED_NORM))
