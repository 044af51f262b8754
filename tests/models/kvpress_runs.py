"""What kvpress's presses are compared on, with the same settings in kvjax's words.

Only `kept_by_kvpress` needs torch, transformers and kvpress, when it is called.
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
from kvjax.policies.kvzip import KVzip
from kvjax.policies.leverage_scores import LeverageScores
from kvjax.policy import Policy
from kvjax_models.formats import huggingface
from kvjax_models.generation import prefill
from kvjax_models.generation.state import cache_specs
from tests.models import families

CHECKPOINT = pathlib.Path(__file__).parents[1] / "golden" / "transformers" / families.LLAMA31.name
TOKENS = 96
# Scores nearer to each other than this are no choice that two computations must agree on.
LEAST_MARGIN = 1e-4


class Run(NamedTuple):
    """A press, and the policy that should keep what it keeps of prompts of `TOKENS` tokens."""

    press: str  # a class of kvpress
    options: dict[str, Any]
    policy: Policy


def budget(ratio: float) -> int:
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
    # kvpress's own window.
    "snapkv_defaults": Run(
        "SnapKVPress", {"compression_ratio": 0.25}, kvjax.SnapKV(budget(0.25), window_size=64, kernel_size=5)
    ),
    "pyramidkv": Run(
        "PyramidKVPress",
        {"compression_ratio": 0.75, "window_size": 8, "beta": 2},
        kvjax.PyramidKV(budget(0.75), window_size=8, beta=2, variant="kvpress"),
    ),
    # Falls back to SnapKV's number in every layer.
    "pyramidkv_flat": Run(
        "PyramidKVPress",
        {"compression_ratio": 0.75, "window_size": 8},
        kvjax.PyramidKV(budget(0.75), window_size=8, variant="kvpress"),
    ),
    "h2o": Run("ObservedAttentionPress", {"compression_ratio": 0.5}, kvjax.H2O(budget(0.5), recent=0, average=True)),
}


class Scored(NamedTuple):
    """A press of several parts, which may hold everything and mask what it evicts, and the policy for it."""

    make: Callable[[Any], Any]  # of the package kvpress
    policy: Policy


# What kvpress's tokenizer makes of what it says around a repetition.
PHRASES = {
    "\n\nRepeat the previous context exactly.": (7, 21, 13, 40),
    "\n\nRepeat the part of the previous context exactly, starting with": (7, 33, 50),
    "\n": (2,),
    "": (),
}
_AGAIN = dict(zip(("instruction", "continuation", "suffix"), PHRASES.values(), strict=False)) | {
    "reserve_decode_slots": True
}
_LEVERAGE = LeverageScores(budget(0.5), sinks=0, reserve_decode_slots=True)
SCORED_RUNS = {
    "leverage_scores": Scored(lambda kvpress: _leverage(kvpress), _LEVERAGE),
    "ada_kv": Scored(lambda kvpress: kvpress.AdaKVPress(_leverage(kvpress), 0.4), AdaKV(_LEVERAGE, 0.4)),
    "kvzip": Scored(lambda kvpress: kvpress.KVzipPress(0.5, layerwise=True), AdaKV(KVzip(budget(0.5), **_AGAIN), 0.0)),
    "kvzip_in_chunks": Scored(
        lambda kvpress: kvpress.KVzipPress(0.75, layerwise=True, chunk_size=40),
        AdaKV(KVzip(budget(0.75), chunk_tokens=40, **_AGAIN), 0.0),
    ),
    "knorm": Scored(
        lambda kvpress: kvpress.KnormPress(0.5), kvjax.Knorm(budget(0.5), sinks=0, reserve_decode_slots=True)
    ),
    "keydiff": Scored(
        lambda kvpress: kvpress.KeyDiffPress(0.5), kvjax.KeyDiff(budget(0.5), sinks=0, reserve_decode_slots=True)
    ),
    # 32 tokens of sinks and end, and 4 of each of 4 partitions: between partitions there is no tie to break.
    "lagkv": Scored(
        lambda kvpress: kvpress.LagKVPress(0.5, lag_size=16),
        kvjax.LagKV(budget(0.5), lag_size=16, reserve_decode_slots=True),
    ),
    "lagkv_across_partitions": Scored(
        lambda kvpress: kvpress.LagKVPress(0.5, lag_size=16, cross_scoring=True),
        kvjax.LagKV(budget(0.5), lag_size=16, cross_scoring=True, reserve_decode_slots=True),
    ),
    # Too short for two partitions: the last tokens stay.
    "lagkv_of_a_short_prompt": Scored(
        lambda kvpress: kvpress.LagKVPress(0.5), kvjax.LagKV(budget(0.5), reserve_decode_slots=True)
    ),
    "tova": Scored(
        lambda kvpress: kvpress.TOVAPress(0.75), kvjax.TOVA(budget(0.75), sinks=0, reserve_decode_slots=True)
    ),
    "expected_attention": Scored(
        lambda kvpress: kvpress.ExpectedAttentionPress(0.5),
        kvjax.ExpectedAttention(budget(0.5), reserve_decode_slots=True),
    ),
    "expected_attention_of_means": Scored(
        lambda kvpress: kvpress.ExpectedAttentionPress(0.75, n_future_positions=8, use_covariance=False, epsilon=0.01),
        kvjax.ExpectedAttention(
            budget(0.75), n_future_positions=8, use_covariance=False, epsilon=0.01, reserve_decode_slots=True
        ),
    ),
    "cur": Scored(lambda kvpress: kvpress.CURPress(0.5), kvjax.CUR(budget(0.5), reserve_decode_slots=True)),
    "cur_of_sums": Scored(
        lambda kvpress: kvpress.CURPress(0.5, leverage_type="kv_avg", use_local_approximation=False),
        kvjax.CUR(budget(0.5), leverage_type="kv_avg", local_window_size=None, reserve_decode_slots=True),
    ),
    # Whole chunks: the padding of another would attend in kvpress.
    "compactor": Scored(
        lambda kvpress: kvpress.CompactorPress(0.5, chunk_size=42, sketch_dimension=_head_dim()),
        kvjax.Compactor(budget(0.5), chunk=42, reserve_decode_slots=True),
    ),
}


def _leverage(kvpress: Any) -> Any:
    return kvpress.LeverageScorePress(0.5, sketch_dimension=_head_dim())


def _head_dim() -> int:
    return huggingface.load_model(CHECKPOINT).config.head_dim


def kept_by_scored_press(run: Scored, directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Which tokens [layers, B, H_kv, T] such a press keeps. Its Gaussian sketch is replaced by the identity, and its
    tokenizer by `PHRASES`."""
    from unittest import mock

    import kvpress
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()

    class Tokenizer:
        chat_template = None

        @staticmethod
        def encode(text: str, **_: Any) -> Any:
            return torch.tensor([PHRASES[text]], dtype=torch.long)

    def identity(*shape: int, **_: Any) -> Any:
        return torch.eye(shape[-1]).expand(shape) * shape[-1] ** 0.5

    kept_tokens = []
    with (
        mock.patch("kvpress.presses.kvzip_press.AutoTokenizer.from_pretrained", lambda *_: Tokenizer),
        mock.patch("torch.randn", identity),
        torch.no_grad(),
    ):
        for row in tokens:
            press, cache = run.make(kvpress), transformers.DynamicCache()
            whole = _cache(model, row, None)
            with press(model):
                model.model(input_ids=torch.from_numpy(row[None]), past_key_values=cache)
            layers = []
            for number, layer in enumerate(model.model.layers):
                masked = getattr(layer.self_attn, "masked_key_indices", None)
                kept = _matches(cache.layers[number].keys[0].numpy(), whole[number])
                if masked is not None:
                    kept[masked[1].numpy(), masked[2].numpy()] = False
                layer.self_attn.masked_key_indices = None
                layers.append(kept)
            kept_tokens.append(layers)
    return np.array(kept_tokens).swapaxes(0, 1)


