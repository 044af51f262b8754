"""Presses of kvpress with the policies of kvjax that must select the same tokens.

Only `kvpress_mask` needs torch, transformers and kvpress, when it is called.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.combinators.ada_kv import AdaKV, AdaKVState
from kvjax.methods.top_k.kvgrad import KVgrad
from kvjax.methods.top_k.kvzip import KVzip
from kvjax.methods.top_k.leverage_scores import LeverageScores
from kvjax.policy import Policy
from kvjax_models.formats import huggingface
from kvjax_models.model.llama import Llama
from kvjax_models.runner import prefill
from kvjax_models.runner.state import cache_specs
from tests.models import families
from tests.models.support import GOLDEN

CHECKPOINT = GOLDEN / families.LLAMA31.name
TOKENS = 96


class Run(NamedTuple):
    """A press with its policy, for prompts of `TOKENS` tokens."""

    make_press: Callable[[Any], Any]  # takes the module kvpress
    policy: Policy
    attention: str = "sdpa"  # implementation of transformers


def budget(ratio: float) -> int:
    """Returns the number of tokens that remain at a compression ratio."""
    return int(TOKENS * (1 - ratio))


# Token ids of the texts that kvpress's KVzip adds around a repetition.
PHRASES = {
    "\n\nRepeat the previous context exactly.": (7, 21, 13, 40),
    "\n\nRepeat the part of the previous context exactly, starting with": (7, 33, 50),
    "\n": (2,),
    "": (),
}
_KVZIP = dict(zip(("instruction", "continuation", "suffix"), PHRASES.values(), strict=False))


def _scored(make_press: Callable[[Any], Any], policy: Callable[..., Policy], ratio: float, **settings: Any) -> Run:
    """Returns the run of a policy that keeps the tokens with the highest scores and reserves slots for decoding."""
    return Run(make_press, policy(budget(ratio), **settings, reserve_decode_slots=True))


def _pooled(make_press: Callable[[Any], Any], policy: Callable[..., Policy], ratio: float, **settings: Any) -> Run:
    """Returns the run of a policy whose heads share the budget of their layer."""
    run = _scored(make_press, policy, ratio, **_KVZIP, **settings)
    return run._replace(policy=AdaKV(run.policy, 0.0))


_LEVERAGE = _scored(lambda kvpress: _leverage_press(kvpress), LeverageScores, 0.5, sinks=0)
RUNS = {
    "streaming_llm": Run(
        lambda kvpress: kvpress.StreamingLLMPress(0.5, n_sink=4), kvjax.StreamingLLM(budget(0.5), sinks=4)
    ),
    "snapkv": Run(
        lambda kvpress: kvpress.SnapKVPress(0.75, window_size=8, kernel_size=5),
        kvjax.SnapKV(budget(0.75), window_size=8, kernel_size=5),
    ),
    # The default window of kvpress.
    "snapkv_defaults": Run(
        lambda kvpress: kvpress.SnapKVPress(0.25), kvjax.SnapKV(budget(0.25), window_size=64, kernel_size=5)
    ),
    "pyramidkv": Run(
        lambda kvpress: kvpress.PyramidKVPress(0.75, window_size=8, beta=2),
        kvjax.PyramidKV(budget(0.75), window_size=8, beta=2, variant="kvpress"),
    ),
    # The default beta falls back to SnapKV's number of tokens in every layer.
    "pyramidkv_flat": Run(
        lambda kvpress: kvpress.PyramidKVPress(0.75, window_size=8),
        kvjax.PyramidKV(budget(0.75), window_size=8, variant="kvpress"),
    ),
    "h2o": Run(
        lambda kvpress: kvpress.ObservedAttentionPress(0.5), kvjax.H2O(budget(0.5), recent=0, average=True), "eager"
    ),
    "leverage_scores": _LEVERAGE,
    "ada_kv": Run(lambda kvpress: kvpress.AdaKVPress(_leverage_press(kvpress), 0.4), AdaKV(_LEVERAGE.policy, 0.4)),
    "kvzip": _pooled(lambda kvpress: kvpress.KVzipPress(0.5, layerwise=True), KVzip, 0.5),
    "kvzip_in_chunks": _pooled(
        lambda kvpress: kvpress.KVzipPress(0.75, layerwise=True, chunk_size=40), KVzip, 0.75, chunk_tokens=40
    ),
    "kvzip_plus": _pooled(
        lambda kvpress: kvpress.KVzipPress(0.5, layerwise=True, kvzip_plus_normalization=True, chunk_size=40),
        KVzip, 0.5, chunk_tokens=40, plus=True,
    ),
    "kvgrad": _pooled(
        lambda kvpress: kvpress.KVgradPress(0.5, layerwise=True, chunk_size=40), KVgrad, 0.5, chunk_tokens=40
    ),
    "knorm": _scored(lambda kvpress: kvpress.KnormPress(0.5), kvjax.Knorm, 0.5, sinks=0),
    "keydiff": _scored(lambda kvpress: kvpress.KeyDiffPress(0.5), kvjax.KeyDiff, 0.5, sinks=0),
    # 32 tokens at the start and the end, and 4 of each of 4 partitions: partitions have no ties.
    "lagkv": _scored(lambda kvpress: kvpress.LagKVPress(0.5, lag_size=16), kvjax.LagKV, 0.5, lag_size=16),
    "lagkv_across_partitions": _scored(
        lambda kvpress: kvpress.LagKVPress(0.5, lag_size=16, cross_scoring=True),
        kvjax.LagKV, 0.5, lag_size=16, cross_scoring=True,
    ),
    # Too short for two partitions: the last tokens are selected.
    "lagkv_of_a_short_prompt": _scored(lambda kvpress: kvpress.LagKVPress(0.5), kvjax.LagKV, 0.5),
    "tova": _scored(lambda kvpress: kvpress.TOVAPress(0.75), kvjax.TOVA, 0.75, sinks=0),
    "expected_attention": _scored(lambda kvpress: kvpress.ExpectedAttentionPress(0.5), kvjax.ExpectedAttention, 0.5),
    "expected_attention_of_means": _scored(
        lambda kvpress: kvpress.ExpectedAttentionPress(0.75, n_future_positions=8, use_covariance=False, epsilon=0.01),
        kvjax.ExpectedAttention, 0.75, n_future_positions=8, use_covariance=False, epsilon=0.01,
    ),
    "cur": _scored(lambda kvpress: kvpress.CURPress(0.5), kvjax.CUR, 0.5),
    "cur_of_sums": _scored(
        lambda kvpress: kvpress.CURPress(0.5, leverage_type="kv_avg", use_local_approximation=False),
        kvjax.CUR, 0.5, leverage_type="kv_avg", local_window_size=None,
    ),
    # The chunks divide the prompt, because padding would attend in kvpress.
    "compactor": _scored(
        lambda kvpress: kvpress.CompactorPress(0.5, chunk_size=42, sketch_dimension=_head_dim()),
        kvjax.Compactor, 0.5, chunk=42,
    ),
}  # fmt: skip


def _leverage_press(kvpress: Any) -> Any:
    return kvpress.LeverageScorePress(0.5, sketch_dimension=_head_dim())


def _head_dim() -> int:
    return huggingface.load_config(CHECKPOINT).head_dim


def kvpress_mask(run: Run, directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Returns which tokens, [layers, B, H_kv, T], a press selects.

    Its Gaussian sketch is replaced by the identity, and its tokenizer by `PHRASES`.
    """
    from unittest import mock

    import kvpress
    import torch
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": run.attention}
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()

    class Tokenizer:
        chat_template = None

        @staticmethod
        def encode(text: str, **_: Any) -> Any:
            return torch.tensor([PHRASES[text]], dtype=torch.long)

    def identity(*shape: int, **_: Any) -> Any:
        return torch.eye(shape[-1]).expand(shape) * shape[-1] ** 0.5

    def process(row: np.ndarray) -> list[np.ndarray]:
        """Returns every layer's keys, [H_kv, S, D], after a prompt."""
        cache = transformers.DynamicCache()
        model.model(input_ids=torch.from_numpy(row[None]), past_key_values=cache)
        return [layer.keys[0].numpy() for layer in cache.layers]

    rows = []
    with (
        mock.patch("kvpress.presses.kvzip_press.AutoTokenizer.from_pretrained", lambda *_: Tokenizer),
        mock.patch("torch.randn", identity),
        torch.no_grad(),
    ):
        for row in tokens:
            all_keys = process(row)
            with run.make_press(kvpress)(model):
                masks = [_contained(*layer) for layer in zip(process(row), all_keys, strict=True)]
            for mask, layer in zip(masks, model.model.layers, strict=True):
                masked = getattr(layer.self_attn, "masked_key_indices", None)
                if masked is not None:
                    mask[masked[1].numpy(), masked[2].numpy()] = False
                layer.self_attn.masked_key_indices = None
            rows.append(masks)
    return np.array(rows).swapaxes(0, 1)


