"""What kernels for Hopper GPUs (Mosaic GPU) share that let a few rows of queries attend to entries that stream through
shared memory.

One warpgroup is a program: it starts the copies of the next blocks, multiplies and sums; several programs on a
multiprocessor hide each other's waiting. The matrix unit multiplies 64 rows at a time (`ROWS`), of which decoding fills
a few: reading, not multiplying, takes the time. Rows that are not filled hold whatever shared memory holds; no row
sees another.

The matrix unit takes operands of 16 bits. Narrower entries become such, exactly: those of eight-bit floats float16, to
which the hardware converts them in one step. What multiplies these, of a wider range, is brought to at most two by
powers of two, a row at a time. A float32 number becomes a sum of three bfloat16 numbers, products of which it takes
exactly and sums in float32; what products of the smallest leave out is below float32's own rounding.
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
from pallas_kernels.dispatch import target
from pallas_kernels.partials import MASK_VALUE
from pallas_kernels.quantized_array import product_dtype

# Kinds of device: a device that is not here tells no more of itself than its kind.
HOPPER = re.compile(r"\bG?H(100|200|800|20)\b")
ROWS = 64
# Slots of a step: registers hold a block, to be converted, by 64 rows.
SLOTS = 64
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
OF_ROWS = LAYOUT.reduce(1)
OF_SLOTS = LAYOUT.reduce(0)

ROW_TYPES = ("float32", "bfloat16", "float16")
STORED_TYPES = (*ROW_TYPES, "int8", "float8_e4m3fn", "float8_e5m2")
# bfloat16 numbers that a number is the sum of, where float32 is called for.
_PARTS = {"float32": 3, "float16": 2}
# Shared memory of a multiprocessor, and what of it each program's bookkeeping takes at most.
_SHARED_BYTES = 228 * 1024
_SHARED_RESERVE = 5 * 1024
# A product for so many columns of sums takes half as many registers of every thread, beside those of the sums; above,
# few columns are taken at a time.
_MOST_COLUMNS = 128
_FEW_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class GpuConfig:
    """How a kernel that streams entries divides its work.

    Attributes:
        stages: Blocks of 64 slots that are in flight or in use at a time. None: as many as fit if two programs share a
            multiprocessor.
        splits: Parts of a head's slots with partials of their own, merged outside. None: as many as fill the GPU.
    """

    stages: int | None = None
    splits: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}; it must be None or at least 1")


class Operands(NamedTuple):
    """How rows (or weights) and what is stored go into the matrix unit."""

    dtype: Any
    row_parts: int
    stored_parts: int
    direct: bool  # what is stored can be multiplied as it lies
    scaled: bool = False  # rows and weights have a range that their operands do not, and are scaled

    @classmethod
    def of(cls, rows: Any, stored: Any) -> "Operands":
        wide = product_dtype(rows, stored)
        if wide == jnp.bfloat16 and jnp.dtype(stored).name.startswith("float8"):
            return cls(jnp.dtype(jnp.float16), 1, 1, direct=False, scaled=True)
        if wide != jnp.float32:
            return cls(wide, 1, 1, direct=jnp.dtype(stored) == wide)
        name = jnp.dtype(stored).name
        return cls(jnp.dtype(jnp.bfloat16), 3, _PARTS.get(name, 1), direct=name == "bfloat16")


class RunningPartials(NamedTuple):
    """Partials over the blocks so far, relative to 2 ** max; the numerator's columns are in several arrays."""

    max: Float[Array, "64"]
    denominator: Float[Array, "64"]
    numerator: tuple[Float[Array, "64 N"], ...]

    @classmethod
    def create(cls, head_dim: int | None) -> "RunningPartials":
        """Returns partials of no entries, without a numerator if `head_dim` is None."""

        width, columns = (0, []) if head_dim is None else _columns(head_dim)
        return cls(
            full_rows(MASK_VALUE * LOG2E),
            full_rows(0.0),
            tuple(plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), LAYOUT) for _ in columns),
        )


def check_types(*packed: str, **arrays: Any) -> None:
    """Raises a NotImplementedError, with the reason, for rows or entries that the matrix unit cannot be fed. Packed
    ones, by name, are bytes."""
    for name, array in arrays.items():
        types = ROW_TYPES if name == "queries" else STORED_TYPES
        if array is not None and name not in packed and array.dtype.name not in types:
            raise NotImplementedError(f"{name} are {array.dtype.name}; a Hopper kernel takes {', '.join(types)}")


