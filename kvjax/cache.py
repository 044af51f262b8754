"""The cache and its functions, which all policies share.

    cache, counters = init(policy, spec, jax.random.split(key, spec.batch))
    cache, counters, _ = prefill(cache, counters, keys, values, lengths)
    output, cache, counters = step(cache, counters, query, key, value)

A cache is a pytree whose policy, spec and mesh are static: a compiled program serves all caches of equal policies and
sizes. Its token counters are a separate pytree, because layers that receive the same tokens and compact together
share them: every layer then gets the counters from before the tokens, and a decode step updates them once.

New queries, keys and values are [B, T, H, D], with RoPE applied. Stored keys and values are [B, H_kv, S, D].

Invalid input raises an error eagerly. Under jit, where values are unknown, it sets a fault counter and the row's
attention is NaN from then on; `kvjax.raise_faults` names the fault.
"""

import dataclasses
from typing import Any, Generic, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from kvjax import quantization
from kvjax import staging as stagings
from kvjax.attention import AttentionStats, attend_with_stats
from kvjax.distributed.collectives import SEQUENCE, TENSOR, sum_over_heads, sum_over_sequence
from kvjax.distributed.sharding import check_axes, per_device, shardings
from kvjax.frozen_cache import FrozenCache, attend_frozen, check_prefix, frozen_segments
from kvjax.jax_flags import with_default_flags
from kvjax.methods.exact import append_only_store
from kvjax.methods.exact.append_only_store import AppendOnlyStore
from kvjax.methods.exact.exact import Exact
from kvjax.partials import Partials, normalize
from kvjax.policy import Policy, Prompt, RepeatedPrompt, S, check_policy_class
from kvjax.segment import BlockStoreRead, Segment, SegmentLike
from kvjax.shared.attention_scores import AttentionScores
from kvjax.sliding_window import SlidingWindow
from kvjax.spec import (
    MAX_TOKENS,
    CacheSpec,
    allocated_slots,
    check_dtype,
    check_queries,
    check_sink_logits,
    check_tokens,
    is_concrete,
)
from kvjax.staging import Counters, Staging, check_counters, init_staging
from kvjax.state import batch_size, cache_bytes, count_row_faults, fault, state, static
from pallas_kernels.quantized_array import array_bytes


@state
class Cache(Generic[S]):
    """The cache of one layer, for a batch of rows. `init` makes one, and its counters.

    Attributes:
        state: the policy's state; keys and values are quantized if `CacheSpec.kv_dtype` is set.
        staging: tokens appended since the last compaction.
        reused: fault counter of invalid calls of `prefill`.
        not_finite: fault counter of tokens and attention outputs that are not finite.
        policy_faults: nonzero fault counters in the policy's state, after the last prefill or compaction.
        policy: policy of this layer.
        spec: spec of one row of the layer, without the layer's index, so that equal layers share compiled programs.
        mesh: mesh that shards the cache; None for a single device.
    """

    state: S
    staging: Staging
    reused: Int[Array, "B"] = fault("prefill was called on a cache with tokens, or with more than max_prompt_tokens")
    not_finite: Int[Array, "B"] = fault(
        "tokens had keys or values that are NaN or infinite in the cache's dtype, or such an attention output"
    )
    policy_faults: Int[Array, "B"]  # fault counters of the policy's state after the last prefill or compaction
    policy: Policy[S] = static()
    spec: CacheSpec = static()
    mesh: Mesh | None = static()

    def __repr__(self) -> str:
        """Returns the policy, the sizes and the bytes, without the arrays."""
        spec, batch = self.spec, getattr(self.reused, "shape", ("?",))[0]
        try:
            held = cache_bytes(self)
            size = f"{held.device:,} bytes on the device, {held.host:,} on the host"
        except (AttributeError, TypeError):  # a tree of axes or shardings with the structure of a cache
            size = "no arrays"
        dtype = spec.kv_dtype or jnp.dtype(spec.dtype).name
        return (
            f"{type(self).__name__}({self.policy},\n"
            f"      batch={batch}, kv_heads={spec.kv_heads}, head_dim={spec.head_dim}, dtype={dtype},\n"
            f"      max_prompt_tokens={spec.max_prompt_tokens}, max_new_tokens={spec.max_new_tokens}: {size})"
        )


AnyCache = TypeVar("AnyCache", bound=Cache | FrozenCache)


