"""State pytrees: how their fields are declared, and what can be done to any of them.

    @state
    class Window:
        keys: Float[Array, "B H_kv S D"] = entries()
        total: Int[Array, "B"]
        sinks: int = static()

A state is a frozen dataclass of arrays. Its axes are the dimension names of its annotations, and everything that must
treat all policies alike (taking, inserting and repeating rows of a batch, sharding, storage in few bits, byte counts)
goes by those names: B rows, H_kv kv heads, H_q query heads, H heads that recall (of either kind), N what grows with
the context, which devices may share. All other names are a shape and no more.
"""

import dataclasses
import inspect
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from kvjax.memory import on_host, where_it_lies

T = TypeVar("T")

BATCH = "B"
_FORKS = 0x464F524B  # of a row's key, the one that keys of its copies are made of


def entries(*, means: bool = False, first: str | None = None) -> Any:
    """Declares keys or values [..., S, D] that attention reads: combinators may keep them in another form.

    Args:
        means: of tokens, which go on taking tokens in: rounded anew each time, they would drift.
        first: the state's attribute that says how many of the first slots are sinks' and recent tokens'.
    """
    return dataclasses.field(metadata={"entries": True, "means": means, "first": first})


def index() -> Any:
    """Declares numbers [..., M, D] by which a policy chooses what it recalls: combinators may keep narrow copies."""
    return dataclasses.field(metadata={"chosen_by": True})


def fault(meaning: str) -> Any:
    """Declares a counter that must stay zero; `check` raises with this text where it does not."""
    return dataclasses.field(metadata={"fault": meaning})


def stacked(*axes: str) -> Any:
    """Declares a field that holds a state written for one stream, mapped over these leading axes (outermost first)."""
    return dataclasses.field(metadata={"stacked": axes})


def drawn() -> Any:
    """Declares a key per row that draws what must not be the same in two rows: of a row that is taken more than once,
    each copy but the first gets a key of its own."""
    return dataclasses.field(metadata={"drawn": True})


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declares a field that is part of the program, not of the data: it must be hashable and is compiled in."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, field_specifiers=(entries, fault, drawn, index, stacked, static))
def state(cls: type[T]) -> type[T]:
    """Class decorator: a frozen dataclass, registered as a pytree, whose axes are those of its annotations."""
    for name, annotation in inspect.get_annotations(cls).items():
        if (axes := _axes_of(annotation)) is not None:
            declared = cls.__dict__.get(name, dataclasses.MISSING)
            if isinstance(declared, dataclasses.Field):
                field = dataclasses.field(metadata={"axes": axes, **declared.metadata})
            else:
                field = dataclasses.field(default=declared, metadata={"axes": axes})
            setattr(cls, name, field)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def _axes_of(annotation: Any) -> tuple[str, ...] | None:
    """The dimension names of `Float[Array, "B S D"]`, maybe `| None`; None for what is no array."""
    kinds = [kind for kind in typing.get_args(annotation) or (annotation,) if kind is not type(None)]
    names = {tuple(kind.dim_str.split()) for kind in kinds if hasattr(kind, "dim_str")}
    return names.pop() if len(names) == 1 else None


class CacheBytes(NamedTuple):
    """Bytes of a state's buffers by where they reside."""

    device: int
    host: int


def cache_bytes(tree: Any) -> CacheBytes:
    """Bytes of every buffer in a state, from shapes and dtypes alone; works on arrays and on their abstract values."""
    device = host = 0
    for leaf in jax.tree.leaves(tree):
        size = leaf.size * _itemsize(leaf.dtype)
        if "host" in (getattr(getattr(leaf, "sharding", None), "memory_kind", None) or ""):
            host += size
        else:
            device += size
    return CacheBytes(device, host)


def axes(tree: Any) -> Any:
    """The same tree with every array replaced by the tuple of its axis names."""
    return map_fields(lambda field, _: field.axes, tree)


