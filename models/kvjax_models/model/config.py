"""The configuration of a decoder."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_models.model.activations import ACTIVATIONS
from kvjax_models.model.recurrent import RecurrentSizes
from kvjax_models.model.rotary import RopeScaling, Rotary, make_rotary

NORMS = ("pre", "post", "sandwich")
SCORING_FUNCS = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a decoder and the features in which model families differ.

    Attributes:
        vocab_size: number of tokens in the vocabulary.
        width: size of the residual stream.
        mlp_width: hidden size of the MLPs.
        layers: number of layers.
        query_heads: number of query heads.
        kv_heads: number of KV heads.
        head_dim: dimension of a head.
        window_kv_heads: number of KV heads in layers with a window; None: `kv_heads`.
        window_head_dim: dimension of a head in layers with a window; None: `head_dim`.
        max_length: context length that the model was trained for, in tokens.
        norm_epsilon: epsilon of RMSNorm.
        rope_theta: base of the rotary embedding.
        layer_rope_theta: base of the rotary embedding of every layer; (): `rope_theta`.
        rope_scaling: scaling of the rotary embedding; None: not scaled.
        rotary_dim: number of rotated dimensions of a head; None: all.
        nope_layers: layers without rotary embedding.
        tied_embeddings: whether the embedding is also the output head.
        qkv_bias: whether query, key and value projections have a bias.
        output_bias: whether the attention output projection has a bias.
        mlp_bias: whether MLPs, routers and experts have biases.
        query_key_norm: whether queries and keys are normalized before the rotary embedding.
        joint_query_key_norm: whether this norm spans all heads of a token instead of each head.
        query_key_norm_after_rope: whether this norm follows the rotary embedding.
        windows: sliding window of every layer in tokens, None for full attention; (): full attention in all layers.
        window_rope_theta: base of the rotary embedding in layers with a window, which is then not scaled there.
        attention_scale: scale of attention logits; None: 1 / sqrt(head_dim).
        value_norm: whether values are normalized, without a scale.
        keys_as_values: whether layers without a window have one projection for keys and values. Norms and the rotary
            embedding make them differ afterwards, so caches store both.
        layer_scale: whether the output of every layer is multiplied by a parameter.
        attention_gate: whether the output of attention is multiplied by the sigmoid of a projection of its input.
        recurrent_layers: layers with a recurrence in place of attention (`model.recurrent`).
        recurrence: sizes of these layers, which determine the kind of recurrence.
        query_growth: growth of queries with their position; see `rotary.Rotary`.
        query_period: positions with the same growth.
        attention_logit_cap: cap c of attention logits, l -> c tanh(l / c); None: no cap.
        logit_cap: cap of next-token logits; None: no cap.
        attention_sinks: whether every query head has an attention sink logit.
        activation: activation of MLPs, one of `activations.ACTIVATIONS`.
        norms: position of a block's norms: "pre" before it, "post" after it and before the residual connection,
            "sandwich" both.
        norm_offset: added to the stored scale of every norm.
        embedding_scale: scale of embeddings, rounded to the model's dtype.
        residual_scale: scale of the output of every block.
        logit_divisor: divisor of next-token logits.
        experts: number of experts per layer; 0: a single MLP.
        experts_per_token: number of experts that process a token.
        expert_width: hidden size of an expert.
        normalize_expert_weights: whether the weights of a token's experts sum to 1.
        dense_layers: layers of a mixture of experts that have a single MLP.
        scoring_func: "softmax" or "sigmoid" of the router's logits; see `experts.Router`.
        expert_groups: number of groups of experts; at least two experts each.
        expert_groups_per_token: number of groups from which the experts of a token are selected.
        routed_scaling_factor: factor of the weights of selected experts.
        shared_expert_width: hidden size of the expert that processes all tokens; 0: none.
        shared_expert_gate: whether a gate scales the output of the shared expert.
        parallel_experts: whether every layer has an MLP and experts in parallel; see `llama.ParallelExperts`.
    """

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    window_kv_heads: int | None = None
    window_head_dim: int | None = None
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    layer_rope_theta: tuple[float, ...] = ()
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    nope_layers: tuple[int, ...] = ()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    joint_query_key_norm: bool = False
    query_key_norm_after_rope: bool = False
    windows: tuple[int | None, ...] = ()
    window_rope_theta: float | None = None
    attention_scale: float | None = None
    value_norm: bool = False
    keys_as_values: bool = False
    layer_scale: bool = False
    attention_gate: bool = False
    recurrent_layers: tuple[int, ...] = ()
    recurrence: RecurrentSizes | None = None
    query_growth: float = 0.0
    query_period: int = 1
    attention_logit_cap: float | None = None
    logit_cap: float | None = None
    attention_sinks: bool = False
    activation: str = "silu"
    norms: str = "pre"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_expert_weights: bool = True
    dense_layers: tuple[int, ...] = ()
    scoring_func: str = "softmax"
    expert_groups: int = 1
    expert_groups_per_token: int = 1
    routed_scaling_factor: float = 1.0
    shared_expert_width: int = 0
    shared_expert_gate: bool = False
    parallel_experts: bool = False

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
            ValueError: if fields are invalid or inconsistent.
        """
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        for name in ("head_dim", "window_head_dim"):
            if (getattr(self, name) or 0) % 2:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be even: rotary embedding rotates pairs of dimensions"
                )
        if self.query_heads % (self.window_kv_heads or 1):
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of {self.window_kv_heads=}")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even and between 2 and head_dim={self.head_dim}")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows must have one entry per layer ({self.layers}), got {len(self.windows)}")
        if bool(self.recurrent_layers) != (self.recurrence is not None):
            raise ValueError("recurrent_layers and recurrence must be set together")
        if self.recurrent_layers and not self.attention_layers:
            raise ValueError("recurrent_layers names every layer; at least one must have attention")
        for name, allowed in (("activation", ACTIVATIONS), ("norms", NORMS), ("scoring_func", SCORING_FUNCS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(allowed)}")
        if self.query_key_norm_after_rope and (self.attention_scale is not None or self.query_growth):
            raise ValueError("query_key_norm_after_rope=True undoes attention_scale and query_growth; unset them")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must be between 1 and experts={self.experts}")
        if self.experts and self.expert_width < 1:
            raise ValueError(f"expert_width={self.expert_width} must be at least 1")
        if self.expert_groups != 1:
            self._check_expert_groups()
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            pairs = (self.rotary_dim or self.head_dim) // 2
            for name in ("short_factors", "long_factors"):
                if (length := len(getattr(self.rope_scaling, name))) != pairs:
                    raise ValueError(
                        f"rope_scaling.{name} must have one entry per rotated pair ({pairs}), got {length}"
                    )

    def _check_expert_groups(self) -> None:
        """Checks the groups of experts.

        Raises:
            ValueError: if they are invalid.
        """
        groups, selected = self.expert_groups, self.expert_groups_per_token
        if self.scoring_func != "sigmoid":
            raise ValueError(f"expert_groups={groups} needs scoring_func='sigmoid'")
        if groups < 1 or self.experts % groups or self.experts < 2 * groups:
            raise ValueError(
                f"expert_groups={groups} must divide experts={self.experts} into groups of at least two experts"
            )
        if not 1 <= selected <= groups or self.experts_per_token > selected * self.experts // groups:
            raise ValueError(
                f"expert_groups_per_token={selected} must be between 1 and expert_groups={groups}, and these groups "
                f"must have at least experts_per_token={self.experts_per_token} experts"
            )

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, which have a cache each; caches, policies and profiles count these layers only."""
        return tuple(layer for layer in range(self.layers) if layer not in self.recurrent_layers)

    def window(self, layer: int) -> int | None:
        """Returns the sliding window of a layer in tokens, including the token itself; None for full attention."""
        return self.windows[layer] if self.windows else None

    def of_layer(self, layer: int) -> "LlamaConfig":
        """Returns a configuration whose `kv_heads` and `head_dim` are those of a layer."""
        if self.window(layer) is None:
            return self
        kv_heads, head_dim = self.window_kv_heads or self.kv_heads, self.window_head_dim or self.head_dim
        return dataclasses.replace(self, kv_heads=kv_heads, head_dim=head_dim)

    def rotary(self, layer: int = 0, tokens: int | None = None) -> Rotary:
        """Returns the rotary embedding of a layer.

        Args:
            tokens: maximum length of the sequences, on which some scalings depend; `max_length` by default.
        """
        head_dim = self.of_layer(layer).head_dim
        growth: dict[str, Any] = {"query_growth": self.query_growth, "query_period": self.query_period}
        if layer in self.nope_layers:
            return Rotary((0.0,) * (head_dim // 2), **growth)
        theta = self.layer_rope_theta[layer] if self.layer_rope_theta else self.rope_theta
        scaling = self.rope_scaling
        if self.window(layer) is not None and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, None
        tokens = self.max_length if tokens is None else tokens
        rotary = make_rotary(head_dim, theta, scaling, rotary_dim=self.rotary_dim, tokens=tokens)
        return dataclasses.replace(rotary, **growth)


def rope_frequencies(config: LlamaConfig, layer: int = 0, tokens: int | None = None) -> Float[Array, "half_D"]:
    """Returns the scaled rotary frequencies of a layer, in radians per position, float32.

    Args:
        config: configuration of the model.
    """
    return jnp.asarray(config.rotary(layer, tokens).frequencies, jnp.float32)
