"""Text to and from the tokens of a Hugging Face directory, with its chat template and text streamed token by token."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers

from kvjax_models.formats import chat_template

T = TypeVar("T")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Tokens after which `Streamer` gives up waiting for a whole character; no encoding splits one over so many.
_LONGEST_WAIT = 32


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What a checkpoint says of its tokens.

    `prefix` is what it wants before a text (the BOS token, or nothing). `eos_ids` end a generation. `named` are its
    special tokens by role ("bos_token"...), as chat templates use them.
    """

    backend: tokenizers.Tokenizer
    prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the highest token; a model's logits may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `decode` leaves out."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """The tokens of a text; with `add_bos` after what the checkpoint puts first, which may be nothing (Qwen).

        Special tokens written out in the text become those tokens. No end-of-text token is ever added.

        Raises:
            ValueError: for a text that the tokenizer cannot encode.
        """
        encoded = _guarded("the tokenizer cannot encode this text", self.backend.encode, text, add_special_tokens=False)
        return [*(self.prefix_ids if add_bos else ()), *encoded.ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens, with no spaces tidied away; bytes that are no character give U+FFFD."""
        decode = self.backend.decode
        return _guarded(
            "the tokenizer cannot decode these tokens", decode, list(ids), skip_special_tokens=skip_special_tokens
        )

    def stream(
        self, ids: Iterable[int], context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Iterator[str]:
        """Pieces of text as tokens arrive, whole characters only; joined they are the text. See `Streamer`."""
        streamer = Streamer(self, context, skip_special_tokens)
        for token in ids:
            if piece := streamer.push(token):
                yield piece
        if piece := streamer.flush():
            yield piece

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages ({"role": ..., "content": ...}) as the checkpoint's chat template writes them.

        The text has its own BOS token where the template writes one: `encode` it without another, or use `encode_chat`.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses these messages, or takes more time
                or memory than any that is meant well (see `chat_template`).
        """
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja);"
                " encode plain text, or use an instruction-tuned checkpoint"
            )
        variables = {"messages": messages, "tools": None, "documents": None, **self.special_tokens}
        return chat_template.render(self.chat_template, variables | {"add_generation_prompt": add_generation_prompt})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The tokens of `render_chat`."""
        return self.encode(self.render_chat(messages, add_generation_prompt), add_bos=False)


class Streamer:
    """Text of a growing list of tokens, at constant cost per token.

    A window of tokens is decoded at each step: those that wait to complete a character, after a stretch already given
    out whose text only fixes what decoders do at a boundary (SentencePiece drops the space before the first word).

    The library's own `DecodeStream` (0.22) does not do: a byte out of place behind a character, which a model may
    write, is an exception to it, after broken bytes it gives out nothing more, and where a context ends inside a
    character it gives out the whole context again.

    Args:
        tokenizer: whose `decode` to follow.
        context: tokens before the first one pushed, such as the prompt's last; their text is not given out.
        skip_special_tokens: leaves special tokens out, as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._special = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context if token not in self._special][-_LONGEST_WAIT:]
        self._settled, self._waiting = 0, 0
        # Either end of the window may lie inside a character, of up to four tokens, and byte-fallback decoders then
        # give no character of the whole run: the first whole stretch is the one to go by.
        for unfinished, cut in itertools.product(range(4), range(4)):
            whole = self._tokenizer.decode(self._window[cut : len(self._window) - unfinished], skip_special_tokens)
            if whole and not (whole.startswith(_REPLACEMENT) or whole.endswith(_REPLACEMENT)):
                del self._window[:cut]
                self._settled = len(self._window) - unfinished
                break
        self._given = max(len(self._text(self._settled)), len(self._text().rstrip(_REPLACEMENT)))

    def push(self, token: int) -> str:
        """The text that this token completes, "" while a character is incomplete."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._text()
        gives_up = self._waiting >= _LONGEST_WAIT  # bytes that are no character at all
        complete = text if gives_up else text.rstrip(_REPLACEMENT)
        piece = complete[self._given :]
        self._given = max(self._given, len(complete))
        self._waiting = 0 if piece or gives_up else self._waiting + 1
        if complete == text and self._waiting == 0:
            self._drop(self._settled, len(text))
            self._settled = len(self._window)
        elif len(self._window) > 2 * _LONGEST_WAIT:  # each token ends inside a character, as when a model repeats one
            self._drop(1, len(text))
            self._settled = max(self._settled - 1, 0)
        return piece

    def _drop(self, tokens: int, text_length: int) -> None:
        """Shortens the window at its start; what its text still owes is at the end, and stays."""
        owed = text_length - self._given
        del self._window[:tokens]
        self._given = max(len(self._text()) - owed, 0)

    def flush(self) -> str:
        """What is left at the end: the bytes of a character that never became whole, as U+FFFD."""
        piece = self._text()[self._given :]
        self._given += len(piece)
        return piece

    def _text(self, tokens: int | None = None) -> str:
        return self._tokenizer.decode(self._window[:tokens], self._skip_special)


def _guarded(problem: str, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """What a function of the tokenizers library gives. It raises plain Exceptions, and where its Rust code panics, in a
    regular expression say, what is not even one.

    Raises:
        ValueError: whatever it raises, with the problem.
    """
    try:
        return function(*arguments, **named)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {error}") from error
