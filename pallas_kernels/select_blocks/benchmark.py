"""How fast `select_blocks` chooses: python -m pallas_kernels.select_blocks.benchmark [--quick] [--output FILE]."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.select_blocks import reference, select_blocks


class Shape(NamedTuple):
    """The parts of all heads, and the budget."""

    batch: int
    parts: int
    tokens: int = 4096
    heads: int = 8
    part_tokens: int = 80
    places: int = 16

    def __str__(self) -> str:
        return f"{self.batch} x {self.heads} heads, {self.parts} parts of {self.part_tokens}, {self.tokens} tokens"

    @property
    def blocks(self) -> int:
        """As many as policies read at most."""
        return -(-self.tokens // self.places) + -(-self.tokens // self.part_tokens)

    def arguments(self, array: Any) -> tuple[Any, Any, Any]:
        """Scores, sizes and first blocks, made by `array(shape, dtype)`."""
        heads = (self.batch, self.heads, self.parts)
        return array(heads, jnp.float32), array(heads, jnp.int32), array(heads, jnp.int32)

    def function(self, form: Callable[..., Any] = select_blocks, **options: Any) -> Callable[..., Any]:
        """The op, or a form of it, on all heads."""
        sizes = {"max_tokens": self.tokens, "max_blocks": self.blocks, "block_size": self.places}
        return jax.vmap(jax.vmap(functools.partial(form, **sizes, **options)))


# Clusters of ClusterKV and pages of Quest.
PRODUCTION = (
    *(Shape(batch, tokens // 80) for batch in (1, 8) for tokens in (32768, 131072)),
    *(Shape(1, tokens // 16, part_tokens=16) for tokens in (32768, 131072)),
    Shape(8, 410, heads=32),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    for shape in (Shape(1, 64, tokens=256, heads=2),) if quick else PRODUCTION:
        abstract = shape.arguments(jax.ShapeDtypeStruct)
        moved = benchmarking.array_bytes(abstract, jax.eval_shape(shape.function(), *abstract))
        yield benchmarking.Case(str(shape), functools.partial(_forms, shape), moved)


def _forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform, and both of XLA's; nothing else is known to do the same."""

    def array(size: tuple[int, ...], dtype: Any) -> Any:
        if dtype == jnp.int32:
            return jnp.full(size, shape.part_tokens)
        return jax.random.normal(jax.random.key(0), size, dtype)

    score, size, _ = shape.arguments(array)
    needed = -(-size // shape.places)
    arguments = score, size, jnp.cumsum(needed, axis=-1) - needed
    named = {
        "kvjax": shape.function(),
        "xla": shape.function(reference.select_by_sorting),
        "xla, comparing": shape.function(reference.select_by_comparing),
    }
    return {name: benchmarking.Form(form, arguments) for name, form in named.items()}


if __name__ == "__main__":
    benchmarking.main("select_blocks", cases)
