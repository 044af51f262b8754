"""Measures the balanced walk: python -m pallas_kernels.balanced_walk.benchmark [--quick] [--output FILE].

Decisions depend on each other, so that neither bytes nor flops limit the time; compare with the time of XLA.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.balanced_walk import Block, assign_signs, thin_pairs


@dataclasses.dataclass(frozen=True)
class Shape(benchmarking.Shape):
    """The blocks of all heads."""

    product_dtype = jnp.float32

    batch: int
    entries: int
    op: Literal["pairs", "signs"] = "pairs"
    heads: int = 8
    head_dim: int = 128

    def arguments(self, array: Callable[..., Any]) -> tuple[Any, ...]:
        """Returns blocks, draws, and weights or gains, created by `array(shape, dtype)`."""

        def per_head(*shape: int) -> Any:
            return array((self.batch, self.heads, *shape), jnp.float32)

        store = per_head(self.entries, self.head_dim)
        block = Block(store, store, per_head(), per_head(), per_head())
        decisions = self.entries // 2 if self.op == "pairs" else self.entries
        return block, per_head(decisions), per_head(self.entries)

    def random_arguments(self) -> tuple[Any, ...]:
        """Returns arguments whose draws are in [0, 1) and whose kernels are finite."""
        uniforms = functools.partial(jax.random.uniform, jax.random.key(0))
        return self.arguments(lambda *array: uniforms(*array) / self.head_dim**0.5)

    def function(self, **options: Any) -> Callable[..., Any]:
        """Returns the op for all heads."""
        op: Any = functools.partial(assign_signs, **options)
        if self.op == "pairs":
            op = functools.partial(thin_pairs, gamma=4.0, **options)
        return jax.vmap(jax.vmap(op))

    @property
    def flops(self) -> int:
        """The flops of the kernel matrices."""
        return 4 * self.batch * self.heads * self.entries**2 * self.head_dim


QUICK = (Shape(1, 64, heads=2, head_dim=64), Shape(1, 64, "signs", 2, 64))
# Blocks of a prompt, or two bins of a tree of 4096, 2048, 8192 and 16384 slots; blocks of the other variants.
PRODUCTION = (
    *(Shape(8, entries) for entries in (512, 256, 1024, 2048)),
    Shape(8, 512, head_dim=64),
    Shape(8, 512, op="signs"),
    Shape(64, 128, op="signs"),
)

if __name__ == "__main__":
    benchmarking.main("balanced_walk", QUICK, PRODUCTION)
