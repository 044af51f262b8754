"""BalanceKV (Han et al. 2025) for streams: tokens between sinks and recent window are halved repeatedly.

`BalanceKVReference` is the released code. `BalanceKVPaper` is Algorithm 1 with its error bound.
"""

import dataclasses
import functools
from typing import Literal

from jaxtyping import Array, Int, Key

from kvjax.policy import Policy, Prompt, check_above, check_budget, check_min
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

# Up to this length, groups of 512 tokens would add more than a tenth to the time of prefill.
SHORT_PROMPT = 4096


@state
class BalanceKVState:
    """The window, and one merge-and-reduce tree per row and KV head."""

    window: Window
    tree: MergeReduceTree = stacked("B", "H_kv")
    block: int = static()  # tokens of a prompt that are halved together


@dataclasses.dataclass(frozen=True)
class BalanceKV(Policy[BalanceKVState]):
    """Keeps sinks, recent tokens, and a weighted selection of the tokens between them in a merge-and-reduce tree.

    When the tree is full, two groups of tokens are halved so that attention changes little; weights sum to the number
    of tokens. No error bound is proved (see `BalanceKVPaper`).

    Attributes:
        budget: slots per KV head, sinks and recent tokens included. A slot is a key and a value.
        sinks: first tokens that are always kept. The released code uses 32, or 256 in its single-layer study.
        recent: newest tokens that are always kept. The released code uses the same numbers as for sinks.
        walk: "pairs" for halving by pairs of nearest neighbors, which is kvjax's variant. "streaming" for the released
            code's walk and exact halving, with weights corrected to the number of tokens.
        block_size: tokens of a prompt that are halved together. None for 256 for prompts of up to `SHORT_PROMPT` tokens
            and 512 for longer ones. Larger blocks are slower and more accurate.
        bins: number of bins of the tree, two of which are halved together (the paper's batch t is two bins). None for
            `kvjax.structures.merge_reduce.MIN_BINS` or slightly more.
        gamma: strength of the walk (`gamma` of the released code).
        temperature: factor of the kernel's exponent (`temp` of the released code).
        compact_every: tokens between compactions; until then all new tokens are read.

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
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="selected tokens")
        check_above(0, gamma=self.gamma, temperature=self.temperature)
        check_min(2, block_size=self.block_size)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> BalanceKVState:
        """Returns an empty window and empty trees for `spec`."""
        fixed = self.sinks + self.recent
        tokens = max(spec.capacity - fixed, 1)
        bins, size = bin_sizes(self.budget - fixed, tokens, self.bins)
        init_tree = functools.partial(
            init_merge_reduce,
            bins=bins,
            bin_slots=size,
            key_dim=spec.head_dim,
            value_dim=spec.value_width,
            tokens=tokens,
            dtype=spec.dtype,
        )
        tree = per_head(init_tree)(stream_keys(row_keys, spec.kv_heads))
        block = self.block_size or (256 if spec.max_prompt_tokens <= SHORT_PROMPT else 512)
        return BalanceKVState(init_window(spec, self.sinks, self.recent), tree, block)

    def prefill(self, state: BalanceKVState, prompt: Prompt) -> BalanceKVState:
        """Fills the window and halves the prompt's tokens between sinks and recent ones, level by level."""
        window = windows.fill(state.window, prompt)
        _, _, middle = windows.occupancy(window)
        max_parallel = max(1, 8 // (prompt.keys.shape[0] * prompt.keys.shape[1]))
        fill = functools.partial(merge_reduce.fill, halve=self._halve, block=state.block, max_parallel=max_parallel)
        keys, values = (windows.after_sinks(x, self.sinks) for x in (prompt.keys, prompt.values))
        tree = per_head(fill, 0, 0, 0, None)(state.tree, keys, values, middle)
        return dataclasses.replace(state, window=window, tree=tree)

    def segments(self, state: BalanceKVState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window and the tree of a state."""
        tree = state.tree
        segment = Segment(tree.keys, tree.values, log_num=tree.log_weight)
        return (*windows.window_segments(state.window), segment)

    def compact(self, state: BalanceKVState, new: Tokens) -> BalanceKVState:
        """Slides the window over new tokens and inserts tokens that leave it into the tree."""
        window, left = windows.slide(state.window, new)
        insert = per_head(functools.partial(merge_reduce.insert, halve=self._halve), 0, 0, 0, None)
        tree = insert(state.tree, left.keys, left.values, left.present)
        return dataclasses.replace(state, window=window, tree=tree)

    @property
    def _halve(self) -> Halve:
        function = halve_by_pairs if self.walk == "pairs" else halve_exactly
        return functools.partial(function, gamma=self.gamma, temperature=self.temperature)
