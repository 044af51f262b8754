"""How fast `weighted_decode` reads: python -m pallas_kernels.weighted_decode.benchmark [--quick] [--output FILE]."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking, packing
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode import Entries, Partials, weighted_decode


class Shape(NamedTuple):
    """The shapes of a segment and its queries.

    Attributes:
        batch: Sequences.
        slots: Entries per KV head.
        heads: KV heads.
        queries: Queries per KV head.
        head_dim: Dimensions of keys and values.
        dtype: Dtype of keys and values if they are not packed.
        weighted: Whether entries have log-weights.
        logits: Whether logits are returned.
        bits: Bit width of packed keys and values.
    """

    batch: int
    slots: int
    heads: int = 8
    queries: int = 4
    head_dim: int = 128
    dtype: Any = jnp.bfloat16
    weighted: bool = False
    logits: bool = False
    bits: int | None = None

    def __str__(self) -> str:
        extra = "".join((", log-weights" * self.weighted, ", logits" * self.logits))
        sizes = f"{self.batch} x {self.heads} heads x {self.queries} queries, {self.slots} x {self.head_dim}"
        kind = jnp.dtype(self.dtype).name if self.bits is None else f"{self.bits} bits"
        return f"{sizes} {kind}{extra}"

    @property
    def quantized(self) -> bool:
        """Whether keys and values are quantized."""
        return self.bits is not None or jnp.dtype(self.dtype).itemsize == 1

    def arguments(self, array: Any) -> tuple[Any, Entries]:
        """Returns queries and entries, created by `array(shape, dtype)`."""
        per_slot = (self.batch, self.heads, self.slots)

        def stored() -> Any:
            dtype = self.dtype if self.bits is None else jnp.uint8
            values = array((*per_slot, packing.packed_width(self.head_dim, self.bits)), dtype)
            return QuantizedArray(values, array(per_slot, jnp.bfloat16), bits=self.bits) if self.quantized else values

        entries = Entries(stored(), stored(), log_num=array(per_slot, jnp.float32) if self.weighted else None)
        dtype = jnp.bfloat16 if self.quantized else self.dtype
        return array((self.batch, self.heads, self.queries, self.head_dim), dtype), entries

    def function(self, **options: Any) -> Callable[..., Partials]:
        """Returns the op for such arguments."""
        return functools.partial(weighted_decode, logits=self.logits, **options)


CACHES = tuple(Shape(batch, slots) for batch in (8, 32, 64) for slots in (4096, 16384, 32768))
QUICK = (Shape(2, 1024, heads=2), Shape(2, 1024, heads=2, weighted=True))
# What policies and models of other kinds bring.
OTHERS = (
    Shape(1, 131072),
    *(Shape(8, 16384, head_dim=head_dim) for head_dim in (64, 80, 96, 256)),
    *(Shape(8, 16384, dtype=dtype) for dtype in (jnp.float32, jnp.float16, jnp.int8, jnp.float8_e4m3fn)),
    *(Shape(8, 16384, bits=bits) for bits in packing.PLANES),
    Shape(8, 16384, weighted=True),
    Shape(8, 16384, logits=True),
    Shape(8, 16384, queries=1, heads=32),
    Shape(8, 16384, queries=16),
)


# What must compile for every TPU.
PRODUCTION = (
    *(
        Shape(8, 32768 if head_dim == 128 else 8192, head_dim=head_dim, dtype=dtype, weighted=True)
        for head_dim in (64, 80, 96, 128, 256)
        for dtype in (jnp.bfloat16, jnp.float32, jnp.int8, jnp.float8_e4m3fn)
    ),
    *(Shape(8, 8192, head_dim=head_dim, bits=bits) for head_dim in (64, 128) for bits in packing.PLANES),
    Shape(1, 131072),
    Shape(64, 4096, logits=True),
    Shape(8, 16384, queries=1, heads=32),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    shapes = QUICK if quick else (*CACHES, *OTHERS)
    for shape in shapes:
        abstract = shape.arguments(jax.ShapeDtypeStruct)
        moved = benchmarking.array_bytes(abstract, jax.eval_shape(shape.function(), *abstract))
        yield benchmarking.Case(str(shape), functools.partial(forms, shape), moved)


def forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform, XLA's, and what JAX ships for the same."""
    queries, entries = shape.arguments(benchmarking.Draws(0).array)
    found = {
        "kvjax": benchmarking.Form(shape.function(), (queries, entries)),
        "xla": benchmarking.Form(shape.function(implementation="xla"), (queries, entries)),
    }
    if not shape.logits and not shape.quantized:
        found.update(jax_attention(shape, queries, entries))
    if shape in (*CACHES, QUICK[0]):
        found.update(jax_kernels(shape, queries, entries))
    return found


def jax_attention(shape: Shape, queries: Any, entries: Entries) -> Mapping[str, benchmarking.Form]:
    """`jax.nn.dot_product_attention`, which takes tokens before heads, and a bias per query head."""
    query = queries.reshape(shape.batch, 1, -1, shape.head_dim)
    assert entries.values is not None
    keys, values = (x.swapaxes(1, 2) for x in (entries.keys, entries.values))
    bias = None
    if entries.log_num is not None:
        bias = jnp.repeat(entries.log_num[:, :, None], shape.queries, axis=1).astype(queries.dtype)
    scale = 1 / math.sqrt(shape.head_dim)
    return {
        f"jax.nn, {name}": benchmarking.Form(
            functools.partial(jax.nn.dot_product_attention, scale=scale, implementation=name),
            (query, keys, values, bias),
        )
        for name in ("xla", "cudnn")
    }


def jax_kernels(shape: Shape, queries: Any, entries: Entries) -> Mapping[str, benchmarking.Form]:
    """The decoding kernels that come with JAX: a Triton kernel for GPUs, and one for TPUs that reads pages. They take
    queries that are scaled already, or scale them by themselves; their time is the same."""
    assert entries.values is not None
    stores = entries.keys, entries.values
    query = queries.reshape(shape.batch, -1, shape.head_dim)
    page = 128

    def triton(query, keys, values):
        from jax.experimental.pallas.ops.gpu.decode_attention import gqa

        return gqa(query, keys, values)

    def paged(query, keys, values):
        from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

        pages = jnp.arange(shape.batch * shape.slots // page, dtype=jnp.int32).reshape(shape.batch, -1)
        lengths = jnp.full(shape.batch, shape.slots, jnp.int32)
        return paged_attention(query, keys, values, lengths, pages, pages_per_compute_block=8)

    by_token = tuple(x.swapaxes(1, 2) for x in stores)
    in_pages = tuple(x.swapaxes(0, 1).reshape(shape.heads, -1, page, shape.head_dim) for x in stores)
    return {
        "jax pallas, Triton": benchmarking.Form(triton, (query, *by_token)),
        "jax pallas, paged": benchmarking.Form(paged, (query, *in_pages)),
    }


if __name__ == "__main__":
    benchmarking.main("weighted_decode", cases)
