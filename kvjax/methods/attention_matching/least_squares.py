"""Least squares on attention weights of one KV head: ridge regression, bounded weights and matching pursuit.

The matrices hold attention weights of R reference queries (rows) to keys (columns), at most 1 per row.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MIN_PENALTY = 1e-20  # of a matrix of zeros, so that its factor exists
_POWER_STEPS = 4
_COLUMNS_PER_STEP = 4  # of matching pursuit


def ridge_solve(matrix: Float[Array, "R S"], target: Float[Array, "R D"], ridge: float) -> Float[Array, "S D"]:
    """Minimizes |matrix z - target|^2 + ridge |matrix|^2 |z|^2 (Frobenius norms).

    The smaller one of both Gram matrices is factored. Columns of zeros get solutions of zero.

    Args:
        target: right-hand sides.
        ridge: penalty relative to the matrix; about 1e-6 is the least for which float32 suffices.

    Returns:
        The solution z.
    """
    rows, columns = matrix.shape
    penalty = _penalty(matrix, ridge)
    gram = matrix @ matrix.T if rows < columns else matrix.T @ matrix
    factor = jax.scipy.linalg.cho_factor(gram + penalty * jnp.eye(gram.shape[0]), lower=True)
    if rows < columns:
        return matrix.T @ jax.scipy.linalg.cho_solve(factor, target)
    return jax.scipy.linalg.cho_solve(factor, matrix.T @ target)


def _penalty(matrix: Float[Array, "R S"], ridge: float) -> Float[Array, ""]:
    return jnp.maximum(ridge * jnp.sum(jnp.square(matrix)), _MIN_PENALTY)


def bounded_weights(
    matrix: Float[Array, "R S"], target: Float[Array, "R"], bounds: tuple[float, float], iterations: int, ridge: float
) -> Float[Array, "S"]:
    """Fits one weight per column: |matrix w - target|^2 is minimized within bounds by projected gradient steps.

    The first weights are the ridge solution nearest to 1, clipped. The step size is the inverse of the largest
    eigenvalue of the Gram matrix, from a power iteration.

    Args:
        matrix: attention weights of the queries to the columns' keys.
        target: sums that the weighted columns should have.
        bounds: smallest and largest weight.
        iterations: projected gradient steps.
        ridge: penalty of the first weights, as in `ridge_solve`.

    Returns:
        The weights. Columns of zeros get weight 1.
    """
    residual = target - jnp.sum(matrix, axis=1)
    weights = jnp.clip(1 + ridge_solve(matrix, residual[:, None], ridge)[:, 0], *bounds)
    vector = jnp.ones(matrix.shape[1])
    for _ in range(_POWER_STEPS):
        vector = matrix.T @ (matrix @ vector)
        vector = vector / jnp.maximum(jnp.linalg.norm(vector), _MIN_PENALTY)
    step = 1 / jnp.maximum(jnp.sum(jnp.square(matrix @ vector)), _MIN_PENALTY)
    for _ in range(iterations):
        weights = jnp.clip(weights - step * (matrix.T @ (matrix @ weights - target)), *bounds)
    return weights


def matching_pursuit(
    matrix: Float[Array, "R T"],
    target: Float[Array, "R"],
    candidates: Bool[Array, "T"],
    count: int,
    bounds: tuple[float, float],
    ridge: float,
) -> Float[Array, "T"]:
    """Ranks columns by orthogonal matching pursuit: their weighted sum should be the target.

    Every step chooses the columns with the largest product with the residual and fits the weights of all chosen
    columns anew. The Cholesky factor of their Gram matrix grows with every step.

    Args:
        matrix: attention weights of the queries to all keys.
        target: sums that the weighted columns should have.
        candidates: columns that may be chosen.
        count: columns to choose.
        bounds: smallest and largest weight. A column whose last weight is at the lower bound is dropped.
        ridge: penalty of the weights' distance from 1, relative to the squared norm of the matrix.

    Returns:
        Scores: above 1 for chosen columns in the order of their choice; at most 1 for others, by their product with
        the last residual; -2 for dropped ones.
    """
    rows, tokens = matrix.shape
    width = min(_COLUMNS_PER_STEP, tokens)
    steps = -(-min(count, tokens) // width)
    size = steps * width
    penalty, zero = _penalty(matrix, ridge), jnp.int32(0)

    def choose(step: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds `width` columns to the chosen ones, and fits all weights."""
        index, chosen, factor, weights, residual, free = carry
        _, new = jax.lax.top_k(jnp.where(free, matrix.T @ residual, -jnp.inf), width)
        columns = matrix[:, new]
        cross = jax.scipy.linalg.solve_triangular(factor, chosen.T @ columns, lower=True)
        corner = columns.T @ columns + penalty * jnp.eye(width) - cross.T @ cross
        first = step * width
        factor = jax.lax.dynamic_update_slice(factor, cross.T, (first, zero))
        factor = jax.lax.dynamic_update_slice(factor, jnp.linalg.cholesky(corner), (first, first))
        chosen = jax.lax.dynamic_update_slice(chosen, columns, (zero, first))
        index = jax.lax.dynamic_update_slice(index, new, (first,))
        gap = chosen.T @ (target - jnp.sum(chosen, axis=1))
        weights = jnp.clip(1 + jax.scipy.linalg.cho_solve((factor, True), gap), *bounds)
        return index, chosen, factor, weights, target - chosen @ weights, free.at[new].set(False)

    start = (
        jnp.zeros(size, jnp.int32),
        jnp.zeros((rows, size), matrix.dtype),
        jnp.eye(size, dtype=matrix.dtype),
        jnp.ones(size, matrix.dtype),
        target,
        candidates,
    )
    index, _, _, weights, residual, _ = jax.lax.fori_loop(0, steps, choose, start)
    product = matrix.T @ residual
    score = product / jnp.maximum(jnp.max(jnp.abs(product)), _MIN_PENALTY)
    order = jnp.where(weights > bounds[0], 2.0 + size - jnp.arange(size), -2.0)
    return score.at[index].set(order)
