"""Encodes text to tokens and decodes tokens to text, also token by token; renders chat templates."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers

from kvjax_models.formats import chat_template, untrusted_files

T = TypeVar("T")

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING_TOKENS = 32  # after which `Streamer` emits an incomplete character; more than any encoding needs


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        prefix_ids: tokens that the model expects before a text: the BOS token or none.
        eos_ids: tokens that finish a sequence.
        special_tokens: special tokens by role ("bos_token", ...), for chat templates.
        chat_template: Jinja template of conversations; None if the checkpoint has none.
    """

    backend: tokenizers.Tokenizer
    prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's logits may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `decode` skips."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Encodes a text; raises a ValueError if the tokenizer cannot encode it.

        Special tokens that are spelled out in the text become these tokens. An end-of-text token is never added.

        Args:
            text: the text.
            add_bos: whether to prepend `prefix_ids`.

        Returns:
            The token ids.
        """
        encoding = call_backend(
            "the tokenizer cannot encode this text", self.backend.encode, text, add_special_tokens=False
        )
        return [*(self.prefix_ids if add_bos else ()), *encoding.ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes tokens without removing spaces; invalid UTF-8 bytes become U+FFFD.

        Args:
            ids: token ids.
            skip_special_tokens: whether to omit special tokens.

        Returns:
            The text.
        """
        return call_backend(
            "the tokenizer cannot decode these tokens",
            self.backend.decode,
            list(ids),
            skip_special_tokens=skip_special_tokens,
        )

    def stream(
        self, ids: Iterable[int], context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Iterator[str]:
        """Decodes tokens one by one; see `Streamer`.

        Args:
            ids: token ids.
            context: tokens before them.
            skip_special_tokens: whether to omit special tokens.

        Yields:
            Parts of the text that consist of complete characters.
        """
        streamer = Streamer(self, context, skip_special_tokens)
        for token in ids:
            if text := streamer.push(token):
                yield text
        if text := streamer.flush():
            yield text

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Renders a conversation with the checkpoint's chat template.

        The text contains its own BOS token if the template writes one: encode it with `add_bos=False` or use
        `encode_chat`.

        Args:
            messages: messages {"role": ..., "content": ...}.
            add_generation_prompt: whether to append the start of the assistant's answer.

        Returns:
            The text.

        Raises:
            ValueError: if the checkpoint has no chat template, or the template refuses the messages or exceeds its
                limits of time or memory (see `chat_template`).
        """
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template (chat_template in tokenizer_config.json, or "
                "chat_template.jinja); pass plain text, or use an instruction-tuned checkpoint"
            )
        variables = {"messages": messages, "tools": None, "documents": None, **self.special_tokens}
        return chat_template.render(self.chat_template, variables | {"add_generation_prompt": add_generation_prompt})

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Encodes a conversation with the checkpoint's chat template.

        Args:
            messages: as for `render_chat`.
            add_generation_prompt: as for `render_chat`.

        Returns:
            The token ids.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt), add_bos=False)


class Streamer:
    """Decodes a growing list of tokens at constant cost per token.

    Each step decodes a window of tokens: the pending ones, whose last character is incomplete, after some whose text
    was emitted before. The latter are needed because decoders treat boundaries specially; SentencePiece removes the
    space before the first word.

    The library's `DecodeStream` (0.22) is not sufficient: it raises an error for an invalid byte after a character,
    emits nothing after invalid bytes, and emits the context again if that ends inside a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special_tokens: bool = True):
        """Creates a streamer.

        Args:
            tokenizer: tokenizer whose `decode` is followed.
            context: tokens before the first one, such as the prompt's; their text is not emitted.
            skip_special_tokens: whether to omit special tokens.
        """
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._special = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._window = [token for token in context if token not in self._special][-_MAX_PENDING_TOKENS:]
        self._num_settled, self._num_pending = 0, 0
        # Both ends of the window may be inside a character of up to four tokens, and byte-fallback decoders then
        # decode nothing of the run: take the longest part that decodes completely.
        for unfinished, cut in itertools.product(range(4), range(4)):
            text = self._tokenizer.decode(self._window[cut : len(self._window) - unfinished], skip_special_tokens)
            if text and not (text.startswith(_REPLACEMENT) or text.endswith(_REPLACEMENT)):
                del self._window[:cut]
                self._num_settled = len(self._window) - unfinished
                break
        self._num_emitted = max(len(self._text(self._num_settled)), len(self._text().rstrip(_REPLACEMENT)))

    def push(self, token: int) -> str:
        """Returns the text that a token completes; "" if the last character is incomplete."""
        if token in self._special:
            return ""
        self._window.append(token)
        text = self._text()
        is_invalid = self._num_pending >= _MAX_PENDING_TOKENS  # the bytes will never become a character
        complete = text if is_invalid else text.rstrip(_REPLACEMENT)
        new_text = complete[self._num_emitted :]
        self._num_emitted = max(self._num_emitted, len(complete))
        self._num_pending = 0 if new_text or is_invalid else self._num_pending + 1
        if complete == text and self._num_pending == 0:
            self._shorten(self._num_settled, len(text))
            self._num_settled = len(self._window)
        elif len(self._window) > 2 * _MAX_PENDING_TOKENS:  # every token ends inside a character
            self._shorten(1, len(text))
            self._num_settled = max(self._num_settled - 1, 0)
        return new_text

    def flush(self) -> str:
        """Returns the remaining text: the bytes of an incomplete last character as U+FFFD."""
        text = self._text()[self._num_emitted :]
        self._num_emitted += len(text)
        return text

    def _shorten(self, tokens: int, text_length: int) -> None:
        """Removes tokens at the start of the window; its end, which was not emitted yet, stays."""
        num_pending_characters = text_length - self._num_emitted
        del self._window[:tokens]
        self._num_emitted = max(len(self._text()) - num_pending_characters, 0)

    def _text(self, tokens: int | None = None) -> str:
        return self._tokenizer.decode(self._window[:tokens], self._skip_special)


def call_backend(problem: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function of the tokenizers library, whose Rust code raises plain Exceptions and BaseExceptions (panics).

    Args:
        problem: start of the error message.
        function: the function.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        The function's result.

    Raises:
        ValueError: if the function raises.
        KeyboardInterrupt: as the function raises it, like SystemExit, GeneratorExit and MemoryError.
        SystemExit: as above.
        GeneratorExit: as above.
        MemoryError: as above.
    """
    try:
        return function(*args, **kwargs)
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{problem}: {untrusted_files.shorten(error)}") from error
