"""H2O (Zhang et al. 2023): recent tokens, and earlier tokens with the highest accumulated attention.

Per KV head, half of the slots (by default) hold the newest tokens, the other half the heavy hitters: earlier tokens to
which queries have attended most so far.

1. While the prompt is read, the attention probabilities that each token receives are summed over all queries that see
   it and over the query heads of the group.
2. After the prompt, the last tokens are kept, and of the others those with the largest sums. The rest is dropped.
3. At every decode step, the probabilities of the new query are added to the sums of the tokens in the cache
   (`observe`, from the statistics that attention returns).
4. When a token leaves the recent window, it competes with the heavy hitters: the one with the smallest sum is evicted
   (`compact`; the paper does so at every step, `compact_every=1`).

Sums favor old tokens, which more queries have seen; `average=True` divides by the number of these queries. A dropped
token never comes back, so that a token which only a later question needs is lost unless it received attention before.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.attention import AttentionStats
from kvjax.policy import Policy, Prompt, Requirements, check_budget
from kvjax.prompt_attention import attention_received
from kvjax.segment import SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.attention_scores import AttentionScores, accumulate_scores, after_compaction, init_attention_scores
from kvjax.shared.per_head import per_head, replace_lowest, top_indices
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state


@state
class H2OState:
    """Heavy hitters in the window's selected slots, and the accumulated attention of every slot."""

    window: Window
    scores: AttentionScores
    position: Int[Array, "B H_kv M"] | None  # int32, of selected tokens; None if attention is not averaged


@dataclasses.dataclass(frozen=True)
class H2O(Policy[H2OState]):
    """Keeps recent tokens and, of earlier ones, those with the highest attention summed over all queries so far.

    Sums start with every query of the prompt and continue while decoding. A token that leaves the recent window
    competes with the heavy hitters; the one with the lowest sum is evicted. Sums run over the query heads of a group.
    With `compact_every=1` this is the released code, token by token.

    Attributes:
        budget: slots per KV head, recent tokens included; the other slots hold heavy hitters (the paper's k).
        recent: newest tokens that are always kept; None for half the budget, as in the paper.
        average: whether sums are divided by the number of queries that could see the token. With `recent=0` this is
            kvpress's ObservedAttentionPress.
        compact_every: tokens between compactions; until then all new tokens are read.

    Reference:
        H2O, Algorithm 1 (https://arxiv.org/abs/2306.14048).
    """

    budget: int
    recent: int | None = None
    average: bool = False
    compact_every: int = 64

    requires = Requirements(prompt_queries="all", attention_stats=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, 0, self.num_recent, self.compact_every, remainder_for="heavy hitters")

    @property
    def num_recent(self) -> int:
        """Slots of recent tokens."""
        return self.budget // 2 if self.recent is None else self.recent

    @property
    def num_heavy(self) -> int:
        """Slots of heavy hitters."""
        return self.budget - self.num_recent

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> H2OState:
        """Returns an empty window for `spec`."""
        window = init_window(spec, 0, self.num_recent, self.num_heavy)
        position = jnp.zeros((spec.batch, spec.kv_heads, self.num_heavy), jnp.int32) if self.average else None
        return H2OState(window, init_attention_scores(spec, window), position)

    def prefill(self, state: H2OState, prompt: Prompt) -> H2OState:
        """Keeps the last tokens and the heavy hitters of the prompt's own attention."""
        window, tokens = windows.fill(state.window, prompt), prompt.keys.shape[2]
        received = attention_received(self, prompt)
        score = received
        if self.average:
            age = prompt.lengths[:, None] - jnp.arange(tokens)
            score = received / jnp.maximum(age, 1)[:, None]
        count, recent = min(self.num_heavy, tokens), self.num_recent

        def choose(score: Float[Array, "T"], middle: Array) -> Int[Array, "n"]:
            return top_indices(score, middle, count)

        chosen = per_head(choose, 0, None)(score, windows.middle_mask(window, tokens))
        slot = jnp.broadcast_to(jnp.arange(count), chosen.shape)
        occupied = slot < self._num_selected(window)[:, None, None]
        position = prompt.lengths[:, None] - recent + jnp.arange(recent)
        recent_scores = jnp.take_along_axis(received, jnp.maximum(position, 0)[:, None], axis=2)
        scores = state.scores.window.at[:, :, :recent].set(jnp.where(position[:, None] >= 0, recent_scores, 0.0))
        heavy_scores = jnp.where(occupied, jnp.take_along_axis(received, chosen, axis=2), 0.0)
        scores = scores.at[:, :, recent : recent + count].set(heavy_scores)
        positions = state.position
        if positions is not None:
            positions = positions.at[:, :, :count].set(jnp.where(occupied, chosen, 0))
        target = jnp.where(occupied, slot, window.selected)
        window = windows.write_selected(window, target, prompt.keys, prompt.values, chosen)
        return H2OState(window, dataclasses.replace(state.scores, window=scores), positions)

    def segments(self, state: H2OState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window."""
        return windows.window_segments(state.window, selected=self._num_selected(state.window))

    def observe(self, state: H2OState, stats: AttentionStats) -> H2OState:
        """Accumulates attention."""
        return dataclasses.replace(state, scores=accumulate_scores(state.scores, stats))

    def compact(self, state: H2OState, new: Tokens) -> H2OState:
        """Slides the window over new tokens; tokens that leave it compete with the heavy hitters."""
        staged_scores = new.gather_staged(state.scores.staged)
        scores, left_scores = windows.slide_aligned(state.window, new, state.scores.window, staged_scores)
        window, left = windows.slide(state.window, new)
        # Scores moved with their tokens; only tokens that left the window compete for the slots of heavy hitters.
        stored, arriving, position = scores[:, :, self.num_recent :], left_scores, state.position
        if position is not None:
            now = window.total[:, None]
            stored = stored / jnp.maximum(now[..., None] - position, 1)
            arriving = arriving / jnp.maximum(now - left.position, 1)[:, None]
        occupied = jnp.minimum(left.first, self.num_heavy)[:, None, None]  # before these tokens
        stored = jnp.where(jnp.arange(self.num_heavy) < occupied, stored, -jnp.inf)
        arriving = jnp.where(left.present[:, None], arriving, -jnp.inf)
        slot, source, _ = per_head(replace_lowest)(stored, arriving)
        if position is not None:

            def put(old: Array, slot: Array, source: Array, new: Array) -> Array:
                return old.at[slot].set(new[source], mode="drop")

            position = per_head(put, 0, 0, 0, None)(position, slot, source, left.position)
        scores = windows.put_aligned(window, slot, scores, left_scores, source)
        window = windows.write_selected(window, slot, left.keys, left.values, source)
        return H2OState(window, after_compaction(state.scores, scores), position)

    def _num_selected(self, window: Window) -> Int[Array, "B"]:
        """Returns the occupied slots of heavy hitters."""
        _, _, middle = windows.occupancy(window)
        return jnp.minimum(middle, self.num_heavy)
