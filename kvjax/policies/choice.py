"""Combinators that give layers, or kv heads, policies of their own, each with buffers of its own size."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.attention import Partials
from kvjax.policy import ALL_QUERIES, CachePolicy, CacheSpec
from kvjax.state import state, static


@state
class Chosen:
    """The cache of the policy that was chosen."""

    cache: Any
    policy: CachePolicy = static()


@state
class Group:
    """The cache of the kv heads that share a policy, as a cache of so many heads."""

    cache: Any
    policy: CachePolicy = static()
    heads: tuple[int, ...] = static()


def by_layer(policies: Sequence[CachePolicy]) -> CachePolicy:
    """Layer l keeps its cache as `policies[l]` does. Compactions come at the shortest of their periods, which every
    policy allows.

    Raises:
        ValueError: for no policies, or (when a cache is made) a number of them that is not the number of layers.
    """

    def choose(spec: CacheSpec) -> CachePolicy:
        if len(policies) != spec.layers:
            raise ValueError(f"by_layer: {len(policies)} policies were given for layers={spec.layers}")
        return policies[spec.layer]

    return chosen(choose, policies, name=f"by_layer({_names(policies)})")


def first_layers(layers: int, first: CachePolicy, others: CachePolicy) -> CachePolicy:
    """So many first layers keep their caches as `first` does, the rest as `others`; for any number of layers."""
    if not layers:
        return others
    return chosen(lambda spec: first if spec.layer < layers else others, (first, others), name=others.name)


def by_head(policies: Sequence[Sequence[CachePolicy]]) -> CachePolicy:
    """Kv head h of layer l keeps its cache as `policies[l][h]` does; heads of a layer that share one policy object
    share its buffers, so a smaller budget is a smaller buffer.

    Raises:
        ValueError: for no policies; when a cache is made, for numbers of them that are not those of layers and kv
            heads; in prefill, for a policy that carries something from layer to layer, which groups of heads cannot.
    """
    grouped = tuple(_by_group(tuple(layer)) for layer in policies)

    def choose(spec: CacheSpec) -> CachePolicy:
        if len(grouped) != spec.layers:
            raise ValueError(f"by_head: policies were given for {len(grouped)} layers of layers={spec.layers}")
        return grouped[spec.layer]

    every = [policy for layer in policies for policy in layer]
    return chosen(choose, grouped, name=f"by_head({_names(every)})")


def chosen(choose: Callable[[CacheSpec], CachePolicy], candidates: Sequence[CachePolicy], *, name: str) -> CachePolicy:
    """The policy that `choose` gives for the spec of a cache, decided when the cache is made.

    Args:
        choose: must give the same object for equal specs: compiled functions are kept by a policy's identity.
        candidates: policies like all those that it may give, for what must be known before there is a spec.
    """
    if not candidates:
        raise ValueError(f"{name} needs at least one policy")

    def init(spec, row_keys):
        policy = choose(spec)
        return Chosen(policy.init(spec, row_keys), policy)

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        own = _own_queries(state.policy, query_tail, keys.shape[1])
        cache, shared = state.policy.prefill(state.cache, keys, values, lengths, own, shared)
        return Chosen(cache, state.policy), shared

    def attend(state, query, causal=False):
        partials, cache = state.policy.attend(state.cache, query, causal)
        return partials, Chosen(cache, state.policy)

    def segments(state, query, causal=False):
        return state.policy.segments(state.cache, query, causal)

    def over(function):
        return chosen(lambda spec: function(choose(spec)), [function(one) for one in candidates], name=name)

    return CachePolicy(
        name=name,
        init=init,
        prefill=prefill,
        attend=attend,
        extend=lambda state, *tokens: Chosen(state.policy.extend(state.cache, *tokens), state.policy),
        compact=lambda state: Chosen(state.policy.compact(state.cache), state.policy),
        read_bytes=lambda state: state.policy.read_bytes(state.cache),
        segments=segments if all(one.segments is not None for one in candidates) else None,
        over=over if any(one.over is not None for one in candidates) else None,
        **_common(candidates),
    )


def _by_group(policies: tuple[CachePolicy, ...]) -> CachePolicy:
    """Kv head h of one layer keeps its cache as `policies[h]` does."""
    groups = {policy: tuple(h for h, one in enumerate(policies) if one == policy) for policy in policies}
    # Where each head stands once groups are laid side by side.
    order = np.argsort(np.concatenate([np.array(heads, int) for heads in groups.values()]))

    def init(spec, row_keys):
        if len(policies) != spec.kv_heads:
            raise ValueError(f"by_head: {len(policies)} policies were given for kv_heads={spec.kv_heads}")
        per_head = spec.query_heads // spec.kv_heads
        made = []
        for policy, heads in groups.items():
            own = dataclasses.replace(spec, kv_heads=len(heads), query_heads=len(heads) * per_head)
            # Heads of two groups must not draw alike.
            keys = jax.vmap(lambda key, first=heads[0]: jax.random.fold_in(key, first))(row_keys)
            made.append(Group(policy.init(own, keys), policy, heads))
        return tuple(made)

    def prefill(state, keys, values, lengths, query_tail=None, shared=None):
        made = []
        for group in state:
            queries = _own_queries(group.policy, query_tail, keys.shape[1])
            queries = None if queries is None else _query_heads(queries, group.heads, len(policies))
            index = np.array(group.heads)
            cache, told = group.policy.prefill(
                group.cache, keys[:, :, index], values[:, :, index], lengths, queries, None
            )
            if told is not None:
                raise ValueError(f"by_head: {group.policy.name} carries something from layer to layer; use by_layer")
            made.append(Group(cache, group.policy, group.heads))
        return tuple(made), shared

    def attend(state, query, causal=False):
        parts, made = [], []
        for group in state:
            own = _query_heads(query, group.heads, len(policies))
            partials, cache = group.policy.attend(group.cache, own, causal)
            parts.append(partials)
            made.append(Group(cache, group.policy, group.heads))
        return _joined(parts, order, query.shape[2] // len(policies)), tuple(made)

    def extend(state, keys, values, lengths=None):
        made = []
        for group in state:
            index = np.array(group.heads)
            cache = group.policy.extend(group.cache, keys[:, :, index], values[:, :, index], lengths)
            made.append(Group(cache, group.policy, group.heads))
        return tuple(made)

    def compact(state):
        return tuple(Group(group.policy.compact(group.cache), group.policy, group.heads) for group in state)

    def over(function):
        # One policy for all heads of a group, still.
        made = {policy: function(policy) for policy in groups}
        return _by_group(tuple(made[policy] for policy in policies))

    return CachePolicy(
        name=_names(policies),
        init=init,
        prefill=prefill,
        attend=attend,
        extend=extend,
        compact=compact,
        read_bytes=lambda state: sum(group.policy.read_bytes(group.cache) for group in state),
        over=over,
        **_common(policies),
    )


def _common(policies: Sequence[CachePolicy]) -> dict[str, Any]:
    tails = [policy.query_tail for policy in policies]
    return {
        "period": min(policy.period for policy in policies),
        "query_tail": ALL_QUERIES if ALL_QUERIES in tails else max(tails),
        "streams": all(policy.streams for policy in policies),
        "recalls": any(policy.recalls for policy in policies),
    }


def _names(policies: Sequence[CachePolicy]) -> str:
    return ", ".join(dict.fromkeys(policy.name for policy in policies))


def _own_queries(policy: CachePolicy, query_tail: Array | None, tokens: int) -> Array | None:
    """The last of the queries, as many as the policy asks for; a tail is right-aligned."""
    if query_tail is None or not policy.query_tail:
        return None
    own = tokens if policy.query_tail == ALL_QUERIES else min(policy.query_tail, tokens)
    return query_tail[:, query_tail.shape[1] - own :]


def _query_heads(query: Array, heads: tuple[int, ...], kv_heads: int) -> Array:
    """The queries [B, T, H_q, D] that read the given kv heads."""
    group = query.shape[2] // kv_heads
    return query[:, :, (np.array(heads)[:, None] * group + np.arange(group)).reshape(-1)]


def _joined(parts: Sequence[Partials], order: np.ndarray, group: int) -> Partials:
    """Partials of groups of heads, laid side by side and brought back to the heads' order."""
    index = (order[:, None] * group + np.arange(group)).reshape(-1)
    join = lambda *x: jnp.concatenate(x, axis=2)[:, :, index]  # noqa: E731
    return Partials(
        join(*(one.max for one in parts)), join(*(one.num for one in parts)), join(*(one.den for one in parts))
    )
