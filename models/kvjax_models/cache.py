"""A language model with a KV cache policy: generates text, and reads texts that answer many questions.

    cache = llm.cache("auto", "25%")
    cache.generate("Once upon a time", max_new_tokens=64, temperature=0.7)
    document = cache.read(text)
    document.ask("What happened to the ship?")

A `Plan` of the caches is made where lengths are known: in `generate`, in `read` and in `engine`.
"""

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np

import kvjax
from kvjax.budget import Budget, format_bytes, limited_bytes
from kvjax.messages import shorten
from kvjax.policy import Policy, policy_of
from kvjax.quantization import KVDtype, parse_kv_dtype
from kvjax.registry import PolicyChoice, fit_policy
from kvjax.spec import check_integer
from kvjax_models import compile_cache
from kvjax_models.document import Document, manifest
from kvjax_models.engine import Collector, Completion, Engine, Usage, seed_of_prompt
from kvjax_models.engine.answers import AnswerOptions, Answers, answer, check_n, stream
from kvjax_models.keywords import suggest_keywords
from kvjax_models.prefix import Prefix, open_save
from kvjax_models.profile import Profile
from kvjax_models.prompts import (
    Message,
    Prompt,
    TemplateOptions,
    as_prompts,
    is_prompt,
    is_tokens,
    render_context,
    warn_of_file_name,
)
from kvjax_models.runner.auto_policy import (
    Auto,
    AutoHeads,
    CachePolicy,
    HeadValues,
    cache_options,
    resolve_auto,
    resolve_windows,
)
from kvjax_models.runner.generator import Generator, prefill_together
from kvjax_models.runner.plan import Plan
from kvjax_models.runner.sampling import Sampling, SamplingOptions
from kvjax_models.runner.state import cache_specs
from kvjax_models.saves import Save
from kvjax_models.tokenized_model import TokenizedModel

KVDtypes = KVDtype | tuple[KVDtype, KVDtype] | None  # of keys and values together, or of each


class GenerateOptions(AnswerOptions, total=False):
    """The options of `CachedModel.generate` that do not change the type of the result."""

    template_options: TemplateOptions


MAX_ROWS = 2**16  # of a batch; far above what any device holds
EXACT_SUFFIX_TOKENS = 4096  # suffixes of documents hold all their tokens up to this capacity
# Tokens of a question per block, and between two compactions of a suffix. Their staging buffer has the dtype of the
# model, and would be half of the bytes of a short suffix with 64 tokens.
_SUFFIX_BLOCK = 32


