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
from kvjax.policy import Policy
from models import checkpoint, generate, prefill
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
        kvjax.SnapKV(budget(0.75), window=8, kernel=5),
    ),
    # kvpress's own window.
    "snapkv_defaults": Run("SnapKVPress", {"compression_ratio": 0.25}, kvjax.SnapKV(budget(0.25), window=64, kernel=5)),
    "pyramidkv": Run(
        "PyramidKVPress",
        {"compression_ratio": 0.75, "window_size": 8, "beta": 2},
        kvjax.PyramidKV(budget(0.75), window=8, beta=2, variant="kvpress"),
    ),
    # Falls back to SnapKV's number in every layer.
    "pyramidkv_flat": Run(
        "PyramidKVPress",
        {"compression_ratio": 0.75, "window_size": 8},
        kvjax.PyramidKV(budget(0.75), window=8, variant="kvpress"),
    ),
    "h2o": Run("ObservedAttentionPress", {"compression_ratio": 0.5}, kvjax.H2O(budget(0.5), recent=0, average=True)),
}


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
    specs = generate.cache_specs(model, batch=batch, max_prompt=TOKENS, max_new=8)
    lengths = jnp.full(batch, TOKENS, jnp.int32)
    asked = [prefill.asked_queries(policy, TOKENS)] * len(specs)
    layers = prefill.read_layers(model, tokens.astype(np.int32), lengths, TOKENS, asked)
    kept_tokens = []
    for spec, read in zip(specs, layers, strict=True):
        cache = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), batch))
        cache, _ = prefill.compress_layer(jax.tree.map(jnp.copy, cache), read, lengths)
        fresh = np.asarray(read.keys).swapaxes(1, 2)
        store = getattr(cache.state, "window", cache.state)
        kept_tokens.append([_matches(kept, full) for kept, full in zip(np.asarray(store.keys), fresh, strict=True)])
    return np.array(kept_tokens)


@functools.cache
def _model(directory: pathlib.Path):
    return checkpoint.load(directory)


def _matches(kept: np.ndarray, full: np.ndarray) -> np.ndarray:
    """Which keys [H_kv, T] of a whole prompt [H_kv, T, D] are among those kept [H_kv, S, D], number for number."""
    return (full[:, :, None] == kept[:, None]).all(-1).any(-1)
