"""Different budgets in the layers of a model."""

import dataclasses
import functools
from typing import Any

from kvjax.combinators.by_layer import LayerPolicies
from kvjax.policy import Policy
from kvjax.spec import CacheSpec
from pallas_kernels.weighted_decode import SLOT_TILE


@dataclasses.dataclass(frozen=True)
class LayerBudgets(LayerPolicies):
    """Gives every layer its own fraction of the budget, with buffers of that size.

    In pretrained models a few layers retrieve from the context, and the others attend to the first and the last tokens.
    With `AdaKV` and `alpha_safeguard=0` inside, a layer's heads share its budget too. `kvjax calibrate` measures the
    scale for a model.

    Attributes:
        policy: a policy with a budget, or combinators around one.
        scale: factor of the budget for every layer. A layer's budget is a multiple of 8 slots, at least the smallest
            one that the policy accepts and at most the capacity of the cache.
    """

    policy: Policy
    scale: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.scale and min(self.scale) >= 0 < max(self.scale)):
            raise ValueError(f"scale={self.scale} must have no negative and at least one positive number")
        self.budget  # noqa: B018  # checks that there is one

    @property
    def policies(self) -> tuple[Policy, ...]:  # type: ignore[override]
        """The policy."""
        return (self.policy,)

    @property
    def budget(self) -> int:
        """Budget of the policy: slots per KV head and layer, on average."""
        return _budget(self.policy)

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns the policy with the budget of one layer.

        Args:
            spec: spec of the layer, with its index `spec.layer`.

        Returns:
            `policy.for_layer(spec)` with the scaled budget.

        Raises:
            ValueError: if the number of factors is not the number of layers.
        """
        if len(self.scale) != spec.layers:
            raise ValueError(
                f"layer_budget_scale={self.scale} has {len(self.scale)} numbers for a model of {spec.layers} layers"
            )
        budget = min(SLOT_TILE * round(self.budget * self.scale[spec.layer] / SLOT_TILE), spec.capacity)
        return _with_budget(self.policy, max(budget, _smallest_budget(self.policy))).for_layer(spec)


def _budget(policy: Policy) -> int:
    """Returns the budget of a policy, or of the policy inside combinators."""
    inner: Any = policy
    while not hasattr(inner, "budget"):
        if not hasattr(inner, "policy"):
            raise ValueError(f"policy={policy} has no budget to scale")
        inner = inner.policy
    return inner.budget


def _with_budget(policy: Policy, budget: int) -> Policy:
    """Returns a policy, and policies inside it, with another budget."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
    if "budget" in fields:
        return dataclasses.replace(policy, budget=budget)  # type: ignore[type-var]
    inner = {name: _with_budget(value, budget) for name, value in fields.items() if isinstance(value, Policy)}
    return dataclasses.replace(policy, **inner)  # type: ignore[type-var]


@functools.cache
def _smallest_budget(policy: Policy) -> int:
    """Returns the smallest budget that a policy accepts, at most its own."""
    refused, accepted = 0, _budget(policy)
    while accepted - refused > 1:
        middle = (refused + accepted) // 2
        try:
            _with_budget(policy, middle)
            accepted = middle
        except ValueError:
            refused = middle
    return accepted
