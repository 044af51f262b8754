"""State pytrees: how their fields are declared, and the functions that work on any of them.

    @state
    class Window:
        keys: Float[Array, "B H_kv S D"] = kv_entries()
        total: Int[Array, "B"]
        sinks: int = static()

A state is a frozen dataclass of arrays, registered as a pytree. The dimension names of its annotations are its axes.
Everything that treats all policies the same (taking, inserting and repeating batch rows, sharding, quantization, byte
counts) reads those names: B batch rows, H_kv KV heads, H_q query heads, H heads that retrieve blocks (KV or query
heads), N an axis that grows with the context and that devices may share. Other names (`_OTHER_AXES`) carry no meaning;
unknown ones are errors, because a misspelled axis would not be sharded, taken by rows or quantized.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from kvjax.distributed.memory import compute_where_stored, is_on_host
from kvjax.jax_flags import with_default_flags
from kvjax.messages import did_you_mean
from pallas_kernels.quantized_array import QuantizedArray

T = TypeVar("T")

BATCH = "B"
# The axes that have a meaning, and the other names that axes of states may have.
_MEANINGFUL_AXES = (BATCH, "H_kv", "H_q", "H", "N")
_OTHER_AXES = (*"CDGIKLMPRSTVWkstw", "CR", "D_v", "bins", "half_D")
_COPY_SALT = 0x464F524B  # folded into the keys of copied rows


def kv_entries(*, running_mean: bool = False, centered: bool = True, written_once: bool = False) -> Any:
    """Declares keys [..., S, D] or values [..., S, D_v] that attention reads and that the cache may store quantized.

    Args:
        running_mean: whether the entries are means that later tokens join. They are stored with a residual, because
            a mean that is rounded at every update drifts.
        centered: whether keys may be stored without their head's mean; False where heads share slots.
        written_once: whether compaction only writes later tokens into slots, with `quantization.write_entries`. It then
            gets the quantized array itself; otherwise it gets plain arrays, all of which are quantized again.

    Returns:
        A dataclass field.
    """
    metadata = {"running_mean": running_mean, "centered": centered, "written_once": written_once}
    return dataclasses.field(metadata=metadata | {"kv_entries": True})


def retrieval_index() -> Any:
    """Declares vectors [..., M, D] by which a retrieval policy chooses blocks; stored in int8 in a quantized cache."""
    return dataclasses.field(metadata={"retrieval_index": True})


def fault(meaning: str) -> Any:
    """Declares a counter that must stay zero; `raise_faults` raises an error with `meaning` otherwise."""
    return dataclasses.field(metadata={"fault": meaning})


def stacked(*axes: str) -> Any:
    """Declares a field that holds a state of one stream, batched over these leading axes (outermost first)."""
    return dataclasses.field(metadata={"stacked": axes})


def row_randomness() -> Any:
    """Declares one PRNG key per batch row; copies of a row, except the first, get new keys."""
    return dataclasses.field(metadata={"row_randomness": True})


def static(default: Any = dataclasses.MISSING) -> Any:
    """Declares a hashable field that is part of the compiled program, not of the data."""
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(
    frozen_default=True, field_specifiers=(kv_entries, fault, row_randomness, retrieval_index, stacked, static)
)
def state(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass and a pytree whose axes are the dimension names of its annotations."""
    for name, annotation in inspect.get_annotations(cls).items():
        if (axes := annotated_axes(annotation)) is not None:
            _check_axes(f"{cls.__name__}.{name}", axes)
            declared = cls.__dict__.get(name, dataclasses.MISSING)
            if isinstance(declared, dataclasses.Field):
                field = dataclasses.field(metadata={"axes": axes, **declared.metadata})
            else:
                field = dataclasses.field(default=declared, metadata={"axes": axes})
            setattr(cls, name, field)
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def annotated_axes(annotation: Any) -> tuple[str, ...] | None:
    """Returns the dimension names of `Float[Array, "B S D"]` or of a union with it; None without an array type."""
    options = [option for option in typing.get_args(annotation) or (annotation,) if option is not type(None)]
    names = {tuple(option.dim_str.split()) for option in options if hasattr(option, "dim_str")}
    return names.pop() if len(names) == 1 else None


