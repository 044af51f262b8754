"""Fits the kept entries of one KV head to the attention of reference queries (Attention Matching)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.methods.attention_matching.least_squares import bounded_weights, ridge_solve

_LEARNING_RATE = 3e-3  # of refinement, relative to the root mean square of keys and of values
_MASKED_LOGIT = -1e30


class References(NamedTuple):
    """Reference queries, and their attention to the entire prompt.

    Attributes:
        queries: queries of all heads of a group.
        valid: which of them exist.
        log_mass: logarithm of the softmax denominator, attention sinks included.
        sink_logits: logits of the model's attention sinks; -inf without.
        outputs: attention outputs.
        score: mean square of the attention probabilities of every token.
    """

    queries: Float[Array, "*B R D"]
    valid: Bool[Array, "*B R"]
    log_mass: Float[Array, "*B R"]
    sink_logits: Float[Array, "*B R"]
    outputs: Float[Array, "*B R D_v"]
    score: Float[Array, "*B T"]


class Slots(NamedTuple):
    """Kept entries.

    Attributes:
        keys: keys, float32.
        values: values, float32.
        log_weights: log-weights, float32.
        used: which slots hold an entry.
        fitted: which entries may change; sinks and recent tokens may not.
    """

    keys: Float[Array, "*B S D"]
    values: Float[Array, "*B S D_v"]
    log_weights: Float[Array, "*B S"]
    used: Bool[Array, "*B S"]
    fitted: Bool[Array, "*B S"]


def capped_logits(
    queries: Float[Array, "*B R D"], keys: Float[Array, "*B S D"], logit_cap: float | None
) -> Float[Array, "*B R S"]:
    """Returns the logits of all pairs."""
    logits = queries @ jnp.swapaxes(keys, -1, -2) / math.sqrt(queries.shape[-1])
    return logits if logit_cap is None else logit_cap * jnp.tanh(logits / logit_cap)


def attention_shares(
    queries: Float[Array, "R D"],
    valid: Bool[Array, "R"],
    log_mass: Float[Array, "R"],
    keys: Float[Array, "S D"],
    used: Bool[Array, "S"],
    logit_cap: float | None,
) -> Float[Array, "R S"]:
    """Returns the shares that keys have in the denominators of the full cache.

    Args:
        valid: queries that exist.
        log_mass: logarithms of the denominators.
        used: keys that exist.

    Returns:
        The shares; 0 for missing queries and keys.
    """
    # Rounding of large logits may exceed log_mass.
    logits = jnp.minimum(capped_logits(queries, keys, logit_cap) - log_mass[:, None], 0.0)
    return jnp.exp(jnp.where(valid[:, None] & used, logits, -jnp.inf))


def fit_log_weights(
    references: References,
    slots: Slots,
    bounds: tuple[float, float],
    iterations: int,
    ridge: float,
    dtype: Any,
    logit_cap: float | None = None,
) -> Slots:
    """Fits log-weights of one head, so that the kept keys have the denominators of all keys.

    Errors are relative to a query's denominator.

    Args:
        slots: kept entries of the head, without log-weights.
        bounds: smallest and largest weight.
        iterations: projected gradient steps.
        dtype: dtype to which log-weights are rounded.

    Returns:
        The slots with log-weights.
    """
    share = attention_shares(*references[:3], slots.keys, slots.used, logit_cap)
    sink_share = jnp.exp(references.sink_logits - references.log_mass)
    target = jnp.where(references.valid, 1 - sink_share, 0) - jnp.sum(jnp.where(slots.fitted, 0, share), axis=1)
    weights = bounded_weights(jnp.where(slots.fitted, share, 0), target, bounds, iterations, ridge)
    log_weights = jnp.where(slots.fitted, jnp.log(weights), 0)
    return slots._replace(log_weights=log_weights.astype(dtype).astype(jnp.float32))


def fit_values(references: References, slots: Slots, ridge: float, logit_cap: float | None = None) -> Slots:
    """Fits values of one head to the attention outputs of the references.

    Args:
        slots: kept entries with log-weights.
        ridge: penalty of changes of the values; see `ridge_solve`.

    Returns:
        The slots with values.
    """
    probability, _ = _read_slots(references, slots, logit_cap)
    gap = jnp.where(references.valid[:, None], references.outputs, 0) - probability @ slots.values
    change = ridge_solve(jnp.where(slots.fitted, probability, 0), gap, ridge)
    return slots._replace(values=slots.values + jnp.where(slots.fitted[:, None], change, 0))


def _read_slots(
    references: References, slots: Slots, logit_cap: float | None
) -> tuple[Float[Array, "R S"], Float[Array, "R"]]:
    """Returns the probabilities of kept entries, and the logarithms of the denominators relative to the full cache."""
    logits = capped_logits(references.queries, slots.keys, logit_cap) + slots.log_weights
    logits = jnp.where(slots.used, logits, _MASKED_LOGIT)
    log_mass = jnp.logaddexp(jax.nn.logsumexp(logits, axis=1), references.sink_logits)
    log_ratio = jnp.where(references.valid, log_mass - references.log_mass, 0.0)
    return jnp.where(references.valid[:, None] & slots.used, jnp.exp(logits - log_mass[:, None]), 0.0), log_ratio


def matching_loss(references: References, slots: Slots, logit_cap: float | None = None) -> Float[Array, ""]:
    """Returns the loss that refinement lowers.

    Args:
        slots: kept entries of the head.

    Returns:
        The mean squared error of attention outputs, relative to their mean square, plus the mean squared error of the
        logarithms of the denominators.
    """
    probability, log_ratio = _read_slots(references, slots, logit_cap)
    valid = references.valid[:, None]
    outputs = jnp.where(valid, references.outputs, 0)
    error = jnp.sum(jnp.square(jnp.where(valid, probability @ slots.values - outputs, 0)))
    count = jnp.maximum(jnp.sum(valid), 1)
    return error / jnp.maximum(jnp.sum(jnp.square(outputs)), 1e-20) + jnp.sum(jnp.square(log_ratio)) / count


def refine(
    references: References, slots: Slots, steps: int, bounds: tuple[float, float], logit_cap: float | None = None
) -> Slots:
    """Refines the fitted keys, log-weights and values of one head with Adam.

    Args:
        slots: kept entries, fitted in closed form.
        bounds: smallest and largest weight.

    Returns:
        The refined slots; the original ones if their loss is lower.

    Raises:
        ImportError: if optax is not installed.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"refine_steps={steps} needs optax; install it with `pip install optax`") from error
    scales = [jnp.sqrt(jnp.mean(jnp.square(x)) + 1e-20) for x in (slots.keys, slots.values)]
    low, high = math.log(bounds[0]), math.log(bounds[1])

    def moved(change: tuple[Array, Array, Array]) -> Slots:
        """Adds a change, in units of the root mean squares, to the fitted entries."""
        keys, values, log_weights = (jnp.where(slots.fitted.reshape(-1, *(1,) * (x.ndim - 1)), x, 0) for x in change)
        return slots._replace(
            keys=slots.keys + scales[0] * keys,
            values=slots.values + scales[1] * values,
            log_weights=jnp.where(slots.fitted, jnp.clip(slots.log_weights + log_weights, low, high), 0),
        )

    def loss(change: tuple[Array, Array, Array]) -> Float[Array, ""]:
        return matching_loss(references, moved(change), logit_cap)

    optimizer = optax.adam(optax.cosine_decay_schedule(_LEARNING_RATE, steps))
    start = (jnp.zeros_like(slots.keys), jnp.zeros_like(slots.values), jnp.zeros_like(slots.log_weights))

    def update(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        """Takes one step."""
        change, state = carry
        updates, state = optimizer.update(jax.grad(loss)(change), state)
        return (optax.apply_updates(change, updates), state), None

    (change, _), _ = jax.lax.scan(update, (start, optimizer.init(start)), None, length=steps)
    better = loss(change) < loss(start)
    return jax.tree.map(lambda new, old: jnp.where(better, new, old), moved(change), slots)
