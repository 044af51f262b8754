"""Measures `weighted_decode`: python -m pallas_kernels.weighted_decode.benchmark [--quick] [--output FILE]."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking, packing
from pallas_kernels.quantized_array import QuantizedArray
from pallas_kernels.weighted_decode import Entries, weighted_decode


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """Entries and their queries.

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

    @property
    def is_quantized(self) -> bool:
        """Whether keys and values are quantized."""
        return self.bits is not None or jnp.dtype(self.dtype).itemsize == 1

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns queries and entries, created by `array(shape, dtype)`."""
        per_slot = (self.batch, self.heads, self.slots)

        def stored() -> Any:
            dtype = self.dtype if self.bits is None else jnp.uint8
            values = array((*per_slot, packing.packed_width(self.head_dim, self.bits)), dtype)
            return (
                QuantizedArray(values, array(per_slot, jnp.bfloat16), bits=self.bits) if self.is_quantized else values
            )

        entries = Entries(stored(), stored(), log_num=array(per_slot, jnp.float32) if self.weighted else None)
        dtype = jnp.bfloat16 if self.is_quantized else self.dtype
        return array((self.batch, self.heads, self.queries, self.head_dim), dtype), entries

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for such arguments."""
        return functools.partial(weighted_decode, logits=self.logits, **options)

    def forms(self) -> Mapping[str, benchmarking.Form]:
        """Returns the default form, the one of XLA, and the functions of JAX for the same purpose."""
        forms = {**super().forms()}
        queries, entries = forms["xla"].arguments
        if self.is_quantized and jax.default_backend() == "gpu":
            del forms["xla"]  # it takes 30 times as long
        if not self.logits and not self.is_quantized:
            forms |= self._jax_attention(queries, entries)
        if self in (*CACHES, QUICK[0]):
            forms |= self._jax_kernels(queries, entries)
        return forms

    def _jax_attention(self, queries: Any, entries: Entries) -> Mapping[str, benchmarking.Form]:
        """Returns forms by `jax.nn.dot_product_attention`, which takes tokens before heads and a bias per head."""
        query = queries.reshape(self.batch, 1, -1, self.head_dim)
        bias = None
        if entries.log_num is not None:
            bias = jnp.repeat(entries.log_num[:, :, None], self.queries, axis=1).astype(queries.dtype)
        attend = functools.partial(jax.nn.dot_product_attention, scale=1 / math.sqrt(self.head_dim))
        stores: Any = entries.keys, entries.values
        arguments = (query, *(x.swapaxes(1, 2) for x in stores), bias)
        return {
            f"jax.nn, {name}": benchmarking.Form(functools.partial(attend, implementation=name), arguments)
            for name in ("xla", "cudnn")
        }

    def _jax_kernels(self, queries: Any, entries: Entries) -> Mapping[str, benchmarking.Form]:
        """Returns forms by the decoding kernels of JAX: a Triton kernel for GPUs, and one for pages on TPUs.

        They scale queries in another way, which does not change their time.
        """
        stores: Any = entries.keys, entries.values
        query = queries.reshape(self.batch, -1, self.head_dim)
        page_size = 128

        def triton(query, keys, values):
            from jax.experimental.pallas.ops.gpu.decode_attention import gqa

            return gqa(query, keys, values)

        def paged(query, keys, values):
            from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

            pages = jnp.arange(self.batch * self.slots // page_size, dtype=jnp.int32).reshape(self.batch, -1)
            lengths = jnp.full(self.batch, self.slots, jnp.int32)
            return paged_attention(query, keys, values, lengths, pages, pages_per_compute_block=8)

        by_token = (x.swapaxes(1, 2) for x in stores)
        in_pages = (x.swapaxes(0, 1).reshape(self.heads, -1, page_size, self.head_dim) for x in stores)
        return {
            "jax pallas, Triton": benchmarking.Form(triton, (query, *by_token)),
            "jax pallas, paged": benchmarking.Form(paged, (query, *in_pages)),
        }


QUICK = (Shape(2, 1024, heads=2), Shape(2, 1024, heads=2, weighted=True))
CACHES = tuple(Shape(batch, slots) for batch in (8, 32, 64) for slots in (4096, 16384, 32768))
# Shapes of other policies and models.
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
# Shapes that must compile for every TPU.
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
# Full caches of eight rows and of one row, in 16, 8 and 4 bits.
MEASURED = tuple(
    Shape(*sizes, **format) for sizes in ((8, 32768), (1, 131072)) for format in ({}, {"dtype": jnp.int8}, {"bits": 4})
)

if __name__ == "__main__":
    benchmarking.main("weighted_decode", QUICK, (*CACHES, *OTHERS))
