"""How fast `soft_match` searches: python -m pallas_kernels.soft_match.benchmark [--quick] [--output FILE]."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import benchmarking
from pallas_kernels.soft_match import soft_match


class Shape(NamedTuple):
    """The keys of all heads, and the chunks in which partners are sought."""

    batch: int
    keys: int
    heads: int = 8
    head_dim: int = 128
    chunk_size: int = 256
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.heads} heads, {self.keys} x {self.head_dim}"
        return f"{sizes} {jnp.dtype(self.dtype).name}, chunks of {self.chunk_size}"

    def arguments(self, array: Any) -> tuple[Any, Any]:
        """Keys and how many there are, made by `array(shape, dtype)`."""
        heads = self.batch, self.heads
        return array((*heads, self.keys, self.head_dim), self.dtype), array(heads, jnp.int32)

    def function(self, **options: Any) -> Callable[..., Any]:
        """The op on all heads."""
        return jax.vmap(jax.vmap(functools.partial(soft_match, chunk_size=self.chunk_size, **options)))


# A prompt's first merging, a later one's, and what models of other kinds bring.
PRODUCTION = (
    Shape(8, 16384),
    Shape(8, 32768),
    Shape(8, 8456),
    Shape(8, 16384, head_dim=64),
    Shape(8, 16384, head_dim=256),
    Shape(8, 16384, dtype=jnp.bfloat16),
    Shape(8, 16384, chunk_size=1024),
)


def cases(quick: bool) -> Iterator[benchmarking.Case]:
    for shape in (Shape(1, 512, heads=2, head_dim=64),) if quick else PRODUCTION:
        abstract = shape.arguments(jax.ShapeDtypeStruct)
        moved = benchmarking.array_bytes(abstract, jax.eval_shape(shape.function(), *abstract))
        flops = shape.batch * shape.heads * shape.keys * shape.chunk_size // 2 * shape.head_dim
        forms = functools.partial(_forms, shape)
        yield benchmarking.Case(str(shape), forms, moved, flops, product_type=jnp.float32)


def _forms(shape: Shape) -> Mapping[str, benchmarking.Form]:
    """kvjax's form for the platform and XLA's; nothing else is known to do the same."""

    def array(size: tuple[int, ...], dtype: Any) -> Any:
        if dtype == jnp.int32:
            return jnp.full(size, shape.keys)
        return jax.random.normal(jax.random.key(0), size, dtype)

    arguments = shape.arguments(array)
    return {
        "kvjax": benchmarking.Form(shape.function(), arguments),
        "xla": benchmarking.Form(shape.function(implementation="xla"), arguments),
    }


if __name__ == "__main__":
    benchmarking.main("soft_match", cases)
