"""BalanceKV (Han et al. 2025), Algorithm 1 with its guarantee: merge-and-reduce trees for the numerator by value norm,
and one for the denominator."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_above, check_budget
from kvjax.segment import Segment, SegmentLike, flatten_slots
from kvjax.spec import CacheSpec
from kvjax.state import stacked, state, static
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures import merge_reduce, value_buckets
from kvjax.structures.balance import Halve, softmax_balance, walk_constant
from kvjax.structures.merge_reduce import MergeReduceTree, bin_sizes, init_merge_reduce
from kvjax.structures.per_head import per_head, stream_keys
from kvjax.structures.value_buckets import ValueBuckets, init_value_buckets


@state
class BalanceKVPaperState:
    window: Window
    numerator: ValueBuckets = stacked("B", "H_kv")
    denominator: MergeReduceTree = stacked("B", "H_kv")
    tokens: int = static()  # most that will ever come


@dataclasses.dataclass(frozen=True)
class BalanceKVPaper(Policy[BalanceKVPaperState]):
    """Keeps sinks, recent tokens and, of the others, a balanced choice for each of attention's two sums. The only form
    of BalanceKV with the paper's bound; at norms of real keys that is vacuous (`kvjax.theory.balancekv_settings`).

    Attributes:
        budget: slots per head, sinks and recent tokens included. A slot is a key and a value; an entry of the
            denominator's tree is a key alone, half a slot.
        sinks, recent: tokens always kept.
        bins: into how many bins a tree's slots are divided (each is half of the paper's batch t); by default as few as
            the length of the stream allows.
        epsilon: erases value buckets that are negligible at this error (needs `key_norm`).
        delta, c: chance of failure, and the walk's constant 30 log(n / delta) where c is None.
        key_norm: the bound r on the keys' norms; by default the largest of each block.
        value_exponents: first and last i of the buckets 2^(i - 1) <= |v| <= 2^i. A value of another norm is a fault.
            Values that are stored in few bits change their norms: leave a bucket on either side then.
        compact_every: tokens between compactions; until then new tokens are all read.

    Reference:
        BalanceKV, Algorithms 1, 2 and 4, Theorems 3.2 and 3.3.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    bins: int | None = None
    epsilon: float | None = None
    delta: float = 0.1
    c: float | None = None
    key_norm: float | None = None
    value_exponents: tuple[int, int] = (-1, 2)
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="a choice of tokens")
        check_above(0, epsilon=self.epsilon, delta=self.delta, c=self.c, key_norm=self.key_norm)
        if self.epsilon is not None and self.key_norm is None:
            raise ValueError(f"epsilon={self.epsilon} needs key_norm, the bound on the keys' norms")
        if self.value_exponents[1] < self.value_exponents[0]:
            raise ValueError(f"value_exponents={self.value_exponents}; the last must not lie below the first")

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> BalanceKVPaperState:
        tokens = max(spec.capacity - self.sinks - self.recent, 1)
        lowest, buckets = self.value_exponents[0], self.value_exponents[1] - self.value_exponents[0] + 1
        slots = self.budget - self.sinks - self.recent
        bins, size = bin_sizes(slots / (buckets + 0.5), tokens, self.bins, fewest=1)
        make = functools.partial(
            init_merge_reduce,
            bins=bins,
            bin_slots=size,
            key_dim=spec.head_dim,
            tokens=tokens,
            dtype=spec.dtype,
            eager=True,
            conserves_mass=False,
        )
        of_values = functools.partial(make, value_dim=spec.value_width)
        keys = stream_keys(row_keys, spec.kv_heads)

        def of_head(key):
            of_numerator, of_denominator = jax.random.split(key)
            numerator = init_value_buckets(of_numerator, lowest=lowest, buckets=buckets, tree=of_values)
            return numerator, make(of_denominator, value_dim=None)

        numerator, denominator = per_head(of_head)(keys)
        return BalanceKVPaperState(init_window(spec, self.sinks, self.recent), numerator, denominator, tokens)

    def prefill(self, state: BalanceKVPaperState, prompt: Prompt) -> BalanceKVPaperState:
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)
        keys, values = (windows.after_sinks(x, self.sinks) for x in (prompt.keys, prompt.values))
        there = jnp.arange(keys.shape[2]) < middle[:, None]
        return self._take(dataclasses.replace(state, window=window), keys, values, there)

    def segments(self, state: BalanceKVPaperState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        trees, denominator = state.numerator.trees, state.denominator
        weights = trees.log_weight.reshape(*trees.log_weight.shape[:2], -1)
        numerator_only = jnp.full_like(weights, -jnp.inf)
        return (
            *windows.window_segments(state.window),
            Segment(flatten_slots(trees.keys), flatten_slots(trees.values), log_num=weights, log_den=numerator_only),
            Segment(denominator.keys, None, log_den=denominator.log_weight),
        )

    def compact(self, state: BalanceKVPaperState, new: Tokens) -> BalanceKVPaperState:
        window, left = windows.slide(state.window, new)
        return self._take(dataclasses.replace(state, window=window), left.keys, left.values, left.present)

    def _take(self, state: BalanceKVPaperState, keys, values, present) -> BalanceKVPaperState:
        """Streams [B, H_kv, T, D] through the trees; `present` [B, T]."""
        halve = functools.partial(self._halve, state.tokens)
        negligible = self._negligible(state.tokens, keys.shape[-1])

        def of_head(numerator, denominator, keys, values, present):
            return (
                value_buckets.insert(numerator, keys, values, present, halve=halve, negligible=negligible),
                merge_reduce.insert(denominator, keys, None, present, halve=halve(1.0)),
            )

        numerator, denominator = per_head(of_head, 0, 0, 0, 0, None)(
            state.numerator, state.denominator, keys, values, present
        )
        return dataclasses.replace(state, numerator=numerator, denominator=denominator)

    def _halve(self, tokens: int, value_norm: Float[Array, ""] | float) -> Halve:
        c = walk_constant(tokens, self.delta) if self.c is None else self.c

        def halve(rng, keys, values, weights):
            norms = jnp.where(weights > 0, jnp.linalg.norm(keys.astype(jnp.float32), axis=1), 0.0)
            norm = jnp.max(norms) if self.key_norm is None else self.key_norm
            return softmax_balance(rng, keys, values, weights, c=c, key_norm=norm, value_norm=value_norm)

        return halve

    def _negligible(self, tokens: int, head_dim: int) -> float:
        """The share of the largest value norm up to which a bucket is erased."""
        if self.epsilon is None or self.key_norm is None:
            return 0.0
        return self.epsilon / (2 * tokens) * math.exp(-(self.key_norm**2) / math.sqrt(head_dim))
