"""The cache of layers with sliding-window attention."""

import dataclasses

from jaxtyping import Array, Int, Key

from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import Segment
from kvjax.shared import window as windows
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Policy[Window]):
    """Keeps exactly the last `budget` tokens at every step, the newest one included.

    `kvjax.init` gives this policy to layers whose model has a sliding window (`CacheSpec.window`).

    Attributes:
        budget: tokens of the window.
        compact_every: tokens between compactions. It changes no result: the window slides at every step.
    """

    budget: int
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, compact_every=self.compact_every)

    def for_layer(self, spec: CacheSpec) -> Policy[Window]:
        """Returns the policy with at most `budget` staging slots, because queries attend to all staged tokens."""
        return dataclasses.replace(self, compact_every=min(self.compact_every, self.budget))

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> Window:
        """Returns an empty window.

        Args:
            row_keys: not used, because the policy draws no random numbers.

        Returns:
            A window of `budget` slots per KV head.
        """
        return init_window(spec, 0, self.budget)

    def prefill(self, state: Window, prompt: Prompt) -> Window:
        """Keeps the last tokens of a prompt.

        Args:
            state: an empty window.

        Returns:
            The window of its last `budget` tokens.
        """
        return windows.fill(state, prompt)

    def segments(self, state: Window, num_visible_staged: Int[Array, "B #T"]) -> tuple[Segment, ...]:
        """Returns the tokens of the window that are among the last `budget` tokens of each query.

        Args:
            num_visible_staged: int32 number of staged tokens that each query attends to. A full window hides as many of
                its oldest tokens.

        Returns:
            One segment.
        """
        return windows.window_segments(state, num_visible_staged=num_visible_staged)

    def compact(self, state: Window, new: Tokens) -> Window:
        """Appends the staged tokens and drops the oldest ones.

        Returns:
            The window of the last `budget` tokens.
        """
        window, _ = windows.slide(state, new)
        return window
