"""The configuration of a decoder."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax_models.model.experts import ACTIVATIONS
from kvjax_models.model.rotary import RopeScaling, Rotary, make_rotary

NORMS = ("pre", "post", "sandwich")


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder, sizes in elements, and what families differ in.

    Attributes:
        rotary_dim: dimensions of a head that are turned by the position; None: all.
        nope_layers: layers that do not turn any.
        tied_embeddings: whether the embedding is also the head.
        query_key_norm: whether every query and key is normed before it is turned; `joint_query_key_norm`: all heads of
            a token together.
        windows: every layer's sliding window in tokens, None where it sees everything; () where none slides.
        window_rope_theta: the base of layers with a window, which are then not scaled.
        attention_scale: of logits of attention, where it is not 1 / sqrt(head_dim).
        attention_logit_cap, logit_cap: l becomes cap tanh(l / cap), of attention and of the next token.
        attention_sinks: whether every head has an entry without a value.
        activation: one of `experts.ACTIVATIONS`.
        norms: whether the norms of a block stand before it, after it (and before the residual), or around it.
        norm_offset: what is added to the stored scale of every norm.
        embedding_scale: of embeddings; None: sqrt(width), rounded to the model's dtype.
        residual_scale: of what every block adds to the residual stream.
        logit_divisor: of next-token logits.
        experts: per layer; 0: one MLP of `mlp_width`. Every token takes `experts_per_token` of `expert_width`, whose
            weights sum to 1 where `normalize_expert_weights`.
        dense_layers: layers that have an MLP all the same.
        mlp_bias: also of routers and experts.

    Raises:
        ValueError: for what cannot be together; it names the field.
    """

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = None
    nope_layers: tuple[int, ...] = ()
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    joint_query_key_norm: bool = False
    windows: tuple[int | None, ...] = ()
    window_rope_theta: float | None = None
    attention_scale: float | None = None
    attention_logit_cap: float | None = None
    logit_cap: float | None = None
    attention_sinks: bool = False
    activation: str = "silu"
    norms: str = "pre"
    norm_offset: float = 0.0
    embedding_scale: float | None = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    experts: int = 0
    experts_per_token: int = 0
    expert_width: int = 0
    normalize_expert_weights: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs of dimensions")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 2 <= self.rotary_dim <= self.head_dim):
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even and lie in [2, head_dim={self.head_dim}]")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows names {len(self.windows)} layers, the model has {self.layers}")
        for name, known in (("activation", ACTIVATIONS), ("norms", NORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; known: {', '.join(known)}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must lie in [1, experts={self.experts}]")
        if self.experts and self.expert_width < 1:
            raise ValueError(f"expert_width={self.expert_width}; it must be at least 1")
        if self.rope_scaling is not None and self.rope_scaling.kind == "longrope":
            pairs = (self.rotary_dim or self.head_dim) // 2
            for name in ("short_factors", "long_factors"):
                if (given := len(getattr(self.rope_scaling, name))) != pairs:
                    raise ValueError(f"rope_scaling.{name} has {given} numbers; {pairs} pairs of dimensions are turned")

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer in tokens (the token itself included), None where it sees everything."""
        return self.windows[layer] if self.windows else None

    def rotary(self, layer: int = 0, tokens: int | None = None) -> Rotary:
        """The rotation of one layer in sequences that may grow to so many tokens, by default `max_length`."""
        if layer in self.nope_layers:
            return Rotary((0.0,) * (self.head_dim // 2))
        theta, scaling = self.rope_theta, self.rope_scaling
        if self.window(layer) is not None and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, None
        tokens = self.max_length if tokens is None else tokens
        return make_rotary(self.head_dim, theta, scaling, rotary_dim=self.rotary_dim, tokens=tokens)


def rope_frequencies(config: LlamaConfig, layer: int = 0, tokens: int | None = None) -> Float[Array, "half_D"]:
    """Angle per position of every pair of a layer's dimensions, float32, scaling included; see `rotary`."""
    return jnp.asarray(config.rotary(layer, tokens).frequencies, jnp.float32)
