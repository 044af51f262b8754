"""Text to and from the tokens of a Hugging Face directory, with its chat template and text streamed token by token."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import tokenizers

from kvjax_models.formats import chat_template, untrusted_files

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
    prefix: tuple[int, ...]
    eos_ids: tuple[int, ...]
    named: Mapping[str, str]
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
        return [*(self.prefix if add_bos else ()), *encoded.ids]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of tokens, with no spaces tidied away; bytes that are no character give U+FFFD."""
        decode = self.backend.decode
        return _guarded("the tokenizer cannot decode these tokens", decode, list(ids), skip_special_tokens=skip_special)

    def stream(self, ids: Iterable[int], context: Sequence[int] = (), skip_special: bool = True) -> Iterator[str]:
        """Pieces of text as tokens arrive, whole characters only; joined they are the text. See `Streamer`."""
        streamer = Streamer(self, context, skip_special)
        for token in ids:
            if piece := streamer.push(token):
                yield piece
        if piece := streamer.flush():
            yield piece

    def chat_text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Messages ({"role": ..., "content": ...}) as the checkpoint's chat template writes them.

        The text has its own BOS token where the template writes one: `encode` it without another, or use `apply_chat`.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses these messages, or takes more time
                or memory than any that is meant well (see `chat_template`).
        """
        if self.chat_template is None:
            raise ValueError(
                "this checkpoint has no chat template (chat_template in tokenizer_config.json, or chat_template.jinja);"
                " encode plain text, or use an instruction-tuned checkpoint"
            )
        variables = {"messages": messages, "tools": None, "documents": None, **self.named}
        return chat_template.render(self.chat_template, variables | {"add_generation_prompt": add_generation_prompt})

    def apply_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """The tokens of `chat_text`."""
        return self.encode(self.chat_text(messages, add_generation_prompt), add_bos=False)


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
        skip_special: leaves special tokens out, as in `Tokenizer.decode`.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = (), skip_special: bool = True):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._special = tokenizer.special_ids if skip_special else frozenset()
        self._window = [token for token in context if token not in self._special][-_LONGEST_WAIT:]
        self._settled, self._waiting = 0, 0
        # Either end of the window may lie inside a character, of up to four tokens, and byte-fallback decoders then
        # give no character of the whole run: the first whole stretch is the one to go by.
        for unfinished, cut in itertools.product(range(4), range(4)):
            whole = self._tokenizer.decode(self._window[cut : len(self._window) - unfinished], skip_special)
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


def load(directory: str | os.PathLike) -> Tokenizer:
    """Reads `tokenizer.json` and what lies beside it: tokenizer_config.json, special_tokens_map.json,
    chat_template.jinja, generation_config.json, config.json (all optional).

    Raises:
        FileNotFoundError: no tokenizer.json.
        ValueError: a file that cannot be read, or an end-of-text or BOS token that the tokenizer does not know.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not untrusted_files.there(directory, path.name):
        raise FileNotFoundError(f"{path} is not there; a SentencePiece model alone (tokenizer.model) must be converted")
    text = untrusted_files.read_text(directory, path.name)
    backend = _guarded(f"{path} is not a tokenizer", tokenizers.Tokenizer.from_str, text)
    # A tokenizer.json keeps the settings of its last use in training, which would cut or pad our texts.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_optional(directory, "tokenizer_config.json")
    named = _named_tokens(_read_optional(directory, "special_tokens_map.json") | settings)
    add_bos = settings.get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: add_bos_token={add_bos!r}; it must be true or false")
    return Tokenizer(
        backend,
        prefix=_prefix(backend, add_bos, named.get("bos_token")),
        eos_ids=_eos_ids(directory, backend, named.get("eos_token")),
        named=named,
        chat_template=_chat_template(directory, settings),
    )


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


def _named_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; files hold them as a string or as an object with "content"."""
    named = {}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = settings.get(role)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            named[role] = token
    return named


def _prefix(backend: tokenizers.Tokenizer, add_bos_token: bool | None, bos_token: str | None) -> tuple[int, ...]:
    """What goes before a text: tokenizer_config's word on BOS, else what the post-processor puts around nothing."""
    if add_bos_token:
        return (_token_id(backend, bos_token, "add_bos_token is set, but bos_token"),)
    if add_bos_token is not None:
        return ()
    around = backend.encode("", add_special_tokens=True).ids
    bos = None if bos_token is None else backend.token_to_id(bos_token)
    return (bos,) if bos is not None and around[:1] == [bos] else ()


def _eos_ids(directory: pathlib.Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Where generation ends: generation_config.json's word first, as in transformers."""
    for home, name in ((directory, "generation_config.json"), (untrusted_files.whole(directory), "config.json")):
        ids = _read_optional(home, name).get("eos_token_id")
        if ids is None:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in listed):
            raise ValueError(f"{directory / name}: eos_token_id={ids!r}; give a token's number, or a list of them")
        return tuple(listed)
    return () if eos_token is None else (_token_id(backend, eos_token, "eos_token"),)


def _token_id(backend: tokenizers.Tokenizer, token: str | None, what: str) -> int:
    identity = None if token is None else backend.token_to_id(token)
    if identity is None:
        raise ValueError(f"tokenizer_config.json: {what}={token!r} is not in tokenizer.json")
    return identity


def _chat_template(directory: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """The template's own file first, as in transformers; of several named ones the one called "default"."""
    if untrusted_files.there(directory, "chat_template.jinja"):
        return untrusted_files.read_text(directory, "chat_template.jinja")
    template = settings.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: chat_template is {type(template).__name__}, no text")
    return template


def _read_optional(directory: pathlib.Path, name: str) -> dict[str, Any]:
    """An optional file's object, {} where there is none."""
    return untrusted_files.read_object(directory, name) if untrusted_files.there(directory, name) else {}