def check_head_dim(head_dim: int) -> None:
    """Raises a NotImplementedError where the matrix unit does not multiply keys and values of so many columns."""
    if head_dim > 256 or head_dim % (16 if head_dim <= _MOST_COLUMNS else _FEW_COLUMNS):
        raise NotImplementedError(
            f"head dimension {head_dim}; a Hopper kernel takes multiples of 16 up to 128 and of 64 up to 256"
        )


def operand_columns(head_dim: int, *bits: int | None) -> int:
    """In how many neighbouring columns operands come, where stored numbers of so many bits become such.

    Raises:
        NotImplementedError: where these are too few for the matrix unit.
    """
    columns = min([head_dim, *(packing.run_width(head_dim, one) for one in bits if one is not None)])
    if columns < head_dim and not _tile(columns, jnp.bfloat16)[0]:
        raise NotImplementedError(f"head dimension {head_dim} in {bits} bits: {columns} columns come apart at a time")
    return columns


def check_device() -> None:
    """Raises a NotImplementedError, with the reason, where programs are not compiled for a Hopper GPU. With JAX's CUDA
    compiler but no GPU, nor a mesh of one, they are compiled ahead of time, for a GPU that can be told only then."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise NotImplementedError("JAX's CUDA compiler (jax_cuda13_plugin) is not installed")
    device = target()
    if device.platform == "gpu" and not HOPPER.search(device.device_kind):
        raise NotImplementedError(f"{device.device_kind}: only Hopper (9.0) has the matrix unit of these kernels")


def blocked(shape: Sequence[int], dtype: Any, swizzled_as: int | None = None) -> Any:
    """Shared memory in the order in which the matrix unit and the copy engine meet no bank conflicts.

    Args:
        swizzled_as: columns of the other operand, where that is wanted: two operands must be swizzled in one way.
    """
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle, columns = _tile(swizzled_as or shape[-1], dtype)
    if not swizzle:
        return plgpu.SMEM(tuple(shape), dtype)
    # JAX 0.12's declarations, read strictly, make them abstract classes.
    tiling: Any = plgpu.TilingTransform
    swizzling: Any = plgpu.SwizzleTransform
    return plgpu.SMEM(tuple(shape), dtype, transforms=(tiling((8, columns)), swizzling(columns * bits // 8)))


def _tile(columns: int, dtype: Any) -> tuple[bool, int]:
    """Whether so many columns can be swizzled, and how many of them at a time."""
    bits = 8 * jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * bits)
    return swizzle >= 32, 8 * swizzle // bits


def roomiest(scratch_of: Callable[[int], Mapping[str, Any]], stages: int | None = None) -> tuple[int, int]:
    """With how many blocks on their way or in use at a time two programs fit on a multiprocessor, or one where two do
    not; and how many programs run at a time on the GPU.

    Args:
        scratch_of: what a program keeps in shared memory, by the number of blocks.
        stages: that number, where it is given.

    Raises:
        NotImplementedError: where a program does not fit.
    """
    for programs in (2, 1):
        for number in (4, 3, 2, 1) if stages is None else (stages,):
            if programs * (_bytes(scratch_of(number)) + _SHARED_RESERVE) <= _SHARED_BYTES:
                return number, programs * _multiprocessors()
    raise NotImplementedError(f"{_bytes(scratch_of(stages or 1))} bytes do not fit in shared memory")


def _bytes(scratch: Mapping[str, Any]) -> int:
    memory = [x for x in scratch.values() if not isinstance(x, plgpu.Barrier)]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in memory)


def row_parts(rows: Float[Array, "B H R D"], operands: Operands) -> Float[Array, "B H parts R D"]:
    """Rows as the matrix unit takes them, or as they are where they are yet to be scaled; padded to a multiple of
    eight."""
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 8), (0, 0)))
    if operands.scaled:
        return rows[:, :, None]
    return jnp.stack(list(parts(rows.astype(jnp.float32), operands.row_parts, operands.dtype)), axis=2)


def parts(x: Array, number: int, dtype: Any) -> Iterator[Array]:
    """Numbers of a type whose sum is x, largest first."""
    if x.dtype.name.startswith("float8"):
        x = x.astype(jnp.float16)  # the one type that the hardware converts them to
    if x.dtype == jnp.float16 and dtype != jnp.float16:
        x = x.astype(jnp.float32)
    for _ in range(number - 1):
        part = x.astype(dtype)
        yield part
        x = x - part.astype(jnp.float32)
    yield x.astype(dtype)


def rows_scratch(dtype: Any, operands: Operands, width: int, columns: int | None) -> dict[str, Any]:
    """Shared memory for rows, and for what they come as where that is not what is multiplied."""
    scratch = {"rows": blocked((operands.row_parts, ROWS, width), operands.dtype, columns)}
    if operands.scaled:
        scratch["rows_given"] = blocked((1, ROWS, width), dtype, columns)
    return scratch


def fetch_rows(parts: Any, scratch: Mapping[str, Any]) -> None:
    """Starts the copies of a head's rows [parts, R, D], which say on the barrier when they have come."""
    for part in range(parts.shape[0]):
        target = scratch.get("rows_given", scratch["rows"]).at[part, pl.ds(0, parts.shape[1])]
        plgpu.copy_gmem_to_smem(parts.at[part], target, scratch["rows_came"])


