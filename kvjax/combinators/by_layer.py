"""Policies that differ from layer to layer, each with separate buffers."""

import dataclasses
from typing import Any, NoReturn

from kvjax.combinators.combined import CombinedPolicies
from kvjax.policy import Policy, check_min
from kvjax.spec import CacheSpec


class LayerPolicies(CombinedPolicies[Any]):
    """Policies of which `for_layer` selects one. They have no state themselves."""

    def init(self, spec: CacheSpec, row_keys: Any) -> NoReturn:
        """Raises a TypeError: only the policies of single layers have a state."""
        raise TypeError(f"{type(self).__name__} has no state; call for_layer(spec) first")

    prefill = segments = compact = init  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class ByLayer(LayerPolicies):
    """Uses `policies[l]` in layer l.

    Attributes:
        policies: one policy per layer.
    """

    policies: tuple[Policy, ...]

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns the policy of one layer.

        Args:
            spec: spec of the layer, with its index `spec.layer`.

        Returns:
            `policies[spec.layer].for_layer(spec)`.

        Raises:
            ValueError: if the number of policies is not the number of layers.
        """
        if len(self.policies) != spec.layers:
            raise ValueError(f"ByLayer has {len(self.policies)} policies for a model of {spec.layers} layers")
        return self.policies[spec.layer].for_layer(spec)


@dataclasses.dataclass(frozen=True)
class FirstLayers(LayerPolicies):
    """Uses `first` in the first `layers` layers and `policy` in the others.

    Quest is published with two full layers: `FirstLayers(2, Quest(budget), Exact())`.

    Attributes:
        layers: number of first layers.
        policy: policy of the other layers.
        first: policy of the first layers.
    """

    layers: int
    policy: Policy
    first: Policy

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(0, layers=self.layers)

    @property
    def policies(self) -> tuple[Policy, ...]:  # type: ignore[override]
        """The policies in use."""
        return (self.first, self.policy) if self.layers else (self.policy,)

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the smallest budget of `policy`."""
        return self.policy.min_budget(spec)

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns the policy of one layer.

        Args:
            spec: spec of the layer, with its index `spec.layer`.

        Returns:
            `first.for_layer(spec)` in the first layers, otherwise `policy.for_layer(spec)`.
        """
        return (self.first if spec.layer < self.layers else self.policy).for_layer(spec)
