"""Storage of any policy's keys and values in eight bits or fewer."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax import storage
from kvjax.attention import attend_reading
from kvjax.combinators.by_head import ByHead
from kvjax.combinators.host_memory import HostMemory
from kvjax.partials import output
from kvjax.policy import Policy
from kvjax.segment import Recalled, Segment, map_parts
from kvjax.state import BATCH, ArrayField, map_fields, state
from kvjax.storage import Storage, StorageName, Stored, is_stored


@state
class Narrow:
    numbers: Any  # the policy's state, with stored numbers in its entries' place
    scales: Any  # the same with nothing but scales in the entries' place: [..., S, 1] for [..., S, D]
    center: Float[Array, "B H_kv D"]  # float32, what stored keys are without
    # Of means that go on taking tokens in, what storing left of them, stored too.
    rest_numbers: Any
    rest_scales: Any
    value_center: Float[Array, "B H_kv D_v"] | None  # float32, what the stored values' weighted mean lacks


@dataclasses.dataclass(frozen=True)
class Quantized(Policy[Narrow]):
    """Any policy with keys and values in few bits, packed, with a bfloat16 scale for each key and each value, which
    attention folds into logits and weights. Both are turned by a fixed rotation before they are stored
    (`kvjax.storage`). Staged tokens stay as they are.

    Stores that grow with the context quantise what is written to them, once. What a budget bounds is given to the
    policy in float32 at every compaction and stored again; entries that the policy leaves alone keep their bits. Means
    that take tokens in would drift by that: what storing leaves of them is kept beside in eight bits, which only
    compactions read, and of values the error of their weighted mean, which attention adds.

    Attributes:
        policy: any policy that is not quantised yet.
        storage: "int8" for -127 ... 127; "fp8" for float8_e4m3fn, with 3 bits of mantissa; "int4", "int3" and "int2"
            for uniform grids of 16, 8 and 4 numbers.
        value_storage: the form of the values, where it is another; both are then of fewer than eight bits.
    """

    policy: Policy
    storage: StorageName = "int8"
    value_storage: StorageName | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        form = self.form
        if form.keys != form.values and None in (form.key_bits, form.value_bits):
            forms = f"storage={self.storage!r} and value_storage={self.value_storage!r}"
            raise ValueError(f"{forms}: where they differ both must be of fewer than eight bits")

    @property
    def form(self) -> Storage:
        """What keys and values are kept in."""
        return Storage(self.storage, self.value_storage or self.storage)

    compact_every = property(lambda self: self.policy.compact_every)
    prompt_queries = property(lambda self: self.policy.prompt_queries)
    repeat = property(lambda self: self.policy.repeat)
    observes = property(lambda self: self.policy.observes)
    streams = property(lambda self: self.policy.streams)
    recalls = property(lambda self: self.policy.recalls)

    def at(self, spec) -> Policy:
        return _inside(self, self.policy.at(spec))

    def head_order(self, devices: int = 1) -> tuple[int, ...] | None:
        return self.policy.head_order(devices)

    def init(self, spec, row_keys) -> Narrow:
        if spec.storage is not None:
            raise ValueError(f"Quantized({self.policy}): what holds it is stored in {spec.storage.keys} already")
        inner = self.policy.init(dataclasses.replace(spec, storage=self.form), row_keys)
        center = jnp.zeros((spec.batch, spec.kv_heads, spec.head_dim))
        narrow = _narrowed(
            inner,
            center,
            lambda field, x: storage.empty(self._name(field), x.shape),
            lambda field, x, _: storage.empty(_REST, x.shape),
        )
        value_center = jnp.zeros((spec.batch, spec.kv_heads, spec.value_width)) if _has_means(narrow) else None
        return dataclasses.replace(narrow, value_center=value_center)

    def prefill(self, state: Narrow, prompt) -> Narrow:
        there = jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None]
        return self._store(self.policy.prefill(self.load(state), prompt), self._center(state, prompt.keys, there))

    def read(self, state: Narrow, newer):
        # What the policy reads of the numbers, with what it reads of the scales; where it computes with its entries
        # before they are read, what it reads of what they stand for.
        of_scales = map_fields(lambda field, x, scale: scale if field.entries else x, state.numbers, state.scales)
        readings = (self.policy.read(inner, newer) for inner in (state.numbers, of_scales, self.load(state)))
        columns: dict[int, Any] = {}  # several parts may show one buffer
        center = None if self.policy.pools_heads else state.center
        show = functools.partial(_with_scales, self.form, center, state.value_center, columns)
        return map_parts(show, *readings)

    def observe(self, state: Narrow, seen) -> Narrow:
        # Learning changes no entry.
        return dataclasses.replace(state, numbers=self.policy.observe(state.numbers, seen))

    def compact(self, state: Narrow, new) -> Narrow:
        stored = self._store(self.policy.compact(self.load(state), new), self._center(state, new.keys, new.present))
        if not _has_means(stored):
            return stored
        # Means are not as they were, by a little, where they are stored again.
        came = new.count > 0

        def where_any_came(field: ArrayField, new: Array, old: Array) -> Array:
            of_row = [came.shape[0] if name == BATCH else 1 for name in field.axes]
            return jnp.where(came.reshape(of_row), new, old) if BATCH in field.axes else new

        return map_fields(where_any_came, stored, state)

    def tell(self, state: Narrow, prompt) -> Any:
        return self.policy.tell(state.numbers, prompt)

    def read_bytes(self, state: Narrow) -> int:
        return self.policy.read_bytes(state.numbers)

    def load(self, state: Narrow) -> Any:
        """The policy's state with its entries in float32."""

        def grow(field: ArrayField, x: Any, scale: Any, rest: Any, rest_scale: Any) -> Any:
            if not field.entries:
                return x
            loaded = storage.load(x, scale, storage.FORMATS[self._name(field)].bits)
            loaded = loaded if rest is None else loaded + storage.load(rest, rest_scale, storage.FORMATS[_REST].bits)
            return loaded if _is_value(field) else loaded + _beside(state.center, loaded)

        return map_fields(grow, state.numbers, state.scales, state.rest_numbers, state.rest_scales)

    def _center(self, state: Narrow, keys: Array, there: Bool[Array, "B T"]) -> Float[Array, "B H_kv D"]:
        if self.policy.pools_heads:
            return state.center  # a slot does not say whose it is
        return storage.mean_of_first(state.center, keys, there[:, None])

    def _store(self, inner: Any, center: Float[Array, "B H_kv D"]) -> Narrow:
        def own(field: ArrayField, x: Any) -> Any:
            return x if _is_value(field) else x - _beside(center, x)

        def stored(field: ArrayField, x: Any) -> Stored:
            return storage.store(own(field, x), storage.FORMATS[self._name(field)], unbiased=not _is_value(field))

        def rest(field: ArrayField, x: Any, entry: Stored) -> Stored:
            left = own(field, x) - storage.load(*entry, storage.FORMATS[self._name(field)].bits)
            return storage.store(left, storage.FORMATS[_REST])

        narrow = _narrowed(inner, center, stored, rest)
        if not _has_means(narrow):
            return narrow
        lacking = _mean_value(self.policy, inner, center) - _mean_value(self, narrow, center)
        return dataclasses.replace(narrow, value_center=lacking)

    def _name(self, field: ArrayField) -> str:
        return self.form.values if _is_value(field) else self.form.keys


