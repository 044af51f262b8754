"""CurDKV (Sengupta et al. 2025): the prompt's tokens whose keys and values are long beside their neighbours'."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policy import Prompt, check_min
from kvjax.top_k_policy import TopKPolicy, prompt_mask

Leverage = Literal["key", "value", "kv_avg", "kv_product"]

TINY = 1e-30  # least sum that is divided by


@dataclasses.dataclass(frozen=True)
class CUR(TopKPolicy):
    """Keeps the tokens whose keys and values have the largest share of the squares of a window's: an estimate of the
    leverage by which a CUR decomposition picks rows. No query is needed.

    Attributes:
        budget, sinks, recent, beside, shares, compact_every: as in `TopKPolicy`; kvpress has sinks=4 and beside=True.
        leverage_type: whose squares: the keys', the values', the mean of both shares or their product.
        local_window_size: tokens among which shares are taken, window by window; None: squares stand as they are.

    Reference:
        CurDKV (https://arxiv.org/abs/2509.15038); kvpress's CURPress, which also offers a random projection
    before.
    """

    leverage_type: Leverage = "kv_product"
    local_window_size: int | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, local_window_size=self.local_window_size)

    def score(self, prompt: Prompt) -> Float[Array, "B H_kv T"]:
        return share_of_squares(prompt, self.leverage_type, self.local_window_size)


def share_of_squares(
    prompt: Prompt, leverage_type: Leverage = "kv_product", window: int | None = 16
) -> Float[Array, "B H_kv T"]:
    """The share of each token in its window's squared keys and values, scaled to a sum of 1 over the prompt; float32.

    Args:
        leverage_type, window: as in `CUR`.
    """
    keys, values = (_shares(prompt, x, window) for x in (prompt.keys, prompt.values))
    both = {"key": keys, "value": values, "kv_avg": (keys + values) / 2, "kv_product": keys * values}[leverage_type]
    return both / jnp.maximum(jnp.sum(both, axis=2, keepdims=True), TINY)


def _shares(prompt: Prompt, x: Float[Array, "B H_kv T D"], window: int | None) -> Float[Array, "B H_kv T"]:
    squares = jnp.where(prompt_mask(prompt), jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), 0.0)
    if window is None:
        return squares
    tokens = squares.shape[2]
    windows = jnp.pad(squares, ((0, 0), (0, 0), (0, -tokens % window))).reshape(*squares.shape[:2], -1, window)
    share = windows / jnp.maximum(jnp.sum(windows, axis=3, keepdims=True), TINY)
    return share.reshape(*squares.shape[:2], -1)[:, :, :tokens]
