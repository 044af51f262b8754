"""WeightedReservoir: independent samples of a stream of (key, value), each drawn in proportion to a mass.

SubGen samples by mass |v|^2 (UpdateMatrixProduct, Algorithm 1, lines 24 to 28; Lemma 1).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from kvjax.state import fault, kv_entries, state


@state
class WeightedReservoir:
    """s slots; each holds token i of the stream with probability mass_i / total, whatever the other slots hold.

    Bytes: s (D + D_v) itemsize for keys and values, 4 s for masses, 12 for the total and the counter, and one PRNG key
    (8). Nothing grows with the stream.
    """

    keys: Float[Array, "s D"] = kv_entries()
    values: Float[Array, "s D_v"] = kv_entries()
    mass: Float[Array, "s"]  # float32, of the token in the slot; 0 in empty slots
    total: Float[Array, ""]  # float32, of all tokens so far (mu in SubGen)
    # float32: total + remainder is the sum to twice float32's precision: millions of small masses still count.
    remainder: Float[Array, ""]
    unsound: Int[Array, ""] = fault("masses that are negative or not finite were taken as zero")
    rng: Key[Array, ""]


def init_reservoir(
    slots: int, key_dim: int, value_dim: int, dtype: jax.typing.DTypeLike, rng: Key[Array, ""]
) -> WeightedReservoir:
    """An empty reservoir of `slots` keys and values of that dtype; `rng` is the stream's own typed PRNG key.

    Raises:
        ValueError: for fewer than one slot.
    """
    if slots < 1:
        raise ValueError(f"slots={slots}; a reservoir needs at least 1")
    return WeightedReservoir(
        keys=jnp.zeros((slots, key_dim), dtype),
        values=jnp.zeros((slots, value_dim), dtype),
        mass=jnp.zeros(slots, jnp.float32),
        total=jnp.zeros((), jnp.float32),
        remainder=jnp.zeros((), jnp.float32),
        unsound=jnp.zeros((), jnp.int32),
        rng=rng,
    )


def extend(
    reservoir: WeightedReservoir, keys: Float[Array, "T D"], values: Float[Array, "T D_v"], mass: Float[Array, "T"]
) -> WeightedReservoir:
    """Takes in T tokens at once, with the law that T calls of `step` have, jointly over slots and blocks.

    A slot is replaced with probability (mass of the block) / (mass so far, block included), and then by a token of the
    block in proportion to the tokens' masses. A token of mass 0 is never sampled: give masked tokens mass 0.
    """
    _check(reservoir, keys, values, mass)
    mass, unsound = _sound(mass)
    cumulative = jnp.cumsum(mass)
    block = cumulative[-1]
    rng, coins, draws = jax.random.split(reservoir.rng, 3)
    slots = reservoir.mass.shape
    replaced = _uniform(coins, slots) * (reservoir.total + block) < block
    drawn = jnp.searchsorted(cumulative, _uniform(draws, slots) * block, side="right")
    # The partial sums are rounded each in its own way and may rise at a token of mass 0: the one before it was meant.
    last_with_mass = jax.lax.cummax(jnp.where(mass > 0, jnp.arange(mass.shape[0]), 0))
    source = last_with_mass[jnp.minimum(drawn, mass.shape[0] - 1)]
    return _replace(reservoir, replaced, keys[source], values[source], mass[source], block, unsound, rng)


def step(
    reservoir: WeightedReservoir, key: Float[Array, "D"], value: Float[Array, "D_v"], mass: Float[Array, ""]
) -> WeightedReservoir:
    """Takes in one token as the paper defines it: every slot is replaced with probability mass / (total + mass)."""
    _check(reservoir, key[None], value[None], mass[None])
    mass, unsound = _sound(mass)
    rng, coins = jax.random.split(reservoir.rng)
    replaced = _uniform(coins, reservoir.mass.shape) * (reservoir.total + mass) < mass
    return _replace(reservoir, replaced, key, value, mass, mass, unsound, rng)


def scan_steps(
    reservoir: WeightedReservoir, keys: Float[Array, "T D"], values: Float[Array, "T D_v"], mass: Float[Array, "T"]
) -> WeightedReservoir:
    """Takes in T tokens by T calls of `step`: what `extend` is measured against."""
    return jax.lax.scan(lambda now, token: (step(now, *token), None), reservoir, (keys, values, mass))[0]


def log_weights(reservoir: WeightedReservoir) -> Float[Array, "s"]:
    """float32 log(total / (s mass)) of each sample, -inf in empty slots: with these weights a sum over the samples
    estimates, without bias, the same sum over the stream (Algorithm 1, line 29)."""
    filled = reservoir.mass > 0
    log_total = jnp.log(jnp.where(reservoir.total > 0, reservoir.total + reservoir.remainder, 1.0))
    log_mass = jnp.log(jnp.where(filled, reservoir.mass, 1.0))
    return jnp.where(filled, log_total - jnp.log(float(reservoir.mass.shape[0])) - log_mass, -jnp.inf)


def _uniform(rng: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """float32 in [0, 1) in steps of 2^-32 near 0, where `jax.random.uniform` has steps of 2^-23: coins that fall once
    in a million tokens would be off by tenths."""
    bits = jax.random.bits(rng, shape, jnp.uint32)
    return jnp.minimum(bits.astype(jnp.float32) * 2.0**-32, 1 - 2.0**-24)


def _replace(reservoir, replaced, keys, values, mass, added, unsound, rng):
    """The reservoir with the replaced slots taken from `keys` and so on (one row per slot, or one for all)."""
    put = lambda new, old: jnp.where(replaced[:, None], new.astype(old.dtype), old)  # noqa: E731
    total = reservoir.total + added
    # Knuth's TwoSum: exactly what the addition rounded off.
    taken = total - reservoir.total
    rounded_off = (reservoir.total - (total - taken)) + (added - taken)
    return dataclasses.replace(
        reservoir,
        keys=put(keys, reservoir.keys),
        values=put(values, reservoir.values),
        mass=jnp.where(replaced, mass, reservoir.mass),
        total=total,
        remainder=reservoir.remainder + rounded_off,
        unsound=reservoir.unsound + unsound,
        # Where nothing came, nothing was drawn: padding may not move a row's randomness.
        rng=jnp.where(added > 0, rng, reservoir.rng),
    )


def _sound(mass: Float[Array, "..."]) -> tuple[Float[Array, "..."], Int[Array, ""]]:
    """The masses with the impossible ones as zero, and their number."""
    mass = mass.astype(jnp.float32)
    sound = jnp.isfinite(mass) & (mass >= 0)
    return jnp.where(sound, mass, 0.0), jnp.sum(~sound, dtype=jnp.int32)


def _check(reservoir, keys, values, mass) -> None:
    tokens = keys.shape[0]
    wanted = {
        "keys": (keys, (tokens, reservoir.keys.shape[1])),
        "values": (values, (tokens, reservoir.values.shape[1])),
        "mass": (mass, (tokens,)),
    }
    for name, (given, shape) in wanted.items():
        if given.shape != shape:
            raise ValueError(f"{name} have shape {given.shape}; it must be {shape} here")
