"""The options of a KV cache, and the sizes that they give rows and documents.

A *row* holds one sequence. If its cache is a full one, its capacity follows the tokens: capacities are powers of two,
and a row moves to the next one before its slots are used up. A compressed row has one size, because its budget is a
number of slots; requests of similar lengths share it. A *document* has the size of its text, and rows that continue it
hold the tokens after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

import kvjax
from kvjax.budget import Budget, limited_bytes
from kvjax.policy import Policy
from kvjax.quantization import KVDtype, parse_kv_dtype
from kvjax.registry import PolicyChoice, fit_policy
from kvjax_models import compile_cache
from kvjax_models.runner.auto_policy import Auto, AutoHeads, CachePolicy, HeadValues, resolve_auto, resolve_windows
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.plan import Plan, rope_tokens
from kvjax_models.runner.state import cache_specs
from kvjax_models.tokenized_model import TokenizedModel

KVDtypes = KVDtype | tuple[KVDtype, KVDtype] | None  # of keys and values together, or of each

EXACT_SUFFIX_TOKENS = 4096  # suffixes of documents hold all their tokens up to this capacity
# Tokens between two compactions of a full cache. A request waits for the end of a block, and the staging buffer, which
# has the dtype of the model, would be half of the bytes of a short row with 64 tokens.
_FULL_BLOCK = 32
_MIN_CAPACITY = 256  # of a full cache that grows: every capacity is a program, and so few slots take no time
_ROOM = 128  # tokens after the prompt that a full cache has room for before it grows


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlans:
    """A model with the options of its KV cache; `LanguageModel.cache` makes one, with values in place of text.

    Attributes:
        llm: the model and its tokenizer.
        policy: cache policy: "auto" (see `runner.auto_policy`), the name of another one ("snapkv"), a class
            (`kvjax.SnapKV`) or a policy.
        budget: size of the cache of one sequence: a share of a full bfloat16 cache ("25%"), bytes ("64MiB") or slots
            per KV head (1024); None if the policy has a budget or takes none. For `generate`, a share is of the full
            cache after the last new token; for a document, of its text's full cache. Where a share of a short text is
            less than the smallest cache of the policy, that one is used, or a full one if it is smaller. Layers with a
            sliding window cache exactly their window; their bytes count only in a budget in bytes.
        kv_dtype: quantization format of the cache: "int8", "fp8", "int4", "int3", "int2", a pair for keys and values,
            or "bfloat16"; by default the dtype of the model, or for "auto" and `heads="auto"` a format that the budget
            decides (see `runner.auto_policy`).
        heads: budgets of the KV heads: "auto" keeps every token in the heads that retrieve, by the model's profile
            (measured at the first use of an unknown model), a `profile.Profile`, or the shares of
            `kvjax.HeadBudgets`; equal budgets by default. "auto" and policies with `heads=auto` have it already.
        allow_beyond_context: whether sequences may exceed the model's context length; otherwise they are refused.
        budget_dtype: dtype in which a budget counts arrays without quantization, such as bfloat16 for a float32 model
            that simulates a bfloat16 one; the dtype of the model by default.
    """

    llm: TokenizedModel
    policy: CachePolicy
    budget: Budget | None = None
    kv_dtype: KVDtypes = None
    heads: HeadValues = None
    allow_beyond_context: bool = False
    budget_dtype: jax.typing.DTypeLike | None = None

    def __post_init__(self) -> None:
        """Checks the format.

        Raises:
            ValueError: if it is none.
        """
        if self.kv_dtype != "bfloat16":
            parse_kv_dtype(self.kv_dtype)

    def __repr__(self) -> str:
        """Returns the options."""
        options: dict[str, Any] = {name: getattr(self, name) for name in ("policy", "budget", "kv_dtype", "heads")}
        for name, value in options.items():
            if isinstance(value, Auto | PolicyChoice | Budget | AutoHeads):
                options[name] = str(value)
        return f"cache({', '.join(f'{name}={value!r}' for name, value in options.items() if value is not None)})"

    # --- rows ---

    def rows(self, num_tokens: int, max_new_tokens: int, *, streaming: bool = False) -> tuple[Generator, ...]:
        """Returns the sizes that the row of a prompt has in turn; see `prefix.RowSizes`.

        Args:
            num_tokens: length of the prompt.
            max_new_tokens: maximum number of tokens after it.
            streaming: whether prompts are compressed while they are processed; see `Plan`.
        """
        prompts = compile_cache.length_bucket(max(num_tokens, 1))
        answers = _similar_answers(prompts, max_new_tokens)
        compressed = self._cached_generator(
            max_prompt_tokens=prompts[-1],
            max_new_tokens=answers[-1],
            budget_tokens=prompts[0] + answers[0],  # a budget refers to the shortest ones
            streaming=streaming,
        )
        # The smallest cache of a policy with a budget may be a full one, for a short text; that one does not grow.
        if streaming or compressed.is_short or not compressed.plan.is_resizable:
            return (compressed,)
        context_tokens = rope_tokens(self.llm.model.config, _capacity(num_tokens + max_new_tokens))
        # Not `block_size`, which a short answer limits: a later turn continues the row with another limit.
        block = min(_FULL_BLOCK, *(policy.compact_every for policy in compressed.plan.policies))
        return tuple(
            self._full_rows(capacity, block, compressed.kv_dtype, context_tokens)
            for capacity in _capacities(num_tokens, max_new_tokens)
        )

    def suffix_rows(self, reader: Generator, num_tokens: int, max_new_tokens: int) -> tuple[Generator, ...]:
        """Returns the sizes that a row after a document's text has in turn; see `prefix.RowSizes`.

        A suffix holds all its tokens in the document's format, up to `EXACT_SUFFIX_TOKENS`. A longer one has as many
        slots, or the budget of a policy that has one, and compresses them with the document's policy, if that can
        compress tokens while they come.

        Args:
            reader: sizes and policies with which the text was read (`document_generator`).
            num_tokens: tokens after the text and before the answer.
            max_new_tokens: maximum number of tokens of the answer.
        """
        if (tokens := num_tokens + max_new_tokens) > EXACT_SUFFIX_TOKENS:
            return (self._suffixes(reader, compile_cache.length_bucket(tokens)[-1] + 1),)
        capacities = _capacities(num_tokens, max_new_tokens)
        sizes = tuple(self._suffixes(reader, capacity) for capacity in capacities)
        return sizes if sizes[0].plan.is_resizable else sizes[-1:]

    @functools.cached_property
    def _cached_generator(self) -> Callable[..., Generator]:
        return functools.lru_cache(maxsize=64)(self.generator)

    @functools.cached_property
    def _full_rows(self) -> Callable[[int, int, KVDtypes, int], Generator]:
        """Returns the row of a full cache of a capacity."""

        def make(capacity: int, block: int, kv_dtype: KVDtypes, context_tokens: int) -> Generator:
            plan = Plan(
                self.llm.model,
                kvjax.Exact(compact_every=block),
                max_prompt_tokens=capacity - block,
                max_new_tokens=block,
                context_tokens=context_tokens,
                kv_dtype=kv_dtype,
            )
            return self._generator_of(plan)

        return functools.lru_cache(maxsize=64)(make)

    @functools.cached_property
    def _suffixes(self) -> Callable[[Generator, int], Generator]:
        """Returns the row of a capacity for the tokens after a document's text."""

        def make(reader: Generator, capacity: int) -> Generator:
            policy: Policy | Sequence[Policy] = kvjax.Exact(compact_every=min(_FULL_BLOCK, capacity))
            if capacity > EXACT_SUFFIX_TOKENS + 1:
                # Without a budget here, the policy has one.
                budget = None if self.budget is None else Budget.of(EXACT_SUFFIX_TOKENS)
                streamed = dataclasses.replace(self, budget=budget, kv_dtype=reader.kv_dtype)
                try:
                    policy = streamed.plan(max_prompt_tokens=1, max_new_tokens=capacity, streaming=True).policies
                except ValueError as error:
                    reason = str(error).removesuffix("; set streaming=False")
                    raise ValueError(
                        f"more than {EXACT_SUFFIX_TOKENS} tokens after a document are compressed while they come, but "
                        f"{reason}; reduce max_new_tokens"
                    ) from error
            plan = Plan(
                self.llm.model,
                policy,
                max_prompt_tokens=reader.max_prompt_tokens,
                max_new_tokens=capacity - 1,  # one slot belongs to a prompt, which a suffix has not
                context_tokens=reader.context_tokens,
                kv_dtype=reader.kv_dtype,
                is_suffix=True,
            )
            return self._generator_of(plan)

        return functools.lru_cache(maxsize=64)(make)

    # --- documents ---

    def document_generator(self, max_text_tokens: int, max_new_tokens: int, *, streaming: bool = False) -> Generator:
        """Returns sizes and policies for a text, with its own budget.

        Args:
            max_text_tokens: maximum length of the text; similar ones share compiled programs. A budget's share is of
                this length, rounded down by at most 1/32 (or 15 tokens), so that they often share slots, too.
            max_new_tokens: capacity of its suffixes.

        Returns:
            A generator with one row and no capacity after the text.
        """
        lengths = compile_cache.length_bucket(max_text_tokens)
        rounding = max(16, len(lengths) // 8)
        return self.generator(
            max_prompt_tokens=lengths[-1],
            max_new_tokens=0,
            budget_tokens=max(max_text_tokens // rounding * rounding, lengths[0], 1),
            streaming=streaming,
            context_tokens=lengths[-1] + max_new_tokens,
        )

    # --- plans ---

    def generator(self, *, batch: int = 1, **lengths: Any) -> Generator:
        """Returns a `Generator`, with which callers fork, save and continue generation states themselves.

        Args:
            **lengths: arguments of `plan`.

        Returns:
            The generator.
        """
        return self._generator_of(self.plan(**lengths), batch)

    def _generator_of(self, plan: Plan, batch: int = 1) -> Generator:
        return Generator(
            self.llm.model,
            plan,
            batch=batch,
            eos=self.llm.tokenizer.eos_ids,
            allow_beyond_context=self.allow_beyond_context,
            scorer=None if plan.scoring_policy is None else self.llm.scorer(self.heads),
        )

    def plan(
        self,
        *,
        max_prompt_tokens: int,
        max_new_tokens: int,
        streaming: bool = False,
        budget_tokens: int | None = None,
        context_tokens: int = 0,
    ) -> Plan:
        """Chooses policies, format and slots of the caches of one sequence.

        Args:
            max_prompt_tokens: maximum length of the first prompt.
            max_new_tokens: maximum number of tokens after it.
            streaming: whether prompts are compressed while they are processed, in memory independent of their length;
                see `Plan`.
            budget_tokens: sequence length whose full cache a budget's share refers to; by default the sum of
                `max_prompt_tokens` and `max_new_tokens`.

        Returns:
            The plan.
        """
        tokens = budget_tokens or max_prompt_tokens + max_new_tokens
        lengths: dict[str, Any] = {
            "max_prompt_tokens": max_prompt_tokens,
            "max_new_tokens": max_new_tokens,
            "streaming": streaming,
        }
        specs = cache_specs(self.llm.model, batch=1, **lengths)
        if self.budget_dtype is not None:
            specs = tuple(dataclasses.replace(spec, dtype=self.budget_dtype) for spec in specs)
        # The budget applies to layers without a sliding window; the others cache exactly their window.
        spec = dataclasses.replace(specs[0], window=None)
        policy, kv_dtype = resolve_auto(
            self.policy,
            self.budget,
            self.kv_dtype,
            spec,
            tokens,
            heads=self.heads,
            streaming=streaming,
            find_profile=self.llm.profile,
        )
        specs = tuple(dataclasses.replace(spec, kv_dtype=kv_dtype) for spec in specs)
        spec = dataclasses.replace(specs[0], window=None)
        budget = resolve_windows(self.budget, specs)
        resolved = fit_policy(policy, budget, spec, tokens, allow_smallest=True)
        is_short = False
        if budget is not None:
            is_short = budget.fraction is not None and limited_bytes(resolved, spec) > budget.limit(spec, tokens)
            if not is_short and not resolved.is_retrieval:
                budget.warn_if_small(spec, tokens)
            if budget.slots is None:
                budget.warn_if_reserved(resolved, spec, tokens)
        return Plan(
            self.llm.model, resolved, **lengths, context_tokens=context_tokens, kv_dtype=kv_dtype, is_short=is_short
        )


def _similar_answers(prompts: range, max_new_tokens: int) -> range:
    """Returns the lengths of answers whose rows have one size, so that they share programs.

    Args:
        max_new_tokens: length of an answer.

    Returns:
        As many lengths as those of `compile_cache.length_bucket`, or an eighth of a prompt if that is more: a budget,
        which is a share of the shortest prompt and answer, is smaller than that of a row of its own by at most this.
    """
    lengths = compile_cache.length_bucket(max_new_tokens)
    step = 1 << max(prompts.start // 8, 1).bit_length() - 1
    if step <= len(lengths):
        return lengths
    last = -(-max(max_new_tokens, 1) // step) * step
    return range(last - step + 1, last + 1)


def _capacity(tokens: int) -> int:
    """Returns the capacity of a full cache for a number of tokens: a power of two."""
    return max(1 << (tokens - 1).bit_length(), _MIN_CAPACITY)


def _capacities(num_tokens: int, max_new_tokens: int) -> list[int]:
    """Returns the capacities that a full cache has in turn, each at least a block more than its first tokens."""
    capacity = _capacity(num_tokens + max(min(max_new_tokens, _ROOM), _FULL_BLOCK))
    capacities = [capacity]
    while capacities[-1] < num_tokens + max_new_tokens:
        capacities.append(2 * capacities[-1])
    return capacities