@dataclasses.dataclass(frozen=True, eq=False)
class CachedModel:
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

    # --- sequences with separate caches ---

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, prompt: Sequence[Prompt], **options: Unpack[GenerateOptions]) -> list[str]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, *, return_details: Literal[True], **options: Unpack[GenerateOptions]
    ) -> tuple[Completion, Usage]: ...
    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, return_details: Literal[True], **options: Unpack[GenerateOptions]
    ) -> tuple[list[Completion], Usage]: ...
    @overload
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        n: int,
        return_details: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Answers: ...

    @suggest_keywords(SamplingOptions)
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        n: int = 1,
        template_options: TemplateOptions = None,
        return_details: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Answers:
        """Continues one text or several, or answers conversations.

        Args:
            prompt: one text or one list of messages {"role": ..., "content": ...}, or a list of either, which are
                processed as one batch (`generate_many` limits the batch size).
            max_new_tokens: maximum number of new tokens; an end-of-text token finishes a sequence earlier.
            stop: a string or strings that finish a sequence and are excluded from its text; they may contain special
                tokens.
            seed: seed of the first sequence, of its samples and of the policy's random numbers; sequence i has
                seed + i, modulo 2**32.
            n: number of sequences per prompt, which is processed once: the policy's random numbers are those of the
                prompt's first sequence.
            template_options: variables of the chat template, such as {"enable_thinking": False} or {"tools": [...]};
                {"continue_final_message": True} continues the last message. Only for conversations.
            return_details: whether to return `Completion`s and a `Usage` in place of texts.
            **sampling: parameters of `Sampling`, such as `temperature`; greedy by default.

        Returns:
            The new text, or a list with one per prompt; with n > 1 a list of n texts for each prompt. With
            `return_details` a pair: `Completion`s in place of the texts, and a `Usage`.

        Raises:
            ValueError: for invalid options, a policy or budget that is not possible, and empty prompts.
            TypeError: for prompts of other types.
        """
        is_single = is_prompt(prompt)
        warn_of_file_name(prompt)
        prompts: Any = as_prompts([prompt] if is_single else prompt)
        token_lists = [self.llm.encode(one, template_options) for one in prompts]
        if not token_lists:
            raise ValueError("prompt is an empty list; pass at least one prompt")
        engine = self.engine(
            rows=len(token_lists) * check_n(n),
            max_prompt_tokens=max(map(len, token_lists)),
            max_new_tokens=max_new_tokens,
        )
        return answer(
            engine,
            token_lists,
            is_single=is_single,
            n=n,
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
            return_details=return_details,
            sampling=sampling,
        )

    @suggest_keywords(SamplingOptions)
    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        stream_interval: int = 1,
        template_options: TemplateOptions = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Continues a text or answers a conversation, and yields the new text during generation.

        Args:
            prompt: a text, or a list of messages.
            max_new_tokens: as for `generate`.
            stop: as for `generate`.
            seed: as for `generate`.
            stream_interval: tokens per yield; larger intervals are faster.
            template_options: as for `generate`.
            **sampling: as for `generate`.

        Yields:
            Parts of the new text, in order; joined they are the entire new text.
        """
        warn_of_file_name(prompt)
        tokens = self.llm.encode(prompt, template_options)
        engine = self.engine(
            rows=1, max_prompt_tokens=len(tokens), max_new_tokens=max_new_tokens, stream_interval=stream_interval
        )
        options: dict[str, Any] = {"stop": stop, "max_new_tokens": max_new_tokens, "seed": seed}
        yield from stream(engine, tokens, sampling=Sampling(**sampling), **options)

    @suggest_keywords(SamplingOptions)
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int | str = 8,
        max_new_tokens: int = 256,
        max_prompt_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        max_prefill_steps: int | None = None,
        template_options: TemplateOptions = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Completion]:
        """Continues any number of texts or conversations by continuous batching (see `kvjax_models.engine`).

        A finished sequence frees its batch row for the next prompt. Errors of a prompt name its number.

        Args:
            prompts: texts, or lists of messages.
            batch_size: number of batch rows, or bytes for the caches of all rows ("2GiB"); smaller caches allow more
                rows.
            max_new_tokens: as for `generate`.
            max_prompt_tokens: maximum length of a prompt; a longer one is an error. With it, prompts are read from the
                iterable when a row is free; by default all are read first and their maximum length is used.
            stop: as for `generate`.
            seed: seed of the first prompt; prompt n has seed + n, modulo 2**32. A completion does not depend on the
                other prompts of the batch: `generate` returns the same text for the prompt and its seed, with caches of
                the same size.
            max_prefill_steps: see `Engine`; a small number reduces the latency of running sequences.
            template_options: as for `generate`.
            **sampling: as for `generate`.

        Yields:
            Completions in the order of the prompts.

        Raises:
            ValueError: for invalid options and prompts, with the number of the prompt.
        """
        token_lists: Iterable[list[int]] = (self.llm.encode(one, template_options) for one in as_prompts(prompts))
        if max_prompt_tokens is None:
            token_lists = list(token_lists)
            max_prompt_tokens = max(map(len, token_lists), default=1)
        engine = self.engine(
            rows=batch_size,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            max_prefill_steps=max_prefill_steps,
        )
        waiting, collector = enumerate(token_lists), Collector()
        finished: dict[int, Completion] = {}
        next_number = 0
        while True:
            while engine.num_waiting < engine.num_free_rows and (item := next(waiting, None)) is not None:
                number, tokens = item
                try:
                    engine.add(
                        tokens,
                        sampling=Sampling(**sampling),
                        stop=stop,
                        max_new_tokens=max_new_tokens,
                        seed=seed_of_prompt(seed, number),
                    )
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error
            if not engine.has_unfinished:
                return
            for output in engine.step():
                if (completion := collector.add(output)) is not None:
                    finished[completion.number] = completion
            while next_number in finished:
                yield finished.pop(next_number)
                next_number += 1

    @suggest_keywords()
    def engine(
        self,
        *,
        rows: int | str = 8,
        documents: int = 0,
        max_prompt_tokens: int,
        max_new_tokens: int = 256,
        streaming: bool = False,
        max_prefill_steps: int | None = None,
        stream_interval: int | None = None,
    ) -> Engine:
        """Returns an engine, to which requests can be added while others run.

        Args:
            rows: number of batch rows, or bytes for their caches ("2GiB").
            documents: number of documents that the rows continue at a time; 0 for plain prompts, each with its
                cache. With documents, `rows` is the number for each of them.
            max_prompt_tokens: maximum length of a prompt, or of a document's text.
            max_new_tokens: maximum number of tokens after it; with documents, of question and answer together.
            streaming: whether prompts are compressed while they are processed, in memory independent of their length;
                see `Plan`.
            max_prefill_steps: see `Engine`.
            stream_interval: see `Engine`.

        Returns:
            The engine.
        """
        documents = check_integer("documents", documents, minimum=0)
        max_new_tokens = check_integer("max_new_tokens", max_new_tokens, minimum=1)
        max_prompt_tokens = check_integer("max_prompt_tokens", max_prompt_tokens, minimum=0)
        options: dict[str, Any] = {"max_prefill_steps": max_prefill_steps, "stream_interval": stream_interval}
        lengths = compile_cache.length_bucket(max_prompt_tokens)
        if documents:
            reader = self.document_generator(max_prompt_tokens, max_new_tokens, streaming=streaming)
            suffixes = self.suffixes(reader, max_new_tokens)
            suffixes = suffixes.with_batch(documents * _parse_rows(rows, suffixes))
            return Engine(self.llm.tokenizer, suffixes, documents=documents, reader=reader, **options)
        generator = self.generator(
            max_prompt_tokens=lengths[-1],
            max_new_tokens=max_new_tokens,
            budget_tokens=lengths[0] + max_new_tokens,
            streaming=streaming,
        )
        return Engine(self.llm.tokenizer, generator.with_batch(_parse_rows(rows, generator)), **options)

    # --- documents ---

    @suggest_keywords()
    def read(
        self,
        text: Prompt | Sequence[int],
        *,
        max_new_tokens: int = 512,
        max_text_tokens: int | None = None,
        chat: bool | None = None,
        seed: int = 0,
        template_options: TemplateOptions = None,
        streaming: bool = False,
    ) -> Document:
        """Compresses a text, which then answers many questions.

        Args:
            text: the text, a conversation, or token ids. Questions continue the last message if it is the user's.
            max_new_tokens: capacity for each question and its answer, in tokens.
            max_text_tokens: capacity for the text, to which a budget's share refers; by default its length. Documents
                of one engine have the engine's `max_prompt_tokens`.
            chat: whether the text is the start of a user's message, in the model's chat template, so that
                `Document.ask` can continue it; by default if the model has a template. Not for token ids.
            seed: seed of the policy's random numbers.
            template_options: as for `generate`.
            streaming: whether the text is compressed while it is processed, in memory independent of its length; see
                `Generator`.

        Returns:
            The document.

        Raises:
            ValueError: for invalid options, an empty text, and a policy or budget that is not possible.
            TypeError: if the text is neither a string nor a list of messages or of token ids.
        """
        warn_of_file_name(text)
        [document] = read_together(
            [self],
            text,
            max_new_tokens=max_new_tokens,
            max_text_tokens=max_text_tokens,
            chat=chat,
            seed=seed,
            template_options=template_options,
            streaming=streaming,
        )
        return document

    def document(
        self,
        prefix: Prefix,
        context: str | None,
        messages: tuple[Message, ...] | None,
        template_options: TemplateOptions,
        seed: int,
    ) -> Document:
        """Returns a document of a frozen prefix; see `Document` for the arguments."""
        return Document(
            tokenizer=self.llm.tokenizer,
            prefix=prefix,
            # Questions of similar lengths share a plan and the flattened model.
            suffixes=functools.lru_cache(maxsize=8)(functools.partial(self.suffixes, prefix.generator)),
            options=self._describe(prefix.generator.policies[-1]),
            context=context,
            messages=messages,
            template_options=template_options,
            seed=seed,
        )

    def restore(self, save: Save) -> Document:
        """Returns the document of a save, which has these options."""
        notes = save.notes
        distinct = [policy_of(description) for description in notes["policies"]]
        plan = Plan(
            self.llm.model,
            [distinct[number] for number in notes["layers"]],
            max_prompt_tokens=notes["max_prompt_tokens"],
            max_new_tokens=0,
            context_tokens=notes["context_tokens"],
            kv_dtype=_as_tuple(notes["kv_dtype"]),
            streaming=notes["streaming"],
            is_short=notes["is_short"],
        )
        generator = self._generator_of(plan)
        prefix = Prefix(generator, tuple(notes["tokens"]), generator.init_state()).freeze().restore(save)
        context, messages, template_options = None, notes["messages"], notes["template_options"]
        if messages is not None:
            context = render_context(self.llm.tokenizer, messages, template_options)
            messages = tuple(messages)
        return self.document(prefix, context, messages, template_options, notes["seed"])

    def _describe(self, resolved: Policy) -> dict[str, Any]:
        """Returns the options as JSON.

        Args:
            resolved: the policy that a function in place of a policy made.
        """
        policy, heads = self.policy, self.heads
        if isinstance(policy, Auto | PolicyChoice):
            described: Any = str(policy)
        else:
            described = kvjax.describe(policy if isinstance(policy, Policy) else resolved)
        return {
            "policy": described,
            "budget": None if self.budget is None else str(self.budget),
            "kv_dtype": self.kv_dtype,
            # A profile is not stored, because the document's policies have its shares.
            "heads": str(heads) if isinstance(heads, AutoHeads) else None if isinstance(heads, Profile) else heads,
            "allow_beyond_context": self.allow_beyond_context,
        }

    def document_generator(self, max_text_tokens: int, max_new_tokens: int, *, streaming: bool = False) -> Generator:
        """Returns sizes and policies for a text, with its own budget.

        Args:
            max_text_tokens: maximum length of the text; similar ones share compiled programs. A budget's share is of
                this length, rounded down by at most 1/32 (or 15 tokens), so that they often share slots, too.
            max_new_tokens: capacity of its suffixes.
            streaming: as for `read`.

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

    def suffixes(self, reader: Generator, max_new_tokens: int) -> Generator:
        """Returns sizes and policies of the tokens after a document's text.

        A suffix holds all its tokens in the document's format, up to `EXACT_SUFFIX_TOKENS`. A longer one has as many
        slots, or the budget of a policy that has one, and compresses them with the document's policy, if that can
        compress tokens while they come.

        Args:
            reader: sizes and policies with which the text is read (`document_generator`).
            max_new_tokens: maximum number of tokens after it.

        Returns:
            A generator with one row.
        """
        policy: Policy | Sequence[Policy] = kvjax.Exact(compact_every=min(_SUFFIX_BLOCK, max_new_tokens))
        if max_new_tokens > EXACT_SUFFIX_TOKENS:
            # Without a budget here, the policy has one.
            budget = None if self.budget is None else Budget.of(EXACT_SUFFIX_TOKENS)
            streamed = dataclasses.replace(self, budget=budget, kv_dtype=reader.kv_dtype)
            policy = streamed.plan(max_prompt_tokens=1, max_new_tokens=max_new_tokens, streaming=True).policies
        plan = Plan(
            self.llm.model,
            policy,
            max_prompt_tokens=reader.max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            context_tokens=reader.context_tokens,
            kv_dtype=reader.kv_dtype,
            is_suffix=True,
        )
        return self._generator_of(plan)

    # --- sizes ---

    def generator(self, *, batch: int = 1, **lengths: Any) -> Generator:
        """Returns a `Generator`, with which callers fork, save and continue generation states themselves.

        Args:
            batch: number of batch rows.
            **lengths: arguments of `plan`.

        Returns:
            The generator.
        """
        return self._generator_of(self.plan(**lengths), batch)

    def _generator_of(self, plan: Plan, batch: int = 1) -> Generator:
        """Returns a generator of a plan."""
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
            context_tokens: see `Plan`.

        Returns:
            The plan.
        """
        max_prompt_tokens = max(max_prompt_tokens, 1)
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
        return Plan(
            self.llm.model, resolved, **lengths, context_tokens=context_tokens, kv_dtype=kv_dtype, is_short=is_short
        )


def open_document(llm: TokenizedModel, directory: str | os.PathLike) -> Document:
    """Restores a document from `Document.save`; see `LanguageModel.open`."""
    save = open_save(directory, manifest(llm.model, llm.tokenizer))
    options = {name: _as_tuple(value) for name, value in save.notes["cache"].items()}
    if isinstance(options["policy"], dict):
        options["policy"] = policy_of(options["policy"])
    policy, budget, heads = cache_options(options["policy"], options["budget"], options["heads"])
    kv_dtype, allow_beyond_context = options["kv_dtype"], options["allow_beyond_context"]
    return CachedModel(llm, policy, budget, kv_dtype, heads, allow_beyond_context).restore(save)


def _as_tuple(value: Any) -> Any:
    """Returns lists of JSON as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def read_together(caches: Sequence[CachedModel], text: Prompt | Sequence[int], **options: Any) -> list[Document]:
    """Compresses a text with several caches of one model, which computes the text once.

    Args:
        caches: the caches.
        text: as for `CachedModel.read`.
        **options: further arguments of `read_steps`.

    Returns:
        One document per cache.
    """
    *_, documents = read_steps(caches, text, **options)
    assert documents is not None
    return documents