def await_rows(scratch: Mapping[str, Any]) -> Float[Array, "64"] | None:
    """Waits for the rows; where they had to be scaled, by which powers of two."""
    plgpu.barrier_wait(scratch["rows_came"])
    if "rows_given" not in scratch:
        return None
    powers, rows = scaled(load(scratch["rows_given"].at[0], LAYOUT).astype(jnp.float32))
    scratch["rows"][0] = rows.astype(scratch["rows"].dtype)
    plgpu.commit_smem()
    return powers


def put_weights(ref: Any, weights: Float[Array, "64 S"], operands: Operands) -> Float[Array, "64"] | None:
    """Weights into shared memory, as the matrix unit takes them; where they had to be scaled, by which powers of
    two."""
    powers = None
    if operands.scaled:
        powers, weights = scaled(weights)
    for number, part in enumerate(parts(weights, operands.row_parts, operands.dtype)):
        ref[number] = part
    return powers


def scaled(x: Float[Array, "64 N"]) -> tuple[Float[Array, "64"], Float[Array, "64 N"]]:
    """Of every row a power of two, and the row by that, whose numbers are then at most two. Exact, but for what is less
    than 2 ** -126."""
    exponent = lax.bitcast_convert_type(jnp.abs(x).max(axis=1), jnp.int32) & 0x7F800000
    exponent = jnp.minimum(exponent, 0x7E800000)
    power, inverse = (lax.bitcast_convert_type(bits, jnp.float32) for bits in (exponent, 0x7F000000 - exponent))
    return power, x * of_rows(inverse, x.shape)


def as_operands(block: Any, buffer: Any | None, operands: Operands, bits: int | None = None) -> list[Any]:
    """A stored block in shared memory, of packed numbers where there are bits, as the matrix unit takes it. A
    conversion into the buffer waits for a `plgpu.commit_smem`."""
    if buffer is None:
        return [block]
    for columns, stored in _in_columns(block, operands, bits):
        for number, part in enumerate(parts(stored, operands.stored_parts, operands.dtype)):
            buffer[number, :, columns] = part
    return [buffer.at[number] for number in range(operands.stored_parts)]


def _in_columns(block: Any, operands: Operands, bits: int | None) -> Iterator[tuple[Any, Array]]:
    """The numbers of a stored block, a few columns at a time, to keep few registers."""
    width = block.shape[1]
    swizzle, tile = _tile(width, block.dtype)
    read = lambda columns: load(block.at[:, columns], LAYOUT, optimized=swizzle)  # noqa: E731
    if bits is None:
        step = max(tile if swizzle else 0, _tile(width, operands.dtype)[1])
        for first in range(0, width, step):
            yield pl.ds(first, step), read(pl.ds(first, step))
        return
    of_bytes = lambda piece: read(pl.ds(piece.start, piece.stop - piece.start)).astype(jnp.int32)  # noqa: E731
    for columns, codes in packing.runs(of_bytes, packing.unpacked_width(width, bits), bits):
        numbers = (2 * codes - packing.largest(bits)).astype(jnp.float32)
        yield pl.ds(columns.start, columns.stop - columns.start), numbers


def product(left: Sequence[Any], right: Sequence[Any]) -> Float[Array, "64 N"]:
    """Matrices given by their parts multiplied, in float32; the smallest products first, those below its rounding
    not at all."""
    pairs = [(i, j) for i in range(len(left)) for j in range(len(right)) if i + j < max(len(left), len(right))]

    def multiply(accumulator):
        for i, j in sorted(pairs, key=sum, reverse=True):
            plgpu.wgmma(accumulator, left[i], right[j])
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, right[0].shape[1]), jnp.float32))


