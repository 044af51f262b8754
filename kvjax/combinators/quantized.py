"""Eight-bit storage of any policy's keys and values."""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp

from kvjax.policy import Policy, check_choices
from kvjax.segment import Recalled, Segment, map_parts
from kvjax.state import map_fields, state
from kvjax.storage import EIGHT_BIT, divided, is_eight_bit, over_columns, scales_of


@state
class InEightBits:
    numbers: Any  # the policy's state, with eight-bit numbers in its entries' place
    scales: Any  # the same with nothing but float32 scales in the entries' place: [..., S, 1] for [..., S, D]


@dataclasses.dataclass(frozen=True)
class Quantized(Policy[InEightBits]):
    """Any policy with keys and values in eight bits: symmetric, with a float32 scale for each key and each value, which
    attention folds into logits and weights. Staged tokens stay as they are.

    Stores that grow with the context quantise what is written to them, once. What a budget bounds is given to the
    policy in float32 at every compaction and stored again; entries that the policy leaves alone keep their bits.

    Bytes are those at rest. XLA:CPU has no products of eight-bit numbers with float32: it converts the keys once per
    compiled loop, to a float32 copy that lives as long as the loop, and the values at every step.

    Attributes:
        policy: any policy that is not quantised yet.
        storage: "int8" for -127 ... 127 (GPU, TPU and CPU), "fp8" for float8_e4m3fn, with 3 bits of mantissa.
    """

    policy: Policy
    storage: Literal["int8", "fp8"] = "int8"

    def __post_init__(self) -> None:
        check_choices(self)

    compact_every = property(lambda self: self.policy.compact_every)
    prompt_queries = property(lambda self: self.policy.prompt_queries)
    repeat = property(lambda self: self.policy.repeat)
    observes = property(lambda self: self.policy.observes)
    streams = property(lambda self: self.policy.streams)
    recalls = property(lambda self: self.policy.recalls)

    def at(self, spec) -> "Quantized":
        return dataclasses.replace(self, policy=self.policy.at(spec))

    def head_order(self, devices: int = 1) -> tuple[int, ...] | None:
        return self.policy.head_order(devices)

    def init(self, spec, row_keys) -> InEightBits:
        if spec.storage is not None:
            raise ValueError(f"Quantized({self.policy}): what holds it is stored in {spec.storage} already")
        inner = self.policy.init(dataclasses.replace(spec, storage=self.storage), row_keys)
        # Of zeros, as empty stores are, without the arithmetic: compiled, it would be done on constants of their size.
        dtype = EIGHT_BIT[self.storage].dtype
        numbers = lambda field, x: jnp.zeros(x.shape, dtype) if field.entries else x  # noqa: E731
        scales = lambda field, x: jnp.zeros((*x.shape[:-1], 1)) if field.entries else None  # noqa: E731
        return InEightBits(map_fields(numbers, inner), map_fields(scales, inner))

    def prefill(self, state: InEightBits, prompt) -> InEightBits:
        return self._store(self.policy.prefill(load(state), prompt))

    def read(self, state: InEightBits, newer):
        # What the policy reads of the numbers, with what it reads of the scales; where it computes with its entries
        # before they are read, what it reads of the numbers times the scales.
        of_scales = map_fields(lambda field, x, scale: scale if field.entries else x, state.numbers, state.scales)
        readings = (self.policy.read(inner, newer) for inner in (state.numbers, of_scales, load(state)))
        columns: dict[int, Any] = {}  # several parts may show one buffer
        return map_parts(functools.partial(_with_scales, columns), *readings)

    def observe(self, state: InEightBits, seen) -> InEightBits:
        # Learning changes no entry.
        return dataclasses.replace(state, numbers=self.policy.observe(state.numbers, seen))

    def compact(self, state: InEightBits, new) -> InEightBits:
        return self._store(self.policy.compact(load(state), new))

    def tell(self, state: InEightBits, prompt) -> Any:
        return self.policy.tell(state.numbers, prompt)

    def read_bytes(self, state: InEightBits) -> int:
        return self.policy.read_bytes(state.numbers)

    def _store(self, inner: Any) -> InEightBits:
        dtype = EIGHT_BIT[self.storage].dtype
        scales = map_fields(lambda field, x: scales_of(x, 1, dtype) if field.entries else None, inner)
        shrink = lambda field, x, scale: divided(x, scale, dtype) if field.entries else x  # noqa: E731
        return InEightBits(map_fields(shrink, inner, scales), scales)


def load(state: InEightBits) -> Any:
    """The policy's state with its entries in float32."""
    grow = lambda field, x, scale: x.astype(jnp.float32) * over_columns(scale, x) if field.entries else x  # noqa: E731
    return map_fields(grow, state.numbers, state.scales)


def _with_scales(columns: dict[int, Any], numbers: Segment | Recalled, scales: Any, loaded: Any) -> Segment | Recalled:
    if isinstance(numbers, Recalled):
        return numbers  # its store knows its own scales
    part = loaded
    column = lambda x: columns.setdefault(id(x), x[..., 0])  # noqa: E731
    # A number that is still in eight bits lies as it was stored (or came with its scales from the store itself).
    if is_eight_bit(numbers.keys.dtype):
        scale = column(scales.keys) if numbers.key_scale is None else numbers.key_scale
        part = dataclasses.replace(part, keys=numbers.keys, key_scale=scale)
    if numbers.values is not None and is_eight_bit(numbers.values.dtype):
        scale = column(scales.values) if numbers.value_scale is None else numbers.value_scale
        part = dataclasses.replace(part, values=numbers.values, value_scale=scale)
    return part
