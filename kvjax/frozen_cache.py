"""A compressed text that many sequences continue: its entries are held once and never change.

    cache, counters = init(policy, dataclasses.replace(spec, max_new_tokens=0), row_keys)
    cache, counters, _ = prefill(cache, counters, keys, values, lengths)
    text = freeze(cache, counters)                                                # D texts
    output, tail, counters = step(tail, counters, query, key, value, text=text)   # D * R rows, R for each text

Every row holds the tokens after its text in a cache of its own, the tail. The queries of the rows of one text are
further queries of each KV head, so that a step reads the entries of a text once for all its rows. The partial softmax
over the text merges exactly with the one over the tail.

A frozen text loses no token to later ones, as some policies would; only in layers whose model has a sliding window are
its oldest tokens hidden as the tail grows.
"""

from typing import TYPE_CHECKING, Generic

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from kvjax import quantization
from kvjax.attention import attend_segments
from kvjax.partials import Partials
from kvjax.policy import Policy, S
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec, is_concrete
from kvjax.staging import Counters, check_counters
from kvjax.state import batch_size, state, static

if TYPE_CHECKING:
    from kvjax.cache import Cache


@state
class FrozenCache(Generic[S]):
    """The entries of D texts in one layer. `freeze` makes one.

    Attributes:
        state: the policy's state after the texts.
        policy: policy of this layer.
        spec: spec of one row of the layer.
        mesh: mesh that shards the entries; None for a single device.
    """

    state: S
    policy: Policy[S] = static()
    spec: CacheSpec = static()
    mesh: Mesh | None = static()


def freeze(cache: "Cache[S]", counters: Counters) -> FrozenCache[S]:
    """Returns the entries of a cache, without the staging buffer.

    Args:
        cache: a cache without staged tokens; it shares its buffers with the result.
        counters: its counters.

    Returns:
        The frozen cache.

    Raises:
        ValueError: if tokens are staged, or the call is inside jit.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=0
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> keys = values = jnp.ones((1, 64, 2, 8))
        >>> cache, counters, _ = kvjax.prefill(cache, counters, keys, values, jnp.array([50]))
        >>> kvjax.cache_bytes(kvjax.freeze(cache, counters)).device < kvjax.cache_bytes(cache).device
        True
    """
    check_counters(cache.staging, counters, cache.spec)
    if not is_concrete(counters):
        raise ValueError("freeze reads the counters of the cache; call it outside jit")
    if int(counters.offset):
        raise ValueError(
            f"the staging buffer holds tokens in {int(counters.offset)} slots, which a frozen cache would lose; call "
            "kvjax.compact first"
        )
    return FrozenCache(cache.state, policy=cache.policy, spec=cache.spec, mesh=cache.mesh)


def frozen_segments(cache: FrozenCache, tokens_after: Int[Array, "D #R"]) -> tuple[SegmentLike, ...]:
    """Returns what queries read of texts.

    Args:
        cache: the texts.
        tokens_after: int32 number of tokens after the text that each query sees, its own included.

    Returns:
        Segments, and reads of block stores.
    """
    hidden = tokens_after if cache.spec.window is not None else jnp.zeros_like(tokens_after)
    return cache.policy.segments(quantization.readable(cache.state), hidden)


def attend_frozen(
    cache: FrozenCache, query: Float[Array, "B T H_q D"], tokens_after: Int[Array, "B #T"], kv_heads: int
) -> tuple[Partials, tuple[SegmentLike, ...]]:
    """Attends to the texts of rows: row b continues text b // (B / D).

    Args:
        cache: D texts.
        query: queries, scaled as `attention` expects them.
        tokens_after: as for `frozen_segments`, by row.
        kv_heads: KV heads of this device.

    Returns:
        The partial softmax, by token, and the segments.

    Raises:
        ValueError: if the number of rows is not a multiple of the number of texts.
    """
    batch, tokens = query.shape[:2]
    texts = batch_size(cache)
    if batch % texts:
        raise ValueError(f"{batch} rows cannot continue {texts} texts: the same number of rows must continue each")
    segments = frozen_segments(cache, jnp.broadcast_to(tokens_after, (batch, tokens)).reshape(texts, -1))
    queries = query.reshape(texts, -1, *query.shape[2:])
    partials = attend_segments(queries, segments, kv_heads=kv_heads, logit_cap=cache.spec.logit_cap)
    return jax.tree.map(lambda x: x.reshape(batch, tokens, *x.shape[2:]), partials), segments


def check_text(text: FrozenCache, spec: CacheSpec) -> None:
    """Checks that tails of a spec can continue texts.

    Raises:
        ValueError: if sizes of the layer differ.
    """
    for name in ("query_heads", "kv_heads", "head_dim", "value_dim", "scale", "logit_cap", "window"):
        ours, theirs = getattr(spec, name), getattr(text.spec, name)
        if ours != theirs:
            raise ValueError(f"text: {name}={theirs} differs from the cache's {name}={ours}")
