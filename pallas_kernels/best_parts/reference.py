"""The meaning of `best_parts`, in plain jax.numpy: by the order of the scores, which is fast on CPU, and by comparing
every part with every other, which is fast where launches are dear."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.best_parts.base import Ranked

COMPARED = 2048  # parts that a device compares, each with each, sooner than it sorts them


def best_parts(*given: Any, **sizes: Any) -> Ranked:
    """By comparing on devices, up to `COMPARED` parts; by sorting elsewhere."""
    sort, compare = (functools.partial(form, **sizes) for form in (by_sorting, by_comparing))
    if not 0 < given[0].shape[0] <= COMPARED:
        return sort(*given)
    return jax.lax.platform_dependent(*given, default=sort, tpu=compare, cuda=compare)


def by_sorting(
    score: Float[Array, "C"],
    size: Int[Array, "C"],
    first: Int[Array, "C"],
    skip: Int[Array, ""] | int | None = None,
    *,
    tokens: int,
    blocks: int,
    places: int,
) -> Ranked:
    """`best_parts` by the order of the scores: little work, and a dozen launches on a GPU."""
    parts = min(score.shape[0], blocks) if skip is None else score.shape[0]
    skip = 0 if skip is None else skip
    if not parts:
        return Ranked(jnp.zeros(blocks, jnp.int32), jnp.zeros(blocks, jnp.int32), jnp.zeros_like(size))
    # Each part that is taken takes at least one block, so no more than K parts matter.
    _, order = jax.lax.top_k(jnp.where(size > 0, score, -jnp.inf), parts)
    sizes = size[order]
    taken = jnp.clip(tokens - (jnp.cumsum(sizes) - sizes), 0, sizes)
    needed = -(-taken // places)
    needed = jnp.clip(skip + blocks - (jnp.cumsum(needed) - needed), 0, needed)
    taken = jnp.minimum(taken, needed * places)
    end = jnp.cumsum(needed)

    slot = skip + jnp.arange(blocks, dtype=jnp.int32)
    part = jnp.sum(end <= slot[:, None], axis=1)
    used = part < parts
    part = jnp.minimum(part, parts - 1)
    place = slot - (end - needed)[part]
    count = jnp.where(used, jnp.clip(taken[part] - places * place, 0, places), 0)
    block = jnp.where(used, first[order][part] + place, 0)
    return Ranked(block, count, jnp.zeros_like(size).at[order].set(taken))


def by_comparing(
    score: Float[Array, "C"],
    size: Int[Array, "C"],
    first: Int[Array, "C"],
    skip: Int[Array, ""] | int | None = None,
    *,
    tokens: int,
    blocks: int,
    places: int,
) -> Ranked:
    """`best_parts` by comparing every part with every other: sums that a GPU or a TPU has in three passes, without a
    sort, a scatter or a gather."""
    skip = 0 if skip is None else skip
    score = jnp.where((size > 0) & (score == score), score, -jnp.inf)
    number = jnp.arange(score.shape[0], dtype=jnp.int32)

    def of_better(x: Int[Array, "C"]) -> Int[Array, "C"]:
        """The sum over all that come before each part."""
        # Compared anew for each sum: comparisons that are kept for both would fill memory.
        own, x = jax.lax.optimization_barrier((score, x))
        before = (own[None] > own[:, None]) | ((own[None] == own[:, None]) & (number[None] < number[:, None]))
        return jnp.sum(jnp.where(before, x[None], 0), axis=1, dtype=jnp.int32)

    taken = jnp.clip(tokens - of_better(size), 0, size)
    needed = -(-taken // places)
    begin = of_better(needed)
    needed = jnp.clip(skip + blocks - begin, 0, needed)
    taken = jnp.minimum(taken, needed * places)

    slot = skip + jnp.arange(blocks, dtype=jnp.int32)
    place = slot[:, None] - begin
    fills = (place >= 0) & (place < needed)
    of_part = lambda x: jnp.sum(jnp.where(fills, x, 0), axis=1, dtype=jnp.int32)  # noqa: E731
    return Ranked(of_part(first + place), of_part(jnp.clip(taken - places * place, 0, places)), taken)
