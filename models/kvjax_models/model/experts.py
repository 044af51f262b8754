"""The layer between two attentions: one gated MLP, or many of them (experts), of which every token takes a few."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

BLOCK = 128  # tokens of one expert that are multiplied at a time, at most


def _clipped_swiglu(gate: Array, up: Array) -> Array:
    """Of gpt-oss; its model card gives the slope and the limit."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


# What is made of both halves of an MLP's inside.
ACTIVATIONS = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clipped_swiglu": _clipped_swiglu,
}


class Mlp(nnx.Module):
    """down(activation(gate, up)), of which one product of x makes both."""

    def __init__(
        self, width: int, inside: int, activation: str, bias: bool, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ):
        given: Mapping[str, Any] = {"use_bias": bias, "dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        self.activation = activation
        self.gate_up = nnx.LinearGeneral(width, (2, inside), **given)
        self.down = nnx.Linear(inside, width, **given)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        made = self.gate_up(x)
        return self.down(ACTIVATIONS[self.activation](made[..., 0, :], made[..., 1, :]))


class ExpertLinear(nnx.Module):
    """One product per expert: kernel [E, in, out], bias [E, out]."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, bias: bool, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs
    ):
        shape = (experts, inputs, outputs)
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * inputs**-0.5)
        self.bias = nnx.Param(jnp.zeros((experts, outputs), dtype)) if bias else None

    def of(self, expert: Int[Array, ""], x: Float[Array, "b in"]) -> Float[Array, "b out"]:
        y = x @ self.kernel[...][expert]
        return y if self.bias is None else y + self.bias[...][expert]


class Experts(nnx.Module):
    """A router's choice of a few experts per token, and the sum of what they make of it, by the router's weights.

    Tokens are sorted by expert and multiplied in blocks of one expert each, so the work is that of the chosen experts
    (and at most one block of padding for each), and a step of few tokens reads the weights of the chosen ones alone.
    `jax.lax.ragged_dot` would say the same shorter, but multiplies every token with every expert where no kernel for it
    is at hand.

    Args:
        per_token: experts that a token takes.
        normalised: whether the weights of these sum to 1; else they are probabilities among all experts.
    """

    def __init__(
        self,
        width: int,
        inside: int,
        activation: str,
        bias: bool,
        *,
        experts: int,
        per_token: int,
        normalised: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        def linear(inputs: int, outputs: int) -> ExpertLinear:
            return ExpertLinear(experts, inputs, outputs, bias, dtype=dtype, rngs=rngs)

        self.activation, self.experts, self.per_token, self.normalised = activation, experts, per_token, normalised
        self.router = nnx.Linear(width, experts, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate = linear(width, inside)
        self.up = linear(width, inside)
        self.down = linear(inside, width)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        rows = x.reshape(-1, x.shape[-1])
        weight, chosen = self.route(rows)
        place, source, block_expert = blocks_by_expert(chosen, self.experts)
        blocks = jnp.take(rows, source, axis=0, mode="fill", fill_value=0)

        def of_block(given):
            block, expert = given
            inside = ACTIVATIONS[self.activation](self.gate.of(expert, block), self.up.of(expert, block))
            return self.down.of(expert, inside)

        made = jax.lax.map(of_block, (blocks, block_expert)).reshape(-1, x.shape[-1])
        taken = made[place].astype(jnp.float32) * weight[..., None]
        return jnp.sum(taken, axis=1).astype(x.dtype).reshape(x.shape)

    def route(self, rows: Float[Array, "N W"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Weights, float32, and numbers of the experts that every token takes."""
        # Summed and kept in float32: rounded logits of two experts may be equal, and then another one is taken.
        logits = jnp.dot(rows, self.router.kernel[...], preferred_element_type=jnp.float32)
        if self.router.bias is not None:
            logits = logits + self.router.bias[...].astype(jnp.float32)
        best, chosen = jax.lax.top_k(logits, self.per_token)
        if self.normalised:  # a softmax among the chosen is the one among all, made to sum to 1
            return jax.nn.softmax(best, axis=-1), chosen
        return jnp.exp(best - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), chosen


def blocks_by_expert(
    chosen: Int[Array, "N k"], experts: int
) -> tuple[Int[Array, "N k"], Int[Array, "blocks b"], Int[Array, "blocks"]]:
    """Blocks of tokens that take the same expert.

    Returns:
        The slot, among all of the blocks', of every token's every choice; the token of every slot, N where it is empty;
        and every block's expert.
    """
    rows, per_token = chosen.shape
    entries = rows * per_token
    size = 1
    while size < BLOCK and size * experts < entries:
        size *= 2
    blocks = entries if size == 1 else entries // size + min(experts, entries)
    expert = chosen.reshape(-1)
    counts = jnp.bincount(expert, length=experts)
    needed = -(-counts // size)  # blocks of every expert
    last = jnp.cumsum(needed)
    order = jnp.argsort(expert, stable=True)
    within = jnp.arange(entries) - (jnp.cumsum(counts) - counts)[expert[order]]  # the how-many-th of its expert
    slot = (
        jnp.zeros(entries, jnp.int32).at[order].set(((last - needed)[expert[order]] * size + within).astype(jnp.int32))
    )
    source = jnp.full(blocks * size, rows, jnp.int32).at[slot].set(jnp.arange(entries, dtype=jnp.int32) // per_token)
    block_expert = jnp.minimum(jnp.searchsorted(last, jnp.arange(blocks), side="right"), experts - 1)
    return slot.reshape(chosen.shape), source.reshape(blocks, size), block_expert
