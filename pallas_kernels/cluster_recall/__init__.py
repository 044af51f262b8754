"""Attention to selected blocks of a store, which are read in place."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.cluster_recall import mosaic_gpu, mosaic_tpu, oracle, xla
from pallas_kernels.cluster_recall.blocks import Blocks as Blocks
from pallas_kernels.cluster_recall.blocks import Inputs
from pallas_kernels.cluster_recall.blocks import blocks_as_entries as blocks_as_entries
from pallas_kernels.cluster_recall.blocks import key_value_columns as key_value_columns
from pallas_kernels.cluster_recall.blocks import padded_width as padded_width
from pallas_kernels.cluster_recall.mosaic_tpu import TpuConfig as TpuConfig
from pallas_kernels.cluster_recall.xla import gather_blocks as gather_blocks
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.hopper import GpuConfig as GpuConfig
from pallas_kernels.partials import Partials


def _is_plain(inputs: Inputs) -> bool:
    """Whether numbers need no conversion, so that a CPU only has to read entire rows once."""
    return inputs.blocks.entries.dtype == jnp.float32 and inputs.blocks.scale is None


def _has_no_halves(inputs: Inputs) -> bool:
    """Whether XLA:CPU converts numbers fast: those of two bytes are slow, and slower in chunks."""
    return inputs.blocks.entries.dtype.itemsize != 2


_ROWS, _COLUMNS = (functools.partial(xla.attend_in_chunks, one) for one in (xla.attend_to_rows, xla.attend_to_columns))

IMPLEMENTATIONS = (
    Implementation("mosaic_tpu", mosaic_tpu.cluster_recall, ("tpu",), mosaic_tpu.check, TpuConfig, is_kernel=True),
    Implementation("mosaic_gpu", mosaic_gpu.cluster_recall, ("cuda",), mosaic_gpu.check, GpuConfig, is_kernel=True),
    Implementation("xla_row_chunks", _ROWS, ("cpu",), xla.check_rows, is_preferred=_is_plain),
    Implementation("xla_chunks", _COLUMNS, ("cpu",), is_preferred=_has_no_halves),
    Implementation("xla_gather", xla.attend_to_columns),
    Implementation("oracle", oracle.cluster_recall),
)


def cluster_recall(
    queries: Float[Array, "B H R D"],
    blocks: Blocks,
    block_indices: Int[Array, "B H K"],
    block_lengths: Int[Array, "B H K"],
    *,
    implementation: str | None = None,
    config: TpuConfig | GpuConfig | None = None,
    interpret: Any = False,
) -> Partials:
    """Computes partials of attention to the first tokens of selected blocks.

    Raises ValueError if shapes do not match or the implementation is unknown, and NotImplementedError if a requested
    kernel does not support the arguments.

    Args:
        queries: Queries that share a selection: the R queries of each KV head (H = H_kv), or R queries of each query
            head (H is a multiple of H_kv, and head h reads KV head h // (H / H_kv)).
        block_indices: The selected blocks, int32 in [0, N).
        block_lengths: The number of tokens of each selected block that are attended to, its first ones, int32. Blocks
            of length 0 are not read.
        implementation: A name in `IMPLEMENTATIONS`, "xla" for all of its forms, or None for the first one that applies.
        config: The configuration of the implementation that it belongs to; None for the defaults.
        interpret: Passed to `pallas_call` or `plgpu.kernel`.

    Returns:
        Partials over the selected tokens, float32.
    """
    inputs = Inputs(queries, blocks, block_indices, block_lengths)
    _check_shapes(inputs)
    return dispatch("cluster_recall", IMPLEMENTATIONS, implementation, inputs, config=config, interpret=interpret)


def _check_shapes(inputs: Inputs) -> None:
    queries, blocks, block_indices, block_lengths = inputs
    batch, heads, _, head_dim = queries.shape
    shape, min_width = blocks.entries.shape, max(head_dim, blocks.value_dim or 0)
    if len(shape) != 5 or shape[0] != batch or heads % shape[1] or shape[4] % 2 or blocks.width < min_width:
        raise ValueError(
            f"entries have shape {shape}; for queries [B, H, R, D] of shape {queries.shape} it must be "
            "[B, H_kv, N, P, 2*W], where H is a multiple of H_kv and W is at least D and D_v"
        )
    if blocks.scale is not None and blocks.scale.shape != (*shape[:4], 2):
        raise ValueError(f"scale has shape {blocks.scale.shape}; it must be [B, H_kv, N, P, 2] = {(*shape[:4], 2)}")
    if blocks.scale is None and blocks.key_bits is not None:
        raise ValueError(f"scale is None; packed blocks with key_bits={blocks.key_bits} need a scale")
    for name, array in {"block_indices": block_indices, "block_lengths": block_lengths}.items():
        if array.shape != block_indices.shape or array.shape[:2] != (batch, heads) or not array.shape[2:] > (0,):
            raise ValueError(
                f"{name} has shape {array.shape}; it must be [B, H, K] = [{batch}, {heads}, K] with K of at least 1"
            )
