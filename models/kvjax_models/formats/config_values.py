"""Checked access to the values of a config.json; errors name the key."""

from collections.abc import Mapping
from typing import Any

MAX_INTEGER = 2**31 - 1  # positions and token ids are int32
# Far above the sizes of any model, and small enough that nothing is computed or allocated for impossible ones.
_MAX_SIZES = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "moe_intermediate_size": 2**22,
    "vocab_size": 2**24,
    "num_experts": 2**14,
    "num_local_experts": 2**14,
}
# Ranges in which float32 computes with a number, by key.
_NUMBER_RANGE = (1e-6, 1e6)
_NUMBER_RANGES = {"rms_norm_eps": (1e-12, 1.0), "rope_theta": (2.0, 1e12)}

Values = Mapping[str, Any]


def integer(values: Values, key: str, *, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
    """Returns an integer.

    Args:
        values: values of the file.
        key: key of the integer.
        minimum: smallest allowed value.
        maximum: largest allowed value; sizes of a model have smaller limits.

    Raises:
        ValueError: if it is not an integer in this range.
    """
    value, maximum = values.get(key), min(maximum, _MAX_SIZES.get(key, maximum))
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ValueError(f"{key}={value!r} must be an integer from {minimum} to {maximum}")
    return value


def number(values: Values, key: str) -> float:
    """Returns a number in the range of its key, which float32 represents with all that is computed from it.

    Args:
        values: values of the file.
        key: key of the number.

    Raises:
        ValueError: if it is not a number in this range.
    """
    value = values.get(key)
    minimum, maximum = _NUMBER_RANGES.get(key, _NUMBER_RANGE)
    if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ValueError(f"{key}={value!r} must be a number from {minimum:g} to {maximum:g}")
    return float(value)


def optional_number(values: Values, key: str) -> float | None:
    """Returns a number like `number`, or None if it is null or missing.

    Args:
        values: values of the file.
        key: key of the number.
    """
    return None if values.get(key) is None else number(values, key)


def boolean(values: Values, key: str) -> bool:
    """Returns a boolean; false if it is null or missing.

    Args:
        values: values of the file.
        key: key of the boolean.

    Raises:
        ValueError: if it is not a boolean.
    """
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return bool(value)


def if_set(values: Values, key: str) -> dict[str, Any]:
    """Returns the key with its value, or {} if it is null or missing."""
    return {} if values.get(key) is None else {key: values[key]}


def per_layer_list(values: Values, key: str, layers: int) -> list[Any] | None:
    """Returns a list with one entry per layer, or None if it is null or missing.

    Args:
        values: values of the file.
        key: key of the list.
        layers: expected length.

    Raises:
        ValueError: if it is not a list of this length.
    """
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{key}={value!r} must be a list")
    if len(value) != layers:
        raise ValueError(f"{key} has {len(value)} entries, but num_hidden_layers={layers}")
    return value


def check_special_tokens(values: Values, vocab_size: int) -> None:
    """Checks that the BOS and end-of-text tokens are in the vocabulary.

    Args:
        values: values of the file.
        vocab_size: size of the vocabulary.

    Raises:
        ValueError: if one is not.
    """
    for key in ("bos_token_id", "eos_token_id"):
        value = values.get(key)
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{key}={value!r} must consist of integers from 0 to vocab_size - 1 = {vocab_size - 1}"
                )
