"""Gated MLPs, and mixtures of experts in which every token is processed by a few of many MLPs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax_models.model.quantized import multiply

BLOCK = 128  # maximum number of tokens of one expert in a matrix product


def _silu(gate: Array, up: Array) -> Array:
    return jax.nn.silu(gate) * up


def _gelu(gate: Array, up: Array) -> Array:
    return jax.nn.gelu(gate, approximate=False) * up


def _gelu_tanh(gate: Array, up: Array) -> Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _clipped_swiglu(gate: Array, up: Array) -> Array:
    """Returns the activation of gpt-oss, with the slope and limit of its model card."""
    gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)


def _squared_relu(up: Array) -> Array:
    """Returns the activation of MLPs without gates."""
    return jnp.square(jax.nn.relu(up))


ACTIVATIONS: dict[str, Callable[..., Array]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "clipped_swiglu": _clipped_swiglu,
    "squared_relu": _squared_relu,
}
UNGATED = ("squared_relu",)


class Mlp(nnx.Module):
    """An MLP, down(activation(gate, up)), with one projection for gate and up; some activations have no gate."""

    def __init__(self, width: int, hidden: int, activation: str, bias: bool, linear: Callable[..., Any]):
        """Creates an MLP.

        Args:
            width: size of input and output.
            hidden: hidden size.
            activation: key of `ACTIVATIONS`.
            bias: whether the projections have biases.
            linear: constructor of projections (`quantized.make_linear`).
        """
        self.activation = activation
        self.gate_up = linear(width, (1 if activation in UNGATED else 2, hidden), use_bias=bias)
        self.down = linear(hidden, width, use_bias=bias)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Returns the output of the MLP."""
        gate_up = self.gate_up(x)
        return self.down(ACTIVATIONS[self.activation](*(gate_up[..., i, :] for i in range(gate_up.shape[-2]))))


class ExpertLinear(nnx.Module):
    """One linear projection per expert: kernel [E, in, out], bias [E, out]."""

    def __init__(
        self,
        experts: int,
        inputs: int,
        outputs: int,
        bias: bool,
        *,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        quantized: bool = False,
    ):
        """Creates the projections.

        Args:
            experts: number of experts.
            inputs: size of the input.
            outputs: size of the output.
            bias: whether there are biases.
            dtype: dtype of parameters.
            rngs: random keys of the initial parameters.
            quantized: whether the kernel is int8, with a scale [E, out].
        """
        shape = (experts, inputs, outputs)
        if quantized:
            self.kernel = nnx.Param(jnp.zeros(shape, jnp.int8))
        else:
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape, dtype) * inputs**-0.5)
        self.channel_scale = nnx.Param(jnp.zeros((experts, outputs), dtype)) if quantized else None
        self.bias = nnx.Param(jnp.zeros((experts, outputs), dtype)) if bias else None

    def __call__(self, expert: Int[Array, ""], x: Float[Array, "b in"]) -> Float[Array, "b out"]:
        """Returns the projection of one expert.

        Args:
            expert: number of the expert.
            x: tokens.
        """
        kernel = self.kernel[...][expert]
        y = x @ kernel if self.channel_scale is None else multiply(x, kernel, self.channel_scale[...][expert])
        return y if self.bias is None else y + self.bias[...][expert]


