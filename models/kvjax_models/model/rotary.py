"""Rotary position embedding: the frequencies of every kind of scaling, and rotation angles.

Each head is stored so that dimensions i and i + D/2 form a pair. Pairs that a model does not rotate have frequency 0,
and checkpoints with another order of dimensions are permuted when they are loaded (`weights.head_dim_order`), which
does not change products of queries and keys.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import rope

KINDS = ("linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed to extend the context length.

    Attributes:
        kind: "linear" divides all frequencies by `factor`. "llama3" divides the low ones, with a smooth transition
            between its two bounds. "yarn" does so with a transition that is linear in the number of the pair.
            "longrope" divides each by its own factor. "dynamic" increases the base. "longrope" and "dynamic" depend on
            the maximum length of a sequence, see `make_rotary`. "proportional" divides all by `factor` and rotates the
            pairs with the highest frequencies only.
        factor: scaling factor.
        low_frequency_factor: lower bound for "llama3", in rotations within the original context.
        high_frequency_factor: upper bound for "llama3".
        original_length: context length before the extension, in tokens.
        beta_fast: for "yarn": pairs with more rotations than this within the original context are not changed.
        beta_slow: for "yarn": pairs with fewer rotations than this are divided by `factor`.
        truncate: for "yarn": whether the bounds of the transition are rounded to integers.
        attention_factor: for "yarn" and "longrope": scale of rotated queries and keys.
        short_factors: for "longrope": factors up to the original context length.
        long_factors: for "longrope": factors beyond it.
        rotated_share: for "proportional": share of the pairs that are rotated.

    Reference:
        Chen et al. 2306.15595 (linear), Llama 3.1, YaRN 2309.00071, LongRoPE 2402.13753, bloc97's NTK-aware scaling
        (dynamic); all as in transformers 5.2.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    rotated_share: float = 1.0

    def __post_init__(self) -> None:
        """Checks the kind.

        Raises:
            ValueError: if it is not supported.
        """
        if self.kind not in KINDS:
            raise ValueError(f"rope_scaling.kind={self.kind!r} must be one of {', '.join(KINDS)}")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a layer; hashable, so that layers with equal ones share compiled programs.

    Attributes:
        frequencies: radians per position of every pair of dimensions; 0 for pairs that are not rotated.
        factor: scale of the rotated pairs.
        query_growth: growth g of queries with their position p, by 1 + g log(1 + floor(p / query_period)).
        query_period: positions with the same growth.
    """

    frequencies: tuple[float, ...]
    factor: float = 1.0
    query_growth: float = 0.0
    query_period: int = 1


class Angles(NamedTuple):
    """Rotary angles of tokens for `DecoderLayer.project`; all arrays are float32.

    Attributes:
        cos: cosines for `kvjax.rope.rotate`, multiplied by the layer's factor.
        sin: sines.
        query_scale: scale of queries; None: 1.
    """

    cos: Float[Array, "B T half_D"]
    sin: Float[Array, "B T half_D"]
    query_scale: Float[Array, "B T"] | None = None


def rotation(rotary: Rotary, positions: Int[Array, "B T"]) -> Angles:
    """Returns the rotary angles of tokens.

    Args:
        rotary: rotary embedding of the layer.
    """
    frequencies = np.asarray(rotary.frequencies, np.float32)
    cos, sin = rope.rotation(positions, jnp.asarray(frequencies))
    if rotary.factor != 1:
        factor = np.where(frequencies == 0, np.float32(1), np.float32(rotary.factor))
        cos, sin = cos * factor, sin * factor
    if not rotary.query_growth:
        return Angles(cos, sin)
    periods = (positions // rotary.query_period).astype(jnp.float32)
    return Angles(cos, sin, 1 + rotary.query_growth * jnp.log1p(periods))


def make_rotary(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, *, rotary_dim: int | None = None, tokens: int
) -> Rotary:
    """Computes the rotary embedding of a layer.

    Cached keys stay rotated, so the frequencies are fixed for a sequence. transformers instead derives them from the
    current length at every step: "longrope" differs only if a sequence exceeds the original context during generation,
    "dynamic" agrees up to that length.

    The power is computed on the host in float64. XLA's float32 power differs between eager and compiled code and
    between platforms by a few units in the last place, which rotates keys at position 131,072 by .008 radians. About
    99% of the frequencies equal transformers' frequencies bit for bit.

    Args:
        theta: base of the frequencies.
        rotary_dim: number of rotated dimensions; None: all.
        tokens: maximum length of the sequences.

    Returns:
        The rotary embedding.
    """
    rotated = rotary_dim or head_dim
    if scaling is not None and scaling.kind == "dynamic":
        growth = scaling.factor * max(tokens, scaling.original_length) / scaling.original_length - (scaling.factor - 1)
        theta = theta * growth ** (rotated / (rotated - 2))
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    if scaling is not None:
        frequencies = _scale_frequencies(frequencies, theta, scaling, tokens)
    zeros = np.zeros((head_dim - rotated) // 2, np.float32)
    values = np.concatenate([np.asarray(frequencies, np.float32), zeros])
    return Rotary(tuple(values.tolist()), 1.0 if scaling is None else scaling.attention_factor)


def _scale_frequencies(frequencies: np.ndarray, theta: float, scaling: RopeScaling, tokens: int) -> np.ndarray:
    """Returns the scaled frequencies."""
    if scaling.kind == "dynamic":
        return frequencies  # theta is scaled already
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "proportional":
        rotated = int(scaling.rotated_share * len(frequencies))
        return np.where(np.arange(len(frequencies)) < rotated, frequencies / scaling.factor, 0)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if tokens > scaling.original_length else scaling.short_factors
        return frequencies / np.asarray(factors, np.float32)
    if scaling.kind == "yarn":
        unscaled_share = 1 - _yarn_ramp(2 * len(frequencies), theta, scaling)
    else:
        rotations = scaling.original_length / (2 * math.pi / frequencies)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        unscaled_share = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1 - unscaled_share) * frequencies / scaling.factor + unscaled_share * frequencies


def _yarn_ramp(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Returns YaRN's ramp over pairs: 0 for frequencies that stay unchanged, 1 for those divided by the factor."""

    def pair_of(rotations: float) -> float:
        return dim * math.log(scaling.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last  # as in the published code
    return np.clip((np.arange(dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)
