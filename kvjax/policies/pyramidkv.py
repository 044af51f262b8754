"""PyramidKV (Cai et al. 2024): SnapKV with more slots in the lower layers and fewer in the upper ones."""

from typing import Literal

from kvjax.policies.snapkv import check_observation, snapshot_policy
from kvjax.policy import CachePolicy, CacheSpec


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
    1 / beta of `share = budget - window` and `most = 2 share - least`, so that `budget` is the average over layers.
    Where a prompt has fewer than `most` tokens before its window, that is `most`, and `least = 2 share - most`; with
    fewer than `2 share` tokens every layer has `budget` (Cai et al. 2024, section 4; `PyramidKVCluster` of the released
    code). As there, steps between layers are rounded down, which makes the average exceed `budget` by up to half a slot
    per layer; bytes are counted from real buffers all the same.

    The released code does this sum for every prompt; here it is done once, for `spec.max_prompt` tokens, so that
    upper layers really are smaller buffers. A shorter prompt meets the same layers, and keeps what fits.

    `variant="kvpress"` is the definition of kvpress's PyramidKVPress: a layer's number includes the window
    (`share = budget`), it is rounded to the nearest once, at the end, and all layers have `budget` where `least` is
    under the window. Its budget is a share of each prompt, ours a number: they agree on prompts of one length.

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
    if variant not in _LAYER_SLOTS:
        raise ValueError(f"variant={variant!r}; it must be one of {', '.join(map(repr, _LAYER_SLOTS))}")

    def slots(spec: CacheSpec) -> int:
        sizes = {"budget": budget, "window": window, "beta": beta}
        return layer_slots(spec.max_prompt, spec.layer, spec.layers, **sizes, variant=variant)

    name = "pyramidkv" + ("" if variant == "paper" else f"({variant})")
    return snapshot_policy(name, slots, window=window, kernel=kernel, period=period)


def layer_slots(tokens: int, layer: int, layers: int, *, budget: int, window: int, beta: int, variant: str) -> int:
    """How many tokens a layer keeps of a prompt of so many, the window included. A model's only layer has `budget`."""
    if tokens <= budget:
        return tokens
    if layers == 1:
        return budget
    return _LAYER_SLOTS[variant](tokens, layer, layers, budget, window, beta)


def _paper(tokens: int, layer: int, layers: int, budget: int, window: int, beta: int) -> int:
    share = budget - window
    if tokens < 2 * share:
        return budget
    most = min(2 * share - share // beta, tokens - window)
    least = 2 * share - most
    return window + most - layer * ((most - least) // (layers - 1))


def _kvpress(tokens: int, layer: int, layers: int, budget: int, window: int, beta: int) -> int:
    most = min(2 * budget - budget / beta, tokens - window)
    least = 2 * budget - most
    if not most >= least >= window:
        return budget
    return round(most - layer * (most - least) / (layers - 1))


_LAYER_SLOTS = {"paper": _paper, "kvpress": _kvpress}
