"""How fast blocks are halved: python -m pallas_kernels.balanced_walk.benchmark [--quick] [--output FILE].

Decisions are made one after the other, so that neither bytes nor products limit the time: what counts is the time
against XLA's.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.balanced_walk import Block, assign_signs, thin_pairs


class Shape(NamedTuple):
    """Blocks of all heads."""

    batch: int
    entries: int
    op: Literal["pairs", "signs"] = "pairs"
    heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"{self.op}, {self.batch} x {self.heads} heads, {self.entries} x {self.head_dim} float32"

    def arguments(self, array: Any) -> tuple[Any, ...]:
        """Blocks, draws, and weights or gains, made by `array(shape, dtype)`."""
        of_heads = lambda *shape: array((self.batch, self.heads, *shape), jnp.float32)  # noqa: E731
        store = of_heads(self.entries, self.head_dim)
        block = Block(store, store, *(of_heads() for _ in range(3)))
        decisions = self.entries // 2 if self.op == "pairs" else self.entries
        return block, of_heads(decisions), of_heads(self.entries)

    def function(self, **options: Any) -> Callable[..., Any]:
        """The op on all heads."""
        one: Any = functools.partial(assign_signs, **options)
        if self.op == "pairs":
            one = functools.partial(thin_pairs, gamma=4.0, **options)
        return jax.vmap(jax.vmap(one))


# Blocks of a prompt, or two bins of a tree of 4096, 2048, 8192 and 16384 slots; the other variants' blocks.
PRODUCTION = (
    Shape(8, 512),
    Shape(8, 256),
    Shape(8, 1024),
    Shape(8, 2048),
    Shape(8, 512, head_dim=64),
    Shape(8, 512, op="signs"),
    Shape(64, 128, op="signs"),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    for shape in (Shape(1, 64, heads=2, head_dim=64), Shape(1, 64, "signs", 2, 64)) if quick else PRODUCTION:
        abstract = shape.arguments(jax.ShapeDtypeStruct)
        moved = benchmarking.array_bytes(abstract, jax.eval_shape(shape.function(), *abstract))
        flops = 4 * shape.batch * shape.heads * shape.entries**2 * shape.head_dim
        forms = functools.partial(_forms, shape)
        yield benchmarking.Case(str(shape), forms, moved, flops, product_type=jnp.float32)


def _forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform and XLA's; nothing else is known to do the same."""
    draws = iter(jax.random.split(jax.random.key(0), 6))

    def array(size: tuple[int, ...], dtype: Any) -> Any:
        return jax.random.uniform(next(draws), size, dtype) / shape.head_dim**0.5

    arguments = shape.arguments(array)
    return {
        "kvjax": benchmarking.Form(shape.function(), arguments),
        "xla": benchmarking.Form(shape.function(implementation="xla"), arguments),
    }


if __name__ == "__main__":
    benchmarking.main("balanced_walk", cases)
