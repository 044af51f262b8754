"""Value-norm buckets: one merge-and-reduce tree per power of two of the values' norms (BalanceKV, Algorithm 1).

SoftmaxBalance errs in proportion to the largest value norm it may see, so values are balanced among their like.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.state import fault, stacked, state, static
from kvjax.structures import merge_reduce
from kvjax.structures.balance import Halve
from kvjax.structures.merge_reduce import MergeReduceTree


@state
class ValueBuckets:
    """Trees for value norms in [2^(i - 1), 2^i], i = lowest, lowest + 1, ... Bytes: those of the trees and 8."""

    trees: MergeReduceTree = stacked("buckets")
    largest: Float[Array, ""]  # float32, the largest value norm so far
    outside: Int[Array, ""] = fault("value norms lay outside the buckets: these tokens are missing from the numerator")
    lowest: int = static()  # i of the first bucket


def init_value_buckets(
    rng: Key[Array, ""], *, lowest: int, buckets: int, tree: Callable[[Key[Array, ""]], MergeReduceTree]
) -> ValueBuckets:
    """Empty buckets i = lowest .. lowest + buckets - 1, each with an empty tree made by `tree` of its own key."""
    if buckets < 1:
        raise ValueError(f"buckets={buckets}; it must be at least 1")
    trees = jax.vmap(tree)(jax.random.split(rng, buckets))
    return ValueBuckets(trees, jnp.zeros(()), jnp.zeros((), jnp.int32), lowest)


def insert(
    buckets: ValueBuckets,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"],
    valid: Bool[Array, "T"],
    *,
    halve: Callable[[Float[Array, ""]], Halve],
    negligible: float = 0.0,
) -> ValueBuckets:
    """Takes every valid token into the bucket of its value's norm; norms of zero go nowhere.

    Args:
        halve: of a bucket's largest norm 2^i, how its tree halves.
        negligible: buckets with 2^i at most this share of the largest norm so far are erased. Algorithm 1 asks for
            (eps / 2n) exp(-r^2 / sqrt(D)).

    Source: BalanceKV, Algorithm 1.
    """
    count = buckets.trees.count.shape[0]
    norm = jnp.linalg.norm(values.astype(jnp.float32), axis=1)
    place = jnp.ceil(jnp.log2(jnp.where(norm > 0, norm, 1.0))).astype(jnp.int32) - buckets.lowest
    counted = valid & (norm > 0)
    largest = jnp.maximum(buckets.largest, jnp.max(jnp.where(counted, norm, 0.0)))
    limits = 2.0 ** (buckets.lowest + jnp.arange(count))
    # A bucket once negligible stays so: the largest norm never falls.
    erased = limits <= negligible * largest

    def put(tree, number, limit, erased):
        tree = merge_reduce.insert(tree, keys, values, counted & (place == number) & ~erased, halve=halve(limit))
        return dataclasses.replace(
            tree,
            log_weight=jnp.where(erased, -jnp.inf, tree.log_weight),
            level=jnp.where(erased, -1, tree.level),
            count=jnp.where(erased, 0, tree.count),
        )

    trees = jax.vmap(put)(buckets.trees, jnp.arange(count), limits, erased)
    # What falls below the buckets may be as negligible as an erased one.
    missed = counted & ((place >= count) | ((place < 0) & (norm > negligible * largest)))
    return dataclasses.replace(
        buckets, trees=trees, largest=largest, outside=buckets.outside + jnp.sum(missed, dtype=jnp.int32)
    )
