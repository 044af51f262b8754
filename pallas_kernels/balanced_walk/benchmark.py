"""Measures the balanced walk: python -m pallas_kernels.balanced_walk.benchmark [--quick] [--output FILE].

Decisions depend on each other, so that neither bytes nor flops limit the time; compare with the time of XLA.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.balanced_walk import Block, assign_signs


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """The blocks of all heads."""

    product_dtype = jnp.float32

    batch: int
    entries: int
    heads: int = 8
    head_dim: int = 128

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns blocks, draws and gains, created by `array(shape, dtype)`."""

        def per_head(*shape: int) -> Any:
            return array((self.batch, self.heads, *shape), jnp.float32)

        store = per_head(self.entries, self.head_dim)
        block = Block(store, store, per_head(), per_head())
        return block, per_head(self.entries), per_head(self.entries)

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns arguments whose draws are in [0, 1) and whose exponents are at most 1."""
        uniforms = functools.partial(jax.random.uniform, jax.random.key(0))
        return self.arguments(lambda *array: uniforms(*array) / self.head_dim**0.5)

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for all heads."""
        return jax.vmap(jax.vmap(functools.partial(assign_signs, **options)))

    @property
    def flops(self) -> int:
        """The flops of the kernel matrices."""
        return 4 * self.batch * self.heads * self.entries**2 * self.head_dim


QUICK = (Shape(1, 64, heads=2, head_dim=64),)
# Blocks of prompts of 16,384 and of 2,048 tokens, and of the single-layer study.
PRODUCTION = (Shape(128, 128), Shape(16, 128), Shape(64, 256), Shape(128, 128, head_dim=64))
MEASURED = (Shape(128, 128),)

if __name__ == "__main__":
    benchmarking.main("balanced_walk", QUICK, PRODUCTION)
