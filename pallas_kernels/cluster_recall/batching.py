"""What `vmap` does to the kernels of `cluster_recall`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.weighted_decode import Sums


def fold_mapped_axes(run: Callable[..., Sums]) -> Callable[..., Sums]:
    """The function, which under `vmap` is called once: mapped rows become rows of the batch, each with a store of its
    own; where all share one store they become heads instead, so that it is not repeated."""
    folded = jax.custom_batching.custom_vmap(run)

    @folded.def_vmap
    def _(size, mapped, rows, blocks, number, count):
        of_rows, of_blocks, of_number, of_count = mapped
        own_stores = any(jax.tree.leaves(of_blocks))
        kv_heads = blocks.entries.shape[-4]

        def spread(x: Array, is_mapped: bool) -> Array:
            return x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))

        def fold(x: Array, is_mapped: bool) -> Array:
            x = spread(x, is_mapped)
            if own_stores:
                return x.reshape(-1, *x.shape[2:])
            _, batch, heads, *rest = x.shape
            by_kv_head = jnp.moveaxis(x.reshape(size, batch, kv_heads, heads // kv_heads, *rest), 0, 2)
            return by_kv_head.reshape(batch, size * heads, *rest)

        def unfold(x: Array) -> Array:
            if own_stores:
                return x.reshape(size, -1, *x.shape[1:])
            batch, heads, *rest = x.shape
            by_kv_head = x.reshape(batch, kv_heads, size, heads // kv_heads // size, *rest)
            return jnp.moveaxis(by_kv_head, 2, 0).reshape(size, batch, heads // size, *rest)

        store = jax.tree.map(fold, blocks, of_blocks) if own_stores else blocks
        sums = folded(fold(rows, of_rows), store, fold(number, of_number), fold(count, of_count))
        return jax.tree.map(unfold, sums), jax.tree.map(lambda _: True, sums)

    return folded
