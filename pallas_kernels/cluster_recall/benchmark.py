"""Measures `cluster_recall`: python -m pallas_kernels.cluster_recall.benchmark [--quick] [--output FILE].

It is compared with XLA, which gathers the blocks and attends to them, and with `weighted_decode` of as many contiguous
tokens, which shows the cost of reading blocks at arbitrary positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking, packing
from pallas_kernels.cluster_recall import Blocks, cluster_recall, padded_width
from pallas_kernels.weighted_decode.benchmark import Shape as DenseShape


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """A store and a selection of all tokens of `selected` blocks per head.

    Attributes:
        batch: Sequences.
        selected: Blocks that are read per head.
        heads: Heads that select: KV heads or query heads.
        queries: Queries per head.
        kv_heads: KV heads of the store.
        blocks: Blocks of the store.
        block_size: Tokens per block.
        head_dim: Dimensions of keys and values.
        dtype: Dtype of keys and values if they are not packed.
        bits: Bit width of packed keys and values.
    """

    batch: int
    selected: int
    heads: int = 8
    queries: int = 4
    kv_heads: int = 8
    blocks: int = 2048
    block_size: int = 16
    head_dim: int = 128
    dtype: Any = jnp.bfloat16
    bits: int | None = None

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns queries, blocks, indices and lengths, created by `array(shape, dtype)`."""
        store = (self.batch, self.kv_heads, self.blocks, self.block_size)
        dtype = self.dtype if self.bits is None else jnp.uint8
        is_quantized = jnp.dtype(dtype).itemsize == 1
        entries = array((*store, 2 * packing.packed_width(padded_width(self.head_dim), self.bits)), dtype)
        scale = array((*store, 2), jnp.bfloat16) if is_quantized else None
        blocks = Blocks(entries, scale, key_bits=self.bits, value_bits=self.bits)
        queries = array((self.batch, self.heads, self.queries, self.head_dim), jnp.bfloat16 if is_quantized else dtype)
        selection = array((self.batch, self.heads, self.selected), jnp.int32)
        return queries, blocks, selection, selection

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns a random selection of entire blocks."""
        queries, blocks, *_ = super().random_arguments()
        ranks = jax.random.uniform(jax.random.key(1), (self.batch, self.heads, self.blocks))
        indices = jnp.argsort(ranks, axis=2)[:, :, : self.selected].astype(jnp.int32)
        return queries, blocks, indices, jnp.full_like(indices, self.block_size)

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for such arguments."""
        return functools.partial(cluster_recall, **options)

    @property
    def bytes(self) -> int:
        """The bytes that must move: entire blocks that are read, with their scales, and all other arrays."""
        queries, blocks, indices, lengths = self.arguments(jax.ShapeDtypeStruct)
        block = benchmarking.array_bytes(blocks) // (self.batch * self.kv_heads * self.blocks)
        partials = jax.eval_shape(cluster_recall, queries, blocks, indices, lengths)
        return benchmarking.array_bytes(queries, indices, lengths, partials) + indices.size * block

    def forms(self) -> Mapping[str, benchmarking.Form]:
        """Returns the default form, the one of XLA, and a dense read of as many tokens."""
        slots = self.selected * self.block_size
        dense = DenseShape(self.batch, slots, self.heads, self.queries, self.head_dim, self.dtype, bits=self.bits)
        dense_form = benchmarking.Form(dense.function(), dense.random_arguments())
        return {**super().forms(), "dense weighted_decode": dense_form}


QUICK = (Shape(2, 16, heads=2, kv_heads=2, blocks=64), Shape(2, 16, kv_heads=2, blocks=64, queries=1))
PRODUCTION = (
    *(Shape(batch, selected) for batch in (8, 32) for selected in (64, 256, 512)),
    *(Shape(8, 256, head_dim=head_dim) for head_dim in (64, 80, 96, 256)),
    *(Shape(8, 256, dtype=dtype) for dtype in (jnp.float32, jnp.int8, jnp.float8_e4m3fn)),
    *(Shape(8, 256, bits=bits) for bits in packing.PLANES),
    Shape(8, 256, heads=32, queries=1),
    Shape(1, 512, blocks=8192),
)
MEASURED = (Shape(32, 256), Shape(8, 256, heads=32, queries=1))

if __name__ == "__main__":
    benchmarking.main("cluster_recall", QUICK, PRODUCTION)
