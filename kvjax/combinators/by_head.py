"""Kv heads with policies of their own, each with buffers of its own size."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from kvjax.attention import Seen
from kvjax.collectives import heads_here
from kvjax.combinators.several import Several, check_policies
from kvjax.policy import ALL_QUERIES, Policy
from kvjax.segment import Part, map_parts


@dataclasses.dataclass(frozen=True)
class ByHead(Several):
    """Kv head h keeps its cache as `policies[h]` does; heads of equal policies share buffers, so a smaller budget is a
    smaller buffer. Layers that differ are put together by `ByLayer`.

    A policy that tells the next layer something (needles) is refused: groups of heads differ from layer to layer.

    Attributes:
        policies: one for every kv head.
    """

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policies(self.policies)

    @property
    def groups(self) -> dict[Policy, tuple[int, ...]]:
        """Every policy's kv heads."""
        return {policy: tuple(h for h, own in enumerate(self.policies) if own == policy) for policy in self.policies}

    def head_order(self, devices: int = 1) -> tuple[int, ...]:
        """Group by group; among devices each has its share of every group.

        Raises:
            ValueError: where a group cannot be shared.
        """
        groups = list(self.groups.values())
        for policy, heads in self.groups.items():
            if len(heads) % devices:
                raise ValueError(f"ByHead: {len(heads)} kv heads of {policy} cannot be divided among {devices} devices")
        share = lambda heads, part: heads[part * len(heads) // devices : (part + 1) * len(heads) // devices]  # noqa: E731
        return tuple(head for part in range(devices) for heads in groups for head in share(heads, part))

    def at(self, spec) -> "ByHead":
        if len(self.policies) != spec.kv_heads:
            raise ValueError(f"ByHead: {len(self.policies)} policies were given for kv_heads={spec.kv_heads}")
        return ByHead(tuple(policy.at(spec) for policy in self.policies))

    def init(self, spec, row_keys) -> tuple:
        group, states = spec.query_heads // spec.kv_heads, []
        for policy, heads in self.groups.items():
            own = dataclasses.replace(spec, kv_heads=len(heads), query_heads=len(heads) * group)
            # Heads of two groups must not draw alike.
            keys = jax.vmap(lambda key, first=heads[0]: jax.random.fold_in(key, first))(row_keys)
            states.append(policy.init(own, keys))
        return tuple(states)

    def prefill(self, state: tuple, prompt) -> tuple:
        states = []
        for policy, own, (first, last) in self._each(state):
            queries, tokens = prompt.queries, prompt.keys.shape[2]
            if queries is not None:
                group = queries.shape[2] // prompt.keys.shape[1]
                asked = tokens if policy.prompt_queries == ALL_QUERIES else min(policy.prompt_queries, tokens)
                queries = queries[:, queries.shape[1] - asked :, first * group : last * group] if asked else None
            sinks = prompt.sink_logits
            if sinks is not None:
                group = sinks.shape[0] // prompt.keys.shape[1]
                sinks = sinks[first * group : last * group]
            keys, values = prompt.keys[:, first:last], prompt.values[:, first:last]
            again = prompt.repeated
            if again is not None:
                group = again.queries.shape[2] // prompt.keys.shape[1]
                again = dataclasses.replace(
                    again, queries=again.queries[:, :, first * group : last * group], keys=again.keys[:, :, first:last]
                )
            mine = dataclasses.replace(
                prompt, keys=keys, values=values, queries=queries, sink_logits=sinks, repeated=again
            )
            if policy.tell(own, mine) is not prompt.told:
                raise ValueError(f"ByHead: {policy} tells the next layer something; use ByLayer")
            states.append(policy.prefill(own, mine))
        return tuple(states)

    def read(self, state: tuple, newer):
        return tuple(
            map_parts(functools.partial(_among_all, heads), policy.read(own, newer))
            for policy, own, heads in self._each(state)
        )

    def observe(self, state: tuple, seen) -> tuple:
        states = []
        for (policy, own, (first, last)), parts in zip(self._each(state), seen.parts, strict=True):
            staged = None if seen.staged is None else seen.staged[:, first:last]
            states.append(policy.observe(own, Seen(parts, staged, seen.real)))
        return tuple(states)

    def compact(self, state: tuple, new) -> tuple:
        return tuple(
            policy.compact(own, dataclasses.replace(new, keys=new.keys[:, a:b], values=new.values[:, a:b]))
            for policy, own, (a, b) in self._each(state)
        )

    def read_bytes(self, state: tuple) -> int:
        return sum(policy.read_bytes(own) for policy, own in zip(self.groups, state, strict=True))

    def _each(self, state: tuple) -> list[tuple[Policy, Any, tuple[int, int]]]:
        """Every group's policy, state and range of heads, in the cache's order, among those that are here."""
        sizes = np.cumsum([0, *(heads_here(len(heads)) for heads in self.groups.values())])
        ranges = zip(sizes[:-1].tolist(), sizes[1:].tolist(), strict=True)
        return list(zip(self.groups, state, ranges, strict=True))


def _among_all(heads: tuple[int, int], part: Part) -> Part:
    """A part of a group's reading as one of all heads', of which the group's are `heads`."""
    first, last = part.heads or (0, heads[1] - heads[0])
    return dataclasses.replace(part, heads=(heads[0] + first, heads[0] + last))
