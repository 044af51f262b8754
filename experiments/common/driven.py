"""Stream structures as `experiments.stream_structures` drives them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from experiments.common import streams
from kvjax.structures import balance, cluster_table, merge_reduce, reservoir

HEAD_DIM = 128
PAIRS = 1024  # s
CLUSTERS, SAMPLES, SUB_BLOCK = 512, 8, 256  # M, t, tokens assigned at a time
BINS, HALVED = 16, 256  # N, entries that one halving takes in
MOST_TOKENS = 2**22  # that the tree's bins can hold

Sums = tuple[Float[Array, "Q D"] | None, Float[Array, "Q"] | None]


class Structure(NamedTuple):
    """A stream structure as this experiment drives it.

    Attributes:
        policy: the policy that it is of.
        init: PRNG key to the empty structure.
        update: (structure, keys [T, D], values [T, D]) to the structure after T more tokens.
        sums: (structure, queries) to its estimates of attention's numerator and denominator; None where it has none.
        bytes: what its docstring promises, for the sizes above.
    """

    policy: str
    init: Callable[[Key[Array, ""]], Any]
    update: Callable[[Any, Float[Array, "T D"], Float[Array, "T D"]], Any]
    sums: Callable[[Any, Float[Array, "Q D"]], Sums]
    bytes: int


def update_reservoir(state: reservoir.WeightedReservoir, keys: Float[Array, "T D"], values: Float[Array, "T D"]):
    return reservoir.extend(state, keys, values, jnp.sum(values**2, axis=1))


def reservoir_numerator(state: reservoir.WeightedReservoir, queries: Float[Array, "Q D"]) -> Float[Array, "Q D"]:
    return streams.weighted_terms(queries, state.keys, reservoir.log_weights(state)) @ state.values


def update_table(state: cluster_table.ClusterTable, keys: Float[Array, "T D"], values: Float[Array, "T D"]):
    del values
    return cluster_table.extend(state, keys, block=SUB_BLOCK)


def table_denominator(state: cluster_table.ClusterTable, queries: Float[Array, "Q D"]) -> Float[Array, "Q"]:
    assert state.samples is not None
    samples, weights = state.samples.reshape(-1, state.samples.shape[-1]), cluster_table.log_sample_weights(state)
    return jnp.sum(streams.weighted_terms(queries, samples, weights.reshape(-1)), axis=1)


def update_tree(state: merge_reduce.MergeReduceTree, keys: Float[Array, "T D"], values: Float[Array, "T D"]):
    halve = functools.partial(balance.softmax_balance, c=1.0, key_norm=4.0, value_norm=4.0)
    return merge_reduce.insert(state, keys, values, halve=halve)


def tree_sums(state: merge_reduce.MergeReduceTree, queries: Float[Array, "Q D"]) -> Sums:
    terms = streams.weighted_terms(queries, state.keys, state.log_weight)
    assert state.values is not None
    return terms @ state.values, jnp.sum(terms, axis=1)


STRUCTURES = {
    "reservoir": Structure(
        "subgen",
        lambda rng: reservoir.init_reservoir(PAIRS, HEAD_DIM, HEAD_DIM, jnp.float32, rng),
        update_reservoir,
        lambda state, queries: (reservoir_numerator(state, queries), None),
        PAIRS * 2 * HEAD_DIM * 4 + 4 * PAIRS + 12 + 8,
    ),
    "table": Structure(
        "subgen",
        lambda rng: cluster_table.init_cluster_table(CLUSTERS, HEAD_DIM, jnp.float32, rng, samples=SAMPLES),
        update_table,
        lambda state, queries: (None, table_denominator(state, queries)),
        CLUSTERS * HEAD_DIM * 4 + CLUSTERS * SAMPLES * HEAD_DIM * 4 + 8 * CLUSTERS + 24,
    ),
    "tree": Structure(
        "balancekv",
        lambda rng: merge_reduce.init_merge_reduce(
            rng, bins=BINS, bin_slots=HALVED // 2, key_dim=HEAD_DIM, value_dim=HEAD_DIM, tokens=MOST_TOKENS
        ),
        update_tree,
        tree_sums,
        BINS * HALVED // 2 * (2 * HEAD_DIM * 4 + 4) + 8 * BINS + 12 + 8,
    ),
}
