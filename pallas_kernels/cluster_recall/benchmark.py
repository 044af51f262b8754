"""How fast `cluster_recall` reads: python -m pallas_kernels.cluster_recall.benchmark [--quick] [--output FILE].

Beside XLA, which gathers the blocks and attends to them, stands `weighted_decode` over as many tokens side by side:
what a store costs whose blocks lie anywhere.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking, packing
from pallas_kernels.cluster_recall import Blocks, cluster_recall, padded_width
from pallas_kernels.partials import Partials
from pallas_kernels.weighted_decode import benchmark as read


class Shape(NamedTuple):
    """A store, and what is read of it: blocks per head, all of their tokens."""

    batch: int
    recalled: int
    heads: int = 8  # that recall, kv heads or query heads
    queries: int = 4
    kv_heads: int = 8
    blocks: int = 2048
    places: int = 16
    head_dim: int = 128
    dtype: Any = jnp.bfloat16
    bits: int | None = None  # of packed numbers

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.heads} heads x {self.queries} queries, {self.recalled} of {self.blocks} blocks"
        kind = jnp.dtype(self.dtype).name if self.bits is None else f"{self.bits} bits"
        return f"{sizes} of {self.places} x {self.head_dim} {kind}"

    def arguments(self, array: Any) -> tuple[Any, Blocks, Any, Any]:
        """Rows, blocks, numbers and counts, made by `array(shape, dtype)`."""
        store = (self.batch, self.kv_heads, self.blocks, self.places)
        dtype = self.dtype if self.bits is None else jnp.uint8
        narrow = jnp.dtype(dtype).itemsize == 1
        entries = array((*store, 2 * packing.packed_width(padded_width(self.head_dim), self.bits)), dtype)
        scale = array((*store, 2), jnp.bfloat16) if narrow else None
        blocks = Blocks(entries, scale, key_bits=self.bits, value_bits=self.bits)
        rows = array((self.batch, self.heads, self.queries, self.head_dim), jnp.bfloat16 if narrow else dtype)
        plan = array((self.batch, self.heads, self.recalled), jnp.int32)
        return rows, blocks, plan, plan

    def function(self, **options: Any) -> Callable[..., Partials]:
        """The op on such arguments."""
        return functools.partial(cluster_recall, **options)

    @property
    def bytes(self) -> int:
        """That must move: the blocks that are read, whole, with their scales, and the rest."""
        rows, blocks, number, count = self.arguments(jax.ShapeDtypeStruct)
        block = benchmarking.array_bytes(blocks) // (self.batch * self.kv_heads * self.blocks)
        sums = jax.eval_shape(cluster_recall, rows, blocks, number, count)
        return benchmarking.array_bytes(rows, number, count, sums) + number.size * block


PRODUCTION = (
    *(Shape(batch, recalled) for batch in (8, 32) for recalled in (64, 256, 512)),
    *(Shape(8, 256, head_dim=head_dim) for head_dim in (64, 80, 96, 256)),
    *(Shape(8, 256, dtype=dtype) for dtype in (jnp.float32, jnp.int8, jnp.float8_e4m3fn)),
    *(Shape(8, 256, bits=bits) for bits in packing.PLANES),
    Shape(8, 256, heads=32, queries=1),
    Shape(1, 512, blocks=8192),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    shapes = (Shape(2, 16, heads=2, kv_heads=2, blocks=64), Shape(2, 16, kv_heads=2, blocks=64, queries=1))
    for shape in shapes if quick else PRODUCTION:
        yield benchmarking.Case(str(shape), functools.partial(forms, shape), shape.bytes)


def forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform, XLA's, and a dense read of as many tokens."""
    rows, blocks, _, _ = shape.arguments(benchmarking.Draws(0).array)
    ranked = jax.random.uniform(jax.random.key(1), (shape.batch, shape.heads, shape.blocks))
    number = jnp.argsort(ranked, axis=2)[:, :, : shape.recalled].astype(jnp.int32)
    arguments = (rows, blocks, number, jnp.full(number.shape, shape.places, jnp.int32))
    slots = shape.recalled * shape.places
    dense = read.Shape(shape.batch, slots, shape.heads, shape.queries, shape.head_dim, shape.dtype, bits=shape.bits)
    return {
        "kvjax": benchmarking.Form(shape.function(), arguments),
        "xla": benchmarking.Form(shape.function(implementation="xla"), arguments),
        "dense weighted_decode": benchmarking.Form(dense.function(), dense.arguments(benchmarking.Draws(2).array)),
    }


if __name__ == "__main__":
    benchmarking.main("cluster_recall", cases)
