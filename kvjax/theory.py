"""Sizes that the papers' theorems require, and the norms of keys, queries and values on which they depend."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.methods.balancekv.balance import walk_constant
from kvjax.methods.balancekv.merge_reduce import bins_needed
from kvjax.methods.subgen.subgen import SubGen
from kvjax.policy import check_above


class Norms(NamedTuple):
    """The largest l2 norms of a stream, before attention's factor 1 / sqrt(D)."""

    key: float
    query: float
    value: float


def measured_norms(
    queries: Float[Array, "... D"], keys: Float[Array, "... D"], values: Float[Array, "... D_v"]
) -> Norms:
    """Returns the largest norms of vectors, for `subgen_settings` and `balancekv_settings`. Call it outside jit.

    Returns:
        The norms.

    Raises:
        ValueError: if vectors are not finite.
    """
    norms = {}
    for name, vectors in {"key": keys, "query": queries, "value": values}.items():
        norm = float(jnp.max(jnp.linalg.norm(vectors.astype(jnp.float32), axis=-1)))
        if not norm < float("inf"):
            raise ValueError(f"the {name} vectors are not all finite: their largest norm is {norm}")
        norms[name] = norm
    return Norms(**norms)


class SubGenSettings(NamedTuple):
    """Sizes that SubGen's theorem requires.

    Attributes:
        samples: s.
        per_cluster: t.
        delta: radius of clusters for which t was computed.
        growth: smallest factor by which delta grows; None if it does not grow.
        vacuous: whether they need at least as many slots as there are tokens, so that a full cache is smaller.
        message: the result as text.
    """

    samples: int
    per_cluster: int
    delta: float
    growth: float | None
    vacuous: bool
    message: str

    def policy(self, clusters: int, **settings: Any) -> SubGen:
        """Returns Algorithm 1 with these sizes.

        Args:
            **settings: other settings of `SubGen`; without them it has none of kvjax's additions to the estimate.

        Returns:
            The policy.
        """
        settings = {"light_values": 0, "self_normalization": 0.0} | settings
        if self.growth is not None:
            settings = {"growth": self.growth} | settings
        return SubGen(
            None,
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
    growth: float | None = 2.0,
    constant_samples: float = 1.0,
    constant_per_cluster: float = 1.0,
) -> SubGenSettings:
    """Returns s and t for |z - Attn| <= epsilon |softmax|_2 |V|_op with high probability.

    s = c_s d / epsilon^2 and t = c_t e^(2 delta r) log(n) / epsilon^2. If delta may grow, each time by at least a
    factor g, keys are within delta g / (g - 1) of their center for the final `delta`, which replaces delta in the
    exponent.

    Args:
        epsilon: the error, between 0 and 1.
        tokens: length of the stream, n.
        head_dim: dimensions of keys, d.
        query_norm: largest norm of a query. The theorem's r is query_norm / sqrt(d), because the paper's logits have no
            factor 1 / sqrt(d).
        delta: radius of clusters, in units of keys.
        clusters: expected number of clusters; affects only `vacuous`.
        growth: g, the `growth` of `SubGen`; None if the number of clusters is not limited, as in the paper.
        constant_samples: c_s, which the theorem leaves open.
        constant_per_cluster: c_t, which the theorem leaves open.

    Returns:
        The sizes.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        SubGen, Theorem 1.
    """
    _check_probability(epsilon=epsilon)
    check_above(0, tokens=tokens, head_dim=head_dim, clusters=clusters, query_norm=query_norm, delta=delta)
    check_above(0, constant_samples=constant_samples, constant_per_cluster=constant_per_cluster)
    check_above(1, growth=growth)
    radius = delta if growth is None else delta * growth / (growth - 1)
    exponent = 2 * radius * query_norm / math.sqrt(head_dim)
    samples = math.ceil(constant_samples * head_dim / epsilon**2)
    # The exponential is limited, because more samples than tokens are useless.
    log_per_cluster = exponent + math.log(constant_per_cluster * max(math.log(tokens), 1.0) / epsilon**2)
    per_cluster = math.ceil(math.exp(min(log_per_cluster, 40.0)))
    slots = samples + clusters * (1 + per_cluster) / 2
    vacuous = slots >= tokens
    sizes = (
        f"epsilon={epsilon:g} at n={tokens}, d={head_dim}, |q|={query_norm:g}, delta={delta:g} needs s={samples} "
        f"samples and t={per_cluster:.3g} per cluster (a factor of e^{exponent:.3g} for the radius), {slots:.3g} slots "
        f"with {clusters} clusters"
    )
    verdict = ": vacuous, a full cache is smaller" if vacuous else f", {slots / tokens:.1%} of a full cache"
    return SubGenSettings(samples, per_cluster, delta, growth, vacuous, sizes + verdict)


