"""One Flax NNX decoder for the Llama family: Llama 2 and 3.x, Mistral, Qwen2/2.5 and Qwen3.

The model is cut where a cache goes: a layer's `project` gives queries, keys and values, its `finish` takes what
attention returned. Everything between the two (full attention here, a compressed cache in `generate`) is the
caller's, so the model knows nothing of caches.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax import rope


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the context a model was first trained on.

    `kind` is "linear" (all frequencies divided by `factor`) or "llama3" (only those whose wavelength is long
    against `original_length`, with a smooth passage between the two bounds; Llama 3.1's rule).
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a decoder. Sizes in elements; `windows` gives a layer's sliding window in tokens or None."""

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
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: bool = False
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if self.query_heads % self.kv_heads:
            raise ValueError(f"query_heads={self.query_heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even: rotary embedding turns pairs of dimensions")
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows names {len(self.windows)} layers, the model has {self.layers}")

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer in tokens (the token itself included), None where it sees everything."""
        return self.windows[layer] if self.windows else None


def rope_frequencies(config: LlamaConfig) -> Float[Array, "half_D"]:
    """Angle per position of every pair of dimensions, float32, scaling included.

    Computed on the host, the power in float64: XLA's float32 power differs between eager and compiled code, and
    between platforms, by a few units in the last place, which at position 131,072 turn keys by 0.008 radians. Rounded
    as here, the frequencies are those of transformers to the bit but for about one in a hundred.

    Source: RoFormer (Su et al. 2021); Llama 3.1's scaling as in `_compute_llama3_parameters` of transformers.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = np.float32(1) / (config.rope_theta ** exponents.astype(np.float64)).astype(np.float32)
    return jnp.asarray(_scaled(frequencies, config.rope_scaling), jnp.float32)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling | None) -> np.ndarray:
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind != "llama3":
        raise ValueError(f"rope_scaling.kind={scaling.kind!r} is not implemented; known: 'linear', 'llama3'")
    turns = scaling.original_length / (2 * math.pi / frequencies)  # full turns within the original context
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 - keep) * frequencies / scaling.factor + keep * frequencies


class Attention(nnx.Module):
    """The projections around attention, with Qwen's biases and Qwen3's norms of queries and keys."""

    def __init__(self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int, bias: bool) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.query_heads, self.kv_heads = config.query_heads, config.kv_heads
        self.head_dim, self.query_key_norm = config.head_dim, config.query_key_norm
        self.query = linear(config.width, config.query_heads * config.head_dim, config.qkv_bias)
        self.key = linear(config.width, config.kv_heads * config.head_dim, config.qkv_bias)
        self.value = linear(config.width, config.kv_heads * config.head_dim, config.qkv_bias)
        self.output = linear(config.query_heads * config.head_dim, config.width, config.output_bias)
        if config.query_key_norm:
            self.query_norm = _norm(config.head_dim, config, dtype, rngs)
            self.key_norm = _norm(config.head_dim, config, dtype, rngs)

    def project(self, x, cos, sin):
        query = self.query(x).reshape(*x.shape[:-1], self.query_heads, self.head_dim)
        key = self.key(x).reshape(*x.shape[:-1], self.kv_heads, self.head_dim)
        value = self.value(x).reshape(*x.shape[:-1], self.kv_heads, self.head_dim)
        if self.query_key_norm:
            query, key = self.query_norm(query), self.key_norm(key)
        return rope.rotate(query, cos, sin), rope.rotate(key, cos, sin), value


class Mlp(nnx.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        def linear(inputs: int, outputs: int) -> nnx.Linear:
            return nnx.Linear(inputs, outputs, use_bias=config.mlp_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)

        self.gate = linear(config.width, config.mlp_width)
        self.up = linear(config.width, config.mlp_width)
        self.down = linear(config.mlp_width, config.width)

    def __call__(self, x):
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nnx.Module):
    """One block: `project`, then attention by the caller, then `finish`."""

    def __init__(self, config: LlamaConfig, window: int | None, *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.window = window
        self.attention_norm = _norm(config.width, config, dtype, rngs)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = _norm(config.width, config, dtype, rngs)
        self.mlp = Mlp(config, dtype=dtype, rngs=rngs)

    def project(
        self, x: Float[Array, "B T W"], cos: Float[Array, "B T half_D"], sin: Float[Array, "B T half_D"]
    ) -> tuple[Float[Array, "B T H_q D"], Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]]:
        """Queries, keys (both rotated) and values of the tokens in x."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def finish(self, x: Float[Array, "B T W"], attended: Float[Array, "B T H_q D"]) -> Float[Array, "B T W"]:
        """Adds the attention output and the MLP to the residual stream."""
        x = x + self.attention.output(attended.reshape(*x.shape[:-1], -1).astype(x.dtype))
        return x + self.mlp(self.mlp_norm(x))


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
        self.layers = nnx.List(
            [DecoderLayer(config, config.window(i), dtype=dtype, rngs=rngs) for i in range(config.layers)]
        )
        self.norm = _norm(config.width, config, dtype, rngs)
        if not config.tied_embeddings:
            self.head = nnx.Linear(
                config.width, config.vocab_size, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=rngs
            )

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """Token embeddings, the start of the residual stream."""
        return self.embedding(tokens)

    def rotation(self, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T half_D"], Float[Array, "B T half_D"]]:
        """Cosine and sine for `DecoderLayer.project`, shared by all layers."""
        return rope.rotation(positions, rope_frequencies(self.config))

    def hidden(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T W"]:
        """The residual stream after the last layer under full causal attention (training and reference runs)."""
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        cos, sin = self.rotation(positions)
        x = self.embed(tokens)
        for layer in self.layers:
            query, key, value = layer.project(x, cos, sin)
            window = None if layer.window is None else (layer.window - 1, 0)
            attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, local_window_size=window)
            x = layer.finish(x, attended)
        return x

    def logits(self, x: Float[Array, "... W"]) -> Float[Array, "... V"]:
        """Next-token logits, float32, from the residual stream after the last layer."""
        x = self.norm(x)
        # Contracting against the embedding itself: a transposed copy would double a tied model's largest tensor.
        weights = self.embedding.embedding[...] if self.config.tied_embeddings else self.head.kernel[...]
        width_axis = 1 if self.config.tied_embeddings else 0
        return jax.lax.dot_general(
            x, weights, (((x.ndim - 1,), (width_axis,)), ((), ())), preferred_element_type=jnp.float32
        )

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T V"]:
        """Logits of every position under full causal attention."""
        return self.logits(self.hidden(tokens))


def _norm(features: int, config: LlamaConfig, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=config.norm_epsilon, dtype=dtype, param_dtype=dtype, rngs=rngs)
