"""Measures `soft_match`: python -m pallas_kernels.soft_match.benchmark [--quick] [--output FILE]."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.soft_match import soft_match


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """The keys of all heads and their chunks."""

    product_dtype = jnp.float32

    batch: int
    keys: int
    heads: int = 8
    head_dim: int = 128
    chunk_size: int = 256
    dtype: Any = jnp.float32

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns keys and their number, created by `array(shape, dtype)`."""
        heads = self.batch, self.heads
        return array((*heads, self.keys, self.head_dim), self.dtype), array(heads, jnp.int32)

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns random keys, all of them valid."""
        keys, num_keys = super().random_arguments()
        return keys, jnp.full_like(num_keys, self.keys)

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for all heads."""
        return jax.vmap(jax.vmap(functools.partial(soft_match, chunk_size=self.chunk_size, **options)))

    @property
    def flops(self) -> int:
        """The flops of the similarities."""
        return self.batch * self.heads * self.keys * self.chunk_size // 2 * self.head_dim


QUICK = (Shape(1, 512, heads=2, head_dim=64),)
# A prompt's first merge, a later one, and other head dimensions, dtypes and chunks.
PRODUCTION = (
    *(Shape(8, keys) for keys in (16384, 32768, 8456)),
    *(Shape(8, 16384, head_dim=head_dim) for head_dim in (64, 256)),
    Shape(8, 16384, dtype=jnp.bfloat16),
    Shape(8, 16384, chunk_size=1024),
)
MEASURED = (Shape(8, 32768),)

if __name__ == "__main__":
    benchmarking.main("soft_match", QUICK, PRODUCTION)