@with_default_flags
def init(
    policy: Policy[S], spec: CacheSpec, row_keys: Key[Array, "B"], mesh: Mesh | None = None
) -> tuple[Cache[S], Counters]:
    """Returns an empty cache and its counters.

    Args:
        policy: the policy of the model; the layer uses `policy.for_layer(spec)`. A layer with a sliding window
            (`spec.window`) keeps exactly its window, whatever the policy.
        spec: sizes and dtypes of the layer's cache.
        row_keys: one typed PRNG key per batch row.
        mesh: a mesh from `kvjax.make_mesh`; every device then holds its shard of the rows, of the KV heads and of the
            stores that grow with the context. None for a single device.

    Returns:
        A cache without tokens, and counters of no tokens. Layers that receive the same tokens and compact together may
        share the counters of one of them, if `CacheSpec.staging_slots` makes their staging buffers equally long.

    Raises:
        TypeError: if the policy is not a frozen dataclass that derives from `kvjax.policy.Policy`.
        ValueError: if settings, sizes, keys and mesh do not fit together.

    Example:
        >>> import jax, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> counters.num_tokens
        Array([0], dtype=int32)
    """
    if row_keys.shape != (spec.batch,) or not jax.dtypes.issubdtype(row_keys.dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"row_keys has shape {row_keys.shape} and dtype {row_keys.dtype}; pass one typed key per row, as "
            f"jax.random.split(jax.random.key(0), {spec.batch}) returns"
        )
    sequence_shards = head_shards = 1
    if mesh is not None:
        check_axes(mesh)
        sequence_shards, head_shards = mesh.shape[SEQUENCE], mesh.shape[TENSOR]
    policy = layer_policy(policy, spec)
    slots = min(policy.compact_every, spec.max_new_tokens)
    slots = slots if spec.staging_slots is None else min(slots, spec.staging_slots)
    spec = dataclasses.replace(spec, staging_slots=slots, sequence_shards=sequence_shards, head_shards=head_shards)
    staging, counters = init_staging(spec, slots, scored=policy.requires.predicted_scores)
    state = quantization.init_stored(policy.init(spec, row_keys), spec.kv_formats, spec.dtype)
    row_spec = dataclasses.replace(spec, batch=1, layer=0, layers=1)
    return _new_cache(state, staging, counters, policy.canonical(), row_spec, mesh)


def _new_cache(
    state: S, staging: Staging, counters: Counters, policy: Policy[S], spec: CacheSpec, mesh: Mesh | None
) -> tuple[Cache[S], Counters]:
    """Returns a cache without faults and its counters, on the devices of a mesh."""
    faults = {name: jnp.zeros(staging.keys.shape[0], jnp.int32) for name in ("reused", "not_finite", "policy_faults")}
    cache = Cache(state=state, staging=staging, policy=policy, spec=spec, mesh=mesh, **faults)
    if mesh is None:
        return cache, counters
    return jax.lax.with_sharding_constraint((cache, counters), shardings((cache, counters), mesh))


def layer_policy(policy: Policy[S], spec: CacheSpec) -> Policy[Any]:
    """Returns the policy that `init` gives to a layer.

    Returns:
        The layer's policy; a `SlidingWindow` for a layer with a sliding window.

    Raises:
        TypeError: if the policy is not a frozen dataclass that derives from `Policy`.
    """
    check_policy_class(type(policy))
    layer = policy.for_layer(spec)
    if spec.window is None:
        return layer
    window = spec.window if spec.window < MAX_TOKENS else spec.capacity  # it hides no token
    return SlidingWindow(window, compact_every=min(window, layer.compact_every))


def prefill(
    cache: Cache[S],
    counters: Counters,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"],
    queries: Float[Array, "B w H_q D"] | None = None,
    layer_carry: Shaped[Array, "B H_kv *N"] | None = None,
    *,
    sink_logits: Float[Array, "H_q"] | None = None,
    repeated: RepeatedPrompt | None = None,
    predicted_scores: Float[Array, "B H_kv T"] | None = None,
) -> tuple[Cache[S], Counters, Shaped[Array, "B H_kv *N"] | None]:
    """Writes a prompt into an empty cache, compressed by the cache's policy.

    It returns no attention output: the model computes the attention of the prompt itself, without the cache.

    Args:
        keys: keys of the prompt, left-aligned: row b's tokens are `keys[b, :lengths[b]]`.
        values: values of the prompt, left-aligned.
        lengths: number of tokens of each row.
        queries: last queries of the prompt, right-aligned: the last one belongs to each row's last token. The policy
            determines their number; `kvjax.prompt_queries(cache.policy, queries)` selects them. None if it needs none.
        layer_carry: the third result of `prefill` for the previous layer; None in the first layer.
        sink_logits: logit of an attention sink per query head, as for `step`.
        repeated: the layer's projections of a repetition of the prompt, if the policy needs one.
        predicted_scores: a score of every token for each KV head, if the policy needs them (`KVzap`: log scores);
            tokens with higher scores are kept.

    Returns:
        The cache, the counters, and the carry for the next layer (None for most policies).

    Raises:
        ValueError: if shapes or dtypes do not fit; outside jit also for a cache with tokens, or lengths out of range.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> keys = values = jnp.ones((1, 64, 2, 8))
        >>> cache, counters, _ = kvjax.prefill(cache, counters, keys, values, jnp.array([50]))
        >>> counters.num_tokens
        Array([50], dtype=int32)
    """
    _check_new_tokens(cache, counters, keys, values, lengths, predicted_scores)
    if queries is not None:
        check_dtype("queries", queries, jnp.floating)
    check_sink_logits(sink_logits, cache.spec.query_heads)
    longest = min(keys.shape[1], cache.spec.max_prompt_tokens)
    if is_concrete(lengths, counters):
        row_lengths, counts = np.asarray(lengths), _known_num_tokens(counters)
        if np.any((row_lengths < 0) | (row_lengths > longest)):
            raise ValueError(f"lengths={row_lengths.tolist()} must be in [0, {longest}]")
        if np.any(counts > 0):
            raise ValueError(
                f"prefill needs an empty cache, but its rows hold {counts.tolist()} tokens; make a new cache with "
                "kvjax.init (Flax Linen's init runs a layer once, which appends a token), or append with kvjax.step"
            )
    return _prefill(
        cache, counters, keys, values, lengths, queries, layer_carry, sink_logits, repeated, predicted_scores
    )


