"""CurDKV (Sengupta et al. 2025): the prompt's tokens with large keys and values relative to their neighbors."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.top_k.top_k_policy import TopKPolicy, prompt_mask
from kvjax.policy import Prompt, check_min

MIN_SUM = 1e-30  # avoids division by zero


@dataclasses.dataclass(frozen=True)
class CUR(TopKPolicy):
    """Keeps the tokens with the largest share of the squared keys and values in their window. It needs no queries.

    The share is an estimate of the leverage score by which a CUR decomposition selects rows. Inherited settings: see
    `TopKPolicy`. kvpress uses sinks=4 and reserve_decode_slots=True.

    Attributes:
        leverage_type: "key" for the share of squared keys, "value" of squared values, "kv_avg" for the mean of both,
            "kv_product" for their product.
        local_window_size: tokens of a window; None to compare squares of the entire prompt.

    Reference:
        CurDKV (https://arxiv.org/abs/2509.15038); CURPress of kvpress, which also has an optional random projection.
    """

    leverage_type: Literal["key", "value", "kv_avg", "kv_product"] = "kv_product"
    local_window_size: int | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, local_window_size=self.local_window_size)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        """Returns the shares, scaled to a sum of 1 over the prompt."""
        keys, values = (self._shares(prompt, x) for x in (prompt.keys, prompt.values))
        scores = {"key": keys, "value": values, "kv_avg": (keys + values) / 2, "kv_product": keys * values}
        score = scores[self.leverage_type]
        return score / jnp.maximum(jnp.sum(score, axis=2, keepdims=True), MIN_SUM)

    def _shares(self, prompt: Prompt, x: Float[Array, "B H_kv T D"]) -> Float[Array, "B H_kv T"]:
        squares = jnp.where(prompt_mask(prompt), jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), 0.0)
        window, (batch, heads, tokens) = self.local_window_size, squares.shape
        if window is None:
            return squares
        windows = jnp.pad(squares, ((0, 0), (0, 0), (0, -tokens % window))).reshape(batch, heads, -1, window)
        shares = windows / jnp.maximum(jnp.sum(windows, axis=3, keepdims=True), MIN_SUM)
        return shares.reshape(batch, heads, -1)[:, :, :tokens]
