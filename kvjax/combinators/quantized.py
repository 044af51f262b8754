"""Storage of any policy's keys and values in eight bits or fewer."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax import storage
from kvjax.attention import attend_reading
from kvjax.combinators.by_head import ByHead
from kvjax.combinators.host_memory import HostMemory
from kvjax.partials import output
from kvjax.policy import Policy
from kvjax.segment import Recalled, Segment, cut, map_parts
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
    whole: Any  # entries of sinks and recent tokens as they came, which `numbers` are without: [..., first, D]; or none


@dataclasses.dataclass(frozen=True)
class Quantized(Policy[Narrow]):
    """Any policy with keys and values in few bits, packed, with a bfloat16 scale for each key and each value, which
    attention folds into logits and weights. Both are turned by a fixed rotation before they are stored
    (`kvjax.storage`). Staged tokens stay as they are; sinks and recent tokens where that is asked for.

    Stores that grow with the context quantise what is written to them, once; what recall chooses by (Quest's bounds,
    InfiniGen's partial keys) is in eight bits. What a budget bounds is given to the
    policy in float32 at every compaction and stored again; entries that the policy leaves alone keep their bits. Means
    that take tokens in would drift by that: what storing leaves of them is kept beside in eight bits, which only
    compactions read, and of values the error of their weighted mean, which attention adds.

    Attributes:
        policy: any policy that is not quantised yet.
        storage: "int8" for -127 ... 127; "fp8" for float8_e4m3fn, with 3 bits of mantissa; "int4", "int3" and "int2"
            for uniform grids of 16, 8 and 4 numbers.
        value_storage: the form of the values, where it is another; both are then of fewer than eight bits.
        whole_window: sinks and recent tokens stay as they came, in the cache's dtype: those of the policy's settings,
            and what waits in a window to be filed. Where heads share slots (`AdaKV`) none are known to be.
    """

    policy: Policy
    storage: StorageName = "int8"
    value_storage: StorageName | None = None
    whole_window: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        form = self.form
        if form.keys != form.values and None in (form.key_bits, form.value_bits):
            forms = f"storage={self.storage!r} and value_storage={self.value_storage!r}"
            raise ValueError(f"{forms}: where they differ both must be of fewer than eight bits")

    @property
    def form(self) -> Storage:
        """What keys and values are kept in."""
        return Storage(self.storage, self.value_storage or self.storage, self.whole_window)

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
            *self._apart(inner),
            center,
            lambda field, x: storage.empty(self._name(field), x.shape),
            lambda field, x, _: storage.empty(_REST, x.shape),
        )
        value_center = jnp.zeros((spec.batch, spec.kv_heads, spec.value_width)) if _has_means(narrow) else None
        return dataclasses.replace(narrow, value_center=value_center)

    def prefill(self, state: Narrow, prompt) -> Narrow:
        there = jnp.arange(prompt.keys.shape[2]) < prompt.lengths[:, None]
        filled = self.policy.prefill(self.load(state), prompt)
        return self._store(filled, state, self._center(state, prompt.keys, there))

    def read(self, state: Narrow, newer):
        # What the policy reads of the numbers, with what it reads of the scales; where it computes with its entries
        # before they are read, or some of their slots are not stored, what it reads of what they stand for.
        loaded, cuts = self.load(state), {}

        def numbers(field: ArrayField, x: Any, scale: Any, whole: Any, own: Any) -> Any:
            if whole is None:
                return x
            cuts[id(own)] = _Cut(whole, x, scale)
            return own

        def scales(field: ArrayField, x: Any, scale: Any, whole: Any, own: Any) -> Any:
            return x if not _is_kept(field) else scale if whole is None else own

        views = [map_fields(view, state.numbers, state.scales, state.whole, loaded) for view in (numbers, scales)]
        readings = [self.policy.read(inner, newer) for inner in (*views, loaded)]
        columns: dict[int, Any] = {}  # several parts may show one buffer
        center = None if self.policy.pools_heads else state.center
        show = functools.partial(_with_scales, self.form, center, state.value_center, columns, cuts)
        return map_parts(show, *readings)

    def observe(self, state: Narrow, seen) -> Narrow:
        if self.observes and self.whole_window:
            # Of a part that was cut, what was seen of its slots stands in two.
            reading = self.policy.read(self.load(state), jnp.zeros_like(seen.real[:, :1], jnp.int32))
            join = lambda _, found: jnp.concatenate(found, axis=-1) if type(found) is tuple else found  # noqa: E731
            seen = seen._replace(parts=map_parts(join, reading, seen.parts))
        # Learning changes no entry.
        return dataclasses.replace(state, numbers=self.policy.observe(state.numbers, seen))

    def compact(self, state: Narrow, new) -> Narrow:
        compacted = self.policy.compact(self.load(state), new)
        stored = self._store(compacted, state, self._center(state, new.keys, new.present))
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

        def grow(field: ArrayField, x: Any, scale: Any, rest: Any, rest_scale: Any, whole: Any) -> Any:
            if not _is_kept(field):
                return x
            loaded = storage.load(x, scale, storage.FORMATS[self._name(field)].bits)
            loaded = loaded if rest is None else loaded + storage.load(rest, rest_scale, storage.FORMATS[_REST].bits)
            loaded = loaded + _beside(state.center, loaded) if _is_key(field) else loaded
            return loaded if whole is None else jnp.concatenate([whole.astype(loaded.dtype), loaded], axis=-2)

        rests = (state.rest_numbers, state.rest_scales)
        return map_fields(grow, state.numbers, state.scales, *rests, state.whole)

    def _center(self, state: Narrow, keys: Array, there: Bool[Array, "B T"]) -> Float[Array, "B H_kv D"]:
        if self.policy.pools_heads:
            return state.center  # a slot does not say whose it is
        return storage.mean_of_first(state.center, keys, there[:, None])

    def _apart(self, inner: Any) -> tuple[Any, Any]:
        """The policy's state without the entries that stay whole, and these."""
        first = lambda field: field.first if self.whole_window else 0  # noqa: E731
        others = map_fields(lambda field, x: x[..., first(field) :, :] if field.entries else x, inner)
        whole = map_fields(lambda field, x: x[..., : first(field), :] if first(field) else None, inner)
        return others, whole

    def _store(self, inner: Any, old: Narrow, center: Float[Array, "B H_kv D"]) -> Narrow:
        """The policy's state in the form of an earlier one."""

        def own(field: ArrayField, x: Any) -> Any:
            return x - _beside(center, x) if _is_key(field) else x

        def stored(field: ArrayField, x: Any) -> Stored:
            return storage.store(own(field, x), storage.FORMATS[self._name(field)], unbiased=_is_key(field))

        def rest(field: ArrayField, x: Any, entry: Stored) -> Stored:
            left = own(field, x) - storage.load(*entry, storage.FORMATS[self._name(field)].bits)
            return storage.store(left, storage.FORMATS[_REST])

        others, whole = self._apart(inner)
        whole = map_fields(lambda _, x, old: x.astype(old.dtype), whole, old.whole)
        narrow = _narrowed(others, whole, center, stored, rest)
        if not _has_means(narrow):
            return narrow
        lacking = _mean_value(self.policy, inner, center) - _mean_value(self, narrow, center)
        return dataclasses.replace(narrow, value_center=lacking)

    def _name(self, field: ArrayField) -> str:
        if field.chosen_by:
            return _INDEX
        return self.form.values if _is_value(field) else self.form.keys


_REST = "int8"  # the form of what storing leaves of means
_INDEX = "int8"  # of what recall chooses by


class _Cut(NamedTuple):
    """A buffer's first slots as they came, and the others stored."""

    whole: Float[Array, "B H_kv first D"]
    numbers: Array
    scale: Float[Array, "B H_kv S 1"]


def _has_means(state: Narrow) -> bool:
    return bool(jax.tree.leaves(state.rest_scales))


def _mean_value(policy: Policy, state: Any, like: Float[Array, "B H_kv D"]) -> Float[Array, "B H_kv D_v"]:
    """Of all that the state shows, by its weights: what a query of zeros reads."""
    reading = policy.read(state, jnp.zeros((like.shape[0], 1), jnp.int32))
    return output(attend_reading(jnp.zeros_like(like)[:, None], reading))[:, 0]


def _is_kept(field: ArrayField) -> bool:
    """Whether it is kept in few bits."""
    return field.entries or field.chosen_by


def _is_value(field: ArrayField) -> bool:
    return field.axes[-1] == "D_v"


def _is_key(field: ArrayField) -> bool:
    return field.entries and not _is_value(field)


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
    whole: Any,
    center: Float[Array, "B H_kv D"],
    stored: Callable[[ArrayField, Any], Stored],
    rest: Callable[[ArrayField, Any, Stored], Stored],
) -> Narrow:
    """A policy's state with its entries stored, and what is left of means."""
    entries = map_fields(lambda field, x: stored(field, x) if _is_kept(field) else None, inner)
    rests = map_fields(lambda field, x, entry: rest(field, x, entry) if field.means else None, inner, entries)
    numbers = map_fields(lambda field, x, entry: entry.numbers if _is_kept(field) else x, inner, entries)
    scales = map_fields(lambda field, x, entry: entry.scale if _is_kept(field) else None, inner, entries)
    rest_numbers = map_fields(lambda field, x, entry: entry.numbers if field.means else None, inner, rests)
    rest_scales = map_fields(lambda field, x, entry: entry.scale if field.means else None, inner, rests)
    return Narrow(numbers, scales, center, rest_numbers, rest_scales, None, whole)


