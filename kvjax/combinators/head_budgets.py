"""Different budgets in the KV heads of a model.

In pretrained models a few KV heads retrieve from the context, and the others attend to the first and the last tokens
(DuoAttention, https://arxiv.org/abs/2410.10819). Which ones is a property of the model. `HeadBudgets` divides the slots
of any policy by such shares:

1. The slots of all heads of all layers together are the policy's budget times the number of heads.
2. Every head gets slots in proportion to its share, at most the capacity of the cache.
3. What such a bound leaves over goes to the other heads, in proportion to their shares.
4. A head with the capacity of the cache keeps every token, whatever the policy.

Heads of a layer with equal budgets share one state, so that few distinct shares mean few buffers and programs.
"""

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from kvjax.combinators.by_head import ByHead
from kvjax.combinators.by_layer import LayerPolicies
from kvjax.methods.exact.exact import Exact
from kvjax.policy import Policy
from kvjax.spec import CacheSpec
from pallas_kernels.weighted_decode import SLOT_TILE

Shares = tuple[tuple[float, ...] | None, ...]  # of every KV head of every layer

# Share of a head that does not retrieve, if retrieving heads have 1: any number that is small enough for the former to
# keep all tokens.
SMALL_SHARE = 1e-3


def retrieving_heads(layers: int, kv_heads: int, full: Iterable[tuple[int, int]]) -> Shares:
    """Returns shares with which some heads keep every token and all others have equal budgets.

    Args:
        full: the heads that keep every token, as pairs (layer, KV head).

    Returns:
        The shares.

    Raises:
        ValueError: if a head does not exist.
    """
    shares = np.full((layers, kv_heads), SMALL_SHARE)
    for layer, head in full:
        if not (0 <= layer < layers and 0 <= head < kv_heads):
            raise ValueError(f"head {(layer, head)} does not exist in {layers} layers x {kv_heads} heads")
        shares[layer, head] = 1.0
    return tuple(tuple(map(float, row)) for row in shares)


def save_shares(path: str | os.PathLike[str], shares: Shares, provenance: dict[str, Any]) -> None:
    """Writes shares to a JSON file, which the setting `heads=FILE` reads.

    Args:
        provenance: how they were measured; `load_shares` ignores it.
    """
    pathlib.Path(path).write_text(json.dumps({"shares": shares, "provenance": provenance}, indent=1) + "\n")


def load_shares(path: str | os.PathLike[str]) -> Shares:
    """Reads a file that `save_shares` wrote.

    Returns:
        The shares.

    Raises:
        ValueError: if it is not such a file.
    """
    try:
        rows = json.loads(pathlib.Path(path).read_text())["shares"]
        return tuple(None if row is None else tuple(map(float, row)) for row in rows)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a file of head shares: {error!r}") from error


@dataclasses.dataclass(frozen=True)
class HeadBudgets(LayerPolicies):
    """Gives every KV head of every layer its share of the budget, in buffers of that size.

    Attributes:
        policy: a policy with a budget, or combinators around one.
        shares: for every layer the share of each KV head, relative to each other; None for a layer whose heads have
            the policy's budget. A head's budget is a multiple of 8 slots and at least the smallest one that the
            policy accepts. A head with a much larger share than the others keeps every token that the total allows.

    Raises:
        ValueError: if the policy has no budget, or the shares are negative or all 0.
    """

    policy: Policy
    shares: Shares

    def __post_init__(self) -> None:
        super().__post_init__()
        rows = [row for row in self.shares if row is not None]
        if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
            raise ValueError("shares must have as many numbers in every layer, and at least one")
        if min(map(min, rows)) < 0 or max(map(max, rows)) <= 0:
            raise ValueError("shares must have no negative and at least one positive number")
        self.budget  # noqa: B018  # checks that there is one

    @property
    def policies(self) -> tuple[Policy, ...]:  # type: ignore[override]
        """The policy."""
        return (self.policy,)

    @property
    def budget(self) -> int:
        """Budget of the policy: slots per KV head, on average over all heads with a share."""
        return _budget(self.policy)

    def for_layer(self, spec: CacheSpec) -> Policy:
        """Returns the policies of the heads of one layer.

        Args:
            spec: spec of the layer, with its index `spec.layer`.

        Returns:
            A `ByHead`, or a single policy if all heads of the layer have the same one.

        Raises:
            ValueError: if the shares belong to a model of another size.
        """
        if len(self.shares) != spec.layers:
            raise ValueError(f"shares are of {len(self.shares)} layers, the model has {spec.layers}")
        row = self.shares[spec.layer]
        if row is None:
            return self.policy.for_layer(spec)
        if len(row) != spec.kv_heads:
            raise ValueError(f"shares are of {len(row)} KV heads per layer, the model has {spec.kv_heads}")
        slots = _divide(self.shares, self.budget, spec.capacity)[spec.layer]
        heads = tuple(self._of_head(count, spec) for count in slots)
        return (ByHead(heads) if len(set(heads)) > 1 else heads[0]).for_layer(spec)

    def _of_head(self, slots: int, spec: CacheSpec) -> Policy:
        """Returns the policy of a head with this number of slots."""
        if slots >= spec.capacity:
            return Exact(self.policy.compact_every)
        return with_budget(self.policy, max(slots // SLOT_TILE * SLOT_TILE, self.policy.min_budget(spec)))


@functools.lru_cache(maxsize=256)
def _divide(shares: Shares, budget: int, capacity: int) -> list[list[int]]:
    """Divides `budget` slots per head among all heads with a share; see the module. Other layers get none."""
    share = np.array([row for row in shares if row is not None], np.float64)
    slots = _water_fill(share, float(budget * share.size), capacity)
    rows = iter(slots.tolist())
    return [[] if row is None else next(rows) for row in shares]


def _water_fill(share: Float[np.ndarray, "L H"], total: float, capacity: int) -> Int[np.ndarray, "L H"]:
    """Returns min(capacity, c * share), with c such that the sum is at most `total`."""
    is_full = np.zeros(share.shape, bool)
    while True:
        remaining = max(total - capacity * is_full.sum(), 0.0)
        others = np.where(is_full, 0.0, share)
        fractions = others / others.sum() if others.any() else others  # at most 1, also of tiny shares
        slots = np.where(is_full, capacity, remaining * fractions)
        overfull = ~is_full & (slots >= capacity)
        if not overfull.any():
            return np.floor(slots + 1e-6).astype(np.int64)
        is_full |= overfull


def _budget(policy: Policy) -> int:
    """Returns the budget of a policy, or of the policy inside combinators."""
    inner: Any = policy
    while not hasattr(inner, "budget"):
        if not hasattr(inner, "policy"):
            raise ValueError(f"policy={policy} has no budget to divide")
        inner = inner.policy
    return inner.budget


def with_budget(policy: Policy, budget: int) -> Policy:
    """Returns a policy, and policies inside it, with another budget.

    Args:
        policy: a policy with a budget, or combinators around one.
        budget: slots per KV head.

    Returns:
        The policy.
    """
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}  # type: ignore[arg-type]
    if "budget" in fields:
        return dataclasses.replace(policy, budget=budget)  # type: ignore[type-var]
    inner = {name: with_budget(value, budget) for name, value in fields.items() if isinstance(value, Policy)}
    return dataclasses.replace(policy, **inner)  # type: ignore[type-var]
