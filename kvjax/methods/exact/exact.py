"""The full cache, which all other policies are compared with."""

import dataclasses

from jaxtyping import Array, Int, Key

from kvjax.methods.exact import append_only_store
from kvjax.methods.exact.append_only_store import AppendOnlyStore, init_append_only_store
from kvjax.policy import Policy, Prompt, check_min
from kvjax.segment import Segment, SegmentLike
from kvjax.spec import CacheSpec
from kvjax.staging import Tokens


@dataclasses.dataclass(frozen=True)
class Exact(Policy[AppendOnlyStore]):
    """Keeps every key and value. Devices may share the slots of a head.

    Attributes:
        compact_every: tokens between compactions, which move staged tokens into the store. It changes no result.
    """

    compact_every: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_min(1, compact_every=self.compact_every)

    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> AppendOnlyStore:
        """Returns an empty store."""
        return init_append_only_store(spec, spec.max_prompt_tokens)

    def prefill(self, state: AppendOnlyStore, prompt: Prompt) -> AppendOnlyStore:
        """Writes the prompt into the store."""
        return append_only_store.fill(state, prompt)

    def segments(self, state: AppendOnlyStore, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the store."""
        return (append_only_store.store_segment(state),)

    def full_segments(self, state: AppendOnlyStore) -> tuple[Segment, ...]:
        """Returns the store."""
        return (append_only_store.store_segment(state),)

    def compact(self, state: AppendOnlyStore, new: Tokens) -> AppendOnlyStore:
        """Appends the staged tokens."""
        return append_only_store.append(state, new)