def take_rows(tree: T, rows: Int[Array, "R"]) -> T:
    """The state of a batch that consists of the given rows, in that order; a row may be taken more than once (see
    `drawn`).

    Raises:
        ValueError: for a row that there is not (where the numbers are known, outside jit).
    """
    _check_rows(tree, rows)

    def take(field: ArrayField, leaf: Array) -> Array:
        axis = _batch_axis(field)
        # A copy, so that either state may be donated and the other used on.
        if axis is None:
            return jnp.copy(leaf)
        # On the host JAX cannot fill what is out of range; outside jit, rows have been checked.
        mode = "clip" if on_host(leaf) else "fill"
        if field.drawn:
            return _apart(jnp.take(leaf, rows, axis=axis, mode="clip"), rows)
        return where_it_lies(lambda leaf, rows: jnp.take(leaf, rows, axis=axis, mode=mode), leaf, rows, stays=True)

    return map_fields(take, tree)


def repeat_rows(tree: T, repeats: int) -> T:
    """Every row `repeats` times in place (forks of one prefix): row i becomes rows i * repeats ... . Forks are
    equal but for what they draw from now on (see `drawn`), and the first draws what the row would have."""
    batch = _batch_size(tree)
    return take_rows(tree, jnp.repeat(jnp.arange(batch), repeats))


def insert_rows(tree: T, rows_tree: T, rows: Int[Array, "R"]) -> T:
    """Overwrites the given rows with the rows of another state of the same policy and spec (but for the batch).

    Both must stand at the same point of their staging, which they do after `compact`.

    Raises:
        ValueError: for states of two policies or specs, naming both; for a row that there is not, or states that stand
            at different points, with the field that differs (where values are known, outside jit).
    """
    if (difference := _difference(tree, rows_tree)) is not None:
        raise ValueError(f"insert_rows: the states are not of one policy and spec: {difference}")
    _check_rows(tree, rows)

    def insert(field: ArrayField, leaf: Array, new: Array) -> Array:
        axis = _batch_axis(field)
        if not leaf.size:
            return jnp.copy(leaf)  # setting rows of an empty array gives that array itself
        if axis is not None:
            place = (slice(None),) * axis
            return where_it_lies(lambda leaf, rows, new: leaf.at[(*place, rows)].set(new), leaf, rows, new, stays=True)
        if not isinstance(leaf, jax.core.Tracer) and not np.array_equal(leaf, new):
            raise ValueError(
                f"insert_rows: the batch-wide field {field.name!r} is {leaf} in one state and {new} in the other; "
                "compact both states first"
            )
        return jnp.copy(leaf)

    return map_fields(insert, tree, rows_tree)


def check(tree: Any) -> None:
    """Raises a ValueError that lists every fault counter of a state that is not zero. Call it outside jit."""
    faults: list[str] = []

    def look(field: ArrayField, leaf: Array) -> Array:
        if field.fault:
            # Parts may lie on devices of other processes.
            here = getattr(leaf, "is_fully_addressable", True)
            # Sizes, so that a counter that ran over does not make up for others.
            if count := int(np.sum(np.abs(np.asarray(leaf, np.int64))) if here else jnp.sum(jnp.abs(leaf))):
                listed = f"={np.asarray(leaf).tolist()}" if here else ""
                faults.append(f"{field.name}{listed}: {field.fault} ({count} in all)")
        return leaf

    map_fields(look, tree)
    if faults:
        raise ValueError("the cache state is not sound: " + "; ".join(faults))


def faults_of_rows(tree: Any) -> Int[Array, "B"] | None:
    """How many fault counters of every row of a state are not zero; None where it has none."""
    counts: list[Array] = []

    def look(field: ArrayField, leaf: Array) -> Array:
        if field.fault and (axis := _batch_axis(field)) is not None:
            others = [other for other in range(leaf.ndim) if other != axis]
            counts.append(jnp.sum(leaf != 0, axis=others, dtype=jnp.int32))
        return leaf

    map_fields(look, tree)
    return sum(counts[1:], start=counts[0]) if counts else None


class ArrayField(NamedTuple):
    """What is declared of an array: its name in its state, all its axes, and the rest as `entries` and `fault` say."""

    name: str
    axes: tuple[str, ...]
    fault: str | None = None
    entries: bool = False
    means: bool = False
    chosen_by: bool = False
    first: int = 0  # of its slots, how many are sinks' and recent tokens'
    drawn: bool = False


