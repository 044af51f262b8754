"""A text that was compressed once, before its questions are known, and answers many of them.

    document = llm.cache("auto", "25%").read(text)
    document.ask("Who wrote it?")
    document.ask(["When?", "Where?", "Why?"])        # one batch, which reads the text's entries once per step

A document is frozen. Every question continues it with a separate cache for the tokens of question and
answer, the tail.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

import kvjax
from kvjax.budget import Budget
from kvjax.messages import shorten
from kvjax.policy import Policy, policy_of
from kvjax.registry import PolicyChoice
from kvjax.spec import check_integer
from kvjax_models import compile_cache
from kvjax_models.engine import Engine, seed_of_prompt
from kvjax_models.fingerprint import tokenizer_fingerprint
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.sampling import GREEDY, Sampling, SamplingOptions
from kvjax_models.generation.saved_states import describe_model
from kvjax_models.generation.state import GenerationState
from kvjax_models.kept import kept_shares
from kvjax_models.keywords import suggest_keywords
from kvjax_models.model.recurrent import RecurrentState
from kvjax_models.profile import Profile
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
from kvjax_models.saves import Saves, describe_difference
from kvjax_models.sharding import replicate
from kvjax_models.usage import collect

if TYPE_CHECKING:
    from kvjax_models.cache import CachedModel
    from kvjax_models.language_model import LanguageModel

FORMAT = 2  # of saved documents, increased with every change of the entries or their meaning


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Document:
    """A compressed text. `CachedModel.read` makes one, `LanguageModel.open` restores a saved one.

    Attributes:
        cache: model, policy, budget and format.
        generator: sizes and policies with which the text was read.
        texts: the entries of the text, of every layer with attention.
        logits: float32 logits of the token after the text.
        tokens: token ids of the text and of the chat template before it.
        messages: the conversation that questions continue; None for a plain text.
        template_options: variables of the chat template.
        max_new_tokens: capacity for each question and its answer, in tokens.
        seed: seed of the policy's random numbers.
        recurrent: states after the text of the other layers, in a hybrid model; every question starts with a copy.
    """

    cache: "CachedModel"
    generator: Generator
    texts: tuple[kvjax.FrozenCache, ...]
    logits: Float[Array, "1 V"]
    tokens: tuple[int, ...]
    messages: tuple[Message, ...] | None
    template_options: TemplateOptions
    max_new_tokens: int
    seed: int
    recurrent: tuple[RecurrentState, ...] = ()

    @suggest_keywords(SamplingOptions)
    def ask(
        self,
        question: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        separator: str = "\n\n",
        answer_start: str = "",
        return_details: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """Answers questions about the text in the model's chat template; the document does not change.

        Args:
            question: a text, which follows the document in the same message of the user, or messages, of which the
                first one does; or a list of such questions, which are answered as one batch.
            max_new_tokens: maximum number of new tokens; by default the capacity of the tail.
            stop: strings that finish an answer and are not part of it.
            seed: seed of sampling; question n of a list has seed + n.
            separator: text between the document and a question that continues its last message.
            answer_start: text with which every answer starts; not part of the result.
            return_details: whether to return `Completion`s and a `Usage` in place of texts.
            **sampling: parameters of `Sampling`, such as `temperature`.

        Returns:
            The answer, or a list of answers; with `return_details` a pair of `Completion`s and a `Usage`.

        Raises:
            ValueError: if the document is a plain text, the template cannot be split after the text, or a question
                and its answer exceed the capacity.
            TypeError: if a question is neither a text nor a list of messages.
        """
        is_single = is_prompt(question)
        questions: Any = [question] if is_single else as_prompts(question)
        prompts = [self.encode(one, separator=separator, answer_start=answer_start) for one in questions]
        return self._answer(prompts, is_single, max_new_tokens, stop, seed, return_details, sampling)

    @suggest_keywords(SamplingOptions)
    def generate(
        self,
        text: str | Sequence[str],
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        return_details: bool = False,
        **sampling: Unpack[SamplingOptions],
    ) -> Any:
        """Continues the text with further text and new tokens, without a chat template.

        Args:
            text: text that follows the document, or a list of alternatives; "" for none.
            max_new_tokens: as for `ask`.
            stop: as for `ask`.
            seed: as for `ask`.
            return_details: as for `ask`.
            **sampling: as for `ask`.

        Returns:
            The new text, or a list with one per alternative; with `return_details` as for `ask`.

        Raises:
            ValueError: if text and new tokens exceed the capacity.
            TypeError: if the text is not a string.
        """
        is_single = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list | tuple) or not all(isinstance(one, str) for one in texts):
            raise TypeError("text must be a string or a list of strings; ask takes messages")
        tokenizer = self.cache.llm.tokenizer
        prompts = [tokenizer.encode_continuation(tokenizer.escape(one), self.tokens) if one else [] for one in texts]
        return self._answer(prompts, is_single, max_new_tokens, stop, seed, return_details, sampling)

    def encode(
        self,
        question: Prompt,
        *,
        separator: str = "\n\n",
        answer_start: str = "",
        template_options: TemplateOptions = None,
    ) -> list[int]:
        """Returns the tokens that follow the text: the question in the chat template, and the start of the answer.

        Args:
            question: a text, or messages.
            separator: as for `ask`.
            answer_start: as for `ask`.
            template_options: variables of the chat template, in addition to those the text was read with; they must
                not change how it renders the text.

        Returns:
            Token ids.

        Raises:
            ValueError: as for `ask`, or if `template_options` change the text.
        """
        if self.messages is None:
            raise ValueError(
                "the document is a plain text, so that it cannot be asked in a chat template; continue it with "
                "generate, or read the text with chat=True"
            )
        check_prompt(question)
        tokenizer, options = self.cache.llm.tokenizer, self.template_options
        if template_options:
            options = {**(options or {}), **template_options}
            before, after = (render_context(tokenizer, self.messages, one) for one in (self.template_options, options))
            if before != after:
                raise ValueError(
                    f"template_options={shorten(template_options)} change how the chat template renders the document, "
                    "which was read without them; read it again with these options"
                )
        text = render_question(tokenizer, self.messages, question, separator, options)
        return tokenizer.encode_continuation(text + answer_start, self.tokens)

    def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        is_single: bool,
        max_new_tokens: int | None,
        stop: str | Sequence[str],
        seed: int,
        return_details: bool,
        sampling: Mapping[str, Any],
    ) -> Any:
        """Generates one answer per prompt."""
        if not prompts:
            raise ValueError("the list of questions is empty; pass at least one")
        longest = max(map(len, prompts))
        if max_new_tokens is None:
            max_new_tokens = self.max_new_tokens - longest
            if max_new_tokens < 1:
                raise ValueError(
                    f"a question of {longest} tokens leaves no capacity for an answer: the document was read with "
                    f"max_new_tokens={self.max_new_tokens} for each question and its answer"
                )
        check_integer("max_new_tokens", max_new_tokens, minimum=1)
        engine = self.engine(rows=len(prompts), max_new_tokens=longest + max_new_tokens)
        for number, prompt in enumerate(prompts):
            engine.add(
                prompt,
                self,
                sampling=Sampling(**sampling),
                stop=stop,
                max_new_tokens=max_new_tokens,
                seed=seed_of_prompt(seed, number),
            )
        completions, usage = collect(engine, sum(map(len, prompts)), self)
        if return_details:
            return (completions[0] if is_single else completions), usage
        return completions[0].text if is_single else [one.text for one in completions]

    def engine(self, *, rows: int, max_new_tokens: int | None = None, **options: Any) -> Engine:
        """Returns an engine whose rows ask this document.

        Args:
            rows: number of questions that are answered at a time.
            max_new_tokens: capacity of each row for question and answer; by default the document's. Similar
                capacities share compiled programs.
            **options: further arguments of `Engine`.

        Returns:
            The engine.
        """
        tails = self.tails(rows, max_new_tokens)
        return Engine(self.cache.llm.tokenizer, tails, documents=1, reader=self.generator, **options)

    def score(self, continuations: Sequence[Sequence[int]]) -> list[Float[np.ndarray, "T"]]:
        """Scores continuations of the text, as one batch.

        Args:
            continuations: token ids that follow the text, such as a question (`encode`) and an answer.

        Returns:
            The natural log-probability of each token, float32, for every continuation.

        Raises:
            ValueError: if a continuation is empty or exceeds the document's capacity.
        """
        if (longest := max(map(len, continuations))) > self.max_new_tokens:
            raise ValueError(
                f"a continuation of {longest} tokens exceeds the capacity max_new_tokens={self.max_new_tokens} that "
                "the document was read with"
            )
        tails = self.tails(len(continuations))
        return tails.score(self.tail_state(tails), continuations, self.texts)[1]

    def tails(self, rows: int, max_new_tokens: int | None = None) -> Generator:
        """Returns sizes and policies of the tokens after the text.

        Args:
            rows: number of batch rows.
            max_new_tokens: as for `engine`.
        """
        needed = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        capacity = min(compile_cache.length_bucket(needed)[-1], max(needed, self.max_new_tokens))
        return self.cache.tails(self.generator, capacity).with_batch(rows)

    def tail_state(self, tails: Generator, seed: int = 0, sampling: Sampling = GREEDY) -> GenerationState:
        """Returns the state of rows before their first token after the text.

        Args:
            tails: a generator of tails.
            seed: seed of sampling and of the tail's policy.
            sampling: parameters of sampling.
        """
        state = tails.init_state(seed, sampling)
        in_prompt = np.zeros(state.sampling.in_prompt.shape, bool)
        in_prompt[:, list(self.tokens)] = True
        return dataclasses.replace(
            state,
            logits=_copy_to_rows(self.logits, state.logits),
            recurrent=jax.tree.map(_copy_to_rows, self.recurrent, state.recurrent),
            positions=replicate(np.full(tails.batch, self.num_tokens, np.int32), tails.mesh),
            sampling=dataclasses.replace(state.sampling, in_prompt=replicate(in_prompt, tails.mesh)),
        )

    def check_engine(self, tails: Generator, reader: Generator | None) -> None:
        """Checks that the rows of an engine can continue the document.

        Args:
            tails: sizes and policies of the rows.
            reader: sizes and policies of the engine's documents.

        Raises:
            ValueError: if policy, format or sizes differ, with the first difference.
        """
        if tails.max_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"{tails.max_new_tokens} tokens of question and answer exceed the capacity "
                f"max_new_tokens={self.max_new_tokens} that the document was read with"
            )
        own = self.generator
        expected = own if reader is None else reader
        if own.model is not expected.model:
            raise ValueError("the document does not fit into the engine: it belongs to another model")
        names = ("max_prompt_tokens", "kv_dtype", "streaming", "context_tokens")
        options = [(name, getattr(own, name), getattr(expected, name)) for name in names]
        options += [("policy", *layer) for layer in zip(own.policies, expected.policies, strict=True)]
        for name, ours, theirs in options:
            if ours != theirs:
                raise ValueError(
                    f"the document does not fit into the engine: it has {name}={shorten(ours)}, the engine "
                    f"{shorten(theirs)}; read it with the engine's cache, max_text_tokens and max_new_tokens"
                )

    @property
    def num_tokens(self) -> int:
        """Length of the text in tokens."""
        return len(self.tokens)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the compressed text on the device, in the dtype of the model where it is not quantized.

        A hybrid model's recurrent states count, here and in `full_cache_bytes`; budgets do not include them.
        """
        return kvjax.cache_bytes(self.texts).device + self.generator.recurrent_row_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the compressed text in host memory."""
        return kvjax.cache_bytes(self.texts).host

    @property
    def read_bytes(self) -> int:
        """Bytes of the compressed text that one decode step reads; the rows read copies of recurrent states."""
        return sum(map(kvjax.read_bytes, self.texts))

    @property
    def full_cache_bytes(self) -> int:
        """Bytes of a full bfloat16 cache of the text."""
        specs = self.generator.specs
        caches = sum(spec.full_cache_bytes(min(self.num_tokens, spec.window or self.num_tokens)) for spec in specs)
        return caches + self.generator.recurrent_row_bytes

    def save(self, directory: str | os.PathLike) -> None:
        """Saves the compressed text with its policy, budget and format, without the model's weights.

        Args:
            directory: a directory without saves.

        Raises:
            ValueError: if the directory has a save.
            OSError: if it cannot be written.
        """
        saves = Saves(directory, is_document=True)
        saves.lock(require_empty=True)
        distinct = list(dict.fromkeys(self.generator.policies))
        cache, generator = self.cache, self.generator
        notes = {
            "cache": {
                "policy": _describe_choice(cache.policy, generator.policies[-1]),
                "budget": None if cache.budget is None else str(Budget.of(cache.budget)),
                "kv_dtype": cache.kv_dtype,
                "heads": None if isinstance(cache.heads, Profile) else cache.heads,
                "allow_beyond_context": cache.allow_beyond_context,
            },
            "policies": [kvjax.describe(policy) for policy in distinct],
            "layers": [distinct.index(policy) for policy in generator.policies],
            "kv_dtype": generator.kv_dtype,
            "max_prompt_tokens": generator.max_prompt_tokens,
            "context_tokens": generator.context_tokens,
            "streaming": generator.streaming,
            "is_short": generator.is_short,
            "tokens": self.tokens,
            "messages": self.messages,
            "template_options": self.template_options,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
        }
        arrays = {"texts": self.texts, "logits": self.logits, "recurrent": self.recurrent}
        saves.save(0, arrays, _manifest(cache.llm), notes)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of the compressed text, named as by `Generator.cache_sizes`; see also `describe_share`."""
        return {
            "cache_bytes": self.cache_bytes,
            "host_bytes": self.host_bytes,
            "read_bytes": self.read_bytes,
            "full_cache_bytes": self.full_cache_bytes,
        }

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
        return kept_shares(self.generator, self.tokens, self.seed)

    def describe_share(self) -> str:
        """Describes how much of a full cache the document holds; see `Generator.describe_share`."""
        return self.generator.describe_share(self.sizes, self.num_tokens)

    def __repr__(self) -> str:
        """Returns the sizes, without arrays."""
        return (
            f"Document({self.num_tokens} tokens, {self.cache_bytes:,} bytes, {self.describe_share()}, "
            f"max_new_tokens={self.max_new_tokens}, {self.cache})"
        )


