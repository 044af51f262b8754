"""How fast `weighted_decode` reads: python -m pallas_kernels.weighted_decode.benchmark [--quick] [--output FILE]."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking, packing
from pallas_kernels.weighted_decode.api import weighted_decode
from pallas_kernels.weighted_decode.base import Entries, Partials


class Shape(NamedTuple):
    """A segment and the rows that read it."""

    batch: int
    slots: int
    heads: int = 8
    rows: int = 4
    head_dim: int = 128
    dtype: Any = jnp.bfloat16
    weighted: bool = False
    logits: bool = False
    bits: int | None = None  # of packed numbers

    def __str__(self) -> str:
        extra = "".join((", log-weights" * self.weighted, ", logits" * self.logits))
        sizes = f"{self.batch} x {self.heads} heads x {self.rows} rows, {self.slots} x {self.head_dim}"
        kind = jnp.dtype(self.dtype).name if self.bits is None else f"{self.bits} bits"
        return f"{sizes} {kind}{extra}"

    def arguments(self, array: Any) -> tuple[Any, Entries]:
        """Rows and entries, made by `array(shape, dtype)`."""
        per_slot = (self.batch, self.heads, self.slots)
        narrow = self.bits is not None or jnp.dtype(self.dtype).itemsize == 1
        stored = (*per_slot, packing.packed_width(self.head_dim, self.bits))
        dtype = self.dtype if self.bits is None else jnp.uint8
        entries = Entries(
            keys=array(stored, dtype),
            values=array(stored, dtype),
            log_num=array(per_slot, jnp.float32) if self.weighted else None,
            key_scale=array(per_slot, jnp.bfloat16) if narrow else None,
            value_scale=array(per_slot, jnp.bfloat16) if narrow else None,
            key_bits=self.bits,
            value_bits=self.bits,
        )
        rows = array((self.batch, self.heads, self.rows, self.head_dim), jnp.bfloat16 if narrow else self.dtype)
        return rows, entries

    def function(self, **options: Any) -> Callable[..., Partials]:
        """The op on such arguments."""
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
    Shape(8, 16384, rows=1, heads=32),
    Shape(8, 16384, rows=16),
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
    Shape(8, 16384, rows=1, heads=32),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    shapes = QUICK if quick else (*CACHES, *OTHERS)
    for shape in shapes:
        abstract = shape.arguments(jax.ShapeDtypeStruct)
        moved = benchmarking.array_bytes(abstract, jax.eval_shape(shape.function(), *abstract))
        yield benchmarking.Case(str(shape), functools.partial(forms, shape), moved)


def forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform, XLA's, and what JAX ships for the same."""
    rows, entries = shape.arguments(benchmarking.Draws(0).array)
    found = {
        "kvjax": benchmarking.Form(shape.function(), (rows, entries)),
        "xla": benchmarking.Form(shape.function(implementation="xla"), (rows, entries)),
    }
    if not shape.logits and entries.key_scale is None:
        found.update(jax_attention(shape, rows, entries))
    if shape in (*CACHES, QUICK[0]):
        found.update(jax_kernels(shape, rows, entries))
    return found


def jax_attention(shape: Shape, rows: Any, entries: Entries) -> Mapping[str, benchmarking.Form]:
    """`jax.nn.dot_product_attention`, which takes tokens before heads, and a bias per query head."""
    query = rows.reshape(shape.batch, 1, -1, shape.head_dim)
    assert entries.values is not None
    keys, values = (x.swapaxes(1, 2) for x in (entries.keys, entries.values))
    bias = None
    if entries.log_num is not None:
        bias = jnp.repeat(entries.log_num[:, :, None], shape.rows, axis=1).astype(rows.dtype)
    scale = 1 / math.sqrt(shape.head_dim)
    return {
        f"jax.nn, {name}": benchmarking.Form(
            functools.partial(jax.nn.dot_product_attention, scale=scale, implementation=name),
            (query, keys, values, bias),
        )
        for name in ("xla", "cudnn")
    }


def jax_kernels(shape: Shape, rows: Any, entries: Entries) -> Mapping[str, benchmarking.Form]:
    """The decoding kernels that come with JAX: a Triton kernel for GPUs, and one for TPUs that reads pages. They take
    queries that are scaled already, or scale them by themselves; their time is the same."""
    assert entries.values is not None
    stores = entries.keys, entries.values
    query = rows.reshape(shape.batch, -1, shape.head_dim)
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