def kept_by_kvpress(run: Run, directory: pathlib.Path, tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """Which tokens [layers, B, H_kv, T] a press keeps, and the least relative gap between the scores of a kept and a
    dropped token (infinite for scores that are only ones and zeros)."""
    import kvpress
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    press = getattr(kvpress, run.press)(**run.options)
    margins = [np.inf]

    def watched(score: Callable) -> Callable:
        def scored(module, hidden_states, keys, *others):
            scores = score(module, hidden_states, keys, *others)
            count = (
                press.get_layer_budget(module, keys.shape[2])
                if "beta" in vars(press)
                else budget(press.compression_ratio)
            )
            ordered = scores.sort(dim=-1, descending=True).values
            gap = (ordered[..., count - 1] - ordered[..., count]) / ordered[..., count - 1].abs()
            margins.append(float(gap.min()))
            return scores

        return scored

    press.score = watched(press.score)
    with torch.no_grad():
        whole, pressed = ([_cache(model, row, press_it) for row in tokens] for press_it in (None, press))
    found = [[_matches(k, f) for k, f in zip(one, full, strict=True)] for one, full in zip(pressed, whole, strict=True)]
    return np.stack(found, axis=1), min(margins)


def _cache(model, tokens: np.ndarray, press) -> list[np.ndarray]:
    """Every layer's keys [H_kv, S, D] after a prompt of one row."""
    import torch
    import transformers

    cache = transformers.DynamicCache()
    with press(model) if press else contextlib.nullcontext():
        model(torch.from_numpy(tokens[None]), past_key_values=cache)
    return [layer.keys[0].numpy() for layer in cache.layers]


def kept_by_kvjax(policy: Policy, directory: pathlib.Path, tokens: np.ndarray) -> np.ndarray:
    """Which tokens [layers, B, H_kv, T] a policy keeps of prompts."""
    model, batch = _model(directory), len(tokens)
    specs = cache_specs(model, batch=batch, max_prompt_tokens=TOKENS, max_new_tokens=8)
    lengths = jnp.full(batch, TOKENS, jnp.int32)
    asked = [policy.requires.num_prompt_queries(TOKENS)] * len(specs)
    layers = prefill.prefill_layers(model, tokens.astype(np.int32), lengths, TOKENS, asked, policy.requires.repetition)
    kept_tokens = []
    for spec, read in zip(specs, layers, strict=True):
        cache = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), batch))
        counters, cache = cache.counters, with_counters(cache, None)
        cache, *_ = prefill.compress_layer(jax.tree.map(jnp.copy, cache), counters, read, lengths)
        fresh = np.asarray(read.keys).swapaxes(1, 2)
        store = getattr(cache.state, "window", getattr(cache.state, "pool", cache.state))
        kept = np.asarray(store.keys)
        if isinstance(cache.state, AdaKVState):
            kept = kept.reshape(batch, 1, -1, kept.shape[3])  # all heads' in one
        kept_tokens.append([_matches(kept, full) for kept, full in zip(kept, fresh, strict=True)])
    return np.array(kept_tokens)


@functools.cache
def _model(directory: pathlib.Path):
    return huggingface.load_model(directory, jnp.float32)


def _matches(kept: np.ndarray, full: np.ndarray) -> np.ndarray:
    """Which keys [H_kv, T] of a whole prompt [H_kv, T, D] are among those kept [H_kv, S, D], number for number."""
    return (full[:, :, None] == kept[:, None]).all(-1).any(-1)
