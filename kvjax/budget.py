"""Cache budgets, and the search for the largest policy within a budget."""

import bisect
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax

from kvjax.cache import Cache, init, layer_policy, read_bytes
from kvjax.messages import format_bytes as format_bytes
from kvjax.messages import shorten
from kvjax.policy import Policy
from kvjax.spec import TILE, CacheSpec, round_to_tiles
from kvjax.state import cache_bytes

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclasses.dataclass(frozen=True)
class Budget:
    """The size of a cache.

    Attributes:
        text: the budget as written.
        slots: slots per KV head.
        fraction: fraction of the bytes of a full bfloat16 cache.
        bytes: bytes of a sequence over all layers.
    """

    text: str
    slots: int | None = None
    fraction: float | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Parses "1024" (slots), "25%" (of the bytes of a full bfloat16 cache) or "64MiB" (bytes).

        Returns:
            The budget.

        Raises:
            ValueError: if the text is not a budget.
        """
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)(%|B|KiB|MiB|GiB)|(\d{1,15})", text)
        if match is None:
            is_fraction = re.fullmatch(r"0?\.\d+|1\.0+", text) is not None and float(text) > 0
            fraction = f"{100 * float(text):g}% for this fraction" if is_fraction else "a fraction (25%)"
            raise ValueError(f"budget={shorten(text)} is not a budget; pass slots (1024), {fraction} or bytes (64MiB)")
        number, unit, slots = match.groups()
        if float(slots or number) == 0:
            raise ValueError(f"budget={text} is an empty cache; pass more than 0")
        if slots is not None:
            return cls(text, slots=int(slots))
        if unit != "%":
            return cls(text, bytes=int(float(number) * _UNITS[unit]))
        if float(number) > 100:
            raise ValueError(f"budget={text} exceeds the full cache; pass at most 100%")
        return cls(text, fraction=float(number) / 100)

    @classmethod
    def of(cls, budget: "int | str | Budget") -> "Budget":
        """Returns a budget from a number of slots, from text or from a budget.

        Args:
            budget: 1024 (slots), "25%", "64MiB", or a `Budget`.

        Returns:
            The budget.
        """
        return budget if isinstance(budget, Budget) else cls.parse(str(budget))

    def limit(self, spec: CacheSpec, tokens: int) -> int:
        """Returns the budget in bytes per row and layer.

        Args:
            spec: the cache's spec.
            tokens: tokens of the full cache that a fraction refers to.

        Returns:
            Bytes.

        Raises:
            ValueError: for a budget in slots.
        """
        if self.fraction is not None:
            return int(self.fraction * spec.full_cache_bytes(tokens))
        if self.bytes is not None:
            return self.bytes // spec.layers
        raise ValueError(f"budget={self.text!r} is in slots, not in bytes")

    def __str__(self) -> str:
        return self.text


def abstract_cache(policy: Policy, spec: CacheSpec) -> Cache:
    """Returns the cache that `kvjax.init` would make, as shapes and dtypes.

    Args:
        spec: spec of the layer.

    Returns:
        A cache whose arrays are `jax.ShapeDtypeStruct`s.
    """
    return jax.eval_shape(lambda: init(policy, spec, jax.random.split(jax.random.key(0), spec.batch)))


def row_bytes(policy: Policy, spec: CacheSpec) -> int:
    """Returns the device bytes that the cache of one row and layer holds.

    Args:
        spec: spec of the layer; its batch size does not matter.

    Returns:
        Bytes of all buffers, also of the staging buffer and of empty slots.
    """
    return _held_bytes(policy, dataclasses.replace(spec, batch=1))


def row_read_bytes(policy: Policy, spec: CacheSpec) -> int:
    """Returns the bytes of one row's cache in one layer that a decode step reads.

    Args:
        spec: spec of the layer; its batch size does not matter.

    Returns:
        Bytes; see `kvjax.read_bytes`.
    """
    return _read_bytes(policy, dataclasses.replace(spec, batch=1))


# A fit traces the caches of many budgets, and callers repeat fits.
@functools.lru_cache(maxsize=4096)
def _held_bytes(policy: Policy, spec: CacheSpec) -> int:
    return cache_bytes(abstract_cache(policy, spec)).device


@functools.lru_cache(maxsize=4096)
def _read_bytes(policy: Policy, spec: CacheSpec) -> int:
    return read_bytes(abstract_cache(policy, spec))


def fit_bytes(make: Callable[[int], Policy], spec: CacheSpec, limit: int) -> Policy:
    """Returns the policy with the largest budget that stays within `limit` bytes per row and layer.

    Bytes are those held, or those read per token for a retrieval policy, on average over the layers. They include the
    staging buffer, counters and PRNG keys. Budgets are rounded to tiles (`round_to_tiles`). If all tokens fit, the
    result is the smallest budget that holds them.

    Args:
        make: makes a policy from a number of slots, such as `lambda budget: kvjax.Uniform(budget, sinks=16)`.
        spec: spec of the caches; batch and layer do not matter.
        limit: bytes per row and layer.

    Returns:
        The policy.

    Raises:
        ValueError: if no budget fits, with the reason for the smallest one tried.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=4096, max_new_tokens=64
        ... )
        >>> limit = spec.full_cache_bytes(4096) // 4
        >>> kvjax.fit_bytes(lambda slots: kvjax.Uniform(slots, sinks=16), spec, limit).budget
        400
    """
    refusals: dict[int, str] = {}  # why budgets are refused

    def size(budget: int) -> float:
        """Returns the average bytes per row and layer of the policy with this `budget` of slots; inf if refused."""
        try:
            policy = make(budget)
            measure = row_read_bytes if policy.is_retrieval else row_bytes
            return sum(len(equal) * measure(policy, equal[0]) for equal in _equal_layers(policy, spec)) / spec.layers
        except ValueError as error:
            refusals[budget] = str(error)
            return math.inf

    refused, accepted = 0, 1
    while size(accepted) == math.inf:
        refused, accepted = accepted, 2 * accepted
        if accepted > limit:
            raise ValueError(f"no budget within limit={limit} bytes is accepted: {refusals[refused]}")
    low = smallest = bisect.bisect_left(range(accepted), True, lo=refused + 1, key=lambda one: size(one) < math.inf)
    if size(low) > limit:
        remedy = "pass a larger budget"
        if _reserves_decode_slots(make(low)):
            remedy = (
                f"it includes {spec.max_new_tokens} slots per KV head that are reserved for new tokens; reduce "
                f"max_new_tokens, set reserve_decode_slots=false, or {remedy}"
            )
        raise ValueError(
            f"limit={limit} bytes per row and layer is too small: budget={low} already takes {size(low):g} bytes; "
            f"{remedy}"
        )
    high = low
    while size(high := high * 2) <= limit:
        if make(high).is_retrieval and high >= spec.capacity:
            return make(high)  # everything may be read
        low = high
        if high > limit:
            break  # all tokens fit
    low = bisect.bisect_right(range(high), float(limit), lo=low + 1, key=size) - 1 if low < high else low
    if low <= spec.capacity:
        if size(low + 1) == math.inf:
            raise ValueError(
                f"a larger budget fits into limit={limit} bytes per row and layer, but {refusals[low + 1]}"
            )
        return make(max(round_to_tiles(low), smallest))
    if make(low) == make(smallest):
        raise ValueError(f"{make(smallest)} does not grow with its budget; pass a budget in slots")
    if size(low) == size(low - low // 4):  # buffers have the size of the capacity
        return make(_smallest_equal_budget(make, spec, smallest, low))
    return make(max(min(round_to_tiles(low), -(-spec.capacity // TILE) * TILE), smallest))


def _smallest_equal_budget(make: Callable[[int], Policy], spec: CacheSpec, low: int, high: int) -> int:
    """Returns the smallest budget from `low` to `high` with which every layer has the same state as with `high`.

    States have static sizes: equal bytes do not imply that as many tokens fit, because slots are allocated in tiles.
    """

    def states(budget: int) -> list[tuple[Any, int]]:
        policy = make(budget)
        return [(abstract_cache(policy, equal[0]).state, len(equal)) for equal in _equal_layers(policy, spec)]

    largest = states(high)
    return low + bisect.bisect_left(range(low, high), True, key=lambda budget: states(budget) == largest)


def _reserves_decode_slots(policy: Policy) -> bool:
    """Returns whether a policy, or one inside it, has slots for new tokens in addition to its budget."""
    inner = [value for field in vars(policy).values() for value in (field if isinstance(field, tuple) else (field,))]
    return getattr(policy, "reserve_decode_slots", False) or any(
        _reserves_decode_slots(value) for value in inner if isinstance(value, Policy)
    )


def _equal_layers(policy: Policy, spec: CacheSpec) -> list[list[CacheSpec]]:
    """Groups the specs of all layers by the policy of the layer; one cache of a group is measured for all."""
    groups: dict[Policy, list[CacheSpec]] = {}
    for layer in range(spec.layers):
        one = dataclasses.replace(spec, layer=layer)
        groups.setdefault(layer_policy(policy, one).canonical(), []).append(one)
    return list(groups.values())
