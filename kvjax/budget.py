"""How large a cache may be, and the policy that fills so much."""

import dataclasses
import re
from collections.abc import Callable

import jax

from kvjax.cache import Cache, init, layer_policy, read_bytes
from kvjax.policy import Policy
from kvjax.spec import CacheSpec, whole_tiles
from kvjax.state import cache_bytes

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@dataclasses.dataclass(frozen=True)
class Budget:
    """How large a cache may be: slots per head, a fraction of exact's bytes, or bytes of a sequence over all layers."""

    text: str
    slots: int | None = None
    fraction: float | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """Raises a ValueError for what is no budget."""
        if match := re.fullmatch(r"(\d+)", text):
            return cls(text, slots=int(match[1]))
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)%", text):
            return cls(text, fraction=float(match[1]) / 100)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)", text):
            return cls(text, bytes=int(float(match[1]) * _UNITS[match[2]]))
        raise ValueError(f"budget {text!r}: give slots (1024), a share of exact's bytes (25%) or bytes (64MiB)")

    @classmethod
    def of(cls, given: "int | str | Budget") -> "Budget":
        """A budget as people write it: slots, "25%", "64MiB" or one that is a budget already."""
        return given if isinstance(given, Budget) else cls.parse(str(given))

    def limit(self, spec: CacheSpec, tokens: int) -> int:
        """Bytes per row and layer, where exact holds so many tokens."""
        if self.fraction is not None:
            return int(self.fraction * spec.exact_bytes(tokens))
        if self.bytes is not None:
            return self.bytes // spec.layers
        raise ValueError(f"budget {self.text!r} gives slots, not bytes")

    def __str__(self) -> str:
        return self.text


def abstract_cache(policy: Policy, spec: CacheSpec) -> Cache:
    """The cache that `kvjax.init` would make, as shapes and dtypes only."""
    return jax.eval_shape(lambda: init(policy, spec, jax.random.split(jax.random.key(0), spec.batch)))


def row_bytes(policy: Policy, spec: CacheSpec) -> int:
    """Device bytes that the policy keeps for one row of one layer, all buffers counted."""
    return cache_bytes(abstract_cache(policy, dataclasses.replace(spec, batch=1))).device


def row_read_bytes(policy: Policy, spec: CacheSpec) -> int:
    """Bytes of cache that decoding a token of one row reads in one layer."""
    return read_bytes(abstract_cache(policy, dataclasses.replace(spec, batch=1)))


def fit_bytes(make: Callable[[int], Policy], spec: CacheSpec, limit: int) -> Policy:
    """The policy with the largest budget in whole tiles (see `whole_tiles`) that stays within `limit` bytes per row and
    layer: bytes held, or bytes read per token for a policy that recalls, on the average of all layers.

    Args:
        make: makes a policy of a budget in slots, e.g. `lambda budget: kvjax.Uniform(budget, sinks=16)`.
        spec: what the cache is made for; neither batch nor layer matter.
        limit: bytes per row and layer, all buffers (staging, counters, keys of randomness) included.

    Raises:
        ValueError: when no budget fits, with the reason of the smallest one tried.
    """

    def size(budget: int) -> float:
        policy = make(budget)
        measure = row_read_bytes if policy.recalls else row_bytes
        sizes = [measure(policy, dataclasses.replace(spec, layer=layer)) for layer in range(spec.layers)]
        return sum(sizes) / spec.layers

    low = smallest = _smallest_budget(make, spec, limit)
    if size(low) > limit:
        raise ValueError(
            f"limit={limit} bytes per row and layer is too small: budget={low} already takes {size(low):g}"
        )
    high = low
    while size(high := high * 2) <= limit:
        if make(high).recalls and high >= spec.max_prompt + spec.max_new:
            return make(high)  # all there is may be read
        if high > limit:
            raise ValueError(f"{make(low)} does not grow with its budget: give it slots, not bytes")
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= limit else (low, middle)
    return make(max(whole_tiles(low), smallest))


def _smallest_budget(make: Callable[[int], Policy], spec: CacheSpec, limit: int) -> int:
    """The smallest budget (to a factor of two, then exactly) that `make` accepts."""
    accepted, refused, reason = 1, 0, ""
    while True:
        try:
            _try_layers(make(accepted), spec)
            break
        except ValueError as error:
            refused, reason = accepted, str(error)
            accepted *= 2
            if accepted > limit:
                raise ValueError(f"no budget within limit={limit} bytes is accepted: {reason}") from error
    while accepted - refused > 1:
        middle = (accepted + refused) // 2
        try:
            _try_layers(make(middle), spec)
            accepted = middle
        except ValueError:
            refused = middle
    return accepted


def _try_layers(policy: Policy, spec: CacheSpec) -> None:
    """Raises a ValueError where a layer cannot have a cache of this policy; equal layers are tried once."""
    specs = [dataclasses.replace(spec, layer=layer) for layer in range(spec.layers)]
    for of_layer in {layer_policy(policy, spec): spec for spec in specs}.values():
        abstract_cache(policy, of_layer)


def readable_bytes(count: float) -> str:
    """Bytes in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
