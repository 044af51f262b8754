"""The search for partners as a Pallas kernel for TPU (Mosaic)."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.soft_match.base import Partners
from pallas_kernels.soft_match.reference import LEAST_SQUARE

TYPES = ("float32", "bfloat16")
LANES = 128
# The similarities of one chunk are (chunk / 2)^2 float32 numbers: 4 MiB, of which a few copies are held.
LARGEST_CHUNK = 2048


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel cuts its work.

    Attributes:
        block_keys: keys per step of the pipeline, in whole chunks: at least one of them.
    """

    block_keys: int = 2048

    def __post_init__(self) -> None:
        if self.block_keys < 1:
            raise ValueError(f"block_keys={self.block_keys}; it must be at least 1")


def check(keys: Float[Array, "S D"], count: Int[Array, ""], *, chunk: int) -> None:
    """Raises a NotImplementedError for what the kernel cannot do, with the reason."""
    if keys.dtype.name not in TYPES:
        raise NotImplementedError(f"keys are {keys.dtype.name}; the TPU kernel takes {', '.join(TYPES)}")
    head_dim = keys.shape[1]
    if head_dim > LANES and head_dim % LANES:
        raise NotImplementedError(f"keys of {head_dim} dimensions: above {LANES} they must be a multiple of it")
    if chunk > LARGEST_CHUNK:
        raise NotImplementedError(f"chunk={chunk}: from {LARGEST_CHUNK} on its similarities do not fit on chip")


def soft_match(
    keys: Float[Array, "S D"],
    count: Int[Array, ""],
    *,
    chunk: int,
    config: Config | None = None,
    interpret: Any = False,
) -> Partners:
    """`reference.soft_match`, reading every key once. A step takes several chunks, one after the other."""
    config = config or Config()
    slots, head_dim = keys.shape
    chunks, pairs = pl.cdiv(slots, chunk), chunk // 2
    # Blocks are of whole tiles, eight keys each.
    whole = 8 // math.gcd(8, chunk)
    together = whole * max(1, min(config.block_keys, slots) // (whole * chunk))
    block = together * chunk
    if slots < block:
        keys = jnp.pad(keys, ((0, block - slots), (0, 0)))
    # Every other row can be loaded alone where rows are of 32-bit numbers and no wider than a tile.
    as_it_is = keys.dtype == jnp.float32 and head_dim <= LANES
    parts = (pl.cdiv(head_dim, LANES), block, min(head_dim, LANES))
    found = jax.ShapeDtypeStruct((chunks, 1, pairs), jnp.float32)
    of_chunks = pl.BlockSpec((together, 1, pairs), lambda i: (i, 0, 0))
    cosine, place = pl.pallas_call(
        functools.partial(_kernel, chunk=chunk, together=together),
        grid=(pl.cdiv(chunks, together),),
        in_specs=[
            pl.BlockSpec((1, 1), lambda i: (0, 0), memory_space=pltpu.SMEM),
            pl.BlockSpec((block, head_dim), lambda i: (i, 0)),
        ],
        out_specs=[of_chunks, of_chunks],
        out_shape=[found, jax.ShapeDtypeStruct(found.shape, jnp.int32)],
        scratch_shapes=[] if as_it_is else [pltpu.VMEM(parts, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=64 * 2**20),
        cost_estimate=pl.CostEstimate(
            flops=2 * chunks * pairs * pairs * head_dim,
            bytes_accessed=keys.size * keys.dtype.itemsize + 2 * chunks * pairs * 4,
            transcendentals=slots,
        ),
        interpret=interpret,
        name="soft_match",
    )(count.astype(jnp.int32).reshape(1, 1), keys)
    return Partners(cosine.reshape(-1), place.reshape(-1))


def _kernel(count_ref, keys_ref, cosine_ref, place_ref, *scratch, chunk, together):
    """The chunks of one block. B entries are rows of the similarities and A entries columns, so that the best is sought
    along sublanes and comes out as a row."""
    parts = [keys_ref]
    if scratch:
        parts = [scratch[0].at[part] for part in range(scratch[0].shape[0])]
        for part, ref in enumerate(parts):
            ref[...] = keys_ref[:, part * LANES : part * LANES + ref.shape[1]].astype(jnp.float32)
    pairs = chunk // 2

    def every_other(start):
        rows = [ref[pl.ds(start, pairs, stride=2), :] for ref in parts]
        return _directions(jnp.concatenate(rows, axis=1))

    first = pl.program_id(0) * together

    def search(number, _):
        start = pl.multiple_of(number * chunk, math.gcd(chunk, 8))
        sought, offered = every_other(start), every_other(start + 1)
        similarity = jax.lax.dot_general(
            offered,
            sought,
            (((1,), (1,)), ((), ())),
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        left = count_ref[0, 0] - (first + number) * chunk
        row = jax.lax.broadcasted_iota(jnp.int32, similarity.shape, 0)
        # What lies behind the last key is unspecified and may be NaN: it stays in rows and columns of its own.
        similarity = jnp.where(2 * row + 1 < left, similarity, -jnp.inf)
        best = jnp.max(similarity, axis=0, keepdims=True)
        place_ref[number] = jnp.min(jnp.where(similarity >= best, row, pairs - 1), axis=0, keepdims=True)
        column = jax.lax.broadcasted_iota(jnp.int32, best.shape, 1)
        cosine_ref[number] = jnp.where(2 * column < left, best, -jnp.inf)
        return 0

    jax.lax.fori_loop(0, together, search, 0)


def _directions(x: Float[Array, "P D"]) -> Float[Array, "P D"]:
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1, keepdims=True), LEAST_SQUARE))
