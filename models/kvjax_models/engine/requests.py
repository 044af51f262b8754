"""Requests of an engine: their arguments, checked, and the sizes of their rows."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, cast

from kvjax.spec import MAX_TOKENS, check_integer
from kvjax_models import compile_cache
from kvjax_models.engine.scheduler import Waiting
from kvjax_models.formats.tokenizer import CONTEXT_TOKENS, Tokenizer
from kvjax_models.model.llama import Llama
from kvjax_models.prefix import Prefix, RowSizes
from kvjax_models.prompts import Prompt, TemplateOptions, encode_prompt, is_tokens
from kvjax_models.runner.answer_text import AnswerText
from kvjax_models.runner.constraints import Constraint, constraint_of
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling

_DEFAULT_NEW_TOKENS = 256


class HasPrefix(Protocol):
    """A text with a prefix, such as a document, which encodes the questions about it."""

    @property
    def prefix(self) -> Prefix:
        """The processed text."""

    def encode(self, question: Prompt) -> list[int]:
        """Returns the tokens that follow the text."""


@dataclasses.dataclass(frozen=True)
class Request:
    """A sequence to generate.

    Attributes:
        number: number of the request.
        prompt: token ids; with a prefix, those after it.
        prefix: the prefix that the sequence continues.
        sampling: parameters of sampling.
        stop: strings that finish the sequence.
        max_new_tokens: maximum number of new tokens.
        seed: seed of sampling.
        prompt_seed: seed of the policy's random numbers.
        keep: whether its last output has the sequence as a `Prefix`.
    """

    number: int
    prompt: tuple[int, ...]
    prefix: Prefix | None
    sampling: Sampling
    stop: tuple[str, ...]
    max_new_tokens: int
    seed: int
    prompt_seed: int
    keep: bool

    @property
    def shared(self) -> Prefix | None:
        """The prefix that the row shares with others."""
        return None if self.prefix is None else self.prefix.shared

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """The tokens before the answer that the row holds."""
        return self.prompt if self.prefix is None else (*self.prefix.copied_tokens, *self.prompt)

    @property
    def num_first(self) -> int:
        """`Prefix.num_first` of the sequence."""
        if self.prefix is None:
            return len(self.prompt)
        return 0 if self.prefix.is_shared else self.prefix.num_first

    @property
    def num_tokens(self) -> int:
        """Number of all tokens before the answer."""
        return len(self.prompt) + (0 if self.prefix is None else self.prefix.num_tokens)

    @property
    def context(self) -> list[int]:
        """The last tokens before the answer."""
        before = () if self.shared is None else self.shared.tokens
        return [*before[-CONTEXT_TOKENS:], *self.own_tokens[-CONTEXT_TOKENS:]][-CONTEXT_TOKENS:]


@dataclasses.dataclass(eq=False)
class RunningSequence:
    """A request with its row.

    Attributes:
        request: the request.
        sizes: the sizes that its row has in turn.
        level: which of them it has.
        answer: the new text.
        constraint: the tokens that may follow it; None for any.
    """

    request: Request
    sizes: tuple[Generator, ...]
    answer: AnswerText
    constraint: Constraint | None = None
    level: int = 0

    @property
    def size(self) -> Generator:
        """Size of the row."""
        return self.sizes[self.level]

    @property
    def must_grow(self) -> bool:
        """Whether the row has no capacity for another block."""
        if self.level == len(self.sizes) - 1:
            return False
        held = len(self.request.own_tokens) + len(self.answer.tokens)
        return held + self.size.block_size > self.size.plan.capacity


class RequestChecks:
    """Checks what requests need of a model."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, sizes: RowSizes | None) -> None:
        """Stores the arguments of `Engine`."""
        self._model, self._tokenizer, self._sizes = model, tokenizer, sizes

    def encode(
        self, prompt: Prompt | Sequence[int], prefix: Prefix | HasPrefix | None, template_options: TemplateOptions
    ) -> tuple[int, ...]:
        """Returns the tokens of a prompt."""
        if template_options and (prefix is not None or is_tokens(prompt)):
            raise ValueError("template_options apply to conversations only, and those of a document to its text")
        if is_tokens(prompt):
            return tuple(int(token) for token in prompt)
        if prefix is None:
            return tuple(encode_prompt(self._tokenizer, cast(Prompt, prompt), template_options))
        if isinstance(prefix, Prefix):
            raise TypeError(f"a prompt after a prefix must be token ids, got {type(prompt).__name__}")
        return tuple(prefix.encode(cast(Prompt, prompt)))

    def constraint(self, sampling: Sampling) -> Constraint | None:
        """Checks the tokens with a bias, and returns the constraint of an answer; see `constraint_of`."""
        vocab_size = self._model.config.vocab_size
        if sampling.logit_bias and (token := sampling.logit_bias[-1][0]) >= vocab_size:
            raise ValueError(f"logit_bias has token {token}; the model has tokens 0 to {vocab_size - 1}")
        return constraint_of(sampling, self._tokenizer, vocab_size)

    def limit(
        self, tokens: Sequence[int], prefix: Prefix | None, max_new_tokens: int | None, *, fit_context: bool
    ) -> int:
        """Returns the maximum number of new tokens, as `Engine.add` describes it."""
        if prefix is None and not tokens:
            raise ValueError("the prompt is empty; it must have at least one token")
        if max_new_tokens is not None:
            check_integer("max_new_tokens", max_new_tokens, minimum=1)
            if max_new_tokens > MAX_TOKENS:
                raise ValueError(f"max_new_tokens={max_new_tokens} must be at most {MAX_TOKENS}")
        if prefix is not None and prefix.generator.model is not self._model:
            raise ValueError("the document or prefix does not fit into the engine: it belongs to another model")
        in_context = self._model.config.max_length - len(tokens) - (0 if prefix is None else prefix.num_tokens)
        limit = max(min(_DEFAULT_NEW_TOKENS, in_context), 1) if max_new_tokens is None else max_new_tokens
        if prefix is not None and (shared := prefix.shared) is not None:
            limit = self._limit_after(shared, len(prefix.copied_tokens) + len(tokens), max_new_tokens)
        return max(min(limit, in_context), 1) if fit_context else limit

    def _limit_after(self, shared: Prefix, num_after: int, max_new_tokens: int | None) -> int:
        """Returns the maximum number of new tokens after a shared prefix and further tokens."""
        left = shared.max_suffix_tokens - num_after
        limit = max(left, 1) if max_new_tokens is None else max_new_tokens
        if limit > left:
            raise ValueError(
                f"{num_after} tokens of the prompt and max_new_tokens={limit} exceed the capacity "
                f"max_new_tokens={shared.max_suffix_tokens} that the document was read with"
            )
        return limit

    def sizes_of(self, request: Request, room: int | None) -> tuple[Generator, ...]:
        """Returns the sizes that the row of a request has in turn."""
        prefix, num_tokens, limit = request.prefix, len(request.prompt), request.max_new_tokens
        if prefix is None or prefix.is_shared:
            return self._new_sizes(prefix, len(request.own_tokens), limit, room)
        sizes = self._sizes_after(prefix, num_tokens, limit, room)
        if sizes is None:
            raise ValueError(
                f"{num_tokens} tokens of the prompt and max_new_tokens={limit} exceed the {prefix.num_left} tokens "
                "that the row of the prefix has capacity for"
            )
        return sizes

    def num_left(self, prefix: Prefix, num_tokens: int, max_new_tokens: int) -> int:
        """Returns how many of `max_new_tokens` a row has capacity for; see `Engine.num_left`."""
        fits = self._sizes_after(prefix, num_tokens, max_new_tokens, None) is not None
        return max_new_tokens if fits else prefix.num_left - num_tokens

    def _new_sizes(
        self, shared: Prefix | None, num_tokens: int, max_new_tokens: int, room: int | None
    ) -> tuple[Generator, ...]:
        """Returns the sizes of a row that holds `num_tokens` before the answer."""
        sizes = self._sizes if shared is None else shared.rows
        if sizes is None:
            raise ValueError("the rows of this engine continue documents; pass the document of the request")
        chosen = sizes(num_tokens, max_new_tokens)
        if room is None or room <= max_new_tokens:
            return chosen
        longest = sizes(num_tokens, room)
        # A full cache grows, if the longest one is of the same kind; a server reads the tokens after a document again.
        if chosen[-1].plan.is_resizable and (shared is not None or chosen[-1].can_move_to(longest[0])):
            return chosen
        return longest

    def _sizes_after(
        self, prefix: Prefix, num_tokens: int, max_new_tokens: int, room: int | None
    ) -> tuple[Generator, ...] | None:
        """Returns the sizes of a row that continues a prefix which is not shared; None if it lacks capacity."""
        size, num_tokens_before = prefix.generator, len(prefix.tokens)
        if size.plan.is_resizable and not (size.is_short and num_tokens + max_new_tokens <= prefix.num_left):
            sizes = self._new_sizes(prefix.after, num_tokens_before + num_tokens, max_new_tokens, room)
            if size.can_move_to(sizes[0]):
                return sizes
            # A budget of bytes may hold a short prompt and a long answer, but not a long prompt.
            limit = num_tokens_before + num_tokens + max_new_tokens - prefix.num_first
            sizes = self._new_sizes(prefix.after, prefix.num_first, limit, room)[-1:]
            if size.can_move_to(sizes[0]):
                return sizes
        # The row of a compressed cache, and of a full one that is followed by another kind of cache, keeps its size.
        return (size,) if num_tokens + max_new_tokens <= prefix.num_left else None


def waiting(request: Request, sizes: Sequence[Generator], *, batches_prompts: bool) -> Waiting:
    """Returns a request as the scheduler takes it.

    Args:
        sizes: the sizes that its row has in turn.
        batches_prompts: whether prompts without a prefix are prefilled as batches.
    """
    prefix, num_tokens = request.prefix, len(request.prompt)
    batch: Any = None
    if prefix is None and batches_prompts and not sizes[0].streaming:
        batch = (sizes[0], compile_cache.length_bucket(num_tokens)[-1])
    elif request.shared is prefix and num_tokens:
        # Rows of a batch take the time of the longest one.
        blocks = -(-num_tokens // sizes[0].block_size)
        batch = (sizes[0], prefix, max(blocks, 2).bit_length())
    return Waiting(
        request.number,
        row_bytes=sizes[-1].row_bytes,
        prompt=(prefix, request.prompt_seed, request.sampling, request.prompt, sizes[0]),
        num_tokens=num_tokens,
        batch=batch,
        pads=prefix is not None,
    )
