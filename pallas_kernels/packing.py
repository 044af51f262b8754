"""Codes of fewer than eight bits, packed into bytes such that shifts and masks unpack them.

A code c of b bits, in [0, 2**b), stands for the odd number 2 c - (2**b - 1): a uniform grid without a zero. Codes are
cut into planes of bits, three bits into planes of two and one. Each plane of a vector is a run of bytes, and the codes
of one byte belong to columns that are one run apart. One shift and mask of a run therefore gives neighboring columns,
and a product with a packed vector is a sum of products with these groups of columns.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer, UInt8

# Bit widths of the planes of each code width, lowest bits first.
PLANES = {4: (4,), 3: (2, 1), 2: (2,)}
COLUMNS = 8  # packed vectors have a multiple of this many columns


class Part(NamedTuple):
    """Neighboring columns in one plane.

    Attributes:
        columns: The columns of the vector.
        bytes: The bytes of the packed vector that contain them.
        shift: The lowest of their bits in a byte.
        width: The bits of the plane.
        factor: The value of the plane's lowest bit.
    """

    columns: slice
    bytes: slice
    shift: int
    width: int
    factor: int

    def codes(self, stored: Integer[Array, "*A"]) -> Integer[Array, "*A"]:
        """Returns this part's bits of bytes of any integer dtype."""
        return (stored >> self.shift) & (2**self.width - 1)


def largest(bits: int) -> int:
    """Returns the largest number that a code of `bits` bits stands for; the smallest is its negative."""
    return 2**bits - 1


def packed_width(columns: int, bits: int | None) -> int:
    """Returns the bytes of `columns` codes of `bits` bits, or `columns` if `bits` is None."""
    return columns if bits is None else columns * bits // 8


def unpacked_width(width: int, bits: int | None) -> int:
    """Returns the number of codes of `bits` bits in `width` bytes, or `width` if `bits` is None."""
    return width if bits is None else width * 8 // bits


def pack(codes: UInt8[Array, "*A D"], bits: int) -> UInt8[Array, "*A W"]:
    """Packs codes into bytes.

    Args:
        codes: Integers in [0, 2**bits); D is a multiple of `COLUMNS`.
        bits: 4, 3 or 2.

    Returns:
        W = D * bits / 8 bytes per vector.
    """
    planes, shift = [], 0
    for width in PLANES[bits]:
        plane = (codes >> shift) & (2**width - 1)
        runs = jnp.split(plane, 8 // width, axis=-1)
        planes.append(sum(run << (place * width) for place, run in enumerate(runs)))
        shift += width
    return jnp.concatenate(planes, axis=-1).astype(jnp.uint8)


def parts(columns: int, bits: int) -> Iterator[Part]:
    """Yields the parts of a packed vector, plane by plane.

    Args:
        columns: D, the number of codes.
        bits: 4, 3 or 2.

    Yields:
        Parts whose columns cover the vector once per plane.
    """
    first, factor = 0, 1
    for width in PLANES[bits]:
        run = columns * width // 8
        for place in range(8 // width):
            part_columns, part_bytes = slice(place * run, (place + 1) * run), slice(first, first + run)
            yield Part(part_columns, part_bytes, place * width, width, factor)
        first, factor = first + run, factor << width


def run_width(columns: int, bits: int) -> int:
    """Returns how many neighboring columns `runs` yields at a time, of `columns` codes of `bits` bits."""
    return columns * min(PLANES[bits]) // 8


def runs(read: Callable[[slice], Array], columns: int, bits: int) -> Iterator[tuple[slice, Array]]:
    """Unpacks a few neighboring columns at a time.

    Args:
        read: Returns bytes of the packed vectors, in any integer dtype; called once per byte.
        columns: D, the number of codes.
        bits: 4, 3 or 2.

    Yields:
        Columns and their codes.
    """
    width, narrowest = run_width(columns, bits), min(PLANES[bits])
    planes, first = [], 0
    for plane_bits in PLANES[bits]:
        pieces = plane_bits // narrowest
        planes.append([read(slice(first + width * piece, first + width * (piece + 1))) for piece in range(pieces)])
        first += width * pieces
    for number in range(8 // narrowest):
        codes, shift = 0, 0
        for plane_bits, plane in zip(PLANES[bits], planes, strict=True):
            place, piece = divmod(number, len(plane))
            codes += ((plane[piece] >> (place * plane_bits)) & (2**plane_bits - 1)) << shift
            shift += plane_bits
        yield slice(number * width, (number + 1) * width), jnp.asarray(codes)


def join_parts(results: Iterable[tuple[int, Array]], axis: int = -1) -> Array:
    """Joins results per part into results per column, summing planes by their factors.

    Args:
        results: The factor and the result of each of `parts`, in order.

    Returns:
        The results in the order of the columns.
    """
    planes: dict[int, list[Array]] = {}
    for factor, columns in results:
        planes.setdefault(factor, []).append(columns)
    return jnp.asarray(sum(jnp.concatenate(runs, axis=axis) * factor for factor, runs in planes.items()))


def unpack(packed: UInt8[Array, "*A W"], bits: int, axis: int = -1) -> UInt8[Array, "*A D"]:
    """Unpacks codes.

    Args:
        packed: Bytes, or the same numbers in a wider integer dtype.
        bits: 4, 3 or 2.
        axis: The axis of the packed vectors.

    Returns:
        The codes, of the dtype of `packed`.
    """
    columns = unpacked_width(packed.shape[axis], bits)
    codes = (
        (part.factor, part.codes(jax.lax.slice_in_dim(packed, part.bytes.start, part.bytes.stop, axis=axis)))
        for part in parts(columns, bits)
    )
    return join_parts(codes, axis)
