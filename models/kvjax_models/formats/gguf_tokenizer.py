"""Builds the tokenizer in the metadata of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

Reference:
    llama-vocab.cpp of llama.cpp, for the pre-tokenizers by name; tokenizers of the models on the Hugging Face hub.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from kvjax_models.formats.end_tokens import FILL_IN_THE_MIDDLE, find_end_tokens
from kvjax_models.formats.gguf_file import GGUFFile
from kvjax_models.formats.tokenizer import Tokenizer, call_backend

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # entries of tokenizer.ggml.token_type
_SPECIAL = (_UNKNOWN, _CONTROL)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LINES_AND_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_GPT_4O = (
    rf"{_START}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_START}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
_TEKKEN = (
    rf"{_START}{_UPPER}*{_LOWER}+|{_START}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
)
# Pre-tokenizers by tokenizer.ggml.pre: a regular expression that matches words; None selects GPT-2's.
_WORDS: dict[str, str | None] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "jais"), None),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "glm4", "chatglm-bpe"), _LLAMA_3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN_2),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "tekken": _TEKKEN,
}
_SINGLE_DIGITS = ("smollm", "refact", "starcoder", "command-r", "codeshell")  # GPT-2's words, digits one by one
# A word that is in the vocabulary is a single token, even if merges do not lead to it.
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken", "llama4", "gpt-4o")
_PHI_3 = re.compile(r"phi[-_ ]?3", re.IGNORECASE)
_KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # special tokens of Phi-3 that do not include the spaces after them
_NFC = ("qwen2", "deepseek-r1-qwen")
_ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")  # without tokenizer.ggml.add_bos_token
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}  # without tokenizer.ggml.bos_token_id and eos_token_id
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # keys of tokens that finish a sequence
_ROLES = {  # variables of chat templates, with the keys tokenizer.ggml.*_token_id
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "sep_token": "seperator",  # as GGUF spells it
    "pad_token": "padding",
    "cls_token": "cls",
    "mask_token": "mask",
}


def load_tokenizer(file: GGUFFile) -> Tokenizer:
    """Returns the tokenizer in a GGUF file.

    Raises:
        ValueError: if the tokenizer is missing, invalid or not supported.
    """
    try:
        return _tokenizer(file)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def _tokenizer(file: GGUFFile) -> Tokenizer:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("tokenizer.ggml.tokens must be a list of strings: the file has no tokenizer")
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = np.ones(len(tokens), np.int32)
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type must be an array of {len(tokens)} integers")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"tokenizer.ggml.tokens repeats {len(tokens) - len(vocabulary)} tokens")
    model = file.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level_bpe(file, vocabulary)
    elif model == "llama":
        backend = _sentencepiece_bpe(file, tokens, vocabulary, kinds)
    else:
        raise ValueError(f"tokenizer.ggml.model={model!r} is not supported; supported: gpt2, llama")
    end_tokens, strips = _spelled_end_tokens(vocabulary, kinds), _strips_spaces(file)
    added = [
        tokenizers.AddedToken(
            tokens[index],
            normalized=False,
            special=bool(kinds[index] != _USER_DEFINED or index in end_tokens),
            rstrip=strips and tokens[index] not in _KEEP_SPACES,
        )
        for index in sorted(
            {*np.flatnonzero(np.isin(kinds, (_UNKNOWN, _CONTROL, _USER_DEFINED))).tolist(), *end_tokens}
        )
        if tokens[index]
    ]
    call_backend("the added tokens are invalid", backend.add_tokens, added)
    ids = {role: _token_id(file, role, tokens) for role in (*_ROLES.values(), *_END_ROLES)}
    for role, default in _SENTENCEPIECE_IDS.items() if model == "llama" else ():
        if f"tokenizer.ggml.{role}_token_id" not in file.metadata and default < len(tokens):
            ids[role] = default
    add_bos = file.metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        is_implied = model == "llama" or file.metadata.get("tokenizer.ggml.pre") in _ADD_BOS
        add_bos = is_implied and ids["bos"] is not None
    if not isinstance(add_bos, bool):
        raise ValueError(f"tokenizer.ggml.add_bos_token={add_bos!r} must be true or false")
    if add_bos and ids["bos"] is None:
        raise ValueError("tokenizer.ggml.bos_token_id is missing, but add_bos_token is set")
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template must be a string, got {type(template).__name__}")
    return Tokenizer(
        backend,
        prefix_ids=(ids["bos"],) if add_bos and ids["bos"] is not None else (),
        eos_ids=tuple(dict.fromkeys([*(i for role in _END_ROLES if (i := ids[role]) is not None), *end_tokens])),
        special_tokens={role: tokens[i] for role, key in _ROLES.items() if (i := ids[key]) is not None},
        chat_template=template,
    )


def _strips_spaces(file: GGUFFile) -> bool:
    """Returns whether special tokens include the white space after them, which only Phi-3's tokenizer does.

    llama.cpp recognizes these files by their name; files of fine-tuned models have other names.
    """
    is_phi3 = file.metadata.get("general.architecture") == "phi3"
    is_sentencepiece = file.metadata.get("tokenizer.ggml.model") == "llama"  # Phi-4 has another tokenizer
    return (is_phi3 and is_sentencepiece) or bool(_PHI_3.search(str(file.metadata.get("general.name", ""))))


def _spelled_end_tokens(vocabulary: dict[str, int], kinds: np.ndarray) -> list[int]:
    """Returns the ids of tokens whose spelling says that they end a turn or a text, as llama.cpp does.

    Args:
        vocabulary: token ids.
        kinds: types by id. These tokens are special whatever their type, except an HTML tag that is text.
    """
    fill_in_the_middle = [next(filter(vocabulary.__contains__, names), None) for names in FILL_IN_THE_MIDDLE]
    names = [*find_end_tokens(vocabulary), *(name for name in fill_in_the_middle if name is not None)]
    return [vocabulary[name] for name in names if name != "</s>" or kinds[vocabulary[name]] == _CONTROL]


def _byte_level_bpe(file: GGUFFile, vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer.

    Args:
        vocabulary: token ids.

    Raises:
        ValueError: if merges are missing, or the pre-tokenizer is not supported.
    """
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ValueError("tokenizer.ggml.merges must be a list of strings")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if invalid := [pair for pair in pairs if len(pair) != 2]:
        raise ValueError(f"tokenizer.ggml.merges: {' '.join(invalid[0])!r} is not a pair of tokens")
    words = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    backend = _new_backend(vocabulary, pairs, ignore_merges=words in _IGNORE_MERGES)
    if words in _SINGLE_DIGITS:
        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif words in _WORDS:
        pattern = _WORDS[words]
        split = [] if pattern is None else [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
        steps = [*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    else:
        raise ValueError(
            f"tokenizer.ggml.pre={words!r} is not supported; supported: {', '.join(sorted([*_WORDS, *_SINGLE_DIGITS]))}"
        )
    if words in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    file: GGUFFile, tokens: Sequence[str], vocabulary: dict[str, int], kinds: np.ndarray
) -> tokenizers.Tokenizer:
    """Returns a BPE tokenizer with SentencePiece's vocabulary; merges follow from the scores of its pieces.

    Args:
        tokens: the pieces.
        vocabulary: their ids.
        kinds: types by id.

    Raises:
        ValueError: if scores are missing.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores must be an array of {len(tokens)} numbers")
    unknown = _token_id(file, "unknown", tokens)
    backend = _new_backend(
        vocabulary,
        # Text must not become a special token.
        _merges({token: index for token, index in vocabulary.items() if kinds[index] not in _SPECIAL}, scores),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    add_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend(_SPACE)] if add_space else []
    strip = [decoders.Strip(" ", 1, 0)] if add_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(vocabulary: dict[str, int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Returns the merges of a SentencePiece BPE vocabulary in the order of their priority.

    Every split of a piece into two pieces is a merge; its priority is the score of the merged piece, then the ids of
    the two.

    Args:
        vocabulary: ids by piece.
        scores: scores by id; larger merges first.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if (first := vocabulary.get(left)) is not None and (second := vocabulary.get(right)) is not None:
                merges.append((-float(scores[index]), first, second, left, right))
    merges.sort(key=lambda merge: merge[:3])
    return [merge[3:] for merge in merges]


def _new_backend(vocabulary: dict[str, int], merges: Sequence[Any], **options: Any) -> tokenizers.Tokenizer:
    """Returns a tokenizer with a BPE model.

    Args:
        vocabulary: ids by token.
        merges: pairs of tokens.
        **options: further arguments of `tokenizers.models.BPE`.
    """
    options = {name: value for name, value in options.items() if value is not None}
    model = call_backend("the vocabulary is invalid", models.BPE, vocab=vocabulary, merges=merges, **options)
    return tokenizers.Tokenizer(model)


def _token_id(file: GGUFFile, role: str, tokens: Sequence[str]) -> int | None:
    """Returns the id of a special token, None if the file has none.

    Args:
        role: "bos", "eos", ...

    Raises:
        ValueError: if it is not in the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    value = file.metadata.get(key)
    if value is None or value in (-1, 2**32 - 1):  # llama.cpp's "none"
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ValueError(f"{key}={value!r} must be an integer from 0 to {len(tokens) - 1}")
    return value
