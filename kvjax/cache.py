"""A cache and what can be done with it: one function appends, attends and lets the policy learn, for every policy.

    cache = init(policy, spec, jax.random.split(key, spec.batch))
    cache, _ = prefill(cache, keys, values, lengths)
    repeat:
        attended, cache = step(cache, query, key, value)

A cache is a pytree whose policy is part of its structure: a program compiled for one serves all caches of equal
policies and sizes. Fresh queries, keys and values come as projections make them, [B, T, H, D], already rotated; stored
ones are [B, H_kv, S, D].

No token is lost in silence. What cannot be is an error outside jit; under jit, where it cannot be seen, a fault counter
counts it (`kvjax.check` raises with its meaning) and the row's attention is NaN from then on.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax import staging as stagings
from kvjax.attention import Seen, attend_and_see
from kvjax.collectives import PARTS, TENSOR, summed_over_heads, summed_over_parts
from kvjax.partials import output
from kvjax.policies.streaming_llm import StreamingLLM
from kvjax.policy import Policy, Prompt, Repeated, S
from kvjax.segment import Recalled, Segment, parts_of, segment_bytes
from kvjax.sharding import DATA, HEADS, ROWS, check_axes, shardings
from kvjax.spec import CacheSpec, check_query, check_tokens, known
from kvjax.staging import Staging, init_staging
from kvjax.state import fault, faults_of_rows, state, static
from pallas_kernels.weighted_decode import Partials


class Owner(NamedTuple):
    """Whose state it is."""

    policy: Policy
    spec: CacheSpec


@state
class Owned(Generic[S]):
    """A policy's state with its owner, which many states do not tell: those of selections by different scores, say."""

    state: S
    owner: Owner = static()


@state
class Cache(Generic[S]):
    """One layer's cache of a batch of rows."""

    owned: Owned[S]
    staging: Staging
    past: Int[Array, "B"] = fault("tokens came past max_prompt + max_new; the cache may have lost some")
    reused: Int[Array, "B"] = fault("a prompt came to a cache that had tokens, or was longer than max_prompt")
    # Faults of the policy's state, as they stood after the last prefill or compaction.
    faulty: Int[Array, "B"]
    policy: Policy[S] = static()
    spec: CacheSpec = static()  # of one row of any layer: equal layers share programs
    mesh: Mesh | None = static()  # whose devices share the cache

    @property
    def state(self) -> S:
        """The policy's."""
        return self.owned.state

    def with_state(self, state: S) -> "Cache[S]":
        """The cache with what its policy made of its state."""
        return dataclasses.replace(self, owned=dataclasses.replace(self.owned, state=state))


def init(policy: Policy[S], spec: CacheSpec, row_keys: Key[Array, "B"], mesh: Mesh | None = None) -> Cache[S]:
    """An empty cache.

    Args:
        policy: its `at(spec)` is asked which policy this layer has. A layer with a sliding window (`spec.window`) keeps
            exactly that window, whatever the policy.
        row_keys: one typed PRNG key per row.
        mesh: every device has its rows, its heads and its part of what grows with the context, and runs every function
            on these alone (`kvjax.make_mesh`).

    Raises:
        TypeError: for a policy that is no frozen dataclass.
        ValueError: for settings, sizes and meshes that cannot be together.
    """
    if mesh is not None:
        check_axes(mesh)
    policy = layer_policy(policy, spec)
    parts = 1 if mesh is None else mesh.shape[PARTS]
    spec = dataclasses.replace(spec, staging=min(policy.compact_every, spec.max_new), parts=parts)
    none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
    of_any = dataclasses.replace(spec, batch=1, layer=0, layers=1)
    cache = Cache(
        owned=Owned(policy.init(spec, row_keys), Owner(policy, of_any)),
        staging=init_staging(spec),
        past=none(),
        reused=none(),
        faulty=none(),
        policy=policy,
        spec=of_any,
        mesh=mesh,
    )
    return cache if mesh is None else jax.lax.with_sharding_constraint(cache, shardings(cache, mesh))


def layer_policy(policy: Policy[S], spec: CacheSpec) -> Policy[S]:
    """The policy that `init` gives to a layer."""
    params = type(policy).__dict__.get("__dataclass_params__")
    if not isinstance(policy, Policy) or params is None or not params.frozen:
        raise TypeError(
            f"{type(policy).__name__} must be a kvjax.policy.Policy and itself a frozen dataclass: compiled programs "
            "and saved states go by its value"
        )
    chosen = policy.at(spec)
    if spec.window is None:
        return chosen
    window: Policy[Any] = StreamingLLM(spec.window, sinks=0, compact_every=min(spec.window, chosen.compact_every))
    return window


