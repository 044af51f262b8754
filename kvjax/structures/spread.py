"""How far clusters are to be spread about their mean, so that keys and values vary together as they do over the
tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from kvjax.state import state
from kvjax.structures.cluster_table import ClusterTable

# Dimensions to which keys and values are projected to estimate how they vary together.
SKETCH = 16

_TINY = float(np.finfo(np.float32).tiny)


@state
class Moments:
    """Of one stream's tokens and clusters, what tells how far the clusters are to be spread.

    Clusters lose what varies inside them: with keys and values that follow a common law, a mean key and a mean value
    tell of C_b = Cov(mean value, mean key) where the tokens have C = Cov(value, key), and to first order attention is
    the mean value plus C q. Scaling both means' deviations by sqrt(1 + lambda) with C - C_b ~ lambda C_b repairs it.
    """

    # float32 mean over the tokens of (A value)(B key)^T with fixed random A, B
    moment: Float[Array, "f f"]
    mean_key: Float[Array, "D"]  # float32, of all tokens in clusters
    mean_value: Float[Array, "D_v"]  # float32
    scale: Float[Array, ""]  # float32 sqrt(1 + lambda), at least 1


def init_moments(key_dim: int, value_dim: int) -> Moments:
    """Those of no token."""
    width = min(SKETCH, key_dim, value_dim)
    return Moments(jnp.zeros((width, width)), jnp.zeros(key_dim), jnp.zeros(value_dim), jnp.ones(()))


def update_moments(
    moments: Moments,
    before: ClusterTable,
    table: ClusterTable,
    keys: Float[Array, "T D"],
    values: Float[Array, "T D_v"],
    valid: Bool[Array, "T"],
) -> Moments:
    """The moments after an update that took the table from `before` to `table`."""
    assert table.mean_value is not None
    width, key_dim, value_dim = moments.moment.shape[0], keys.shape[1], values.shape[1]
    # Any fixed matrices will do: they only meet keys and values that know nothing of them.
    random = np.random.default_rng(0)
    of_values = random.normal(size=(value_dim, width)).astype(np.float32)
    of_keys = random.normal(size=(key_dim, width)).astype(np.float32)
    total = jnp.maximum(jnp.sum(table.count), 1).astype(jnp.float32)
    dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    project = lambda x, onto, weight: dot(jnp.where(weight[:, None] > 0, x.astype(jnp.float32), 0.0), onto)  # noqa: E731
    fresh = dot(project(values, of_values, valid).T, project(keys, of_keys, valid))
    moment = (moments.moment * jnp.sum(before.count) + fresh) / total

    share = table.count / total
    mean_key, mean_value = dot(share, table.centers), dot(share, table.mean_value)
    means = jnp.outer(dot(mean_value, of_values), dot(mean_key, of_keys))
    weighted = project(table.mean_value, of_values, share) * share[:, None]
    among = dot(weighted.T, project(table.centers, of_keys, share))
    between, within = among - means, moment - among
    # What follows is the same for both times any number, and its fourth powers would pass float32.
    largest = jnp.maximum(jnp.maximum(jnp.max(jnp.abs(between)), jnp.max(jnp.abs(within))), _TINY)
    between, within = between / largest, within / largest
    # lambda is the regression of what varies inside the clusters on what varies between them, taken as seriously as
    # they agree (by the square of their cosine): without a common law it is noise.
    along, squared = jnp.sum(within * between), jnp.sum(between * between)
    agreement = along**2 / jnp.maximum(squared * jnp.sum(within * within), _TINY)
    excess = jnp.maximum(along / jnp.maximum(squared, _TINY), 0.0) * agreement
    updated = Moments(moment, mean_key, mean_value, jnp.sqrt(1 + excess))
    return jax.tree.map(lambda new, old: jnp.where(jnp.any(valid), new, old), updated, moments)
