"""Outlier heads: a few KV heads of a model that keep every token, at an equal total budget (Chelsea, section 5.4)."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from kvjax.combinators.by_head import ByHead
from kvjax.policy import Policy, Requirements
from kvjax.spec import CacheSpec
from pallas_kernels.weighted_decode import SLOT_BLOCK


@dataclasses.dataclass(frozen=True)
class HeadChoice:
    """The outlier heads of a model, as pairs (layer, KV head); `experiments.calibrate` writes them.

    Attributes:
        layers: layers of the model.
        kv_heads: KV heads of a layer.
        full: heads that keep every token.
    """

    layers: int
    kv_heads: int
    full: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for layer, head in self.full:
            if not (0 <= layer < self.layers and 0 <= head < self.kv_heads):
                raise ValueError(f"head {(layer, head)} does not exist in {self.layers} layers x {self.kv_heads} heads")
        if len(set(self.full)) != len(self.full):
            raise ValueError(f"full={self.full} must name each head once")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "HeadChoice":
        """Reads a file that `save` wrote.

        Args:
            path: the JSON file.

        Returns:
            The outlier heads.
        """
        content = json.loads(pathlib.Path(path).read_text())
        return cls(content["layers"], content["kv_heads"], tuple((layer, head) for layer, head in content["full"]))

    def save(self, path: str | os.PathLike[str], provenance: dict[str, Any]) -> None:
        """Writes a JSON file.

        Args:
            path: the file.
            provenance: how the heads were chosen; `load` ignores it.
        """
        content = dataclasses.asdict(self) | {"provenance": provenance}
        pathlib.Path(path).write_text(json.dumps(content, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class OutlierHeads(Policy[Any]):
    """Gives outlier heads a full cache and the other heads a smaller budget.

    All heads together have as many slots as with the policy's budget in every head.

    Attributes:
        policy: a policy with a `budget` in slots, such as Chelsea.
        choice: the outlier heads.
        full: policy of the outlier heads, such as Exact.
    """

    policy: Policy
    choice: HeadChoice
    full: Policy

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(getattr(self.policy, "budget", None), int):
            raise ValueError(f"policy={self.policy} must have a budget in slots")

    @property
    def compact_every(self) -> int:
        """The smaller `compact_every` of `policy` and `full`."""
        return min(self.policy.compact_every, self.full.compact_every)

    @property
    def requires(self) -> Requirements:
        """Requirements of the policy."""
        return self.policy.requires

    def for_layer(self, spec: CacheSpec) -> Policy[Any]:
        """Returns the policies of the heads of one layer.

        Args:
            spec: spec of the layer.

        Returns:
            A `ByHead`, or a single policy if all heads of the layer have the same one.

        Raises:
            ValueError: if the outlier heads belong to a model of another size, or the budget is too small for them.
        """
        choice = self.choice
        if (spec.layers, spec.kv_heads) != (choice.layers, choice.kv_heads):
            raise ValueError(
                f"the outlier heads are of {choice.layers} layers x {choice.kv_heads} heads, the cache has "
                f"{spec.layers} x {spec.kv_heads}"
            )
        smaller: Policy[Any] = dataclasses.replace(self.policy, budget=self._remaining_budget(spec))  # type: ignore[type-var]
        heads = [(spec.layer, head) for head in range(spec.kv_heads)]
        policies = tuple(self.full if head in choice.full else smaller for head in heads)
        return (ByHead(policies) if len(set(policies)) > 1 else policies[0]).for_layer(spec)

    def _remaining_budget(self, spec: CacheSpec) -> int:
        """Returns the budget of a head that does not keep everything."""
        count, full = self.choice.layers * self.choice.kv_heads, len(self.choice.full)
        budget: int = self.policy.budget  # type: ignore[attr-defined]
        if count == full:
            return budget
        full_slots = -(-spec.capacity // SLOT_BLOCK) * SLOT_BLOCK  # as an append-only store rounds them
        remaining = (count * budget - full * full_slots) // (count - full)
        if remaining < 1:
            raise ValueError(
                f"budget={budget} is too small: {full} of {count} heads keep {full_slots} slots each; pass a larger "
                "budget or fewer outlier heads"
            )
        return remaining

    def init(self, spec: CacheSpec, row_keys: Any) -> Any:
        """Raises a TypeError: the policies that `for_layer(spec)` returns have the states."""
        raise TypeError("OutlierHeads has no state; call for_layer(spec) first")

    prefill = segments = compact = init  # type: ignore[assignment]
