"""Functions that all adapters share: caches of all layers, prompts, and repetitions of prompts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

import kvjax
from kvjax import rope
from kvjax.budget import Budget
from kvjax.cache import layer_policy, scale_queries
from kvjax.policy import Policy, RepeatedPrompt
from kvjax.registry import AnyPolicy, PolicyChoice, resolve_policy
from kvjax.spec import MAX_TOKENS
from kvjax_models.model.exact_attention import PromptAndTexts, attend_repetitions, chunk_attention
from kvjax_models.runner.repetition import BLOCK
from kvjax_models.runner.state import check_seed, row_keys, row_seeds


@functools.lru_cache(maxsize=64)
def fit_policy(policy: AnyPolicy, budget: int | str | Budget | None, spec: kvjax.CacheSpec, tokens: int) -> Policy:
    """Returns the policy of all layers.

    Args:
        spec: spec of any layer; the budget applies to layers without a sliding window.
        tokens: tokens of the full cache that a share refers to.
    """
    return resolve_policy(policy, budget, dataclasses.replace(spec, window=None), tokens)


def check_policy(policy: AnyPolicy, budget: int | str | Budget | None, spec: kvjax.CacheSpec) -> None:
    """Refuses an invalid policy or budget before the sizes of caches are known.

    Args:
        spec: spec of any layer.
    """
    if isinstance(policy, str) and PolicyChoice.parse(policy).budget is not None and budget is None:
        return
    if budget is not None:
        Budget.of(budget)  # any valid budget is replaced by one that fits every policy
    fit_policy(policy, None if budget is None else MAX_TOKENS, spec, 1)


def init_caches(
    policy: Policy, specs: Sequence[kvjax.CacheSpec], seed: int = 0
) -> tuple[tuple[kvjax.Cache, kvjax.Counters], ...]:
    """Returns an empty cache and its counters per layer.

    The caches are equal to those of `kvjax_models.LanguageModel` for the same seed. All layers compact
    together, as often as the layer with the smallest `compact_every` needs.

    Args:
        specs: spec of every layer.
        seed: seed of the policy's random numbers.
    """
    policies = [layer_policy(policy, spec) for spec in specs]
    slots = min(specs[0].max_new_tokens, *(one.compact_every for one in policies))
    keys, fold_in = row_keys(row_seeds(specs[0].batch, seed))[0], jax.vmap(jax.random.fold_in, (0, None))
    return tuple(
        kvjax.init(policy, dataclasses.replace(spec, staging_slots=slots), fold_in(keys, number))
        for number, (policy, spec) in enumerate(zip(policies, specs, strict=True))
    )


def init_cache(policy: Policy, spec: kvjax.CacheSpec, seed: int = 0) -> tuple[kvjax.Cache, kvjax.Counters]:
    """Returns the empty cache of a layer that is used alone, and its counters.

    Args:
        seed: seed of the policy's random numbers.
    """
    layer_key = jax.random.fold_in(jax.random.key(check_seed(seed)), spec.layer)
    return kvjax.init(policy, spec, jax.random.split(layer_key, spec.batch))


def align_right(x: Float[Array, "B T H D"], lengths: Int[Array, "B"]) -> Float[Array, "B T H D"]:
    """Moves the first `lengths[b]` tokens of every row to its end; the opposite of `align_left`."""
    return jax.vmap(lambda row, length: jnp.roll(row, -length, axis=0))(x, lengths)


def align_left(x: Float[Array, "B T H D"], lengths: Int[Array, "B"]) -> Float[Array, "B T H D"]:
    """Moves the last `lengths[b]` tokens of every row to its start; the opposite of `align_right`."""
    return align_right(x, -lengths)


def prompt_lengths(query: Float[Array, "B T H D"], mask: Bool[Array, "B #H T T"] | None) -> Int[Array, "B"]:
    """Returns the number of tokens of every row of a left-aligned prompt.

    Args:
        query: queries of the prompt.
        mask: attention mask; tokens that no token sees are padding. None for no padding.
    """
    if mask is None:
        return jnp.full(query.shape[0], query.shape[1], jnp.int32)
    # Any token, because masks of `make_attention_mask` hide all tokens from padding, also from the last one.
    visible = jnp.broadcast_to(jnp.any(mask[:, 0], axis=1), query.shape[:2])
    return jnp.sum(visible, axis=-1, dtype=jnp.int32)


def prefill(
    cache: kvjax.Cache,
    counters: kvjax.Counters,
    query: Float[Array, "B T H_q D"],
    key: Float[Array, "B T H_kv D"],
    value: Float[Array, "B T H_kv D_v"],
    lengths: Int[Array, "B"],
    layer_carry: Shaped[Array, "B H_kv *N"] | None = None,
    repeated: RepeatedPrompt | None = None,
) -> tuple[kvjax.Cache, kvjax.Counters, Shaped[Array, "B H_kv *N"] | None]:
    """Writes a layer's prompt into its cache, with the inputs that the policy requires.

    Args:
        query: queries of the prompt, left-aligned.
        key: keys of the prompt, left-aligned.
        value: values of the prompt, left-aligned.
        lengths: number of tokens of each row.
        layer_carry: third result for the previous layer.
        repeated: queries and keys of a repetition of the prompt.

    Returns:
        The cache, the counters, and the carry for the next layer.

    Raises:
        ValueError: if the policy needs predicted scores, a repetition of the prompt and `repeated` is None, or
            gradients of it.
    """
    requires = cache.policy.requires
    if requires.predicted_scores:
        raise ValueError(
            f"{type(cache.policy).__name__} needs predicted scores of the prompt's tokens, which adapters do not "
            "compute; choose another policy, such as kvjax.SnapKV"
        )
    if requires.repetition is None:
        repeated = None
    elif repeated is None:
        raise ValueError(
            f"{type(cache.policy).__name__} needs a second pass over the prompt, which this adapter does not run; "
            "choose another policy"
        )
    elif requires.repetition.weights != "none":
        raise ValueError(
            f"{type(cache.policy).__name__} weighs a repetition of the prompt by gradients or norms, which adapters do "
            "not compute; choose another policy, such as kvjax.KVzip"
        )
    queries = kvjax.prompt_queries(cache.policy, align_right(query, lengths))
    return kvjax.prefill(cache, counters, key, value, lengths, queries, layer_carry, repeated=repeated)


class PromptLayers:
    """The layers of a host model in order, which pass policies' carries from one prefill to the next."""

    def __init__(self) -> None:
        self.carry: Array | None = None

    def prefill(
        self, number: int, *prompt: Any, repeated: RepeatedPrompt | None = None
    ) -> tuple[kvjax.Cache, kvjax.Counters]:
        """Writes a layer's prompt into its cache with the carry of the previous layer.

        Args:
            number: number of the layer.
            *prompt: the arguments of the function `prefill` from `cache` to `lengths`.
            repeated: queries and keys of a repetition of the prompt.

        Returns:
            The cache and the counters.
        """
        options: Any = {"layer_carry": self.carry if number else None, "repeated": repeated}
        cache, counters, self.carry = prefill(*prompt, **options)
        return cache, counters


