"""Compressed KV caches for the Gemma 2 and 3 models of Google's gemma package.

    with compressed_attention():
        caches = init_caches(model.config, "subgen_mean", "25%", batch=2, max_prompt_tokens=512, max_new_tokens=256)
        out = model.apply(variables, tokens, cache=caches)
        out = model.apply(variables, token[:, None], positions=..., attention_mask=..., cache=out.cache)

gemma's `Transformer` gives each layer the cache that it received under the layer's name, and returns the cache that
the layer returns. Only the attention module changes.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from gemma.gm.math import _positional_embeddings
from gemma.gm.nn import _modules
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.budget import Budget
from kvjax.registry import AnyPolicy
from kvjax.state import ArrayField, map_fields
from kvjax_models.adapters import layers

PackedCache = dict[str, Any]


@contextlib.contextmanager
def compressed_attention() -> Iterator[None]:
    """Makes models that are applied in this context use kvjax caches; calls with gemma's own caches fail."""
    original = _modules.Attention
    prompt_layers = layers.PromptLayers()
    _modules.Attention = type("Attention", (CompressedAttention,), {"prompt_layers": prompt_layers})
    try:
        yield
    finally:
        _modules.Attention = original


def init_caches(
    config: Any,
    policy: AnyPolicy,
    budget: int | str | Budget | None = None,
    *,
    batch: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    seed: int = 0,
) -> dict[str, PackedCache]:
    """Returns empty caches for `Transformer.apply`.

    Args:
        config: configuration of the `Transformer`.
        policy: cache policy as for `LanguageModel.generate`.
        batch: number of batch rows.
        max_prompt_tokens: maximum length of a prompt.
        max_new_tokens: maximum number of tokens after it.
        seed: seed of the policy's random numbers.
    """
    specs = [
        kvjax.CacheSpec(
            batch=batch,
            query_heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            dtype=dtype,
            scale=config.query_pre_attn_scalar(),
            logit_cap=config.attn_logits_soft_cap,
            window=config.sliding_window_size if _is_local(kind) else None,
            rope_frequencies=layers.rope_frequencies(_rope(config, kind), config.head_dim),
            layer=number,
            layers=config.num_layers,
        )
        for number, kind in enumerate(config.attention_types)
    ]
    fitted = layers.fit_policy(policy, budget, specs[0], max_prompt_tokens + max_new_tokens)
    caches = layers.init_caches(fitted, specs, seed)
    return {f"layer_{number}": pack(cache, counters, batch) for number, (cache, counters) in enumerate(caches)}


def _is_local(kind: Any) -> bool:
    return kind == _modules.AttentionType.LOCAL_SLIDING


def _rope(config: Any, kind: Any) -> Any:
    """Returns the RoPE function of the layers of a kind."""
    prefix = "local" if _is_local(kind) else "global"
    return functools.partial(
        _positional_embeddings.apply_rope,
        base_frequency=getattr(config, f"{prefix}_base_frequency"),
        scale_factor=getattr(config, f"{prefix}_scale_factor"),
    )


def pack(cache: kvjax.Cache, counters: kvjax.Counters, batch: int) -> PackedCache:
    """Returns a layer's cache and counters with a batch axis in every array, which gemma requires.

    Args:
        batch: number of batch rows.

    Returns:
        Both in a dictionary, with the key that gemma reads.
    """

    def add_axis(field: ArrayField, x: Array) -> Array:
        return jnp.broadcast_to(x, (batch, *x.shape)) if field.batch_axis is None else x

    packed = map_fields(add_axis, (cache, counters))
    return {"end_index": jnp.broadcast_to(counters.offset, batch), "kv": packed}


def unpack(packed: PackedCache) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Returns the cache and the counters that `pack` received."""
    return map_fields(lambda field, x: x[0] if field.batch_axis is None else x, packed["kv"])


class CompressedAttention(_modules.Attention):
    """gemma's attention with a kvjax cache; `compressed_attention` installs it."""

    def __call__(
        self,
        x: Float[Array, "B T W"],
        segment_pos: Int[Array, "B T"],
        cache: PackedCache | None,
        attn_mask: Bool[Array, "B T S"],
    ) -> tuple[PackedCache | None, Float[Array, "B T W"]]:
        """Processes a left-aligned prompt, or appends a token per row.

        Args:
            x: input of the layer.
            segment_pos: positions of the tokens.
            cache: the layer's cache; None for full attention without a cache.

        Returns:
            The cache and the output of the layer.
        """
        if cache is None:
            return super().__call__(x, segment_pos, None, attn_mask)
        (kv, counters), (query, key, value) = unpack(cache), self._project(x, segment_pos)
        if x.shape[1] == 1:
            attended, kv, counters = kvjax.step(kv, counters, query, key, value)
            output = self.attn_vec_einsum("BTNH,NHD->BTD", attended.astype(x.dtype))
            return pack(kv, counters, len(x)), output
        lengths = jnp.sum(attn_mask[:, -1], axis=-1, dtype=jnp.int32)
        number = int(self.path[-2].removeprefix("layer_"))
        kv, counters = self.prompt_layers.prefill(number, kv, counters, query, key, value, lengths)
        return pack(kv, counters, len(x)), super().__call__(x, segment_pos, None, attn_mask)[1]

    def _project(self, x: Array, positions: Array) -> tuple[Array, Array, Array]:
        """Returns rotated queries and keys, and values."""
        if self.use_qkv_einsum:
            query, key, value = self.qkv_einsum("BTD,SNDH->SBTNH", x)
        else:
            query, (key, value) = self.q_einsum("BTD,NDH->BTNH", x), self.kv_einsum("BSD,CKDH->CBSKH", x)
        if self.use_qk_norm:
            query, key = self._query_norm(query), self._key_norm(key)
        options = {"base_frequency": self.rope_base_frequency, "scale_factor": self.rope_scale_factor}
        query, key = (_positional_embeddings.apply_rope(y, positions, **options) for y in (query, key))
        return query, key, value
