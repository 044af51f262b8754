"""Shared parts of the kernels for Hopper GPUs (Mosaic GPU), in which a few queries attend to many entries.

A program is one warpgroup: it starts the copies of the next blocks to shared memory, multiplies, and accumulates.
Several programs per multiprocessor hide each other's latencies. The matrix unit (wgmma) multiplies 64 rows at a time
(`ROWS`). Decoding fills only a few of them, since reading takes the time and not multiplying; the other rows contain
arbitrary data, which affects no query.

The matrix unit takes 16-bit operands. Narrower entries are converted exactly: eight-bit floats to float16, which the
hardware does in one instruction. Their other operands have a wider range, so each row is divided by a power of two such
that it is at most two. With float16 queries, so are the weights of all narrow entries, which their scales would take
out of the range. A float32 number becomes a sum of three bfloat16 numbers, whose products are exact and are accumulated
in float32; the omitted products of the smallest parts are below the rounding of float32.
"""

import dataclasses
import importlib.util
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import packing
from pallas_kernels.dispatch import check_config, target
from pallas_kernels.partials import MASK_VALUE
from pallas_kernels.quantized_array import array_bytes, product_dtype

# Names of Hopper devices; an abstract device does not have its compute capability.
HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")
ROWS = 64
SLOTS = 64  # of a block: registers hold a block during its conversion, and products with 64 rows
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT = LAYOUT.reduce(1)  # of one number per row
SLOT_LAYOUT = LAYOUT.reduce(0)  # of one number per slot

QUERY_DTYPES = ("float32", "bfloat16", "float16")
STORED_DTYPES = (*QUERY_DTYPES, "int8", "float8_e4m3fn", "float8_e5m2")
# bfloat16 numbers that represent a number of these dtypes, where float32 precision is required.
_STORED_PARTS = {"float32": 3, "float16": 2}
# Shared memory of a multiprocessor, and an upper bound of the memory of a program outside its scratch.
_SHARED_BYTES = 228 * 1024
_RESERVED_BYTES = 5 * 1024
# Up to this many columns are accumulated by one product, which needs registers in addition to the sums; wider sums are
# computed a few columns at a time.
_MAX_COLUMNS = 128
_COLUMN_GROUP = 64


@dataclasses.dataclass(frozen=True)
class GpuConfig:
    """How a kernel that streams entries divides its work.

    Attributes:
        stages: Blocks of 64 slots that are in flight or in use at a time. None: as many as fit if two programs share a
            multiprocessor.
        splits: Parts of a head's slots whose partials are merged outside the kernel. None: as many as fill the GPU.
    """

    stages: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        check_config(self, stages=1, splits=1)


class Operands(NamedTuple):
    """How queries (or weights) and stored entries become operands of the matrix unit.

    Attributes:
        dtype: The dtype of the operands.
        row_parts: The operands whose sum is the queries or weights.
        stored_parts: The operands whose sum is the entries.
        is_direct: Whether entries are multiplied without a conversion.
        is_scaled: Whether rows of queries and weights are divided by powers of two.
    """

    dtype: Any
    row_parts: int
    stored_parts: int
    is_direct: bool
    is_scaled: bool = False

    @classmethod
    def create(cls, queries: Any, stored: Any) -> "Operands":
        """Returns the operands for dtypes."""
        wide, name = product_dtype(queries, stored), jnp.dtype(stored).name
        # Weights times scales of small values would underflow in float16.
        is_narrow_float16 = wide == jnp.float16 and jnp.dtype(stored).itemsize == 1
        if is_narrow_float16 or (wide == jnp.bfloat16 and name.startswith("float8")):
            return cls(jnp.dtype(jnp.float16), 1, 1, is_direct=False, is_scaled=True)
        if wide != jnp.float32:
            return cls(wide, 1, 1, is_direct=jnp.dtype(stored) == wide)
        return cls(jnp.dtype(jnp.bfloat16), 3, _STORED_PARTS.get(name, 1), is_direct=name == "bfloat16")


