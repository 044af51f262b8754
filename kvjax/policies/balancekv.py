"""BalanceKV (Han et al. 2025), as a stream: a merge-and-reduce tree that halves tokens again and again so that sums
over them change little. The released code is `BalanceKVReference`, Algorithm 1 with its guarantee `BalanceKVPaper`."""

import dataclasses
import functools
from typing import Literal

from jaxtyping import Array, Int, Key

from kvjax.policy import Policy, Prompt, check_above, check_budget
from kvjax.segment import Segment, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import stacked, state, static
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures import merge_reduce
from kvjax.structures.balance import Halve, halve_by_pairs, halve_exactly
from kvjax.structures.merge_reduce import MergeReduceTree, bin_sizes, init_merge_reduce
from kvjax.structures.per_head import per_head, stream_keys

# Tokens up to which prompts are halved in smaller groups, since exact prefill of them takes so little itself: 512 would
# take more than a tenth of its time.
SHORT_PROMPT = 4096


@state
class BalanceKVState:
    window: Window
    tree: MergeReduceTree = stacked("B", "H_kv")
    block: int = static()  # tokens of a prompt halved together


@dataclasses.dataclass(frozen=True)
class BalanceKV(Policy[BalanceKVState]):
    """Keeps sinks, recent tokens and, of the others, a merge-and-reduce tree that is as full as its slots allow. The
    weights sum to the tokens they stand for. Heuristic: the paper's bound is that of `BalanceKVPaper`.

    With "pairs" the error at equal bytes is a quarter to a half of uniform sampling's where keys have norms up to 4; at
    norms near 15, where one token or one cluster takes all attention, the two are alike.

    Attributes:
        budget: slots per head, sinks and recent tokens included. A slot is a key and a value.
        sinks, recent: tokens always kept. The papers' code keeps 32 + 32, or 256 + 256 in its single-layer study.
        walk: "pairs" (ours, the default): halved by pairs of nearest neighbours. "streaming": the released code's walk
            and exact halving, weights corrected to the number of tokens.
        block_size: tokens of a prompt halved together. Larger is better and slower: 512 by default, 256 for prompts of
            up to `SHORT_PROMPT` tokens.
        bins: into how many bins the slots are divided, two of which are halved together as tokens come (each is half of
            the paper's batch t); by default `FEWEST_BINS` or a few more.
        gamma, temperature: of the walk (the released code's gamma and temp); see `halve_by_pairs` and `halve_exactly`.
        compact_every: tokens between compactions; until then new tokens are all read.

    Reference:
        BalanceKV, Algorithm 4 (MergeAndReduce), and the released code.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    walk: Literal["pairs", "streaming"] = "pairs"
    block_size: int | None = None
    bins: int | None = None
    gamma: float = 4.0
    temperature: float = 0.1
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="a choice of tokens")
        check_above(0, gamma=self.gamma, temperature=self.temperature)
        if self.block_size is not None and self.block_size < 2:
            raise ValueError(f"block_size={self.block_size}; it must be at least 2 tokens")

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> BalanceKVState:
        fixed = self.sinks + self.recent
        tokens = max(spec.capacity - fixed, 1)
        bins, size = bin_sizes(self.budget - fixed, tokens, self.bins)
        make = functools.partial(
            init_merge_reduce,
            bins=bins,
            bin_slots=size,
            key_dim=spec.head_dim,
            value_dim=spec.value_width,
            tokens=tokens,
            dtype=spec.dtype,
        )
        tree = per_head(make, 0)(stream_keys(row_keys, spec.kv_heads))
        block = self.block_size or (256 if spec.max_prompt_tokens <= SHORT_PROMPT else 512)
        return BalanceKVState(init_window(spec, self.sinks, self.recent), tree, block)

    def prefill(self, state: BalanceKVState, prompt: Prompt) -> BalanceKVState:
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)
        together = max(1, 8 // (prompt.keys.shape[0] * prompt.keys.shape[1]))
        fill = functools.partial(merge_reduce.fill, halve=self._halve, block=state.block, together=together)
        keys, values = (windows.after_sinks(x, self.sinks) for x in (prompt.keys, prompt.values))
        tree = per_head(fill, 0, 0, 0, None)(state.tree, keys, values, middle)
        return dataclasses.replace(state, window=window, tree=tree)

    def segments(self, state: BalanceKVState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        tree = state.tree
        segment = Segment(tree.keys, tree.values, log_num=tree.log_weight)
        return (*windows.window_segments(state.window), segment)

    def compact(self, state: BalanceKVState, new: Tokens) -> BalanceKVState:
        window, left = windows.slide(state.window, new)
        insert = per_head(functools.partial(merge_reduce.insert, halve=self._halve), 0, 0, 0, None)
        tree = insert(state.tree, left.keys, left.values, left.present)
        return dataclasses.replace(state, window=window, tree=tree)

    @property
    def _halve(self) -> Halve:
        function = halve_by_pairs if self.walk == "pairs" else halve_exactly
        return functools.partial(function, gamma=self.gamma, temperature=self.temperature)
