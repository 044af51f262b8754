"""A compressed KV cache for attention layers in Flax NNX.

    cache = KVCache(spec, kvjax.SnapKV(1024))
    layer = nnx.MultiHeadAttention(8, 512, num_kv_heads=2, attention_fn=cache, decode=False, rngs=nnx.Rngs(0))

`KVCache` is a drop-in `attention_fn` of `nnx.MultiHeadAttention`. Other attention layers call it with their queries,
keys and values, with RoPE applied.
"""

from typing import Any

from flax import nnx
from jaxtyping import Array, Bool, Float, Int

import kvjax
from kvjax.policy import Policy
from kvjax_models.adapters import layers


class KVCache(nnx.Module):
    """The cache of one layer and its counters, in `nnx.Cache` variables."""

    def __init__(self, spec: kvjax.CacheSpec, policy: Policy, *, seed: int = 0):
        """Creates an empty cache.

        Args:
            seed: seed of the policy's random numbers.
        """
        self.spec = spec
        cache, counters = layers.init_cache(policy, spec, seed)
        self.cache, self.counters = nnx.Cache(cache), nnx.Cache(counters)

    def __call__(
        self,
        query: Float[Array, "B T H_q D"],
        key: Float[Array, "B T H_kv D"],
        value: Float[Array, "B T H_kv D"],
        *,
        mask: Bool[Array, "B #H T T"] | None = None,
        **unused: Any,
    ) -> Float[Array, "B T H_q D"]:
        """Processes a prompt of several tokens or appends one token per row; see `prefill` and `step`.

        Args:
            query: queries.
            mask: attention mask of a prompt; tokens that no token sees are padding. None for prompts without padding.
            **unused: further arguments of `nnx.MultiHeadAttention`, such as `is_causal`; attention is causal.

        Returns:
            The attention output.
        """
        if query.shape[1] == 1:
            return self.step(query, key, value)
        return self.prefill(query, key, value, layers.prompt_lengths(query, mask))

    def prefill(
        self,
        query: Float[Array, "B T H_q D"],
        key: Float[Array, "B T H_kv D"],
        value: Float[Array, "B T H_kv D"],
        lengths: Int[Array, "B"] | None = None,
    ) -> Float[Array, "B T H_q D"]:
        """Writes a prompt into the empty cache and returns its exact attention to itself.

        Args:
            query: queries of the prompt, left-aligned.
            lengths: number of tokens of each row; None for all.

        Returns:
            The attention output.
        """
        lengths = layers.prompt_lengths(query, None) if lengths is None else lengths
        cache, counters = self.cache.get_value(), self.counters.get_value()
        cache, counters, _ = layers.prefill(cache, counters, query, key, value, lengths)
        self.cache.set_value(cache)
        self.counters.set_value(counters)
        return layers.attend_to_prompt(self.spec, query, key, value)

    def step(
        self,
        query: Float[Array, "B T H_q D"],
        key: Float[Array, "B T H_kv D"],
        value: Float[Array, "B T H_kv D"],
        lengths: Int[Array, "B"] | None = None,
    ) -> Float[Array, "B T H_q D"]:
        """Appends tokens and returns their attention to the cache.

        Args:
            query: queries of the tokens.
            lengths: number of tokens of each row; None for all.

        Returns:
            The attention output, in the dtype of the queries.
        """
        cache, counters = self.cache.get_value(), self.counters.get_value()
        attended, cache, counters = kvjax.step(cache, counters, query, key, value, lengths)
        self.cache.set_value(cache)
        self.counters.set_value(counters)
        return attended.astype(query.dtype)

    @property
    def num_tokens(self) -> Int[Array, "B"]:
        """Number of tokens that every row has received."""
        return self.counters.get_value().num_tokens
