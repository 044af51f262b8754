"""How `vmap` maps the kernels of `cluster_recall`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import batching
from pallas_kernels.cluster_recall.blocks import Inputs
from pallas_kernels.partials import Partials


def fold_mapped_axes(recall: Callable[[Inputs], Partials]) -> Callable[[Inputs], Partials]:
    """Makes `vmap` of a kernel one call of the kernel.

    A mapped axis becomes part of the batch. If the store is not mapped, as for several queries of a sequence, the axis
    becomes part of the heads instead, so that the store is not repeated.

    Returns:
        The same function with this rule for `vmap`.
    """
    folded = jax.custom_batching.custom_vmap(recall)

    @folded.def_vmap
    def rule(axis_size: int, mapped: Any, inputs: Inputs) -> tuple[Partials, Any]:
        (is_mapped,) = mapped
        if any(jax.tree.leaves(is_mapped.blocks)):
            axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, (is_mapped,))
            partials = jax.vmap(batching.fold_mapped_axes(folded), axes)(inputs)
            return partials, jax.tree.map(lambda _: True, partials)
        kv_heads = inputs.blocks.entries.shape[1]

        def into_heads(x: Array, is_mapped: bool) -> Array:
            """Returns x with the mapped axis, which is added unless `is_mapped`, in its heads."""
            x = x if is_mapped else jnp.broadcast_to(x, (axis_size, *x.shape))
            _, batch, heads, *rest = x.shape
            grouped = x.reshape(axis_size, batch, kv_heads, heads // kv_heads, *rest)
            return jnp.moveaxis(grouped, 0, 2).reshape(batch, axis_size * heads, *rest)

        def out_of_heads(x: Array) -> Array:
            """Returns x with the mapped axis of its heads as the first axis."""
            batch, heads, *rest = x.shape
            grouped = x.reshape(batch, kv_heads, axis_size, heads // kv_heads // axis_size, *rest)
            return jnp.moveaxis(grouped, 2, 0).reshape(axis_size, batch, heads // axis_size, *rest)

        names = ("queries", "block_indices", "block_lengths")
        merged: Any = {name: into_heads(getattr(inputs, name), getattr(is_mapped, name)) for name in names}
        partials = folded(inputs._replace(**merged))
        return jax.tree.map(out_of_heads, partials), jax.tree.map(lambda _: True, partials)

    return folded
