"""Numbers of fewer than eight bits in bytes, laid out so that shifts and masks alone bring them apart.

A number of b bits is an odd integer between -(2^b - 1) and 2^b - 1, kept as a code c in [0, 2^b) that stands for
2 c - (2^b - 1): a uniform grid without a zero, as many steps below it as above. Codes are cut into planes of bits (3
are 2 and 1), and a byte of a plane holds the codes of columns that lie a whole run of bytes apart. A row of bytes is
then read as a few rows of neighbouring columns, and a product with it is the sum of products with these.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Integer, UInt8

# The planes that numbers of so many bits are cut into, the lowest bits first.
PLANES = {4: (4,), 3: (2, 1), 2: (2,)}
COLUMNS = 8  # whose multiple the columns of packed rows must be


class Part(NamedTuple):
    """Neighbouring columns of one plane, and where in a row they lie."""

    columns: slice
    bytes: slice
    shift: int  # how far up in a byte
    width: int  # bits
    factor: int  # what a one in this plane is worth

    def codes(self, stored: Integer[Array, "*A"]) -> Integer[Array, "*A"]:
        """Of stored bytes, in any integer type."""
        return (stored >> self.shift) & (2**self.width - 1)


def largest(bits: int) -> int:
    """The largest number of so many bits; the smallest is its negative."""
    return 2**bits - 1


def packed_width(columns: int, bits: int | None) -> int:
    """Bytes of a row of so many numbers; None: numbers that have a type of their own."""
    return columns if bits is None else columns * bits // 8


def unpacked_width(width: int, bits: int | None) -> int:
    """Numbers in a row of so many bytes."""
    return width if bits is None else width * 8 // bits


def pack(codes: UInt8[Array, "*A D"], bits: int) -> UInt8[Array, "*A W"]:
    """Bytes of codes of so many bits.

    Raises:
        ValueError: where the columns are no multiple of `COLUMNS`.
    """
    columns = codes.shape[-1]
    if columns % COLUMNS:
        raise ValueError(f"{columns} columns of {bits} bits; they must be a multiple of {COLUMNS}")
    planes, shift = [], 0
    for width in PLANES[bits]:
        plane = (codes >> shift) & (2**width - 1)
        runs = jnp.split(plane, 8 // width, axis=-1)
        planes.append(sum(run << (place * width) for place, run in enumerate(runs)))
        shift += width
    return jnp.concatenate(planes, axis=-1).astype(jnp.uint8)


def parts(columns: int, bits: int) -> Iterator[Part]:
    """The parts of rows of so many numbers, one for every place of a plane's bytes."""
    first, worth = 0, 1
    for width in PLANES[bits]:
        run = columns * width // 8
        for place in range(8 // width):
            own, lie_in = slice(place * run, (place + 1) * run), slice(first, first + run)
            yield Part(own, lie_in, place * width, width, worth)
        first, worth = first + run, worth << width


def run_width(columns: int, bits: int) -> int:
    """How many neighbouring columns come apart together in every plane."""
    return columns * min(PLANES[bits]) // 8


def runs(read: Callable[[slice], Array], columns: int, bits: int) -> Iterator[tuple[slice, Array]]:
    """The codes of packed rows, `run_width` columns at a time; `read` gives some of a row's bytes in any integer type,
    and is asked for each once."""
    width, narrowest = run_width(columns, bits), min(PLANES[bits])
    planes, first = [], 0
    for bits_of_plane in PLANES[bits]:
        pieces = bits_of_plane // narrowest
        planes.append([read(slice(first + width * piece, first + width * (piece + 1))) for piece in range(pieces)])
        first += width * pieces
    for number in range(8 // narrowest):
        codes, shift = 0, 0
        for bits_of_plane, plane in zip(PLANES[bits], planes, strict=True):
            place, piece = divmod(number, len(plane))
            codes += ((plane[piece] >> (place * bits_of_plane)) & (2**bits_of_plane - 1)) << shift
            shift += bits_of_plane
        yield slice(number * width, (number + 1) * width), jnp.asarray(codes)


def joined(found: Iterable[tuple[int, Array]], axis: int = -1) -> Array:
    """What was found of every part, with its factor, in the columns' order: planes summed by what they are worth."""
    planes: dict[int, list[Array]] = {}
    for factor, columns in found:
        planes.setdefault(factor, []).append(columns)
    return jnp.asarray(sum(jnp.concatenate(runs, axis=axis) * factor for factor, runs in planes.items()))


def unpack(packed: UInt8[Array, "*A W"], bits: int, axis: int = -1) -> UInt8[Array, "*A D"]:
    """The codes in their columns, of the dtype of the bytes. Rows lie along the axis."""

    def codes(part: Part) -> Array:
        return part.codes(jax.lax.slice_in_dim(packed, part.bytes.start, part.bytes.stop, axis=axis))

    of_row = parts(unpacked_width(packed.shape[axis], bits), bits)
    return joined(((part.factor, codes(part)) for part in of_row), axis)
