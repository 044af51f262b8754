"""Policies that differ from KV head to KV head, each with separate buffers."""

import dataclasses
from collections import Counter
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from kvjax.attention import AttentionStats
from kvjax.combinators.combined import CombinedPolicies
from kvjax.policy import Policy, Prompt
from kvjax.segment import Segment, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import ArrayField, map_fields, state

T = TypeVar("T")


@state
class HeadIndex:
    """The KV heads of a group: int32 indices among the KV heads of the device that holds them."""

    index: Int[Array, "H_kv"]


@state
class ByHeadState:
    """The states of groups of KV heads with equal policies, in the order of `ByHead.groups`."""

    heads: tuple[HeadIndex, ...]
    groups: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ByHead(CombinedPolicies[ByHeadState]):
    """Uses `policies[h]` for KV head h. Heads with equal policies share one state.

    The heads of a group are data and not part of the program: layers whose groups have the same sizes share compiled
    programs. If devices shard the heads, every device needs groups of the same sizes.

    Attributes:
        policies: one policy per KV head.
    """

    policies: tuple[Policy, ...]

    def groups(self) -> dict[Policy, tuple[int, ...]]:
        """Returns the KV heads of every distinct policy, in an order that does not depend on the heads."""
        distinct = sorted(dict.fromkeys(self.policies), key=repr)
        return {policy: tuple(h for h, other in enumerate(self.policies) if other == policy) for policy in distinct}

    def for_layer(self, spec: CacheSpec) -> "ByHead":
        """Returns the policies of one layer.

        Returns:
            A `ByHead` of `policy.for_layer(spec)` for every policy.

        Raises:
            ValueError: if the number of policies is not the number of KV heads.
        """
        if len(self.policies) != spec.kv_heads:
            raise ValueError(f"ByHead has {len(self.policies)} policies for kv_heads={spec.kv_heads}")
        return ByHead(tuple(policy.for_layer(spec) for policy in self.policies))

    def canonical(self) -> "ByHead":
        """Returns the policies in the order of their groups; the state has the heads of each."""
        return ByHead(tuple(policy for policy, heads in self.groups().items() for _ in heads))

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ByHeadState:
        """Returns one empty state per distinct policy.

        Args:
            spec: spec of the layer, with all its KV heads.
            row_keys: one PRNG key per row; each state draws from keys derived from them.

        Returns:
            States in the order of `groups`, each for the heads of its policy.

        Raises:
            ValueError: if devices that shard the heads would have groups of different sizes.
        """
        local = spec.kv_heads // spec.head_shards
        sizes = [Counter(self.policies[first : first + local]) for first in range(0, spec.kv_heads, local)]
        if any(one != sizes[0] for one in sizes):
            raise ValueError(
                f"ByHead: each of {spec.head_shards} devices has {local} KV heads and needs as many heads of every "
                f"policy as the others, got {[list(one.values()) for one in sizes]}; let devices share slots in place "
                "of heads (`sequence` of make_mesh, --mesh_sequence)"
            )
        group_size = spec.query_heads // spec.kv_heads
        index: list[HeadIndex] = []
        states: list[Any] = []
        for policy, heads in self.groups().items():
            group_spec = dataclasses.replace(spec, kv_heads=len(heads), query_heads=len(heads) * group_size)
            # Two groups must not draw the same random numbers.
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(row_keys, heads[0])
            states.append(policy.init(group_spec, keys))
            index.append(HeadIndex(jnp.array(heads, jnp.int32) % local))
        return ByHeadState(tuple(index), tuple(states))

    def prefill(self, state: ByHeadState, prompt: Prompt) -> ByHeadState:
        """Compresses each policy's heads of a prompt.

        Args:
            prompt: the prompt with the inputs that any of the policies requires.

        Returns:
            The states.

        Raises:
            ValueError: if a policy passes an array to the next layer (`layer_carry`).
        """
        states = []
        for policy, group_state, heads in self._each(state):
            group_prompt = _take_heads(prompt, heads, prompt.keys.shape[1])
            if group_prompt.queries is not None:
                count = policy.requires.num_prompt_queries(prompt.keys.shape[2])
                last = group_prompt.queries[:, group_prompt.queries.shape[1] - count :] if count else None
                group_prompt = dataclasses.replace(group_prompt, queries=last)
            if policy.layer_carry(group_state, group_prompt) is not prompt.layer_carry:
                raise ValueError(f"ByHead: {policy} passes state to the next layer, use ByLayer instead")
            states.append(policy.prefill(group_state, group_prompt))
        return dataclasses.replace(state, groups=tuple(states))

    def segments(self, state: ByHeadState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the segments of all policies, each with the indices of its KV heads.

        Args:
            num_visible_staged: int32 number of staged tokens that each query attends to.

        Returns:
            The segments of the first policy, then of the second, and so on.
        """
        return tuple(
            dataclasses.replace(one, kv_heads=heads if one.kv_heads is None else heads[one.kv_heads])
            for policy, group_state, heads in self._each(state)
            for one in policy.segments(group_state, num_visible_staged)
        )

    def full_segments(self, state: ByHeadState) -> tuple[Segment, ...]:
        """Returns the segments of the policies that keep every token, each with the indices of its KV heads."""
        return tuple(
            dataclasses.replace(one, kv_heads=heads if one.kv_heads is None else heads[one.kv_heads])
            for policy, group_state, heads in self._each(state)
            for one in policy.full_segments(group_state)
        )

    def observe(self, state: ByHeadState, stats: AttentionStats) -> ByHeadState:
        """Passes each policy the statistics of its segments and of its heads' staged tokens.

        Args:
            stats: attention statistics of all heads, in the order of `segments`.

        Returns:
            The updated states.
        """
        states, remaining = [], list(stats.segments)
        visible = jnp.zeros_like(stats.appended[:, :1], jnp.int32)
        for policy, group_state, heads in self._each(state):
            count = len(policy.segments(group_state, visible))
            staged = None if stats.staged is None else stats.staged[:, heads]
            group_stats = AttentionStats(tuple(remaining[:count]), staged, stats.appended)
            states.append(policy.observe(group_state, group_stats))
            remaining = remaining[count:]
        return dataclasses.replace(state, groups=tuple(states))

    def compact(self, state: ByHeadState, new: Tokens) -> ByHeadState:
        """Moves each policy's heads of the staged tokens into its state.

        Args:
            new: the staged tokens of all heads.

        Returns:
            The updated states.
        """
        states = tuple(
            policy.compact(group, _take_heads(new, heads, new.keys.shape[1]))
            for policy, group, heads in self._each(state)
        )
        return dataclasses.replace(state, groups=states)

    def _each(self, state: ByHeadState) -> list[tuple[Policy, Any, Int[Array, "H"]]]:
        """Returns every distinct policy with its state and the indices of its heads on this device."""
        heads = (one.index for one in state.heads)
        return list(zip(self.groups(), state.groups, heads, strict=True))


def _take_heads(tree: T, heads: Int[Array, "H"], kv_heads: int) -> T:
    """Returns a prompt or tokens of `kv_heads` KV heads with some of these heads, and with their query heads."""

    def take(field: ArrayField, x: Array) -> Array:
        axis = next((field.axes.index(name) for name in ("H_kv", "H_q") if name in field.axes), None)
        if axis is None or field.name == "layer_carry":
            return x
        group = x.shape[axis] // kv_heads  # 1 along KV heads
        index = (heads[:, None] * group + jnp.arange(group)).reshape(-1)
        return x[(slice(None),) * axis + (index,)]

    return map_fields(take, tree)
