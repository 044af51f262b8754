"""Pages of quantized keys and values, as all implementations of `paged_decode` take them."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt32

from pallas_kernels import packing
from pallas_kernels.quantized_array import QuantizedArray

# Vectors are stored in words of four bytes. A code c of a bit width stands for the number step * c - zero.
BYTES = 4
STEP, ZERO = {4: 2, 8: 1}, {4: packing.largest(4), 8: 128}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """N pages of P slots per KV head.

    A slot holds the key, the value and their scales of one token in W words of 32 bits: D * bits / 32 words of the key,
    as many of the value, and one word with the key's scale in its low half and the value's scale in its high half.
    Slots are the minor axis, so that a TPU reads keys as the right operand of a product with queries. A vector of V
    words has dimension j * V + w in byte j of word w at 8 bits. At 4 bits, dimension 2 * (i * V + w) + h is code i of
    half h of word w, so that two codes become two bfloat16 numbers by one mask.

    Attributes:
        data: The words in elements of four bytes, n = 1, or their low and high halves in elements of two bytes, n = 2.
            Any dtype, whose bits are meant. Scales are bfloat16 and finite; zeros are valid words.
        bits: 8 or 4.
    """

    data: Shaped[Array, "N H W n P"]
    bits: int = dataclasses.field(metadata={"static": True})

    @property
    def heads(self) -> int:
        """H."""
        return self.data.shape[1]

    @property
    def head_dim(self) -> int:
        """D."""
        return self.vector_words * 8 * BYTES // self.bits

    @property
    def vector_words(self) -> int:
        """The words of a key or value."""
        return (self.data.shape[2] - 1) // 2

    @property
    def page_size(self) -> int:
        """P."""
        return self.data.shape[4]


def slot_words(head_dim: int, bits: int) -> int:
    """Returns W, the words of a slot.

    Args:
        head_dim: D.
        bits: 4 or 8.

    Returns:
        The number of words.

    Raises:
        ValueError: If a vector does not fill an integer number of words.
    """
    if head_dim * bits % (8 * BYTES):
        raise ValueError(f"head_dim={head_dim} with {bits} bits; it must be a multiple of {8 * BYTES // bits}")
    return 2 * (head_dim * bits // (8 * BYTES)) + 1


def pack_words(keys: QuantizedArray, values: QuantizedArray) -> UInt32[Array, "*A S W"]:
    """Packs quantized keys and values into the words of slots.

    Args:
        keys: [*A, S, D] in int8, or packed in 4 bits, with bfloat16 scales and without offset.
        values: Likewise.

    Returns:
        The words.
    """
    low, high = (jax.lax.bitcast_convert_type(x.scale, jnp.uint16).astype(jnp.uint32) for x in (keys, values))
    scales = (low | (high << 16))[..., None]
    return jnp.concatenate([_pack_vectors(keys), _pack_vectors(values), scales], axis=-1)


def _pack_vectors(x: QuantizedArray) -> UInt32[Array, "*A S V"]:
    if x.bits is None:
        parts = jnp.split((x.values.astype(jnp.int32) + ZERO[8]).astype(jnp.uint32), BYTES, axis=-1)
        return jnp.asarray(sum(part << (8 * j) for j, part in enumerate(parts)))
    codes = packing.unpack(x.values, x.bits).astype(jnp.uint32)
    codes = codes.reshape(*codes.shape[:-1], 4, -1, 2)
    return jnp.asarray(sum(codes[..., i, :, h] << (4 * i + 16 * h) for i in range(4) for h in range(2)))


def unpack_codes(words: Int[Array, "*A V P"], bits: int) -> Int[Array, "*A D P"]:
    """Returns the codes in words of keys or values, in the dtype of the words."""
    if bits == 8:
        return jnp.concatenate([(words >> (8 * j)) & 255 for j in range(BYTES)], axis=-2)
    codes = jnp.stack([(words >> (4 * i + 16 * h)) & 15 for i in range(4) for h in range(2)], axis=-2)
    codes = codes.reshape(*words.shape[:-1], 4, 2, words.shape[-1])
    return jnp.moveaxis(codes, -3, -4).reshape(*words.shape[:-2], -1, words.shape[-1])


def unpack_scales(words: Int[Array, "*A"]) -> tuple[Float[Array, "*A"], Float[Array, "*A"]]:
    """Returns the scales of keys and of values in words of scales, in float32."""
    # A bfloat16 is the high half of a float32.
    low, high = (jax.lax.bitcast_convert_type(half, jnp.float32) for half in (words << 16, (words >> 16) << 16))
    return low, high


def split_words(words: UInt32[Array, "*A"], elements: int) -> Shaped[Array, "*A n"]:
    """Returns the unsigned elements that store words, the low half first."""
    width = 32 // elements
    return jnp.stack([(words >> (width * i)).astype(f"uint{width}") for i in range(elements)], axis=-1)


def join_words(data: Shaped[Array, "*A n P"]) -> UInt32[Array, "*A P"]:
    """Inverts `split_words` on the axis before the slots."""
    width = 32 // data.shape[-2]
    return jnp.asarray(sum(data[..., i, :].astype(jnp.uint32) << (width * i) for i in range(data.shape[-2])))


def as_unsigned(pages: Pages) -> Shaped[Array, "N H W n P"]:
    """Returns the data of pages as unsigned integers. XLA:CPU changes some bit patterns of floats that it moves."""
    return jax.lax.bitcast_convert_type(pages.data, f"uint{32 // pages.data.shape[3]}")
