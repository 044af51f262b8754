"""What `vmap` does to kernels that recall."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import batching
from pallas_kernels.weighted_decode import Partials


def fold_mapped_axes(recall: Callable[..., Partials]) -> Callable[..., Partials]:
    """A form of `cluster_recall`, which under `vmap` is called once. A mapped axis becomes part of the batch; where all
    share one store, such as several queries of a row, it becomes part of the heads instead, and the store is not
    repeated."""
    folded = jax.custom_batching.custom_vmap(recall)

    @folded.def_vmap
    def rule(axis_size: int, mapped: Any, rows, blocks, number, count) -> tuple[Partials, Any]:
        of_rows, of_blocks, of_number, of_count = mapped
        if any(jax.tree.leaves(of_blocks)):
            axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
            sums = jax.vmap(batching.fold_mapped_axes(folded), axes)(rows, blocks, number, count)
            return sums, jax.tree.map(lambda _: True, sums)
        kv_heads = blocks.entries.shape[1]

        def into_heads(x: Array, is_mapped: bool) -> Array:
            x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            _, batch, heads, *rest = x.shape
            grouped = x.reshape(axis_size, batch, kv_heads, heads // kv_heads, *rest)
            return jnp.moveaxis(grouped, 0, 2).reshape(batch, axis_size * heads, *rest)

        def out_of_heads(x: Array) -> Array:
            batch, heads, *rest = x.shape
            grouped = x.reshape(batch, kv_heads, axis_size, heads // kv_heads // axis_size, *rest)
            return jnp.moveaxis(grouped, 2, 0).reshape(axis_size, batch, heads // axis_size, *rest)

        sums = folded(into_heads(rows, of_rows), blocks, into_heads(number, of_number), into_heads(count, of_count))
        return jax.tree.map(out_of_heads, sums), jax.tree.map(lambda _: True, sums)

    return folded
