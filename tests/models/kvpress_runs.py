"""Presses of kvpress with the policies of kvjax that must select the same tokens.

Only `kvpress_mask` and `scored_press_mask` need torch, transformers and kvpress, when they are called.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import with_counters
from kvjax.combinators.ada_kv import AdaKV, AdaKVState
from kvjax.policies.kvgrad import KVgrad
from kvjax.policies.kvzip import KVzip
from kvjax.policies.leverage_scores import LeverageScores
from kvjax.policy import Policy
from kvjax_models.formats import huggingface
from kvjax_models.generation import prefill
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.llama import Llama
from tests.models import families
from tests.models.support import GOLDEN

CHECKPOINT = GOLDEN / families.LLAMA31.name
TOKENS = 96
MIN_MARGIN = 1e-4  # relative gap of scores below which two computations may select different tokens


class Run(NamedTuple):
    """A press with its policy, for prompts of `TOKENS` tokens."""

    press: str  # name of the class
    options: dict[str, Any]
    policy: Policy


def budget(ratio: float) -> int:
    """Returns the number of tokens that remain at a compression ratio."""
    return int(TOKENS * (1 - ratio))


RUNS = {
    "streaming_llm": Run(
        "StreamingLLMPress", {"compression_ratio": 0.5, "n_sink": 4}, kvjax.StreamingLLM(budget(0.5), sinks=4)
    ),
    "snapkv": Run(
        "SnapKVPress",
        {"compression_ratio": 0.75, "window_size": 8, "kernel_size": 5},
        kvjax.SnapKV(budget(0.75), window_size=8, kernel_size=5),
    ),
    # The default window of kvpress.
    "snapkv_defaults": Run(
        "SnapKVPress", {"compression_ratio": 0.25}, kvjax.SnapKV(budget(0.25), window_size=64, kernel_size=5)
    ),
    "pyramidkv": Run(
        "PyramidKVPress",
        {"compression_ratio": 0.75, "window_size": 8, "beta": 2},
        kvjax.PyramidKV(budget(0.75), window_size=8, beta=2, variant="kvpress"),
    ),
    # The default beta falls back to SnapKV's number of tokens in every layer.
    "pyramidkv_flat": Run(
        "PyramidKVPress",
        {"compression_ratio": 0.75, "window_size": 8},
        kvjax.PyramidKV(budget(0.75), window_size=8, variant="kvpress"),
    ),
    "h2o": Run("ObservedAttentionPress", {"compression_ratio": 0.5}, kvjax.H2O(budget(0.5), recent=0, average=True)),
}


class ScoredRun(NamedTuple):
    """A press built of several parts, which may mask the tokens that it evicts, with its policy."""

    make: Callable[[Any], Any]  # takes the module kvpress
    policy: Policy


# Token ids of the texts that kvpress's KVzip adds around a repetition.
PHRASES = {
    "\n\nRepeat the previous context exactly.": (7, 21, 13, 40),
    "\n\nRepeat the part of the previous context exactly, starting with": (7, 33, 50),
    "\n": (2,),
    "": (),
}
_KVZIP = dict(zip(("instruction", "continuation", "suffix"), PHRASES.values(), strict=False)) | {
    "reserve_decode_slots": True
}
_LEVERAGE = LeverageScores(budget(0.5), sinks=0, reserve_decode_slots=True)
SCORED_RUNS = {
    "leverage_scores": ScoredRun(lambda kvpress: _leverage_press(kvpress), _LEVERAGE),
    "ada_kv": ScoredRun(lambda kvpress: kvpress.AdaKVPress(_leverage_press(kvpress), 0.4), AdaKV(_LEVERAGE, 0.4)),
    "kvzip": ScoredRun(
        lambda kvpress: kvpress.KVzipPress(0.5, layerwise=True), AdaKV(KVzip(budget(0.5), **_KVZIP), 0.0)
    ),
    "kvzip_in_chunks": ScoredRun(
        lambda kvpress: kvpress.KVzipPress(0.75, layerwise=True, chunk_size=40),
        AdaKV(KVzip(budget(0.75), chunk_tokens=40, **_KVZIP), 0.0),
    ),
    "kvzip_plus": ScoredRun(
        lambda kvpress: kvpress.KVzipPress(0.5, layerwise=True, kvzip_plus_normalization=True, chunk_size=40),
        AdaKV(KVzip(budget(0.5), chunk_tokens=40, plus=True, **_KVZIP), 0.0),
    ),
    "kvgrad": ScoredRun(
        lambda kvpress: kvpress.KVgradPress(0.5, layerwise=True, chunk_size=40),
        AdaKV(KVgrad(budget(0.5), chunk_tokens=40, **_KVZIP), 0.0),
    ),
    "knorm": ScoredRun(
        lambda kvpress: kvpress.KnormPress(0.5), kvjax.Knorm(budget(0.5), sinks=0, reserve_decode_slots=True)
    ),
    "keydiff": ScoredRun(
        lambda kvpress: kvpress.KeyDiffPress(0.5), kvjax.KeyDiff(budget(0.5), sinks=0, reserve_decode_slots=True)
    ),
    # 32 tokens at the start and the end, and 4 of each of 4 partitions: partitions have no ties.
    "lagkv": ScoredRun(
        lambda kvpress: kvpress.LagKVPress(0.5, lag_size=16),
        kvjax.LagKV(budget(0.5), lag_size=16, reserve_decode_slots=True),
    ),
    "lagkv_across_partitions": ScoredRun(
        lambda kvpress: kvpress.LagKVPress(0.5, lag_size=16, cross_scoring=True),
        kvjax.LagKV(budget(0.5), lag_size=16, cross_scoring=True, reserve_decode_slots=True),
    ),
    # Too short for two partitions: the last tokens are selected.
    "lagkv_of_a_short_prompt": ScoredRun(
        lambda kvpress: kvpress.LagKVPress(0.5), kvjax.LagKV(budget(0.5), reserve_decode_slots=True)
    ),
    "tova": ScoredRun(
        lambda kvpress: kvpress.TOVAPress(0.75), kvjax.TOVA(budget(0.75), sinks=0, reserve_decode_slots=True)
    ),
    "expected_attention": ScoredRun(
        lambda kvpress: kvpress.ExpectedAttentionPress(0.5),
        kvjax.ExpectedAttention(budget(0.5), reserve_decode_slots=True),
    ),
    "expected_attention_of_means": ScoredRun(
        lambda kvpress: kvpress.ExpectedAttentionPress(0.75, n_future_positions=8, use_covariance=False, epsilon=0.01),
        kvjax.ExpectedAttention(
            budget(0.75), n_future_positions=8, use_covariance=False, epsilon=0.01, reserve_decode_slots=True
        ),
    ),
    "cur": ScoredRun(lambda kvpress: kvpress.CURPress(0.5), kvjax.CUR(budget(0.5), reserve_decode_slots=True)),
    "cur_of_sums": ScoredRun(
        lambda kvpress: kvpress.CURPress(0.5, leverage_type="kv_avg", use_local_approximation=False),
        kvjax.CUR(budget(0.5), leverage_type="kv_avg", local_window_size=None, reserve_decode_slots=True),
    ),
    # The chunks divide the prompt, because padding would attend in kvpress.
    "compactor": ScoredRun(
        lambda kvpress: kvpress.CompactorPress(0.5, chunk_size=42, sketch_dimension=_head_dim()),
        kvjax.Compactor(budget(0.5), chunk=42, reserve_decode_slots=True),
    ),
}


def _leverage_press(kvpress: Any) -> Any:
    return kvpress.LeverageScorePress(0.5, sketch_dimension=_head_dim())


def _head_dim() -> int:
    return huggingface.load_config(CHECKPOINT).head_dim


def scored_press_mask(run: ScoredRun, directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Returns which tokens, [layers, B, H_kv, T], a press selects.

    Its Gaussian sketch is replaced by the identity, and its tokenizer by `PHRASES`.
    """
    from unittest import mock

    import kvpress
    import torch
    import transformers

    model = _load_transformers(directory, "sdpa")

    class Tokenizer:
        chat_template = None

        @staticmethod
        def encode(text: str, **_: Any) -> Any:
            return torch.tensor([PHRASES[text]], dtype=torch.long)

    def identity(*shape: int, **_: Any) -> Any:
        return torch.eye(shape[-1]).expand(shape) * shape[-1] ** 0.5

    rows = []
    with (
        mock.patch("kvpress.presses.kvzip_press.AutoTokenizer.from_pretrained", lambda *_: Tokenizer),
        mock.patch("torch.randn", identity),
        torch.no_grad(),
    ):
        for row in tokens:
            press, cache = run.make(kvpress), transformers.DynamicCache()
            all_keys = _cached_keys(model, row, None)
            with press(model):
                model.model(input_ids=torch.from_numpy(row[None]), past_key_values=cache)
            masks = []
            for number, layer in enumerate(model.model.layers):
                mask = _contained(cache.layers[number].keys[0].numpy(), all_keys[number])
                masked = getattr(layer.self_attn, "masked_key_indices", None)
                if masked is not None:
                    mask[masked[1].numpy(), masked[2].numpy()] = False
                layer.self_attn.masked_key_indices = None
                masks.append(mask)
            rows.append(masks)
    return np.array(rows).swapaxes(0, 1)


