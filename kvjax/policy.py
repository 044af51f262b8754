"""What a cache policy is: a frozen dataclass of settings that says what is kept and what is read.

A policy never attends, appends or counts steps: `kvjax.cache` does that, alike for all of them.

    init(spec, row_keys) -> state
    prefill(state, prompt) -> state
    every step:                     read(state, newer) -> what attention reads;  observe(state, seen) -> state
    every `compact_every` tokens:   compact(state, new) -> state
"""

import abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Array, Float, Int, Key

from kvjax.attention import Seen
from kvjax.segment import Reading
from kvjax.spec import MOST_TOKENS, CacheSpec
from kvjax.staging import Tokens
from kvjax.state import state, static

S = TypeVar("S")  # a policy's state

ALL_QUERIES = -1  # for `Policy.prompt_queries`: the queries of the whole prompt


@dataclasses.dataclass(frozen=True)
class Repeat:
    """How a prompt is read once more, as a text that repeats it in chunks, each behind the whole prompt: what a policy
    asks for whose scores are by what repeating attends to.

    Attributes:
        chunk: tokens of the prompt that are repeated at a time.
        ask: token ids before the first chunk ("repeat the previous context").
        ask_part: those before a further one, followed by the last `overlap` tokens of the chunk before.
        suffix: those between either and the chunk.
        overlap: see `ask_part`.
    """

    chunk: int = 2048
    ask: tuple[int, ...] = ()
    ask_part: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    overlap: int = 8

    def __post_init__(self) -> None:
        check_least(1, chunk=self.chunk)
        check_least(0, overlap=self.overlap)

    def chunks(self, tokens: int) -> int:
        """How many chunks so many tokens are."""
        return -(-tokens // self.chunk)

    def width(self, tokens: int) -> int:
        """The most tokens of one repetition of a prompt of so many."""
        first, further = len(self.ask), len(self.ask_part) + self.overlap
        return max(first, further if self.chunks(tokens) > 1 else 0) + len(self.suffix) + min(self.chunk, tokens)


@state
class Repeated:
    """A layer's projections of the repetitions of a prompt, C of R tokens each, one behind the other."""

    queries: Float[Array, "B CR H_q D"]
    keys: Float[Array, "B CR H_kv D"]
    lengths: Int[Array, "B C"]  # int32, tokens of each; 0 where a row has no such chunk


@state
class Prompt:
    """A prompt as policies see it: left-aligned rows, heads first. What lies past a row's length is noise."""

    keys: Float[Array, "B H_kv T D"]
    values: Float[Array, "B H_kv T D_v"]
    lengths: Int[Array, "B"]  # int32
    queries: Float[Array, "B w H_q D"] | None  # the last ones, right-aligned, as many as `prompt_queries` asks for
    told: Any = None  # what the layer before told (`Policy.tell`)
    sink_logits: Float[Array, "H_q"] | None = None
    repeated: Repeated | None = None  # where the policy asks for it (`Policy.repeat`)
    frequencies: Float[Array, "half_D"] | None = None  # angle per position of each pair of dimensions, where known
    logit_cap: float | None = static(default=None)


class Policy(abc.ABC, Generic[S]):
    """A cache policy. Subclasses are frozen dataclasses: equal settings are equal policies, in one process and from one
    to the next, and compiled programs, saved states and tables of results go by that.

    What is said here by properties, a policy says by a field, by a class attribute or by a property of its own.
    """

    def __post_init__(self) -> None:
        """Checks the settings. A policy's own checks come after `super().__post_init__()`."""
        check_kinds(self)

    @property
    @abc.abstractmethod
    def compact_every(self) -> int:
        """Tokens between two compactions, and slots of the staging buffer; a field of every policy."""

    @property
    def prompt_queries(self) -> int:
        """Of a prompt's last queries, how many `prefill` needs (or ALL_QUERIES)."""
        return 0

    @property
    def repeat(self) -> Repeat | None:
        """How the prompt is to be read once more for `prefill`, if it is."""
        return None

    @property
    def observes(self) -> bool:
        """Whether `observe` is told which attention slots drew."""
        return False

    @property
    def streams(self) -> bool:
        """Whether a prompt may come through `compact` alone; False for policies that compress in `prefill` only."""
        return True

    @property
    def recalls(self) -> bool:
        """Whether everything is kept and a part of it read: budgets are then of what is read."""
        return False

    @property
    def pools_heads(self) -> bool:
        """Whether heads share buffers, so that a slot of one head's may hold another's token."""
        return False

    def at(self, spec: CacheSpec) -> "Policy[S]":
        """The policy of one layer, for policies that differ from layer to layer. `kvjax.init` asks once."""
        return self

    @abc.abstractmethod
    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> S:
        """An empty cache: a `@state`. A typed key per row, so that a row's randomness is its own."""

    @abc.abstractmethod
    def prefill(self, state: S, prompt: Prompt) -> S:
        """Takes a whole prompt into a fresh state."""

    @abc.abstractmethod
    def read(self, state: S, newer: Int[Array, "B #T"]) -> Reading:
        """What attention reads of the state: `Segment`s, `Recalled`s, and tuples of them. Staged tokens, which are in
        no state yet, are read besides.

        Args:
            newer: how many staged tokens each query sees, its own included: what a sliding window slides by.
        """

    def observe(self, state: S, seen: Seen) -> S:
        """Learns from the attention that appended tokens paid. In `seen.parts` stands what was seen of each part of the
        reading. `attend` alone, without new tokens, teaches nothing."""
        return state

    @abc.abstractmethod
    def compact(self, state: S, new: Tokens) -> S:
        """Takes the staged tokens in: up to `compact_every` per row, in rows that have ended none, which must then
        change nothing."""

    def tell(self, state: S, prompt: Prompt) -> Any:
        """What a layer's prefill tells the next layer's."""
        return prompt.told

    def read_bytes(self, state: S) -> int:
        """Bytes that a step reads beside what `read` shows: sums of scores, say."""
        return 0

    def head_order(self, devices: int = 1) -> tuple[int, ...] | None:
        """The order in which the cache keeps kv heads, among so many devices; None: their own."""
        return None


def repeat_of(policies: Iterable[Policy]) -> Repeat | None:
    """How a prompt is to be read again for policies that read it together.

    Raises:
        ValueError: where they ask for several ways.
    """
    asked = list(dict.fromkeys(policy.repeat for policy in policies if policy.repeat is not None))
    if len(asked) > 1:
        raise ValueError(f"policies that read together ask for different repetitions of the prompt: {asked}")
    return asked[0] if asked else None


def check_settings(budget: int, sinks: int = 0, recent: int = 0, compact_every: int = 64, *, selects: str = "") -> None:
    """Raises a ValueError for sizes that cannot be, naming the setting.

    Args:
        selects: what the slots beside sinks and recent tokens are for; at least one must be left for it.
    """
    check_least(0, sinks=sinks, recent=recent)
    if not 1 <= budget <= MOST_TOKENS:
        raise ValueError(
            f"budget={budget}; it must be at least 1 slot, and no more than {MOST_TOKENS} tokens can be kept"
        )
    if budget < sinks + recent:
        raise ValueError(
            f"budget={budget} slots cannot hold sinks={sinks} and recent={recent}; it must be at least "
            f"{sinks + recent}, or those smaller"
        )
    if selects and budget == sinks + recent:
        raise ValueError(f"budget={budget} leaves no slot for {selects}; sinks + recent already take {budget}")
    check_least(1, compact_every=compact_every)


def check_least(least: int, **settings: float | None) -> None:
    """Raises a ValueError for a setting that is less, naming it. None passes."""
    for name, value in settings.items():
        if value is not None and value < least:
            raise ValueError(f"{name}={value}; it must be at least {least}")


def check_above(least: float, **settings: float | None) -> None:
    """Raises a ValueError for a setting that is not above this, naming it. None passes."""
    for name, value in settings.items():
        if value is not None and not value > least:
            raise ValueError(f"{name}={value}; it must be above {least}")


def check_kinds(policy: Policy) -> None:
    """Raises a ValueError for a setting that is not of the type of its annotation, naming it. Numbers are finite; types
    that say no more than `Any` are passed."""
    for field in dataclasses.fields(policy):  # type: ignore[arg-type]
        value, kind = getattr(policy, field.name), _hints(type(policy))[field.name]
        if not any(_is(value, option) for option in _options(kind)):
            raise ValueError(f"{field.name}={value!r}; it must be {spelled(kind)}")


def spelled(kind: Any) -> str:
    """What a value of this type may be, in words."""
    if len(_options(kind)) > 1:
        return " or ".join(map(spelled, _options(kind)))
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return f"({', '.join(spelled(inner) if inner is not ... else '...' for inner in typing.get_args(kind))})"
    return "None" if kind is type(None) else str(getattr(kind, "__name__", kind))


_hints = functools.cache(typing.get_type_hints)


def _options(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a type that is no union."""
    if typing.get_origin(kind) is Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)
        if not isinstance(value, tuple) or (inner[1:] != (Ellipsis,) and len(value) != len(inner)):
            return False
        inner = inner[:1] * len(value) if inner[1:] == (Ellipsis,) else inner
        return all(any(_is(own, option) for option in _options(each)) for own, each in zip(value, inner, strict=True))
    if kind in (int, float):
        number = isinstance(value, int | np.integer if kind is int else int | float | np.integer | np.floating)
        return number and not isinstance(value, bool) and bool(np.isfinite(value))
    return not isinstance(kind, type) or isinstance(value, kind)


def describe(policy: Policy) -> dict[str, Any]:
    """The policy in terms of JSON: its class's name and every setting that its value depends on. Equal descriptions are
    equal policies."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = [field.name for field in dataclasses.fields(value) if field.compare]
            return {"class": type(value).__name__} | {name: plain(getattr(value, name)) for name in fields}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(policy)