def append(
    cache: Cache[S],
    counters: Counters,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None = None,
    *,
    predicted_scores: Float[Array, "B H_kv T"] | None = None,
) -> tuple[Cache[S], Counters]:
    """Appends T tokens to the staging buffer, without attention and without compaction.

    Args:
        cache: the cache; call `compact` before its staging buffer is full.
        lengths: number of tokens of each row, from the first on; None for T in every row.

    Returns:
        The cache and the counters.

    Raises:
        ValueError: as for `step`.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> cache, counters = kvjax.append(cache, counters, jnp.ones((1, 3, 2, 8)), jnp.ones((1, 3, 2, 8)))
        >>> counters.num_tokens
        Array([3], dtype=int32)
    """
    _check_new_tokens(cache, counters, keys, values, lengths, predicted_scores)
    _check_free_slots(cache, counters, keys, lengths, compacts=False)
    return _append(cache, counters, keys, values, lengths, predicted_scores)


def attend(
    cache: Cache,
    counters: Counters,
    query: Float[Array, "B T H_q D"],
    *,
    sink_logits: Float[Array, "H_q"] | None = None,
) -> Partials:
    """Attends to all tokens of a cache, without a causal mask and without updating the policy.

    Args:
        query: queries, whose tokens need not be in the cache.
        sink_logits: logit of an attention sink per query head, as for `step`.

    Returns:
        The partial softmax, by token; merge it with others (`kvjax.partials.merge`) or call `kvjax.normalize`.

    Raises:
        ValueError: if the shape of the queries does not fit.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> cache, counters = kvjax.append(cache, counters, jnp.ones((1, 3, 2, 8)), jnp.ones((1, 3, 2, 8)))
        >>> kvjax.normalize(kvjax.attend(cache, counters, jnp.ones((1, 1, 4, 8)))).shape
        (1, 1, 4, 8)
    """
    check_counters(cache.staging, counters, cache.spec)
    check_queries(cache.spec, cache.staging.keys.shape[0], query)
    check_sink_logits(sink_logits, cache.spec.query_heads)
    return Partials(*_attend_only(cache, counters, query, sink_logits))


def step(
    cache: Cache[S],
    counters: Counters,
    query: Float[Array, "B T H_q D"],
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None = None,
    *,
    sink_logits: Float[Array, "H_q"] | None = None,
    predicted_scores: Float[Array, "B H_kv T"] | None = None,
    compact_when_full: bool = True,
    prefix: FrozenCache | None = None,
) -> tuple[Float[Array, "B T H_q D_v"], Cache[S], Counters]:
    """Appends T tokens and returns their causal attention to the cache.

    Args:
        lengths: number of tokens of each row, from the first on; None for T in every row. Finished sequences append 0.
        sink_logits: logit of an attention sink per query head; the sink adds to the softmax denominator only (gpt-oss).
        predicted_scores: scores of the new tokens, as for `prefill`, if the policy needs them.
        compact_when_full: whether to compact first if the tokens do not fit into the staging buffer. False saves a
            conditional per step in a compiled loop that calls `compact` itself.
        prefix: D frozen prefixes that the rows share, B / D rows each, in order; the queries attend to them, too.

    Returns:
        The attention output, float32, the cache and the counters.

    Raises:
        ValueError: if shapes or dtypes do not fit, or T exceeds the staging slots; outside jit also for tokens beyond
            max_prompt_tokens + max_new_tokens, lengths out of range and a full buffer that is not compacted.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> query, key, value = jnp.ones((1, 1, 4, 8)), jnp.ones((1, 1, 2, 8)), jnp.ones((1, 1, 2, 8))
        >>> output, cache, counters = kvjax.step(cache, counters, query, key, value)
        >>> output.shape
        (1, 1, 4, 8)
    """
    _check_new_tokens(cache, counters, keys, values, lengths, predicted_scores)
    check_queries(cache.spec, cache.staging.keys.shape[0], query, keys.shape[1])
    check_sink_logits(sink_logits, cache.spec.query_heads)
    _check_free_slots(cache, counters, keys, lengths, compacts=compact_when_full)
    if prefix is not None:
        check_prefix(prefix, cache.spec)
    new = (query, keys, values, lengths, sink_logits, predicted_scores)
    return _step(cache, counters, *new, prefix, compact_when_full=compact_when_full)


