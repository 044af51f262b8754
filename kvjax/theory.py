"""Settings that the papers' theorems ask for, and the norms of keys, queries and values that they depend on
exponentially."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.policies.subgen import SubGen
from kvjax.structures.balance import walk_constant
from kvjax.structures.merge_reduce import bins_needed


class Norms(NamedTuple):
    """The largest l2 norms of a stream, before attention's factor 1 / sqrt(D)."""

    key: float
    query: float
    value: float


def measured_norms(
    queries: Float[Array, "... D"], keys: Float[Array, "... D"], values: Float[Array, "... D_v"]
) -> Norms:
    """The largest norms of the given vectors, for `subgen_settings` and `balancekv_settings`. Call it outside jit.

    Raises:
        ValueError: for vectors that are not finite.
    """
    found = {}
    for name, vectors in {"key": keys, "query": queries, "value": values}.items():
        norm = float(jnp.max(jnp.linalg.norm(vectors.astype(jnp.float32), axis=-1)))
        if not norm < float("inf"):
            raise ValueError(f"the {name} vectors are not all finite: their largest norm is {norm}")
        found[name] = norm
    return Norms(**found)


class SubGenSettings(NamedTuple):
    """Sizes that SubGen's theorem asks for.

    Attributes:
        samples, per_cluster: s and t.
        delta: the clusters' radius that t was computed for.
        vacuous: whether they take no fewer slots than there are tokens, so that an exact cache is smaller.
        message: what was found, for people.
    """

    samples: int
    per_cluster: int
    delta: float
    vacuous: bool
    message: str

    def policy(self, clusters: int, **settings: Any) -> SubGen:
        """`SubGen(variant="paper")` of these sizes, for so many clusters; further settings as there."""
        return SubGen(
            None,
            variant="paper",
            samples=self.samples,
            clusters=clusters,
            per_cluster=self.per_cluster,
            delta=self.delta,
            **settings,
        )


def subgen_settings(
    epsilon: float,
    *,
    tokens: int,
    head_dim: int,
    query_norm: float,
    delta: float,
    clusters: int = 1,
    doubling: bool = True,
    constant_samples: float = 1.0,
    constant_per_cluster: float = 1.0,
) -> SubGenSettings:
    """s and t for |z - Attn| <= epsilon |softmax|_2 |V|_op with high probability, as SubGen's Theorem 1 has them:

        s = c_s d / epsilon^2,    t = c_t e^(2 delta r) log(n) / epsilon^2

    and e^(4 delta r) where the table may double: after j doublings keys lie within (2 - 2^-j) delta_j of their centre.
    Then `delta` must be the value that delta has reached, not the start.

    Args:
        epsilon: the error, in (0, 1).
        tokens: n.
        head_dim: d.
        query_norm: largest norm of a query before the logits' factor 1 / sqrt(d), which is applied here: r is
            query_norm / sqrt(d), since the papers write logits without that factor.
        delta: radius of the clusters, in units of the keys.
        clusters: how many there are expected to be; it decides only what is vacuous.
        doubling: whether the number of clusters is bounded, as it is in `SubGen`.
        constant_samples, constant_per_cluster: c_s and c_t, which the theorem leaves open.

    Raises:
        ValueError: for numbers that cannot be.
    """
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon={epsilon}; it must lie between 0 and 1")
    numbers = {"tokens": tokens, "head_dim": head_dim, "clusters": clusters, "constant_samples": constant_samples}
    for name, number in {**numbers, "constant_per_cluster": constant_per_cluster}.items():
        if number <= 0:
            raise ValueError(f"{name}={number}; it must be positive")
    for name, number in {"query_norm": query_norm, "delta": delta}.items():
        if not number > 0:
            raise ValueError(f"{name}={number}; it must be positive")
    exponent = (4 if doubling else 2) * delta * query_norm / math.sqrt(head_dim)
    samples = math.ceil(constant_samples * head_dim / epsilon**2)
    # Beyond n samples there is nothing left to sample; the exponential need not be computed there.
    log_per_cluster = exponent + math.log(constant_per_cluster * max(math.log(tokens), 1.0) / epsilon**2)
    per_cluster = math.ceil(math.exp(min(log_per_cluster, 40.0)))
    slots = samples + clusters * (1 + per_cluster) / 2
    vacuous = slots >= tokens
    found = (
        f"epsilon={epsilon:g} at n={tokens}, d={head_dim}, |q|={query_norm:g}, delta={delta:g} takes s={samples} "
        f"samples and t={per_cluster:.3g} per cluster (e^{exponent:.3g} of it for the radius), "
        f"{slots:.3g} slots with {clusters} clusters"
    )
    verdict = ": vacuous, an exact cache is smaller" if vacuous else f", {slots / tokens:.1%} of an exact cache"
    return SubGenSettings(samples, per_cluster, delta, vacuous, found + verdict)


class BalanceKVSettings(NamedTuple):
    """What the theorem asks for, in slots; `vacuous` where that is no fewer than the tokens."""

    batch_size: int  # t of MergeAndReduce
    bins: int  # of t / 2 slots each, of one tree
    c: float  # the walk's constant
    slots: int  # of one tree
    vacuous: bool
    message: str


def balancekv_settings(
    epsilon: float,
    *,
    tokens: int,
    head_dim: int,
    key_norm: float,
    query_norm: float,
    value_dim: int | None = None,
    delta: float = 0.1,
) -> BalanceKVSettings:
    """The batch size with which every query's error is at most epsilon |softmax|_2 |V|_F with probability 1 - delta.

    t = L sqrt(D_v) c exp(2 r^2 / sqrt(D)) / epsilon with L = log2(tokens) levels, c = 30 log(tokens D_v L / delta) and
    r = max(key_norm, query_norm), norms being of keys and queries before the scale of attention. A halving of t tokens
    changes the sum of each of D_v coordinates by at most c exp(r^2 / sqrt(D)) |v|; the errors of a level add up to
    tokens / t of that, and the least denominator is tokens exp(-r^2 / sqrt(D)). The error is relative, so that norms
    of values do not enter.

    Raises:
        ValueError: for epsilon or delta out of (0, 1).

    Source: BalanceKV, Theorems 3.2 and 3.3; the constant of the latter is not stated and is worked out here from the
    proof.
    """
    for name, chance in {"epsilon": epsilon, "delta": delta}.items():
        if not 0 < chance < 1:
            raise ValueError(f"{name}={chance}; it must lie between 0 and 1")
    width = value_dim or head_dim
    levels = max(math.ceil(math.log2(tokens)), 1)
    c = walk_constant(tokens * width * levels, delta)
    exponent = 2 * max(key_norm, query_norm) ** 2 / math.sqrt(head_dim)
    batch_size = 2 * math.ceil(levels * math.sqrt(width) * c * math.exp(min(exponent, 600)) / epsilon / 2)
    bins = bins_needed(tokens, batch_size // 2)
    slots = bins * (batch_size // 2)
    vacuous = slots >= tokens
    verdict = (
        "no fewer than the tokens: at these norms the guarantee is vacuous" if vacuous else "fewer than the tokens"
    )
    message = (
        f"epsilon={epsilon:g} at norms {key_norm:g} (keys) and {query_norm:g} (queries) asks for batches of "
        f"{batch_size:.3g} tokens and {slots:.3g} slots for {tokens}, {verdict}"
    )
    return BalanceKVSettings(batch_size, bins, c, slots, vacuous, message)
