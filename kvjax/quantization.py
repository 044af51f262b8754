"""Keys and values in 8, 4, 3 or 2 bits, with one scale per vector.

A vector is rotated by a fixed random rotation before it is quantized. The rotation changes no inner product and makes
every coordinate nearly Gaussian, so that one scale serves all of them without calibration. Attention rotates queries
to match quantized keys, and rotates back the weighted sum of quantized values.

Half or more of a key is the mean of its head's keys. The mean is subtracted before quantization and kept in float32
(`QuantizedArray.offset`); attention adds its product with the query to the logits.

The packed formats are uniform grids. The scale is chosen by squared error among a few that clip the largest
coordinates. The largest stored number is always the end of the grid, so quantizing a dequantized vector gives the same
numbers again.

Reference:
    Random rotations before scalar quantization: QuIP (arXiv 2307.13304), TurboQuant (arXiv 2504.19874). Scales that
    make inner products unbiased: RaBitQ (arXiv 2405.12497).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Bool, Float

from kvjax.messages import shorten
from kvjax.state import BATCH, ArrayField, RunningMean, map_stored
from pallas_kernels import packing
from pallas_kernels.quantized_array import QuantizedArray as QuantizedArray

T = TypeVar("T")

KVDtype = Literal["bfloat16", "int8", "fp8", "int4", "int3", "int2"]
SCALE_DTYPE = jnp.bfloat16
_INT8 = "int8"  # of residuals and of retrieval indices


@dataclasses.dataclass(frozen=True)
class Format:
    """A quantization format.

    Attributes:
        dtype: dtype of the stored values.
        max_value: largest number of the grid.
        bits: bit width of packed values; None if every number has a separate element.
        clips: fractions of a vector's largest coordinate that are tried as the end of the grid.
    """

    dtype: Any
    max_value: float
    bits: int | None = None
    clips: tuple[float, ...] = (1.0,)


def _packed_format(bits: int, min_clip: float) -> Format:
    return Format(jnp.uint8, packing.largest(bits), bits, tuple(np.linspace(1, min_clip, 8).tolist()))


FORMATS: dict[str, Format] = {
    "int8": Format(jnp.int8, 127.0),
    "fp8": Format(jnp.float8_e4m3fn, 448.0),
    "int4": _packed_format(4, 0.7),
    "int3": _packed_format(3, 0.55),
    "int2": _packed_format(2, 0.4),
}


class KVFormats(NamedTuple):
    """The formats of keys and of values."""

    keys: KVDtype
    values: KVDtype


def parse_kv_dtype(kv_dtype: KVDtype | tuple[KVDtype, KVDtype] | None) -> KVFormats | None:
    """Returns the formats of keys and values; None for a cache that is not quantized.

    Args:
        kv_dtype: one format for both, or a pair (keys, values).

    Returns:
        Both formats.

    Raises:
        ValueError: for an unknown format, or two formats of which one has 8 bits.
    """
    if kv_dtype is None:
        return None
    formats = (kv_dtype, kv_dtype) if isinstance(kv_dtype, str) else tuple(kv_dtype)
    if len(formats) != 2 or not all(isinstance(name, str) and name in FORMATS for name in formats):
        raise ValueError(
            f"kv_dtype={shorten(kv_dtype)} is not a quantization format; pass one of {', '.join(FORMATS)}, a pair of "
            "them, bfloat16 or None"
        )
    keys, values = formats
    if keys != values and None in (FORMATS[keys].bits, FORMATS[values].bits):
        raise ValueError(f"kv_dtype={kv_dtype!r}: keys and values may differ only if both have fewer than 8 bits")
    return KVFormats(keys, values)


def check_width(name: str, dim: int) -> None:
    """Checks that vectors of a dimension can be packed in a format.

    Raises:
        ValueError: if the dimension is not a multiple of the packing width of formats below 8 bits.
    """
    if FORMATS[name].bits is not None and dim % packing.COLUMNS:
        raise ValueError(
            f"kv_dtype={name!r} needs heads with a multiple of {packing.COLUMNS} dimensions, got {dim}; pass "
            "kv_dtype='int8'"
        )


def empty_quantized(
    name: str, shape: tuple[int, ...], *, offset_shape: tuple[int, ...] | None = None
) -> QuantizedArray:
    """Returns a quantized array of zeros.

    Args:
        shape: shape [..., S, D] of the array before quantization.
        offset_shape: shape of a zero offset; None for no offset.

    Returns:
        The array.
    """
    form = FORMATS[name]
    width = packing.packed_width(shape[-1], form.bits)
    offset = None if offset_shape is None else jnp.zeros(offset_shape, jnp.float32)
    values, scale = jnp.zeros((*shape[:-1], width), form.dtype), jnp.zeros(shape[:-1], SCALE_DTYPE)
    return QuantizedArray(values, scale, offset, form.bits)


def quantize(
    x: Float[Array, "*A S D"], name: str, offset: Float[Array, "*A D"] | None = None, *, unbiased: bool = False
) -> QuantizedArray:
    """Quantizes vectors.

    Args:
        offset: float32, subtracted from all S vectors first.
        unbiased: whether to stretch each vector until its inner product with its original is the original's square.
            Few bits shrink vectors (11% at 2 bits); keys are stretched, so that logits are right on average.

    Returns:
        The quantized vectors.
    """
    form = FORMATS[name]
    if offset is not None:
        # A vector that equals the offset up to rounding would be quantized noise.
        noise = 1e-6 * jnp.max(jnp.abs(offset), axis=-1, keepdims=True)[..., None, :]
        x = x - offset[..., None, :]
        x = jnp.where(jnp.max(jnp.abs(x), axis=-1, keepdims=True) <= noise, 0.0, x)
    x = rotate(x)
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # In units of the peak, squares neither overflow nor vanish.
    unit = jnp.where(peak == 0, 1.0, peak)
    x = x / unit
    candidates = [_round_scale(peak * (clip / form.max_value)) for clip in form.clips]
    scale = candidates[0]
    if len(candidates) > 1:
        errors = [jnp.sum((x - _nearest(x, one / unit, form) * (one / unit)) ** 2, axis=-1) for one in candidates]
        best = jnp.argmin(jnp.stack(errors, axis=-1), axis=-1, keepdims=True)
        scale = jnp.take_along_axis(jnp.concatenate(candidates, axis=-1), best, axis=-1)
    numbers = _nearest(x, scale / unit, form)
    if unbiased:
        square = jnp.sum(x * x, axis=-1, keepdims=True)
        product = jnp.sum(x * numbers * (scale / unit), axis=-1, keepdims=True)
        scale = _round_scale(scale * jnp.where(product > 0, square / product, 1.0))
    if form.bits is None:
        values = numbers.astype(form.dtype)
    else:
        values = packing.pack(((numbers + form.max_value) / 2).astype(jnp.uint8), form.bits)
    return QuantizedArray(values, scale[..., 0].astype(SCALE_DTYPE), offset, form.bits)


def dequantize(x: Array | QuantizedArray) -> Float[Array, "*A S D"]:
    """Returns the vectors that a quantized array approximates.

    Args:
        x: a quantized array, or any other array.

    Returns:
        Vectors in float32, with the offset added; another array is returned unchanged.
    """
    if not isinstance(x, QuantizedArray):
        return x
    numbers = x.values
    if x.bits is not None:
        numbers = 2 * packing.unpack(numbers, x.bits).astype(jnp.float32) - packing.largest(x.bits)
    vectors = rotate_back(numbers.astype(jnp.float32) * x.scale.astype(jnp.float32)[..., None])
    return vectors if x.offset is None else vectors + x.offset[..., None, :]


def rotate(x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
    """Rotates vectors into the basis in which they are quantized; float32."""
    return _multiply(x, rotation(x.shape[-1]))


def rotate_back(x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
    """Inverts `rotate`."""
    return _multiply(x, rotation(x.shape[-1]).T)


@functools.cache
def rotation(dim: int) -> np.ndarray:
    """Returns the orthogonal matrix of `rotate`.

    It is a Hadamard matrix with random signs if `dim` is a power of two, otherwise a random orthogonal matrix. It is
    the same in every process and version, because saved states depend on it.

    Returns:
        A float32 matrix [dim, dim].
    """
    random = np.random.Generator(np.random.PCG64(dim))
    if dim & (dim - 1) == 0:
        signs = random.integers(0, 2, dim) * 2 - 1
        matrix = signs[:, None] * scipy.linalg.hadamard(dim) / np.sqrt(dim)
    else:
        matrix, upper = np.linalg.qr(random.normal(size=(dim, dim)))
        matrix = matrix * np.sign(np.diag(upper))
    return matrix.astype(np.float32)


def _multiply(x: Float[Array, "*A D"], matrix: np.ndarray) -> Float[Array, "*A D"]:
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


def _round_scale(scale: Float[Array, "*A 1"]) -> Float[Array, "*A 1"]:
    """Rounds scales to the dtype in which they are stored."""
    return scale.astype(SCALE_DTYPE).astype(jnp.float32)


def _nearest(x: Float[Array, "*A D"], scale: Float[Array, "*A 1"], form: Format) -> Float[Array, "*A D"]:
    """Returns the grid numbers nearest to x / scale."""
    x = x / jnp.where(scale == 0, 1.0, scale)
    if form.bits is not None:
        x = 2 * jnp.floor(x / 2) + 1  # grids of packed numbers are odd
    elif jnp.issubdtype(form.dtype, jnp.integer):
        x = jnp.round(x)
    return jnp.clip(x, -form.max_value, form.max_value)


def first_mean(
    mean: Float[Array, "*A D"], vectors: Float[Array, "*A T D"], valid: Bool[Array, "*#A T"]
) -> Float[Array, "*A D"]:
    """Returns the mean if it is already set (nonzero), otherwise the mean of the valid vectors.

    Args:
        mean: float32; zeros mean "not set".
        vectors: candidates for a first mean.
        valid: which vectors count.

    Returns:
        The mean, float32; zeros without any valid vector.
    """
    weight = valid[..., None].astype(jnp.float32)
    new = jnp.sum(vectors.astype(jnp.float32) * weight, axis=-2) / jnp.maximum(jnp.sum(weight, axis=-2), 1)
    return jnp.where(jnp.any(mean != 0, axis=-1, keepdims=True), mean, new)


# --- policy states in stored form ---


def init_stored(tree: T, formats: KVFormats | None, dtype: Any) -> T:
    """Returns a policy's empty state as the cache stores it.

    Entries become `QuantizedArray`s in a quantized cache. Running means in a dtype narrower than float32 become
    `RunningMean`s. Policies compute with plain arrays (`load_stored`) and the cache stores the result (`store`).

    Args:
        tree: the state that `Policy.init` made, all zeros.
        formats: formats of keys and values, if any.

    Returns:
        The stored state.
    """

    def init(field: ArrayField, x: Array) -> Any:
        """Returns the stored form of one array `x` of zeros, as its `field` declares it."""
        name = _format_name(field, formats)
        stored: Any = x
        if name is not None:
            is_key = _is_key(field) and field.centered
            batch_heads = (*x.shape[:2], *(1,) * (x.ndim - 4), x.shape[-1])
            stored = empty_quantized(name, x.shape, offset_shape=batch_heads if is_key else None)
        elif _has_residual(field, formats, dtype):
            stored = x.astype(dtype)
        return RunningMean(stored, empty_quantized(_INT8, x.shape)) if _has_residual(field, formats, dtype) else stored

    return map_stored(init, tree)


def load_stored(tree: T, *, for_compaction: bool = False) -> T:
    """Returns a stored state with plain arrays, on which policies compute.

    Stores that grow with the context keep their quantized arrays, because they quantize new tokens themselves.

    Args:
        tree: a state from `init_stored` or `store`.
        for_compaction: whether entries that are written once keep their quantized arrays (see `kv_entries`).

    Returns:
        The state, in which quantized entries (`kv_entries`, `retrieval_index`) and running means are float32 arrays.
    """

    def load(field: ArrayField, x: Any) -> Array:
        """Returns the plain array of `x` as its `field` declares it."""
        if isinstance(x, RunningMean):
            return dequantize(x.stored).astype(jnp.float32) + dequantize(x.residual)
        if field.written_once and for_compaction:
            return x
        return dequantize(x) if field.kv_entries or field.retrieval_index else x

    return map_stored(load, tree)


def readable(tree: T) -> T:
    """Returns a stored state in the form in which attention reads it.

    Args:
        tree: a state from `init_stored` or `store`.

    Returns:
        The state, in which running means have lost their residuals; quantized arrays stay quantized.
    """

    def read(field: ArrayField, x: Any) -> Any:
        return x.stored if isinstance(x, RunningMean) else x

    return map_stored(read, tree)


def store(tree: T, old: T, new_rows: Bool[Array, "B"] | None = None) -> T:
    """Stores a policy's state in the form of an earlier one.

    The first nonzero keys of a head give its offset, which then stays.

    Args:
        tree: the state with plain arrays.
        old: the stored state before.
        new_rows: rows that got tokens; None for all. Running means of the other rows keep their bits.

    Returns:
        The stored state.
    """

    def write(field: ArrayField, x: Array, old: Any) -> Any:
        """Returns `x` in the stored form of `old`, as its `field` declares it."""
        if isinstance(old, RunningMean):
            stored = write(field, x, old.stored)
            residual = quantize(x.astype(jnp.float32) - dequantize(stored).astype(jnp.float32), _INT8)
            return _where_rows(new_rows, field, RunningMean(stored, residual), old)
        if not (field.kv_entries or field.retrieval_index) or isinstance(x, QuantizedArray):
            return x  # new entries are quantized already
        if not isinstance(old, QuantizedArray):
            return x.astype(old.dtype)
        offset = old.offset
        if offset is not None:
            vectors = x.reshape(*x.shape[:2], -1, x.shape[-1])
            mean = first_mean(offset.reshape(*x.shape[:2], -1), vectors, jnp.any(vectors != 0, axis=-1))
            offset = mean.reshape(offset.shape)
        return _quantize_like(x, old, offset, unbiased=_is_key(field))

    return map_stored(write, tree, old)


def write_entries(
    buffer: Float[Array, "*A S D"] | QuantizedArray,
    new: Float[Array, "*A T D"],
    write: Callable[[Array, Array], Array],
    *,
    valid: Bool[Array, "*#A T"] | None = None,
) -> Any:
    """Writes vectors into keys or values, quantized if the buffer is; other vectors keep their bits.

    Args:
        write: returns an array with new items; called with the buffer's vectors, or with its numbers and its scales.
        valid: None for values. For keys: which new vectors count for the offset if the buffer has none yet.

    Returns:
        The buffer with the new vectors.
    """
    if not isinstance(buffer, QuantizedArray):
        return write(buffer, new.astype(buffer.dtype))
    offset = buffer.offset
    if offset is not None and valid is not None:
        offset = first_mean(offset, new, valid)
    quantized = _quantize_like(new, buffer, offset, unbiased=valid is not None)
    values, scale = write(buffer.values, quantized.values), write(buffer.scale, quantized.scale)
    return dataclasses.replace(buffer, values=values, scale=scale, offset=offset)


def _quantize_like(
    x: Array, old: QuantizedArray, offset: Float[Array, "*A D"] | None, *, unbiased: bool
) -> QuantizedArray:
    """Quantizes x in the format of `old`."""
    name = next(
        name for name, form in FORMATS.items() if (jnp.dtype(form.dtype), form.bits) == (old.values.dtype, old.bits)
    )
    return quantize(x, name, offset, unbiased=unbiased)


def _where_rows(rows: Bool[Array, "B"] | None, field: ArrayField, new: T, old: T) -> T:
    """Returns `new` in the given rows and `old` in the others."""
    if rows is None or field.axes[0] != BATCH:
        return new

    def select(new: Array, old: Array) -> Array:
        return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

    return jax.tree.map(select, new, old)


def _format_name(field: ArrayField, formats: KVFormats | None) -> str | None:
    """Returns the format in which a field is stored, if it is quantized."""
    if formats is None or not (field.kv_entries or field.retrieval_index):
        return None
    if field.retrieval_index:
        return _INT8
    return formats.keys if _is_key(field) else formats.values


def _has_residual(field: ArrayField, formats: KVFormats | None, dtype: Any) -> bool:
    return field.running_mean and (formats is not None or jnp.finfo(dtype).bits < 32)


def _is_key(field: ArrayField) -> bool:
    return field.kv_entries and field.axes[-1] != "D_v"
