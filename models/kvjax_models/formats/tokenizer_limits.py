"""Limits on how much a tokenizer may lengthen a text, because its steps come from an untrusted file."""

import base64
import math
import struct
from collections.abc import Mapping
from typing import Any

MAX_GROWTH = 1000  # a text of 1 MB takes at most 1 GB
MAX_TOKEN_CHARACTERS = 10_000


def check_growth(settings: Mapping[str, Any]) -> None:
    """Checks that encoding lengthens no text too much.

    The library applies the normalizer already when it loads a tokenizer, to added tokens.

    Args:
        settings: content of tokenizer.json.

    Raises:
        ValueError: if steps that replace text could lengthen it more than `MAX_GROWTH` times.
    """
    encode = [settings.get("normalizer"), settings.get("pre_tokenizer")]
    for names, steps in (("normalizer and pre_tokenizer", encode), ("decoder", settings.get("decoder"))):
        if (factor := growth(steps)) > MAX_GROWTH:
            raise ValueError(f"its {names} may lengthen a text {factor:.3g} times; the maximum is {MAX_GROWTH}")


def check_tokens(settings: Mapping[str, Any]) -> None:
    """Checks the length of tokens; the library takes minutes to load very long ones.

    Args:
        settings: content of tokenizer.json.

    Raises:
        ValueError: if a token is longer than `MAX_TOKEN_CHARACTERS`.
    """
    vocabulary = (settings.get("model") or {}).get("vocab") or ()
    tokens = [item if isinstance(item, str) else item[0] for item in vocabulary]
    tokens += [token["content"] for token in settings.get("added_tokens") or ()]
    if (longest := max(map(len, tokens), default=0)) > MAX_TOKEN_CHARACTERS:
        raise ValueError(f"it has a token of {longest} characters; the maximum is {MAX_TOKEN_CHARACTERS}")


def growth(step: Any) -> float:
    """Returns an upper bound of the factor by which a step lengthens a text in bytes; constant parts count as small.

    Args:
        step: settings of a normalizer, pre-tokenizer or decoder, or a list of them.

    Returns:
        The factor; infinity if a setting is invalid.
    """
    try:
        return _growth(step)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError, struct.error):
        return math.inf


def _growth(step: Any) -> float:
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, Mapping):
        return 1.0
    kind = step.get("type")
    if kind == "Sequence":
        return math.prod(_growth(value) for value in step.values() if isinstance(value, list))
    if kind == "Replace":
        pattern, content = step["pattern"], len(step["content"].encode())
        length = len(pattern.get("String", "").encode())
        return max(1.0, content / length if length else 1.0 + content)  # a regular expression may match no character
    if kind == "Prepend":
        return 1.0 + len(step["prepend"]) / 16
    if kind == "Precompiled":
        return _charsmap_growth(base64.b64decode(step["precompiled_charsmap"]))
    return {"ByteLevel": 2.0, "Metaspace": 4.0, "BertNormalizer": 2.0, "Nmt": 2.0}.get(str(kind), 1.0)


def _charsmap_growth(charsmap: bytes) -> float:
    """Returns the bytes of the longest replacement in a SentencePiece character map: a trie, then texts with zeros."""
    [size] = struct.unpack_from("<I", charsmap)
    return max(map(len, charsmap[4 + size :].split(b"\0")), default=1) or 1.0
