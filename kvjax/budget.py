"""Cache budgets, and the largest policy within a budget."""

import bisect
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable

import jax
import numpy as np

from kvjax.cache import Cache, init, layer_policy, read_bytes
from kvjax.messages import format_bytes as format_bytes
from kvjax.messages import shorten
from kvjax.policy import Policy
from kvjax.spec import TILE, CacheSpec, round_to_tiles
from kvjax.staging import Counters
from kvjax.state import cache_bytes

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_FORMS = "a share (25%), bytes (64MiB) or slots per KV head (256 slots)"
# Slots with which a budget is refused for the other settings only.
LARGE_BUDGET = 2**20

# Below these sizes, half of the facts of a text or more are lost: on SmolLM2-135M, `auto` answers .50 of the questions
# at 3.1% of the bytes, and .90 with the full cache; SnapKV answers none.
_MIN_SLOTS, _MIN_FRACTION = 64, 0.03
MAX_STAGING_TOKENS = 128  # of any policy by default
_STAGING_SHARE = 0.01
MAX_RESERVED_SHARE = 0.5  # of the bytes of a budget that slots for new tokens take by default


class SmallBudgetWarning(UserWarning):
    """Says that a budget is too small for reliable answers."""


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
        """Parses "25%" (of the bytes of a full bfloat16 cache), "64MiB" or "100MB" (bytes), or "256 slots".

        A space before the unit is optional.

        Returns:
            The budget.

        Raises:
            ValueError: if the text is not a budget.
        """
        match = re.fullmatch(rf"([0-9]{{1,15}}(?:\.[0-9]{{1,15}})?) ?(%|slots?|{'|'.join(_UNITS)})", text.strip())
        number, unit = match.groups() if match is not None else ("", "")
        is_slots = unit.startswith("slot")
        if match is None or (is_slots and not number.isdecimal()):
            raise ValueError(f"budget={shorten(text)} {_describe_readings(text)}")
        if float(number) == 0:
            raise ValueError(f"budget={text} is an empty cache; pass more than 0")
        if is_slots:
            return cls(f"{int(number)} slots", slots=int(number))
        if unit != "%":
            return cls(f"{number}{unit}", bytes=int(float(number) * _UNITS[unit]))
        if float(number) > 100:
            raise ValueError(f"budget={text} exceeds the full cache; pass at most 100%")
        return cls(f"{number}%", fraction=float(number) / 100)

    @classmethod
    def of(cls, budget: "int | str | Budget") -> "Budget":
        """Returns a budget from a number of slots, from text or from a budget.

        Args:
            budget: 1024 (slots), "25%", "64MiB", "1024 slots", or a `Budget`.

        Returns:
            The budget.

        Raises:
            ValueError: if it is not a budget.
        """
        if isinstance(budget, Budget):
            return budget
        if isinstance(budget, int | np.integer) and not isinstance(budget, bool):
            text = f"{budget} slots"
            return cls(text, slots=int(budget)) if budget > 0 else cls.parse(text)
        return cls.parse(str(budget))

    def warn_if_small(self, spec: CacheSpec, tokens: int) -> None:
        """Warns once about a budget of fewer than 64 slots, or of less than 3% of a text."""
        fraction = self.share(spec, tokens)
        if fraction < _MIN_FRACTION or (self.slots is not None and self.slots < min(_MIN_SLOTS, tokens)):
            reading = f"; a share is written {self.slots}%" if self.slots is not None and self.slots <= 100 else ""
            # The text does not name the length, so that Python shows it once for a budget.
            warnings.warn(
                f"budget={self} is less than {_MIN_SLOTS} slots or {_MIN_FRACTION:.0%} of the text: half of its facts "
                f"or more are lost, and answers are fluent but wrong{reading}",
                SmallBudgetWarning,
                stacklevel=2,
            )

    def warn_if_reserved(self, policy: Policy, spec: CacheSpec, tokens: int) -> None:
        """Warns once about a policy whose slots for new tokens take most of the budget."""
        if reserved_bytes(policy, spec) > MAX_RESERVED_SHARE * self.limit(spec, tokens):
            warnings.warn(
                f"slots reserved for new tokens take most of budget={self}, so that few tokens of the prompt are kept; "
                "reduce max_new_tokens, set reserve_decode_slots=false, or pass a larger budget",
                SmallBudgetWarning,
                stacklevel=2,
            )

    def share(self, spec: CacheSpec, tokens: int) -> float:
        """Returns the budget as a fraction of a full bfloat16 cache, or of its tokens for a budget in slots."""
        if self.fraction is not None:
            return self.fraction
        if self.slots is not None:
            return self.slots / max(tokens, 1)
        return self.limit(spec, tokens) / max(spec.full_cache_bytes(tokens), 1)

    def limit(self, spec: CacheSpec, tokens: int) -> int:
        """Returns the budget in bytes per row and layer.

        Args:
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


def staging_tokens(budget_tokens: float) -> int:
    """Returns the number of tokens between two compactions: 16, or 32 to 128 if they are 1% of the budget at most.

    The staging buffer, which is not quantized, counts as bytes. Compacting all layers takes as long as a decode step on
    a GPU (SnapKV, 32 layers, H200: 7.0 ms), so that large caches are compacted less often.

    Args:
        budget_tokens: the budget in tokens of a full bfloat16 cache.
    """
    return max([16, *(tokens for tokens in (32, 64, MAX_STAGING_TOKENS) if tokens <= _STAGING_SHARE * budget_tokens)])


def _describe_readings(text: str) -> str:
    """Describes the budgets that an invalid text may stand for."""
    if re.fullmatch(r"0?\.[0-9]+|1\.0+", text) and float(text) > 0:
        return f"is a fraction; pass '{100 * float(text):g}%'"
    if re.fullmatch(r"[0-9]{1,15}(\.[0-9]+)?", text) is None:
        return f"is not a budget; pass {_FORMS}"
    readings = [f"'{text}%' for a share of the full cache"] if 0 < float(text) <= 100 else []
    readings += [f"'{text} slots' for slots per KV head (an integer in Python)"] if text.isdecimal() else []
    return f"has no unit; pass {' or '.join(readings) or _FORMS}"


def abstract_cache(policy: Policy, spec: CacheSpec) -> tuple[Cache, Counters]:
    """Returns what `kvjax.init` returns, as shapes and dtypes.

    Returns:
        A cache and its counters, whose arrays are `jax.ShapeDtypeStruct`s.
    """
    return jax.eval_shape(lambda: init(policy, spec, jax.random.split(jax.random.key(0), spec.batch)))


# A fit traces the caches of many budgets, and callers repeat fits.
@functools.lru_cache(maxsize=4096)
def row_bytes(policy: Policy, spec: CacheSpec) -> int:
    """Returns the device bytes that the cache of one row and layer holds.

    Args:
        spec: spec of the layer; its batch size does not matter.

    Returns:
        Bytes of all buffers, also of the staging buffer and of empty slots.
    """
    return cache_bytes(abstract_cache(policy, dataclasses.replace(spec, batch=1))).device


@functools.lru_cache(maxsize=4096)
def row_read_bytes(policy: Policy, spec: CacheSpec) -> int:
    """Returns the bytes of one row's cache in one layer that a decode step reads.

    Args:
        spec: spec of the layer; its batch size does not matter.

    Returns:
        Bytes; see `kvjax.read_bytes`.
    """
    return read_bytes(abstract_cache(policy, dataclasses.replace(spec, batch=1))[0])


def fit_bytes(make: Callable[[int], Policy], spec: CacheSpec, limit: int) -> Policy:
    """Returns the policy with the largest budget that stays within `limit` bytes per row and layer.

    Bytes are those held, or those read per token for a retrieval policy, on average over the layers. They include the
    staging buffer, counters and PRNG keys. Budgets are rounded to tiles (`round_to_tiles`). If all tokens fit, the
    budget is their number, rounded up to a tile.

    Args:
        make: makes a policy with a budget, such as `lambda budget: kvjax.Uniform(budget, sinks=16)`.
        spec: spec of the caches; batch and layer do not matter.
        limit: bytes per row and layer.

    Returns:
        The policy.

    Raises:
        ValueError: if no budget fits, or the policy does not allow the one that does.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=4096, max_new_tokens=64
        ... )
        >>> limit = spec.full_cache_bytes(4096) // 4
        >>> kvjax.fit_bytes(lambda slots: kvjax.Uniform(slots, sinks=16), spec, limit).budget
        400
    """

    def size(budget: int) -> float:
        return limited_bytes(make(budget), spec)

    smallest = min_budget(make, spec)
    if (held := size(smallest)) > limit:
        remedy = "pass a larger budget"
        if _reserves_decode_slots(make(smallest)):
            remedy = (
                f"it includes {spec.max_new_tokens} slots per KV head that are reserved for new tokens; reduce "
                f"max_new_tokens, set reserve_decode_slots=false, or {remedy}"
            )
        raise ValueError(
            f"limit={limit} bytes per row and layer is too small: budget={smallest} already takes {held:g} bytes; "
            f"{remedy}"
        )
    largest = max(-(-spec.capacity // TILE) * TILE, smallest)
    budget = _largest_budget(size, smallest, largest, limit)
    if budget == largest and make(smallest) == make(smallest + TILE):
        raise ValueError(f"{make(smallest)} does not grow with its budget; pass a budget in slots")
    return make(max(round_to_tiles(budget), smallest))


def _largest_budget(size: Callable[[int], float], smallest: int, largest: int, limit: int) -> int:
    """Returns the largest budget up to `largest` of at most `limit` bytes, apart from rounding; `smallest` has them.

    Stores are allocated in tiles, and a few policies have size classes. A line through two sizes gives a guess, usually
    within a tile of the result. Then budgets around it are measured, in growing steps. Budgets far above the result are
    not, because policies can refuse them.
    """
    low_size, guess = size(smallest), min(smallest + 8 * TILE, largest)
    for part in (2, 1):  # a line through half of the result is more exact
        slope = (size(guess) - low_size) / max(guess - smallest, 1)
        slots = (limit - low_size) / slope if slope > 0 else largest
        guess = max((smallest + min(int(slots / part), largest - smallest)) // TILE * TILE, smallest)
    low, high, step = smallest, largest + 1, TILE
    while low < guess < high and size(guess) > limit:
        guess, high, step = guess - step, guess, 2 * step
    low = max(low, guess)
    while low + step < high and size(low + step) <= limit:
        low, step = low + step, 2 * step
    high = min(low + step, high)
    # Budgets that are rounded to the same tile need no distinction.
    budgets = sorted({max(round_to_tiles(budget), low) for budget in range(low, high)})
    return budgets[bisect.bisect_right(budgets, float(limit), lo=1, key=size) - 1]


def min_budget(make: Callable[[int], Policy], spec: CacheSpec) -> int:
    """Returns the smallest budget of policies for a cache.

    Args:
        make: as for `fit_bytes`; settings such as the recent tokens may depend on the budget.
    """
    budget = LARGE_BUDGET
    while (smaller := make(budget).min_budget(spec)) < budget:
        budget = smaller
    return budget


def fit_share(make: Callable[[int], Policy], spec: CacheSpec, limit: int, full: Policy) -> Policy:
    """Returns the policy that fills a share of the bytes of a full cache, also of a short text.

    Some buffers do not grow with the text, such as the staging buffer, and policies have a smallest budget. A text is
    short if their bytes exceed the share.

    Args:
        full: a policy that keeps every token.

    Returns:
        The policy of `fit_bytes`. For a short text, the one with the multiple of `TILE` slots above its smallest
        budget, or `full` if that takes no more bytes.

    Raises:
        ValueError: if the policy does not allow the budget that fits.
    """
    # Above the smallest budget, which may have slots for sinks and recent tokens only.
    policy = make((min_budget(make, spec) // TILE + 1) * TILE)
    held = limited_bytes(policy, spec)
    if held <= limit:
        return fit_bytes(make, spec, limit)
    return full if limited_bytes(full, spec) <= held else policy


def limited_bytes(policy: Policy, spec: CacheSpec) -> float:
    """Returns the bytes that a budget limits, per row and layer, on average over the layers.

    Args:
        spec: spec of the caches; batch and layer do not matter.

    Returns:
        The bytes held, or those read per token for a retrieval policy.
    """
    measure = row_read_bytes if policy.is_retrieval else row_bytes
    return sum(len(equal) * measure(policy, equal[0]) for equal in _equal_layers(policy, spec)) / spec.layers


def reserved_bytes(policy: Policy, spec: CacheSpec) -> float:
    """Returns the bytes per row and layer of slots that a policy reserves for new tokens."""
    if not _reserves_decode_slots(policy):
        return 0
    few_new = dataclasses.replace(spec, max_new_tokens=min(spec.max_new_tokens, policy.compact_every))
    return limited_bytes(policy, spec) - limited_bytes(policy, few_new)


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
