"""One Flax NNX decoder for the Llama family and its kin: Mistral, Qwen, Gemma, GLM, Phi, OLMo, mixtures of experts.

What families differ in is configuration. The model is cut where a cache goes: a layer's `project` gives queries, keys
and values, its `finish` takes what attention returned. Everything between the two (full attention here, a compressed
cache in `generate`) is the caller's, so the model knows nothing of caches.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax import rope
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.exact_attention import chunk_attention
from kvjax_models.model.experts import Experts, Mlp
from kvjax_models.model.rotary import rotation


class RMSNorm(nnx.Module):
    """x over its root mean square, times a stored scale (and an offset of it); float32 inside, rounded once."""

    def __init__(self, features: int, config: LlamaConfig, dtype: jax.typing.DTypeLike):
        self.epsilon, self.offset = config.norm_epsilon, config.norm_offset
        self.scale = nnx.Param(jnp.full(features, 1 - config.norm_offset, dtype))

    def __call__(self, x: Float[Array, "... W"]) -> Float[Array, "... W"]:
        wide = x.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return (wide * (factor * (self.scale[...].astype(jnp.float32) + self.offset))).astype(x.dtype)


class Attention(nnx.Module):
    """The projections around attention, with biases, norms of queries and keys, and sinks where a family has them."""

    def __init__(self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        given: Mapping[str, Any] = {"dtype": dtype, "param_dtype": dtype, "rngs": rngs}
        query_width, kv_width = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        self.query_heads, self.kv_heads, self.head_dim = config.query_heads, config.kv_heads, config.head_dim
        self.query_key_norm, self.joint_norm = config.query_key_norm, config.joint_query_key_norm
        # What makes q.k / sqrt(D) the model's logit.
        scale = config.attention_scale
        self.query_scale = 1.0 if scale is None else scale * config.head_dim**0.5
        # One product for all three: of every kv head the queries of its group, its key and its value, side by side, so
        # that devices take whole heads.
        self.group = config.query_heads // config.kv_heads
        made = (config.kv_heads, self.group + 2, config.head_dim)
        self.qkv = nnx.LinearGeneral(config.width, made, use_bias=config.qkv_bias, **given)
        self.output = nnx.Linear(query_width, config.width, use_bias=config.output_bias, **given)
        if config.query_key_norm:
            self.query_norm = RMSNorm(query_width if self.joint_norm else config.head_dim, config, dtype)
            self.key_norm = RMSNorm(kv_width if self.joint_norm else config.head_dim, config, dtype)
        self.sinks = nnx.Param(jnp.zeros(config.query_heads, dtype)) if config.attention_sinks else None

    def project(self, x, cos, sin):
        made = self.qkv(x)
        return self._queries(made[..., : self.group, :], cos, sin), *self._stored(made[..., self.group :, :], cos, sin)

    def project_queries(self, x, cos, sin):
        return self._queries(self._made(x, slice(None, self.group)), cos, sin)

    def project_kv(self, x, cos, sin):
        return self._stored(self._made(x, slice(self.group, None)), cos, sin)

    def _made(self, x, part):
        """A part of what `qkv` makes of x."""
        made = jnp.einsum("...w,whnd->...hnd", x, self.qkv.kernel[...][:, :, part])
        return made if self.qkv.bias is None else made + self.qkv.bias[...][:, part]

    def _queries(self, made, cos, sin):
        query = made.reshape(*made.shape[:-3], self.query_heads, self.head_dim)
        if self.query_key_norm:
            query = self._normed(self.query_norm, query)
        # Scaled by way of the rotation: one rounding in place of two.
        return rope.rotate(query, cos * self.query_scale, sin * self.query_scale)

    def _stored(self, made, cos, sin):
        key, value = made[..., 0, :], made[..., 1, :]
        if self.query_key_norm:
            key = self._normed(self.key_norm, key)
        return rope.rotate(key, cos, sin), value

    def _normed(self, norm, heads):
        return norm(heads.reshape(*heads.shape[:-2], -1)).reshape(heads.shape) if self.joint_norm else norm(heads)


class DecoderLayer(nnx.Module):
    """One block: `project`, then attention by the caller, then `finish`. What attention must know of the layer besides:
    `window`, `attention_logit_cap` and `sink_logits`."""

    def __init__(self, config: LlamaConfig, number: int, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.window, self.attention_logit_cap = config.window(number), config.attention_logit_cap
        self.residual_scale = config.residual_scale
        before, after = config.norms != "post", config.norms != "pre"
        self.attention_norm = RMSNorm(config.width, config, dtype) if before else None
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.after_attention_norm = RMSNorm(config.width, config, dtype) if after else None
        self.mlp_norm = RMSNorm(config.width, config, dtype) if before else None
        self.mlp = _mlp(config, number, dtype, rngs)
        self.after_mlp_norm = RMSNorm(config.width, config, dtype) if after else None

    @property
    def sink_logits(self) -> Float[Array, "H_q"] | None:
        """Of every query head the logit of an entry without a value."""
        return None if self.attention.sinks is None else self.attention.sinks[...]

    def project(
        self, x: Float[Array, "B T W"], cos: Float[Array, "B T half_D"], sin: Float[Array, "B T half_D"]
    ) -> tuple[Float[Array, "B T H_q D"], Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """Queries, keys (both rotated) and values of the tokens in x."""
        return self.attention.project(_normed(self.attention_norm, x), cos, sin)

    def project_queries(
        self, x: Float[Array, "B T W"], cos: Float[Array, "B T half_D"], sin: Float[Array, "B T half_D"]
    ) -> Float[Array, "B T H_q D"]:
        """What `project` gives first, where the rest is not needed."""
        return self.attention.project_queries(_normed(self.attention_norm, x), cos, sin)

    def project_kv(
        self, x: Float[Array, "B T W"], cos: Float[Array, "B T half_D"], sin: Float[Array, "B T half_D"]
    ) -> tuple[Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """What `project` gives behind that: keys and values."""
        return self.attention.project_kv(_normed(self.attention_norm, x), cos, sin)

    def finish(self, x: Float[Array, "B T W"], attended: Float[Array, "B T H_q D"]) -> Float[Array, "B T W"]:
        """Adds the attention output and the MLP to the residual stream."""
        heads = attended.reshape(*x.shape[:-1], -1).astype(x.dtype)
        x = self._added(x, _normed(self.after_attention_norm, self.attention.output(heads)))
        return self._added(x, _normed(self.after_mlp_norm, self.mlp(_normed(self.mlp_norm, x))))

    def _added(self, x: Array, made: Array) -> Array:
        return x + (made if self.residual_scale == 1 else made * self.residual_scale)


class Llama(nnx.Module):
    """The decoder. Parameters live in an `nnx.split` state; caches are plain pytrees beside it."""

    def __init__(self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike = jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.embedding = nnx.Embed(
            config.vocab_size,
            config.width,
            dtype=dtype,
            param_dtype=dtype,
            rngs=rngs,
            embedding_init=nnx.initializers.normal(0.02),
        )
        self.layers = nnx.List([DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.layers)])
        self.norm = RMSNorm(config.width, config, dtype)
        if not config.tied_embeddings:
            self.head = nnx.Linear(
                config.width, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
            )

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """Token embeddings, the start of the residual stream."""
        x, scale = self.embedding(tokens), self.config.embedding_scale
        scale = self.config.width**0.5 if scale is None else scale
        return x if scale == 1 else x * jnp.asarray(scale, x.dtype)

    def rotation(
        self, positions: Int[Array, "B T"], layer: int = 0, tokens: int | None = None
    ) -> tuple[Float[Array, "B T half_D"], Float[Array, "B T half_D"]]:
        """Cosine and sine for a layer's `project`, in sequences that may grow to so many tokens (`max_length`); most
        models' layers share them."""
        return rotation(self.config.rotary(layer, tokens), positions)

    def hidden_states(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """The residual stream after the last layer under full causal attention (training and reference runs)."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            query, key, value = layer.project(x, *self.rotation(positions, number, tokens.shape[1]))
            x = layer.finish(x, _attended(layer, query, key, value))
        return x

    def logits(self, x: Float[Array, "... W"]) -> Float[Array, "... V"]:
        """Next-token logits, float32, from the residual stream after the last layer."""
        x = self.norm(x)
        # Contracting against the embedding itself: a transposed copy would double a tied model's largest tensor.
        weights = self.embedding.embedding[...] if self.config.tied_embeddings else self.head.kernel[...]
        width_axis = 1 if self.config.tied_embeddings else 0
        logits = jax.lax.dot_general(
            x, weights, (((x.ndim - 1,), (width_axis,)), ((), ())), preferred_element_type=jnp.float32
        )
        logits, cap = logits / self.config.logit_divisor, self.config.logit_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every position under full causal attention."""
        return self.logits(self.hidden_states(tokens))


def _mlp(config: LlamaConfig, layer: int, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> Mlp | Experts:
    given: Mapping[str, Any] = {"dtype": dtype, "rngs": rngs}
    if not config.experts or layer in config.dense_layers:
        return Mlp(config.width, config.mlp_width, config.activation, config.mlp_bias, **given)
    return Experts(
        config.width,
        config.expert_width,
        config.activation,
        config.mlp_bias,
        experts=config.experts,
        per_token=config.experts_per_token,
        normalised=config.normalize_expert_weights,
        **given,
    )


def _normed(norm: RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)


def _attended(layer: DecoderLayer, query: Array, key: Array, value: Array) -> Array:
    """Full causal attention of a layer; the library's, where it knows all that the layer asks for."""
    if layer.attention_logit_cap is None and layer.sink_logits is None:
        window = None if layer.window is None else (layer.window - 1, 0)
        return jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=window)
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    return chunk_attention(
        query, keys, values, 0, layer.sink_logits, window=layer.window, logit_cap=layer.attention_logit_cap
    )
