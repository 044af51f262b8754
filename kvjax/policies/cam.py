"""CaM, cache merging (Zhang et al. 2024): what leaves a sliding window may live on in the values of the next tokens."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Key

from kvjax import scored
from kvjax import window as windows
from kvjax.per_head import draws_by_position
from kvjax.policy import Policy, check_least, check_settings
from kvjax.scored import AttentionScores, init_scores
from kvjax.state import state
from kvjax.window import Window, init_window


@state
class Merging:
    window: Window
    scores: AttentionScores  # of the newest query
    row_keys: Key[Array, "B"]


@dataclasses.dataclass(frozen=True)
class CaM(Policy[Merging]):
    """Keeps the first tokens and a window of recent ones; the value of a token that leaves the window is added, as a
    share 1 / merged, to the values of the next `merged` tokens, or to none of them.

    It is added with probability min(1, A / mean): A is the attention probability that the newest query paid to the
    token, mean that of the window's other tokens, over the query heads of a kv head's group. Where it pays the token no
    more than the others, the sum of attention times value is kept in expectation. Keys stay as they are.

    With `compact_every=1` a token leaves at every step, as published. More is ours: tokens that leave together are all
    weighed by the newest query and merged into the first `merged` tokens that stay (as kvpress's CAMPress does). A
    prompt that is read exactly is reduced without merging, as in the released code; one that is streamed merges as it
    goes. The released code for Llama merges the token that leaves one step later; its other variants, for OPT and
    GPT-NeoX, have no coin (they merge where A exceeds the mean) and count sinks into the mean; kvpress sums attention
    over steps, and takes the mean over the `merged` tokens.

    Attributes:
        budget: slots per head, sinks included; the rest is the window.
        sinks: first tokens that are never dropped.
        merged: tokens that a value is spread over (the paper's m, 32).
        compact_every: tokens between compactions.

    Source: CaM, section 4; `local_cam_mask` of the released code.
    """

    budget: int
    sinks: int = 4
    merged: int = 32
    compact_every: int = 64

    observes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, self.sinks, 1, self.compact_every)
        check_least(1, merged=self.merged)

    def init(self, spec, row_keys) -> Merging:
        window = init_window(spec, self.sinks, self.budget - self.sinks)
        return Merging(window, init_scores(spec, window), row_keys)

    def prefill(self, state: Merging, prompt) -> Merging:
        return dataclasses.replace(state, window=windows.fill(state.window, prompt))

    def read(self, state: Merging, newer):
        return windows.shown(state.window)

    def observe(self, state: Merging, seen) -> Merging:
        return dataclasses.replace(state, scores=scored.newest(state.scores, seen))

    def compact(self, state: Merging, new) -> Merging:
        drawn, left_drawn = windows.slide_beside(
            state.window, new, state.scores.window, new.beside(state.scores.staged)
        )
        window, left = windows.slide(state.window, new)
        # Where tokens leave, the window is full.
        mean = jnp.mean(drawn[:, :, : window.recent], axis=2, keepdims=True)
        coins = draws_by_position(state.row_keys, left.position, left.keys.shape[1])
        # Not A / mean, which may be 0 / 0. A coin is under 1.
        merges = (coins * mean < left_drawn) & left.present[:, None]
        shares = jnp.where(merges[..., None], left.values.astype(jnp.float32) / self.merged, 0.0)
        merge_targets = window.values[:, :, : min(self.merged, window.recent)]
        added = merge_targets.astype(jnp.float32) + jnp.sum(shares, axis=2, keepdims=True)
        values = window.values.at[:, :, : merge_targets.shape[2]].set(added.astype(merge_targets.dtype))
        window = dataclasses.replace(window, values=values)
        return Merging(window, scored.moved_in(state.scores, drawn), state.row_keys)