def kvpress_mask(run: Run, directory: pathlib.Path, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """Returns which tokens, [layers, B, H_kv, T], a press selects, and the margin of its scores.

    The margin is the minimum relative gap between the scores of a selected and of another token; infinite for scores
    that are 0 or 1.
    """
    import kvpress
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = _load_transformers(directory, "eager")
    press = getattr(kvpress, run.press)(**run.options)
    margins, score = [np.inf], press.score

    def record_margin(module, hidden_states, keys, *args):
        scores = score(module, hidden_states, keys, *args)
        by_layer = "beta" in vars(press)
        count = press.get_layer_budget(module, keys.shape[2]) if by_layer else budget(press.compression_ratio)
        ordered = scores.sort(dim=-1, descending=True).values
        gap = (ordered[..., count - 1] - ordered[..., count]) / ordered[..., count - 1].abs()
        margins.append(float(gap.min()))
        return scores

    press.score = record_margin
    rows = []
    with torch.no_grad():
        for row in tokens:
            keys, all_keys = _cached_keys(model, row, press), _cached_keys(model, row, None)
            rows.append([_contained(*layer) for layer in zip(keys, all_keys, strict=True)])
    return np.stack(rows, axis=1), min(margins)


def _load_transformers(directory: pathlib.Path, attention: str) -> Any:
    import torch
    import transformers

    options = {"dtype": torch.float32, "attn_implementation": attention}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


def _cached_keys(model: Any, tokens: np.ndarray, press: Any) -> list[np.ndarray]:
    """Returns every layer's keys, [H_kv, S, D], after a prompt of one row."""
    import torch
    import transformers

    cache = transformers.DynamicCache()
    with press(model) if press else contextlib.nullcontext():
        model(torch.from_numpy(tokens[None]), past_key_values=cache)
    return [layer.keys[0].numpy() for layer in cache.layers]


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
        cache = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), batch))
        counters, cache = cache.counters, with_counters(cache, None)
        cache, *_ = prefill.compress_layer(jax.tree.map(jnp.copy, cache), counters, layer, lengths)
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
