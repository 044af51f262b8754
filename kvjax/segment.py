"""The inputs of attention: `Segment`s of entries, and `BlockStoreRead`s, from which each query selects blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.block_cache import BlockCache
from kvjax.block_store import BlockStore
from kvjax.quantization import QuantizedArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """S weighted entries per KV head. An entry is a token, or stands for several tokens.

    Entry s adds exp(q.k_s / sqrt(D) + log_num_s) v_s to the numerator of attention and
    exp(q.k_s / sqrt(D) + log_den_s) to its denominator. For example, the mean of n tokens has log_num = log n.

    Slots outside [start, stop) have no weight, but must hold finite numbers: backends may multiply them by zero.

    Attributes:
        keys: [B, H_kv, S, D], an array or a `QuantizedArray`.
        values: [B, H_kv, S, D_v], an array or a `QuantizedArray`; None for entries of the denominator alone.
        log_num: float32 log-weights of the numerator; None for 0. -inf marks an empty slot.
        log_den: float32 log-weights of the denominator; None for the same as `log_num`. -inf marks an entry of the
            numerator alone.
        start: int32, first slot that is read; None for 0.
        stop: int32, end of the slots that are read; None for S.
        query_rope_angles: angles in radians by which queries are rotated before they attend to the segment.
        sequence_sharded: whether the slots are sharded over devices, whose partial softmaxes are then merged.
        kv_heads: indices of the layer's KV heads that the segment holds, an array of JAX or NumPy; None for all heads
            in order.

    Raises:
        ValueError: if shapes do not fit.
    """

    keys: Float[Array, "B H_kv S D"] | QuantizedArray
    values: Float[Array, "B H_kv S D_v"] | QuantizedArray | None
    log_num: Float[Array, "B H_kv S"] | None = None
    log_den: Float[Array, "B H_kv S"] | None = None
    start: Int[Array, "B #T"] | None = None
    stop: Int[Array, "B #T"] | None = None
    query_rope_angles: Float[Array, "B #T half_D"] | None = None
    sequence_sharded: bool = dataclasses.field(default=False, metadata={"static": True})
    kv_heads: Int[Array, "H_kv"] | Int[np.ndarray, "H_kv"] | None = None

    def __post_init__(self) -> None:
        if not hasattr(self.keys, "shape"):
            return  # tree transformations also build segments of other objects
        shape = self.keys.shape[:3]
        if self.values is not None and self.values.shape[:3] != shape:
            raise ValueError(f"values have shape {self.values.shape}, expected [B, H_kv, S] = {shape} in front")
        for name in ("log_num", "log_den"):
            weight = getattr(self, name)
            if weight is not None and weight.shape != shape:
                raise ValueError(f"{name} has shape {weight.shape}, expected [B, H_kv, S] = {shape}")
        for name in ("start", "stop"):
            bound = getattr(self, name)
            if bound is not None and (bound.ndim != 2 or bound.shape[0] != shape[0]):
                raise ValueError(f"{name} has shape {bound.shape}, expected [B, 1] or [B, T] with B = {shape[0]}")


class BlockSelection(NamedTuple):
    """The blocks that one query of every row attends to.

    Attributes:
        block_indices: int32 indices of K blocks per KV head (H = H_kv) or per query head (H = H_q).
        block_lengths: int32 number of tokens read of each block, from its first on; 0 for an unused index.
        residual: segments that approximate the tokens that are not read, such as centroids of clusters.
    """

    block_indices: Int[Array, "B H K"]
    block_lengths: Int[Array, "B H K"]
    residual: tuple[Segment, ...] = ()


@dataclasses.dataclass(frozen=True)
class BlockStoreRead:
    """A block store from which every query reads the blocks that it selects.

    Attributes:
        store: the blocks, [B, H_kv, N, P, ...].
        select: maps a query [B, 1, H_q, D] to its `BlockSelection`, without reading the stored keys and values.
        index: arrays that `select` reads; they are counted as bytes read.
        block_cache: a device cache of the blocks of the last steps, if the store is in host memory.
        kv_heads: indices of the layer's KV heads that the store holds; None for all heads in order.
    """

    store: BlockStore
    select: Callable[[Array], BlockSelection]
    index: tuple[Any, ...]
    block_cache: BlockCache | None = None
    kv_heads: Int[Array, "H_kv"] | Int[np.ndarray, "H_kv"] | None = None


SegmentLike = Segment | BlockStoreRead


def flatten_slots(x: Array | QuantizedArray) -> Any:
    """Merges the axes between heads and vectors: [B, H, ..., S, D] becomes [B, H, slots, D].

    Args:
        x: keys or values, possibly quantized.

    Returns:
        The array or `QuantizedArray` with one axis of slots.
    """

    def flat(x: Array, trailing: int) -> Array:
        return x.reshape(*x.shape[:2], -1, *x.shape[x.ndim - trailing :])

    if not isinstance(x, QuantizedArray):
        return flat(x, 1)
    offset = x.offset if x.offset is None else x.offset.reshape(*x.offset.shape[:2], x.offset.shape[-1])
    return dataclasses.replace(x, values=flat(x.values, 1), scale=flat(x.scale, 0), offset=offset)