class Experts(nnx.Module):
    """A mixture of experts: a router selects a few per token and weights their outputs.

    Tokens are sorted by expert and multiplied in blocks of a single expert. This costs the work of the selected experts
    plus at most one block of padding per expert, and few tokens read the weights of their experts only. On platforms
    without a kernel for it, `jax.lax.ragged_dot` would multiply every token with every expert.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: str,
        bias: bool,
        *,
        experts: int,
        per_token: int,
        normalize_weights: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
        quantized: bool = False,
    ):
        """Creates router and experts.

        Args:
            width: size of input and output.
            hidden: hidden size of an expert.
            activation: key of `ACTIVATIONS`.
            bias: whether router and experts have biases.
            experts: number of experts.
            per_token: number of experts per token.
            normalize_weights: whether the weights of a token's experts sum to 1; otherwise they are probabilities among
                all experts.
            dtype: dtype of parameters and activations.
            rngs: random keys of the initial parameters.
            quantized: whether the kernels of the experts are int8.
        """

        def linear(inputs: int, outputs: int) -> ExpertLinear:
            return ExpertLinear(experts, inputs, outputs, bias, dtype=dtype, rngs=rngs, quantized=quantized)

        self.activation, self.experts, self.per_token = activation, experts, per_token
        self.normalize_weights = normalize_weights
        self.router = nnx.Linear(width, experts, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.gate = linear(width, hidden)
        self.up = linear(width, hidden)
        self.down = linear(hidden, width)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Returns the weighted sum of the outputs of each token's experts."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, indices = self.route(tokens)
        slots, token_of_slot, expert_of_block = blocks_by_expert(indices, self.experts)
        blocks = jnp.take(tokens, token_of_slot, axis=0, mode="fill", fill_value=0)

        def apply_expert(block_and_expert):
            """Applies an expert to a block of its tokens; `block_and_expert` holds both."""
            block, expert = block_and_expert
            hidden = ACTIVATIONS[self.activation](self.gate(expert, block), self.up(expert, block))
            return self.down(expert, hidden)

        outputs = jax.lax.map(apply_expert, (blocks, expert_of_block)).reshape(-1, x.shape[-1])
        weighted = outputs[slots].astype(jnp.float32) * weights[..., None]
        return jnp.sum(weighted, axis=1).astype(x.dtype).reshape(x.shape)

    def route(self, tokens: Float[Array, "N W"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Selects the experts of each token.

        Args:
            tokens: the tokens.

        Returns:
            The weights (float32) and the indices of the k selected experts per token.
        """
        # Logits stay in float32: rounding could make two experts equal and select another one.
        logits = jnp.dot(tokens, self.router.kernel[...], preferred_element_type=jnp.float32)
        if self.router.bias is not None:
            logits = logits + self.router.bias[...].astype(jnp.float32)
        top_logits, indices = jax.lax.top_k(logits, self.per_token)
        if self.normalize_weights:  # the softmax among the selected experts
            return jax.nn.softmax(top_logits, axis=-1), indices
        return jnp.exp(top_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), indices


def blocks_by_expert(
    indices: Int[Array, "N k"], experts: int
) -> tuple[Int[Array, "N k"], Int[Array, "blocks b"], Int[Array, "blocks"]]:
    """Groups tokens into blocks of one expert each.

    Args:
        indices: experts of every token.
        experts: number of experts.

    Returns:
        The slot of every token and expert among all blocks' slots, the token of every slot (N for empty slots), and the
        expert of every block.
    """
    num_tokens, per_token = indices.shape
    entries = num_tokens * per_token
    size = 1
    while size < BLOCK and size * experts < entries:
        size *= 2
    blocks = entries if size == 1 else entries // size + min(experts, entries)
    expert = indices.reshape(-1)
    counts = jnp.bincount(expert, length=experts)
    block_counts = -(-counts // size)
    block_ends = jnp.cumsum(block_counts)
    order = jnp.argsort(expert, stable=True)
    rank = jnp.arange(entries) - (jnp.cumsum(counts) - counts)[expert[order]]  # within the entries of one expert
    sorted_slots = (block_ends - block_counts)[expert[order]] * size + rank
    slots = jnp.zeros(entries, jnp.int32).at[order].set(sorted_slots.astype(jnp.int32))
    token_of_entry = jnp.arange(entries, dtype=jnp.int32) // per_token
    token_of_slot = jnp.full(blocks * size, num_tokens, jnp.int32).at[slots].set(token_of_entry)
    expert_of_block = jnp.minimum(jnp.searchsorted(block_ends, jnp.arange(blocks), side="right"), experts - 1)
    return slots.reshape(indices.shape), token_of_slot.reshape(blocks, size), expert_of_block
