"""BalanceKV (Kochetkova et al. 2025), Algorithm 1, with its error bound. `BalanceKV` is the practical system.

The stream of tokens is compressed as it arrives, separately for the two sums of attention. Per KV head:

1. Numerator (`value_buckets`): a token goes to the bucket of its value norm, one per power of two. Norms within a
   bucket differ by at most a factor of two, which the bound needs.
2. Every bucket is a merge-and-reduce tree (`merge_reduce`). Tokens fill bins, the leaves of a binary tree. When two
   sibling bins are full, they are halved together into one bin of the next level, whose tokens have twice the weight.
   Memory grows with the logarithm of the stream.
3. A halving (`balance.softmax_balance`) gives every token a sign by a self-balancing walk and keeps the tokens of the
   rarer sign.
4. Denominator: one more tree, of keys alone.

Attention merges the segments of the window, of the numerator's trees and of the denominator's tree.
"""

import bisect
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.balancekv import merge_reduce, value_buckets
from kvjax.methods.balancekv.balance import Halve, Halved, softmax_balance, walk_constant
from kvjax.methods.balancekv.merge_reduce import MergeReduceTree, bin_sizes, init_merge_reduce, min_tree_slots
from kvjax.methods.balancekv.value_buckets import ValueBuckets, init_value_buckets
from kvjax.policy import Policy, Prompt, check_above, check_budget, check_min
from kvjax.segment import Segment, SegmentLike, flatten_slots
from kvjax.shared import window as windows
from kvjax.shared.light_values import init_light_norms, keep_lightest, num_light_slots
from kvjax.shared.per_head import per_head, stream_keys
from kvjax.shared.window import Window, init_window
from kvjax.spec import MAX_TOKENS, CacheSpec
from kvjax.staging import Tokens
from kvjax.state import stacked, state, static


@state
class BalanceKVTheoryState:
    """The window, whose selected slots hold light tokens, and trees for both sums per row and KV head."""

    window: Window
    light_norms: Float[Array, "B H_kv M"]  # float32, inf in empty slots
    numerator: ValueBuckets = stacked("B", "H_kv")
    denominator: MergeReduceTree = stacked("B", "H_kv")
    tokens: int = static()  # maximum length of the stream


