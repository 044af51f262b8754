"""The interface of cache policies.

A policy is a frozen dataclass of settings. It decides which keys and values a cache keeps
and which ones attention reads:

    init(spec, row_keys) -> state
    prefill(state, prompt) -> state
    segments(state, num_visible_staged) -> segments    every decode step
    observe(state, stats) -> state                     every decode step
    compact(state, new) -> state                       every `compact_every` tokens

`kvjax.cache` appends, attends, quantizes and shards for all policies.
"""

import abc
import dataclasses
import functools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Array, Float, Int, Key, Shaped

from kvjax.attention import AttentionStats
from kvjax.messages import shorten
from kvjax.segment import Segment, SegmentLike
from kvjax.spec import MAX_TOKENS, CacheSpec, is_number
from kvjax.staging import Tokens
from kvjax.state import state, static

S = TypeVar("S")  # a policy's state


@dataclasses.dataclass(frozen=True)
class Repetition:
    """A second pass over the prompt: the model reads the prompt again in chunks, each after the entire prompt.

    Policies that score tokens by the attention of the repetition's queries (KVzip) require it. The first text is
    `instruction + suffix + chunk`. Later ones are `continuation + end of the previous chunk + suffix + chunk`.

    Attributes:
        chunk_tokens: tokens of the prompt per chunk.
        instruction: token ids at the start of the first text ("repeat the previous context").
        continuation: token ids at the start of every later text.
        suffix: token ids directly before the chunk.
        overlap: tokens of the previous chunk that follow `continuation`.
        sinks: first tokens of the prompt that count in the attention of every chunk's queries
            (`RepeatedPrompt.received`).
        weights: whether `RepeatedPrompt.query_weights` and `value_norms` are needed, and what weighs a query: the
            inverse norm of its hidden state before attention (KVzip+), or the norm of a gradient (KVgrad).
    """

    chunk_tokens: int = 2048
    instruction: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    overlap: int = 8
    sinks: int = 4
    weights: Literal["none", "hidden_norm", "gradient"] = "none"

    def __post_init__(self) -> None:
        check_min(1, chunk_tokens=self.chunk_tokens)
        check_min(0, overlap=self.overlap, sinks=self.sinks)

    def num_chunks(self, tokens: int) -> int:
        """Returns the number of chunks of a prompt of `tokens` tokens."""
        return -(-tokens // self.chunk_tokens)

    def max_width(self, tokens: int) -> int:
        """Returns the maximum length of a chunk's text, for a prompt of `tokens` tokens."""
        first, further = len(self.instruction), len(self.continuation) + self.overlap
        prefix = max(first, further if self.num_chunks(tokens) > 1 else 0)
        return prefix + len(self.suffix) + min(self.chunk_tokens, tokens)


@dataclasses.dataclass(frozen=True)
class Requirements:
    """Inputs that a policy needs from the model and the decode loop.

    Attributes:
        prompt_queries: number of the prompt's last queries that `prefill` needs, or "all".
        repetition: how the model repeats the prompt for `prefill`; None if the policy needs no repetition.
        predicted_scores: whether `prefill`, `step` and `append` need a score of every token, which the model predicts
            from its hidden state.
        attention_stats: whether `observe` needs the attention probabilities of every step.
        entire_prompt: whether the policy compresses in `prefill` only, so that prompts cannot be streamed through
            `compact`.
    """

    prompt_queries: int | Literal["all"] = 0
    repetition: Repetition | None = None
    predicted_scores: bool = False
    attention_stats: bool = False
    entire_prompt: bool = False

    def num_prompt_queries(self, tokens: int) -> int:
        """Returns the number of queries that `prefill` needs for a prompt padded to `tokens` tokens."""
        return tokens if self.prompt_queries == "all" else min(self.prompt_queries, tokens)


def merge_requirements(policies: Iterable["Policy"]) -> Requirements:
    """Combines the requirements of policies that read the same prompt.

    Returns:
        Requirements that satisfy every policy.

    Raises:
        ValueError: if policies need different repetitions of the prompt.
    """
    requirements = [policy.requires for policy in policies]
    counts = [one.prompt_queries for one in requirements]
    repetitions = list(dict.fromkeys(one.repetition for one in requirements if one.repetition is not None))
    if len(repetitions) > 1:
        raise ValueError(f"policies that read one prompt need different repetitions of it: {repetitions}")
    return Requirements(
        prompt_queries="all" if "all" in counts else max((n for n in counts if n != "all"), default=0),
        repetition=repetitions[0] if repetitions else None,
        predicted_scores=any(one.predicted_scores for one in requirements),
        attention_stats=any(one.attention_stats for one in requirements),
        entire_prompt=any(one.entire_prompt for one in requirements),
    )


def prompt_queries(policy: "Policy", queries: Float[Array, "B T H_q D"]) -> Float[Array, "B w H_q D"] | None:
    """Selects the queries that `kvjax.prefill` needs for a policy.

    Args:
        policy: the cache's policy (`cache.policy`).
        queries: all queries of the prompt, right-aligned: the last query belongs to each row's last token.

    Returns:
        The last queries, as many as the policy needs; None if it needs none.

    Example:
        >>> import jax.numpy as jnp, kvjax
        >>> queries = jnp.ones((1, 64, 4, 8))
        >>> kvjax.prompt_queries(kvjax.SnapKV(budget=128, window_size=16), queries).shape
        (1, 16, 4, 8)
    """
    count = policy.requires.num_prompt_queries(queries.shape[1])
    return queries[:, queries.shape[1] - count :] if count else None


@state
class RepeatedPrompt:
    """One layer's projections of the repetitions of a prompt: C repetitions of R tokens, one after the other.

    `received` is the largest attention probability that each token of the prompt receives from any query that repeats
    its chunk, if queries attend to the sinks, the chunk and the repetition alone. Policies compute it if it is None.
    `query_weights` and `value_norms` exist if `Repetition.weights` asks for them. The norm of a value is that of its
    product with a query head's part of the output projection.
    """

    queries: Float[Array, "B CR H_q D"]
    keys: Float[Array, "B CR H_kv D"]
    lengths: Int[Array, "B C"]  # int32 tokens of each repetition; 0 where a row has no such chunk
    received: Float[Array, "B H_kv T"] | None = None
    query_weights: Float[Array, "B CR"] | None = None  # float32
    value_norms: Float[Array, "B H_q T"] | None = None  # float32


@state
class Prompt:
    """A prompt as policies receive it: left-aligned rows, zeros past each row's length."""

    keys: Float[Array, "B H_kv T D"]
    values: Float[Array, "B H_kv T D_v"]
    lengths: Int[Array, "B"]  # int32
    queries: Float[Array, "B w H_q D"] | None = None  # the last ones, right-aligned (`Requirements.prompt_queries`)
    layer_carry: Shaped[Array, "B H_kv *N"] | None = None  # from the previous layer (`Policy.layer_carry`)
    sink_logits: Float[Array, "H_q"] | None = None
    repeated: RepeatedPrompt | None = None
    predicted_scores: Float[Array, "B H_kv T"] | None = None  # float32 (`Requirements.predicted_scores`)
    rope_frequencies: Float[Array, "half_D"] | None = None
    logit_cap: float | None = static(default=None)


class Policy(abc.ABC, Generic[S]):
    """A cache policy. Subclasses are frozen dataclasses.

    Policies compare by value: policies with equal settings are equal. Compiled programs and saved states are
    identified by this value.

    Attributes:
        compact_every: tokens between compactions; a field of every policy.
        requires: inputs that the policy needs from the model and the decode loop; a class attribute or a property.
        is_retrieval: whether the policy keeps every token and selects the ones to read at every step. Budgets of such
            policies count the bytes read per step, budgets of other policies the bytes held.
    """

    is_retrieval: bool = False

    def __post_init__(self) -> None:
        """Checks the types of the settings and converts NumPy scalars to Python's.

        Subclasses call `super().__post_init__()` before their own checks.
        """
        check_setting_types(self)
        for field in dataclasses.fields(typing.cast(Any, self)):
            object.__setattr__(self, field.name, _python_scalars(getattr(self, field.name)))

    @property
    @abc.abstractmethod
    def compact_every(self) -> int:
        """Tokens between compactions."""

    @property
    def requires(self) -> Requirements:
        """Inputs that the policy needs from the model and the decode loop."""
        return Requirements()

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the smallest budget that the other settings allow.

        Args:
            spec: spec of a cache, which can need more slots; None for any cache.

        Returns:
            Slots per KV head; by default one more than the settings `sinks` and `recent`.
        """
        return 1 + sum(vars(self).get(name) or 0 for name in ("sinks", "recent"))

    def for_layer(self, spec: CacheSpec) -> "Policy[S]":
        """Returns the policy for one layer of the model; `kvjax.init` calls it once per layer.

        Args:
            spec: the layer's spec, with its index `spec.layer`.

        Returns:
            The layer's policy; by default the policy itself.
        """
        return self

    def canonical(self) -> "Policy[S]":
        """Returns the policy that a cache keeps after `init`: without settings that only `init` reads.

        Caches with equal canonical policies and states of equal shapes share compiled programs.

        Returns:
            By default the policy itself.
        """
        return self

    @abc.abstractmethod
    def init(self, spec: CacheSpec, row_keys: Key[Array, "B"]) -> S:
        """Returns an empty state.

        Args:
            row_keys: one PRNG key per batch row.

        Returns:
            A `@kvjax.state.state` whose `kv_entries` arrays are zeros.
        """

    @abc.abstractmethod
    def prefill(self, state: S, prompt: Prompt) -> S:
        """Compresses an entire prompt into an empty state.

        Args:
            prompt: the prompt, with the inputs that `requires` names.

        Returns:
            The new state.
        """

    @abc.abstractmethod
    def segments(self, state: S, num_visible_staged: Int[Array, "B #T"]) -> tuple[SegmentLike, ...]:
        """Returns the entries that attention reads, in addition to the staged tokens.

        Args:
            state: the state; keys and values of a quantized cache are `QuantizedArray`s.
            num_visible_staged: int32 number of staged tokens that each query attends to, its own included. A sliding
                window hides its oldest tokens by it.

        Returns:
            Segments, and reads of block stores.
        """

    def full_segments(self, state: S) -> tuple[Segment, ...]:
        """Returns the segments of the KV heads that keep every token: slot s holds the token at position s.

        Args:
            state: the state; keys and values of a quantized cache are `QuantizedArray`s.

        Returns:
            Segments; by default none.
        """
        return ()

    def observe(self, state: S, stats: AttentionStats) -> S:
        """Updates the state from the attention of newly appended tokens.

        Args:
            stats: attention statistics of the step, one per result of `segments` and in the same order.

        Returns:
            The new state.
        """
        return state

    @abc.abstractmethod
    def compact(self, state: S, new: Tokens) -> S:
        """Moves the staged tokens into the state.

        Args:
            new: up to `compact_every` tokens per row. The state of a row without new tokens must not change.

        Returns:
            The new state.
        """

    def layer_carry(self, state: S, prompt: Prompt) -> Shaped[Array, "B H_kv *N"] | None:
        """Returns an array that the prefill of the next layer receives as `prompt.layer_carry`.

        Args:
            prompt: the prompt, with the previous layer's carry.

        Returns:
            An array with leading axes [B, H_kv], or None. By default the previous layer's carry, unchanged.
        """
        return prompt.layer_carry


def check_policy_class(policy_class: Any) -> None:
    """Checks that a class is a policy.

    Raises:
        TypeError: if it is not a frozen dataclass that derives from `Policy`.
    """
    # A class that inherits from a dataclass without being one does not define these parameters itself.
    parameters = vars(policy_class).get("__dataclass_params__") if isinstance(policy_class, type) else None
    if not (parameters and parameters.frozen and issubclass(policy_class, Policy)):
        raise TypeError(
            f"{getattr(policy_class, '__name__', policy_class)} must be a kvjax.policy.Policy and a frozen dataclass, "
            "because compiled programs and saved states are identified by its value"
        )


def check_budget(
    budget: int, sinks: int = 0, recent: int = 0, compact_every: int = 64, *, remainder_for: str = ""
) -> None:
    """Checks the budget of a policy and the settings that are part of it.

    Args:
        budget: slots per KV head.
        sinks: first tokens that are always kept.
        recent: newest tokens that are always kept.
        compact_every: tokens between compactions.
        remainder_for: purpose of the slots other than sinks and recent tokens. If it is given, at least one such slot
            is required.

    Raises:
        ValueError: if a size is out of range; names the setting.
    """
    check_min(0, sinks=sinks, recent=recent)
    if not 1 <= budget <= MAX_TOKENS:
        raise ValueError(f"budget={budget} must be between 1 and {MAX_TOKENS} slots")
    if budget < sinks + recent:
        raise ValueError(
            f"budget={budget} slots cannot hold sinks={sinks} and recent={recent}; pass at least {sinks + recent}"
        )
    if remainder_for and budget == sinks + recent:
        raise ValueError(f"budget={budget} leaves no slot for {remainder_for}: sinks and recent take {budget}")
    check_min(1, compact_every=compact_every)


def check_min(minimum: int, **settings: float | None) -> None:
    """Checks that settings are at least a minimum.

    Args:
        minimum: the smallest valid value.
        **settings: values by name; None passes.

    Raises:
        ValueError: if a setting is smaller; names the setting.
    """
    for name, value in settings.items():
        if value is not None and value < minimum:
            raise ValueError(f"{name}={value} must be at least {minimum}")


def check_above(bound: float, **settings: float | None) -> None:
    """Checks that settings are above a bound.

    Args:
        bound: the number that every value must exceed.
        **settings: values by name; None passes.

    Raises:
        ValueError: if a setting is not above the bound; names the setting.
    """
    for name, value in settings.items():
        if value is not None and not value > bound:
            raise ValueError(f"{name}={value} must be above {bound}")


def check_setting_types(policy: Policy) -> None:
    """Checks every setting of a policy against its annotated type. Numbers must be finite.

    Args:
        policy: a policy, which is a dataclass.

    Raises:
        ValueError: if a setting has another type; names the setting.
    """
    for field in dataclasses.fields(typing.cast(Any, policy)):
        value, hint = getattr(policy, field.name), setting_types(type(policy))[field.name]
        if not any(_is_instance(value, option) for option in _options(hint)):
            raise ValueError(f"{field.name}={shorten(value)} must be {type_name(hint)}")


@functools.cache
def setting_types(policy_class: type) -> dict[str, Any]:
    """Returns the annotated type of every setting of a policy class.

    Returns:
        Types by field name, with string annotations resolved.
    """
    hints = typing.get_type_hints(policy_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(policy_class)}


def type_name(hint: Any) -> str:
    """Describes the values of a type in words, for error messages and tables: "int or None", "'mean' or 'drop'".

    Args:
        hint: a type annotation.

    Returns:
        The description.
    """
    if len(_options(hint)) > 1:
        return " or ".join(map(type_name, _options(hint)))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"({', '.join('...' if inner is ... else type_name(inner) for inner in typing.get_args(hint))})"
    return "None" if hint is type(None) else str(getattr(hint, "__name__", hint))


def _options(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the type itself."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _is_instance(value: Any, hint: Any) -> bool:
    """Whether a value has a type that is not a union. Bools do not count as numbers, NumPy scalars do."""
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if not isinstance(value, tuple) or (items[1:] != (Ellipsis,) and len(value) != len(items)):
            return False
        items = items[:1] * len(value) if items[1:] == (Ellipsis,) else items
        return all(
            any(_is_instance(x, option) for option in _options(item)) for x, item in zip(value, items, strict=False)
        )
    if hint in (int, float):
        return is_number(value) and (hint is float or isinstance(value, int | np.integer))
    return not isinstance(hint, type) or isinstance(value, hint)


def _python_scalars(value: Any) -> Any:
    """Converts NumPy scalars, also those in tuples: JSON has no form for them, and their sums overflow."""
    if isinstance(value, tuple):
        return tuple(map(_python_scalars, value))
    return value.item() if isinstance(value, np.generic) else value


def describe(policy: Policy) -> dict[str, Any]:
    """Describes a policy as a JSON object.

    Returns:
        The class name under "class", and every setting that equality of policies depends on; policies within a policy
        are objects as well. Equal objects mean equal policies.

    Example:
        >>> import kvjax
        >>> kvjax.describe(kvjax.Exact())
        {'class': 'Exact', 'compact_every': 64}
    """

    def plain(value: Any) -> Any:
        """Converts a dataclass to an object, a tuple to a list, and returns any other `value`."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.compare]
            return {"class": type(value).__name__} | {name: plain(getattr(value, name)) for name in names}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(policy)


def policy_of(description: Mapping[str, Any]) -> Policy:
    """Returns the policy that `describe` described.

    Args:
        description: the object, also after it was JSON. Classes are found by name among the policies that are imported.

    Returns:
        The policy.

    Raises:
        ValueError: if a class is not imported, or a setting is invalid.

    Example:
        >>> import kvjax
        >>> kvjax.policy.policy_of({"class": "Exact", "compact_every": 32})
        Exact(compact_every=32)
    """

    def subclasses(of: type[Any]) -> Iterator[type[Any]]:
        children: list[type[Any]] = of.__subclasses__()
        for subclass in children:
            yield subclass
            yield from subclasses(subclass)

    known: dict[str, Any] = {subclass.__name__: subclass for subclass in subclasses(Policy)}

    def build(value: Any) -> Any:
        """Converts an object with a class to a policy, and a list to a tuple."""
        if isinstance(value, Mapping):
            settings = {name: build(item) for name, item in value.items() if name != "class"}
            if value["class"] not in known:
                raise ValueError(f"the policy {value['class']} is not known; import its module first")
            return known[value["class"]](**settings)
        return tuple(map(build, value)) if isinstance(value, list | tuple) else value

    return build(description)
