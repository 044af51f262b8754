"""The interface of a cache policy: a few pure functions over a state pytree, in the manner of an optax transformation.

    state = policy.init(spec, row_keys)
    state, shared = policy.prefill(state, keys, values, lengths, query_tail, shared)
    repeat:
        state = policy.extend(state, keys, values, lengths)   # at most `staging_slots` tokens between two compactions
        partials, state = policy.attend(state, queries)
        every `policy.period` appended tokens (or earlier): state = policy.compact(state)

Fresh queries, keys and values come as projections make them, [B, T, H, D], already rotated; stored ones are
[B, H_kv, S, D].
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.attention import Partials
from kvjax.state import cache_bytes

State = Any
Shared = Any

ALL_QUERIES = -1  # for `CachePolicy.query_tail`: the queries of the whole prompt


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What a cache is made for. Everything here is static: capacities follow from it and from a policy's arguments.

    Attributes:
        batch: rows.
        query_heads, kv_heads, head_dim: of one layer.
        max_prompt: longest prompt in tokens that `prefill` will see.
        max_new: most tokens that will ever be appended after it, over all turns.
        dtype: of stored keys and values.
        rope_frequencies: angle per position of each pair of dimensions; needed by policies that re-index positions.
        layer, layers: which layer of how many, for policies whose layers differ.
        parts: devices that share what grows with the context (`kvjax.sharding`): there are as many slots for each.
    """

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_prompt: int
    max_new: int
    dtype: Any = jnp.float32
    rope_frequencies: tuple[float, ...] | None = None
    layer: int = 0
    layers: int = 1
    parts: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "query_heads", "kv_heads", "head_dim", "max_prompt", "max_new", "layers", "parts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; it must be at least 1")
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        if not 0 <= self.layer < self.layers:
            raise ValueError(f"layer={self.layer} must lie in [0, layers={self.layers})")

    def exact_bytes(self, tokens: int) -> int:
        """Bytes that an unpadded exact cache of one row and layer holds for so many tokens: the yardstick of
        every budget."""
        return 2 * self.kv_heads * self.head_dim * jnp.dtype(self.dtype).itemsize * tokens


class Init(Protocol):
    def __call__(self, spec: CacheSpec, row_keys: Array) -> State:
        """An empty cache. row_keys [B]: one typed PRNG key per row, so that a row's randomness is its own."""
        ...


class Prefill(Protocol):
    def __call__(
        self,
        state: State,
        keys: Float[Array, "B T H_kv D"],
        values: Float[Array, "B T H_kv D"],
        lengths: Int[Array, "B"],
        query_tail: Float[Array, "B w H_q D"] | None = None,
        shared: Shared = None,
    ) -> tuple[State, Shared]:
        """Takes a whole prompt into a fresh cache. Rows are left-aligned; `query_tail` is right-aligned (its last query
        is the row's last token); `shared` carries what one layer tells the next."""
        ...


class Attend(Protocol):
    def __call__(self, state: State, query: Float[Array, "B T H_q D"], causal: bool = False) -> tuple[Partials, State]:
        """Attention of the queries to what is cached.

        With `causal`, the T queries are those of the last T appended tokens, in a block that has not been compacted
        since, and each sees what was cached when its own token came. Policies that learn from attention (scores,
        caches of what was recalled) learn from these, for the rows that appended a token. Otherwise all see
        everything, and nothing is learnt.
        """
        ...


class Extend(Protocol):
    def __call__(
        self,
        state: State,
        keys: Float[Array, "B T H_kv D"],
        values: Float[Array, "B T H_kv D"],
        lengths: Int[Array, "B"] | None = None,
    ) -> State:
        """Appends T tokens (the first `lengths[b]` of them in row b)."""
        ...


class Segments(Protocol):
    def __call__(self, state: State, query: Float[Array, "B T H_q D"] | None, causal: bool = False) -> tuple:
        """The segments that attention of the queries reads (those of any one query where `query` is None)."""
        ...


class CachePolicy(NamedTuple):
    """A cache policy. Hashable by identity: build it once and pass the same object to jit-compiled functions.

    Attributes:
        name: as the registry spells it, with the settings that matter, for tables.
        init, prefill, attend, extend: see their protocols.
        compact: takes the staged tokens in; also correct when fewer than `period` are staged, or none.
        read_bytes: bytes of cache that one decoding step reads, from the state's buffers.
        period: tokens between compactions.
        query_tail: how many of the prompt's last queries `prefill` needs (0, w, or ALL_QUERIES).
        segments: what attention reads, where `attend` is attention over segments and no more; None otherwise.
            Combinators that change how entries are stored need it.
        recalls: whether everything is kept and a part is read per query: budgets are then of what is read.
        plan: for policies that recall, what `kvjax.recall.Planned` says; None where a query may read more than once.
        over: for a combinator that picks heads by their number, the same of policies that a function was applied to;
            None for all others.
        streams: whether a prompt of any length may come through `extend` and `compact` alone; False for policies that
            compress in `prefill` only.
    """

    name: str
    init: Init
    prefill: Prefill
    attend: Attend
    extend: Extend
    compact: Callable[[State], State]
    read_bytes: Callable[[State], int]
    period: int
    query_tail: int = 0
    streams: bool = True
    segments: Segments | None = None
    recalls: bool = False
    plan: Any = None
    over: Callable[[Callable[["CachePolicy"], "CachePolicy"]], "CachePolicy"] | None = None


