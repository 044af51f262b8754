"""The tokenizer of a Hugging Face directory."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers

from kvjax_models.formats import untrusted_files
from kvjax_models.formats.tokenizer import Tokenizer, _guarded


def load_tokenizer(directory: str | os.PathLike) -> Tokenizer:
    """Reads `tokenizer.json` and what lies beside it: tokenizer_config.json, special_tokens_map.json,
    chat_template.jinja, generation_config.json, config.json (all optional).

    Raises:
        FileNotFoundError: no tokenizer.json.
        ValueError: a file that cannot be read, or an end-of-text or BOS token that the tokenizer does not know.
    """
    directory = pathlib.Path(directory)
    path = directory / "tokenizer.json"
    if not untrusted_files.has_entry(directory, path.name):
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
        prefix_ids=_prefix(backend, add_bos, named.get("bos_token")),
        eos_ids=_eos_ids(directory, backend, named.get("eos_token")),
        special_tokens=named,
        chat_template=_chat_template(directory, settings),
    )


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
    for home, name in (
        (directory, "generation_config.json"),
        (untrusted_files.weights_directory(directory), "config.json"),
    ):
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
    if untrusted_files.has_entry(directory, "chat_template.jinja"):
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
    return untrusted_files.read_json_object(directory, name) if untrusted_files.has_entry(directory, name) else {}
