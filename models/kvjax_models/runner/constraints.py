"""Constrained answers: the tokens that a JSON schema or a grammar allows next, by llguidance.

llguidance (https://github.com/guidance-ai/llguidance) parses the answer token by token on the host, and computes a mask
of the vocabulary for the next one. The decode program samples among the tokens of the mask.
"""

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from jaxtyping import Int

from kvjax.messages import shorten
from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.runner.sampling import Sampling, num_words

if TYPE_CHECKING:
    import llguidance

# As `json.dumps` writes it: with free white space, small models write line breaks until their limit.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Constraint:
    """The place of an answer in its grammar."""

    def __init__(self, matcher: "llguidance.LLMatcher", vocab_size: int) -> None:
        """Starts an answer.

        Args:
            matcher: the grammar, before the first token.
            vocab_size: number of logits.
        """
        self._matcher, self._words = matcher, num_words(vocab_size)

    @property
    def is_complete(self) -> bool:
        """Whether the answer is complete and cannot go on."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def allowed(self) -> Int[np.ndarray, "W"]:
        """Returns the tokens that may come next, a bit each, as `RowSampling.allowed` has them.

        Raises:
            ValueError: if the answer became too complex for the parser.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.int32)
        if self._matcher.is_error():
            raise ValueError(f"the answer cannot be constrained any further: {_first_line(self._matcher.get_error())}")
        return np.pad(mask[: self._words], (0, max(self._words - len(mask), 0)))

    def push(self, tokens: Sequence[int]) -> None:
        """Appends tokens of `allowed`; if the parser fails, the next call of that raises."""
        self._matcher.consume_tokens([*tokens])


def constraint_of(sampling: Sampling, tokenizer: Tokenizer, vocab_size: int) -> Constraint | None:
    """Returns the constraint of an answer; None if it has none.

    A grammar is compiled once, which takes up to a second for a complex one.

    Args:
        vocab_size: number of logits.

    Raises:
        ValueError: if the grammar or the schema is invalid, or llguidance is not installed.
    """
    if sampling.json_schema is None and sampling.grammar is None:
        return None
    eos = tokenizer.eos_ids
    matcher = _compile(tokenizer.backend, vocab_size, eos, sampling.json_schema, sampling.grammar)
    return Constraint(matcher.deep_copy(), vocab_size)


@functools.lru_cache(maxsize=64)
def _compile(
    backend: tokenizers.Tokenizer, vocab_size: int, eos: tuple[int, ...], json_schema: str | None, grammar: str | None
) -> "llguidance.LLMatcher":
    """Returns the matcher of a schema or a grammar, before the first token."""
    name = "grammar" if json_schema is None else "json_schema"
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ValueError(f"{name} requires llguidance; install it with: pip install 'kvjax[server]'") from error
    if json_schema is None:
        text = LLMatcher.grammar_from_lark(grammar or "")
    else:
        text = LLMatcher.grammar_from_json_schema(json.loads(json_schema), overrides=JSON_STYLE)
    matcher = LLMatcher(_vocabulary(backend, vocab_size, eos), text, log_level=0)
    if matcher.is_error():
        raise ValueError(
            f"{name}={shorten(json_schema or grammar)} is not possible: {_first_line(matcher.get_error())}"
        )
    return matcher


@functools.lru_cache(maxsize=4)
def _vocabulary(backend: tokenizers.Tokenizer, vocab_size: int, eos: tuple[int, ...]) -> "llguidance.LLTokenizer":
    """Returns a tokenizer as llguidance takes it; made once, because it takes up to seconds."""
    from llguidance import LLTokenizer

    try:
        return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=[*eos])
    except Exception as error:
        raise ValueError(f"answers of this tokenizer cannot be constrained: {_first_line(str(error))}") from error


def _first_line(message: str) -> str:
    return message.strip().partition("\n")[0][:300]
