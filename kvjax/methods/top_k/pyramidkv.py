"""PyramidKV (Cai et al. 2024): SnapKV with larger budgets in lower layers than in upper ones."""

import dataclasses
from typing import Literal

from kvjax.methods.top_k.snapkv import SnapKV
from kvjax.methods.top_k.top_k_store import TopKStore
from kvjax.policy import Policy, check_min
from kvjax.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Selects as `SnapKV` does, with a budget per layer that falls linearly from the first to the last layer.

    In addition to the last `window_size` tokens, layer l keeps max - l (max - min) / (layers - 1) tokens, where
    min = s / beta and max = 2 s - min for s = budget - window_size, so that `budget` is the mean over layers. If a
    prompt has fewer than max tokens before the window, max is their number and min = 2 s - max. With fewer than 2 s
    tokens every layer has `budget`. As in the released code, differences between layers are rounded down, so that the
    mean exceeds `budget` by up to half a slot per layer. Byte counts use the real buffers.

    The released code computes this for every prompt. Here it is computed once, for `spec.max_prompt_tokens` tokens, so
    that upper layers have smaller buffers. Inherited settings: see `SnapKV`.

    Attributes:
        beta: ratio of the mean to the last layer's tokens (the paper's beta).
        variant: "paper" as above. "kvpress" for PyramidKVPress of kvpress: a layer's number includes the window
            (s = budget), it is rounded to the nearest integer, and all layers have `budget` if min is below
            `window_size`. The budget of kvpress is a share of each prompt.

    Reference:
        PyramidKV, section 4, and `PyramidKVCluster` of the released code.
    """

    beta: int = 20
    variant: Literal["paper", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, beta=self.beta)

    def for_layer(self, spec: CacheSpec) -> Policy[TopKStore]:
        """Returns SnapKV with the budget of the layer `spec.layer`."""
        slots = self.layer_slots(spec.max_prompt_tokens, spec.layer, spec.layers)
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(SnapKV)}
        return SnapKV(**settings | {"budget": max(slots, self.min_budget())})

    def layer_slots(self, tokens: int, layer: int, layers: int) -> int:
        """Returns the number of tokens that a layer keeps of a prompt, the window included.

        Args:
            layers: number of layers; a single layer keeps `budget`.

        Returns:
            The number of tokens.
        """
        if tokens <= self.budget:
            return tokens
        if layers == 1:
            return self.budget
        if self.variant == "paper":
            mean = self.budget - self.window_size
            if tokens < 2 * mean:
                return self.budget
            first = min(2 * mean - mean // self.beta, tokens - self.window_size)
            last = 2 * mean - first
            return self.window_size + first - layer * ((first - last) // (layers - 1))
        largest = min(2 * self.budget - self.budget / self.beta, tokens - self.window_size)
        smallest = 2 * self.budget - largest
        if not largest >= smallest >= self.window_size:
            return self.budget
        return round(largest - layer * (largest - smallest) / (layers - 1))