def compact(cache: Cache[S], counters: Counters) -> tuple[Cache[S], Counters]:
    """Moves the staged tokens into the policy's state and empties the staging buffer.

    `step` calls it when new tokens do not fit into the staging buffer. It may be called at any time, also without
    staged tokens.

    Returns:
        The cache and the counters.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> cache, counters = kvjax.append(cache, counters, jnp.ones((1, 3, 2, 8)), jnp.ones((1, 3, 2, 8)))
        >>> cache, compacted = kvjax.compact(cache, counters)
        >>> int(counters.offset), int(compacted.offset)
        (3, 0)
    """
    check_counters(cache.staging, counters, cache.spec)
    return _compact(cache, counters)


def freeze(cache: Cache[S], counters: Counters) -> FrozenCache[S]:
    """Returns the entries of a cache, without the staging buffer.

    Args:
        cache: a cache without staged tokens; it shares its buffers with the result.

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


def thaw(frozen: FrozenCache[S], lengths: Int[Array, "B"]) -> tuple[Cache[S], Counters]:
    """Returns a cache with the entries of a frozen one, which takes further tokens: the inverse of `freeze`.

    Args:
        frozen: the entries; the cache shares their buffers.
        lengths: number of tokens that every row has received.

    Returns:
        The cache without staged tokens, and its counters.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> keys = values = jnp.ones((1, 64, 2, 8))
        >>> cache, counters, _ = kvjax.prefill(cache, counters, keys, values, jnp.array([50]))
        >>> cache, counters = kvjax.thaw(kvjax.freeze(cache, counters), counters.num_tokens)
        >>> counters.num_tokens
        Array([50], dtype=int32)
    """
    batch = batch_size(frozen.state)
    spec = dataclasses.replace(frozen.spec, batch=batch)
    scored = frozen.policy.requires.predicted_scores
    staging, counters = init_staging(spec, cast(int, spec.staging_slots), scored=scored)
    counters = dataclasses.replace(counters, first=jnp.asarray(lengths, jnp.int32))
    return _new_cache(frozen.state, staging, counters, frozen.policy, frozen.spec, frozen.mesh)


def resize(cache: AnyCache, max_prompt_tokens: int, max_new_tokens: int) -> AnyCache:
    """Returns a full cache or a sliding window with another capacity.

    Args:
        cache: the cache; its staging buffer keeps its size.

    Returns:
        The cache. Tokens without a slot are a fault of the cache.

    Raises:
        ValueError: if the policy's slots are a budget, or devices share the slots.

    Example:
        >>> import jax, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, _ = kvjax.init(kvjax.Exact(), spec, jax.random.split(jax.random.key(0), 1))
        >>> kvjax.resize(cache, 192, 64).spec.capacity
        256
    """
    spec = dataclasses.replace(cache.spec, max_prompt_tokens=max_prompt_tokens, max_new_tokens=max_new_tokens)
    if not is_resizable(cache.policy, spec):
        raise ValueError(
            f"a cache of {cache.policy} with {spec.sequence_shards} sequence shards cannot be resized: only full "
            "caches and sliding windows can, on devices that do not share slots"
        )
    store = cache.state
    if isinstance(store, AppendOnlyStore):
        # A frozen cache receives no tokens and needs no slots for them.
        is_frozen = isinstance(cache, FrozenCache)
        slots = allocated_slots(spec.capacity) if is_frozen else append_only_store.num_slots(spec, spec.capacity)
        store = append_only_store.resize(store, slots)
    return dataclasses.replace(cache, state=store, spec=spec)


def is_resizable(policy: Policy, spec: CacheSpec) -> bool:
    """Returns whether `resize` applies to the caches of a layer."""
    is_window = isinstance(policy, SlidingWindow) and spec.window is not None and spec.window < MAX_TOKENS
    return (isinstance(policy, Exact) and spec.sequence_shards == 1) or is_window


@with_default_flags
def prefix_probabilities(
    cache: Cache,
    counters: Counters,
    query: Float[Array, "B T H_q D"],
    prefix: FrozenCache,
    *,
    sink_logits: Float[Array, "H_q"] | None = None,
) -> Float[Array, "B H_kv T N"]:
    """Returns the attention probabilities of a prefix's tokens, for the queries of the last `step`.

    Args:
        cache: the cache after the step, before a compaction.
        prefix: the prefixes of the step, on a single device.

    Returns:
        Probabilities by position, float32, summed over the query heads of a group; 0 for KV heads that do not keep
        every token, and for queries without a token.

    Raises:
        ValueError: if the prefix is on a mesh, or none of its heads keeps every token.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> sizes = {"batch": 1, "query_heads": 2, "kv_heads": 2, "head_dim": 8, "max_prompt_tokens": 64}
        >>> keys = jax.random.split(jax.random.key(0), 1)
        >>> text = kvjax.init(kvjax.Exact(), kvjax.CacheSpec(**sizes, max_new_tokens=0), keys)
        >>> ones = jnp.ones((1, 64, 2, 8))
        >>> prefix = kvjax.freeze(*kvjax.prefill(*text, ones, ones, jnp.array([3]))[:2])
        >>> cache, counters = kvjax.init(kvjax.Exact(), kvjax.CacheSpec(**sizes, max_new_tokens=8), keys)
        >>> new = ones[:, :1]
        >>> _, cache, counters = kvjax.step(cache, counters, new, new, new, prefix=prefix)
        >>> kvjax.prefix_probabilities(cache, counters, new, prefix)[0, 0, 0, :4]
        Array([0.25, 0.25, 0.25, 0.  ], dtype=float32)
    """
    check_prefix(prefix, cache.spec)
    segments = prefix.policy.full_segments(quantization.readable(prefix.state))
    if prefix.mesh is not None or not segments:
        raise ValueError("prefix must be on a single device, with KV heads that keep every token")
    (batch, tokens), kv_heads = query.shape[:2], cache.spec.kv_heads
    prefixes = batch_size(prefix)

    def by_prefix(x: Array) -> Array:
        """Returns the queries of all rows of a prefix along one axis."""
        return x.reshape(prefixes, -1, *x.shape[2:])

    suffix, _ = _attend(cache, counters, query, sink_logits, causal=True)
    appended = by_prefix(stagings.appended_mask(counters, tokens))
    queries, others = by_prefix(scale_queries(cache.spec, query)), (jax.tree.map(by_prefix, suffix),)
    options: dict[str, Any] = {"kv_heads": kv_heads, "logit_cap": cache.spec.logit_cap, "others": others}
    _, stats = attend_with_stats(queries, segments, appended, probabilities=True, **options)
    probabilities = jnp.zeros((prefixes, kv_heads, *stats[0].shape[2:]))
    for segment, one in zip(segments, stats, strict=True):
        heads = slice(None) if segment.kv_heads is None else segment.kv_heads
        probabilities = probabilities.at[:, heads].set(one)
    by_row = probabilities.reshape(prefixes, kv_heads, batch // prefixes, tokens, -1).swapaxes(1, 2)
    return by_row.reshape(batch, kv_heads, tokens, -1)


@with_default_flags
def read_bytes(cache: Cache | FrozenCache) -> int:
    """Returns the bytes of the cache that one decode step reads, computed from shapes and dtypes.

    They include segments, the index and the selected blocks of a retrieval policy, and attention scores.

    Args:
        cache: the cache, possibly abstract (`jax.eval_shape`); of frozen prefixes, the bytes that are read once for all
            rows that continue them.

    Returns:
        Bytes for all rows.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> exact, _ = kvjax.init(kvjax.Exact(), spec, jax.random.split(jax.random.key(0), 1))
        >>> kvjax.read_bytes(cache) < kvjax.read_bytes(exact)
        True
    """
    sizes: list[int] = []
    batch = batch_size(cache.state)

    def count(cache: Cache | FrozenCache) -> None:
        """Adds the bytes that one step reads of `cache` to `sizes`; called on abstract arrays."""
        spec = cache.spec
        if isinstance(cache, FrozenCache):
            read = frozen_segments(cache, jnp.zeros((batch, 1), jnp.int32))
        else:
            _, counters = init_staging(dataclasses.replace(spec, batch=batch), cast(int, spec.staging_slots))
            if cache.policy.requires.attention_stats:
                leaves = jax.tree.leaves(cache.state, is_leaf=lambda x: isinstance(x, AttentionScores))
                sizes.append(array_bytes(*(leaf for leaf in leaves if isinstance(leaf, AttentionScores))))
            read = _segments(cache, counters, 1)
        # Without the indices of heads, a few bytes that are no part of a store. Segments may share a buffer; each
        # reads its own slots of it.
        segments = [dataclasses.replace(one, kv_heads=None) for one in read if isinstance(one, Segment)]
        sizes.append(array_bytes(*{id(leaf): leaf for leaf in jax.tree.leaves(segments)}.values()))
        for one in read:
            if not isinstance(one, BlockStoreRead):
                continue
            heads = spec.kv_heads if one.kv_heads is None else len(one.kv_heads)
            selection = one.select(jnp.zeros((batch, 1, heads * spec.query_heads // spec.kv_heads, spec.head_dim)))
            block_size, width = one.store.entries.shape[3:]
            scale_bytes = 0 if one.store.scale is None else 2 * one.store.scale.dtype.itemsize
            block_bytes = block_size * (width * one.store.entries.dtype.itemsize + 4 + scale_bytes)
            sizes.append(selection.block_indices.size * block_bytes)
            sizes.append(array_bytes(one.index, one.store.offset, selection.residual))

    jax.eval_shape(count, cache)
    return sum(sizes)


# --- one device's shard ---


@per_device
def _prefill(
    cache: Cache[S],
    counters: Counters,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"],
    queries: Float[Array, "B w H_q D"] | None,
    layer_carry: Shaped[Array, "B H_kv *N"] | None,
    sink_logits: Float[Array, "H_q"] | None,
    repeated: RepeatedPrompt | None,
    predicted_scores: Float[Array, "B H_kv T"] | None,
) -> tuple[Cache[S], Counters, Shaped[Array, "B H_kv *N"] | None]:
    spec = cache.spec
    longest = min(keys.shape[1], spec.max_prompt_tokens)
    invalid = (lengths < 0) | (lengths > longest) | (counters.num_tokens > 0)
    lengths = jnp.clip(lengths, 0, longest).astype(jnp.int32)
    valid = jnp.arange(keys.shape[1]) < lengths[:, None]
    # Zeros past a row's length: a NaN there would survive a weight of zero.
    keys, values = _zero_invalid(keys, valid), _zero_invalid(values, valid)
    if queries is not None and queries.ndim == 4 and len(queries) == len(lengths):  # otherwise the policy refuses them
        queries = _zero_invalid(queries, jnp.arange(queries.shape[1]) >= queries.shape[1] - lengths[:, None])
        queries = scale_queries(spec, queries)
    if repeated is not None:
        repeated = _zero_repeated(spec, repeated)
    if predicted_scores is not None:
        predicted_scores = jnp.where(valid[:, None], predicted_scores.astype(jnp.float32), 0)
    prompt = Prompt(
        keys=keys.swapaxes(1, 2),
        values=values.swapaxes(1, 2),
        lengths=lengths,
        queries=queries,
        layer_carry=layer_carry,
        sink_logits=sink_logits,
        repeated=repeated,
        predicted_scores=predicted_scores,
        rope_frequencies=None if spec.rope_frequencies is None else jnp.asarray(spec.rope_frequencies, jnp.float32),
        logit_cap=spec.logit_cap,
    )
    empty = quantization.load_stored(cache.state)
    layer_carry = cache.policy.layer_carry(empty, prompt)
    filled = cache.policy.prefill(empty, dataclasses.replace(prompt, layer_carry=layer_carry))
    cache = dataclasses.replace(
        cache,
        state=quantization.store(filled, cache.state),
        reused=cache.reused + invalid,
        not_finite=cache.not_finite
        + _count_not_finite(prompt.keys.astype(spec.dtype), prompt.values.astype(spec.dtype)),
    )
    # A copy, because the counters and the prompt's lengths may both be donated.
    return _count_policy_faults(cache), dataclasses.replace(counters, first=jnp.copy(lengths)), layer_carry


@per_device
def _attend_only(
    cache: Cache, counters: Counters, query: Float[Array, "B T H_q D"], sink_logits: Float[Array, "H_q"] | None
) -> tuple[Float[Array, "B T H_q"], Float[Array, "B T H_q D_v"], Float[Array, "B T H_q"]]:
    partials, _ = _attend(cache, counters, query, sink_logits, causal=False)
    return partials.max, partials.numerator, partials.denominator


@per_device
def _step(
    cache: Cache[S],
    counters: Counters,
    query: Float[Array, "B T H_q D"],
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
    sink_logits: Float[Array, "H_q"] | None,
    predicted_scores: Float[Array, "B H_kv T"] | None,
    prefix: FrozenCache | None,
    *,
    compact_when_full: bool,
) -> tuple[Float[Array, "B T H_q D_v"], Cache[S], Counters]:
    if compact_when_full:
        # One branch for all rows: they share the offset, so that a step writes the same slots in every row.
        full = counters.offset + keys.shape[1] > counters.slots
        cache, counters = jax.lax.cond(full, _compact_shard, lambda *unchanged: unchanged, cache, counters)
    cache, counters = _stage(cache, counters, keys, values, lengths, predicted_scores)
    partials, cache = _attend(cache, counters, query, sink_logits, prefix, causal=True)
    return normalize(partials), cache, counters


def _compact_shard(cache: Cache[S], counters: Counters) -> tuple[Cache[S], Counters]:
    """Passes one device's staged tokens to the policy, which may drop them."""
    # Counted here and not in `_stage`: a check per decode step would be one more kernel per layer.
    slots = counters.slots
    not_finite = _count_not_finite(
        cache.staging.keys[:, :, :slots], cache.staging.values[:, :, :slots], counters.present
    )
    new, counters = stagings.take_staged(cache.staging, counters)
    compacted = cache.policy.compact(quantization.load_stored(cache.state, for_compaction=True), new)
    stored = quantization.store(compacted, cache.state, new_rows=new.count > 0)
    not_finite += cache.not_finite
    return _count_policy_faults(dataclasses.replace(cache, state=stored, not_finite=not_finite)), counters


