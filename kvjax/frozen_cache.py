"""A compressed prefix that many sequences share: its entries are held once and never change.

    cache, counters = init(policy, dataclasses.replace(spec, max_new_tokens=0), row_keys)
    cache, counters, _ = prefill(cache, counters, keys, values, lengths)
    prefix = freeze(cache, counters)  # D prefixes; D * R rows share them, R each
    output, suffix, counters = step(suffix, counters, query, key, value, prefix=prefix)

Every row holds the tokens after its prefix, the suffix, in a separate cache. The queries of the rows of one prefix are
further queries of each KV head, so that a step reads the entries of a prefix once for all its rows. The partial softmax
over the prefix merges exactly with the one over the suffix.

A frozen prefix loses no token to later ones, as some policies would; only in layers whose model has a sliding window
are its oldest tokens hidden as the suffix grows.
"""

from typing import Generic

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax import quantization
from kvjax.attention import attend_segments
from kvjax.partials import Partials
from kvjax.policy import Policy, S
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import batch_size, state, static


@state
class FrozenCache(Generic[S]):
    """The entries of D prefixes in one layer. `kvjax.freeze` makes one.

    Attributes:
        state: the policy's state after the prefixes.
        policy: policy of this layer.
        spec: spec of one row of the layer.
        mesh: mesh that shards the entries; None for a single device.
    """

    state: S
    policy: Policy[S] = static()
    spec: CacheSpec = static()
    mesh: Mesh | None = static()


def frozen_segments(cache: FrozenCache, tokens_after: Int[Array, "D #R"]) -> tuple[SegmentLike, ...]:
    """Returns what queries read of prefixes.

    Args:
        tokens_after: int32 number of tokens after the prefix that each query sees, its own included.

    Returns:
        Segments, and reads of block stores.
    """
    hidden = tokens_after if cache.spec.window is not None else jnp.zeros_like(tokens_after)
    return cache.policy.segments(quantization.readable(cache.state), hidden)


def attend_frozen(
    cache: FrozenCache, query: Float[Array, "B T H_q D"], tokens_after: Int[Array, "B #T"], kv_heads: int
) -> tuple[Partials, tuple[SegmentLike, ...]]:
    """Attends to the prefixes of rows: row b continues prefix b // (B / D).

    Args:
        cache: D prefixes.
        query: queries, scaled as `attention` expects them.

    Returns:
        The partial softmax, by token, and the segments.

    Raises:
        ValueError: if the number of rows is not a multiple of the number of prefixes.
    """
    batch, tokens = query.shape[:2]
    prefixes = batch_size(cache)
    if batch % prefixes:
        raise ValueError(
            f"{batch} rows cannot continue {prefixes} prefixes: the same number of rows must continue each"
        )
    segments = frozen_segments(cache, jnp.broadcast_to(tokens_after, (batch, tokens)).reshape(prefixes, -1))
    queries = query.reshape(prefixes, -1, *query.shape[2:])
    partials = attend_segments(queries, segments, kv_heads=kv_heads, logit_cap=cache.spec.logit_cap)
    return jax.tree.map(lambda x: x.reshape(batch, tokens, *x.shape[2:]), partials), segments


def check_prefix(prefix: FrozenCache, spec: CacheSpec) -> None:
    """Checks that suffixes of a spec can continue prefixes.

    Raises:
        ValueError: if sizes of the layer differ.
    """
    for name in ("query_heads", "kv_heads", "head_dim", "value_dim", "scale", "logit_cap", "window"):
        ours, theirs = getattr(spec, name), getattr(prefix.spec, name)
        if ours != theirs:
            raise ValueError(f"prefix: {name}={theirs} differs from the cache's {name}={ours}")
