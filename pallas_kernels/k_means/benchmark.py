"""How fast a pass of `k_means` is: python -m pallas_kernels.k_means.benchmark [--quick] [--output FILE]."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.k_means import k_means


class Shape(NamedTuple):
    """The points of all heads and their clusters."""

    batch: int
    points: int
    clusters: int
    heads: int = 8
    head_dim: int = 128
    summed: bool = False  # an array of its own is summed

    def __str__(self) -> str:
        extra = ", other sums" * self.summed
        sizes = f"{self.batch} x {self.heads} heads, {self.points} x {self.head_dim}"
        return f"{sizes} float32, {self.clusters} clusters{extra}"

    def arguments(self, array: Any) -> tuple[Any, ...]:
        """Points, directions, which points are valid, and what is summed, made by `array(shape, dtype)`."""
        heads = self.batch, self.heads
        points = array((*heads, self.points, self.head_dim), jnp.float32)
        directions = array((*heads, self.clusters, self.head_dim), jnp.float32)
        return points, directions, array((*heads, self.points), jnp.bool), points if self.summed else None

    def function(self, **options: Any) -> Callable[..., Any]:
        """The op on all heads."""

        def one_head(points: Any, centroids: Any, is_valid: Any, summands: Any) -> Any:
            return k_means(points, centroids, is_valid, summands=summands, **options)

        return jax.vmap(jax.vmap(one_head))


# A cluster for 80 tokens of a prompt, all of them or every fourth; 400 for any prompt; chunks of later tokens; and what
# models of other kinds bring.
PRODUCTION = (
    Shape(8, 16384, 205),
    Shape(8, 32768, 410),
    Shape(8, 4096, 205),
    Shape(8, 16384, 400, summed=True),
    Shape(8, 320, 4),
    Shape(8, 16384, 205, head_dim=64),
    Shape(8, 16384, 205, head_dim=256),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    for shape in (Shape(1, 512, 8, heads=2, head_dim=64),) if quick else PRODUCTION:
        abstract = shape.arguments(jax.ShapeDtypeStruct)
        moved = benchmarking.array_bytes(abstract, jax.eval_shape(shape.function(), *abstract))
        # The sums take additions alone; only products with directions must be made.
        flops = 2 * shape.batch * shape.heads * shape.points * shape.clusters * shape.head_dim
        forms = functools.partial(_forms, shape)
        yield benchmarking.Case(str(shape), forms, moved, flops, product_type=jnp.float32)


def _forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform and XLA's; nothing else is known to do the same."""
    draws = iter(jax.random.split(jax.random.key(0), 3))

    def array(size: tuple[int, ...], dtype: Any) -> Any:
        if dtype == jnp.bool:
            return jnp.ones(size, dtype)
        return jax.random.normal(next(draws), size, dtype) / shape.head_dim**0.5

    arguments = shape.arguments(array)
    return {
        "kvjax": benchmarking.Form(shape.function(), arguments),
        "xla": benchmarking.Form(shape.function(implementation="xla"), arguments),
    }


if __name__ == "__main__":
    benchmarking.main("k_means", cases)