def rope_frequencies(rotate: Callable[[Array, Array], Array], head_dim: int) -> tuple[float, ...]:
    """Returns the angle per position of each pair of dimensions (i, i + D/2), from a host's RoPE function.

    Args:
        rotate: function of vectors [1, 1, 1, D] and positions [1, 1].
    """
    with jax.ensure_compile_time_eval():
        first = jnp.asarray(np.arange(head_dim) < head_dim // 2, jnp.float32)
        cos, sin = jnp.split(rotate(first[None, None, None], jnp.ones((1, 1), jnp.int32))[0, 0, 0], 2)
        return tuple(np.asarray(jnp.arctan2(sin, cos), np.float32).tolist())


def attend_to_prompt(
    spec: kvjax.CacheSpec,
    query: Float[Array, "B T H_q D"],
    key: Float[Array, "B T H_kv D"],
    value: Float[Array, "B T H_kv D"],
) -> Float[Array, "B T H_q D"]:
    """Returns the exact causal attention of a prompt to itself.

    Args:
        spec: the layer's spec, with its scale, soft cap and sliding window.
        query: queries of the prompt, left-aligned.
        key: keys of the prompt, left-aligned.
        value: values of the prompt, left-aligned.
    """
    if spec.logit_cap is None:
        window = None if spec.window is None else (spec.window - 1, 0)
        return jax.nn.dot_product_attention(
            query, key, value, scale=spec.scale, is_causal=True, local_window_size=window
        )
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    scaled = scale_queries(spec, query)
    return chunk_attention(scaled, keys, values, 0, window=spec.window, logit_cap=spec.logit_cap)


class Repetitions(NamedTuple):
    """Texts that repeat the prompts of a batch (`runner.repetition.make_repetitions`)."""

    tokens: Int[np.ndarray, "B C R"]
    lengths: Int[np.ndarray, "B C"]


def attend_to_repetitions(
    cache: kvjax.Cache,
    query: Float[Array, "B CR H_q D"],
    prompt: tuple[Float[Array, "B T H_kv D"], Float[Array, "B T H_kv D"]],
    texts: tuple[Float[Array, "B CR H_kv D"], Float[Array, "B CR H_kv D"]],
    lengths: Int[Array, "B"],
    sizes: Int[Array, "B C"],
) -> tuple[Float[Array, "B CR H_q D"], RepeatedPrompt]:
    """Computes the attention of texts that each follow the prompt independently.

    Args:
        cache: the layer's cache.
        query: queries of the texts, padded to a multiple of `repetition.BLOCK` each.
        prompt: keys and values of the prompt, left-aligned.
        texts: keys and values of the texts.
        lengths: number of tokens of each prompt.
        sizes: number of tokens of each text.

    Returns:
        The attention output, and the layer's projections of the texts.
    """
    spec = cache.spec
    attended, received = attend_repetitions(
        scale_queries(spec, query),
        PromptAndTexts._make([*(x.swapaxes(1, 2) for x in (*prompt, *texts)), lengths, sizes]),
        jnp.arange(query.shape[1] // BLOCK),
        repeat=cache.policy.requires.repetition,
        window=spec.window,
        logit_cap=spec.logit_cap,
    )
    return attended, RepeatedPrompt(query, texts[0], sizes, received)


def shift_rope(
    x: Float[Array, "B T H D"], offsets: Int[Array, "B T"], frequencies: tuple[float, ...]
) -> Float[Array, "B T H D"]:
    """Rotates vectors with RoPE to other positions.

    Args:
        x: rotated vectors.
        offsets: new position minus the old one.
        frequencies: angle per position of each pair of dimensions.

    Returns:
        The vectors at the new positions.
    """
    return rope.rotate(x, *rope.rotation(offsets, jnp.asarray(frequencies)))
