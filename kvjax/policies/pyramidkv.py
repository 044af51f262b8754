"""PyramidKV (Cai et al. 2024): SnapKV with more slots in the lower layers and fewer in the upper ones."""

import dataclasses
from typing import Literal

from kvjax.policies.snapkv import SnapKV
from kvjax.policy import Policy, check_min
from kvjax.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Chooses as `SnapKV` does, with a budget per layer that falls linearly, from the first to the last.

    Beside the last `window_size` tokens, layers keep `most - layer * (most - least) / (layers - 1)` tokens, where `least` is
    a share 1 / beta of `share = budget - window_size` and `most = 2 share - least`, so that `budget` is the average over
    layers. Where a prompt has fewer than `most` tokens before these, that is `most`, and `least = 2 share - most`; with
    fewer than `2 share` tokens every layer has `budget`. As in the released code, steps between layers are rounded
    down, which makes the average exceed `budget` by up to half a slot per layer; bytes are counted from real buffers.

    The released code does this sum for every prompt; here it is done once, for `spec.max_prompt_tokens` tokens, so that
    upper layers really are smaller buffers. A shorter prompt meets the same layers, and keeps what fits.

    Attributes:
        budget: slots per head for the prompt, the last tokens included, on the average of all layers.
        sinks, recent, beside, kernel, compact_every: as in `SnapKV`. Layers have shares of their own here.
        beta: how steep the pyramid is, over 1: the last layer keeps a share 1 / beta of the average (the paper's beta).
        variant: "paper" as above; "kvpress" is the definition of kvpress's PyramidKVPress: a layer's number includes
            these (`share = budget`), it is rounded to the nearest once, at the end, and all layers have `budget`
            where `least` is under `window_size`. Its budget is a share of each prompt, ours a number: they agree on
            prompts of one length.

    Reference:
        PyramidKV, section 4, and `PyramidKVCluster` of the released code.
    """

    beta: int = 20
    variant: Literal["paper", "kvpress"] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_budget_scale is not None:
            raise ValueError(f"shares={self.layer_budget_scale}; a pyramid's layers have shares of its own")
        check_min(1, beta=self.beta)

    def for_layer(self, spec: CacheSpec) -> Policy:
        slots = self.layer_slots(spec.max_prompt_tokens, spec.layer, spec.layers)
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(SnapKV)}
        return SnapKV(**own | {"budget": max(slots, self.min_budget)})

    def layer_slots(self, tokens: int, layer: int, layers: int) -> int:
        """How many tokens a layer keeps of a prompt of so many, the window included. A model's only layer has
        `budget`."""
        if tokens <= self.budget:
            return tokens
        if layers == 1:
            return self.budget
        if self.variant == "paper":
            share = self.budget - self.window_size
            if tokens < 2 * share:
                return self.budget
            most = min(2 * share - share // self.beta, tokens - self.window_size)
            least = 2 * share - most
            return self.window_size + most - layer * ((most - least) // (layers - 1))
        largest = min(2 * self.budget - self.budget / self.beta, tokens - self.window_size)
        smallest = 2 * self.budget - largest
        if not largest >= smallest >= self.window_size:
            return self.budget
        return round(largest - layer * (largest - smallest) / (layers - 1))
