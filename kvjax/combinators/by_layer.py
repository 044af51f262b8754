"""Layers with policies of their own, each with buffers of its own size."""

import dataclasses

from kvjax.combinators.several import Several, check_policies
from kvjax.policies.exact import Exact
from kvjax.policy import Policy, check_least

EVERYTHING = Exact()


class _ForLayers(Several):
    """Policies of which `at` takes one: there is no cache of several layers."""

    def init(self, spec, row_keys):
        raise TypeError(f"{type(self).__name__} is of many layers; kvjax.init takes the one that the spec names")

    def prefill(self, state, prompt):
        raise TypeError(f"{type(self).__name__} is of many layers")

    read = compact = prefill


@dataclasses.dataclass(frozen=True)
class ByLayer(_ForLayers):
    """Layer l keeps its cache as `policies[l]` does. Staging is each layer's own.

    Attributes:
        policies: one for every layer.
    """

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policies(self.policies)

    def at(self, spec) -> Policy:
        if len(self.policies) != spec.layers:
            raise ValueError(f"ByLayer: {len(self.policies)} policies were given for layers={spec.layers}")
        return self.policies[spec.layer].at(spec)


@dataclasses.dataclass(frozen=True)
class FirstLayers(_ForLayers):
    """The first `layers` layers keep their caches as `first` does (everything, by default), the rest as `policy`; for
    any number of layers. ClusterKV and Quest are published with two full layers, which is for deep models.

    Attributes:
        layers: how many.
        policy: of the other layers.
        first: of these.
    """

    layers: int
    policy: Policy
    first: Policy = EVERYTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(0, layers=self.layers)
        check_policies(self.policies)

    @property
    def policies(self) -> tuple[Policy, ...]:  # type: ignore[override]
        return (self.first, self.policy) if self.layers else (self.policy,)

    def at(self, spec) -> Policy:
        return (self.first if spec.layer < self.layers else self.policy).at(spec)