def _stage(
    cache: Cache[S],
    counters: Counters,
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None,
    predicted_scores: Float[Array, "B H_kv T"] | None = None,
) -> tuple[Cache[S], Counters]:
    """Appends tokens to the staging buffer and counts those beyond the cache's capacity."""
    staging, counters = stagings.append(cache.staging, counters, keys, values, lengths, predicted_scores)
    past = jnp.maximum(counters.num_tokens - cache.spec.capacity, 0)
    return dataclasses.replace(cache, staging=staging), dataclasses.replace(counters, past=past)


_append, _compact = per_device(_stage), per_device(_compact_shard)


def _segments(cache: Cache, counters: Counters, tokens: int) -> tuple[Segment | BlockStoreRead, ...]:
    """Returns what queries of the newest tokens read, the staging buffer last if the cache may have new tokens."""
    visible = stagings.num_visible_staged(counters, tokens)
    segments = cache.policy.segments(quantization.readable(cache.state), visible)
    if cache.spec.max_new_tokens == 0:
        return segments
    return (*segments, stagings.staged_segment(cache.staging, counters, tokens))


def _attend(
    cache: Cache[S],
    counters: Counters,
    query: Float[Array, "B T H_q D"],
    sink_logits: Float[Array, "H_q"] | None,
    prefix: FrozenCache | None = None,
    *,
    causal: bool,
) -> tuple[Partials, Cache[S]]:
    """Attends to the cache; if causal, the queries belong to the newest tokens and the policy observes them."""
    policy, tokens, kv_heads = cache.policy, query.shape[1] if causal else 1, cache.staging.keys.shape[1]
    appended = stagings.appended_mask(counters, tokens) if causal else None
    scaled, segments = scale_queries(cache.spec, query), _segments(cache, counters, tokens)
    others: tuple[Partials, ...] = ()
    prefix_segments: tuple[SegmentLike, ...] = ()
    if prefix is not None:
        visible = counters.first[:, None] + stagings.num_visible_staged(counters, tokens)
        of_prefix, prefix_segments = attend_frozen(prefix, scaled, visible, kv_heads)
        others = (of_prefix,)
    partials, stats = attend_with_stats(
        scaled,
        segments,
        appended,
        probabilities=policy.requires.attention_stats and causal,
        kv_heads=kv_heads,
        logit_cap=cache.spec.logit_cap,
        sink_logits=sink_logits,
        others=others,
    )
    if any(isinstance(one, Segment) and one.log_den is not None for one in (*segments, *prefix_segments)):
        # Numerator and denominator have different entries, so that their ratio is not a mean of values.
        # A numerator without a denominator has no finite output.
        output = partials.numerator / partials.denominator[..., None]
        invalid = jnp.any(~jnp.isfinite(output) & (partials.numerator != 0), axis=(2, 3))
        if appended is not None:
            invalid &= appended
        count = sum_over_heads(jnp.sum(invalid, axis=1, dtype=jnp.int32))
        cache = dataclasses.replace(cache, not_finite=cache.not_finite + count)
    if appended is not None:
        observed = policy.observe(cache.state, AttentionStats(stats[:-1], stats[-1], appended))
        cache = dataclasses.replace(cache, state=observed)
    # Rows that have lost tokens or hold invalid state.
    faults = counters.overflow | cache.reused | cache.not_finite | cache.policy_faults
    is_faulty = (faults != 0) | (counters.num_tokens > cache.spec.capacity)
    denominator = jnp.where(is_faulty[:, None, None], jnp.nan, partials.denominator)
    return partials._replace(denominator=denominator), cache