def _with_scales(
    form: Storage,
    center: Float[Array, "B H_kv D"] | None,
    value_center: Float[Array, "B H_kv D_v"] | None,
    columns: dict[int, Any],
    cuts: Mapping[int, _Cut],
    numbers: Segment | Recalled,
    scales: Any,
    loaded: Any,
) -> Segment | Recalled | tuple[Segment, ...]:
    if isinstance(numbers, Recalled):
        # Its store knows its own scales. It chooses by what its index stands for.
        of_index = (scale for x, scale in zip(numbers.index, scales.index, strict=True) if scale is not x)
        return dataclasses.replace(loaded, index=(*numbers.index, *of_index))
    column = lambda x: columns.setdefault(id(x), x[..., 0])  # noqa: E731
    keys_of = functools.partial(dataclasses.replace, key_bits=form.key_bits)
    values_of = functools.partial(dataclasses.replace, value_bits=form.value_bits)
    part = loaded
    if part.feeds == "both":
        part = dataclasses.replace(part, value_center=value_center)
    if id(part.keys) in cuts and id(part.values) in cuts:
        keys, values = cuts[id(part.keys)], cuts[id(part.values)]
        first, others = cut(part, keys.whole.shape[2])
        first = dataclasses.replace(first, keys=keys.whole, values=values.whole)
        others = keys_of(others, keys=keys.numbers, key_scale=column(keys.scale), center=center)
        others = values_of(others, values=values.numbers, value_scale=column(values.scale))
        return tuple(one for one in (first, others) if one.keys.shape[2])
    # A number that is still in its stored form lies as it was stored (or came with its scales from the store itself).
    if is_stored(numbers.keys.dtype):
        own = numbers.key_scale is not None
        scale, center = (numbers.key_scale, numbers.center) if own else (column(scales.keys), center)
        part = keys_of(part, keys=numbers.keys, key_scale=scale, center=center)
    if numbers.values is not None and is_stored(numbers.values.dtype):
        scale = column(scales.values) if numbers.value_scale is None else numbers.value_scale
        part = values_of(part, values=numbers.values, value_scale=scale)
    return part
