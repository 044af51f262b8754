"""Tokens with small values, kept exactly in the selected slots of a window.

Tokens that receive much attention can have small values: attention sinks (Xiao et al. 2023) do, also in the middle of a
text. Samples in proportion to the values' norms rarely contain such a token, although it decides the denominator of
attention. A token that gives way to a lighter one goes to the policy's other structures, so that every token is in
exactly one place.

Reference:
    T. Guo et al., Active-Dormant Attention Heads (arXiv 2410.13835): value-state drains. Z. Guo et al., Value Also
    Matters (arXiv 2406.12335): value norms of attention sinks.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.shared import window as windows
from kvjax.shared.per_head import per_head, replace_lowest
from kvjax.shared.window import Window
from kvjax.spec import CacheSpec


def num_light_slots(light_values: int, slots: int) -> int:
    """Returns the slots for light tokens: `light_values`, but at most a quarter of the slots that can hold them.

    Args:
        light_values: the policy's setting.
        slots: slots per KV head for tokens other than sinks and recent ones.

    Returns:
        The number of slots.
    """
    return min(light_values, max(slots, 0) // 4)


def init_light_norms(spec: CacheSpec, slots: int) -> Float[Array, "B H_kv M"]:
    """Returns the norms of empty slots.

    Args:
        slots: slots for light tokens, M.

    Returns:
        inf everywhere, float32.
    """
    return jnp.full((spec.batch, spec.kv_heads, slots), jnp.inf)


def keep_lightest(
    window: Window,
    norms: Float[Array, "B H_kv M"],
    keys: Float[Array, "B H_kv T D"],
    values: Float[Array, "B H_kv T D_v"],
    valid: Bool[Array, "B T"],
) -> tuple[
    Window, Float[Array, "B H_kv M"], Float[Array, "B H_kv T D"], Float[Array, "B H_kv T D_v"], Bool[Array, "B H_kv T"]
]:
    """Keeps the M tokens with the smallest value norms, of those in the window's selected slots and T others.

    Args:
        window: the window; its selected slots hold light tokens.
        norms: value norms of the light tokens; inf in empty slots.
        valid: tokens that count.

    Returns:
        The window and its norms; keys, values and mask of the tokens that are not kept. A token that gives way has the
        position of the token that replaced it.
    """
    valid = jnp.broadcast_to(valid[:, None], keys.shape[:3])
    if not norms.shape[2]:
        return window, norms, keys, values, valid
    norm = jnp.sqrt(jnp.sum(jnp.square(values.astype(jnp.float32)), axis=-1))
    norm = jnp.where(valid & jnp.isfinite(norm), norm, jnp.inf)
    slot, source, kept = per_head(replace_lowest)(-norms, -norm)
    displaced = jnp.minimum(slot, norms.shape[2] - 1)
    arriving = jnp.where(slot < norms.shape[2], source, keys.shape[2])  # T for a token that is not kept

    def put(tokens: Float[Array, "T *D"], index: Int[Array, "p"], old: Float[Array, "p *D"]) -> Float[Array, "T *D"]:
        return tokens.at[index].set(old.astype(tokens.dtype), mode="drop")

    def leave(tokens: Float[Array, "B H T D"], slots: Float[Array, "B H S D"]) -> Float[Array, "B H T D"]:
        """Puts the tokens of `slots` that give way in the positions of the tokens that replace them."""
        old = jnp.take_along_axis(slots, (window.fixed + displaced)[..., None], axis=2)
        return per_head(put)(tokens, arriving, old)

    was_occupied = jnp.isfinite(jnp.take_along_axis(norms, displaced, axis=2))
    written = windows.write_selected(window, slot, keys, values, source)
    remaining = leave(keys, window.keys), leave(values, window.values), per_head(put)(valid, arriving, was_occupied)
    return written, -kept, *remaining
