"""Text completions of many prompts: stop strings, streamed text and the order of results."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvjax.messages import shorten
from kvjax_models.formats.tokenizer import Streamer, Tokenizer
from kvjax_models.generation.batching import FinishReason, Request, run_requests
from kvjax_models.generation.generator import Generator

TextCallback = Callable[[int, str], None]  # takes the number of a prompt and a new part of its text


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of a prompt.

    Attributes:
        number: index of the prompt.
        text: new text without the stop string.
        tokens: all new tokens, including an end-of-text token.
        finish_reason: "stop" for an end-of-text token or a stop string, "length" for the maximum number of tokens.
    """

    number: int
    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason


def generate_completions(
    tokenizer: Tokenizer,
    generator: Generator,
    requests: Iterable[Request],
    *,
    stop: str | Sequence[str] = (),
    on_text: TextCallback | None = None,
    max_prefill_steps: int | None = None,
) -> Iterator[Completion]:
    """Generates completions of many prompts; see `batching.run_requests`.

    Args:
        tokenizer: tokenizer of the model.
        generator: its batch size is the number of rows.
        requests: prompts to continue.
        stop: a string or strings that finish a sequence and are excluded from its text; checked after every block.
            Special tokens, which the text omits, match if a string spells them.
        on_text: called with the number of a prompt and the new part of its text after every block; characters at the
            end that may be the start of a stop string are held back.
        max_prefill_steps: as for `run_requests`.

    Yields:
        Completions as they finish.

    Raises:
        ValueError: if a stop string is empty.
        TypeError: if `stop` contains anything but strings.
    """
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) for string in stop):
        raise TypeError(f"stop={shorten(stop)} must be a string or a list of strings")
    if not all(stop):
        raise ValueError("stop must not contain an empty string")
    rows: dict[int, _Row] = {}
    emitted: dict[int, int] = {}  # number of characters passed to `on_text`

    def open_rows() -> Iterator[Request]:
        for index, request in enumerate(requests):
            number = index if request.number is None else request.number
            rows[number] = _Row(tokenizer, [*request.prompt, *request.question], stop)
            yield request

    def should_stop(number: int, tokens: list[int]) -> bool:
        """Records the new `tokens` of prompt `number` and returns whether its text contains a stop string."""
        rows[number].push(tokens)
        return rows[number].find_stop() is not None

    outputs = run_requests(generator, open_rows(), max_prefill_steps=max_prefill_steps, should_stop=should_stop)
    for number, _, finish_reason in outputs:
        row = rows[number]
        if finish_reason is not None:
            row.flush()
        text = row.text[: row.find_stop()]
        if on_text is not None:
            end = len(text) if finish_reason is not None else _settled_length(text, stop)
            if end > (begin := emitted.get(number, 0)):
                on_text(number, text[begin:end])
                emitted[number] = end
        if finish_reason is not None:
            yield Completion(number, text, tuple(rows.pop(number).tokens), finish_reason)


def in_prompt_order(completions: Iterable[Completion]) -> Iterator[Completion]:
    """Yields completions in the order of their prompts; earlier ones are awaited."""
    pending: dict[int, Completion] = {}
    next_number = 0
    for completion in completions:
        pending[completion.number] = completion
        while next_number in pending:
            yield pending.pop(next_number)
            next_number += 1


class _Row:
    """The tokens that continue a prompt, with their text.

    Attributes:
        tokens: the tokens.
        text: their text without special tokens and without an incomplete last character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], stop: Sequence[str]):
        """Creates a row without tokens.

        Args:
            tokenizer: tokenizer of the model.
            context: tokens of the prompt.
            stop: stop strings.
        """
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token: added[token].content for token in tokenizer.special_ids}
        self._streamer = Streamer(tokenizer, context)
        self._stop = [string for string in stop if not self._has_special(string)]
        self._stop_with_special = [string for string in stop if self._has_special(string)]
        self._parts: list[tuple[str, bool]] = []  # parts of the text with special tokens, and which parts these are
        self.tokens: list[int] = []
        self.text = ""

    def _has_special(self, string: str) -> bool:
        return any(content in string for content in self._special.values())

    def push(self, tokens: Sequence[int]) -> None:
        """Appends tokens."""
        self.tokens += tokens
        for token in tokens:
            self._append(self._streamer.push(token))
            if token in self._special:
                self._parts.append((self._special[token], True))

    def flush(self) -> None:
        """Appends the bytes of an incomplete last character."""
        self._append(self._streamer.flush())

    def _append(self, text: str) -> None:
        self.text += text
        self._parts.append((text, False))

    def find_stop(self) -> int | None:
        """Returns the length of the text before the first stop string; None if there is none."""
        ends = [position for string in self._stop if (position := self.text.find(string)) >= 0]
        if self._stop_with_special:
            entire = "".join(part for part, _ in self._parts)
            starts = [position for string in self._stop_with_special if (position := entire.find(string)) >= 0]
            ends += map(self._without_special, starts)
        return min(ends, default=None)

    def _without_special(self, position: int) -> int:
        """Returns the length of the text without special tokens before a position in the one with them."""
        length = 0
        for part, is_special in self._parts:
            length += 0 if is_special else min(len(part), position)
            position = max(position - len(part), 0)
        return length


def _settled_length(text: str, stop: Sequence[str]) -> int:
    """Returns how many characters of an unfinished text cannot become part of a stop string."""
    return max(len(text) - max((len(string) - 1 for string in stop), default=0), 0)
