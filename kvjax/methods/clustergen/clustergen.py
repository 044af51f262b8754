"""ClusterGen (Zandieh et al. 2025): recent tokens, and k centers of the keys before them by greedy k-center.

After the prompt has been read exactly, per KV head:

1. The last r tokens are kept (`recent`), and the sinks if there are any.
2. The other keys are candidates. The first candidate is the first center.
3. The candidate that is farthest, in l2 distance, from its nearest center becomes the next center, until there are k.
   This is farthest-first traversal (Gonzalez 1985): its largest distance is at most twice the optimum.
4. The centers' keys and values are kept unchanged, with weight 1. All other tokens of the prompt are dropped.

While decoding, new tokens enter the recent window, and tokens that leave it are dropped. The centers stay.

The centers cover the range of the keys: a key unlike all others is kept even if no query has attended to it. Nothing
depends on queries, so that one compression serves any question.

The experiments of ClusterGen and of SubGen run this method. The streaming algorithm of both papers is `SubGen`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from kvjax.methods.clustergen.k_center import greedy_k_center
from kvjax.policy import Policy, Prompt, check_budget
from kvjax.segment import SegmentLike
from kvjax.shared import window as windows
from kvjax.shared.per_head import per_head
from kvjax.shared.window import Window, init_window
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state


@state
class ClusterGenState:
    """A window with centers in its selected slots."""

    window: Window
    num_centers: Int[Array, "B"]  # int32


@dataclasses.dataclass(frozen=True)
class ClusterGen(Policy[ClusterGenState]):
    """Keeps recent tokens and centers of the prompt's other tokens, chosen per KV head by farthest-first traversal.

    A center is a token whose key is far from the keys of all other centers. The prompt is clustered once. Tokens that
    leave the recent window while decoding are dropped.

    Attributes:
        budget: slots per KV head, sinks and recent tokens included; the other slots hold centers (k).
        recent: newest tokens that are always kept (r). None for half the budget, as in the LongBench experiments
            (ClusterGen, section 4.2). The line retrieval experiments use the better of 2048 and 3072 (section 4.1).
            If `recent` is below `compact_every`, up to `compact_every` staged tokens stay visible.
        sinks: first tokens that are always kept. The papers keep none; other values are kvjax's addition.
        compact_every: tokens between compactions (kvjax's staging; it changes no result).

    Reference:
        ClusterGen, section 4; SubGen, section 3.2. The papers do not specify the first center; kvjax takes the first
        candidate.
    """

    budget: int
    recent: int | None = None
    sinks: int = 0
    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.budget, self.sinks, self.num_recent, self.compact_every, remainder_for="centers")

    @property
    def num_recent(self) -> int:
        """Slots of recent tokens."""
        return self.budget // 2 if self.recent is None else self.recent

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the smallest budget that leaves a slot for a center."""
        return 2 * self.sinks + 1 if self.recent is None else super().min_budget(spec)

    @property
    def num_centers(self) -> int:
        """Slots of centers."""
        return self.budget - self.sinks - self.num_recent

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> ClusterGenState:
        """Returns an empty window for `spec`."""
        window = init_window(spec, self.sinks, self.num_recent, self.num_centers)
        return ClusterGenState(window, jnp.zeros(spec.batch, jnp.int32))

    def prefill(self, state: ClusterGenState, prompt: Prompt) -> ClusterGenState:
        """Fills the window and clusters the prompt's tokens between sinks and recent ones."""
        window = windows.fill(state.window, prompt)
        middle = windows.middle_mask(window, prompt.keys.shape[2])
        centers = per_head(functools.partial(greedy_k_center, k=self.num_centers), 0, None)(prompt.keys, middle)
        slot = jax.lax.broadcasted_iota(jnp.int32, centers.index.shape, 2)
        slot = jnp.where(centers.separation > -jnp.inf, slot, window.selected)
        window = windows.write_selected(window, slot, prompt.keys, prompt.values, centers.index)
        # All heads of a row have as many candidates, hence as many centers.
        count = jnp.sum(centers.separation[:, 0] > -jnp.inf, axis=-1, dtype=jnp.int32)
        return ClusterGenState(window, count)

    def segments(self, state: ClusterGenState, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the window of a state."""
        return windows.window_segments(state.window, state.num_centers, num_visible_staged=num_visible_staged)

    def compact(self, state: ClusterGenState, new: Tokens) -> ClusterGenState:
        """Slides the window over new tokens; tokens that leave it are dropped."""
        return dataclasses.replace(state, window=windows.slide(state.window, new)[0])
