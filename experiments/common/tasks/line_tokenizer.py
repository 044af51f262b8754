"""A tokenizer made for line retrieval: a name is two tokens, a number one or two, a fixed phrase one.

Llama 3's pre-tokenization (with numbers in groups of three digits from the right) over a byte-level vocabulary in
which every word of the task is an entry of its own. It has no merges: other text falls back to bytes, so any text
round-trips.
"""

import dataclasses
import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from experiments.common.tasks import line_retrieval

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"

PHRASES = (
    line_retrieval.HEADER,
    line_retrieval.LINE_MIDDLE,
    line_retrieval.QUESTION_START,
    line_retrieval.QUESTION_END,
)

# One token less of each with a number below 1,000. An answer is the number and the end of the text.
TOKENS_OF_HEADER, TOKENS_PER_LINE, TOKENS_PER_QUESTION, TOKENS_OF_ANSWER = 2, 7, 7, 3

# Llama 3's pattern, but for \p{N}{1,3}: the lookahead makes groups end where thousands do, so 12345 is 12|345.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build() -> tokenizers.Tokenizer:
    """The tokenizer; the same on every call."""
    groups = [f"{number:0{digits}d}" for digits in (2, 3) for number in range(10**digits)]
    names = [f" {word}" for word in line_retrieval.adjectives()] + [f"-{word}" for word in line_retrieval.nouns()]
    words = [*groups, line_retrieval.LINE_START, line_retrieval.LINE_END, *names]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    entries = sorted(pre_tokenizers.ByteLevel.alphabet()) + [byte_level.pre_tokenize_str(word)[0][0] for word in words]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    split = pre_tokenizers.Split(tokenizers.Regex(_PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([tokenizers.AddedToken(phrase, normalized=False) for phrase in PHRASES])
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return tokenizer


def end_of_text(tokenizer: tokenizers.Tokenizer) -> int:
    """The token that ends an answer.

    Raises:
        ValueError: the tokenizer has none of that name.
    """
    token = tokenizer.token_to_id(EOS)
    if token is None:
        raise ValueError(f"the tokenizer has no {EOS}: build it with line_tokenizer.build")
    return token


def save(tokenizer: tokenizers.Tokenizer, directory: pathlib.Path, max_length: int) -> None:
    """Writes tokenizer.json and what `transformers.AutoTokenizer` wants beside it."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One record with questions and answers: `tokens [T]`, and `is_answer [T]`, the tokens a model must predict."""

    tokens: np.ndarray
    is_answer: np.ndarray


class LineEncoder:
    """Drawn lines to token arrays, equal to the tokenizer's encoding of the published text but without any text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        def ids(texts) -> np.ndarray:
            encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
            if any(len(encoding.ids) != 1 for encoding in encodings):
                raise ValueError("the tokenizer splits a word of the task: build it with line_tokenizer.build")
            return np.array([encoding.ids[0] for encoding in encodings], np.int32)

        self.start = ids([BOS, line_retrieval.HEADER])
        self.line = ids([line_retrieval.LINE_START, line_retrieval.LINE_MIDDLE, line_retrieval.LINE_END])
        self.question = ids([line_retrieval.QUESTION_START, line_retrieval.QUESTION_END])
        self.eos = end_of_text(tokenizer)
        self.adjectives = ids(f" {word}" for word in line_retrieval.adjectives())
        self.nouns = ids(f"-{word}" for word in line_retrieval.nouns())
        self.leading_group = ids(str(number) for number in range(1000))
        self.padded_group = ids(f"{number:03d}" for number in range(1000))

    def conversation(self, lines: line_retrieval.Lines, asked: np.ndarray) -> Conversation:
        """The record, then the questions about lines `asked [questions]`, each answered and ended by EOS."""
        record, record_used = self._record(lines)
        questions, questions_used = self._questions(lines, asked)
        is_answer = np.zeros_like(questions_used)
        is_answer[:, 4:] = True
        return Conversation(
            np.concatenate([self.start, record[record_used], questions[questions_used]]),
            np.concatenate([np.zeros(len(self.start) + int(np.sum(record_used)), bool), is_answer[questions_used]]),
        )

    def _record(self, lines: line_retrieval.Lines) -> tuple[np.ndarray, np.ndarray]:
        line_start, line_middle, line_end = (np.full(len(lines), token) for token in self.line)
        columns = [line_start, *self._names(lines), line_middle, *self._numbers(lines), line_end]
        return np.stack(columns, axis=1), _with_optional_column(lines.numbers >= 1000, columns=7, optional=4)

    def _questions(self, lines: line_retrieval.Lines, asked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lines = line_retrieval.Lines(lines.adjectives[asked], lines.nouns[asked], lines.numbers[asked])
        start, end = (np.full(len(lines), token) for token in self.question)
        eos = np.full(len(lines), self.eos)
        columns = [start, *self._names(lines), end, *self._numbers(lines), eos]
        return np.stack(columns, axis=1), _with_optional_column(lines.numbers >= 1000, columns=7, optional=4)

    def _names(self, lines: line_retrieval.Lines) -> tuple[np.ndarray, np.ndarray]:
        return self.adjectives[lines.adjectives], self.nouns[lines.nouns]

    def _numbers(self, lines: line_retrieval.Lines) -> tuple[np.ndarray, np.ndarray]:
        thousands, rest = np.divmod(lines.numbers, 1000)
        return self.leading_group[thousands], np.where(thousands > 0, self.padded_group[rest], self.leading_group[rest])


def _with_optional_column(used: np.ndarray, columns: int, optional: int) -> np.ndarray:
    """A mask `[rows, columns]` that is true but where the optional column is not used."""
    mask = np.ones((len(used), columns), bool)
    mask[:, optional] = used
    return mask
