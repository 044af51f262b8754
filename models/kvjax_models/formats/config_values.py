"""Checked access to the values of a config.json; errors name the key."""

import math
from collections.abc import Mapping
from typing import Any

MAX_INTEGER = 2**31 - 1  # positions and token ids are int32
Values = Mapping[str, Any]


def integer(values: Values, key: str, *, minimum: int = 1) -> int:
    """Returns an integer.

    Args:
        values: values of the file.
        key: key of the integer.
        minimum: smallest allowed value.

    Raises:
        ValueError: if it is not an integer from `minimum` to `MAX_INTEGER`.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_INTEGER:
        raise ValueError(f"{key}={value!r} must be an integer from {minimum} to {MAX_INTEGER}")
    return value


def number(values: Values, key: str) -> float:
    """Returns a positive number.

    Args:
        values: values of the file.
        key: key of the number.

    Raises:
        ValueError: if it is not a positive, finite number.
    """
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key}={value!r} must be a positive number")
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