def prefill(
    cache: Cache[S],
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"],
    queries: Float[Array, "B w H_q D"] | None = None,
    told: Any = None,
    *,
    sink_logits: Float[Array, "H_q"] | None = None,
    repeated: Repeated | None = None,
) -> tuple[Cache[S], Any]:
    """Takes a whole prompt into a fresh cache.

    Args:
        lengths: rows are left-aligned; the first `lengths[b]` tokens of row b are real.
        queries: the prompt's last `cache.policy.prompt_queries`, right-aligned: the last is that of the row's last
            token.
        told: what this gave for the layer before.
        sink_logits: as for `step`.
        repeated: what the layer made of repetitions of the prompt, where `cache.policy.repeat` asks for them.

    Returns:
        The cache, and what this layer tells the next (None for most policies).

    Raises:
        ValueError: for shapes and types that do not fit; outside jit also for a cache that has tokens, or lengths
            beyond T or max_prompt.
    """
    _check(cache, keys, values, lengths)
    longest = min(keys.shape[1], cache.spec.max_prompt)
    if known(lengths, cache.staging.first):
        if bool(jnp.any((lengths < 0) | (lengths > longest))):
            raise ValueError(f"lengths={np.asarray(lengths).tolist()} must lie in [0, {longest}]")
        if bool(jnp.any(tokens(cache) > 0)):
            raise ValueError(
                f"prefill takes a fresh cache; the rows of this one hold {np.asarray(tokens(cache)).tolist()} tokens. "
                "Make a new one with kvjax.init (running a layer once to initialise it, as Flax Linen's init does, "
                "puts a token into its cache), or bring further tokens by step"
            )

    order = _order(cache)
    if repeated is not None:
        queries_again, keys_again = _scaled(cache.spec, repeated.queries), repeated.keys
        queries_again, keys_again = (cast(Array, _in_order(x, order)) for x in (queries_again, keys_again))
        repeated = dataclasses.replace(repeated, queries=queries_again, keys=keys_again)
    fresh = (*(_in_order(x, order) for x in (keys, values)), lengths, _in_order(queries, order), told)
    told_lies = PartitionSpec(DATA, TENSOR)  # what layers tell each other is by row and kv head
    again_lies = repeated and Repeated(cast(Any, HEADS), cast(Any, HEADS), cast(Any, ROWS))
    lies = (HEADS, HEADS, ROWS, HEADS, told_lies, PER_HEAD, again_lies)
    fresh = (*fresh, _sinks(sink_logits, order), repeated)
    return _on_mesh(cache, _prefill, fresh, lies, lambda cache: (cache, told_lies))


def append(
    cache: Cache[S],
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None = None,
) -> Cache[S]:
    """Appends T tokens (the first `lengths[b]` of them in row b) without attending. It never compacts: call `compact`
    before the buffer of `cache.spec.staging` tokens is full."""
    _check(cache, keys, values, lengths)
    _check_room(cache, keys, lengths, compacts=False)
    order = _order(cache)
    fresh = (_in_order(keys, order), _in_order(values, order), lengths)
    return _on_mesh(cache, _append_counted, fresh, (HEADS, HEADS, ROWS), lambda cache: cache)


def attend(
    cache: Cache, query: Float[Array, "B T H_q D"], *, sink_logits: Float[Array, "H_q"] | None = None
) -> Partials:
    """Attention of any queries to all that is cached, as partials [B, T, H_q, ...] that merge with others
    (`kvjax.partials.merge`, `kvjax.output`); nothing is learnt from it."""
    check_query(cache.spec, cache.staging.count.shape[0], query)
    order, lies = _order(cache), Partials(*[cast(Any, HEADS)] * 3)

    fresh = (_in_order(query, order), _sinks(sink_logits, order))
    seen = _on_mesh(cache, _attend_any, fresh, (HEADS, PER_HEAD), lambda _: lies)
    return jax.tree.map(lambda x: _out_of_order(x, order), seen)