class RunningPartials(NamedTuple):
    """Partials over the blocks so far, relative to 2 ** max; the numerator's columns are in several arrays."""

    max: Float[Array, "64"]
    denominator: Float[Array, "64"]
    numerator: tuple[Float[Array, "64 N"], ...]

    @classmethod
    def create(cls, head_dim: int | None) -> "RunningPartials":
        """Returns partials of no entries, without a numerator if `head_dim` is None."""
        width, columns = (0, []) if head_dim is None else _column_groups(head_dim)
        sums = full_rows(MASK_VALUE * LOG2E), full_rows(0.0)
        return cls(*sums, tuple(plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), LAYOUT) for _ in columns))


def check_dtypes(*packed: str, **arrays: Any) -> None:
    """Checks that arrays can become operands of the matrix unit.

    Args:
        *packed: The names of arrays with packed codes.
        **arrays: "queries" and stored arrays.

    Raises:
        NotImplementedError: If a dtype is not supported.
    """
    for name, array in arrays.items():
        dtypes = QUERY_DTYPES if name == "queries" else STORED_DTYPES
        if name not in packed and array.dtype.name not in dtypes:
            raise NotImplementedError(f"{name} are {array.dtype.name}; the Hopper kernel supports {', '.join(dtypes)}")


def check_head_dim(head_dim: int) -> None:
    """Checks that the matrix unit multiplies keys and values of `head_dim` dimensions.

    Raises:
        NotImplementedError: If it does not.
    """
    if head_dim > 256 or head_dim % (16 if head_dim <= _MAX_COLUMNS else _COLUMN_GROUP):
        raise NotImplementedError(
            f"head dimension {head_dim}; the Hopper kernel supports multiples of 16 up to 128 and of 64 up to 256"
        )


def operand_columns(head_dim: int, *bits: int | None) -> int:
    """Returns how many neighboring columns of operands are written at a time.

    Args:
        head_dim: The dimensions of keys and values.
        *bits: The bit widths of packed keys and values, None if they are not packed.

    Returns:
        The columns.

    Raises:
        NotImplementedError: If they are too few for the matrix unit.
    """
    columns = min([head_dim, *(packing.run_width(head_dim, one) for one in bits if one is not None)])
    if columns < head_dim and columns % 16:  # a swizzle takes 32 bytes or more
        raise NotImplementedError(
            f"head dimension {head_dim} in {bits} bits; {columns} columns at a time are too few for the matrix unit"
        )
    return columns


def check_device() -> None:
    """Checks that programs are compiled for a Hopper GPU.

    Without a GPU or a mesh of GPUs, JAX's CUDA compiler may compile ahead of time for a GPU that is not known here.

    Raises:
        NotImplementedError: If they are not.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise NotImplementedError("JAX's CUDA compiler is not installed; install jax_cuda13_plugin")
    device = target()
    if device.platform == "gpu" and not HOPPER.search(device.device_kind):
        raise NotImplementedError(f"{device.device_kind}; the kernels need the matrix unit of Hopper (9.0)")


def blocked(shape: Sequence[int], dtype: Any, swizzled_as: int | None = None) -> Any:
    """Returns shared memory in a layout without bank conflicts for the matrix unit and the copy engine.

    Args:
        swizzled_as: The columns of the other operand, if both need the same swizzle.

    Returns:
        The memory, swizzled if the columns allow it.
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    is_swizzled, columns = _tile(swizzled_as or shape[-1], dtype)
    if not is_swizzled:
        return plgpu.SMEM(tuple(shape), dtype)
    # Type checkers take these classes of JAX 0.12 for abstract ones.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(tuple(shape), dtype, transforms=(tiling((8, columns)), swizzling(columns * bits // 8)))