def abstract_state(policy: CachePolicy, spec: CacheSpec) -> State:
    """The state that `policy.init` would make, as shapes and dtypes only."""
    return jax.eval_shape(lambda: policy.init(spec, jax.random.split(jax.random.key(0), spec.batch)))


def row_bytes(policy: CachePolicy, spec: CacheSpec) -> int:
    """Device bytes that the policy keeps for one row of one layer, all buffers counted."""
    return cache_bytes(abstract_state(policy, dataclasses.replace(spec, batch=1))).device


def row_read_bytes(policy: CachePolicy, spec: CacheSpec) -> int:
    """Bytes of cache that decoding a token of one row reads in one layer."""
    return state_read_bytes(policy, abstract_state(policy, dataclasses.replace(spec, batch=1)))


def state_read_bytes(policy: CachePolicy, state: State) -> int:
    """Bytes of a cache that a decoding step reads, from shapes and dtypes alone; the state may be abstract."""
    read: list[int] = []
    jax.eval_shape(lambda state: read.append(policy.read_bytes(state)), state)
    return read[0]


def fit_bytes(factory: Callable[[int], CachePolicy], spec: CacheSpec, limit: int) -> CachePolicy:
    """The policy with the largest budget in whole tiles (see `whole_tiles`) that stays within `limit` bytes per row and
    layer: bytes held, or bytes read per token for a policy that recalls, on the average of all layers.

    Args:
        factory: makes a policy of a budget in slots, e.g. `lambda budget: kvjax.uniform(budget, sinks=16)`.
        spec: what the cache is made for; neither batch nor layer matter.
        limit: bytes per row and layer, all buffers (staging, counters, keys of randomness) included.

    Raises:
        ValueError: when no budget fits, with the reason of the smallest one tried.
    """

    def size(budget: int) -> float:
        policy = factory(budget)
        measure = row_read_bytes if policy.recalls else row_bytes
        sizes = [measure(policy, dataclasses.replace(spec, layer=layer)) for layer in range(spec.layers)]
        return sum(sizes) / spec.layers

    low = smallest = _smallest_budget(factory, spec, limit)
    if size(low) > limit:
        raise ValueError(
            f"limit={limit} bytes per row and layer is too small: budget={low} already takes {size(low):g}"
        )
    high = low
    while size(high := high * 2) <= limit:
        if factory(high).recalls and high >= spec.max_prompt + spec.max_new:
            return factory(high)  # all there is may be read
        if high > limit:
            raise ValueError(f"{factory(low).name} does not grow with its budget: give it slots, not bytes")
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return factory(max(whole_tiles(low), smallest))


TILE = 16


def whole_tiles(slots: int) -> int:
    """The next smaller multiple of `TILE`, where that takes away no more than a fiftieth of so many slots.

    Of other numbers XLA makes stores in a layout that kernels for TPUs do not read, and copies them once per block of
    decoding steps.
    """
    more = slots % TILE
    return slots - more if 50 * more <= slots else slots


def check_tokens(
    store: Float[Array, "B H_kv S D"],
    keys: Float[Array, "B T H_kv D"],
    values: Float[Array, "B T H_kv D"],
    lengths: Int[Array, "B"] | None,
    longest: int | None = None,
) -> None:
    """Raises a ValueError where fresh tokens do not fit a store of keys (which broadcasting would hide), or lengths
    cannot be (outside jit, where they are known)."""
    batch, kv_heads, _, head_dim = store.shape
    for name, fresh in {"keys": keys, "values": values}.items():
        wanted = (batch, keys.shape[1], kv_heads, head_dim)
        if fresh.shape != wanted:
            raise ValueError(f"{name} have shape {fresh.shape}; it must be [B, T, H_kv, D] = {wanted}")
    if lengths is None:
        return
    if lengths.shape != (batch,):
        raise ValueError(f"lengths has shape {lengths.shape}; it must be [B] = {(batch,)}")
    if not isinstance(lengths, jax.core.Tracer):
        longest = keys.shape[1] if longest is None else min(keys.shape[1], longest)
        if bool(jnp.any((lengths < 0) | (lengths > longest))):
            raise ValueError(f"lengths={lengths.tolist()} must lie in [0, {longest}]")


def _smallest_budget(factory: Callable[[int], CachePolicy], spec: CacheSpec, limit: int) -> int:
    """The smallest budget (to a factor of two, then exactly) that the factory accepts."""
    accepted, refused, reason = 1, 0, ""
    while True:
        try:
            abstract_state(factory(accepted), spec)
            break
        except ValueError as error:
            refused, reason = accepted, str(error)
            accepted *= 2
            if accepted > limit:
                raise ValueError(f"no budget within limit={limit} bytes is accepted: {reason}") from error
    while accepted - refused > 1:
        middle = (accepted + refused) // 2
        try:
            abstract_state(factory(middle), spec)
            accepted = middle
        except ValueError:
            refused = middle
    return accepted
