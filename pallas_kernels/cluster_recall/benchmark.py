"""How fast `cluster_recall` reads: python -m pallas_kernels.cluster_recall.benchmark [--quick] [--output FILE].

Beside XLA, which gathers the blocks and attends to them, stands `weighted_decode` over as many tokens side by side:
what a store costs whose blocks lie anywhere.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.cluster_recall.api import cluster_recall
from pallas_kernels.cluster_recall.base import Blocks, entry_width
from pallas_kernels.weighted_decode import Entries, Partials, weighted_decode


class Shape(NamedTuple):
    """A store, and what is read of it: blocks per head, all of their tokens."""

    batch: int
    recalled: int
    heads: int = 8  # that recall, kv heads or query heads
    rows: int = 4
    kv_heads: int = 8
    blocks: int = 2048
    places: int = 16
    head_dim: int = 128
    dtype: Any = jnp.bfloat16

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.heads} heads x {self.rows} rows, {self.recalled} of {self.blocks} blocks"
        return f"{sizes} of {self.places} x {self.head_dim} {jnp.dtype(self.dtype).name}"

    @property
    def row_type(self) -> Any:
        return jnp.bfloat16 if jnp.dtype(self.dtype).itemsize == 1 else self.dtype

    def arguments(self, array: Any) -> tuple[Any, Blocks, Any, Any]:
        """Rows, blocks, numbers and counts, made by `array(shape, dtype)`."""
        rows = array((self.batch, self.heads, self.rows, self.head_dim), self.row_type)
        store = (self.batch, self.kv_heads, self.blocks, self.places)
        narrow = jnp.dtype(self.dtype).itemsize == 1
        entries = array((*store, 2 * entry_width(self.head_dim)), self.dtype)
        plan = array((self.batch, self.heads, self.recalled), jnp.int32)
        return rows, Blocks(entries, array((*store, 2), jnp.float32) if narrow else None), plan, plan

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
    Shape(8, 256, heads=32, rows=1),
    Shape(1, 512, blocks=8192),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    shapes = (Shape(2, 16, heads=2, kv_heads=2, blocks=64), Shape(2, 16, kv_heads=2, blocks=64, rows=1))
    for shape in shapes if quick else PRODUCTION:
        yield benchmarking.Case(str(shape), functools.partial(forms, shape), shape.bytes)


def forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform, XLA's, and a dense read of as many tokens."""
    draws = iter(jax.random.split(jax.random.key(0), 16))

    def array(size: tuple[int, ...], dtype: Any) -> Any:
        return (jax.random.normal(next(draws), size, jnp.bfloat16) / 2).astype(dtype)

    rows, blocks, _, _ = shape.arguments(array)
    ranked = jax.random.uniform(next(draws), (shape.batch, shape.heads, shape.blocks))
    number = jnp.argsort(ranked, axis=2)[:, :, : shape.recalled].astype(jnp.int32)
    arguments = (rows, blocks, number, jnp.full(number.shape, shape.places, jnp.int32))
    slots = (shape.batch, shape.heads, shape.recalled * shape.places)
    keys, values = (array((*slots, shape.head_dim), shape.dtype) for _ in range(2))
    scales = {} if blocks.scale is None else {name: array(slots, jnp.float32) for name in ("key_scale", "value_scale")}
    dense = Entries(keys, values, **scales)
    return {
        "kvjax": benchmarking.Form(shape.function(), arguments),
        "xla": benchmarking.Form(shape.function(implementation="xla"), arguments),
        "dense weighted_decode": benchmarking.Form(weighted_decode, (rows, dense)),
    }


if __name__ == "__main__":
    benchmarking.main("cluster_recall", cases)