def _tile(columns: int, dtype: Any) -> tuple[bool, int]:
    """Returns whether columns can be swizzled, and how many of them at a time."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return swizzle >= 32, 8 * swizzle // bits


def choose_stages(
    scratch_of: Callable[[int], Mapping[str, Any]], stages: int | None = None, max_programs: int = 2
) -> tuple[int, int]:
    """Chooses how many blocks are in flight or in use at a time.

    Args:
        scratch_of: Returns the shared memory of a program for a number of stages.
        stages: The number of stages, if it is given.
        max_programs: The most programs that share a multiprocessor, if their registers allow it.

    Returns:
        The stages, and how many programs run at a time on the GPU: as many per multiprocessor as fit, three or more
        with two stages each.

    Raises:
        NotImplementedError: If a program does not fit.
    """
    for programs in range(max_programs, 0, -1):
        numbers = (4, 3, 2, 1) if programs <= 2 else (2,)
        for number in numbers if stages is None else (stages,):
            if programs * (_scratch_bytes(scratch_of(number)) + _RESERVED_BYTES) <= _SHARED_BYTES:
                return number, programs * _multiprocessors()
    raise NotImplementedError(f"{_scratch_bytes(scratch_of(stages or 1))} bytes do not fit in shared memory")


def _scratch_bytes(scratch: Mapping[str, Any]) -> int:
    return array_bytes([x for x in scratch.values() if not isinstance(x, plgpu.Barrier)])


def query_operands(queries: Float[Array, "B H R D"], operands: Operands) -> Float[Array, "B H parts R D"]:
    """Returns queries as operands, or unchanged if they are to be scaled, padded to a multiple of eight."""
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, -queries.shape[2] % 8), (0, 0)))
    if operands.is_scaled:
        return queries[:, :, None]
    return split_outside_kernels(queries.astype(jnp.float32), operands.row_parts, operands.dtype, axis=2)


def split_outside_kernels(x: Float[Array, "*N"], parts: int, dtype: Any, axis: int) -> Float[Array, "*n"]:
    """Splits float32 numbers into a sum of numbers of a narrower dtype, in a program that XLA compiles.

    XLA removes the conversion to a narrower dtype and back (`xla_allow_excess_precision`), so that the remainder of
    `split` would be zero. It keeps `reduce_precision`.

    Args:
        axis: The axis of the summands in the result.

    Returns:
        The summands, largest first.
    """
    precision, summands = jnp.finfo(dtype), []
    for _ in range(parts):
        summands.append(lax.reduce_precision(x, precision.nexp, precision.nmant))
        x = x - summands[-1]
    return jnp.stack(summands, axis).astype(dtype)


def split(x: Array, parts: int, dtype: Any) -> Iterator[Array]:
    """Splits numbers into a sum of numbers of a narrower dtype, in a kernel.

    Yields:
        The summands, largest first.
    """
    if x.dtype.name.startswith("float8"):
        x = x.astype(jnp.float16)  # the only conversion of the hardware
    if x.dtype == jnp.float16 and dtype != jnp.float16:
        x = x.astype(jnp.float32)
    for _ in range(parts - 1):
        part = x.astype(dtype)
        yield part
        x = x - part.astype(jnp.float32)
    yield x.astype(dtype)


def attention_scratch(
    dtype: Any, operands: Operands, width: int, columns: int | None, has_values: bool = True
) -> dict[str, Any]:
    """Returns the shared memory of a program that attends, except for the blocks.

    Args:
        operands: How queries and entries become operands.
        width: The columns of keys and values.
        has_values: Whether there is a numerator.

    Returns:
        The memory and the barrier of the queries, the maximum, the denominator, converted entries, and weights.
    """
    per_query = plgpu.SMEM((ROWS,), jnp.float32)
    scratch: dict[str, Any] = {"max": per_query, "denominator": per_query}
    scratch["queries"] = blocked((operands.row_parts, ROWS, width), operands.dtype, columns)
    scratch["query_barrier"] = plgpu.Barrier(num_arrivals=operands.row_parts)
    if operands.is_scaled:
        scratch["unscaled_queries"] = blocked((1, ROWS, width), dtype, columns)
    if not operands.is_direct:
        scratch["operands"] = blocked((operands.stored_parts, SLOTS, width), operands.dtype, columns)
    if has_values:
        scratch["weights"] = blocked((operands.row_parts, ROWS, SLOTS), operands.dtype, swizzled_as=columns)
    return scratch


def fetch_queries(parts: Any, scratch: Mapping[str, Any]) -> None:
    """Starts the copies of a head's queries.

    Args:
        parts: The queries in global memory, from `query_operands`.
    """
    memory = scratch.get("unscaled_queries", scratch["queries"])
    for part in range(parts.shape[0]):
        plgpu.copy_gmem_to_smem(parts.at[part], memory.at[part, pl.ds(0, parts.shape[1])], scratch["query_barrier"])


def await_queries(scratch: Mapping[str, Any]) -> Float[Array, "64"] | None:
    """Returns the powers of two by which the queries in `scratch` were divided, if any, after their arrival."""
    plgpu.barrier_wait(scratch["query_barrier"])
    if "unscaled_queries" not in scratch:
        return None
    powers, queries = divide_by_powers(load(scratch["unscaled_queries"].at[0], LAYOUT).astype(jnp.float32))
    scratch["queries"][0] = queries.astype(scratch["queries"].dtype)
    plgpu.commit_smem()
    return powers


def divide_by_powers(x: Float[Array, "64 N"]) -> tuple[Float[Array, "64"], Float[Array, "64 N"]]:
    """Returns a power of two per row of x, and x divided by it, at most two; exact above 2 ** -126."""
    exponent = lax.bitcast_convert_type(jnp.abs(x).max(axis=1), jnp.int32) & 0x7F800000
    exponent = jnp.minimum(exponent, 0x7E800000)
    power, inverse = (lax.bitcast_convert_type(bits, jnp.float32) for bits in (exponent, 0x7F000000 - exponent))
    return power, x * broadcast_rows(inverse, x.shape)


def store_weights(ref: Any, weights: Float[Array, "64 S"], operands: Operands) -> Float[Array, "64"] | None:
    """Writes weights to shared memory as operands.

    Args:
        operands: How weights become operands.

    Returns:
        The powers of two by which rows were divided, if any.
    """
    powers = None
    if operands.is_scaled:
        powers, weights = divide_by_powers(weights)
    for number, part in enumerate(split(weights, operands.row_parts, operands.dtype)):
        ref[number] = part
    return powers


def as_operands(block: Any, buffer: Any | None, operands: Operands, bits: int | None = None) -> list[Any]:
    """Returns a block of entries in shared memory as operands.

    Args:
        buffer: The memory for converted entries, which needs `plgpu.commit_smem` afterwards. None if entries are
            multiplied directly.
        operands: How entries become operands.
        bits: The bit width of packed codes.

    Returns:
        The operands whose sum is the block.
    """
    if buffer is None:
        return [block]
    for columns, stored in _load_columns(block, operands, bits):
        for number, part in enumerate(split(stored, operands.stored_parts, operands.dtype)):
            buffer[number, :, columns] = part
    return [buffer.at[number] for number in range(operands.stored_parts)]


def _load_columns(block: Any, operands: Operands, bits: int | None) -> Iterator[tuple[Any, Array]]:
    """Yields the numbers of a block a few columns at a time, which takes few registers."""
    width = block.shape[1]
    is_swizzled, tile = _tile(width, block.dtype)

    def read(columns: Any) -> Array:
        return load(block.at[:, columns], LAYOUT, optimized=is_swizzled)

    def read_bytes(piece: slice) -> Array:
        return read(pl.ds(piece.start, piece.stop - piece.start)).astype(jnp.int32)

    if bits is None:
        step = max(tile if is_swizzled else 0, _tile(width, operands.dtype)[1])
        for first in range(0, width, step):
            yield pl.ds(first, step), read(pl.ds(first, step))
        return
    for columns, codes in packing.runs(read_bytes, packing.unpacked_width(width, bits), bits):
        numbers = (2 * codes - packing.largest(bits)).astype(jnp.float32)
        yield pl.ds(columns.start, columns.stop - columns.start), numbers


def multiply(left: Sequence[Any], right: Sequence[Any]) -> Float[Array, "64 N"]:
    """Multiplies two sums of operands, smallest products first.

    Args:
        left: Operands of 64 rows.
        right: The other operands.

    Returns:
        The float32 product, without products that are below its rounding.
    """
    pairs = [(i, j) for i in range(len(left)) for j in range(len(right)) if i + j < max(len(left), len(right))]

    def accumulate(accumulator):
        for i, j in sorted(pairs, key=sum, reverse=True):
            plgpu.wgmma(accumulator, left[i], right[j])
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC((ROWS, right[0].shape[1]), jnp.float32))


def query_key_products(queries: Any, keys: Sequence[Any], operands: Operands) -> Float[Array, "64 S"]:
    """Multiplies queries in shared memory with keys.

    Args:
        keys: The operands of a block of keys.
        operands: How queries became operands.

    Returns:
        The float32 products.
    """
    return multiply([queries.at[part] for part in range(operands.row_parts)], [part.T for part in keys])


def update_max(
    before: RunningPartials, num_scores: Float[Array, "64 S"] | None, den_scores: Float[Array, "64 S"]
) -> tuple[Float[Array, "64"], Float[Array, "64"], Float[Array, "64"], Float[Array, "64 S"]]:
    """Adds a block of slots to the maximum and the denominator.

    Args:
        before: The partials of the blocks so far.
        num_scores: The numerator's logits in units of log2(e); None without values.
        den_scores: The denominator's logits in units of log2(e), which may be the same array.

    Returns:
        The new maximum, the factor by which to rescale earlier sums, the new denominator, and the weights of values.
    """
    if num_scores is None:
        num_scores = den_scores
    maximum = jnp.maximum(before.max, num_scores.max(axis=1))
    if num_scores is not den_scores:
        maximum = jnp.maximum(maximum, den_scores.max(axis=1))
    rescale = jnp.exp2(before.max - maximum)
    base = broadcast_rows(maximum, num_scores.shape)
    weights = jnp.exp2(num_scores - base)
    added = weights if num_scores is den_scores else jnp.exp2(den_scores - base)
    return maximum, rescale, before.denominator * rescale + added.sum(axis=1), weights


def add_values(
    numerator: tuple[Array, ...], rescale: Float[Array, "64"], weights: Any, values: Sequence[Any], operands: Operands,
    powers: Float[Array, "64"] | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Adds a block of slots to the numerator.

    Args:
        numerator: The sums of the blocks so far.
        rescale: The factor of these sums.
        weights: The parts of the block's weights, in shared memory.
        values: The operands of the block's values.
        operands: How weights became operands.

    Returns:
        The new numerator.
    """
    left = [weights.at[part] for part in range(operands.row_parts)]
    sums = []
    for columns, group in zip(_column_groups(values[0].shape[1])[1], numerator, strict=True):
        added = multiply(left, [part.at[:, columns] for part in values])
        if powers is not None:
            added = added * broadcast_rows(powers, added.shape)
        # The barrier serializes the products: all of them at once would not fit in registers.
        sums.append(lax.optimization_barrier(group * broadcast_rows(rescale, group.shape) + added))
    return tuple(sums)


