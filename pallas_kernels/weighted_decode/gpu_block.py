"""What the forms of `mosaic_gpu` know of a block of slots."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A block of slots in a program.

    Attributes:
        scratch: Arrays in shared memory, by name.
        queries: From the form's `await_queries`.
        bounds: First slot, and exclusive end, of each query; None if all queries of the program share them.
        keys: The stored keys, in shared memory once `key_barrier` is passed.
        values: The stored values, likewise with `value_barrier`; None without values.
        per_slot: Log-weights and scales, by name, which arrive with the keys.
        key_barrier: The barrier of keys, log-weights and scales.
        value_barrier: The barrier of the values.
        logits: The block's logits in global memory; None unless requested.
        first_slot: The index of the block's first slot.
        lowest: First slot that the program reads.
        highest: Exclusive end of the slots that it reads.
        fetch_next: Starts the copies of the next block in this memory, of a list of arrays, or of all.
    """

    scratch: Any
    queries: Any
    bounds: Any
    keys: Any
    values: Any
    per_slot: dict[str, Any]
    key_barrier: Any
    value_barrier: Any
    logits: Any
    first_slot: Any
    lowest: Any
    highest: Any
    fetch_next: Callable[..., None]
