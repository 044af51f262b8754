"""The static specification of a cache, and shape checks of its inputs."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.messages import shorten
from kvjax.quantization import KVDtype, KVFormats, check_width, parse_kv_dtype
from pallas_kernels.weighted_decode import SLOT_TILE

TILE = 16  # slots, see `round_to_tiles`
# Weights count tokens and RoPE multiplies positions in float32, which holds every integer up to this one.
MAX_TOKENS = 2**24


# The integer fields of `CacheSpec` that may be 0; the smallest value of the others is 1.
_FROM_ZERO = ("max_new_tokens", "layer", "staging_slots")


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """Sizes and dtypes of one layer's cache. Everything here is static.

    Attributes:
        batch: batch rows.
        query_heads: query heads of the layer.
        kv_heads: KV heads of the layer.
        head_dim: dimensions of a query and a key.
        max_prompt_tokens: maximum length of the prompt of `prefill`, in tokens.
        max_new_tokens: maximum number of tokens that are appended after it, over all turns of a conversation; 0 for a
            prefix that `kvjax.freeze` freezes.
        dtype: dtype of stored keys and values that are not quantized.
        kv_dtype: quantization format of stored keys and values ("int8", "fp8", "int4", "int3", "int2"), a pair of
            formats (keys, values), or None. Staged tokens are never quantized. "bfloat16" sets `dtype`, whatever the
            dtype of the model.
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
        head_shards: number of devices over which KV heads are sharded. `kvjax.init` sets it from the mesh.

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
    head_shards: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int or (field.type == int | None and value is not None):
                checked = check_integer(field.name, value, 0 if field.name in _FROM_ZERO else 1)
                object.__setattr__(self, field.name, checked)
        for name in ("scale", "logit_cap"):
            if (value := getattr(self, name)) is not None and not (is_number(value) and value > 0):
                raise ValueError(f"{name}={shorten(value)} must be a finite number above 0, or None")
        if self.rope_frequencies is not None:
            object.__setattr__(self, "rope_frequencies", self._parse_frequencies(self.rope_frequencies))
        if self.kv_dtype == "bfloat16":
            object.__setattr__(self, "dtype", jnp.bfloat16)
            object.__setattr__(self, "kv_dtype", None)
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise ValueError(f"dtype={self.dtype!r} must be a floating-point dtype")
        if self.capacity > MAX_TOKENS:
            raise ValueError(
                f"max_prompt_tokens + max_new_tokens = {self.max_prompt_tokens} + {self.max_new_tokens} must be at "
                f"most {MAX_TOKENS} (2**24), the largest position that float32 represents exactly"
            )
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.layer >= self.layers:
            raise ValueError(f"layer={self.layer} must be in [0, layers={self.layers})")
        if self.kv_formats is not None:
            check_width(self.kv_formats.keys, self.head_dim)
            check_width(self.kv_formats.values, self.value_width)

    def _parse_frequencies(self, frequencies: Any) -> tuple[float, ...]:
        """Returns RoPE frequencies as floats."""
        count = self.head_dim // 2
        valid = not isinstance(frequencies, str) and len(frequencies) == count and all(map(is_number, frequencies))
        if not valid:
            raise ValueError(
                f"rope_frequencies={shorten(frequencies)} must be head_dim / 2 = {count} finite numbers, or None"
            )
        return tuple(map(float, frequencies))

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
        """Returns the bytes of a full bfloat16 cache of one row and layer, to which budgets in percent refer.

        The dtype of the cache does not matter: a float32 cache of all tokens takes 200%.

        Args:
            tokens: number of tokens in the cache.

        Returns:
            Bytes of keys and values, without padding.
        """
        return self.kv_heads * (self.head_dim + self.value_width) * jnp.dtype(jnp.bfloat16).itemsize * tokens


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Returns an integer as Python's.

    Args:
        value: its value; NumPy's integers are allowed, bools are not.
        minimum: smallest allowed value.

    Returns:
        The integer.

    Raises:
        ValueError: if it is not an integer or too small.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name}={shorten(value)} must be an integer")
    if value < minimum:
        raise ValueError(f"{name}={shorten(value)} must be at least {minimum}")
    return int(value)