def _check_axes(name: str, axes: tuple[str, ...]) -> None:
    """Raises a TypeError for a dimension name that is not an axis, which may be a misspelled one."""
    known = (*_MEANINGFUL_AXES, *_OTHER_AXES)
    for word in re.findall(r"[^\W\d]\w*", " ".join(axes)):
        if word not in known:
            raise TypeError(f"{name} has the unknown axis {word!r}; {did_you_mean(word, known)}use {', '.join(known)}")


class ArrayField(NamedTuple):
    """The declaration of one array: its field name, all its axes, and the metadata of its field specifier."""

    name: str
    axes: tuple[str, ...]
    fault: str | None = None
    kv_entries: bool = False
    running_mean: bool = False
    centered: bool = True
    written_once: bool = False
    retrieval_index: bool = False
    row_randomness: bool = False

    @property
    def batch_axis(self) -> int | None:
        """Position of the batch axis; None for an array that all rows share."""
        return self.axes.index(BATCH) if BATCH in self.axes else None


@state
class RunningMean:
    """Means in a narrow type, with the rounding residual in int8.

    Attention reads `stored`. Compaction adds the residual, so that a mean of many tokens still moves when one more
    token joins it.
    """

    stored: Any  # an array or a QuantizedArray
    residual: QuantizedArray


