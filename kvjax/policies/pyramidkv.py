"""PyramidKV (Cai et al. 2024): SnapKV with more slots in the lower layers and fewer in the upper ones."""

from typing import Literal

import numpy as np

from kvjax.policies.snapkv import check_observation, snapshot_policy
from kvjax.policy import CachePolicy


def pyramidkv(
    budget: int,
    *,
    window: int = 32,
    kernel: int = 5,
    beta: int = 20,
    variant: Literal["paper", "kvpress"] = "paper",
    period: int = 64,
) -> CachePolicy:
    """Chooses as `snapkv` does, with a budget per layer that falls linearly, from the first to the last.

    Beside the window, layers keep `most - layer * (most - least) / (layers - 1)` tokens, where `least` is a share
    1 / beta of `share = budget - window` and `most = 2 share - least`, so that `budget` is the average over layers; if
    a prompt has fewer than `most` tokens before its window, that is `most`, and `least = 2 share - most`. Prompts of
    fewer than `2 share` tokens are reduced to `budget` in every layer, and those of at most `budget` kept whole
    (`PyramidKVCluster` of the released code, whose numbers are rounded down as here).

    `variant="kvpress"` is the definition of kvpress's PyramidKVPress: a layer's number includes the window
    (`share = budget`), numbers are rounded to the nearest once, at the end, and a layer falls back to `budget` where
    `least` is under the window. Its budget is a share of each prompt, ours a number: they agree on prompts of one
    length. Prompts of at most `budget` tokens are kept whole here all the same.

    Args:
        budget: slots per head for the prompt, the window included, on the average of all layers; otherwise as in
            `snapkv`.
        window, kernel, period: as in `snapkv`.
        beta: how steep the pyramid is, over 1: the last layer keeps a share 1 / beta of the average.
        variant: whose numbers.

    Raises:
        ValueError: as `snapkv`, and for a beta or variant that cannot be.
    """
    check_observation(budget, window, kernel)
    if beta < 1:
        raise ValueError(f"beta={beta}; it must be at least 1")
    if variant not in _VARIANTS:
        raise ValueError(f"variant={variant!r}; it must be one of {', '.join(map(repr, _VARIANTS))}")
    of_layer = _VARIANTS[variant]

    def kept(tokens, layer, layers):
        return np.where(tokens <= budget, tokens, of_layer(tokens, layer, layers, budget, window, beta))

    name = "pyramidkv" + ("" if variant == "paper" else f"({variant})")
    return snapshot_policy(name, kept, window=window, kernel=kernel, period=period)


def _paper(tokens: np.ndarray, layer: int, layers: int, budget: int, window: int, beta: int) -> np.ndarray:
    """How many tokens a layer keeps of prompts of more than `budget` tokens, the window included."""
    share = budget - window
    most = np.minimum(2 * share - share // beta, tokens - window)
    least = 2 * share - most
    falling = most - layer * ((most - least) // max(layers - 1, 1))
    return np.where((tokens < 2 * share) | (layers == 1), budget, window + falling)


def _kvpress(tokens: np.ndarray, layer: int, layers: int, budget: int, window: int, beta: int) -> np.ndarray:
    most = np.minimum(2 * budget - budget / beta, tokens - window)
    least = 2 * budget - most
    falling = np.round(most - layer * ((most - least) / max(layers - 1, 1)))
    # `least` would exceed `most` where even all tokens before the window were too few.
    falls = (most >= least) & (least >= window) & (layers > 1)
    return np.where(falls, falling, budget).astype(int)


_VARIANTS = {"paper": _paper, "kvpress": _kvpress}