class BalanceKVSettings(NamedTuple):
    """Sizes that BalanceKV's theorem requires.

    Attributes:
        batch_size: t of MergeAndReduce.
        bins: bins of one tree, t / 2 slots each.
        c: the walk's constant.
        slots: slots of one tree.
        vacuous: whether they are at least as many as there are tokens.
        message: the result as text.
    """

    batch_size: int
    bins: int
    c: float
    slots: int
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
    c: float | None = None,
) -> BalanceKVSettings:
    """Returns the batch size for an error of at most epsilon |softmax|_2 |V|_F with probability 1 - delta.

    t = L sqrt(D_v) c exp(2 r^2 / sqrt(D)) / epsilon with L = log2(tokens) levels, c = 30 log(tokens D_v L / delta) and
    r = max(key_norm, query_norm). A halving of t tokens changes the sum of each of D_v coordinates by at most
    c exp(r^2 / sqrt(D)) |v|; the errors of a level add up to tokens / t of that, and the smallest denominator is
    tokens exp(-r^2 / sqrt(D)). The error is relative, so that norms of values do not matter.

    Args:
        epsilon: the error, between 0 and 1.
        head_dim: dimensions of keys, D.
        query_norm: largest norm of a query, before the factor 1 / sqrt(D).
        value_dim: dimensions of values, D_v; None for `head_dim`.
        c: the walk's constant; None for the theorem's, which is far above measured ones.

    Returns:
        The sizes.

    Raises:
        ValueError: if epsilon or delta is not between 0 and 1.

    Reference:
        BalanceKV, Theorems 3.2 and 3.3. The paper does not state the constant of the latter; it is derived here from
        the proof.
    """
    _check_probability(epsilon=epsilon, delta=delta)
    width = value_dim or head_dim
    levels = max(math.ceil(math.log2(tokens)), 1)
    c = walk_constant(tokens * width * levels, delta) if c is None else c
    exponent = 2 * max(key_norm, query_norm) ** 2 / math.sqrt(head_dim)
    batch_size = 2 * math.ceil(levels * math.sqrt(width) * c * math.exp(min(exponent, 600)) / epsilon / 2)
    bins = bins_needed(tokens, batch_size // 2)
    slots = bins * (batch_size // 2)
    vacuous = slots >= tokens
    verdict = "no fewer than the tokens: vacuous at these norms" if vacuous else "fewer than the tokens"
    message = (
        f"epsilon={epsilon:g} at norms {key_norm:g} (keys) and {query_norm:g} (queries) needs batches of "
        f"{batch_size:.3g} tokens and {slots:.3g} slots for {tokens}, {verdict}"
    )
    return BalanceKVSettings(batch_size, bins, c, slots, vacuous, message)


def _check_probability(**numbers: float) -> None:
    """Raises a ValueError that names a number outside (0, 1)."""
    for name, number in numbers.items():
        if not 0 < number < 1:
            raise ValueError(f"{name}={number} must be between 0 and 1, exclusive")