def kvjax_mask(policy: Policy, directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Returns which tokens, [layers, B, H_kv, T], a policy selects."""
    model, batch = _load_model(directory), len(tokens)
    specs = cache_specs(model, batch=batch, max_prompt_tokens=TOKENS, max_new_tokens=8)
    lengths = jnp.full(batch, TOKENS, jnp.int32)
    num_queries = [policy.requires.num_prompt_queries(TOKENS)] * len(specs)
    layers = prefill.prefill_layers(
        model, tokens.astype(np.int32), lengths, TOKENS, num_queries, policy.requires.repetition
    )
    masks = []
    for spec, layer in zip(specs, layers, strict=True):
        empty, counters = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), batch))
        cache, *_ = prefill.compress_layer(jax.tree.map(jnp.copy, empty), counters, layer, lengths)
        store = getattr(cache.state, "window", getattr(cache.state, "pool", cache.state))
        keys = np.asarray(store.keys)
        if isinstance(cache.state, AdaKVState):
            keys = keys.reshape(batch, 1, -1, keys.shape[3])  # all heads share one store
        masks.append([_contained(*row) for row in zip(keys, np.asarray(layer.keys).swapaxes(1, 2), strict=True)])
    return np.array(masks)


@functools.cache
def _load_model(directory: pathlib.Path) -> Llama:
    return huggingface.load_model(directory, jnp.float32)


def _contained(keys: np.ndarray, all_keys: np.ndarray) -> np.ndarray:
    """Returns which keys [H_kv, T] of a prompt, [H_kv, T, D], a cache, [H_kv, S, D], contains bitwise."""
    return (all_keys[:, :, None] == keys[:, None]).all(-1).any(-1)
