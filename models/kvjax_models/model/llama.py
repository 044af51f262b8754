"""A Flax NNX decoder for the Llama family: Mistral, Qwen, Gemma, GLM, Phi, OLMo, mixtures of experts and others.

The configuration expresses the differences between families. A layer consists of two functions: `project` computes
queries, keys and values, `finish` takes the output of attention. Attention in between, with or without a compressed KV
cache, is up to the caller. Hybrid models also have layers with a recurrent state in place of attention.
"""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax import rope
from kvjax_models.model.config import LlamaConfig, NormConfig
from kvjax_models.model.exact_attention import chunk_attention
from kvjax_models.model.experts import Experts, Mlp
from kvjax_models.model.parameters import Initializer
from kvjax_models.model.quantized import (
    QuantizedEmbedding,
    QuantizedLinear,
    WeightDtype,
    dot_general,
    multiply_transposed,
)
from kvjax_models.model.recurrent import RecurrentState, make_mixer
from kvjax_models.model.rotary import Angles, rotation


class RMSNorm(nnx.Module):
    """Root mean square normalization, computed in float32 and rounded once."""

    def __init__(self, features: int, config: NormConfig, dtype: jax.typing.DTypeLike):
        """Creates a norm.

        Args:
            features: size of the normalized axis.
            config: epsilon and offset of the norm.
        """
        self.epsilon, self.offset = config.epsilon, config.offset
        self.scale = nnx.Param(jnp.full(features, 1 - config.offset, dtype))

    def __call__(self, x: Float[Array, "... W"]) -> Float[Array, "... W"]:
        """Returns the normalized and scaled input."""
        x_float32 = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(jnp.square(x_float32), axis=-1, keepdims=True) + self.epsilon)
        return (x_float32 * (factor * (self.scale[...].astype(jnp.float32) + self.offset))).astype(x.dtype)