def map_fields(function: Callable[..., Any], tree: Any, *others: Any, leading: tuple[str, ...] = ()) -> Any:
    """Maps (field, leaf, ...) over the array fields of nested states, tuples, lists and dicts."""
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {
            key: map_fields(function, tree[key], *(other[key] for other in others), leading=leading) for key in tree
        }
    if isinstance(tree, tuple | list):
        mapped = [map_fields(function, *items, leading=leading) for items in zip(tree, *others, strict=True)]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        raise TypeError(f"{type(tree).__name__} is not a state: its axes are not known")
    changes = {}
    for field in dataclasses.fields(tree):
        leaves = [getattr(one, field.name) for one in (tree, *others)]
        if field.metadata.get("static") or leaves[0] is None:
            continue
        if "axes" in field.metadata:
            metadata = dict(field.metadata)
            first = getattr(tree, name) if (name := metadata.pop("first", None)) else 0
            described = ArrayField(field.name, leading + metadata.pop("axes"), first=first, **metadata)
            changes[field.name] = function(described, *leaves)
        else:
            inner = leading + field.metadata.get("stacked", ())
            changes[field.name] = map_fields(function, *leaves, leading=inner)
    return dataclasses.replace(tree, **changes)


def _apart(keys: Key[Array, "R"], rows: Int[Array, "R"]) -> Key[Array, "R"]:
    """The keys of taken rows, of which each copy of a row but the first has its own."""
    is_copy = jnp.any(jnp.tril(rows[:, None] == rows[None, :], -1), axis=1)

    def own(key: Key[Array, ""], place: Int[Array, ""]) -> Key[Array, ""]:
        # Keys folded by small numbers are those that splitting gives: folded by another first, they are no key of the
        # row's. By how many rows there are, so that forks of forks are not the first ones again.
        for number in (_FORKS, rows.shape[0], place):
            key = jax.random.fold_in(key, number)
        return key

    found = jax.random.key_data(jax.vmap(own)(keys, jnp.arange(rows.shape[0])))
    words = jnp.where(is_copy[:, None], found, jax.random.key_data(keys))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))


def _difference(tree: Any, other: Any) -> str | None:
    """In what settings two states differ, the outermost first; None where one program serves both. Where a state lies
    is no setting of it."""
    kinds = [type(node).__name__ + (f" of {len(node)}" if hasattr(node, "__len__") else "") for node in (tree, other)]
    if kinds[0] != kinds[1]:
        return f"one is {kinds[0]}, the other {kinds[1]}"
    if isinstance(tree, dict):
        pairs = [(tree[key], other.get(key)) for key in tree]
    elif isinstance(tree, tuple | list):
        pairs = list(zip(tree, other, strict=True))
    else:
        pairs, fields = [], dataclasses.fields(tree) if tree is not None else ()
        for field in fields:
            mine, its = getattr(tree, field.name), getattr(other, field.name)
            if not field.metadata.get("static"):
                pairs += [] if "axes" in field.metadata else [(mine, its)]
            elif mine != its and not isinstance(mine or its, jax.sharding.Mesh):
                return f"{field.name} is {mine} in one and {its} in the other"
    return next((difference for pair in pairs if (difference := _difference(*pair)) is not None), None)


def _batch_axis(field: ArrayField) -> int | None:
    return field.axes.index(BATCH) if BATCH in field.axes else None


def _check_rows(tree: Any, rows: Int[Array, "R"]) -> None:
    # JAX would fill what is taken out of range and drop what is set there.
    if isinstance(rows, jax.core.Tracer):
        return
    batch = _batch_size(tree)
    if bool(jnp.any((rows < 0) | (rows >= batch))):
        raise ValueError(f"rows={np.asarray(rows).tolist()} must lie in [0, {batch})")


def _batch_size(tree: Any) -> int:
    sizes: set[int] = set()

    def look(field: ArrayField, leaf: Array) -> Array:
        if (axis := _batch_axis(field)) is not None:
            sizes.add(leaf.shape[axis])
        return leaf

    map_fields(look, tree)
    if len(sizes) != 1:
        raise ValueError(f"the state has no one batch size: {sorted(sizes)}")
    return sizes.pop()


def _itemsize(dtype: Any) -> int:
    # A typed PRNG key hides its words: ask for those of one key.
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return data.size * data.dtype.itemsize
    return dtype.itemsize
