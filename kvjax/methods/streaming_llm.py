"""StreamingLLM (Xiao et al. 2023): sink tokens and a sliding window of recent tokens.

Models give the first tokens of any text much attention, whatever they say, because the softmax has to put its weight
somewhere. A window that drops them fails; a window that keeps them works for any length. Per KV head:

1. The first `sinks` tokens are kept forever.
2. The other slots are a ring buffer of the newest tokens. Each new token replaces the oldest one.
3. In the paper, positions count inside the cache: RoPE sees the sinks right before the window (`reindex`). Keys are
   stored rotated, so that the queries of the sinks are rotated back instead.

Everything between sinks and window is lost.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import Segment, SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state
from pallas_kernels.weighted_decode import SLOT_TILE


@state
class StreamingLLMState:
    """The window, and RoPE frequencies if positions are re-indexed."""

    window: Window
    frequencies: Float[Array, "half_D"] | None


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy[StreamingLLMState]):
    """Keeps the first `sinks` tokens and, at every step, exactly the last `budget - sinks`, the newest one included.

    Attributes:
        budget: slots per KV head, sinks included.
        sinks: first tokens that are never dropped (4 in the paper); 0 gives plain sliding-window attention.
        reindex: whether positions count inside the cache, as in the paper, instead of in the sequence, as in most
            ports. The sinks are then right before the oldest recent token: queries that read them are rotated. Needs
            `CacheSpec.rope_frequencies`.
        compact_every: tokens between compactions. It changes no result: the window slides at every step.

    Reference:
        Efficient Streaming Language Models with Attention Sinks, section 3.2 (https://arxiv.org/abs/2309.17453).
    """

    budget: int
    sinks: int = 4
    reindex: bool = False
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, recent=1, compact_every=self.compact_every)

    def for_layer(self, spec: CacheSpec) -> Policy[StreamingLLMState]:
        """Limits staging to the window, because all staged tokens are visible."""
        return dataclasses.replace(self, compact_every=min(self.compact_every, self.budget - self.sinks))

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> StreamingLLMState:
        """Returns an empty window for `spec`."""
        window = init_window(spec, self.sinks, self.budget - self.sinks)
        if not self.reindex:
            return StreamingLLMState(window, None)
        if spec.rope_frequencies is None:
            raise ValueError("reindex=True needs CacheSpec.rope_frequencies to change positions")
        return StreamingLLMState(window, jnp.asarray(spec.rope_frequencies, jnp.float32))

    def prefill(self, state: StreamingLLMState, prompt: Prompt) -> StreamingLLMState:
        """Keeps the first and the last tokens."""
        return dataclasses.replace(state, window=windows.fill(state.window, prompt))

    def segments(self, state: StreamingLLMState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window of a state; re-indexed sinks are a separate segment."""
        window = state.window
        segments = windows.window_segments(window, num_visible_staged=num_visible_staged)
        if state.frequencies is None:
            return segments
        # Positions in the cache are those in the sequence minus the dropped tokens, for recent tokens and queries.
        dropped = jnp.maximum(window.total[:, None] + num_visible_staged - window.sinks - window.recent, 0)
        recent = dataclasses.replace(segments[0], stop=jnp.full_like(dropped[:, :1], window.recent))
        sink_count, _, _ = windows.occupancy(window)
        start = window.recent % SLOT_TILE  # so that the segment has a multiple of 8 slots
        first = window.recent - start
        sinks = Segment(
            window.keys[:, :, first:],
            window.values[:, :, first:],
            start=jnp.full_like(dropped[:, :1], start),
            stop=start + sink_count[:, None],
            query_rope_angles=-dropped[..., None] * state.frequencies,
        )
        return recent, sinks

    def compact(self, state: StreamingLLMState, new: Tokens) -> StreamingLLMState:
        """Slides the window over new tokens."""
        window, _ = windows.slide(state.window, new)
        return dataclasses.replace(state, window=window)
