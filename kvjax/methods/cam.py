"""CaM (Zhang et al. 2024): values of evicted tokens are merged into the values of later tokens.

The cache holds sinks and a sliding window, as in StreamingLLM. A token that leaves the window is not lost entirely:

1. Its attention probability A, from the newest query, is compared with the mean probability of the window's tokens.
2. With probability min(1, A / mean) it is merged: 1 / `merged` of its value is added to the values of each of the next
   `merged` tokens. Its key is dropped, and the keys of those tokens do not change.
3. Otherwise it is dropped.

If A is at most the mean, the draw keeps the expected sum of attention times value.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from kvjax.attention import AttentionStats
from kvjax.policy import Policy, Prompt, Requirements, check_budget, check_min
from kvjax.segment import SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.attention_scores import AttentionScores, after_compaction, init_attention_scores, newest_scores
from kvjax.shared.per_head import draws_by_position
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state


@state
class CaMState:
    """The window, and the attention of the newest query."""

    window: Window
    scores: AttentionScores
    row_keys: Key[Array, "B"]


@dataclasses.dataclass(frozen=True)
class CaM(Policy[CaMState]):
    """Keeps sinks and a sliding window; the value of a token that leaves may be added to the next tokens' values.

    The value is added as V / merged to the values of the next `merged` tokens, with probability min(1, A / mean). A is
    the attention probability that the newest query gives the token, and mean is the mean probability of the window's
    other tokens, both summed over the query heads of a group. If A is at most the mean, the expected sum of attention
    times value does not change. Keys do not change.

    With `compact_every=1` a token leaves at every step, as in the paper. With larger values, tokens that leave together
    are weighed by the newest query and merged into the first `merged` tokens that stay (as kvpress's CAMPress does). An
    exact prefill does not merge, as in the released code.

    The released code for Llama merges one step later. Its variants for OPT and GPT-NeoX merge where A exceeds the mean
    and count sinks into the mean. kvpress sums attention over steps and takes the mean over the `merged` tokens.

    Attributes:
        budget: slots per KV head, sinks included.
        sinks: first tokens that are never dropped.
        merged: tokens over which a value is spread (the paper's m, 32).
        compact_every: tokens between compactions.

    Reference:
        CaM, section 4; `local_cam_mask` of the released code.
    """

    budget: int
    sinks: int = 4
    merged: int = 32
    compact_every: int = 64

    requires = Requirements(attention_stats=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, 1, self.compact_every)
        check_min(1, merged=self.merged)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> CaMState:
        """Returns an empty window for `spec`."""
        window = init_window(spec, self.sinks, self.budget - self.sinks)
        return CaMState(window, init_attention_scores(spec, window), row_keys)

    def prefill(self, state: CaMState, prompt: Prompt) -> CaMState:
        """Keeps the first and the last tokens."""
        return dataclasses.replace(state, window=windows.fill(state.window, prompt))

    def segments(self, state: CaMState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window."""
        return windows.window_segments(state.window)

    def observe(self, state: CaMState, stats: AttentionStats) -> CaMState:
        """Remembers the attention of the newest query."""
        return dataclasses.replace(state, scores=newest_scores(state.scores, stats))

    def compact(self, state: CaMState, new: Tokens) -> CaMState:
        """Slides the window over new tokens and merges values of tokens that leave it."""
        staged_scores = new.gather_staged(state.scores.staged)
        scores, left_scores = windows.slide_aligned(state.window, new, state.scores.window, staged_scores)
        window, left = windows.slide(state.window, new)
        # The window is full where tokens leave it.
        mean = jnp.mean(scores[:, :, : window.recent], axis=2, keepdims=True)
        draws = draws_by_position(state.row_keys, left.position, left.keys.shape[1])
        # Not A / mean, which may be 0 / 0; draws are below 1.
        merges = (draws * mean < left_scores) & left.present[:, None]
        portions = jnp.where(merges[..., None], left.values.astype(jnp.float32) / self.merged, 0.0)
        targets = window.values[:, :, : min(self.merged, window.recent)]
        merged = targets.astype(jnp.float32) + jnp.sum(portions, axis=2, keepdims=True)
        values = window.values.at[:, :, : targets.shape[2]].set(merged.astype(targets.dtype))
        window = dataclasses.replace(window, values=values)
        return CaMState(window, after_compaction(state.scores, scores), state.row_keys)