def read_steps(
    caches: Sequence[CachedModel],
    text: Prompt | Sequence[int],
    *,
    max_new_tokens: int = 512,
    max_text_tokens: int | None = None,
    chat: bool | None = None,
    seed: int = 0,
    template_options: TemplateOptions = None,
    streaming: bool = False,
) -> Iterator[list[Document] | None]:
    """Compresses a text like `read_together` in steps, between which the caller can do other work.

    Args:
        caches: the caches.
        text: this and the other arguments as for `CachedModel.read`. With `streaming`, the model computes the text once
            per cache.
        max_new_tokens: capacity for each question and its answer.
        max_text_tokens: capacity for the text.
        chat: whether the text is the start of a user's message.
        seed: seed of the policy's random numbers.
        template_options: variables of the chat template.
        streaming: whether the text is compressed while it is processed.

    Yields:
        None after every layer, finally one document per cache. A streamed text is one step.

    Raises:
        ValueError: for invalid options, and for a policy or budget that is not possible.
    """
    check_integer("max_new_tokens", max_new_tokens, minimum=1)
    tokens, context, messages = encode_text(caches[0].llm, text, chat, template_options)
    capacity = len(tokens) if max_text_tokens is None else check_integer("max_text_tokens", max_text_tokens, minimum=1)
    if len(tokens) > capacity:
        raise ValueError(f"the text of {len(tokens)} tokens exceeds max_text_tokens={capacity}")
    generators = [cache.document_generator(capacity, max_new_tokens, streaming=streaming) for cache in caches]
    states = [generator.init_state(seed) for generator in generators]
    if streaming:
        states = [generator.prefill(state, [tokens]) for generator, state in zip(generators, states, strict=True)]
    else:
        for result in prefill_together(generators, states, [tokens]):
            if result is None:
                yield None
            else:
                states = result
    yield [
        cache.document(Prefix(generator, tuple(tokens), state).freeze(), context, messages, template_options, seed)
        for cache, generator, state in zip(caches, generators, states, strict=True)
    ]


