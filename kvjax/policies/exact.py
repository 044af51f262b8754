"""Exact attention: every token is kept. The reference that all other policies are measured against."""

import dataclasses

from kvjax.growing import Growing, add, fill, init_growing, shown
from kvjax.policy import Policy, check_least


@dataclasses.dataclass(frozen=True)
class Exact(Policy[Growing]):
    """Keeps every key and value. Devices may share them.

    Attributes:
        compact_every: tokens between compactions, which move staged tokens into the store. It changes no result.
        sinks: first tokens, which means something to `Quantized(whole_window=True)` alone: it leaves them as they are.
    """

    compact_every: int = 64
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(1, compact_every=self.compact_every)
        check_least(0, sinks=self.sinks)

    def init(self, spec, row_keys) -> Growing:
        return init_growing(spec, spec.max_prompt, self.sinks)

    def prefill(self, state: Growing, prompt) -> Growing:
        return fill(state, prompt)

    def read(self, state: Growing, newer):
        return shown(state)

    def compact(self, state: Growing, new) -> Growing:
        return add(state, new)
