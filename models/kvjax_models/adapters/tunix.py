"""Compressed KV caches for the Llama 3, Qwen 3 and Gemma 3 models of tunix and their sampler.

    compress(model, "subgen_mean", budget="25%")
    sampler = tunix.generate.sampler.Sampler(model, tokenizer, cache_config)

tunix computes projections, attention of the prompt and sampling. The caches, and the attention of new tokens to them,
are kvjax's.
"""

import functools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

import kvjax
from kvjax.budget import Budget
from kvjax.registry import AnyPolicy
from kvjax_models.adapters import layers

LayerCache: TypeAlias = tuple[kvjax.Cache, kvjax.Counters]


def compress(model: Any, policy: AnyPolicy, budget: int | str | Budget | None = None, *, seed: int = 0) -> Any:
    """Makes a tunix model return and use compressed KV caches.

    Args:
        model: a `Llama3`, `Qwen3` or `Gemma3` of tunix; it is changed in place.
        policy: cache policy as for `LanguageModel.generate`.
        budget: size of the cache of one sequence: a share of a full bfloat16 cache of `cache_size` tokens ("25%"),
            bytes or slots per KV head; None if the policy has a budget or takes none.
        seed: seed of the policy's random numbers.

    Returns:
        The model.

    Raises:
        ValueError: if the model, the policy or the budget is not supported.
    """
    attention = type(model.layers[0].attn)
    if attention not in (gemma3.Attention, llama3.Attention, qwen3.Attention):
        raise ValueError(f"{type(model).__name__} is not supported; supported: Llama3, Qwen3 and Gemma3 of tunix")
    layers.check_policy(policy, budget, _cache_specs(model, 1, 1, jnp.float32)[0])
    prompt_layers = layers.PromptLayers()

    def init_cache(self: Any, batch_size: int, cache_size: int, dtype: jax.typing.DTypeLike) -> dict[str, LayerCache]:
        """Replaces tunix's method; `cache_size` limits a sequence to that many tokens."""
        specs = _cache_specs(self, batch_size, cache_size, dtype)
        caches = layers.init_caches(layers.fit_policy(policy, budget, specs[0], cache_size), specs, seed)
        return {f"layer_{number}": cache for number, cache in enumerate(caches)}

    for number, layer in enumerate(model.layers):
        _override(layer.attn, block=_make_block(attention, number, prompt_layers))
    _override(model, init_cache=init_cache)
    return model


def _override(module: Any, **methods: Any) -> None:
    """Gives a module a subclass of its class with other methods."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), methods, pytree=module._pytree__is_pytree)


def _make_block(attention: type, number: int, prompt_layers: layers.PromptLayers) -> Any:
    """Returns the method `block` of an attention layer."""

    def block(
        self: Any,
        x: Float[Array, "B T W"],
        segment_pos: Int[Array, "B T"],
        cache: LayerCache | None,
        attn_mask: Bool[Array, "B T S"],
    ) -> tuple[LayerCache | None, Float[Array, "B T W"]]:
        """Replaces tunix's method: processes a right-aligned prompt, or appends a token per row."""
        if cache is None:
            return attention.block(self, x, segment_pos, None, attn_mask)  # type: ignore[attr-defined]
        (kv, counters), tokens, (query, key, value) = cache, x.shape[1], _project(self, x, segment_pos)
        if tokens == 1:
            attended, kv, counters = kvjax.step(kv, counters, query, key, value)
            return (kv, counters), _output(self)(attended.astype(x.dtype))
        lengths = jnp.sum(attn_mask[:, -1], axis=-1, dtype=jnp.int32)
        query, key, value = (layers.align_left(y, lengths) for y in (query, key, value))
        cache = prompt_layers.prefill(number, kv, counters, query, key, value, lengths)
        return cache, attention.block(self, x, segment_pos, None, attn_mask[..., :tokens])[1]  # type: ignore[attr-defined]

    return block


def _project(attention: Any, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Returns rotated queries and keys, and values."""
    rotate = functools.partial(_rotate, attention)
    if isinstance(attention, gemma3.Attention):
        if attention.use_qkv_einsum:
            query, key, value = attention.qkv_einsum(x)
        else:
            query, (key, value) = attention.q_einsum(x), attention.kv_einsum(x)
        return rotate(attention._query_norm(query), positions), rotate(attention._key_norm(key), positions), value
    query, key, value = attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)
    if isinstance(attention, qwen3.Attention):
        query, key = attention.q_norm(query), attention.k_norm(key)
    return rotate(query, positions), rotate(key, positions), value


def _rotate(attention: Any, x: Array, positions: Array) -> Array:
    """Applies the layer's RoPE."""
    if isinstance(attention, gemma3.Attention):
        frequency, factor = attention.rope_base_frequency, attention.rope_scale_factor
        return gemma3.apply_rope(
            x, positions, head_dim=attention.head_dim, base_frequency=frequency, scale_factor=factor
        )
    apply_rope = qwen3.apply_rope if isinstance(attention, qwen3.Attention) else llama3.apply_rope
    return apply_rope(x, positions, head_dim=attention.head_dim)


def _output(attention: Any) -> Any:
    """Returns the output projection."""
    return attention.attn_vec_einsum if isinstance(attention, gemma3.Attention) else attention.o_proj


def _cache_specs(model: Any, batch: int, cache_size: int, dtype: jax.typing.DTypeLike) -> list[kvjax.CacheSpec]:
    """Returns the cache specs of all layers."""
    return [
        kvjax.CacheSpec(
            batch=batch,
            query_heads=model.config.num_heads,
            kv_heads=model.config.num_kv_heads,
            head_dim=model.config.head_dim,
            max_prompt_tokens=cache_size,
            max_new_tokens=cache_size,
            dtype=dtype,
            scale=getattr(layer.attn, "query_pre_attn_scalar", None),
            window=_window(layer.attn),
            rope_frequencies=layers.rope_frequencies(functools.partial(_rotate, layer.attn), model.config.head_dim),
            layer=number,
            layers=len(model.layers),
        )
        for number, layer in enumerate(model.layers)
    ]


def _window(attention: Any) -> int | None:
    """Returns the sliding window of a layer."""
    is_sliding = getattr(attention, "attn_type", None) == gemma3.AttentionType.LOCAL_SLIDING
    return attention.sliding_window_size if is_sliding else None
