"""Value-norm buckets: one merge-and-reduce tree per power of two of the values' norms.

The error of SoftmaxBalance is proportional to the largest value norm of a tree, so that values of similar norm are
balanced together. The paper has a bucket for every power of two; here the lowest and the highest bucket are open.

Reference:
    BalanceKV, Algorithm 1.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from kvjax.methods.balancekv import merge_reduce
from kvjax.methods.balancekv.balance import Halve
from kvjax.methods.balancekv.merge_reduce import MergeReduceTree
from kvjax.state import stacked, state, static


@state
class ValueBuckets:
    """Trees for value norms in (2^(i - 1), 2^i] with i = lowest, lowest + 1, ...

    The first tree also has all smaller norms, and the last one all larger norms.
    """

    trees: MergeReduceTree = stacked("buckets")
    largest: Float[Array, ""]  # float32, largest value norm so far
    lowest: int = static()  # i of the first bucket


def init_value_buckets(
    rng: Key[Array, ""], *, lowest: int, buckets: int, init_tree: Callable[[Key[Array, ""]], MergeReduceTree]
) -> ValueBuckets:
    """Returns empty buckets.

    Args:
        rng: PRNG key of the stream.
        lowest: exponent i of the first bucket.
        init_tree: maps a PRNG key to an empty tree.

    Returns:
        The buckets.
    """
    trees = jax.vmap(init_tree)(jax.random.split(rng, buckets))
    return ValueBuckets(trees, jnp.zeros(()), lowest)


def insert(
    buckets: ValueBuckets,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"],
    valid: Bool[Array, "T"],
    *,
    halve: Callable[[Float[Array, ""]], Halve],
    negligible: float = 0.0,
) -> ValueBuckets:
    """Takes every valid token into the bucket of its value's norm; values of norm zero are left out.

    Args:
        valid: tokens that count.
        halve: maps the largest norm of a bucket, 2^i or inf, to the function that halves its tree.
        negligible: fraction of the largest norm so far up to which a bucket is erased. Algorithm 1 uses
            (epsilon / 2n) exp(-r^2 / sqrt(D)).

    Returns:
        The buckets.

    Reference:
        BalanceKV, Algorithm 1.
    """
    count = buckets.trees.count.shape[0]
    norm = jnp.linalg.norm(values.astype(jnp.float32), axis=1)
    exponent = jnp.ceil(jnp.log2(jnp.where(norm > 0, norm, 1.0)))
    bucket = jnp.clip(exponent - buckets.lowest, 0, count - 1).astype(jnp.int32)
    counts = valid & (norm > 0)
    largest = jnp.maximum(buckets.largest, jnp.max(jnp.where(counts, norm, 0.0)))
    limits = (2.0 ** (buckets.lowest + jnp.arange(count))).at[-1].set(jnp.inf)
    # An erased bucket stays erased, because the largest norm never falls.
    erased = limits <= negligible * largest

    def put(
        tree: MergeReduceTree, index: Int[Array, ""], limit: Float[Array, ""], erased: Bool[Array, ""]
    ) -> MergeReduceTree:
        """Inserts the tokens of bucket `index`, with norms up to `limit`, into its `tree`; empties `erased` ones."""
        tree = merge_reduce.insert(tree, keys, values, counts & (bucket == index) & ~erased, halve=halve(limit))
        return dataclasses.replace(
            tree,
            log_weight=jnp.where(erased, -jnp.inf, tree.log_weight),
            level=jnp.where(erased, -1, tree.level),
            count=jnp.where(erased, 0, tree.count),
        )

    trees = jax.vmap(put)(buckets.trees, jnp.arange(count), limits, erased)
    return dataclasses.replace(buckets, trees=trees, largest=largest)