def scale_queries(spec: CacheSpec, query: Float[Array, "B T H_q D"]) -> Float[Array, "B T H_q D"]:
    """Scales queries so that their products with keys over sqrt(D) are the model's logits."""
    if spec.scale is None:
        return query
    # In float32: rounded to bfloat16, the factor would change all logits by up to 0.2%.
    wide = query.astype(jnp.promote_types(query.dtype, jnp.float32))
    return (wide * (spec.scale * spec.head_dim**0.5)).astype(query.dtype)


def _zero_invalid(x: Float[Array, "B T H D"], valid: Bool[Array, "B T"]) -> Float[Array, "B T H D"]:
    return jnp.where(valid[:, :, None, None], x, 0)


def _zero_repeated(spec: CacheSpec, repeated: RepeatedPrompt) -> RepeatedPrompt:
    """Returns repetitions with scaled queries and zeros past their lengths."""
    width = repeated.keys.shape[1] // repeated.lengths.shape[1]
    valid = (jnp.arange(width) < repeated.lengths[..., None]).reshape(repeated.keys.shape[0], -1)
    queries = scale_queries(spec, _zero_invalid(repeated.queries, valid))
    return dataclasses.replace(repeated, queries=queries, keys=_zero_invalid(repeated.keys, valid))


def _count_not_finite(
    keys: Float[Array, "B H_kv T D"], values: Float[Array, "B H_kv T D_v"], present: Bool[Array, "B T"] | None = None
) -> Int[Array, "B"]:
    """Counts the tokens of every row whose keys or values are not finite, over all devices that share a row."""
    invalid = ~(jnp.isfinite(keys).all(axis=3) & jnp.isfinite(values).all(axis=3))
    if present is not None:
        invalid &= present[:, None]
    return sum_over_heads(jnp.sum(invalid, axis=(1, 2), dtype=jnp.int32))


