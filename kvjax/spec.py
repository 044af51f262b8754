"""The static specification of a cache, and shape checks of its inputs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.quantization import KVDtype, KVFormats, check_width, parse_kv_dtype

TILE = 16  # slots, see `round_to_tiles`
# Weights count tokens and RoPE multiplies positions in float32, which holds every integer up to this one.
MAX_TOKENS = 2**24


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Sizes and dtypes of one layer's cache. Everything here is static.

    Attributes:
        batch: batch rows.
        query_heads: query heads of the layer.
        kv_heads: KV heads of the layer.
        head_dim: dimensions of a query and a key.
        max_prompt_tokens: maximum length of the prompt of `prefill`, in tokens.
        max_new_tokens: maximum number of tokens that are appended after it, over all turns of a conversation.
        dtype: dtype of stored keys and values that are not quantized.
        kv_dtype: quantization format of stored keys and values ("int8", "fp8", "int4", "int3", "int2"), a pair of
            formats (keys, values), or None. Staged tokens are never quantized.
        value_dim: dimensions of a value; None for `head_dim`.
        scale: factor of the products q.k; None for 1 / sqrt(head_dim).
        logit_cap: soft cap: logits l become cap * tanh(l / cap) (Gemma 2). None for no cap.
        window: sliding window of the layer in tokens, the query's own token included. Such a layer keeps exactly its
            window, whatever the policy.
        rope_frequencies: RoPE angle per position, in radians, of each pair of dimensions. Only policies that undo or
            change RoPE need it.
        layer: index of the layer.
        layers: number of layers of the model.
        staging_slots: slots of the staging buffer; None for the policy's `compact_every`.
        sequence_shards: number of devices over which the stores that grow with the context are sharded. `kvjax.init`
            sets it from the mesh.

    Raises:
        ValueError: if a value is out of range, or sizes do not fit together.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_prompt_tokens: int
    max_new_tokens: int
    dtype: Any = jnp.float32
    kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None = None
    value_dim: int | None = None
    scale: float | None = None
    logit_cap: float | None = None
    window: int | None = None
    rope_frequencies: tuple[float, ...] | None = None
    layer: int = 0
    layers: int = 1
    staging_slots: int | None = None
    sequence_shards: int = 1

    def __post_init__(self) -> None:
        counts = ["batch", "query_heads", "kv_heads", "head_dim", "max_prompt_tokens", "max_new_tokens", "layers"]
        for name in (*counts, "sequence_shards", *(() if self.staging_slots is None else ("staging_slots",))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name}={value!r} must be an integer")
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.capacity > MAX_TOKENS:
            raise ValueError(
                f"max_prompt_tokens + max_new_tokens = {self.max_prompt_tokens} + {self.max_new_tokens} must be at "
                f"most {MAX_TOKENS} (2**24), the largest position that float32 represents exactly"
            )
        for name in ("value_dim", "scale", "logit_cap", "window"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0, or None")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        if not 0 <= self.layer < self.layers:
            raise ValueError(f"layer={self.layer} must be in [0, layers={self.layers})")
        if self.kv_formats is not None:
            check_width(self.kv_formats.keys, self.head_dim)
            check_width(self.kv_formats.values, self.value_width)

    @property
    def kv_formats(self) -> KVFormats | None:
        """Quantization formats of keys and values; None if they are not quantized."""
        return parse_kv_dtype(self.kv_dtype)

    @property
    def value_width(self) -> int:
        """Dimensions of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def capacity(self) -> int:
        """Maximum number of tokens of a row, prompt and new tokens together."""
        return self.max_prompt_tokens + self.max_new_tokens

    def full_cache_bytes(self, tokens: int) -> int:
        """Returns the bytes of a full cache of one row and layer, to which budgets in percent refer.

        Args:
            tokens: number of tokens in the cache.

        Returns:
            Bytes of unquantized keys and values, without padding.
        """
        return self.kv_heads * (self.head_dim + self.value_width) * jnp.dtype(self.dtype).itemsize * tokens


def check_tokens(
    spec: CacheSpec,
    batch: int,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
) -> None:
    """Checks the shapes and dtypes of new tokens; broadcasting would hide wrong ones.

    Args:
        spec: the cache's spec.
        batch: batch rows of the cache.
        keys: new keys.
        values: new values.
        lengths: tokens per row.

    Raises:
        ValueError: if a shape or dtype does not fit.
    """
    tokens = keys.shape[1] if keys.ndim > 1 else 0
    for name, array, width in (("keys", keys, spec.head_dim), ("values", values, spec.value_width)):
        shape = (batch, tokens, spec.kv_heads, width)
        if array.shape != shape:
            raise ValueError(f"{name} have shape {array.shape}, expected [B, T, H_kv, D] = {shape}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} have dtype {array.dtype}, expected a floating-point dtype")
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {lengths.shape}, expected [B] = {(batch,)}")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths has dtype {lengths.dtype}, expected an integer dtype")


def check_queries(spec: CacheSpec, batch: int, queries: Float[Array, "B T H_q D"], tokens: int | None = None) -> None:
    """Checks the shape of queries.

    Args:
        spec: the cache's spec.
        batch: batch rows of the cache.
        queries: the queries.
        tokens: expected number of tokens T; None for any number.

    Raises:
        ValueError: if the shape does not fit.
    """
    count = queries.shape[1] if tokens is None and queries.ndim > 1 else tokens
    shape = (batch, count, spec.query_heads, spec.head_dim)
    if queries.shape != shape:
        raise ValueError(f"queries have shape {queries.shape}, expected [B, T, H_q, D] = {shape}")


def is_concrete(*arrays: Any) -> bool:
    """Returns whether the values of arrays can be read: outside jit, and on devices of this process.

    Args:
        *arrays: arrays or pytrees of arrays.

    Returns:
        Whether all of them can be read.
    """
    return not any(
        isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(arrays)
    )


def round_to_tiles(slots: int) -> int:
    """Rounds down to a multiple of `TILE` if that removes at most 2% of the slots.

    XLA lays out stores of other sizes in a way that TPU kernels cannot read, and copies them once per decode block.

    Args:
        slots: a number of slots.

    Returns:
        The rounded number.
    """
    excess = slots % TILE
    return slots - excess if 50 * excess <= slots else slots
