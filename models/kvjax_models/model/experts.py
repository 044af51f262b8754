"""Gated MLPs, and mixtures of experts in which every token is processed by a few of many MLPs."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax_models.model.activations import ACTIVATIONS, UNGATED
from kvjax_models.model.config import ExpertConfig, LlamaConfig
from kvjax_models.model.parameters import Initializer
from kvjax_models.model.quantized import dot_general, multiply

BLOCK = 128  # maximum number of tokens of one expert in a matrix product


class Mlp(nnx.Module):
    """An MLP, down(activation(gate, up)), with one projection for gate and up; some activations have no gate."""

    def __init__(self, width: int, hidden: int, activation: str, use_bias: bool, init: Initializer):
        """Creates an MLP.

        Args:
            width: size of input and output.
            use_bias: whether the projections have biases.
        """
        self.activation = activation
        self.gate_up = init.linear(width, (1 if activation in UNGATED else 2, hidden), use_bias=use_bias)
        self.down = init.linear(hidden, width, use_bias=use_bias)

    def __call__(self, x: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Returns the output of the MLP."""
        gate_up = self.gate_up(x)
        return self.down(ACTIVATIONS[self.activation](*(gate_up[..., i, :] for i in range(gate_up.shape[-2]))))


class ExpertLinear(nnx.Module):
    """One linear projection per expert: kernel [E, in, out], bias [E, out]."""

    def __init__(self, experts: int, inputs: int, outputs: int, use_bias: bool, init: Initializer):
        """Creates the projections; an int8 kernel has a scale [E, out]."""
        shape = (experts, inputs, outputs)
        self.kernel = nnx.Param(jnp.zeros(shape, jnp.int8)) if init.quantized else init.normal(shape, inputs**-0.5)
        self.channel_scale = init.zeros(experts, outputs) if init.quantized else None
        self.bias = init.zeros(experts, outputs) if use_bias else None

    def __call__(self, expert: Int[Array, ""], x: Float[Array, "b in"]) -> Float[Array, "b out"]:
        """Returns the projection of one expert.

        Args:
            x: tokens.
        """
        kernel = self.kernel[...][expert]
        if self.channel_scale is None:
            y = dot_general(x, kernel, (((1,), (0,)), ((), ())))
        else:
            y = multiply(x, kernel, self.channel_scale[...][expert])
        return y if self.bias is None else y + self.bias[...][expert]


