"""Policies that differ from KV head to KV head, each with separate buffers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from kvjax.attention import AttentionStats
from kvjax.combinators.combined import CombinedPolicies
from kvjax.distributed.collectives import global_heads
from kvjax.policy import Policy, Prompt, RepeatedPrompt, Requirements
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec
from kvjax.stores.staging import Tokens


@dataclasses.dataclass(frozen=True)
class ByHead(CombinedPolicies[tuple[Any, ...]]):
    """Uses `policies[h]` for KV head h. Heads with equal policies share one state.

    If devices shard the heads, every device must have the same policies in the same order, because all devices run one
    program.

    Attributes:
        policies: one policy per KV head.
    """

    policies: tuple[Policy, ...]

    def groups(self, heads: int | None = None) -> dict[Policy, tuple[int, ...]]:
        """Returns the KV heads of every distinct policy.

        Args:
            heads: heads on this device; None for all.

        Returns:
            The heads of each policy.

        Raises:
            ValueError: if devices that shard the heads would have different policies.
        """
        count = len(self.policies) if heads is None else heads
        local = self.policies[:count]
        if local * (len(self.policies) // count) != self.policies:
            raise ValueError(f"ByHead: devices with {count} KV heads each need the same policies in the same order")
        return {policy: tuple(h for h, other in enumerate(local) if other == policy) for policy in dict.fromkeys(local)}

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

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> tuple[Any, ...]:
        """Returns one empty state per distinct policy.

        Args:
            spec: spec of the layer, with all its KV heads.
            row_keys: one PRNG key per row; each state draws from keys derived from them.

        Returns:
            States in the order of `groups`, each for the heads of its policy.
        """
        group_size, states = spec.query_heads // spec.kv_heads, []
        for policy, heads in self.groups().items():
            group_spec = dataclasses.replace(spec, kv_heads=len(heads), query_heads=len(heads) * group_size)
            # Two groups must not draw the same random numbers.
            keys = jax.vmap(lambda key, first=heads[0]: jax.random.fold_in(key, first))(row_keys)
            states.append(policy.init(group_spec, keys))
        return tuple(states)

    def prefill(self, state: tuple[Any, ...], prompt: Prompt) -> tuple[Any, ...]:
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
        for policy, group_state, heads in self._each(state, prompt.keys.shape[1]):
            group_prompt = _select_heads(prompt, heads, policy.requires)
            if policy.layer_carry(group_state, group_prompt) is not prompt.layer_carry:
                raise ValueError(f"ByHead: {policy} passes state to the next layer, use ByLayer instead")
            states.append(policy.prefill(group_state, group_prompt))
        return tuple(states)

    def segments(self, state: tuple[Any, ...], num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the segments of all policies, each with the indices of its KV heads.

        Args:
            state: the states.
            num_visible_staged: int32 number of staged tokens that each query attends to.

        Returns:
            The segments of the first policy, then of the second, and so on.
        """
        return tuple(
            dataclasses.replace(
                one, kv_heads=heads if one.kv_heads is None else tuple(heads[head] for head in one.kv_heads)
            )
            for policy, group_state, heads in self._each(state, None)
            for one in policy.segments(group_state, num_visible_staged)
        )

    def observe(self, state: tuple[Any, ...], stats: AttentionStats) -> tuple[Any, ...]:
        """Passes each policy the statistics of its segments and of its heads' staged tokens.

        Args:
            state: the states.
            stats: attention statistics of all heads, in the order of `segments`.

        Returns:
            The updated states.
        """
        states, remaining = [], list(stats.segments)
        visible = jnp.zeros_like(stats.appended[:, :1], jnp.int32)
        for policy, group_state, heads in self._each(state, None):
            count = len(policy.segments(group_state, visible))
            staged = None if stats.staged is None else stats.staged[:, np.array(heads)]
            group_stats = AttentionStats(tuple(remaining[:count]), staged, stats.appended)
            states.append(policy.observe(group_state, group_stats))
            remaining = remaining[count:]
        return tuple(states)

    def compact(self, state: tuple[Any, ...], new: Tokens) -> tuple[Any, ...]:
        """Moves each policy's heads of the staged tokens into its state.

        Args:
            state: the states.
            new: the staged tokens of all heads.

        Returns:
            The updated states.
        """
        return tuple(
            policy.compact(
                group_state,
                dataclasses.replace(new, keys=new.keys[:, np.array(heads)], values=new.values[:, np.array(heads)]),
            )
            for policy, group_state, heads in self._each(state, new.keys.shape[1])
        )

    def _each(self, state: tuple[Any, ...], heads: int | None) -> list[tuple[Policy, Any, tuple[int, ...]]]:
        """Returns every distinct policy with its state and its heads on this device."""
        if heads is None:
            heads = len(self.policies) // global_heads(1)
        return [(policy, one, own) for (policy, own), one in zip(self.groups(heads).items(), state, strict=True)]


def _select_heads(prompt: Prompt, heads: tuple[int, ...], requires: Requirements) -> Prompt:
    """Returns a prompt with some of its KV heads and the queries that a policy needs."""
    kv_heads, index = prompt.keys.shape[1], np.array(heads)

    def query_heads(count: int) -> np.ndarray:
        """Returns the indices of the selected query heads, given the `count` of query heads on this device."""
        group = count // kv_heads
        return (index[:, None] * group + np.arange(group)).reshape(-1)

    queries, count = prompt.queries, requires.num_prompt_queries(prompt.keys.shape[2])
    if queries is not None:
        queries = queries[:, queries.shape[1] - count :, query_heads(queries.shape[2])] if count else None
    sinks, repeated = prompt.sink_logits, prompt.repeated
    if repeated is not None:
        repeated = RepeatedPrompt(
            repeated.queries[:, :, query_heads(repeated.queries.shape[2])],
            repeated.keys[:, :, index],
            repeated.lengths,
            None if repeated.received is None else repeated.received[:, index],
        )
    return dataclasses.replace(
        prompt,
        keys=prompt.keys[:, index],
        values=prompt.values[:, index],
        queries=queries,
        sink_logits=None if sinks is None else sinks[query_heads(sinks.shape[0])],
        repeated=repeated,
    )
