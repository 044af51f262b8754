"""Values of a config.json, each held against what it must be: a wrong one is named with its key."""

import math
from collections.abc import Mapping
from typing import Any

from kvjax_models.model.rotary import RopeScaling

MOST = 2**31 - 1  # of any size: positions and token numbers are int32

Values = Mapping[str, Any]

# What a kind of scaling cannot do without.
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


def count(values: Values, key: str, *, least: int = 1, most: int = MOST) -> int:
    """A whole number in bounds."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{key}={value!r}: it must be a whole number from {least} to {most}")
    return value


def number(values: Values, key: str) -> float:
    """A finite number above 0."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{key}={value!r}: it must be a finite number above 0")
    return float(value)


def maybe_number(values: Values, key: str) -> float | None:
    """The same, or null."""
    return None if values.get(key) is None else number(values, key)


def truth(values: Values, key: str) -> bool:
    """true or false; what is not there is false."""
    value = values.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r}: it must be true or false")
    return value


def words(values: Values, key: str, length: int) -> list[Any] | None:
    """A list with one entry per layer, or null."""
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{key}={value!r}: it must be a list")
    if len(value) != length:
        raise ValueError(f"{key} names {len(value)} layers, num_hidden_layers={length}")
    return value


def check_tokens(values: Values, vocabulary: int) -> None:
    """Raises a ValueError where a text begins or ends with what is no token."""
    for key in ("bos_token_id", "eos_token_id"):
        given = values.get(key)
        for token in given if isinstance(given, list) else [given]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary:
                raise ValueError(f"{key}={given!r}: tokens are whole numbers below vocab_size={vocabulary}")


def rope_scaling(rope: Values, values: Values, turned: int) -> RopeScaling | None:
    """The scaling of a rotary embedding, from its own values and those of the model.

    Args:
        turned: dimensions of a head that are turned.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if values["model_type"] == "phi3" and kind in ("su", "yarn"):  # what its first configs called it
        kind = "longrope"
    kind = "default" if kind is None else kind
    readers = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope, "dynamic": _dynamic}
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in readers:
        raise ValueError(f"rope_type={kind!r} is not implemented; known: default, {', '.join(readers)}")
    if absent := [key for key in _NEEDED.get(kind, ()) if rope.get(key) is None]:
        raise ValueError(f"rope_type={kind!r} lacks {', '.join(absent)}")
    return readers[kind](rope, values, turned)


def _linear(rope: Values, values: Values, turned: int) -> RopeScaling:
    return RopeScaling("linear", number(rope, "factor"))


def _dynamic(rope: Values, values: Values, turned: int) -> RopeScaling:
    if turned < 4:
        raise ValueError(f"rope_type='dynamic' needs at least 4 turned dimensions of a head; there are {turned}")
    return RopeScaling("dynamic", number(rope, "factor"), original_length=values["max_position_embeddings"])


def _llama3(rope: Values, values: Values, turned: int) -> RopeScaling:
    low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
    if not low < high:
        raise ValueError(f"low_freq_factor={low} must be below high_freq_factor={high}")
    return RopeScaling(
        "llama3",
        number(rope, "factor"),
        low_frequency_factor=low,
        high_frequency_factor=high,
        original_length=_original(rope, values),
    )


def _yarn(rope: Values, values: Values, turned: int) -> RopeScaling:
    original = _original(rope, values)
    factor = maybe_number(rope, "factor") or values["max_position_embeddings"] / original
    attention = maybe_number(rope, "attention_factor")
    if attention is None:
        scale, of_all = maybe_number(rope, "mscale"), maybe_number(rope, "mscale_all_dim")
        attention = _yarn_factor(factor, 1.0)
        if scale and of_all:
            attention = _yarn_factor(factor, scale) / _yarn_factor(factor, of_all)
    fast, slow = maybe_number(rope, "beta_fast") or 32.0, maybe_number(rope, "beta_slow") or 1.0
    if not slow < fast:
        raise ValueError(f"beta_slow={slow} must be below beta_fast={fast}")
    return RopeScaling(
        "yarn",
        factor,
        original_length=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.get("truncate") is None or truth(rope, "truncate"),
        attention_factor=attention,
    )


def _yarn_factor(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(rope: Values, values: Values, turned: int) -> RopeScaling:
    original = _original(rope, values)
    factor = maybe_number(rope, "factor") or values["max_position_embeddings"] / original
    attention = maybe_number(rope, "attention_factor")
    if attention is None:
        if factor > 1 and original < 2:
            raise ValueError(f"original_max_position_embeddings={original}; rope_type='longrope' needs at least 2")
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor,
        original_length=original,
        attention_factor=attention,
        short_factors=_factors(rope, "short_factor", turned // 2),
        long_factors=_factors(rope, "long_factor", turned // 2),
    )


def _factors(rope: Values, key: str, pairs: int) -> tuple[float, ...]:
    given = rope[key]
    if not isinstance(given, list) or len(given) != pairs:
        size = f"a list of {len(given)}" if isinstance(given, list) else repr(given)
        raise ValueError(f"{key} is {size}: it must be a list of {pairs} numbers, one for each pair that is turned")
    return tuple(number({key: one}, key) for one in given)


def _original(rope: Values, values: Values) -> int:
    """Tokens of the context first trained on; what stands beside the rotary embedding's values (Phi-3) wins."""
    for place in (values, rope):
        if place.get("original_max_position_embeddings") is not None:
            return count(place, "original_max_position_embeddings")
    return values["max_position_embeddings"]