class Attention(nnx.Module):
    """The projections of attention, with optional biases, norms of queries and keys, and sink logits."""

    def __init__(self, config: LlamaConfig, init: Initializer):
        """Creates the projections.

        Args:
            config: configuration of the layer (`LlamaConfig.of_layer`).
        """
        features = config.attention
        query_width, kv_width = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        self.query_heads, self.kv_heads, self.head_dim = config.query_heads, config.kv_heads, config.head_dim
        self.query_key_norm, self.joint_norm = features.query_key_norm, features.joint_query_key_norm
        self.norm_after_rope = features.query_key_norm_after_rope
        # Attention divides logits by sqrt(head_dim); this factor makes it the model's scale.
        self.query_scale = 1.0 if features.scale is None else features.scale * config.head_dim**0.5
        # One projection [W, H_kv, G + 2, D]: each KV head with the queries of its group, so that devices get entire
        # heads.
        self.group_size = config.query_heads // config.kv_heads
        shape = (config.kv_heads, self.group_size + 2, config.head_dim)
        self.qkv = init.linear(config.width, shape, use_bias=features.qkv_bias)
        self.output = init.linear(query_width, config.width, use_bias=features.output_bias)
        self.output_gate = init.linear(config.width, query_width, use_bias=features.qkv_bias) if features.gate else None
        if features.query_key_norm:
            widths = (query_width, kv_width) if self.joint_norm else (config.head_dim,) * 2
            self.query_norm, self.key_norm = (RMSNorm(width, config.norms, init.dtype) for width in widths)
        self.value_norm_epsilon = config.norms.epsilon if features.value_norm else None
        self.sinks = init.zeros(config.query_heads) if features.sinks else None

    def project(
        self, x: Float[Array, "B T W"], angles: Angles
    ) -> tuple[Float[Array, "B T H_q D"], Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """Returns queries, keys (both rotated) and values.

        Args:
            x: normalized residual stream.
        """
        qkv = self.qkv(x)
        queries = self._rotate_queries(qkv[..., : self.group_size, :], angles)
        return queries, *self._rotate_keys(qkv[..., self.group_size :, :], angles)

    def project_queries(self, x: Float[Array, "B T W"], angles: Angles) -> Float[Array, "B T H_q D"]:
        """Returns the rotated queries only.

        Args:
            x: normalized residual stream.
        """
        return self._rotate_queries(self._project_slice(x, slice(None, self.group_size)), angles)

    def project_kv(
        self, x: Float[Array, "B T W"], angles: Angles
    ) -> tuple[Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """Returns the rotated keys and the values only.

        Args:
            x: normalized residual stream.
        """
        return self._rotate_keys(self._project_slice(x, slice(self.group_size, None)), angles)

    def _project_slice(self, x: Array, index: slice) -> Array:
        """Returns a slice of the fused projection's output."""
        if isinstance(self.qkv, QuantizedLinear):
            return self.qkv.project(x, (slice(None), index))
        y = dot_general(x, self.qkv.kernel[...][:, :, index], (((x.ndim - 1,), (0,)), ((), ())))
        return y if self.qkv.bias is None else y + self.qkv.bias[...][:, index]

    def _rotate_queries(self, y: Array, angles: Angles) -> Array:
        query, (cos, sin, growth) = y.reshape(*y.shape[:-3], self.query_heads, self.head_dim), angles
        if self.norm_after_rope:
            return self._normalize_heads(self.query_norm, rope.rotate(query, cos, sin))
        scale = self.query_scale if growth is None else self.query_scale * growth[..., None]
        if self.query_key_norm:
            query = self._normalize_heads(self.query_norm, query)
        # Scaling cosine and sine instead of the queries avoids a second rounding.
        return rope.rotate(query, cos * scale, sin * scale)

    def _rotate_keys(self, y: Array, angles: Angles) -> tuple[Array, Array]:
        key, value = y[..., 0, :], y[..., 1, :]
        if self.value_norm_epsilon is not None:
            value = _divide_by_rms(value, self.value_norm_epsilon)
        if self.norm_after_rope:
            return self._normalize_heads(self.key_norm, rope.rotate(key, angles.cos, angles.sin)), value
        if self.query_key_norm:
            key = self._normalize_heads(self.key_norm, key)
        return rope.rotate(key, angles.cos, angles.sin), value

    def _normalize_heads(self, norm: RMSNorm, x: Array) -> Array:
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape) if self.joint_norm else norm(x)


class ParallelExperts(nnx.Module):
    """Experts in parallel to the MLP of a layer, which process the same residual stream (Gemma 4).

    Both have norms before and after them. The router has a norm, too, and a scale per expert.
    """

    def __init__(self, config: LlamaConfig, init: Initializer):
        """Creates experts and norms.

        Args:
            config: configuration of the model.
        """
        norm = functools.partial(RMSNorm, config.width, config.norms, init.dtype)
        self.after_mlp_norm, self.router_norm, self.norm, self.after_norm = norm(), norm(), norm(), norm()
        self.experts = Experts(config, init)

    def __call__(self, x: Float[Array, "B T W"], mlp_output: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Returns the sum of the normalized outputs of the MLP and of the experts.

        Args:
            x: residual stream.
        """
        router_input = self.router_norm(x) * x.shape[-1] ** -0.5
        return self.after_mlp_norm(mlp_output) + self.after_norm(self.experts(self.norm(x), router_input))


class _Layer(nnx.Module):
    """Norms, residual connections and MLP of a layer, which its subclass completes by attention or a recurrence."""

    def __init__(self, config: LlamaConfig, number: int, init: Initializer):
        """Creates a layer.

        Args:
            config: configuration of the model.
            number: index of the layer.
        """
        self.residual_scale = config.scales.residual
        norm = functools.partial(RMSNorm, config.width, config.norms, init.dtype)
        has_pre_norm, has_post_norm = config.norms.position != "post", config.norms.position != "pre"
        has_parallel_experts = config.experts is not None and config.experts.parallel
        self.attention_norm = norm() if has_pre_norm else None
        self._add_mixer(config, number, init)
        self.after_attention_norm = norm() if has_post_norm else None
        self.mlp_norm = norm() if has_pre_norm else None
        self.mlp = _make_mlp(config, number, init)
        self.parallel_experts = ParallelExperts(config, init) if has_parallel_experts else None
        self.after_mlp_norm = norm() if has_post_norm else None
        self.layer_scale = init.ones(1) if config.scales.layer else None

    def _add_mixer(self, config: LlamaConfig, number: int, init: Initializer) -> None:
        """Creates the parameters of attention or of the recurrence."""
        raise NotImplementedError

    def normalize(self, x: Float[Array, "... W"]) -> Float[Array, "... W"]:
        """Returns the normalized residual stream, from which attention or the recurrence projects.

        Args:
            x: residual stream.
        """
        return _normalize(self.attention_norm, x)

    def add_attention(self, x: Float[Array, "B T W"], output: Float[Array, "B T W"]) -> Float[Array, "B T W"]:
        """Returns the residual stream after attention and the MLP.

        Args:
            x: residual stream before the layer.
            output: output projection of attention, or output of the recurrence.
        """
        x = self._add_residual(x, _normalize(self.after_attention_norm, output))
        output = self.mlp(_normalize(self.mlp_norm, x))
        if self.parallel_experts is not None:
            output = self.parallel_experts(x, output)
        x = self._add_residual(x, _normalize(self.after_mlp_norm, output))
        return x if self.layer_scale is None else x * self.layer_scale[...]

    def _add_residual(self, x: Array, y: Array) -> Array:
        return x + (y if self.residual_scale == 1 else y * self.residual_scale)


class DecoderLayer(_Layer):
    """A layer with attention: `project`, then attention by the caller, then `finish`.

    Attention also depends on the layer's `window`, `attention_logit_cap` and `sink_logits`.
    """

    def _add_mixer(self, config: LlamaConfig, number: int, init: Initializer) -> None:
        self.window, self.attention_logit_cap = config.window(number), config.attention.logit_cap
        self.attention = Attention(config.of_layer(number), init)

    @property
    def sink_logits(self) -> Float[Array, "H_q"] | None:
        """The attention sink logit of every query head; None without sinks."""
        return None if self.attention.sinks is None else self.attention.sinks[...]

    def project(
        self, x: Float[Array, "B T W"], angles: Angles
    ) -> tuple[Float[Array, "B T H_q D"], Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """Returns queries, keys (both rotated) and values.

        Args:
            x: residual stream.
        """
        return self.attention.project(self.normalize(x), angles)

    def project_queries(self, x: Float[Array, "B T W"], angles: Angles) -> Float[Array, "B T H_q D"]:
        """Returns the rotated queries only.

        Args:
            x: residual stream.
        """
        return self.attention.project_queries(self.normalize(x), angles)

    def project_kv(
        self, x: Float[Array, "B T W"], angles: Angles
    ) -> tuple[Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """Returns the rotated keys and the values only.

        Args:
            x: residual stream.
        """
        return self.attention.project_kv(self.normalize(x), angles)

    def finish(self, x: Float[Array, "B T W"], attended: Float[Array, "B T H_q D"]) -> Float[Array, "B T W"]:
        """Returns the residual stream after the output projection of attention and the MLP.

        Args:
            x: residual stream before the layer.
            attended: output of attention.
        """
        return self.add_attention(x, self.project_output(x, attended))

    def project_output(self, x: Float[Array, "B T W"], attended: Float[Array, "B T H_q D"]) -> Float[Array, "B T W"]:
        """Returns the output projection of attention.

        Args:
            x: residual stream before the layer, which gives the dtype and the output gate.
            attended: output of attention.
        """
        attended = attended.reshape(*x.shape[:-1], -1).astype(x.dtype)
        if self.attention.output_gate is not None:
            attended = attended * jax.nn.sigmoid(self.attention.output_gate(self.normalize(x)))
        return self.attention.output(attended)


class RecurrentLayer(_Layer):
    """A layer with a recurrence in place of attention, whose state the caller holds."""

    def _add_mixer(self, config: LlamaConfig, number: int, init: Initializer) -> None:
        assert config.recurrence is not None
        self.mixer: Any = make_mixer(config.width, config.recurrence.sizes, config.norms.epsilon, init)

    def __call__(
        self, x: Float[Array, "B T W"], state: RecurrentState, lengths: Int[Array, "B"]
    ) -> tuple[Float[Array, "B T W"], RecurrentState]:
        """Processes the next tokens of each row.

        Args:
            x: residual stream of padded tokens.
            state: state before the tokens.
            lengths: number of tokens of each row; padding does not change the state.

        Returns:
            The residual stream after the layer, and the state after the tokens.
        """
        output, state = self.mixer(self.normalize(x), state, lengths)
        return self.add_attention(x, output), state

    def init_state(self, batch: int) -> RecurrentState:
        """Returns the state of sequences without tokens.

        Args:
            batch: number of batch rows.
        """
        return self.mixer.init_state(batch)


class Llama(nnx.Module):
    """The decoder. KV caches are separate pytrees that the caller manages."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        weight_dtype: WeightDtype | None = None,
    ):
        """Creates a decoder with random parameters, or zeros if they are quantized.

        Args:
            config: configuration.
            dtype: dtype of parameters and activations.
            rngs: random keys of the initial parameters.
            weight_dtype: "int8" stores the embedding and all kernels except routers in int8; see `model.quantized`.

        Raises:
            ValueError: if `weight_dtype` is not supported.
        """
        if weight_dtype not in (None, "int8"):
            raise ValueError(f"weight_dtype={weight_dtype!r} must be 'int8' or None")
        self.config, init = config, Initializer(dtype, rngs, quantized=weight_dtype is not None)
        self.embedding: nnx.Embed | QuantizedEmbedding = (
            QuantizedEmbedding(config.vocab_size, config.width, dtype=dtype)
            if init.quantized
            else nnx.Embed(
                config.vocab_size,
                config.width,
                embedding_init=nnx.initializers.normal(0.02),
                dtype=dtype,
                param_dtype=dtype,
                rngs=rngs,
            )
        )
        kinds = [RecurrentLayer if i in config.recurrent_layers else DecoderLayer for i in range(config.layers)]
        layers: list[Any] = [kind(config, number, init) for number, kind in enumerate(kinds)]
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.width, config.norms, dtype)
        if not config.tied_embeddings:
            self.head = init.linear(config.width, config.vocab_size, use_bias=False)

    @property
    def weight_dtype(self) -> WeightDtype | None:
        """The dtype of quantized weights; None if they are not quantized."""
        return "int8" if isinstance(self.embedding, QuantizedEmbedding) else None

    def without_layers(self) -> "Llama":
        """Returns a decoder that embeds tokens and computes logits with these parameters, but has no layers."""
        outer = copy.copy(self)
        outer.layers = nnx.List([])
        return outer

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """Embeds tokens.

        Returns:
            The scaled embeddings, which are the residual stream before the first layer.
        """
        x, scale = self.embedding(tokens), self.config.scales.embedding
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def rotation(self, positions: Int[Array, "B T"], layer: int = 0, tokens: int | None = None) -> Angles:
        """Returns the angles for `DecoderLayer.project`; in most models all layers share them.

        Args:
            tokens: maximum length of the sequences; see `LlamaConfig.rotary`.
        """
        return rotation(self.config.rotary(layer, tokens), positions)

    def hidden_states(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """Computes all layers with full causal attention, for training and as a reference.

        Args:
            tokens: token ids; rows are left-aligned.

        Returns:
            The residual stream after the last layer.
        """
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        lengths = jnp.full(len(tokens), tokens.shape[1])
        for number, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                x, _ = layer(x, layer.init_state(len(tokens)), lengths)
                continue
            query, key, value = layer.project(x, self.rotation(positions, number, tokens.shape[1]))
            x = layer.finish(x, _causal_attention(layer, query, key, value))
        return x

    def logits(self, x: Float[Array, "... W"]) -> Float[Array, "... V"]:
        """Computes next-token logits.

        Args:
            x: residual stream after the last layer.

        Returns:
            Logits over the vocabulary, float32.
        """
        cap = self.config.scales.logit_cap
        logits = self._project_logits(self.norm(x)) / self.config.scales.logit_divisor
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def _project_logits(self, x: Float[Array, "... W"]) -> Float[Array, "... V"]:
        """Returns the products of a normalized residual stream with the head, float32."""
        if self.config.tied_embeddings and isinstance(self.embedding, QuantizedEmbedding):
            return multiply_transposed(x, self.embedding.embedding[...], self.embedding.channel_scale[...])
        if not self.config.tied_embeddings and isinstance(self.head, QuantizedLinear):
            return self.head.project(x, dtype=jnp.float32)
        # Contracted with the embedding itself: a transposed copy would double a tied model's largest tensor.
        weights = self.embedding.embedding[...] if self.config.tied_embeddings else self.head.kernel[...]
        width_axis = 1 if self.config.tied_embeddings else 0
        return dot_general(x, weights, (((x.ndim - 1,), (width_axis,)), ((), ())), preferred_element_type=jnp.float32)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Returns the logits of every position with full causal attention."""
        return self.logits(self.hidden_states(tokens))


def parameter_bytes(model: Llama) -> int:
    """Returns the bytes of all parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(model))


def _make_mlp(config: LlamaConfig, layer: int, init: Initializer) -> Mlp | Experts:
    """Returns the MLP or the experts of a layer."""
    if config.experts is None or config.experts.parallel or layer in config.experts.dense_layers:
        return Mlp(config.width, config.mlp_width, config.activation, config.mlp_bias, init)
    return Experts(config, init)


def _normalize(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _divide_by_rms(x: Array, epsilon: float) -> Array:
    """Returns x divided by the root mean square of its last axis, computed in float32."""
    x_float32 = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.mean(jnp.square(x_float32), axis=-1, keepdims=True) + epsilon)
    return (x_float32 * factor).astype(x.dtype)


def _causal_attention(layer: DecoderLayer, query: Array, key: Array, value: Array) -> Array:
    """Returns full causal attention; computed by JAX's own function if that supports the layer's features."""
    if layer.attention_logit_cap is None and layer.sink_logits is None:
        window = None if layer.window is None else (layer.window - 1, 0)
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=window)
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    return chunk_attention(
        query, keys, values, 0, layer.sink_logits, window=layer.window, logit_cap=layer.attention_logit_cap
    )