def partials_shapes(programs: tuple[int, ...], queries: int, width: int | None) -> dict[str, Any]:
    """Returns the shapes of a launch's partials.

    Args:
        programs: The shape of the launch's programs, such as (batch, heads, splits).
        queries: Padded queries of each head.
        width: The columns of the values; None without a numerator.

    Returns:
        The shapes of maximum, denominator and numerator.
    """
    per_query = jax.ShapeDtypeStruct((*programs, ROWS), jnp.float32)
    shapes = {"max": per_query, "denominator": per_query}
    if width is not None:
        shapes["numerator"] = jax.ShapeDtypeStruct((*programs, queries, width), jnp.float32)
    return shapes


def write_partials(
    partials: RunningPartials, scratch: Mapping[str, Any], refs: Mapping[str, Any], index: Any, staging: Any | None
) -> None:
    """Writes a program's partials to global memory.

    Args:
        refs: The results, of `partials_shapes`.
        index: The sequence, head and split of the program.
        staging: Shared memory for the numerator; None without values.
    """
    scratch["max"][...] = partials.max * (1 / LOG2E)
    scratch["denominator"][...] = partials.denominator
    if staging is not None:
        store_columns(staging, partials.numerator)
    plgpu.commit_smem()
    for name in ("max", "denominator"):
        plgpu.copy_smem_to_gmem(scratch[name], refs[name].at[index])
    if staging is not None:
        plgpu.copy_smem_to_gmem(staging.at[pl.ds(0, refs["numerator"].shape[-2])], refs["numerator"].at[index])
    plgpu.wait_smem_to_gmem(0)


