"""The definition of `cluster_recall`: attention to the first tokens of selected blocks, which are gathered."""

import jax.numpy as jnp

from pallas_kernels.cluster_recall.blocks import Inputs, blocks_as_entries
from pallas_kernels.partials import Partials
from pallas_kernels.weighted_decode import oracle as weighted_decode


def cluster_recall(inputs: Inputs) -> Partials:
    """Computes the partials of `cluster_recall`, in float32."""
    queries, blocks, indices, lengths = inputs
    batch, heads, _, head_dim = queries.shape
    row = jnp.arange(batch)[:, None, None]
    kv_head = (jnp.arange(heads) // (heads // blocks.entries.shape[1]))[:, None]
    gathered = blocks.entries[row, kv_head, indices]
    scale = None if blocks.scale is None else blocks.scale[row, kv_head, indices]
    return weighted_decode.weighted_decode(queries, blocks_as_entries(blocks, gathered, scale, lengths, head_dim))