def is_number(value: Any) -> bool:
    """Whether a value is a real number that is finite as a float; bools are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a large integer
        return False


def check_tokens(
    spec: CacheSpec,
    batch: int,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
) -> None:
    """Checks the shapes and dtypes of new tokens; broadcasting would hide wrong ones.

    Args:
        lengths: tokens per row.

    Raises:
        ValueError: if a shape or dtype does not fit, or there are no tokens.
    """
    check_dtype("keys", keys, jnp.floating)
    tokens = max(keys.shape[1], 1) if keys.ndim > 1 else 1
    for name, array, width in (("keys", keys, spec.head_dim), ("values", values, spec.value_width)):
        check_dtype(name, array, jnp.floating)
        shape = (batch, tokens, spec.kv_heads, width)
        if array.shape != shape:
            raise ValueError(f"{name} have shape {array.shape}, expected [B, T, H_kv, D] = {shape}")
    if lengths is None:
        return
    check_dtype("lengths", lengths, jnp.integer)
    if lengths.shape != (batch,):
        raise ValueError(f"lengths have shape {lengths.shape}, expected [B] = {(batch,)}")


def check_dtype(name: str, array: Any, kind: Any) -> None:
    """Checks that an argument is an array with a dtype that JAX supports.

    Args:
        kind: `jnp.floating` or `jnp.integer`.

    Raises:
        TypeError: if it is not an array.
        ValueError: if it has another dtype.
    """
    if not isinstance(array, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be a JAX or NumPy array, got {type(array).__name__}")
    if not jnp.issubdtype(array.dtype, kind):
        article = "an integer" if kind is jnp.integer else "a floating-point"
        raise ValueError(f"{name} have dtype {array.dtype}, expected {article} dtype")
    if isinstance(array, np.ndarray) and not array.dtype.isnative:
        raise ValueError(f"{name} have dtype {array.dtype.str}, expected the byte order of this machine")


def check_queries(spec: CacheSpec, batch: int, queries: Float[Array, "B T H_q D"], tokens: int | None = None) -> None:
    """Checks the shape and dtype of queries.

    Args:
        tokens: expected number of tokens T; None for any number from 1.

    Raises:
        ValueError: if the shape or dtype does not fit.
    """
    check_dtype("queries", queries, jnp.floating)
    count = max(queries.shape[1], 1) if tokens is None and queries.ndim > 1 else tokens
    shape = (batch, count, spec.query_heads, spec.head_dim)
    if queries.shape != shape:
        raise ValueError(f"queries have shape {queries.shape}, expected [B, T, H_q, D] = {shape}")


def check_sink_logits(sink_logits: Float[Array, "H_q"] | None, query_heads: int) -> None:
    """Checks the logits of attention sinks.

    Args:
        sink_logits: one logit per query head; -inf for a head without a sink.

    Raises:
        ValueError: if the shape or dtype does not fit, or a known logit is NaN or inf.
    """
    if sink_logits is None:
        return
    check_dtype("sink_logits", sink_logits, jnp.floating)
    if sink_logits.shape != (query_heads,):
        raise ValueError(f"sink_logits have shape {sink_logits.shape}, expected [H_q] = {(query_heads,)}")
    if is_concrete(sink_logits) and not np.all(np.asarray(sink_logits, np.float32) < np.inf):
        raise ValueError(f"sink_logits={np.asarray(sink_logits).tolist()} must be finite, or -inf for no sink")


def is_concrete(*arrays: Any) -> bool:
    """Returns whether the values of arrays can be read: outside jit, and on devices of this process.

    Returns:
        Whether all of them can be read.
    """
    return not any(
        isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(arrays)
    )


def allocated_slots(slots: int) -> int:
    """Returns the slots that a store of `slots` entries per KV head allocates: the next multiple of 8.

    The kernel for Hopper GPUs reads no store of another size, and XLA copies such a store at every step on TPUs. The
    added slots come last and stay empty.

    Args:
        slots: maximum number of entries.

    Returns:
        The number of slots.
    """
    return -(-slots // SLOT_TILE) * SLOT_TILE


def round_to_tiles(slots: int) -> int:
    """Rounds down to a multiple of `TILE` if that removes at most 2% of the slots.

    XLA lays out stores of other sizes in a way that TPU kernels cannot read, and copies them once per decode block.

    Returns:
        The rounded number.
    """
    excess = slots % TILE
    return slots - excess if 50 * excess <= slots else slots