def step(
    cache: Cache[S],
    query: Float[Array, "B T H_q D"],
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"] | None = None,
    *,
    sink_logits: Float[Array, "H_q"] | None = None,
    compact_when_full: bool = True,
) -> tuple[Float[Array, "B T H_q D_v"], Cache[S]]:
    """Appends T tokens and gives their causal attention, float32: query t sees what had come by its own token.

    Args:
        lengths: tokens of row b that are real, its first ones; all by default. A row that has ended appends none.
        sink_logits: of every query head the logit of an entry without a value (a learned sink of the model's).
        compact_when_full: compacts first where the tokens would find no room. A compiled loop over layers may leave
            that to `compact` between its blocks, and saves a conditional per step.

    Raises:
        ValueError: for shapes and types that do not fit, or more tokens at a time than there are staging slots; outside
            jit also for tokens past max_prompt + max_new, lengths that cannot be and, where it does not compact, a full
            buffer.
    """
    _check(cache, keys, values, lengths)
    check_query(cache.spec, cache.staging.count.shape[0], query, keys.shape[1])
    _check_room(cache, keys, lengths, compacts=compact_when_full)

    order = _order(cache)
    fresh = (*(_in_order(x, order) for x in (query, keys, values)), lengths, _sinks(sink_logits, order))
    lies = (HEADS, HEADS, HEADS, ROWS, PER_HEAD)
    on_device = _step_compacting if compact_when_full else _step
    attended, cache = _on_mesh(cache, on_device, fresh, lies, lambda cache: (HEADS, cache))
    return _out_of_order(attended, order), cache


def compact(cache: Cache[S]) -> Cache[S]:
    """Hands the staged tokens to the policy. Right at any time, also where none or few are staged."""
    return _on_mesh(cache, _compact, (), (), lambda cache: cache)


def tokens(cache: Cache) -> Int[Array, "B"]:
    """How many tokens every row has taken in."""
    return cache.staging.first + cache.staging.count


_COUNTERS = ("log_weight", "offset", "count", "first", "overflow")  # of staging


def counts_like(cache: Cache, other: Cache) -> bool:
    """Whether two caches that take in the same tokens, and compact together, hold the same counters."""
    sizes = [(one.spec.capacity, one.staging.keys.shape[:3], one.mesh) for one in (cache, other)]
    return sizes[0] == sizes[1]


def without_counters(cache: Cache[S]) -> Cache[S]:
    """The cache without what says how many tokens it holds, for loops in which another one counts for it."""
    return _with(cache, dict.fromkeys(_COUNTERS), None)


def with_counters_of(cache: Cache[S], other: Cache) -> Cache[S]:
    """The cache with another's counters in the place of its own (see `counts_like`)."""
    return _with(cache, {name: getattr(other.staging, name) for name in _COUNTERS}, other.past)


def _with(cache: Cache[S], counters: Any, past: Any) -> Cache[S]:
    return dataclasses.replace(cache, staging=dataclasses.replace(cache.staging, **counters), past=past)


