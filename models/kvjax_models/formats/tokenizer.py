"""Encodes text to tokens and decodes tokens to text, also token by token; renders chat templates."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers

from kvjax_models.formats import chat_template, files
from kvjax_models.formats.special_tokens import MARK, SpecialTokens, encode, encode_spans

T = TypeVar("T")

CONTEXT_TOKENS = 32  # before a text that determine how it is encoded and decoded; more than any character needs
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING_TOKENS = CONTEXT_TOKENS  # after which `Streamer` emits an incomplete character
_LINE_BREAK, _NULL = "\n", "\0"  # texts that hardly any vocabulary merges with the text after them


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint.

    Attributes:
        backend: the tokenizer of the `tokenizers` library.
        prefix_ids: tokens that the model expects before a text: the BOS token or none.
        eos_ids: tokens that finish a sequence.
        special_tokens: special tokens by role ("bos_token", "additional_special_tokens", ...), for chat templates.
        chat_template: Jinja template of conversations; None if the checkpoint has none.
        parse_special: whether special tokens that texts and messages of users spell out, such as `<|im_end|>`, become
            these tokens. By default they stay text.
    """

    backend: tokenizers.Tokenizer
    prefix_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str | list[str]]
    chat_template: str | None = None
    parse_special: bool = False

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's logits may be padded beyond it."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def special_ids(self) -> frozenset[int]:
        """The tokens that `decode` skips."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @functools.cached_property
    def _special_tokens(self) -> SpecialTokens:
        """The special tokens, and those with a role in generation."""
        return SpecialTokens(self.backend, self.special_ids.union(self.prefix_ids, self.eos_ids))

    def escape(self, text: str) -> str:
        """Marks the special tokens that a user's text spells out, unless `parse_special`.

        The methods that encode texts encode marked ones as text, also within a longer text.

        Returns:
            The text with marks.
        """
        return self._special_tokens.escape(text, parse=self.parse_special)

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Encodes a text; raises a ValueError if the tokenizer cannot encode it.

        Special tokens that are spelled out in the text become these tokens; see `escape`. An end-of-text token is never
        added.

        Args:
            add_bos: whether the text starts a sequence: `prefix_ids` are prepended unless the text begins with them.
                False encodes a text that follows another one; see `encode_continuation`.

        Returns:
            The token ids.
        """
        if not add_bos:
            return self.encode_continuation(text)
        prefix, ids = list(self.prefix_ids), self._encode(text)
        return ids if ids[: len(prefix)] == prefix else prefix + ids

    def encode_continuation(self, text: str, context: Sequence[int] | None = None) -> list[int]:
        """Encodes a text that follows other tokens: without BOS and the space that SentencePiece puts before a text.

        The result is the end of the encoding of both texts. If one of its tokens would span both texts, the text is
        encoded as if it followed a line break.

        Args:
            context: tokens before the text, of which the last `CONTEXT_TOKENS` suffice; () at the start of a sequence,
                None if they are not known.

        Returns:
            The token ids.
        """
        if context is not None and not len(context):
            return self._encode(text)
        before = [] if context is None else [self._spell(context[-CONTEXT_TOKENS:])]
        for anchor in (*before, _LINE_BREAK, _NULL):
            head, ids = self._encode(anchor), self._encode(anchor + text)
            if len(ids) > len(head) and ids[: len(head)] == head:
                return ids[len(head) :]
        return self._encode(text)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]], str]:
        """Encodes a text at the start of a sequence, without BOS, and finds the characters of every token.

        Args:
            text: the text, in which special tokens may have marks; see `escape`.

        Returns:
            The token ids; start and end of the characters of every token, where tokens that share a character both
            have it; and the text without marks, to which these refer.
        """
        if MARK in text:
            return _call_with_text(self._special_tokens.encode_spans, text)
        return *_call_with_text(functools.partial(encode_spans, self.backend), text), text

    def _spell(self, ids: Sequence[int]) -> str:
        """Decodes tokens with special tokens, and marks special tokens that are encoded as text."""
        text, special = self.decode(ids, skip_special_tokens=False), self._special_tokens
        if special.count(text) == sum(token in special.ids for token in ids):  # all are tokens
            return text
        streamer, parts, plain = Streamer(self, skip_special_tokens=False), [], ""
        for token in ids:
            piece = streamer.push(token)
            if token in special.ids:
                parts += [special.escape(plain), piece]
                plain = ""
            else:
                plain += piece
        return "".join([*parts, special.escape(plain)])

    def _encode(self, text: str) -> list[int]:
        if MARK in text:
            return _call_with_text(self._special_tokens.encode, text)
        return _call_with_text(functools.partial(encode, self.backend), text)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes the tokens of an entire text; `decode_continuation` decodes tokens that follow others.

        Spaces are not removed; invalid UTF-8 bytes become U+FFFD.

        Args:
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

    def decode_continuation(self, ids: Iterable[int], context: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decodes tokens that follow other tokens, such as an answer: SentencePiece's first space is kept.

        Args:
            context: tokens before them; the last `CONTEXT_TOKENS` suffice.
            skip_special_tokens: whether to omit special tokens.

        Returns:
            The text that they add to the context's text.
        """
        return "".join(self.stream(ids, context, skip_special_tokens))

    def stream(
        self, ids: Iterable[int], context: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Iterator[str]:
        """Decodes tokens one by one; see `Streamer`.

        Args:
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

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders a conversation with the checkpoint's chat template.

        The text contains its own BOS token if the template writes one: encode it with `encode_chat`. Special tokens in
        the contents of messages have marks; see `escape`.

        Args:
            messages: messages {"role": ..., "content": ...}.
            add_generation_prompt: whether to append the start of the assistant's answer.
            template_options: further variables of the template, such as `enable_thinking` or `tools`.
                `continue_final_message=True` ends the text with the last message, whose role continues it.

        Returns:
            The text.

        Raises:
            ValueError: if the checkpoint has no chat template, the template does not use an option, refuses the
                messages, or omits the content of one.
        """
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template (chat_template in tokenizer_config.json, or "
                "chat_template.jinja); pass plain text, or use an instruction-tuned checkpoint"
            )
        variables: dict[str, Any] = {"tools": None, "documents": None, **self.special_tokens}
        variables["add_generation_prompt"] = add_generation_prompt
        messages = [_map_texts(message, self.escape) for message in messages]
        options = None if template_options is None else _map_texts(template_options, self.escape)
        return chat_template.render(self.chat_template, messages, variables, options)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Encodes a conversation with the checkpoint's chat template.

        Returns:
            The token ids.
        """
        text = self.render_chat(messages, add_generation_prompt, template_options)
        return self.encode_continuation(text, context=())  # a template writes BOS itself


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


def _map_texts(value: Any, function: Callable[[str], str]) -> Any:
    """Applies a function to all texts of a message, or of another nested value, but not to roles and keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: one if key == "role" else _map_texts(one, function) for key, one in value.items()}
    return [_map_texts(one, function) for one in value] if isinstance(value, list | tuple) else value


def _call_with_text(function: Callable[[str], T], text: str) -> T:
    """Calls a function that encodes a text.

    Returns:
        The function's result.

    Raises:
        ValueError: if it raises. Half a surrogate pair is named, of which the library says that the type is wrong;
            standard input has them in place of invalid UTF-8 if no locale is set.
    """
    try:
        return call_backend("the tokenizer cannot encode this text", function, text)
    except ValueError:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not UTF-8: {error}") from error
        raise


def call_backend(problem: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Calls a function of the tokenizers library, whose Rust code raises plain Exceptions and BaseExceptions (panics).

    Args:
        problem: start of the error message.
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
        raise ValueError(f"{problem}: {files.shorten(error)}") from error
