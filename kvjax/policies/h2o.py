"""H2O (Zhang et al. 2023): recent tokens, and of those before them the ones that drew most attention."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax import scored
from kvjax import window as windows
from kvjax.per_head import largest, per_head, replace_lowest
from kvjax.policy import ALL_QUERIES, Policy, check_settings
from kvjax.prompt_attention import attention_received
from kvjax.scored import AttentionScores, init_scores
from kvjax.state import state
from kvjax.window import Window, init_window


@state
class HeavyHitters:
    """Heavy hitters in the window's selected slots, and the attention that every slot's token has drawn."""

    window: Window
    scores: AttentionScores
    position: Int[Array, "B H_kv M"] | None  # int32, of selected tokens; None where attention is not averaged


@dataclasses.dataclass(frozen=True)
class H2O(Policy[HeavyHitters]):
    """Keeps recent tokens and, of those before them, the ones whose attention probabilities, summed over all queries
    that saw them, are largest (heavy hitters).

    Sums start with every query of the prompt and go on while decoding: each token that leaves the recent ones competes
    with the heavy hitters, and the least goes for good. A kv head's sums run over the query heads of its group. With
    `compact_every=1` this is the released code's behaviour token by token.

    Attributes:
        budget: slots per head, recent tokens included; the rest are heavy hitters (the paper's cache size k).
        recent: newest tokens, always kept; half the budget by default, as in the paper.
        average: whether sums are divided by the number of tokens since, the token's own included; with `recent=0` this
            is kvpress's ObservedAttentionPress.
        compact_every: tokens between compactions; until then new tokens are all read.

    Source: H2O, Algorithm 1.
    """

    budget: int
    recent: int | None = None
    average: bool = False
    compact_every: int = 64

    prompt_queries = ALL_QUERIES
    observes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, 0, self.newest, self.compact_every, selects="heavy hitters")

    @property
    def newest(self) -> int:
        """Slots of recent tokens."""
        return self.budget // 2 if self.recent is None else self.recent

    @property
    def heavy(self) -> int:
        """Slots of heavy hitters."""
        return self.budget - self.newest

    def init(self, spec, row_keys) -> HeavyHitters:
        window = init_window(spec, 0, self.newest, self.heavy)
        position = jnp.zeros((spec.batch, spec.kv_heads, self.heavy), jnp.int32) if self.average else None
        return HeavyHitters(window, init_scores(spec, window), position)

    def prefill(self, state: HeavyHitters, prompt) -> HeavyHitters:
        window, tokens = windows.fill(state.window, prompt), prompt.keys.shape[2]
        received = attention_received(self, prompt)
        score = received
        if self.average:
            age = prompt.lengths[:, None] - jnp.arange(tokens)
            score = received / jnp.maximum(age, 1)[:, None]
        room = min(self.heavy, tokens)
        choose = per_head(lambda score, middle: largest(score, middle, room), 0, None)
        chosen = choose(score, windows.middle_mask(window, tokens))
        slot = jnp.broadcast_to(jnp.arange(room), chosen.shape)
        held = slot < self._held(window)[:, None, None]
        place = prompt.lengths[:, None] - self.newest + jnp.arange(self.newest)
        recent = jnp.take_along_axis(received, jnp.maximum(place, 0)[:, None], axis=2)
        drawn = state.scores.window.at[:, :, : self.newest].set(jnp.where(place[:, None] >= 0, recent, 0.0))
        heavy = jnp.where(held, jnp.take_along_axis(received, chosen, axis=2), 0.0)
        drawn = drawn.at[:, :, self.newest : self.newest + room].set(heavy)
        position = state.position
        if position is not None:
            position = position.at[:, :, :room].set(jnp.where(held, chosen, 0))
        window = windows.put_selected(window, slot, prompt.keys, prompt.values, chosen)
        return HeavyHitters(window, dataclasses.replace(state.scores, window=drawn), position)

    def read(self, state: HeavyHitters, newer):
        return windows.shown(state.window, selected=self._held(state.window))

    def observe(self, state: HeavyHitters, seen) -> HeavyHitters:
        return dataclasses.replace(state, scores=scored.summed(state.scores, seen))

    def compact(self, state: HeavyHitters, new) -> HeavyHitters:
        drawn, left_drawn = windows.slide_beside(
            state.window, new, state.scores.window, new.beside(state.scores.staged)
        )
        window, left = windows.slide(state.window, new)
        stored, fresh, position = drawn[:, :, self.newest :], left_drawn, state.position
        if position is not None:
            now = window.total[:, None]
            stored = stored / jnp.maximum(now[..., None] - position, 1)
            fresh = fresh / jnp.maximum(now - left.position, 1)[:, None]
        held = jnp.minimum(left.first, self.heavy)[:, None, None]  # before these tokens came
        stored = jnp.where(jnp.arange(self.heavy) < held, stored, -jnp.inf)
        fresh = jnp.where(left.present[:, None], fresh, -jnp.inf)
        slot, source, _ = per_head(replace_lowest)(stored, fresh)
        if position is not None:
            place = lambda old, slot, source, new: old.at[slot].set(new[source], mode="drop")  # noqa: E731
            position = per_head(place, 0, 0, 0, None)(position, slot, source, left.position)
        drawn = windows.put_beside(window, slot, drawn, left_drawn, source)
        window = windows.put_selected(window, slot, left.keys, left.values, source)
        return HeavyHitters(window, scored.moved_in(state.scores, drawn), position)

    def read_bytes(self, state: HeavyHitters) -> int:
        return 4 * (state.scores.window.size + state.scores.staged.size)

    def _held(self, window: Window) -> Int[Array, "B"]:
        _, _, middle = windows.occupancy(window)
        return jnp.minimum(middle, self.heavy)
