"""Measures `paged_decode`: python -m pallas_kernels.paged_decode.benchmark [--quick] [--output FILE]."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.paged_decode import Pages, paged_decode, slot_words


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """Sequences of equal length whose pages fill the store.

    Attributes:
        batch: Sequences.
        tokens: Tokens of a sequence, a multiple of the page size.
        heads: KV heads.
        queries: Queries per KV head.
        head_dim: Dimensions of keys and values.
        bits: Bit width of keys and values.
        per_query: Whether each query has a range.
        page_size: Slots of a page.
    """

    batch: int
    tokens: int
    heads: int = 8
    queries: int = 4
    head_dim: int = 128
    bits: int = 4
    per_query: bool = False
    page_size: int = 128

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns queries, pages, a page table and ranges, created by `array(shape, dtype)`."""
        per_sequence = self.tokens // self.page_size
        words = slot_words(self.head_dim, self.bits)
        data = array((self.batch * per_sequence, self.heads, words, 2, self.page_size), jnp.bfloat16)
        bound = array((self.batch, self.queries) if self.per_query else (self.batch,), jnp.int32)
        queries = array((self.batch, self.heads, self.queries, self.head_dim), jnp.bfloat16)
        return queries, Pages(data, self.bits), array((self.batch, per_sequence), jnp.int32), bound, bound

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns sequences whose pages are scattered over the store."""
        queries, pages, table, bound, _ = super().random_arguments()
        table = (jnp.arange(table.size) * 7919 % table.size).reshape(table.shape)  # a permutation: 7919 is a prime
        return queries, pages, table, jnp.zeros_like(bound), jnp.full_like(bound, self.tokens)

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op."""
        return functools.partial(paged_decode, **options)

    def forms(self) -> Mapping[str, benchmarking.Form]:
        """Returns the default form, the one of XLA, and JAX's kernel for pages of bfloat16 on TPUs."""
        forms = {**super().forms()}
        queries, _, table, _, stop = forms["xla"].arguments

        def paged(queries, keys, values):
            from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

            return paged_attention(queries, keys, values, stop, table, pages_per_compute_block=min(8, table.shape[1]))

        shape = (self.heads, table.size, self.page_size, self.head_dim)
        keys, values = (benchmarking.RandomArrays(seed).array(shape, jnp.bfloat16) for seed in (1, 2))
        arguments = queries.reshape(self.batch, -1, self.head_dim), keys, values
        return {**forms, "jax pallas, bfloat16 pages": benchmarking.Form(paged, arguments)}


QUICK = (Shape(2, 512, heads=2),)
# Shapes that must compile for every TPU.
PRODUCTION = (
    *(Shape(64, 4096, head_dim=head_dim, bits=bits) for head_dim in (64, 128, 256) for bits in (4, 8)),
    *(Shape(8, 32768, bits=bits) for bits in (4, 8)),
    Shape(1, 131072),
    Shape(32, 8192, queries=1, heads=32),
    Shape(1, 16384, queries=256, per_query=True),
)

if __name__ == "__main__":
    benchmarking.main("paged_decode", QUICK, PRODUCTION)
