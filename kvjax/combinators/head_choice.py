"""Which heads of a model keep their caches in another way than the rest, as a value and as a file."""

import dataclasses
import json
import os
import pathlib
from typing import Any

from kvjax.policy import Policy
from kvjax.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class HeadChoice:
    """Which heads do not merge, as `experiments.calibrate_heads` finds it for a model. Pairs are (layer, kv head).

    Attributes:
        layers, kv_heads: of the model.
        full: heads that keep every token (Chelsea's outlier heads).
        drop: heads that drop tokens where the others take means.
    """

    layers: int
    kv_heads: int
    full: tuple[tuple[int, int], ...] = ()
    drop: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        named = [*self.full, *self.drop]
        for layer, head in named:
            if not (0 <= layer < self.layers and 0 <= head < self.kv_heads):
                raise ValueError(f"head {(layer, head)} is none of {self.layers} layers x {self.kv_heads} kv heads")
        if len(set(named)) != len(named):
            raise ValueError(f"heads are named twice among full={self.full} and drop={self.drop}")

    def budget_of_others(self, spec: CacheSpec, budget: int, full_slots: int, least: int) -> int:
        """Slots of every head that does not keep everything, such that slots over all layers and heads are as many as
        with `budget` everywhere; heads that do take `full_slots` each.

        Raises:
            ValueError: for a cache of another model, or fewer slots than `least`.
        """
        if (spec.layers, spec.kv_heads) != (self.layers, self.kv_heads):
            raise ValueError(
                f"heads are those of {self.layers} layers x {self.kv_heads} kv heads; the cache has "
                f"{spec.layers} x {spec.kv_heads}"
            )
        count, full = self.layers * self.kv_heads, len(self.full)
        if count == full:
            return budget
        left = (count * budget - full * full_slots) // (count - full)
        if left < least:
            raise ValueError(
                f"budget={budget} is {count * budget} slots over all heads; {full} heads that keep all take "
                f"{full_slots} each and leave {left} for each of {count - full} others, which need {least}: "
                "give a larger budget or fewer such heads"
            )
        return left

    def policies(self, spec: CacheSpec, full: Policy, drop: Policy, others: Policy) -> tuple[Policy, ...]:
        """The policy of every kv head of the layer."""
        names = [(spec.layer, head) for head in range(self.kv_heads)]
        return tuple(full if name in self.full else drop if name in self.drop else others for name in names)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "HeadChoice":
        """Reads the file that `save` wrote."""
        read = json.loads(pathlib.Path(path).read_text())
        heads = {name: tuple((layer, head) for layer, head in read[name]) for name in ("full", "drop")}
        return cls(read["layers"], read["kv_heads"], **heads)

    def save(self, path: str | os.PathLike[str], provenance: dict[str, Any]) -> None:
        """Writes a small JSON file; `provenance` says how the choice was made and is not read again."""
        pathlib.Path(path).write_text(
            json.dumps(dataclasses.asdict(self) | {"provenance": provenance}, indent=1) + "\n"
        )
