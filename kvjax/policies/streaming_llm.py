"""StreamingLLM (Xiao et al. 2023): the first tokens, which soak up attention, and a sliding window of recent ones."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax import window as windows
from kvjax.policy import Policy, check_settings
from kvjax.segment import Segment
from kvjax.state import state
from kvjax.window import Window, init_window


@state
class SinksAndRecent:
    window: Window
    frequencies: Float[Array, "half_D"] | None  # angle per position of each pair of dimensions, for re-indexing


@dataclasses.dataclass(frozen=True)
class StreamingLLM(Policy[SinksAndRecent]):
    """Keeps the first `sinks` tokens and, at every step, exactly the last `budget - sinks`, the newest included.

    Attributes:
        budget: slots per head, sinks included.
        sinks: first tokens that are never dropped (the paper's attention sinks, 4); 0 gives plain sliding-window
            attention.
        reindex: positions count inside the cache, as in the paper, instead of in the text, as in most ports: sinks
            stand right before the oldest recent token, for which the query that reads them is turned (needs
            `spec.rope_frequencies`).
        compact_every: tokens between compactions. It changes no result: the window slides at every step.

    Source: Efficient Streaming Language Models with Attention Sinks, section 3.2.
    """

    budget: int
    sinks: int = 4
    reindex: bool = False
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.budget, self.sinks, recent=1, compact_every=self.compact_every)

    def at(self, spec):
        # Staged tokens are all shown, so there may be no more of them than recent ones.
        return dataclasses.replace(self, compact_every=min(self.compact_every, self.budget - self.sinks))

    def init(self, spec, row_keys) -> SinksAndRecent:
        window = init_window(spec, self.sinks, self.budget - self.sinks)
        if not self.reindex:
            return SinksAndRecent(window, None)
        if spec.rope_frequencies is None:
            raise ValueError("reindex=True needs spec.rope_frequencies: without them positions cannot be changed")
        return SinksAndRecent(window, jnp.asarray(spec.rope_frequencies, jnp.float32))

    def prefill(self, state: SinksAndRecent, prompt) -> SinksAndRecent:
        return dataclasses.replace(state, window=windows.fill(state.window, prompt))

    def read(self, state: SinksAndRecent, newer):
        window = state.window
        (kept,) = windows.shown(window, newer=newer)
        if state.frequencies is None:
            return kept
        # Positions inside the cache are those in the text less the dropped tokens, for recent tokens and queries alike.
        dropped = jnp.maximum(window.total[:, None] + newer - window.sinks - window.recent, 0)
        recent = dataclasses.replace(kept, stop=jnp.full_like(dropped[:, :1], window.recent))
        sinks, _, _ = windows.occupancy(window)
        first = Segment(
            window.keys[:, :, window.recent :],
            window.values[:, :, window.recent :],
            stop=sinks[:, None],
            turn=-dropped[..., None] * state.frequencies,
        )
        return recent, first

    def compact(self, state: SinksAndRecent, new) -> SinksAndRecent:
        window, _ = windows.slide(state.window, new)
        return dataclasses.replace(state, window=window)
