"""Uniform sampling of the middle of the context, with weights: the baseline that every clever choice must beat."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import SegmentLike
from kvjax.spec import CacheSpec
from kvjax.state import state
from kvjax.stores import window as windows
from kvjax.stores.staging import Tokens
from kvjax.stores.window import Window, init_window
from kvjax.structures.per_head import draws_by_position, per_head, replace_lowest


@state
class Sample:
    """A uniform sample without replacement of the tokens that left the window: those of the smallest priorities.

    A token's priority is a uniform number that depends on the row's key, the head and the token's position alone, so
    a stream gives the same sample however it is cut into blocks.
    """

    window: Window
    priority: Float[Array, "B H_kv M"]  # float32, inf in empty slots
    log_weight: Float[Array, "B H_kv S"]  # float32, of the whole window
    row_keys: Key[Array, "B"]


@dataclasses.dataclass(frozen=True)
class Uniform(Policy[Sample]):
    """Keeps sinks, recent tokens and, of the n tokens between them, a uniform sample of m, each with weight n / m.

    Attributes:
        budget: slots per head, sinks and recent tokens included; the rest is the sample (m).
        sinks, recent: tokens always kept.
        compact_every: tokens between compactions; until then new tokens are all read.

    Reference:
        the weighted baseline of BalanceKV's released code.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.recent, self.compact_every, remainder_for="the sample")

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> Sample:
        size, shape = self.budget - self.sinks - self.recent, (spec.batch, spec.kv_heads)
        window = init_window(spec, self.sinks, self.recent, size)
        return Sample(window, jnp.full((*shape, size), jnp.inf), jnp.zeros((*shape, self.budget)), row_keys)

    def prefill(self, state: Sample, prompt: Prompt) -> Sample:
        window = windows.fill(state.window, prompt)
        batch, heads, tokens = prompt.keys.shape[:3]
        size = min(state.priority.shape[2], tokens)
        draws = draws_by_position(state.row_keys, jnp.broadcast_to(jnp.arange(tokens), (batch, tokens)), heads)
        draws = jnp.where(windows.middle_mask(window, tokens)[:, None], draws, jnp.inf)
        smallest, index = jax.lax.top_k(-draws, size)
        # In the order of the text, empty places last.
        index = jnp.sort(jnp.where(jnp.isneginf(smallest), tokens, index), axis=-1)
        source = jnp.minimum(index, tokens - 1)
        priority = jnp.where(index < tokens, jnp.take_along_axis(draws, source, axis=-1), jnp.inf)
        slot = jnp.broadcast_to(jnp.arange(size), source.shape)
        window = windows.write_selected(window, slot, prompt.keys, prompt.values, source)
        return self._weighed(state, window, state.priority.at[:, :, :size].set(priority))

    def segments(self, state: Sample, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        sampled = self._sampled(state.window)[1]
        return windows.window_segments(state.window, selected=sampled, log_weight=state.log_weight)

    def compact(self, state: Sample, new: Tokens) -> Sample:
        window, left = windows.slide(state.window, new)
        draws = draws_by_position(state.row_keys, left.position, left.keys.shape[1])
        draws = jnp.where(left.present[:, None], draws, jnp.inf)
        slot, source, score = per_head(replace_lowest)(-state.priority, -draws)
        window = windows.write_selected(window, slot, left.keys, left.values, source)
        return self._weighed(state, window, -score)

    def _sampled(self, window: Window) -> tuple[Int[Array, "B"], Int[Array, "B"]]:
        """n and m of every row."""
        _, _, middle = windows.occupancy(window)
        return middle, jnp.minimum(middle, self.budget - self.sinks - self.recent)

    def _weighed(self, state: Sample, window: Window, priority: Float[Array, "B H_kv M"]) -> Sample:
        """Gives every sampled token the weight n / m."""
        middle, kept = self._sampled(window)
        weight = jnp.log(jnp.maximum(middle, 1).astype(jnp.float32)) - jnp.log(jnp.maximum(kept, 1))
        log_weight = state.log_weight.at[:, :, self.sinks + self.recent :].set(weight[:, None, None])
        return Sample(window, priority, log_weight, state.row_keys)