_REST = "int8"  # the form of what storing leaves of means


def _has_means(state: Narrow) -> bool:
    return bool(jax.tree.leaves(state.rest_scales))


def _mean_value(policy: Policy, state: Any, like: Float[Array, "B H_kv D"]) -> Float[Array, "B H_kv D_v"]:
    """Of all that the state shows, by its weights: what a query of zeros reads."""
    reading = policy.read(state, jnp.zeros((like.shape[0], 1), jnp.int32))
    return output(attend_reading(jnp.zeros_like(like)[:, None], reading))[:, 0]


def _is_value(field: ArrayField) -> bool:
    return field.axes[-1] == "D_v"


def _beside(center: Float[Array, "B H_kv D"], x: Float[Array, "B H_kv *A D"]) -> Float[Array, "B H_kv *#A D"]:
    return jnp.expand_dims(center, tuple(range(2, x.ndim - 1)))


def _inside(quantized: Quantized, policy: Policy) -> Policy:
    """Quantised where heads have buffers of their own, and below what says where these lie."""
    if isinstance(policy, ByHead):
        return ByHead(tuple(dataclasses.replace(quantized, policy=own) for own in policy.policies))
    if isinstance(policy, HostMemory):
        return dataclasses.replace(policy, policy=_inside(quantized, policy.policy))
    return dataclasses.replace(quantized, policy=policy)


def _narrowed(
    inner: Any,
    center: Float[Array, "B H_kv D"],
    stored: Callable[[ArrayField, Any], Stored],
    rest: Callable[[ArrayField, Any, Stored], Stored],
) -> Narrow:
    """A policy's state with its entries stored, and what is left of means."""
    entries = map_fields(lambda field, x: stored(field, x) if field.entries else None, inner)
    rests = map_fields(lambda field, x, entry: rest(field, x, entry) if field.means else None, inner, entries)
    numbers = map_fields(lambda field, x, entry: entry.numbers if field.entries else x, inner, entries)
    scales = map_fields(lambda field, x, entry: entry.scale if field.entries else None, inner, entries)
    rest_numbers = map_fields(lambda field, x, entry: entry.numbers if field.means else None, inner, rests)
    rest_scales = map_fields(lambda field, x, entry: entry.scale if field.means else None, inner, rests)
    return Narrow(numbers, scales, center, rest_numbers, rest_scales, None)


def _with_scales(
    form: Storage,
    center: Float[Array, "B H_kv D"] | None,
    value_center: Float[Array, "B H_kv D_v"] | None,
    columns: dict[int, Any],
    numbers: Segment | Recalled,
    scales: Any,
    loaded: Any,
) -> Segment | Recalled:
    if isinstance(numbers, Recalled):
        return numbers  # its store knows its own scales
    part = loaded
    column = lambda x: columns.setdefault(id(x), x[..., 0])  # noqa: E731
    # A number that is still in its stored form lies as it was stored (or came with its scales from the store itself).
    if is_stored(numbers.keys.dtype):
        own = numbers.key_scale is not None
        scale, center = (numbers.key_scale, numbers.center) if own else (column(scales.keys), center)
        part = dataclasses.replace(part, keys=numbers.keys, key_scale=scale, key_bits=form.key_bits, center=center)
    if numbers.values is not None and is_stored(numbers.values.dtype):
        scale = column(scales.values) if numbers.value_scale is None else numbers.value_scale
        part = dataclasses.replace(part, values=numbers.values, value_scale=scale, value_bits=form.value_bits)
    if part.feeds == "both":
        part = dataclasses.replace(part, value_center=value_center)
    return part
