"""A text that was compressed once, before its questions are known, and answers many of them.

    document = llm.cache("auto", "25%").read(text)
    document.ask("Who wrote it?")
    document.ask(["When?", "Where?", "Why?"])        # one batch, which reads the text's entries once per step

A document is a shared `Prefix`, with the start of the conversation that questions continue. A question and its answer
have a separate cache for their tokens, the suffix.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, cast, overload

import jax
import numpy as np
from jaxtyping import Float, Int

from kvjax.messages import shorten
from kvjax_models import profile as profiles
from kvjax_models.citations import (
    SEPARATOR,
    Citation,
    attention_to_text,
    cited_heads,
    find_citations,
    token_pieces,
    token_spans,
)
from kvjax_models.engine import Completion, Engine, Usage
from kvjax_models.engine.answers import AnswerOptions, Answers, answer, stream
from kvjax_models.fingerprint import describe_model, tokenizer_fingerprint
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.kept import kept_shares
from kvjax_models.keywords import suggest_keywords
from kvjax_models.model.llama import Llama
from kvjax_models.prefix import Prefix
from kvjax_models.prompts import (
    Message,
    Prompt,
    TemplateOptions,
    as_prompts,
    check_prompt,
    is_prompt,
    render_context,
    render_question,
)
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling, SamplingOptions


class DocumentOptions(AnswerOptions, total=False):
    """The options of `Document.generate` that do not change the type of the result."""

    cite: bool


class AskOptions(DocumentOptions, total=False):
    """The options of `Document.ask` that do not change the type of the result."""

    separator: str
    answer_start: str


FORMAT = 3  # of saved documents, increased with every change of the entries or their meaning


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Document:
    """A compressed text. `CachedModel.read` makes one, `LanguageModel.open` restores a saved one.

    Attributes:
        tokenizer: tokenizer of the model.
        prefix: the text, and the chat template before it.
        options: policy, budget and format, as JSON.
        context: the rendered start of the conversation that questions continue; None for a plain text.
        messages: the messages of that conversation; None for a plain text.
        template_options: variables of the chat template.
        seed: seed of the policy's random numbers.
        plain_text: a text that was read without a chat template; None for messages and token ids.
    """

    tokenizer: Tokenizer
    prefix: Prefix
    options: Mapping[str, Any]
    context: str | None
    messages: tuple[Message, ...] | None
    template_options: TemplateOptions
    seed: int
    plain_text: str | None = None

    @overload
    def ask(self, question: Prompt, **options: Unpack[AskOptions]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def ask(self, question: Sequence[Prompt], **options: Unpack[AskOptions]) -> list[str]: ...
    @overload
    def ask(  # type: ignore[overload-overlap]
        self, question: Prompt, *, return_details: Literal[True], **options: Unpack[AskOptions]
    ) -> tuple[Completion, Usage]: ...
    @overload
    def ask(
        self, question: Sequence[Prompt], *, return_details: Literal[True], **options: Unpack[AskOptions]
    ) -> tuple[list[Completion], Usage]: ...
    @overload
    def ask(
        self,
        question: Prompt | Sequence[Prompt],
        *,
        n: int,
        return_details: bool = False,
        **options: Unpack[AskOptions],
    ) -> Answers: ...

    @suggest_keywords(SamplingOptions)
    def ask(
        self,
        question: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        n: int = 1,
        separator: str = "\n\n",
        answer_start: str = "",
        cite: bool = False,
        return_details: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Answers:
        """Answers questions about the text in the model's chat template; the document does not change.

        Args:
            question: a text, which follows the document in the same message of the user, or messages, of which the
                first one does; or a list of such questions, which are answered as one batch.
            max_new_tokens: maximum number of new tokens; by default up to the document's capacity.
            stop: strings that finish an answer and are not part of it.
            seed: seed of sampling; answer i of a list has seed + i.
            n: number of answers per question.
            separator: text between the document and a question that continues its last message.
            answer_start: text with which every answer starts; not part of the result.
            cite: whether every `Completion` has citations; see `Document.cite`. Needs `return_details`.
            return_details: whether to return `Completion`s and a `Usage` in place of texts.
            **sampling: parameters of `Sampling`, such as `temperature`.

        Returns:
            As `CachedModel.generate`: the answer, or a list of answers; with n > 1 a list of n answers for each
            question; with `return_details` a pair of `Completion`s and a `Usage`.

        Raises:
            ValueError: if the document is a plain text, the template cannot be split after the text, a question and
                its answer exceed the capacity, or citations are not possible.
            TypeError: if a question is neither a text nor a list of messages.
        """
        is_single = is_prompt(question)
        questions: Any = [question] if is_single else as_prompts(question)
        prompts = [self.encode(one, separator=separator, answer_start=answer_start) for one in questions]
        return self._answer(
            prompts,
            is_single=is_single,
            n=n,
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
            cite=cite,
            return_details=return_details,
            sampling=sampling,
        )

    @overload
    def generate(self, text: str, **options: Unpack[DocumentOptions]) -> str: ...  # type: ignore[overload-overlap]
    @overload
    def generate(self, text: Sequence[str], **options: Unpack[DocumentOptions]) -> list[str]: ...
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, text: str, *, return_details: Literal[True], **options: Unpack[DocumentOptions]
    ) -> tuple[Completion, Usage]: ...
    @overload
    def generate(
        self, text: Sequence[str], *, return_details: Literal[True], **options: Unpack[DocumentOptions]
    ) -> tuple[list[Completion], Usage]: ...
    @overload
    def generate(
        self, text: str | Sequence[str], *, n: int, return_details: bool = False, **options: Unpack[DocumentOptions]
    ) -> Answers: ...

    @suggest_keywords(SamplingOptions)
    def generate(
        self,
        text: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        n: int = 1,
        cite: bool = False,
        return_details: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Answers:
        """Continues the text with further text and new tokens, without a chat template.

        See `ask` for the other arguments.

        Args:
            text: text that follows the document, or a list of alternatives; "" for none.

        Returns:
            The new text, or a list with one per alternative, as for `ask`.

        Raises:
            ValueError: if text and new tokens exceed the capacity, or citations are not possible.
            TypeError: if the text is not a string.
        """
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise TypeError("text must be a string or a list of strings; ask takes messages")
        return self._answer(
            [self._encode_text(one) for one in texts],
            is_single=isinstance(text, str),
            n=n,
            max_new_tokens=max_new_tokens,
            stop=stop,
            seed=seed,
            cite=cite,
            return_details=return_details,
            sampling=sampling,
        )

    @suggest_keywords(SamplingOptions)
    def stream(
        self,
        question: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        stream_interval: int = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[str]:
        """Answers a question, or continues a plain text, and yields the new text during generation.

        See `ask`, or `generate` for a plain text, for the other arguments.

        Args:
            stream_interval: tokens per yield; larger intervals are faster.

        Yields:
            Parts of the answer, in order.
        """
        prompt = self._encode_text(cast(str, question)) if self.context is None else self.encode(question)
        engine = self.engine(rows=1, stream_interval=stream_interval)
        options: dict[str, Any] = {"stop": stop, "max_new_tokens": max_new_tokens, "seed": seed}
        yield from stream(engine, prompt, self.prefix, sampling=Sampling(**sampling), **options)

    def encode(
        self,
        question: Prompt,
        *,
        separator: str = "\n\n",
        answer_start: str = "",
        template_options: TemplateOptions = None,
    ) -> list[int]:
        """Returns the tokens that follow the text: the question in the chat template, and the start of the answer.

        See `ask` for the other arguments.

        Args:
            question: a text, or messages.
            template_options: variables of the chat template, in addition to those the text was read with; they must
                not change how it renders the text.

        Returns:
            Token ids.

        Raises:
            ValueError: as for `ask`, or if `template_options` change the text.
        """
        if self.context is None or self.messages is None:
            raise ValueError(
                "the document is a plain text, so that it cannot be asked in a chat template; continue it with "
                "generate, or read the text with chat=True"
            )
        check_prompt(question)
        options = self.template_options
        if template_options:
            options = {**(options or {}), **template_options}
            if render_context(self.tokenizer, self.messages, options) != self.context:
                raise ValueError(
                    f"template_options={shorten(template_options)} change how the chat template renders the document, "
                    "which was read without them; read it again with these options"
                )
        text = render_question(self.tokenizer, self.messages, self.context, question, separator, options)
        return self.tokenizer.encode_continuation(text + answer_start, self.tokens)

    def with_tokenizer(self, tokenizer: Tokenizer) -> "Document":
        """Returns the document with a tokenizer that treats special tokens in texts differently."""
        if tokenizer.parse_special == self.tokenizer.parse_special:
            return self
        context = None if self.messages is None else render_context(tokenizer, self.messages, self.template_options)
        return dataclasses.replace(self, tokenizer=tokenizer, context=context)

    def _encode_text(self, text: str) -> list[int]:
        """Returns the tokens of a text that follows the document without a chat template."""
        return self.tokenizer.encode_continuation(self.tokenizer.escape(text), self.tokens) if text else []

    def _answer(self, prompts: Sequence[Sequence[int]], *, n: int, cite: bool, **options: Any) -> Answers:
        if not prompts:
            raise ValueError("the list of questions is empty; pass at least one")
        if cite:
            if not options["return_details"]:
                raise ValueError("citations are part of the details; pass return_details=True")
            self.check_citable()
        answers = answer(self.engine, prompts, self.prefix, n=n, **options)
        if not cite:
            return answers

        def with_citations(one: Completion) -> Completion:
            return dataclasses.replace(one, citations=self.cite(prompts[one.number // n], one.tokens))

        completions, usage = cast(tuple[Any, Usage], answers)
        return jax.tree.map(with_citations, completions), usage

    def cite(self, question: Sequence[int], answer: Sequence[int]) -> tuple[Citation, ...]:
        """Returns the parts of the text that the model attended to while it answered a question.

        The model processes question and answer once more. Retrieving heads of its profile must keep every token of the
        text, as in `auto` and in a full cache. Their attention is summed over sentences, or parts of at most 200
        characters; see `kvjax_models.citations`.

        Args:
            question: token ids between the text and the answer; see `encode`.
            answer: token ids of the answer, such as `Completion.tokens`.

        Returns:
            Up to three parts, the one with most attention first.

        Raises:
            ValueError: if question and answer exceed the capacity, the document is on a mesh, or no retrieving head
                keeps every token.
        """
        heads = cited_heads(self.prefix, self._profile)
        tokens = [*question, *answer[:-1]]  # the last token was predicted from the others
        self._check_suffix(len(tokens))
        if not tokens:
            return ()
        first_query = max(len(question) - 1, 0)
        attention = attention_to_text(self.prefix, self.suffix_sizes(len(tokens)), tokens, first_query, heads)
        return find_citations(self.text, self._token_spans, attention)

    def check_citable(self) -> None:
        """Checks that answers can have citations, for callers that answer first.

        Raises:
            ValueError: if the document is on a mesh, or no retrieving head keeps every token.
        """
        cited_heads(self.prefix, self._profile)

    @functools.cached_property
    def _profile(self) -> profiles.Profile | None:
        """The profile of the model, measured if it is unknown."""
        return profiles.find_or_measure(self.prefix.generator.model, self.tokenizer)

    @functools.cached_property
    def text(self) -> str:
        """The text that was read, to which citations refer, without the chat template.

        The contents of a conversation's messages are joined by empty lines, without those that are no strings; token
        ids are decoded.
        """
        if self.messages is not None:
            return SEPARATOR.join(_contents(self.messages))
        return "".join(self._pieces) if self.plain_text is None else self.plain_text

    @functools.cached_property
    def _pieces(self) -> list[str]:
        """The text of every token; see `token_pieces`."""
        return token_pieces(self.tokenizer, self.tokens)

    @functools.cached_property
    def _token_spans(self) -> Int[np.ndarray, "T 2"]:
        """Start and end of the characters of every token in `text`; both are 0 for tokens of the chat template."""
        if self.messages is None and self.plain_text is None:
            ends = np.cumsum([len(piece) for piece in self._pieces])
            return np.stack([[0, *ends[:-1]], ends], axis=1)
        contents = [self.text] if self.messages is None else _contents(self.messages)
        for parse_special in (False, True):  # the tokenizer may not be the one that read the text; see `with_tokenizer`
            one = self.with_tokenizer(dataclasses.replace(self.tokenizer, parse_special=parse_special))
            rendered = one.tokenizer.escape(self.text) if one.context is None else one.context
            if (spans := token_spans(one.tokenizer, self.tokens, rendered, contents)) is not None:
                return spans
        raise ValueError("the tokenizer encodes the text of the document differently than when it was read")

    def engine(self, *, rows: int, **options: Any) -> Engine:
        """Returns an engine whose requests continue documents.

        Args:
            rows: number of questions that are answered at a time.
            **options: further arguments of `Engine`.

        Returns:
            The engine.
        """
        return Engine(self.prefix.generator.model, self.tokenizer, None, rows=rows, **options)

    def suffix_sizes(self, max_new_tokens: int | None = None) -> Generator:
        """Returns sizes and policies of the tokens after the text, with one row.

        Args:
            max_new_tokens: capacity for question and answer; by default the document's.
        """
        assert self.prefix.rows is not None
        return self.prefix.rows(0, self.max_new_tokens if max_new_tokens is None else max_new_tokens)[-1]

    def score(self, continuations: Sequence[Sequence[int]]) -> list[Float[np.ndarray, "T"]]:
        """Scores continuations of the text, as one batch.

        Args:
            continuations: token ids that follow the text, such as a question (`encode`) and an answer.

        Returns:
            The natural log-probability of each token, float32, for every continuation.

        Raises:
            ValueError: if a continuation is empty or exceeds the document's capacity.
        """
        self._check_suffix(max(map(len, continuations)))
        return self.prefix.score(self.suffix_sizes().with_batch(len(continuations)), continuations)

    def _check_suffix(self, tokens: int) -> None:
        """Checks that a number of tokens fits after the text."""
        if tokens > self.max_new_tokens:
            raise ValueError(
                f"a continuation of {tokens} tokens exceeds the capacity max_new_tokens={self.max_new_tokens} that "
                "the document was read with"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the text and of the chat template before it."""
        return self.prefix.tokens

    @property
    def num_tokens(self) -> int:
        """Length of the text in tokens."""
        return self.prefix.num_tokens

    @property
    def max_new_tokens(self) -> int:
        """Capacity for each question and its answer, in tokens."""
        return self.prefix.max_suffix_tokens

    @property
    def cache_bytes(self) -> int:
        """Bytes of the compressed text on the device."""
        return self.prefix.cache_bytes

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of a full bfloat16 cache of the text."""
        return self.prefix.full_cache_bytes

    def save(self, directory: str | os.PathLike) -> None:
        """Saves the compressed text with its policy, budget and format, without the model's weights.

        Args:
            directory: a directory without saves.

        Raises:
            ValueError: if the directory has a save.
            OSError: if it cannot be written.
        """
        notes = {
            "cache": dict(self.options),
            "messages": self.messages,
            "text": self.plain_text,
            "template_options": self.template_options,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }
        self.prefix.save(directory, manifest(self.prefix.generator.model, self.tokenizer), notes)

    def kept(self) -> Float[np.ndarray, "L H_kv T"]:
        """Returns the share of a slot that every token of the text has in the cache.

        A token with a slot to itself has 1, a token that is merged with n - 1 others has 1/n, and a dropped token
        has 0. Policies that sample with replacement may give a token more than one slot. Retrieval policies hold all
        tokens: 1 everywhere. Layers with a sliding window have 1 for the tokens of their window. For a quantized
        cache, the tokens are those that the policy keeps without quantization.

        The model computes the text once more, and the policy compresses it with marked values (see
        `kvjax_models.kept`).

        Returns:
            Shares, float32, for every layer, KV head and token of the text.

        Raises:
            ValueError: if the document is on a mesh or its text was streamed, or the policy's entries are not means of
                tokens.
        """
        return kept_shares(self.prefix.generator, self.tokens, self.seed)

    def describe_share(self) -> str:
        """Describes how much of a full cache the document holds; see `Generator.describe_share`."""
        return self.prefix.describe_share()

    def __repr__(self) -> str:
        """Returns the sizes, without arrays."""
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items() if value)
        return (
            f"Document({self.num_tokens} tokens, {self.cache_bytes:,} bytes, {self.describe_share()}, "
            f"max_new_tokens={self.max_new_tokens}, cache({options}))"
        )


def _contents(messages: Sequence[Message]) -> list[str]:
    """Returns the contents of messages that are texts."""
    return [message["content"] for message in messages if isinstance(message["content"], str)]


def manifest(model: Llama, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the values that must be equal when a document is opened, as JSON."""
    return {"format": FORMAT, "model": describe_model(model), "tokenizer": tokenizer_fingerprint(tokenizer)}
