"""Texts of many prompts, from continuous batching: strings that end them, pieces as they come, and their order."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvjax_models.formats.tokenizer import Tokenizer
from kvjax_models.generation.batching import FinishReason, Request, run_requests
from kvjax_models.generation.generator import Generator

TextCallback = Callable[[int, str], None]  # of a prompt's number and a new piece of its text


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was written to a prompt.

    Attributes:
        number: of the prompt, in the order in which they were given.
        text: without the string that ended it.
        tokens: all that were written, an end-of-text token included.
        finish_reason: "stop" for an end-of-text token or string, "length" for as many tokens as were asked for.
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
    stop: Sequence[str] = (),
    on_text: TextCallback | None = None,
    max_prefill_steps: int | None = None,
) -> Iterator[Completion]:
    """What follows each of many prompts, as they end; see `batching.complete`.

    Args:
        stop: strings that end a text and are no part of it; looked for where blocks end.
        on_text: called with pieces of texts, a block's at a time; what may be the start of a string in `stop` waits.

    Raises:
        ValueError: as `batching.complete`; for an empty string in `stop`, which would end everything.
    """
    if not all(stop):
        raise ValueError("stop holds an empty string")
    rows: dict[int, list[int]] = {}
    shown: dict[int, int] = {}  # letters of a text that `on_text` has been given

    def stops(number: int, tokens: list[int]) -> bool:
        rows.setdefault(number, []).extend(tokens)
        return bool(stop) and _ends(tokenizer.decode(rows[number]), stop) is not None

    for written in run_requests(generator, requests, max_prefill_steps=max_prefill_steps, should_stop=stops):
        number, ended = written.number, written.finish_reason is not None
        if not ended and on_text is None:
            continue
        text = tokenizer.decode(rows[number])
        text = text[: _ends(text, stop)]
        if on_text is not None:
            safe = len(text) if ended else _settled(text, stop)
            if safe > (begin := shown.get(number, 0)):
                on_text(number, text[begin:safe])
                shown[number] = safe
        if written.finish_reason is not None:
            yield Completion(number, text, tuple(rows.pop(number)), written.finish_reason)


def in_prompt_order(found: Iterable[Completion]) -> Iterator[Completion]:
    """The same in the order of their prompts; what ends before an earlier one waits."""
    waiting: dict[int, Completion] = {}
    following = 0
    for one in found:
        waiting[one.number] = one
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _ends(text: str, stop: Sequence[str]) -> int | None:
    """Where the first of these strings stands in a text; None where none does."""
    return min((place for end in stop if (place := text.find(end)) >= 0), default=None)


def _settled(text: str, stop: Sequence[str]) -> int:
    """How many letters of an unfinished text stay what they are: behind them a character may be incomplete, or one of
    these strings begin."""
    whole = len(text.rstrip("\ufffd"))
    return max(whole - max((len(end) - 1 for end in stop), default=0), 0)
