"""Policies that differ from KV head to KV head, each with separate buffers."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from kvjax.attention import AttentionStats
from kvjax.combinators.combined import CombinedPolicies
from kvjax.policy import Policy, Prompt, Requirements
from kvjax.segment import Segment, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state


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

        Args:
            spec: spec of the layer.

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
                f"policy as the others, got {[list(one.values()) for one in sizes]}"
            )
        group_size = spec.query_heads // spec.kv_heads
        index: list[HeadIndex] = []
        states: list[Any] = []
        for policy, heads in self.groups().items():
            group_spec = dataclasses.replace(spec, kv_heads=len(heads), query_heads=len(heads) * group_size)
            # Two groups must not draw the same random numbers.
            keys = jax.vmap(functools.partial(_fold_in, heads[0]))(row_keys)
            states.append(policy.init(group_spec, keys))
            index.append(HeadIndex(jnp.array(heads, jnp.int32) % local))
        return ByHeadState(tuple(index), tuple(states))

    def prefill(self, state: ByHeadState, prompt: Prompt) -> ByHeadState:
        """Compresses each policy's heads of a prompt.

        Args:
            state: empty states.
            prompt: the prompt with the inputs that any of the policies requires.

        Returns:
            The states.

        Raises:
            ValueError: if a policy passes an array to the next layer (`layer_carry`).
        """
        states = []
        for policy, group_state, heads in self._each(state):
            group_prompt = _select_heads(prompt, heads, policy.requires)
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

        def select(heads: Int[Array, "H"]) -> Tokens:
            """Returns the tokens of some KV heads."""
            scores = None if new.scores is None else new.scores[:, heads]
            return dataclasses.replace(new, keys=new.keys[:, heads], values=new.values[:, heads], scores=scores)

        states = tuple(policy.compact(group, select(heads)) for policy, group, heads in self._each(state))
        return dataclasses.replace(state, groups=states)

    def _each(self, state: ByHeadState) -> list[tuple[Policy, Any, Int[Array, "H"]]]:
        """Returns every distinct policy with its state and the indices of its heads on this device."""
        heads = (one.index for one in state.heads)
        return list(zip(self.groups(), state.groups, heads, strict=True))


def _fold_in(first_head: int, key: Key[Array, ""]) -> Key[Array, ""]:
    """Returns the key of a group of heads."""
    return jax.random.fold_in(key, first_head)


def _select_heads(prompt: Prompt, heads: Int[Array, "H"], requires: Requirements) -> Prompt:
    """Returns a prompt with some of its KV heads and the queries that a policy needs."""
    kv_heads = prompt.keys.shape[1]

    def query_heads(count: int) -> Int[Array, "Q"]:
        """Returns the indices of the selected query heads, given the `count` of query heads on this device."""
        group = count // kv_heads
        return (heads[:, None] * group + jnp.arange(group)).reshape(-1)

    queries, count = prompt.queries, requires.num_prompt_queries(prompt.keys.shape[2])
    if queries is not None:
        queries = queries[:, queries.shape[1] - count :, query_heads(queries.shape[2])] if count else None
    sinks, repeated, scores = prompt.sink_logits, prompt.repeated, prompt.predicted_scores
    if repeated is not None:
        norms = repeated.value_norms
        repeated = dataclasses.replace(
            repeated,
            queries=repeated.queries[:, :, query_heads(repeated.queries.shape[2])],
            keys=repeated.keys[:, :, heads],
            received=None if repeated.received is None else repeated.received[:, heads],
            value_norms=None if norms is None else norms[:, query_heads(norms.shape[1])],
        )
    return dataclasses.replace(
        prompt,
        keys=prompt.keys[:, heads],
        values=prompt.values[:, heads],
        queries=queries,
        sink_logits=None if sinks is None else sinks[query_heads(sinks.shape[0])],
        repeated=repeated,
        predicted_scores=None if scores is None else scores[:, heads],
    )
