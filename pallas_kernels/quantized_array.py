"""Arrays of vectors that are stored in eight bits per element or fewer."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import packing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedArray:
    """A quantized array [*A, S, D] of S vectors per leading index: values * scale + offset.

    Attributes:
        values: int8, float8 (one element per number), or uint8 codes packed by `pallas_kernels.packing`, where W is D
            times `bits` / 8. A code c stands for the number 2 c - (2**bits - 1).
        scale: One finite factor per vector, of any float dtype.
        offset: The float32 vector that was subtracted from all S vectors before quantization, such as the mean key.
            Kernels ignore it: their caller accounts for it.
        bits: 4, 3 or 2 for packed codes, None otherwise.
    """

    values: Array
    scale: Float[Array, "*A S"]
    offset: Float[Array, "*A D"] | None = None
    bits: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def width(self) -> int:
        """D, the number of elements of a vector."""
        return packing.unpacked_width(self.values.shape[-1], self.bits)

    @property
    def shape(self) -> tuple[int, ...]:
        """[*A, S, D], the shape of the array that this one represents."""
        return (*self.values.shape[:-1], self.width)

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return self.values.ndim

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return array_bytes(self)

    def __getitem__(self, index: Any) -> "QuantizedArray":
        """Selects vectors by indices of the leading axes and the slot axis S.

        Args:
            index: Integers, slices, integer arrays and at most one ellipsis, for the axes [*A, S] only. The ellipsis
                does not cover the last axis, D, so that `x[..., :8]` returns the first eight vectors.

        Returns:
            The selected vectors. Their `offset` is indexed by the part of `index` that selects among the leading axes;
            an index of the slot axis leaves it unchanged.

        Raises:
            IndexError: If there are more indices than leading axes and the slot axis.
        """
        index = index if isinstance(index, tuple) else (index,)
        axes = self.scale.ndim
        place = next((i for i, one in enumerate(index) if one is Ellipsis), None)
        if place is not None:
            index = (*index[:place], *(slice(None),) * (axes + 1 - len(index)), *index[place + 1 :])
        if len(index) > axes:
            raise IndexError(
                f"{len(index)} indices for a QuantizedArray of shape {self.shape}; index at most {axes} axes"
            )
        offset = None if self.offset is None else self.offset[index[: axes - 1]]
        return QuantizedArray(self.values[index], self.scale[index], offset, self.bits)


def widened(x: Array) -> Array:
    """Returns an array in float32, or in its dtype if that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def numbers(stored: Array | QuantizedArray) -> Float[Array, "*A S D"]:
    """Returns the numbers of an array, which may be quantized, without the offset: at least float32."""
    if not isinstance(stored, QuantizedArray):
        return widened(stored)
    values = stored.values
    if stored.bits is not None:
        values = 2 * packing.unpack(values, stored.bits).astype(jnp.int32) - packing.largest(stored.bits)
    scale = widened(stored.scale)
    return values.astype(scale.dtype) * scale[..., None]


def array_bytes(*trees: Any) -> int:
    """Returns the bytes of all arrays, which may be abstract."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(trees))


def product_dtype(queries: Any, stored: Any) -> Any:
    """Returns the dtype in which products of queries with stored keys or values are computed.

    Args:
        stored: The dtype of the stored array.

    Returns:
        The dtype of the queries if elements are stored in one byte, the promoted dtype otherwise.
    """
    if jnp.dtype(stored).itemsize == 1:
        return jnp.dtype(queries)
    return jnp.promote_types(queries, stored)
