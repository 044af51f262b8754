"""Rotary position embedding of a layer: the frequencies of every kind of scaling, and how far keys are turned.

A head's dimensions are stored so that pair i is (i, i + D/2) and all pairs stand in one row, whatever a family does:
pairs that a model leaves alone have frequency 0, and checkpoints of models with another order of pairs are put into
this one when they are read (`weights.head_dim_order`). Products of queries and keys are the same, and everything that turns
keys back needs no more than the frequencies.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvjax import rope

KINDS = ("linear", "llama3", "yarn", "longrope", "dynamic")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context a model was first trained on.

    Attributes:
        kind: "linear" divides all frequencies by `factor`. "llama3" divides those whose wavelength is long against
            `original_length`, with a smooth passage between its two bounds. "yarn" does so with a passage that is
            linear in the pair's number. "longrope" divides each by a factor of its own. "dynamic" raises the base.
            What "longrope" and "dynamic" do follows from the tokens that a sequence may grow to, see `make_rotary`.
        low_frequency_factor, high_frequency_factor: of "llama3", in turns within the original context.
        original_length: tokens of the context that the model was first trained on.
        beta_fast, beta_slow: of "yarn": pairs with more turns than these within the original context are kept, with
            fewer divided.
        truncate: of "yarn": whether the passage begins and ends at whole pairs.
        attention_factor: of "yarn" and "longrope": what rotated queries and keys are multiplied by.
        short_factors, long_factors: of "longrope": up to the original context, and past it.

    Raises:
        ValueError: for a kind that is not implemented.

    Source: Chen et al. 2306.15595 (linear), Llama 3.1, YaRN 2309.00071, LongRoPE 2402.13753; bloc97's NTK-aware base
    (dynamic). All as in transformers 5.2.
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

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope_scaling.kind={self.kind!r} is not implemented; known: {', '.join(KINDS)}")


@dataclasses.dataclass(frozen=True)
class Rotary:
    """The rotation of one layer: a value, so that layers of equal rotation share programs."""

    frequencies: tuple[float, ...]  # radians per position of every pair, 0 for pairs that are not turned
    factor: float = 1.0  # what the turned pairs are multiplied by


def rotation(
    rotary: Rotary, positions: Int[Array, "B T"]
) -> tuple[Float[Array, "B T half_D"], Float[Array, "B T half_D"]]:
    """Cosine and sine for `kvjax.rope.rotate`, float32, the layer's factor included."""
    frequencies = np.asarray(rotary.frequencies, np.float32)
    cos, sin = rope.rotation(positions, jnp.asarray(frequencies))
    if rotary.factor == 1:
        return cos, sin
    factor = np.where(frequencies == 0, np.float32(1), np.float32(rotary.factor))
    return cos * factor, sin * factor


def make_rotary(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, *, rotary_dim: int | None = None, tokens: int
) -> Rotary:
    """The rotation of a layer in sequences that may grow to so many tokens.

    Keys are kept as they were turned, so a sequence has the same frequencies from its first token to its last.
    transformers looks at the tokens that there are at each step instead: "longrope" is the same unless a sequence
    passes the original context while it is written, "dynamic" up to there.

    Computed on the host, the power in float64: XLA's float32 power differs between eager and compiled code, and
    between platforms, by a few units in the last place, which at position 131,072 turn keys by 0.008 radians. Rounded
    as here, the frequencies are those of transformers to the bit but for about one in a hundred.

    Args:
        head_dim: dimensions of a head.
        theta: the base.
        rotary_dim: how many of the dimensions are turned; None for all.
    """
    turned = rotary_dim or head_dim
    if scaling is not None and scaling.kind == "dynamic":
        grown = scaling.factor * max(tokens, scaling.original_length) / scaling.original_length - (scaling.factor - 1)
        theta = theta * grown ** (turned / (turned - 2))
    exponents = np.arange(0, turned, 2, dtype=np.float32) / np.float32(turned)
    frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    if scaling is not None:
        frequencies = _scaled(frequencies, theta, scaling, tokens)
    still = np.zeros((head_dim - turned) // 2, np.float32)
    values = np.concatenate([np.asarray(frequencies, np.float32), still])
    return Rotary(tuple(values.tolist()), 1.0 if scaling is None else scaling.attention_factor)


def _scaled(frequencies: np.ndarray, theta: float, scaling: RopeScaling, tokens: int) -> np.ndarray:
    if scaling.kind == "dynamic":
        return frequencies  # of another base
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "longrope":
        long = tokens > scaling.original_length
        return frequencies / np.asarray(scaling.long_factors if long else scaling.short_factors, np.float32)
    if scaling.kind == "yarn":
        keep = 1 - _passage(2 * len(frequencies), theta, scaling)
    else:
        turns = scaling.original_length / (2 * math.pi / frequencies)  # full turns within the original context
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


def _passage(dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """How far every pair is on YaRN's way from frequencies that are kept, 0, to those that are divided, 1."""

    def pair_of(turns: float) -> float:
        return dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last = last + 0.001 if first == last else last  # as published
    return np.clip((np.arange(dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)