def encode_text(
    llm: TokenizedModel, text: Prompt | Sequence[int], chat: bool | None, template_options: TemplateOptions
) -> tuple[list[int], str | None, tuple[Message, ...] | None]:
    """Returns the tokens of a document's text, and the conversation that questions continue: rendered, and messages."""
    if (isinstance(text, str) and not text.strip()) or (isinstance(text, list | tuple | np.ndarray) and not len(text)):
        raise ValueError("the text is empty; pass a text, messages or token ids")
    if is_tokens(text):
        if chat:
            raise ValueError("chat=True needs a text or messages, got token ids")
        return [int(token) for token in text], None, None
    if not is_prompt(text):
        raise TypeError(f"a text must be a string, messages or token ids, got {type(text).__name__}")
    if isinstance(text, str) and not (llm.tokenizer.chat_template is not None if chat is None else chat):
        return llm.encode(text, template_options), None, None
    if chat is False:
        raise ValueError("chat=False needs a text, got messages")
    messages: tuple[Message, ...] = ({"role": "user", "content": text},) if isinstance(text, str) else tuple(text)
    context = render_context(llm.tokenizer, messages, template_options)
    return llm.tokenizer.encode_continuation(context, context=()), context, messages


def _parse_rows(rows: int | str, generator: Generator) -> int:
    """Returns a number of rows, given as such or as bytes for their caches."""
    is_integer = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
    count = int(rows) if is_integer or (isinstance(rows, str) and re.fullmatch(r"\d{1,9}", rows)) else 0
    if 1 <= count <= MAX_ROWS:
        return count
    limit = None
    if isinstance(rows, str):
        with contextlib.suppress(ValueError):
            limit = Budget.parse(rows).bytes
    if limit is None:
        raise ValueError(
            f"{shorten(rows)} batch rows are not possible: pass a number from 1 to {MAX_ROWS} (8), or bytes for their "
            "caches (2GiB)"
        )
    if limit < generator.row_bytes:
        raise ValueError(
            f"{format_bytes(limit)} are less than the {format_bytes(generator.row_bytes)} of one row's caches; allow "
            "more memory or use a smaller budget"
        )
    return min(limit // generator.row_bytes, MAX_ROWS)
