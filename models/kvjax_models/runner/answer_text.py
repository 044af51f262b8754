"""The text of an answer during its generation: stop strings, and characters that are not complete yet."""

from collections.abc import Sequence

from kvjax.messages import shorten
from kvjax_models.formats.tokenizer import Streamer, Tokenizer


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Raises:
        ValueError: if a stop string is empty.
        TypeError: if `stop` contains anything but strings.
    """
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(string, str) for string in strings):
        raise TypeError(f"stop={shorten(stop)} must be a string or a list of strings")
    if not all(strings):
        raise ValueError("stop must not contain an empty string")
    return strings


class AnswerText:
    """The tokens of an answer with their text, which ends before the first stop string.

    Stop strings may contain special tokens, which the text omits.

    Attributes:
        tokens: the tokens.
        text: their text, without special tokens and without an incomplete last character.
        is_stopped: whether the text contained a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], stop: Sequence[str] = ()):
        """Creates an answer without tokens.

        Args:
            context: the tokens before the answer; the last `tokenizer.CONTEXT_TOKENS` suffice.
        """
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token: added[token].content for token in tokenizer.special_ids}
        self._streamer, self._stop = Streamer(tokenizer, context), tuple(stop)
        self._longest = max(map(len, stop), default=0)
        # The end of the text with special tokens, in which a stop string may begin, and for every character of it the
        # length of the text without special tokens before it.
        self._end, self._lengths = "", [0]
        self._num_taken = 0
        self.tokens: list[int] = []
        self.text = ""
        self.is_stopped = False

    def push(self, tokens: Sequence[int]) -> None:
        """Appends tokens; does nothing after a stop string."""
        for token in tokens:
            if self.is_stopped:
                return
            self.tokens.append(token)
            self._append(self._streamer.push(token), is_special=False)
            if token in self._special and not self.is_stopped:
                self._append(self._special[token], is_special=True)

    def take(self, is_finished: bool) -> str:
        """Returns the text since the last call.

        Args:
            is_finished: whether the answer is finished; until then, characters that may be the start of a stop string
                and the bytes of an incomplete character are held back.
        """
        if is_finished and not self.is_stopped:
            self._append(self._streamer.flush(), is_special=False)
        held = 0 if is_finished else max(self._longest - 1, 0)
        end = max(len(self.text) - held, self._num_taken)
        new, self._num_taken = self.text[self._num_taken : end], end
        return new

    def _append(self, new: str, *, is_special: bool) -> None:
        if not new:
            return
        self._end += new
        if not is_special:
            self.text += new
        last = self._lengths[-1]
        self._lengths += [last + (0 if is_special else index + 1) for index in range(len(new))]
        starts = [start for string in self._stop if (start := self._end.find(string)) >= 0]
        if starts:
            self.text, self.is_stopped = self.text[: self._lengths[min(starts)]], True
            return
        # A later stop string begins at most this many characters before the end.
        surplus = max(len(self._end) - max(self._longest - 1, 0), 0)
        self._end, self._lengths = self._end[surplus:], self._lengths[surplus:]