def _describe_choice(policy: Any, resolved: Policy) -> Any:
    """Returns a policy as JSON: as text if it was chosen by text, otherwise its settings."""
    if isinstance(policy, str | PolicyChoice):
        return str(policy)
    return kvjax.describe(policy if isinstance(policy, Policy) else resolved)


def check_empty(directory: str | os.PathLike) -> None:
    """Checks that a document can be saved to a directory, before the work of reading it.

    Raises:
        ValueError: if it has a save.
        OSError: if it cannot be written.
    """
    Saves(directory, is_document=True).lock(require_empty=True)


def open_document(llm: "LanguageModel", directory: str | os.PathLike) -> Document:
    """Restores a document from `Document.save`; see `LanguageModel.open`."""
    saves = Saves(directory, is_document=True)
    step = saves.newest()
    if difference := describe_difference(_manifest(llm), saves.manifest(step)):
        raise ValueError(f"the document in {saves.directory} belongs to another model: {difference}")
    notes = saves.notes(step)
    policies = [policy_of(description) for description in notes["policies"]]
    needs_scorer = any(policy.requires.predicted_scores for policy in policies)
    generator = Generator(
        llm.model,
        [policies[number] for number in notes["layers"]],
        batch=1,
        max_prompt_tokens=notes["max_prompt_tokens"],
        max_new_tokens=0,
        eos=llm.tokenizer.eos_ids,
        streaming=notes["streaming"],
        allow_beyond_context=notes["cache"]["allow_beyond_context"],
        kv_dtype=_as_tuple(notes["kv_dtype"]),
        scorer=llm.scorer() if needs_scorer else None,
        context_tokens=notes["context_tokens"],
        is_short=notes["is_short"],
    )
    state = generator.init_state()
    like = {"texts": freeze_layers(state), "logits": state.logits, "recurrent": state.recurrent}
    arrays = saves.restore(step, like)
    options = dict(notes["cache"])
    if isinstance(options["policy"], dict):
        options["policy"] = policy_of(options["policy"])
    return Document(
        cache=llm.cache(**options | {"kv_dtype": _as_tuple(options["kv_dtype"]), "heads": _as_tuple(options["heads"])}),
        generator=generator,
        texts=arrays["texts"],
        logits=arrays["logits"],
        tokens=tuple(notes["tokens"]),
        messages=None if notes["messages"] is None else tuple(notes["messages"]),
        template_options=notes["template_options"],
        max_new_tokens=notes["max_new_tokens"],
        seed=notes["seed"],
        recurrent=arrays["recurrent"],
    )


def _manifest(llm: "LanguageModel") -> dict[str, Any]:
    """Returns the values that must be equal when a document is restored."""
    return {
        "format": FORMAT,
        "model": describe_model(llm.model),
        "tokenizer": tokenizer_fingerprint(llm.tokenizer),
    }


def _as_tuple(value: Any) -> Any:
    """Returns lists of JSON as tuples."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _copy_to_rows(x: Array, rows: Array) -> Array:
    """Returns a copy of an array of one row for as many rows as another one has."""
    return jnp.copy(jnp.broadcast_to(x, rows.shape))


def freeze_layers(state: GenerationState) -> tuple[kvjax.FrozenCache, ...]:
    """Returns the frozen caches of a settled state with one row."""
    return tuple(kvjax.freeze(cache, state.counters) for cache in state.layers)