def read_bytes(cache: Cache) -> int:
    """Bytes of cache that one decoding step reads, from shapes and dtypes alone; the cache may be abstract."""
    sizes: list[int] = []

    def count(cache: Cache) -> None:
        spec, batch = cache.spec, cache.staging.count.shape[0]
        sizes.append(cache.policy.read_bytes(cache.state))
        newer = cache.staging.count[:, None]
        parts = (*parts_of(cache.policy.read(cache.state, newer)), stagings.staged(cache.staging, 1))
        # Of a buffer that several segments show, each reads its own slots.
        leaves = {id(leaf): leaf for part in parts if isinstance(part, Segment) for leaf in jax.tree.leaves(part)}
        sizes.append(segment_bytes(*leaves.values()))
        for part in (part for part in parts if isinstance(part, Recalled)):
            # Those that are here: a device's part of a cache may be asked, too.
            kv_heads = cache.staging.keys.shape[1] if part.heads is None else part.heads[1] - part.heads[0]
            query = jnp.zeros((batch, 1, kv_heads * spec.query_heads // spec.kv_heads, spec.head_dim))
            choice = part.choose(query, None)
            places, width = part.store.entries.shape[3:]
            beside = 4 if part.store.scale is None else 4 + 2 * part.store.scale.dtype.itemsize  # a mask, and scales
            block = places * (width * part.store.entries.dtype.itemsize + beside)
            sizes.append(choice.block.size * block + segment_bytes(part.index, part.store.center, choice.rest))

    jax.eval_shape(count, cache)
    return sum(sizes)


# --- on one device's part ---


def _prefill(
    cache: Cache[S],
    keys: Array,
    values: Array,
    lengths: Array,
    queries: Array | None,
    told: Any,
    sink_logits: Array | None,
    repeated: Repeated | None,
) -> tuple[Cache[S], Any]:
    longest = min(keys.shape[1], cache.spec.max_prompt)
    wrong = (lengths < 0) | (lengths > longest) | (tokens(cache) > 0)
    real = jnp.clip(lengths, 0, longest).astype(jnp.int32)
    # What lies past a row's length is noise to policies, but NaN times a weight of zero would not be.
    keys, values = (_only(x, jnp.arange(x.shape[1]) < real[:, None]) for x in (keys, values))
    if queries is not None and len(queries) == len(real):  # others the policy refuses, by its name
        queries = _only(queries, jnp.arange(queries.shape[1]) >= queries.shape[1] - real[:, None])
    if repeated is not None:
        repeated = _only_real(repeated)
    frequencies = cache.spec.rope_frequencies
    prompt = Prompt(
        keys=keys.swapaxes(1, 2),
        values=values.swapaxes(1, 2),
        lengths=real,
        queries=None if queries is None else _scaled(cache.spec, queries),
        told=told,
        sink_logits=sink_logits,
        repeated=repeated,
        frequencies=None if frequencies is None else jnp.asarray(frequencies, jnp.float32),
        logit_cap=cache.spec.logit_cap,
    )
    told = cache.policy.tell(cache.state, prompt)
    filled = cache.policy.prefill(cache.state, dataclasses.replace(prompt, told=told))
    staging = dataclasses.replace(cache.staging, first=jnp.copy(prompt.lengths))  # fit to be donated
    cache = dataclasses.replace(cache, staging=staging, reused=cache.reused + wrong)
    return _looked_over(cache.with_state(filled)), told


def _only(x: Float[Array, "B T H D"], real: Bool[Array, "B T"]) -> Float[Array, "B T H D"]:
    return jnp.where(real[:, :, None, None], x, 0)


def _only_real(repeated: Repeated) -> Repeated:
    """Repetitions with zeros past their lengths."""
    width = repeated.keys.shape[1] // repeated.lengths.shape[1]
    real = (jnp.arange(width) < repeated.lengths[..., None]).reshape(repeated.keys.shape[0], -1)
    return dataclasses.replace(repeated, queries=_only(repeated.queries, real), keys=_only(repeated.keys, real))


def _append_counted(cache: Cache[S], keys: Array, values: Array, lengths: Array | None) -> Cache[S]:
    return _counted(_append(cache, keys, values, lengths))


def _attend_any(cache: Cache, query: Array, sink_logits: Array | None) -> Partials:
    return _attend(cache, query, sink_logits, causal=False)[0]


def _step(
    cache: Cache[S], query: Array, keys: Array, values: Array, lengths: Array | None, sink_logits: Array | None
) -> tuple[Array, Cache[S]]:
    partials, cache = _attend(_append(cache, keys, values, lengths), query, sink_logits, causal=True)
    return output(partials), cache


def _step_compacting(
    cache: Cache[S], query: Array, keys: Array, values: Array, lengths: Array | None, sink_logits: Array | None
) -> tuple[Array, Cache[S]]:
    full = cache.staging.offset + keys.shape[1] > cache.spec.staging
    cache = jax.lax.cond(full, _compact, lambda same: same, cache)
    partials, cache = _attend(_append_counted(cache, keys, values, lengths), query, sink_logits, causal=True)
    return output(partials), cache


def _append(cache: Cache[S], keys: Array, values: Array, lengths: Array | None) -> Cache[S]:
    return dataclasses.replace(cache, staging=stagings.append(cache.staging, keys, values, lengths))


def _compact(cache: Cache[S]) -> Cache[S]:
    new, staging = stagings.take_out(cache.staging)
    compacted = cache.with_state(cache.policy.compact(cache.state, new))
    return _looked_over(_counted(dataclasses.replace(compacted, staging=staging)))


def _attend(
    cache: Cache[S], query: Float[Array, "B T H_q D"], sink_logits: Array | None, causal: bool
) -> tuple[Partials, Cache[S]]:
    policy, staging, tokens = cache.policy, cache.staging, query.shape[1] if causal else 1
    reading = policy.read(cache.state, stagings.newer_tokens(staging, tokens))
    real = stagings.appended(staging, tokens) if causal else None
    partials, (parts, of_staged) = attend_and_see(
        _scaled(cache.spec, query),
        (reading, stagings.staged(staging, tokens)),
        real,
        observes=policy.observes and causal,
        kv_heads=staging.keys.shape[1],
        logit_cap=cache.spec.logit_cap,
        sink_logits=sink_logits,
    )
    if real is not None:
        cache = cache.with_state(policy.observe(cache.state, Seen(parts, of_staged, real)))
    return partials._replace(den=jnp.where(_unsound(cache)[:, None, None], jnp.nan, partials.den)), cache


def _scaled(spec: CacheSpec, query: Array) -> Array:
    """Queries whose products over sqrt(D) are the model's logits."""
    if spec.scale is None:
        return query
    return query * jnp.asarray(spec.scale * spec.head_dim**0.5, query.dtype)


def _unsound(cache: Cache) -> Bool[Array, "B"]:
    """Rows that have lost tokens, or hold what they should not."""
    return ((cache.staging.overflow | cache.reused | cache.faulty) != 0) | (tokens(cache) > cache.spec.capacity)


def _counted(cache: Cache[S]) -> Cache[S]:
    """The cache with its tokens held against what it was made for."""
    return dataclasses.replace(cache, past=jnp.maximum(tokens(cache) - cache.spec.capacity, 0))


def _looked_over(cache: Cache[S]) -> Cache[S]:
    """The cache with its policy's faults counted, of every row over all heads and parts."""
    faults = faults_of_rows(cache.state)
    if faults is None:
        return cache
    return dataclasses.replace(cache, faulty=summed_over_parts(summed_over_heads(faults)))


# --- on a mesh ---

PER_HEAD = PartitionSpec(TENSOR)  # arrays [H_q]


def _on_mesh(cache: Cache, function: Callable[..., Any], fresh: tuple, lies: tuple, gives: Callable[[Any], Any]) -> Any:
    """`function(cache, *fresh)`, on a mesh of every device's part alone: no device asks another for keys or values."""
    _check_owner(cache)
    if cache.mesh is None:
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((cache, fresh)))
        return function(cache, *fresh) if traced else _compiled(function, cache, fresh)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings(cache, cache.mesh))
    run = jax.shard_map(function, mesh=cache.mesh, in_specs=(specs, *lies), out_specs=gives(specs), check_vma=False)
    return run(cache, *fresh)


