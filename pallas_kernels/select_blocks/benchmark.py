"""Measures `select_blocks`: python -m pallas_kernels.select_blocks.benchmark [--quick] [--output FILE]."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.select_blocks import Limits, select_blocks


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """The clusters of all heads, of `cluster_size` tokens each, and the budget."""

    batch: int
    clusters: int
    max_tokens: int = 4096
    heads: int = 8
    cluster_size: int = 80
    block_size: int = 16

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns scores, sizes and first blocks, created by `array(shape, dtype)`."""
        heads = (self.batch, self.heads, self.clusters)
        return array(heads, jnp.float32), array(heads, jnp.int32), array(heads, jnp.int32)

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns random scores of clusters that are contiguous in the store."""
        scores, sizes, _ = super().random_arguments()
        sizes = jnp.full_like(sizes, self.cluster_size)
        blocks = -(-sizes // self.block_size)
        return scores, sizes, jnp.cumsum(blocks, axis=-1) - blocks

    @property
    def limits(self) -> Limits:
        """The budget and the blocks that it fills at most."""
        max_blocks = -(-self.max_tokens // self.block_size) + -(-self.max_tokens // self.cluster_size)
        return Limits(self.max_tokens, max_blocks, self.block_size)

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for all heads."""
        return jax.vmap(jax.vmap(functools.partial(select_blocks, **self.limits._asdict(), **options)))

    def forms(self) -> Mapping[str, benchmarking.Form]:
        """Returns the default form and the forms of XLA for accelerators and for any device."""
        arguments = self.random_arguments()
        names = {"kvjax": None, "xla": "xla_sort", "xla, sorting tuples": "xla_sort_tuples"}
        return {form: benchmarking.Form(self.function(implementation=name), arguments) for form, name in names.items()}


QUICK = (Shape(1, 64, max_tokens=256, heads=2),)
# Clusters of ClusterKV and pages of Quest.
PRODUCTION = (
    *(Shape(batch, tokens // 80) for batch in (1, 8) for tokens in (32768, 131072)),
    *(Shape(1, tokens // 16, cluster_size=16) for tokens in (32768, 131072)),
    Shape(8, 410, heads=32),
)

if __name__ == "__main__":
    benchmarking.main("select_blocks", QUICK, PRODUCTION)
