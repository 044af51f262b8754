"""Forms in which keys and values are kept: numbers of eight, four, three or two bits with a scale for each vector.

Vectors are turned by a fixed random rotation before they are stored, which changes no inner product and no norm, and
makes a coordinate of any vector nearly Gaussian: no channel stands out, so that one scale serves all of them, without
calibration. Attention turns the query with the keys, and turns what it gathered of the values back.

Half of what keys are, and more, is what all keys of a head have in common. It is kept apart, in float32: their mean, of
the tokens that came first. Attention adds the query's product with it to all logits alike.

A grid is uniform. Its scale is the one that errs least among a few that clip the largest coordinates more or less;
clipped or not, the largest number that is stored is the grid's own, by which storing again finds the same scale and the
same numbers.

Sources: random rotations before scalar quantisers, QuIP (Chee et al., arXiv 2307.13304), TurboQuant (Zandieh et al.,
arXiv 2504.19874); the scale that makes inner products unbiased, RaBitQ (Gao and Long, arXiv 2405.12497).
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jaxtyping import Array, Bool, Float

from pallas_kernels import packing

StorageName = Literal["int8", "fp8", "int4", "int3", "int2"]


@dataclasses.dataclass(frozen=True)
class Format:
    """A form of numbers.

    Attributes:
        dtype: of what holds them.
        largest: the largest number.
        bits: of packed numbers (see `packing`); None where every number has an element of `dtype`.
        clips: the share of a vector's largest coordinate at which it is clipped, those that are tried.
    """

    dtype: Any
    largest: float
    bits: int | None = None
    clips: tuple[float, ...] = (1.0,)


def _packed(bits: int, least_clip: float) -> Format:
    return Format(jnp.uint8, packing.largest(bits), bits, tuple(np.linspace(1, least_clip, 8).tolist()))


# float8_e4m3fn has 3 bits of mantissa.
FORMATS: dict[str, Format] = {
    "int8": Format(jnp.int8, 127.0),
    "fp8": Format(jnp.float8_e4m3fn, 448.0),
    "int4": _packed(4, 0.7),
    "int3": _packed(3, 0.55),
    "int2": _packed(2, 0.4),
}
SCALE_DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Storage:
    """In what form keys and values are kept, and whether those of sinks and recent tokens stay as they are."""

    keys: StorageName
    values: StorageName
    whole_window: bool = False

    @property
    def key_bits(self) -> int | None:
        """Of packed keys."""
        return FORMATS[self.keys].bits

    @property
    def value_bits(self) -> int | None:
        """Of packed values."""
        return FORMATS[self.values].bits

    def empty(self, shape: tuple[int, ...], key_dim: int, value_dim: int) -> tuple["Stored", "Stored"]:
        """No keys and values yet."""
        return empty(self.keys, (*shape, key_dim)), empty(self.values, (*shape, value_dim))

    def store(self, keys: Float[Array, "*A D"], values: Float[Array, "*A D_v"]) -> tuple["Stored", "Stored"]:
        """Both in their form; keys for products with queries."""
        return store(keys, FORMATS[self.keys], unbiased=True), store(values, FORMATS[self.values])


class Stored(NamedTuple):
    """Vectors as they are kept."""

    numbers: Array  # [..., W], in the dtype of their format
    scale: Array  # [..., 1], `SCALE_DTYPE`


def is_stored(dtype: Any) -> bool:
    """Whether numbers of this type stand for others by a scale."""
    return jnp.dtype(dtype) in {jnp.dtype(form.dtype) for form in FORMATS.values()}


def width(name: str, columns: int) -> int:
    """Elements of a stored vector of so many coordinates.

    Raises:
        ValueError: for few bits of vectors whose coordinates fill no whole bytes.
    """
    bits = FORMATS[name].bits
    if bits is not None and columns % packing.COLUMNS:
        raise ValueError(f"{name} takes vectors of a multiple of {packing.COLUMNS} coordinates, not {columns}")
    return packing.packed_width(columns, bits)


def empty(name: str, shape: tuple[int, ...]) -> Stored:
    """Zeros of this shape, without the arithmetic: compiled, it would be done on constants of their size."""
    *leading, columns = shape
    return Stored(
        jnp.zeros((*leading, width(name, columns)), FORMATS[name].dtype), jnp.zeros((*leading, 1), SCALE_DTYPE)
    )


def mean_of_first(
    center: Float[Array, "*A D"], vectors: Float[Array, "*A T D"], there: Bool[Array, "*#A T"]
) -> Float[Array, "*A D"]:
    """What vectors have in common: `center` where there is one, otherwise the mean of these, of those that are there;
    zeros while there are none."""
    weight = there[..., None].astype(jnp.float32)
    mean = jnp.sum(vectors.astype(jnp.float32) * weight, axis=-2) / jnp.maximum(jnp.sum(weight, axis=-2), 1)
    return jnp.where(jnp.any(center != 0, axis=-1, keepdims=True), center, mean)


def store(x: Float[Array, "*A D"], form: Format, *, unbiased: bool = False) -> Stored:
    """Vectors in this form.

    Args:
        unbiased: few bits err towards zero, 11% with two of them. This stretches a vector until its inner product with
            what it stands for is its own square: over rotations inner products with any other vector are then right on
            average, each with a little more noise. Perplexity is the better for it where keys are stored so.
    """
    x = turned(x)
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    # In units of the peak squares neither overflow nor vanish.
    unit = jnp.where(peak == 0, 1.0, peak)
    x = x / unit
    tried = [_rounded(peak * (clip / form.largest)) for clip in form.clips]
    scale = tried[0]
    if len(tried) > 1:
        errors = [jnp.sum((x - _nearest(x, one / unit, form) * (one / unit)) ** 2, axis=-1) for one in tried]
        least = jnp.argmin(jnp.stack(errors, axis=-1), axis=-1, keepdims=True)
        scale = jnp.take_along_axis(jnp.concatenate(tried, axis=-1), least, axis=-1)
    numbers = _nearest(x, scale / unit, form)
    if unbiased:
        own, with_stored = (jnp.sum(x * other, axis=-1, keepdims=True) for other in (x, numbers * (scale / unit)))
        scale = _rounded(scale * jnp.where(with_stored > 0, own / with_stored, 1.0))
    if form.bits is None:
        return Stored(numbers.astype(form.dtype), scale.astype(SCALE_DTYPE))
    codes = ((numbers + form.largest) / 2).astype(jnp.uint8)
    return Stored(packing.pack(codes, form.bits), scale.astype(SCALE_DTYPE))


def load(numbers: Array, scale: Float[Array, "*A 1"], bits: int | None) -> Float[Array, "*A D"]:
    """What stored vectors stand for, float32; `bits` are those of their format."""
    if bits is not None:
        numbers = 2 * packing.unpack(numbers, bits).astype(jnp.float32) - packing.largest(bits)
    return turned_back(numbers.astype(jnp.float32) * scale.astype(jnp.float32))


def turned(x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
    """Vectors, queries too, in the basis in which they are stored; float32."""
    return _times(x, rotation(x.shape[-1]))


def turned_back(x: Float[Array, "*A D"]) -> Float[Array, "*A D"]:
    """The opposite of `turned`."""
    return _times(x, rotation(x.shape[-1]).T)


@functools.cache
def rotation(columns: int) -> np.ndarray:
    """The orthogonal matrix [D, D] by which vectors are turned, float32: Hadamard's with random signs where the number
    of coordinates is a power of two, a random one otherwise. The same in every process and of every version, by which
    saved states can be read."""
    random = np.random.Generator(np.random.PCG64(columns))
    if columns & (columns - 1) == 0:
        signs = random.integers(0, 2, columns) * 2 - 1
        matrix = signs[:, None] * scipy.linalg.hadamard(columns) / np.sqrt(columns)
    else:
        matrix, upper = np.linalg.qr(random.normal(size=(columns, columns)))
        matrix = matrix * np.sign(np.diag(upper))
    return matrix.astype(np.float32)


def _times(x: Float[Array, "*A D"], matrix: np.ndarray) -> Float[Array, "*A D"]:
    return jnp.matmul(x.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)


def _rounded(scale: Float[Array, "*A 1"]) -> Float[Array, "*A 1"]:
    """A scale as it is kept."""
    return scale.astype(SCALE_DTYPE).astype(jnp.float32)


def _nearest(x: Float[Array, "*A D"], scale: Float[Array, "*A 1"], form: Format) -> Float[Array, "*A D"]:
    """The numbers nearest to x at this scale."""
    x = x / jnp.where(scale == 0, 1.0, scale)
    if form.bits is not None:
        x = 2 * jnp.floor(x / 2) + 1  # odd
    elif jnp.issubdtype(form.dtype, jnp.integer):
        x = jnp.round(x)
    return jnp.clip(x, -form.largest, form.largest)