@functools.partial(jax.jit, static_argnames="function")
def _compiled(function: Callable[..., Any], cache: Cache, fresh: tuple) -> Any:
    """`function(cache, *fresh)` outside jit: one program for all caches of equal policies and sizes, where operation by
    operation would compile policies' loops at every call."""
    return function(cache, *fresh)


def _order(cache: Cache) -> tuple[int, ...] | None:
    order = cache.policy.head_order(1 if cache.mesh is None else cache.mesh.shape[TENSOR])
    return None if order is None or order == tuple(range(len(order))) else order


def _in_order(x: Array | None, order: tuple[int, ...] | None) -> Array | None:
    """Heads [B, T, H, D] in the order in which the cache keeps them."""
    return x if x is None or order is None else x[:, :, _heads(x.shape[2], order)]


def _out_of_order(x: Array, order: tuple[int, ...] | None) -> Array:
    return x if order is None else x[:, :, np.argsort(_heads(x.shape[2], order))]


def _sinks(sink_logits: Array | None, order: tuple[int, ...] | None) -> Array | None:
    return sink_logits if sink_logits is None or order is None else sink_logits[_heads(sink_logits.shape[0], order)]


def _heads(heads: int, order: tuple[int, ...]) -> np.ndarray:
    group = heads // len(order)
    return (np.array(order)[:, None] * group + np.arange(group)).reshape(-1)


# --- checks ---


def _check(cache: Cache, keys: Array, values: Array, lengths: Array | None) -> None:
    check_tokens(cache.spec, cache.staging.count.shape[0], keys, values, lengths)


def _check_owner(cache: Cache) -> None:
    for what, owners, cached in zip(Owner._fields, cache.owned.owner, (cache.policy, cache.spec), strict=True):
        if owners != cached:
            raise ValueError(
                f"the state in this cache is of another {what}, {owners}, not of {cached}: a state belongs to the "
                "cache that kvjax.init made it with"
            )


def _check_room(cache: Cache, keys: Array, lengths: Array | None, *, compacts: bool) -> None:
    """Raises a ValueError for what `staging.append` would have to refuse, where it can be seen."""
    staging, new = cache.staging, keys.shape[1]
    if not known(staging.offset, staging.first, *(() if lengths is None else (lengths,))):
        return
    asked = np.full(staging.count.shape[0], new) if lengths is None else np.asarray(lengths)
    if np.any((asked < 0) | (asked > new)):
        raise ValueError(f"lengths={asked.tolist()} must lie in [0, {new}]")
    if int(staging.offset) + new > cache.spec.staging and not compacts and new <= cache.spec.staging:
        raise ValueError(
            f"{int(staging.offset)} of {cache.spec.staging} staging slots are taken, {new} more tokens find no "
            "room: call kvjax.compact first"
        )
    longest = int(np.max(np.asarray(tokens(cache)) + asked))
    if longest > cache.spec.capacity:
        raise ValueError(
            f"a row would hold {longest} tokens; the cache was made for max_prompt + max_new = "
            f"{cache.spec.max_prompt} + {cache.spec.max_new}: make it with a larger max_new"
        )
