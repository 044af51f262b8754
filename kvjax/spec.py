"""What a cache is made for, and the checks of what is given to it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax.storage import Storage

TILE = 16  # slots, see `whole_tiles`
# Of a row, at most. Weights count tokens and rotary embedding turns by positions, both in float32, which holds whole
# numbers up to here.
MOST_TOKENS = 2**24


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache is made for. Everything here is static: capacities follow from it and from a policy's settings.

    Attributes:
        batch: rows.
        query_heads, kv_heads, head_dim: of one layer.
        max_prompt: longest prompt in tokens that `prefill` will see.
        max_new: most tokens that will ever be appended after it, over all turns.
        dtype: of stored keys and values.
        value_dim: dimensions of a value, where they are not `head_dim`.
        scale: of logits, where it is not 1 / sqrt(head_dim).
        logit_cap: logits l become cap tanh(l / cap) (Gemma 2's soft cap).
        window: tokens that a query sees at most, its own included: such a layer keeps exactly these, whatever the
            policy.
        rope_frequencies: angle per position of each pair of dimensions; needed by policies that re-index positions.
        layer, layers: which layer of how many, for policies whose layers differ.
        parts: devices that share what grows with the context; `kvjax.init` sets it by the mesh.
        staging: slots of the staging buffer; `kvjax.init` sets it by the policy.
        storage: what stores that grow with the context keep their entries in; `Quantized` sets it.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_prompt: int
    max_new: int
    dtype: Any = jnp.float32
    value_dim: int | None = None
    scale: float | None = None
    logit_cap: float | None = None
    window: int | None = None
    rope_frequencies: tuple[float, ...] | None = None
    layer: int = 0
    layers: int = 1
    parts: int = 1
    staging: int = 1
    storage: Storage | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "query_heads", "kv_heads", "head_dim", "max_prompt", "max_new", "layers", "parts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ValueError(f"{name}={value!r}; it must be a whole number")
            if value < 1:
                raise ValueError(f"{name}={value}; it must be at least 1")
        if self.capacity > MOST_TOKENS:
            raise ValueError(
                f"max_prompt + max_new = {self.max_prompt} + {self.max_new} tokens; at most {MOST_TOKENS} can be told "
                "apart: weights and positions are float32"
            )
        for name in ("value_dim", "scale", "logit_cap", "window"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value}; it must be above 0, or None")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        if not 0 <= self.layer < self.layers:
            raise ValueError(f"layer={self.layer} must lie in [0, layers={self.layers})")

    @property
    def value_width(self) -> int:
        """Dimensions of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def capacity(self) -> int:
        """Tokens that a row may ever hold."""
        return self.max_prompt + self.max_new

    def exact_bytes(self, tokens: int) -> int:
        """Bytes that an unpadded exact cache of one row and layer holds for so many tokens: the yardstick of
        every budget."""
        return self.kv_heads * (self.head_dim + self.value_width) * jnp.dtype(self.dtype).itemsize * tokens


def check_tokens(
    spec: CacheSpec,
    batch: int,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
) -> None:
    """Raises a ValueError where fresh tokens do not fit the cache (which broadcasting would hide)."""
    tokens = keys.shape[1] if keys.ndim > 1 else 0
    for name, fresh, width in (("keys", keys, spec.head_dim), ("values", values, spec.value_width)):
        wanted = (batch, tokens, spec.kv_heads, width)
        if fresh.shape != wanted:
            raise ValueError(f"{name} have shape {fresh.shape}; it must be [B, T, H_kv, D] = {wanted}")
        if not jnp.issubdtype(fresh.dtype, jnp.floating):
            raise ValueError(f"{name} are {fresh.dtype}; they must be floating-point numbers")
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {lengths.shape}; it must be [B] = {(batch,)}")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths are {lengths.dtype}; they must be whole numbers")


def check_query(spec: CacheSpec, batch: int, query: Float[Array, "B T H_q D"], tokens: int | None = None) -> None:
    """Raises a ValueError where queries do not fit the cache; `tokens` is how many there must be."""
    wanted = (batch, query.shape[1] if tokens is None and query.ndim > 1 else tokens, spec.query_heads, spec.head_dim)
    if query.shape != wanted:
        raise ValueError(f"queries have shape {query.shape}; it must be [B, T, H_q, D] = {wanted}")


def known(*arrays: Array) -> bool:
    """Whether the values of these arrays can be looked at: outside jit, on devices of this process."""
    return not any(
        isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True) for x in jax.tree.leaves(arrays)
    )


def whole_tiles(slots: int) -> int:
    """The next smaller multiple of `TILE`, where that takes away no more than a fiftieth of so many slots.

    Of other numbers XLA makes stores in a layout that kernels for TPUs do not read, and copies them once per block of
    decoding steps.
    """
    more = slots % TILE
    return slots - more if 50 * more <= slots else slots