def map_fields(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Maps `function(field, array, *other_arrays)` over all arrays of a state.

    The arrays inside a `QuantizedArray` or a `RunningMean` are mapped one by one, with the axes that each has.

    Args:
        function: receives the `ArrayField` and one array of every tree.
        tree: a state, or tuples, lists and dicts of states.
        others: trees of the same structure.

    Returns:
        A tree of the same structure with the function's results.

    Raises:
        TypeError: for an object that is not a state, so that its axes are unknown.
    """

    def map_array(field: ArrayField, leaf: Any, *other: Any) -> Any:
        """Applies the function to the arrays inside one `leaf`, with the axes of its `field`."""
        axes = field.axes
        if isinstance(leaf, RunningMean):
            parts = {"stored": axes, "residual": axes}
        elif isinstance(leaf, QuantizedArray):
            parts = {"values": axes, "scale": axes[:-1], "offset": (*axes[:-2], axes[-1])}
        else:
            return function(field, leaf, *other)
        mapped = {
            name: map_array(field._replace(axes=axes), *(getattr(one, name) for one in (leaf, *other)))
            for name, axes in parts.items()
            if getattr(leaf, name) is not None
        }
        return dataclasses.replace(leaf, **mapped)

    return map_stored(map_array, tree, *others)


def map_stored(function: Callable[..., Any], tree: Any, *others: Any, leading: tuple[str, ...] = ()) -> Any:
    """As `map_fields`, but gives the function a `QuantizedArray` or `RunningMean` as one object.

    Args:
        function: receives the `ArrayField` and one array-like of every tree.
        tree: a state, or tuples, lists and dicts of states.
        others: trees of the same structure.
        leading: axes in front of the annotated ones.

    Returns:
        A tree of the same structure with the function's results.

    Raises:
        TypeError: for an object that is not a state.
    """
    if tree is None:
        return None
    if isinstance(tree, dict):
        return {
            key: map_stored(function, tree[key], *(other[key] for other in others), leading=leading) for key in tree
        }
    if isinstance(tree, tuple | list):
        mapped = [map_stored(function, *items, leading=leading) for items in zip(tree, *others, strict=True)]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else type(tree)(mapped)
    if not dataclasses.is_dataclass(tree) or isinstance(tree, type):
        raise TypeError(f"{type(tree).__name__} is not a kvjax state, so its axes are unknown")
    changes = {}
    for field in dataclasses.fields(tree):
        leaves = [getattr(one, field.name) for one in (tree, *others)]
        if field.metadata.get("static") or leaves[0] is None:
            continue
        if "axes" in field.metadata:
            metadata = dict(field.metadata)
            described = ArrayField(field.name, leading + metadata.pop("axes"), **metadata)
            changes[field.name] = function(described, *leaves)
        else:
            inner = leading + field.metadata.get("stacked", ())
            changes[field.name] = map_stored(function, *leaves, leading=inner)
    return dataclasses.replace(tree, **changes)


def array_fields(tree: Any) -> list[tuple[ArrayField, Array]]:
    """Returns all arrays of a state with their declarations."""
    pairs: list[tuple[ArrayField, Array]] = []
    map_fields(lambda *pair: pairs.append(pair), tree)
    return pairs


class CacheBytes(NamedTuple):
    """Bytes of a state's buffers by the memory they are in."""

    device: int
    host: int


def cache_bytes(tree: Any) -> CacheBytes:
    """Returns the bytes of all buffers of a state, from shapes and dtypes.

    Args:
        tree: a state, possibly abstract (`jax.eval_shape`).

    Returns:
        Bytes in device memory and in host memory; empty slots count.

    Example:
        >>> import jax, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, _ = kvjax.init(kvjax.Exact(), spec, jax.random.split(jax.random.key(0), 1))
        >>> kvjax.cache_bytes(cache.staging)
        CacheBytes(device=8192, host=0)
    """
    device = host = 0
    for leaf in jax.tree.leaves(tree):
        size = leaf.size * _itemsize(leaf.dtype)
        if "host" in (getattr(getattr(leaf, "sharding", None), "memory_kind", None) or ""):
            host += size
        else:
            device += size
    return CacheBytes(device, host)


def _itemsize(dtype: Any) -> int:
    """Returns the bytes of one element, also of a typed PRNG key."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return data.size * data.dtype.itemsize
    return dtype.itemsize


@with_default_flags
def take_rows(tree: T, rows: Int[Array, "R"]) -> T:
    """Returns a state of the selected batch rows, in the given order.

    Args:
        tree: a state, or a tuple of states such as `(cache, counters)`.
        rows: integer row indices; a row may appear several times. Each copy after the first draws its own random
            numbers. Use `jnp.flatnonzero` for a mask.

    Returns:
        A state with R batch rows that shares no buffer with the original.

    Raises:
        ValueError: if rows are not integers [R], or out of range (outside jit).

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=2, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 2))
        >>> keys = values = jnp.ones((2, 3, 2, 8))
        >>> cache, counters = kvjax.append(cache, counters, keys, values, jnp.array([3, 1]))
        >>> cache, counters = kvjax.take_rows((cache, counters), jnp.array([1, 1, 0]))
        >>> counters.num_tokens
        Array([1, 1, 3], dtype=int32)
    """
    rows = _check_rows(tree, rows)

    def take(field: ArrayField, leaf: Array) -> Array:
        """Returns the selected rows of one array `leaf`, along the batch axis of its `field`."""
        # A copy, so that either state may be donated while the other stays in use.
        if field.batch_axis is None:
            return jnp.copy(leaf)
        if field.row_randomness:
            return _independent_copies(jnp.take(leaf, rows, axis=field.batch_axis, mode="clip"), rows)
        # In host memory JAX cannot fill out-of-range rows; outside jit they have been checked.
        mode = "clip" if is_on_host(leaf) else "fill"

        def take_from(leaf: Array, rows: Array) -> Array:
            return jnp.take(leaf, rows, axis=field.batch_axis, mode=mode)

        return compute_where_stored(take_from, leaf, rows, stays=True)

    return map_fields(take, tree)


@with_default_flags
def repeat_rows(tree: T, repeats: int) -> T:
    """Repeats every row in place, as forks of one prefix: row i becomes rows i * repeats to (i + 1) * repeats - 1.

    Args:
        tree: a state, or a tuple of states such as `(cache, counters)`.
        repeats: copies of every row.

    Returns:
        A state with `repeats` times as many rows. Forks differ only in the random numbers that they will draw; the
        first fork draws the same numbers as the original row.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=2, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 2))
        >>> keys = values = jnp.ones((2, 3, 2, 8))
        >>> cache, counters = kvjax.append(cache, counters, keys, values, jnp.array([3, 1]))
        >>> cache, counters = kvjax.repeat_rows((cache, counters), 2)
        >>> counters.num_tokens
        Array([3, 3, 1, 1], dtype=int32)
    """
    return take_rows(tree, jnp.repeat(jnp.arange(batch_size(tree)), repeats))


@with_default_flags
def insert_rows(tree: T, rows_tree: T, rows: Int[Array, "R"]) -> T:
    """Overwrites the given rows with the rows of another state of the same policy and spec.

    Both states must have the same staging offset; `compact` brings both to 0. Pass `(cache, counters)` of both, so
    that the offsets are compared.

    Args:
        tree: the state to write to, or a tuple of states.
        rows_tree: a state with R rows.
        rows: indices of the rows of `tree` to overwrite, each at most once.

    Returns:
        The updated state.

    Raises:
        ValueError: if the states differ in policy or spec, rows are not integers [R], a row is out of range or
            appears twice, or a batch-wide field differs (the latter three outside jit).

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=2, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 2))
        >>> keys = values = jnp.ones((2, 3, 2, 8))
        >>> cache, counters = kvjax.append(cache, counters, keys, values, jnp.array([3, 1]))
        >>> first = kvjax.take_rows((cache, counters), jnp.array([0]))
        >>> cache, counters = kvjax.insert_rows((cache, counters), first, jnp.array([1]))
        >>> counters.num_tokens
        Array([3, 3], dtype=int32)
    """
    if (difference := _difference(tree, rows_tree)) is not None:
        raise ValueError(f"insert_rows: the states belong to different policies or specs: {difference}")
    rows = _check_rows(tree, rows)
    if rows.shape != (batch_size(rows_tree),):
        raise ValueError(f"insert_rows: rows have shape {rows.shape}, expected one per row of rows_tree")
    if not isinstance(rows, jax.core.Tracer) and len(np.unique(np.asarray(rows))) < len(rows):
        raise ValueError(f"insert_rows: rows={np.asarray(rows).tolist()} must differ; a row can be overwritten once")

    def insert(field: ArrayField, leaf: Array, new: Array) -> Array:
        """Returns the array `leaf` with the rows of `new`, along the batch axis of its `field`."""
        axis = field.batch_axis
        if not leaf.size:
            return jnp.copy(leaf)  # an update of an empty array would return the array itself
        if axis is not None:
            index = (slice(None),) * axis

            def write(leaf: Array, rows: Array, new: Array) -> Array:
                return leaf.at[(*index, rows)].set(new)

            return compute_where_stored(write, leaf, rows, new, stays=True)
        if not isinstance(leaf, jax.core.Tracer) and not np.array_equal(leaf, new):
            raise ValueError(
                f"insert_rows: the batch-wide field {field.name!r} is {leaf} in one state and {new} in the other; "
                "compact both states first"
            )
        return jnp.copy(leaf)

    return map_fields(insert, tree, rows_tree)


def raise_faults(tree: Any) -> None:
    """Raises an error that lists every fault counter of a state that is not zero. Call it outside jit.

    Args:
        tree: a state, or a tuple of states. A cache and its counters have different faults; pass `(cache, counters)`.

    Raises:
        ValueError: if a fault counter is not zero.

    Example:
        >>> import jax, jax.numpy as jnp, kvjax
        >>> spec = kvjax.CacheSpec(
        ...     batch=1, query_heads=4, kv_heads=2, head_dim=8, max_prompt_tokens=64, max_new_tokens=64
        ... )
        >>> cache, counters = kvjax.init(kvjax.StreamingLLM(budget=32), spec, jax.random.split(jax.random.key(0), 1))
        >>> kvjax.raise_faults((cache, counters))
    """
    faults = []
    for field, leaf in array_fields(tree):
        if field.fault:
            # On several processes a shard may be out of reach; absolute values, so that counts cannot cancel.
            local = getattr(leaf, "is_fully_addressable", True)
            if count := int(np.sum(np.abs(np.asarray(leaf, np.int64))) if local else jnp.sum(jnp.abs(leaf))):
                listed = f"={np.asarray(leaf).tolist()}" if local else ""
                faults.append(f"{field.name}{listed}: {field.fault} ({count} in total)")
    if faults:
        raise ValueError("the cache state is invalid: " + "; ".join(faults))


def count_row_faults(tree: Any) -> Int[Array, "B"] | None:
    """Counts the nonzero fault counters of every row.

    Returns:
        One int32 count per row; None for a state without fault counters per row.
    """
    counts = [
        jnp.sum(leaf != 0, axis=[axis for axis in range(leaf.ndim) if axis != field.batch_axis], dtype=jnp.int32)
        for field, leaf in array_fields(tree)
        if field.fault and field.batch_axis is not None
    ]
    return sum(counts[1:], start=counts[0]) if counts else None


def _independent_copies(keys: Key[Array, "R"], rows: Int[Array, "R"]) -> Key[Array, "R"]:
    """Gives every copy of a row, except the first, a new PRNG key."""
    is_copy = jnp.any(jnp.tril(rows[:, None] == rows[None, :], -1), axis=1)

    def fold(key: Key[Array, ""], index: Int[Array, ""]) -> Key[Array, ""]:
        """Derives a PRNG key for row `index` from the `key` of the original row."""
        # Splitting folds small numbers in, so a salt comes first; the number of rows separates forks of forks.
        for number in (_COPY_SALT, rows.shape[0], index):
            key = jax.random.fold_in(key, number)
        return key

    folded = jax.random.key_data(jax.vmap(fold)(keys, jnp.arange(rows.shape[0])))
    words = jnp.where(is_copy[:, None], folded, jax.random.key_data(keys))
    return jax.random.wrap_key_data(words, impl=jax.random.key_impl(keys))


def _difference(tree: Any, other: Any) -> str | None:
    """Describes the outermost static setting in which two states differ; None if one program serves both."""
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
            first, second = getattr(tree, field.name), getattr(other, field.name)
            if not field.metadata.get("static"):
                pairs += [] if "axes" in field.metadata else [(first, second)]
            elif first != second and not isinstance(first or second, jax.sharding.Mesh):
                return f"{field.name} is {first} in one and {second} in the other"
    return next((difference for pair in pairs if (difference := _difference(*pair)) is not None), None)


def _check_rows(tree: Any, rows: Any) -> Int[Array, "R"]:
    """Returns row indices as an array; raises a ValueError for rows out of range, which JAX would fill or drop."""
    if not isinstance(rows, jax.Array):
        rows = np.asarray(rows)
    if rows.ndim != 1 or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(
            f"rows have dtype {rows.dtype} and shape {rows.shape}, expected integers [R]; use jnp.flatnonzero for masks"
        )
    batch = batch_size(tree)
    if not isinstance(rows, jax.core.Tracer) and bool(jnp.any((rows < 0) | (rows >= batch))):
        raise ValueError(f"rows={np.asarray(rows).tolist()} must be in [0, {batch})")
    return jnp.asarray(rows, jnp.int32)


def batch_size(tree: Any) -> int:
    """Returns the number of batch rows of a state.

    Raises:
        ValueError: if its arrays have several numbers of rows, or none.
    """
    sizes = {leaf.shape[field.batch_axis] for field, leaf in array_fields(tree) if field.batch_axis is not None}
    if len(sizes) != 1:
        raise ValueError(f"the state has no single batch size: {sorted(sizes)}")
    return sizes.pop()