class Router(nnx.Module):
    """Selects the experts of each token and computes their weights.

    With `scoring_func="softmax"`, a token selects the experts of its largest logits. With "sigmoid", the scores are the
    sigmoids of the logits. A bias per expert is added to the scores for the selection only, and only the groups of
    experts take part whose two best experts have the largest sums.

    Reference:
        DeepSeek-V3 Technical Report, section 2.1.2.
    """

    def __init__(self, width: int, experts: ExpertConfig, use_bias: bool, init: Initializer):
        """Creates a router, which is never quantized.

        Args:
            width: size of the input.
            experts: number of experts and settings of the selection.
            use_bias: whether logits have a bias.
        """
        self.settings = experts
        self.kernel = init.normal((width, experts.number), width**-0.5)
        self.bias = init.zeros(experts.number) if use_bias else None
        uses_sigmoid = experts.scoring_func == "sigmoid"
        self.selection_bias = nnx.Param(jnp.zeros(experts.number, jnp.float32)) if uses_sigmoid else None
        self.expert_scale = init.ones(experts.number) if experts.parallel else None

    def __call__(self, tokens: Float[Array, "N W"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        """Returns the weights (float32) and the indices of the k selected experts of each token."""
        # Logits stay in float32: rounding could make two experts equal and select another one.
        logits = dot_general(tokens, self.kernel[...], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        if self.bias is not None:
            logits = logits + self.bias[...].astype(jnp.float32)
        if self.selection_bias is None:
            weights, indices = self._select_by_softmax(logits)
        else:
            weights, indices = self._select_by_sigmoid(logits, self.selection_bias[...])
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[...].astype(jnp.float32)[indices]
        return weights * self.settings.scaling_factor, indices

    def _select_by_softmax(self, logits: Float[Array, "N E"]) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        top_logits, indices = jax.lax.top_k(logits, self.settings.per_token)
        if self.settings.normalize_weights:  # the softmax among the selected experts
            return jax.nn.softmax(top_logits, axis=-1), indices
        return jnp.exp(top_logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)), indices

    def _select_by_sigmoid(
        self, logits: Float[Array, "N E"], bias: Float[Array, "E"]
    ) -> tuple[Float[Array, "N k"], Int[Array, "N k"]]:
        scores, groups = jax.nn.sigmoid(logits), self.settings.groups
        biased = scores + bias
        if groups > 1:
            grouped = biased.reshape(len(biased), groups, -1)
            group_scores = jax.lax.top_k(grouped, 2)[0].sum(-1)
            best_groups = jax.lax.top_k(group_scores, self.settings.groups_per_token)[1]
            is_best = (best_groups[..., None] == jnp.arange(groups)).any(1)
            biased = jnp.where(is_best[..., None], grouped, -jnp.inf).reshape(biased.shape)
        indices = jax.lax.top_k(biased, self.settings.per_token)[1]
        weights = jnp.take_along_axis(scores, indices, axis=-1)
        if self.settings.normalize_weights:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return weights, indices


class Experts(nnx.Module):
    """A mixture of experts: a router selects a few per token and weights their outputs.

    Tokens are sorted by expert and multiplied in blocks of a single expert. This costs the work of the selected experts
    plus at most one block of padding per expert, and few tokens read the weights of their experts only. On platforms
    without a kernel for it, `jax.lax.ragged_dot` would multiply every token with every expert. Every token also passes
    the shared expert, if there is one, whose output may be scaled by a gate, the sigmoid of a projection to one number.
    """

    def __init__(self, config: LlamaConfig, init: Initializer):
        """Creates router and experts.

        Args:
            config: configuration of the model.
        """
        assert config.experts is not None
        experts, width, use_bias = config.experts, config.width, config.mlp_bias
        self.experts, self.activation = experts.number, config.activation
        self.router = Router(width, experts, use_bias, init)
        self.gate = ExpertLinear(experts.number, width, experts.width, use_bias, init)
        self.up = ExpertLinear(experts.number, width, experts.width, use_bias, init)
        self.down = ExpertLinear(experts.number, experts.width, width, use_bias, init)
        has_shared = experts.shared_width > 0
        self.shared = Mlp(width, experts.shared_width, config.activation, use_bias, init) if has_shared else None
        self.shared_gate = init.float_linear(width, 1, use_bias=False) if experts.shared_gate else None

    def __call__(
        self, x: Float[Array, "B T W"], router_input: Float[Array, "B T W"] | None = None
    ) -> Float[Array, "B T W"]:
        """Returns the weighted sum of the outputs of each token's experts, plus that of the shared expert.

        Args:
            x: input of the experts.
            router_input: input of the router; None: `x`.
        """
        tokens = x.reshape(-1, x.shape[-1])
        weights, indices = self.router(tokens if router_input is None else router_input.reshape(tokens.shape))
        output = self.apply_selected(tokens, weights, indices).reshape(x.shape)
        if self.shared is None:
            return output
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(self.shared_gate(x))
        return output + shared

    def apply_selected(
        self, tokens: Float[Array, "N W"], weights: Float[Array, "N k"], indices: Int[Array, "N k"]
    ) -> Float[Array, "N W"]:
        """Returns the weighted sum of the outputs of each token's experts.

        Args:
            tokens: input of the experts.
            weights: weights of each token's experts.
            indices: indices of each token's experts.
        """
        slots, token_of_slot, expert_of_block = blocks_by_expert(indices, self.experts)
        blocks = jnp.take(tokens, token_of_slot, axis=0, mode="fill", fill_value=0)

        def apply_expert(block_and_expert):
            """Applies an expert to a block of its tokens; `block_and_expert` holds both."""
            block, expert = block_and_expert
            hidden = ACTIVATIONS[self.activation](self.gate(expert, block), self.up(expert, block))
            return self.down(expert, hidden)

        outputs = jax.lax.map(apply_expert, (blocks, expert_of_block)).reshape(-1, tokens.shape[-1])
        weighted = outputs[slots].astype(jnp.float32) * weights[..., None]
        return jnp.sum(weighted, axis=1).astype(tokens.dtype)


def blocks_by_expert(
    indices: Int[Array, "N k"], experts: int
) -> tuple[Int[Array, "N k"], Int[Array, "blocks b"], Int[Array, "blocks"]]:
    """Groups tokens into blocks of one expert each.

    Args:
        indices: experts of every token.

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