def store_columns(ref: Any, numerator: tuple[Array, ...]) -> None:
    """Writes the column groups `numerator` to shared memory `ref`, [64, D]."""
    for columns, group in zip(_column_groups(ref.shape[1])[1], numerator, strict=True):
        ref[:, columns] = group


def _column_groups(head_dim: int) -> tuple[int, list[Any]]:
    """Returns the width and the indices of the groups of columns that are accumulated together."""
    if head_dim <= _MAX_COLUMNS:
        return head_dim, [slice(None)]
    return _COLUMN_GROUP, [pl.ds(first, _COLUMN_GROUP) for first in range(0, head_dim, _COLUMN_GROUP)]


def max_and_argmax(
    scores: Float[Array, "64 S"], index: Int[Array, "64 S"]
) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
    """Returns the largest score of each row and the smallest of its indices.

    Returns:
        The scores, and the indices as float32, which represents them exactly.
    """
    highest = scores.max(axis=1)
    # Negative, so that the maximum is the first.
    negative_index = jnp.where(scores >= broadcast_rows(highest, scores.shape), -index.astype(jnp.float32), -jnp.inf)
    return highest, -negative_index.max(axis=1)


def full_rows(value: float) -> Float[Array, "64"]:
    """Returns `value` for every row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), ROW_LAYOUT)


def broadcast_rows(x: Float[Array, "64"], shape: tuple[int, ...]) -> Float[Array, "64 N"]:
    """Returns one number `x` per row, repeated to `shape`."""
    return lax.broadcast_in_dim(x, shape, [0])


def broadcast_slots(x: Float[Array, "S"], shape: tuple[int, ...]) -> Float[Array, "64 S"]:
    """Returns one number `x` per slot, repeated to `shape`."""
    return lax.broadcast_in_dim(x, shape, [1])


def load(ref: Any, layout: Any, optimized: bool = True) -> Array:
    """Returns the contents of `ref` in registers in `layout`; `plgpu.load` took an index before JAX 0.11."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def launch(
    kernel: Callable[..., None], inputs: Sequence[Array], outputs: Sequence[Any], scratch: Mapping[str, Any],
    *, grid: Mapping[str, int], interpret: Any, flops: int, transcendentals: int = 0, bytes_accessed: int | None = None,
    approx_math: bool = False,
) -> Sequence[Array]:  # fmt: skip
    """Launches a kernel by `plgpu.kernel`.

    Args:
        kernel: Takes refs of inputs and outputs, and scratch by name.
        outputs: The shapes of the results.
        scratch: Shared memory and barriers.
        grid: The size of each named axis of the grid.
        interpret: Passed to `plgpu.kernel`.
        transcendentals: An estimate of the number of exponentials.
        bytes_accessed: An estimate of the bytes that move; None if all inputs and outputs do.
        approx_math: Whether exponentials are approximated.

    Returns:
        The results.
    """
    options: dict[str, Any] = {}
    if "cost_estimate" in inspect.signature(plgpu.kernel).parameters:  # since JAX 0.12
        moved = array_bytes(inputs, outputs) if bytes_accessed is None else bytes_accessed
        options["cost_estimate"] = pl.CostEstimate(flops, transcendentals, moved)
    options |= {"grid": tuple(grid.values()), "grid_names": tuple(grid), "interpret": interpret}
    compiler_params = plgpu.CompilerParams(approx_math=approx_math)
    call = plgpu.kernel(kernel, out_type=outputs, scratch_types=scratch, compiler_params=compiler_params, **options)
    # XLA would fuse slices that produce inputs with the kernel, and such a fusion interrupts a program's CUDA graph.
    return call(*lax.optimization_barrier(tuple(inputs)))


def _multiprocessors() -> int:
    """Returns the multiprocessors of the target, or of an H200 if they are unknown."""
    device = target()
    counts = [getattr(device, name, None) for name in ("core_count", "num_cores")] if device.platform == "gpu" else []
    return next((count for count in counts if count), 132)


def balance_splits(heads: Sequence[int], blocks: Sequence[int], programs: int) -> list[int]:
    """Chooses the number of splits of each store that finishes first.

    Starting and ending a program takes about as long as two blocks.

    Args:
        heads: Sequences times heads of each store.
        blocks: The blocks of each store, per head.
        programs: The programs that run at a time.

    Returns:
        The splits of each store.
    """

    def splits(max_blocks: int) -> list[int]:
        return [max(-(-count // max_blocks), 1) for count in blocks]

    def duration(max_blocks: int) -> int:
        number = sum(count * each for count, each in zip(heads, splits(max_blocks), strict=True))
        return -(-number // programs) * (max_blocks + 2)

    return splits(min(range(max(*blocks, 1), 0, -1), key=duration))