def logits(rows: Any, keys: Sequence[Any], operands: Operands) -> Float[Array, "64 S"]:
    """Products of the parts of rows, in shared memory, and of keys."""
    return product([rows.at[part] for part in range(operands.row_parts)], [part.T for part in keys])


def weigh(
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
    base = of_rows(maximum, num_scores.shape)
    weights = jnp.exp2(num_scores - base)
    added = weights if num_scores is den_scores else jnp.exp2(den_scores - base)
    return maximum, rescale, before.denominator * rescale + added.sum(axis=1), weights


def add_values(
    before: tuple[Array, ...],
    fade: Float[Array, "64"],
    weights: Any,
    values: Sequence[Any],
    operands: Operands,
    powers: Float[Array, "64"] | None = None,
) -> tuple[Array, ...]:
    """The numerator's sums with a block: weights, by parts in shared memory, times values, by the powers of two of each
    row."""
    left = [weights.at[part] for part in range(operands.row_parts)]
    sums = []
    for columns, num in zip(_columns(values[0].shape[1])[1], before, strict=True):
        added = product(left, [part.at[:, columns] for part in values])
        if powers is not None:
            added = added * of_rows(powers, added.shape)
        # One after the other: all products at once would not fit in registers.
        sums.append(lax.optimization_barrier(num * of_rows(fade, num.shape) + added))
    return tuple(sums)


def store_columns(ref: Any, num: tuple[Array, ...]) -> None:
    """The numerator's sums into shared memory [64, D]."""
    for columns, sums in zip(_columns(ref.shape[1])[1], num, strict=True):
        ref[:, columns] = sums


def _columns(head_dim: int) -> tuple[int, list[Any]]:
    """How many columns of the sums are taken together, and the indices of each such part."""
    if head_dim <= _MOST_COLUMNS:
        return head_dim, [slice(None)]
    return _FEW_COLUMNS, [pl.ds(first, _FEW_COLUMNS) for first in range(0, head_dim, _FEW_COLUMNS)]


def first_highest(
    scores: Float[Array, "64 S"], number: Int[Array, "64 S"]
) -> tuple[Float[Array, "64"], Float[Array, "64"]]:
    """The highest score of each row, and the lowest number where it stands, in float32, which holds it exactly."""
    highest = scores.max(axis=1)
    # Negative, so that the largest is the first.
    there = jnp.where(scores >= of_rows(highest, scores.shape), -number.astype(jnp.float32), -jnp.inf)
    return highest, -there.max(axis=1)


def full_rows(value: float) -> Float[Array, "64"]:
    """Returns a constant for every row."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), OF_ROWS)


def of_rows(x: Float[Array, "64"], shape: tuple[int, ...]) -> Float[Array, "64 N"]:
    return lax.broadcast_in_dim(x, shape, [0])


def of_slots(x: Float[Array, "S"], shape: tuple[int, ...]) -> Float[Array, "64 S"]:
    return lax.broadcast_in_dim(x, shape, [1])


def load(ref: Any, layout: Any, optimized: bool = True) -> Array:
    """`plgpu.load` of a whole ref, which took an index before JAX 0.11."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=optimized)


def cost(**estimate: int) -> dict[str, Any]:
    """The argument of `plgpu.kernel`, which takes it from JAX 0.12 on."""
    taken = "cost_estimate" in inspect.signature(plgpu.kernel).parameters
    return {"cost_estimate": pl.CostEstimate(**estimate)} if taken else {}


def _multiprocessors() -> int:
    """Of the target, or of an H200 where it does not tell."""
    device = target()
    told = [getattr(device, name, None) for name in ("core_count", "num_cores")] if device.platform == "gpu" else []
    return next((number for number in told if number), 132)


def even_splits(heads: int, blocks: Sequence[int], places: int) -> list[int]:
    """How many parts to cut the blocks of every head into, for several stores of blocks, where so many parts run at a
    time: as many as end soonest. Starting and ending a part takes about as long as two blocks."""
    cut = lambda most: [max(-(-number // most), 1) for number in blocks]  # noqa: E731
    rounds = lambda most: -(-heads * sum(cut(most)) // places)  # noqa: E731
    return cut(min(range(max(*blocks, 1), 0, -1), key=lambda most: rounds(most) * (most + 2)))
