"""A compressed KV cache for attention layers in Flax Linen.

    layer = nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=KVCache(spec, kvjax.SnapKV(1024)))
    variables = layer.init(key, prompt)
    attended, updated = layer.apply(variables, prompt, mask=mask, mutable="cache")

`KVCache` is a drop-in `attention_fn` of `nn.MultiHeadDotProductAttention`. Other attention layers call it with their
queries, keys and values, with RoPE applied. The cache and its counters are a variable of the collection "cache".
"""

import flax.linen as nn
from jaxtyping import Array, Bool, Float

import kvjax
from kvjax.policy import Policy
from kvjax_models.adapters import layers


class KVCache(nn.Module):
    """The cache of one layer.

    Attributes:
        spec: spec of the layer.
        policy: policy of the model.
        seed: seed of the policy's random numbers.
    """

    spec: kvjax.CacheSpec
    policy: Policy
    seed: int = 0

    @nn.compact
    def __call__(
        self,
        query: Float[Array, "B T H_q D"],
        key: Float[Array, "B T H_kv D"],
        value: Float[Array, "B T H_kv D"],
        mask: Bool[Array, "B #H T T"] | None = None,
    ) -> Float[Array, "B T H_q D"]:
        """Processes a prompt of several tokens into the empty cache, or appends one token per row.

        Initialization creates an empty cache.

        Args:
            query: queries; those of a prompt are left-aligned.
            mask: attention mask of a prompt; tokens that no token sees are padding. None for prompts without padding.
                Attention is causal, whatever the mask.

        Returns:
            The attention output, in the dtype of the queries.
        """
        variable = self.variable("cache", "kv", layers.init_cache, self.policy, self.spec, self.seed)
        cache, counters = variable.value
        if query.shape[1] == 1 and not self.is_initializing():
            attended, cache, counters = kvjax.step(cache, counters, query, key, value)
            variable.value = cache, counters
            return attended.astype(query.dtype)
        if not self.is_initializing():
            lengths = layers.prompt_lengths(query, mask)
            cache, counters, _ = layers.prefill(cache, counters, query, key, value, lengths)
            variable.value = cache, counters
        return layers.attend_to_prompt(self.spec, query, key, value)