def _count_policy_faults(cache: Cache[S]) -> Cache[S]:
    """Updates the fault count of the policy's state, over all devices that share a row."""
    faults = count_row_faults(cache.state)
    if faults is None:
        return cache
    return dataclasses.replace(cache, policy_faults=sum_over_sequence(sum_over_heads(faults)))


# --- checks ---


def _check_new_tokens(
    cache: Cache, counters: Counters, keys: Array, values: Array, lengths: Array | None, scores: Array | None
) -> None:
    """Raises an error for counters of another cache, and for tokens or predicted scores that do not fit the cache."""
    check_counters(cache.staging, counters, cache.spec)
    check_tokens(cache.spec, cache.staging.keys.shape[0], keys, values, lengths)
    if scores is not None:
        check_dtype("predicted_scores", scores, jnp.floating)
        expected = (keys.shape[0], keys.shape[2], keys.shape[1])
        if scores.shape != expected:
            raise ValueError(f"predicted_scores have shape {scores.shape}, expected [B, H_kv, T] = {expected}")
    elif cache.policy.requires.predicted_scores:
        raise ValueError(
            f"{cache.policy} requires predicted scores of new tokens; pass predicted_scores, as kvjax_models does with "
            "the model's profile"
        )


def _known_num_tokens(counters: Counters) -> Int[np.ndarray, "B"]:
    """Returns the tokens of every row, of concrete counters; a sum of JAX arrays would be traced inside jit."""
    return np.asarray(counters.first) + np.asarray(counters.count)


def _check_free_slots(cache: Cache, counters: Counters, keys: Array, lengths: Array | None, *, compacts: bool) -> None:
    """Raises a ValueError for tokens that `_stage` would count as faults, if values are known."""
    new, slots = keys.shape[1], counters.slots
    if not is_concrete(counters, lengths):
        return
    row_tokens = np.full(keys.shape[0], new) if lengths is None else np.asarray(lengths)
    if np.any((row_tokens < 0) | (row_tokens > new)):
        raise ValueError(f"lengths={row_tokens.tolist()} must be in [0, {new}]")
    if int(counters.offset) + new > slots and not compacts and new <= slots:
        raise ValueError(
            f"{int(counters.offset)} of {slots} staging slots are in use and {new} more tokens do not fit; call "
            "kvjax.compact first"
        )
    longest = int(np.max(_known_num_tokens(counters) + row_tokens))
    if longest > cache.spec.capacity:
        raise ValueError(
            f"a row would hold {longest} tokens, but the cache was made for max_prompt_tokens + max_new_tokens = "
            f"{cache.spec.max_prompt_tokens} + {cache.spec.max_new_tokens}; pass a larger max_new_tokens"
        )
