"""How `vmap` maps the kernels of `cluster_recall`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import batching
from pallas_kernels.partials import Partials


def fold_mapped_axes(recall: Callable[..., Partials]) -> Callable[..., Partials]:
    """Makes `vmap` of a kernel one call of the kernel.

    A mapped axis becomes part of the batch. If the store is not mapped, as for several queries of a sequence, the axis
    becomes part of the heads instead, so that the store is not repeated.

    Args:
        recall: Takes the arguments of `cluster_recall`.

    Returns:
        The same function with this rule for `vmap`.
    """
    folded = jax.custom_batching.custom_vmap(recall)

    @folded.def_vmap
    def rule(axis_size: int, mapped: Any, queries, blocks, indices, lengths) -> tuple[Partials, Any]:
        queries_mapped, blocks_mapped, indices_mapped, lengths_mapped = mapped
        if any(jax.tree.leaves(blocks_mapped)):
            axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, tuple(mapped))
            partials = jax.vmap(batching.fold_mapped_axes(folded), axes)(queries, blocks, indices, lengths)
            return partials, jax.tree.map(lambda _: True, partials)
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

        partials = folded(
            into_heads(queries, queries_mapped),
            blocks,
            into_heads(indices, indices_mapped),
            into_heads(lengths, lengths_mapped),
        )
        return jax.tree.map(out_of_heads, partials), jax.tree.map(lambda _: True, partials)

    return folded
