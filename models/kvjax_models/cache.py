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

import numpy as np

import kvjax
from kvjax.budget import Budget
from kvjax.messages import shorten
from kvjax.policy import Policy, policy_of
from kvjax.registry import PolicyChoice
from kvjax.spec import check_integer
from kvjax_models.cache_plans import CachePlans
from kvjax_models.document import Document, manifest
from kvjax_models.engine import Completion, Engine, Usage, seed_of_prompt
from kvjax_models.engine.answers import AnswerOptions, Answers, answer, stream
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
from kvjax_models.runner.auto_policy import Auto, AutoHeads, cache_options
from kvjax_models.runner.generator import Generator, prefill_together
from kvjax_models.runner.plan import Plan
from kvjax_models.runner.sampling import Sampling, SamplingOptions
from kvjax_models.runner.state import GenerationState
from kvjax_models.saves import Save
from kvjax_models.tokenized_model import TokenizedModel


class GenerateOptions(AnswerOptions, total=False):
    """The options of `CachedModel.generate` that do not change the type of the result."""

    template_options: TemplateOptions


MAX_ROWS = 2**16  # of a batch; far above what any device holds


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CachedModel(CachePlans):
    """A model with the options of its KV cache; `LanguageModel.cache` makes one, with values in place of text."""

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
        return answer(
            self.engine,
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

        See `generate` for the other arguments.

        Args:
            prompt: a text, or a list of messages.
            stream_interval: tokens per yield; larger intervals are faster.

        Yields:
            Parts of the new text, in order; joined they are the entire new text.
        """
        warn_of_file_name(prompt)
        tokens = self.llm.encode(prompt, template_options)
        engine = self.engine(rows=1, stream_interval=stream_interval)
        options: dict[str, Any] = {"stop": stop, "max_new_tokens": max_new_tokens, "seed": seed}
        yield from stream(engine, tokens, sampling=Sampling(**sampling), **options)

    @suggest_keywords(SamplingOptions)
    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        batch_size: int | str = 8,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        max_prefill_tokens: int | None = None,
        template_options: TemplateOptions = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Completion]:
        """Continues any number of texts or conversations by continuous batching (see `kvjax_models.engine`).

        A finished sequence frees its row for the next prompt. Prompts are read from the iterable when a row is free.
        See `generate` for the other arguments.

        Args:
            prompts: texts, or lists of messages.
            batch_size: maximum number of batch rows, or bytes for the caches of all rows ("2GiB").
            seed: seed of the first prompt; prompt n has seed + n, modulo 2**32. A completion does not depend on the
                other prompts of the batch: `generate` returns the same text for the prompt and its seed.
            max_prefill_tokens: see `Engine`; a small number reduces the latency of running sequences.

        Yields:
            Completions in the order of the prompts.

        Raises:
            ValueError: for invalid options and prompts, with the number of the prompt.
        """
        rows, max_bytes = parse_rows(batch_size)
        engine = self.engine(rows=rows, max_bytes=max_bytes, max_prefill_tokens=max_prefill_tokens)

        def add_requests() -> Iterator[int]:
            """Adds a request for every prompt, which has its number."""
            for number, prompt in enumerate(as_prompts(prompts)):
                options: dict[str, Any] = {"stop": stop, "max_new_tokens": max_new_tokens}
                tokens, prompt_seed = self.llm.encode(prompt, template_options), seed_of_prompt(seed, number)
                try:
                    yield engine.add(tokens, sampling=Sampling(**sampling), seed=prompt_seed, **options)
                except ValueError as error:
                    raise ValueError(f"prompt {number}: {error}") from error

        finished: dict[int, Completion] = {}
        next_number = 0
        for completion in engine.completions(requests=add_requests()):
            finished[completion.number] = completion
            while next_number in finished:
                yield finished.pop(next_number)
                next_number += 1

    @suggest_keywords()
    def engine(
        self,
        *,
        rows: int = 8,
        max_bytes: int | str | None = None,
        streaming: bool = False,
        max_prefill_tokens: int | None = None,
        stream_interval: int | None = None,
    ) -> Engine:
        """Returns an engine, to which requests can be added while others run: prompts, and questions to documents.

        See `Engine` for the other arguments.

        Args:
            rows: maximum number of rows in use.
            max_bytes: maximum bytes of all rows' caches ("2GiB"); a request waits until its row fits.
            streaming: whether prompts are compressed while they are processed, in memory independent of their length;
                see `Plan`.

        Returns:
            The engine.
        """
        return Engine(
            self.llm.model,
            self.llm.tokenizer,
            functools.partial(self.rows, streaming=streaming),
            rows=rows,
            max_bytes=parse_bytes(max_bytes) if isinstance(max_bytes, str) else max_bytes,
            max_prefill_tokens=max_prefill_tokens,
            stream_interval=stream_interval,
        )

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
            max_text_tokens: capacity for the text, to which a budget's share refers; by default its length.
            chat: whether the text is the start of a user's message, in the model's chat template, so that
                `Document.ask` can continue it; by default if the model has a template. Not for token ids.
            seed: seed of the policy's random numbers.
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

    def _document(
        self, generator: Generator, tokens: Sequence[int], state: GenerationState, save: Save | None = None, **text: Any
    ) -> Document:
        """Returns the document of a state.

        Args:
            save: replaces the entries of the state.
            **text: fields of `Document` that describe the text.
        """
        prefix = Prefix.of(generator, tokens, state, rows=functools.partial(self.suffix_rows, generator))
        options = self._describe(generator.policies[-1])
        return Document(self.llm.tokenizer, prefix if save is None else prefix.restore(save), options, **text)

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
        messages, options = notes["messages"], notes["template_options"]
        return self._document(
            generator,
            notes["tokens"],
            generator.init_state(),
            save,
            context=None if messages is None else render_context(self.llm.tokenizer, messages, options),
            messages=None if messages is None else tuple(messages),
            template_options=options,
            seed=notes["seed"],
            plain_text=notes.get("text"),  # saves of earlier versions have none
        )

    def _describe(self, resolved: Policy) -> dict[str, Any]:
        """Returns the options as JSON.

        Args:
            resolved: the policy that a function in place of a policy made.
        """
        policy, heads = self.policy, self.heads
        if isinstance(policy, PolicyChoice):
            policy = policy.without_files()  # a save may be opened where a file of shares is not
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
        text: this and the other arguments as for `CachedModel.read`. With `streaming`, the model computes the text once
            per cache.
        max_new_tokens: capacity for each question and its answer.
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
    read: dict[str, Any] = {
        "context": context,
        "messages": messages,
        "template_options": template_options,
        "seed": seed,
        "plain_text": text if messages is None and isinstance(text, str) else None,
    }
    yield [
        cache._document(generator, tokens, state, **read)
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


def parse_rows(rows: int | str) -> tuple[int, int | None]:
    """Returns a maximum number of rows and a maximum of bytes of their caches.

    Args:
        rows: a number, or bytes ("2GiB").

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(rows, str) and not rows.isdigit():
        with contextlib.suppress(ValueError):
            return MAX_ROWS, parse_bytes(rows)
    is_integer = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
    count = int(rows) if is_integer or (isinstance(rows, str) and re.fullmatch(r"\d{1,9}", rows)) else 0
    if not 1 <= count <= MAX_ROWS:
        raise ValueError(
            f"{shorten(rows)} batch rows are not possible: pass a number from 1 to {MAX_ROWS} (8), or bytes for their "
            "caches (2GiB)"
        )
    return count, None


def parse_bytes(text: str) -> int:
    """Returns a number of bytes, given as text ("2GiB").

    Raises:
        ValueError: if it is none.
    """
    if (count := Budget.parse(text).bytes) is None:
        raise ValueError(f"{shorten(text)} is not a number of bytes; pass a number with a unit (2GiB)")
    return count
