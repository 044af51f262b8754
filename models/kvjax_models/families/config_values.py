"""The values of a config.json; errors name the key."""

import math
from collections.abc import Mapping
from typing import Any

# Entries of `layer_types`; the last two are a gated delta rule and a short convolution.
FULL_ATTENTION, SLIDING_ATTENTION, LINEAR_ATTENTION = "full_attention", "sliding_attention", "linear_attention"
CONVOLUTION = "conv"
MAX_INTEGER = 2**31 - 1  # positions and token ids are int32


class ConfigValues(dict[str, Any]):
    """The values of a config.json by key, with checks of their types; all methods raise a ValueError."""

    def integer(self, key: str, *, minimum: int = 1) -> int:
        """Returns an integer from `minimum` to `MAX_INTEGER`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_INTEGER:
            raise ValueError(f"{key}={value!r} must be an integer from {minimum} to {MAX_INTEGER}")
        return value

    def number(self, key: str) -> float:
        """Returns a positive, finite number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{key}={value!r} must be a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Returns a number like `number`, or None if it is null or missing."""
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str) -> bool:
        """Returns a boolean; false if it is null or missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{key}={value!r} must be true or false")
        return bool(value)

    @property
    def rope(self) -> "ConfigValues":
        """The settings of the rotary embedding; `rope_scaling` has precedence, as in transformers."""
        value = self.get("rope_scaling") or self.get("rope_parameters") or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"rope_parameters={value!r} must be an object")
        return ConfigValues(value)

    def per_layer(self, key: str) -> list[Any] | None:
        """Returns a list with one entry per layer, or None if it is null or missing."""
        value, layers = self.get(key), self.integer("num_hidden_layers")
        if value is not None and not isinstance(value, list):
            raise ValueError(f"{key}={value!r} must be a list")
        if value is not None and len(value) != layers:
            raise ValueError(f"{key} has {len(value)} entries, but num_hidden_layers={layers}")
        return value
