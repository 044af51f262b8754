"""A weighted uniform sample of the tokens between sinks and recent window; the baseline of other selections.

Per KV head, every token gets a random number from the row's key, the head and its position. Among the tokens that have
left the recent window, the m with the smallest numbers are the sample: a uniform sample without replacement, at any
time. A new token replaces the one with the largest number, if its number is smaller.

Each sampled token has the weight n / m for n tokens between sinks and window, in both sums of attention. Keys, values
and queries play no part. A method that selects or merges should be better than this at equal bytes.
"""

import dataclasses
import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.per_head import draws_by_position, per_head, replace_lowest, top_indices
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state


@state
class Sample:
    """A uniform sample without replacement of the tokens that left the window: those with the lowest priorities.

    A token's priority is a uniform number that depends only on the row's key, the head and the token's position, so
    that the sample does not depend on the division of the stream into blocks.
    """

    window: Window
    priority: Float[Array, "B H_kv M"]  # float32, inf in empty slots
    log_weight: Float[Array, "B H_kv S"]  # float32, of all slots of the window
    row_keys: Key[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Uniform(Policy[Sample]):
    """Keeps sinks, recent tokens and a uniform sample of m of the n tokens between them, each with weight n / m.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included; the other slots hold the sample (m).
        sinks: first tokens that are always kept.
        recent: newest tokens that are always kept.
        compact_every: tokens between compactions; until then all new tokens are read.

    Reference:
        The weighted baseline of BalanceKV's released code.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="the sample")

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> Sample:
        """Returns an empty window for `spec`."""
        size, shape = self.budget - self.sinks - self.recent, (spec.batch, spec.kv_heads)
        window = init_window(spec, self.sinks, self.recent, size)
        return Sample(window, jnp.full((*shape, size), jnp.inf), jnp.zeros(window.keys.shape[:3]), row_keys)

    def prefill(self, state: Sample, prompt: Prompt) -> Sample:
        """Fills the window and draws the sample from the prompt."""
        window = windows.fill(state.window, prompt)
        batch, heads, tokens = prompt.keys.shape[:3]
        size = min(state.priority.shape[2], tokens)
        draws = draws_by_position(state.row_keys, jnp.broadcast_to(jnp.arange(tokens), (batch, tokens)), heads)
        select = functools.partial(top_indices, count=size)
        source = per_head(select, 0, None)(-draws, windows.middle_mask(window, tokens))
        slot = jnp.broadcast_to(jnp.arange(size), source.shape)
        _, sampled = self._num_sampled(window)
        is_used = slot < sampled[:, None, None]
        priority = jnp.where(is_used, jnp.take_along_axis(draws, source, axis=-1), jnp.inf)
        target = jnp.where(is_used, slot, window.selected)
        window = windows.write_selected(window, target, prompt.keys, prompt.values, source)
        return self._set_weights(state, window, state.priority.at[:, :, :size].set(priority))

    def segments(self, state: Sample, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window of a state."""
        _, sampled = self._num_sampled(state.window)
        return windows.window_segments(state.window, sampled, state.log_weight)

    def compact(self, state: Sample, new: Tokens) -> Sample:
        """Slides the window over new tokens; tokens that leave it replace tokens with higher priorities."""
        window, left = windows.slide(state.window, new)
        draws = draws_by_position(state.row_keys, left.position, left.keys.shape[1])
        draws = jnp.where(left.present[:, None], draws, jnp.inf)
        slot, source, score = per_head(replace_lowest)(-state.priority, -draws)
        window = windows.write_selected(window, slot, left.keys, left.values, source)
        return self._set_weights(state, window, -score)

    def _num_sampled(self, window: Window) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """Returns n and m of every row."""
        _, _, middle = windows.occupancy(window)
        return middle, jnp.minimum(middle, self.budget - self.sinks - self.recent)

    def _set_weights(self, state: Sample, window: Window, priority: Float[Array, "B H_kv M"]) -> Sample:
        """Gives every sampled token the weight n / m."""
        middle, sampled = self._num_sampled(window)
        weight = jnp.log(jnp.maximum(middle, 1).astype(jnp.float32)) - jnp.log(jnp.maximum(sampled, 1))
        log_weight = state.log_weight.at[:, :, window.fixed :].set(weight[:, None, None])
        return Sample(window, priority, log_weight, state.row_keys)