@dataclasses.dataclass(frozen=True)
class BalanceKVTheory(Policy[BalanceKVTheoryState]):
    """Keeps sinks, recent tokens, and two weighted selections of the tokens between them.

    The numerator of attention has a merge-and-reduce tree per power of two of the value norms, the denominator one
    tree of keys. `light_values=0, self_normalization=0, sinks=0, recent=0, compact_every=1` is exactly Algorithm 1,
    except for the open buckets and for a walk that clips a probability where the paper's fails. The paper's bound holds
    for this form alone, and is vacuous at the key norms of real models (`kvjax.theory.balancekv_settings`).

    As in `SubGen`, the tokens with the smallest values are kept exactly, and the denominator is a times the sum of the
    weights of the numerator's entries plus 1 - a times the sum over its own tree, for a = `self_normalization`. An
    output is then at most max |v| / a. Halving loses weight, more in some trees than in others; the share of the
    numerator's entries loses as much in both sums.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included. A slot is a key and a value; an entry of the
            denominator's tree is a key alone, half a slot.
        sinks: first tokens that are always kept (kvjax's addition; Algorithm 1 has none).
        recent: newest tokens that are always kept (kvjax's addition; Algorithm 1 has none).
        light_values: tokens with the smallest |v| per head that are kept exactly; at most a quarter of the slots that
            sinks and recent tokens leave (kvjax's addition; 0 for none, as in Algorithm 1).
        self_normalization: weight a of the numerator's entries in the denominator, at least 0 and below 1 (kvjax's
            addition; 0 for none, as in Algorithm 1).
        bins: number of bins of each tree (batch t of Algorithm 4 is two bins). None for the smallest number that the
            length of the stream allows.
        epsilon: erases value buckets that are negligible at this error (Algorithm 1); needs `key_norm`.
        delta: probability of failure (Algorithm 2), if `c` is None.
        c: the walk's constant; None for 30 log(n / delta), as in Algorithm 2.
        key_norm: bound r on the norms of keys (Algorithm 1); None for the largest norm of each block.
        value_exponents: first and last i of the buckets 2^(i - 1) < |v| <= 2^i of Algorithm 1. The first bucket also
            has all smaller norms; the last one all larger norms, with the largest norm of each block as its bound. The
            paper has a bucket for every i; a limited number is kvjax's.
        compact_every: tokens between compactions; until then all new tokens are read (kvjax's staging).

    Reference:
        BalanceKV, Algorithms 1, 2 and 4, Theorems 3.2 and 3.3.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    light_values: int = 32
    self_normalization: float = 0.75
    bins: int | None = None
    epsilon: float | None = None
    delta: float = 0.1
    c: float | None = None
    key_norm: float | None = None
    value_exponents: tuple[int, int] = (-1, 2)
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="selected tokens")
        check_min(0, light_values=self.light_values)
        check_min(1, bins=self.bins)
        if not 0 <= self.self_normalization < 1:
            raise ValueError(f"self_normalization={self.self_normalization} must be at least 0 and below 1")
        check_above(0, epsilon=self.epsilon, delta=self.delta, c=self.c, key_norm=self.key_norm)
        if self.epsilon is not None and self.key_norm is None:
            raise ValueError(f"epsilon={self.epsilon} needs a bound on the norms of keys; pass key_norm")
        if self.value_exponents[1] < self.value_exponents[0]:
            raise ValueError(f"value_exponents={self.value_exponents} must be (first, last) with first <= last")

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the smallest budget whose trees hold the tokens of a cache."""
        smallest = super().min_budget()
        if spec is None:
            return smallest

        def fits(budget: int) -> bool:
            _, tokens, slots = self._divide(budget, spec)
            return slots >= min_tree_slots(tokens, self.bins)

        return bisect.bisect_left(range(MAX_TOKENS), True, lo=smallest, key=fits)

    def _divide(self, budget: int, spec: CacheSpec) -> tuple[int, int, float]:
        """Returns the slots of light tokens, the maximum length of the stream and the slots of each tree."""
        light = num_light_slots(self.light_values, budget - self.sinks - self.recent)
        fixed = self.sinks + self.recent + light
        lowest, highest = self.value_exponents
        # A tree of keys alone, for the denominator, takes half a slot per entry.
        return light, max(spec.capacity - fixed, 1), (budget - fixed) / (highest - lowest + 1.5)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> BalanceKVTheoryState:
        """Returns an empty window and empty trees for `spec`."""
        light, tokens, slots = self._divide(self.budget, spec)
        lowest, highest = self.value_exponents
        buckets = highest - lowest + 1
        bins, size = bin_sizes(slots, tokens, self.bins)
        init_tree = functools.partial(
            init_merge_reduce, bins=bins, bin_slots=size, key_dim=spec.head_dim, dtype=spec.dtype
        )
        init_value_tree = functools.partial(init_tree, value_dim=spec.value_width)

        def init_head(rng: Key[Array, ""]) -> tuple[ValueBuckets, MergeReduceTree]:
            """Returns one head's empty trees of numerator and denominator, which draw from `rng`."""
            numerator_key, denominator_key = jax.random.split(rng)
            numerator = init_value_buckets(numerator_key, lowest=lowest, buckets=buckets, init_tree=init_value_tree)
            return numerator, init_tree(denominator_key, value_dim=None)

        numerator, denominator = per_head(init_head)(stream_keys(row_keys, spec.kv_heads))
        window = init_window(spec, self.sinks, self.recent, light)
        return BalanceKVTheoryState(window, init_light_norms(spec, light), numerator, denominator, tokens)

    def prefill(self, state: BalanceKVTheoryState, prompt: Prompt) -> BalanceKVTheoryState:
        """Fills the window and inserts the prompt's other tokens, except light ones, into the trees."""
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)
        keys, values = (windows.after_sinks(x, self.sinks) for x in (prompt.keys, prompt.values))
        present = jnp.arange(keys.shape[2]) < middle[:, None]
        return self._insert(state, window, keys, values, present)

    def segments(self, state: BalanceKVTheoryState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the trees (numerator, denominator) of a state."""
        trees, denominator = state.numerator.trees, state.denominator
        weights = trees.log_weight.reshape(*trees.log_weight.shape[:2], -1)
        share = self.self_normalization
        shared = weights + (math.log(share) if share else -jnp.inf)
        _, _, middle = windows.occupancy(state.window)
        assert trees.values is not None
        return (
            *windows.window_segments(state.window, jnp.minimum(middle, state.window.selected)),
            Segment(flatten_slots(trees.keys), flatten_slots(trees.values), log_num=weights, log_den=shared),
            Segment(denominator.keys, None, log_den=denominator.log_weight + math.log1p(-share)),
        )

    def compact(self, state: BalanceKVTheoryState, new: Tokens) -> BalanceKVTheoryState:
        """Slides the window over new tokens and inserts tokens that leave it, except light ones, into the trees."""
        window, left = windows.slide(state.window, new)
        return self._insert(state, window, left.keys, left.values, left.present)

    def _insert(
        self,
        state: BalanceKVTheoryState,
        window: Window,
        keys: Float[Array, "B H T D"],
        values: Float[Array, "B H T D_v"],
        present: Bool[Array, "B T"],
    ) -> BalanceKVTheoryState:
        """Inserts the present tokens into the slots of light tokens in the window or into the trees."""
        window, norms, *others = keep_lightest(window, state.light_norms, keys, values, present)
        halve = functools.partial(self._halve, state.tokens)
        negligible = self._negligible(state.tokens, keys.shape[-1])

        def insert_head(
            numerator: ValueBuckets, denominator: MergeReduceTree, keys: Array, values: Array, present: Array
        ) -> tuple[ValueBuckets, MergeReduceTree]:
            return (
                value_buckets.insert(numerator, keys, values, present, halve=halve, negligible=negligible),
                merge_reduce.insert(denominator, keys, None, present, halve=halve(1.0)),
            )

        def insert_row(row: tuple[Any, ...]) -> tuple[ValueBuckets, MergeReduceTree]:
            return jax.vmap(insert_head)(*row)

        # Row by row, because the rounding of a batch of products could flip the walk's signs (see `map_rows`).
        numerator, denominator = jax.lax.map(insert_row, (state.numerator, state.denominator, *others))
        return BalanceKVTheoryState(window, norms, numerator, denominator, state.tokens)

    def _halve(self, tokens: int, value_norm: Float[Array, ""] | float) -> Halve:
        """Returns Algorithm 2 for values up to this norm; inf for the largest norm of each block."""
        c = walk_constant(tokens, self.delta) if self.c is None else self.c

        def halve(
            rng: Key[Array, ""],
            keys: Float[Array, "t D"],
            values: Float[Array, "t D_v"] | None,
            weights: Float[Array, "t"],
        ) -> Halved:
            """Halves tokens by `softmax_balance`, drawing from `rng`; tokens whose `weights` are 0 do not count."""

            def largest(x: Float[Array, "t F"]) -> Float[Array, ""]:
                return jnp.max(jnp.where(weights > 0, jnp.linalg.norm(x.astype(jnp.float32), axis=1), 0.0))

            key_norm = largest(keys) if self.key_norm is None else self.key_norm
            bound = value_norm
            if values is not None:
                bound = jnp.where(jnp.isinf(bound), jnp.maximum(largest(values), 1e-30), bound)
            return softmax_balance(rng, keys, values, weights, c=c, key_norm=key_norm, value_norm=bound)

        return halve

    def _negligible(self, tokens: int, head_dim: int) -> float:
        """Returns the fraction of the largest value norm up to which a bucket is erased."""
        if self.epsilon is None or self.key_norm is None:
            return 0.0
        return self.epsilon / (2 * tokens) * math.exp(-(self.key_norm**2) / math.sqrt(head_dim))
