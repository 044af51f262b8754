"""Measures an iteration of `k_means`: python -m pallas_kernels.k_means.benchmark [--quick] [--output FILE]."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.k_means import k_means


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """Points and clusters of all heads; `has_summands` if other vectors than the points are summed."""

    product_dtype = jnp.float32

    batch: int
    points: int
    clusters: int
    heads: int = 8
    head_dim: int = 128
    has_summands: bool = False

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns points, centroids, which points are valid, and summands, created by `array(shape, dtype)`."""
        heads = self.batch, self.heads
        points = array((*heads, self.points, self.head_dim), jnp.float32)
        centroids = array((*heads, self.clusters, self.head_dim), jnp.float32)
        return points, centroids, array((*heads, self.points), jnp.bool), points if self.has_summands else None

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for all heads."""

        def iterate(points: Any, centroids: Any, is_valid: Any, summands: Any) -> Any:
            return k_means(points, centroids, is_valid, summands=summands, **options)

        return jax.vmap(jax.vmap(iterate))

    @property
    def flops(self) -> int:
        """The flops of the inner products; the sums need additions only."""
        return 2 * self.batch * self.heads * self.points * self.clusters * self.head_dim


QUICK = (Shape(1, 512, 8, heads=2, head_dim=64),)
# Prompts with a cluster per 80 tokens, or per 80 tokens of every fourth; 400 clusters; chunks of decoded tokens; and
# other head dimensions.
PRODUCTION = (
    *(Shape(8, points, clusters) for points, clusters in ((16384, 205), (32768, 410), (4096, 205))),
    Shape(8, 16384, 400, has_summands=True),
    Shape(8, 320, 4),
    *(Shape(8, 16384, 205, head_dim=head_dim) for head_dim in (64, 256)),
)
MEASURED = (Shape(8, 32768, 410),)

if __name__ == "__main__":
    benchmarking.main("k_means", QUICK, PRODUCTION)
