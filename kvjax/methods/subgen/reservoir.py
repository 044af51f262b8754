"""A weighted reservoir: independent samples from a stream of keys and values.

Each sample is drawn in proportion to a mass per token. SubGen uses the mass |v|^2.

Reference:
    SubGen, Algorithm 1, lines 24 to 28 (UpdateMatrixProduct), and Lemma 1.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.methods.subgen.padding import resize_slots
from kvjax.spec import allocated_slots
from kvjax.state import fault, kv_entries, state, static


@state
class WeightedReservoir:
    """Samples in the first slots: each holds token i with probability mass_i / total, independently of other slots.

    The size does not grow with the stream: s (D + D_v) elements of keys and values, 4 s bytes of masses, 12 bytes of
    sums and counters, and one PRNG key of 8 bytes. s is the number of samples, rounded up to a multiple of 8.
    """

    keys: Float[Array, "s D"] = kv_entries()
    values: Float[Array, "s D_v"] = kv_entries()
    mass: Float[Array, "s"]  # float32, of the token in the slot; 0 in empty slots
    total: Float[Array, ""]  # float32, mass of all tokens (mu in SubGen)
    # float32, the rounding error of `total`: their sum counts also small masses after a long stream.
    remainder: Float[Array, ""]
    unsound: Int[Array, ""] = fault("masses that are negative or not finite were taken as zero")
    rng: Key[Array, ""]
    samples: int = static()


def init_reservoir(
    samples: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike, rng: Key[Array, ""]
) -> WeightedReservoir:
    """Returns an empty reservoir.

    Args:
        rng: PRNG key of the stream.

    Returns:
        The reservoir.
    """
    slots = allocated_slots(samples)
    return WeightedReservoir(
        keys=jnp.zeros((slots, key_dim), dtype),
        values=jnp.zeros((slots, value_dim), dtype),
        mass=jnp.zeros(slots, jnp.float32),
        total=jnp.zeros((), jnp.float32),
        remainder=jnp.zeros((), jnp.float32),
        unsound=jnp.zeros((), jnp.int32),
        rng=rng,
        samples=samples,
    )


def extend(
    reservoir: WeightedReservoir, keys: Float[Array, "T D"], values: Float[Array, "T D_v"], mass: Float[Array, "T"]
) -> WeightedReservoir:
    """Takes T tokens in.

    A slot is replaced with probability (mass of the block) / (mass so far, block included), by a token of the block in
    proportion to the tokens' masses. The joint distribution of all slots does not depend on the division
    of the stream into blocks.

    Args:
        mass: masses; a token of mass 0 is never sampled, which masks it.

    Returns:
        The reservoir.
    """
    mass = mass.astype(jnp.float32)
    sound = jnp.isfinite(mass) & (mass >= 0)
    mass = jnp.where(sound, mass, 0.0)
    slots, reservoir = reservoir.mass.shape[0], resize_slots(reservoir, "s", reservoir.samples)
    cumulative = jnp.cumsum(mass)
    block_mass = cumulative[-1]
    rng, coins, draws = jax.random.split(reservoir.rng, 3)
    shape = reservoir.mass.shape
    replaced = _uniform(coins, shape) * (reservoir.total + block_mass) < block_mass
    index = jnp.searchsorted(cumulative, _uniform(draws, shape) * block_mass, side="right")
    # Rounding can make the cumulative sum rise at a token of mass 0; the token with mass before it is meant.
    last_with_mass = jax.lax.cummax(jnp.where(mass > 0, jnp.arange(mass.shape[0]), 0))
    source = last_with_mass[jnp.minimum(index, mass.shape[0] - 1)]
    total, rounding_error = _two_sum(reservoir.total, block_mass)

    def put(old: Float[Array, "s D"], new: Float[Array, "T D"]) -> Float[Array, "s D"]:
        return jnp.where(replaced[:, None], new[source].astype(old.dtype), old)

    extended = dataclasses.replace(
        reservoir,
        keys=put(reservoir.keys, keys),
        values=put(reservoir.values, values),
        mass=jnp.where(replaced, mass[source], reservoir.mass),
        total=total,
        remainder=reservoir.remainder + rounding_error,
        unsound=reservoir.unsound + jnp.sum(~sound, dtype=jnp.int32),
        # Padding must not change the random numbers of a row.
        rng=jnp.where(block_mass > 0, rng, reservoir.rng),
    )
    return resize_slots(extended, "s", slots)


def log_weights(reservoir: WeightedReservoir) -> Float[Array, "s"]:
    """Returns log(total / (samples mass)) of every sample, float32; -inf in empty slots.

    With these log-weights, a sum over the samples is an unbiased estimate of the sum over the stream.

    Returns:
        The log-weights.

    Reference:
        SubGen, Algorithm 1, line 29.
    """
    occupied = reservoir.mass > 0
    log_total = jnp.log(jnp.where(reservoir.total > 0, reservoir.total + reservoir.remainder, 1.0))
    log_mass = jnp.log(jnp.where(occupied, reservoir.mass, 1.0))
    return jnp.where(occupied, log_total - jnp.log(float(reservoir.samples)) - log_mass, -jnp.inf)


def _uniform(rng: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Draws float32 numbers in [0, 1) with a resolution of 2^-32 near 0.

    `jax.random.uniform` has a resolution of 2^-23, which would distort probabilities of one in a million.

    Returns:
        The numbers.
    """
    bits = jax.random.bits(rng, shape, jnp.uint32)
    return jnp.minimum(bits.astype(jnp.float32) * 2.0**-32, 1 - 2.0**-24)


def _two_sum(a: Float[Array, ""], b: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the rounded sum and its exact rounding error (Knuth's TwoSum)."""
    total = a + b
    rounded_b = total - a
    return total, (a - (total - rounded_b)) + (b - rounded_b)
