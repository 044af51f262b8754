"""Loads the tokenizer of a Hugging Face directory."""

import itertools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvjax_models.formats import files
from kvjax_models.formats.end_tokens import find_end_tokens
from kvjax_models.formats.tokenizer import Tokenizer, call_backend


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Loads `tokenizer.json` and the optional files that complete it.

    These are tokenizer_config.json, special_tokens_map.json, chat_template.jinja, generation_config.json and
    config.json.

    Args:
        directory: a Hugging Face directory.

    Returns:
        The tokenizer.

    Raises:
        FileNotFoundError: if tokenizer.json is missing.
        ValueError: if a file is invalid, or the BOS or end-of-text token is unknown.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; convert a SentencePiece model (tokenizer.model) to it first")
    backend = call_backend(f"{path} is not a tokenizer", tokenizers.Tokenizer.from_file, str(path))
    # tokenizer.json may contain truncation and padding settings of the training run.
    backend.no_truncation()
    backend.no_padding()
    settings = _read_optional(directory, "tokenizer_config.json")
    special_tokens = _special_tokens(_read_optional(directory, "special_tokens_map.json") | settings)
    add_bos = settings.get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise ValueError(f"{directory / 'tokenizer_config.json'}: add_bos_token={add_bos!r} must be true or false")
    template = _chat_template(directory, settings)
    return Tokenizer(
        backend,
        prefix_ids=_prefix_ids(backend, add_bos, special_tokens.get("bos_token")),
        eos_ids=_eos_ids(directory, backend, special_tokens.get("eos_token"), template or ""),
        special_tokens=special_tokens,
        chat_template=template,
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns special tokens by role ("bos_token", ...), and lists of further ones, as transformers names them.

    Files contain a token as a string or as an object with "content".
    """
    extra = settings.get("extra_special_tokens")  # by role, or a list
    roles = {**settings, **(extra if isinstance(extra, Mapping) else {})}
    tokens: dict[str, Any] = {role: _content(token) for role, token in roles.items() if role.endswith("_token")}
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(settings.get(name), list):
            tokens[name] = [content for token in settings[name] if (content := _content(token)) is not None]
    return {role: token for role, token in tokens.items() if token}


def _content(token: Any) -> str | None:
    """Returns a token that a file contains as a string or as an object with "content"; None if it is neither."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else None


def _prefix_ids(backend: tokenizers.Tokenizer, add_bos_token: bool | None, bos_token: Any) -> tuple[int, ...]:
    """Returns the tokens before a text, from `add_bos_token` or else from the post-processor."""
    if add_bos_token is False:
        return ()
    if add_bos_token and bos_token is not None:
        return (_token_id(backend, bos_token, "add_bos_token is set, but bos_token"),)
    problem = "the post_processor of tokenizer.json cannot encode a text"
    added = backend.get_added_tokens_decoder()
    # A text with tokens separates special tokens before it from those after it.
    ids = range(backend.get_vocab_size())
    token = next((token for token in ids if token not in added and backend.id_to_token(token) is not None), None)
    text = "" if token is None else call_backend(problem, backend.decode, [token])
    encoding = call_backend(problem, backend.encode, f"a{text}", add_special_tokens=True)
    pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
    before = [token for token, _ in itertools.takewhile(lambda pair: pair[1], pairs)]
    if add_bos_token and not before:
        raise ValueError("tokenizer_config.json: add_bos_token is set, but no file has bos_token")
    return tuple(before)


def _eos_ids(directory: pathlib.Path, backend: tokenizers.Tokenizer, eos_token: Any, template: str) -> tuple[int, ...]:
    """Returns the tokens that finish a sequence: the end of a text and the end of the assistant's turn.

    As in transformers, generation_config.json has precedence over config.json, and that over its text_config. They
    often name the end of a text only, so `eos_token` and the end tokens in the chat template are added.

    Args:
        backend: the tokenizer.
        eos_token: the tokenizer's end-of-text token, or None.

    Raises:
        ValueError: if they are not token ids.
    """
    ids: list[int] = []
    config = _read_optional(directory, "config.json")
    text_config = config.get("text_config")
    sources = {
        "generation_config.json": _read_optional(directory, "generation_config.json"),
        "config.json": config,
        "config.json: text_config": text_config if isinstance(text_config, Mapping) else {},
    }
    for name, values in sources.items():
        value = values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ValueError(f"{directory / name}: eos_token_id={value!r} must be a token id or a list of token ids")
        break
    if not ids and eos_token is not None:
        _token_id(backend, eos_token, "eos_token")
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    names = [eos_token, *(token for token in find_end_tokens(added) if token in template)]
    named_ids = [backend.token_to_id(token) for token in names if token is not None]
    return tuple(dict.fromkeys([*ids, *(token for token in named_ids if token is not None)]))


def _token_id(backend: tokenizers.Tokenizer, token: str | None, name: str) -> int:
    """Returns the id of a special token.

    Raises:
        ValueError: if the tokenizer does not know it.
    """
    token_id = None if token is None else backend.token_to_id(token)
    if token_id is None:
        raise ValueError(f"tokenizer_config.json: {name}={token!r} is not in tokenizer.json")
    return token_id


def _chat_template(directory: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """Returns the chat template; its own file has precedence, as in transformers, then the template named "default".

    Raises:
        ValueError: if it is not a text.
    """
    if os.path.lexists(path := directory / "chat_template.jinja"):
        return files.read_text(path)
    template = settings.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        template = next((entry.get("template") for entry in entries if entry.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be a string, got {type(template).__name__}"
        )
    return template


def _read_optional(directory: pathlib.Path, name: str) -> dict[str, Any]:
    """Returns the object in an optional JSON file; {} if the file does not exist."""
    return files.read_json_object(directory / name) if os.path.lexists(directory / name) else {}
