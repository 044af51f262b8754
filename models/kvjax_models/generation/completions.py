"""Text completions of many prompts: stop strings, streamed text and the order of results."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvjax.messages import shorten
from kvjax_models.formats.tokenizer import Tokenizer
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
    rows: dict[int, list[int]] = {}
    emitted: dict[int, int] = {}  # number of characters passed to `on_text`

    def should_stop(number: int, tokens: list[int]) -> bool:
        """Records the new `tokens` of prompt `number` and returns whether its text contains a stop string."""
        rows.setdefault(number, []).extend(tokens)
        return bool(stop) and _find_stop(tokenizer.decode(rows[number]), stop) is not None

    outputs = run_requests(generator, requests, max_prefill_steps=max_prefill_steps, should_stop=should_stop)
    for number, _, finish_reason in outputs:
        if finish_reason is None and on_text is None:
            continue
        text = tokenizer.decode(rows[number])
        text = text[: _find_stop(text, stop)]
        if on_text is not None:
            end = len(text) if finish_reason is not None else _settled_length(text, stop)
            if end > (begin := emitted.get(number, 0)):
                on_text(number, text[begin:end])
                emitted[number] = end
        if finish_reason is not None:
            yield Completion(number, text, tuple(rows.pop(number)), finish_reason)


def in_prompt_order(completions: Iterable[Completion]) -> Iterator[Completion]:
    """Yields completions in the order of their prompts; earlier ones are awaited."""
    pending: dict[int, Completion] = {}
    next_number = 0
    for completion in completions:
        pending[completion.number] = completion
        while next_number in pending:
            yield pending.pop(next_number)
            next_number += 1


def _find_stop(text: str, stop: Sequence[str]) -> int | None:
    """Returns the first position of a stop string; None if the text contains none of them."""
    return min((position for string in stop if (position := text.find(string)) >= 0), default=None)


def _settled_length(text: str, stop: Sequence[str]) -> int:
    """Returns how many characters of an unfinished text cannot change or become part of a stop string."""
    complete = len(text.rstrip("\ufffd"))
    return max(complete - max((len(string) - 1 for string in stop), default=0), 0)
