"""Measures memory and time per token of a keras-hub model with its own cache and with compressed ones, in one run.

    make keras-hub
    python -m experiments.keras_hub_speed --context_tokens 4000 --policy subgen_mean --budget 50%

The model has random weights of the Llama family. Caches alternate in one process, so ratios compare neighbors. Time
per token is the difference of two calls of `generate` with different numbers of new tokens, over their difference.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import dataclasses
import pathlib
import time
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import Figure, figure, print_figures, write_figures

KERAS_HUB = "keras-hub"  # its own cache, among the names of policies


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a measurement."""

    policy: tuple[str, ...] = repeatable("exact", "snapkv", "subgen_mean")
    budget: str = "50%"  # Of a full bfloat16 cache, which is 25% of keras-hub's float32 cache.
    context_tokens: int = 2000  # Tokens of the prompt.
    layers: int = 4  # Layers of the model.
    width: int = 512  # Hidden size; query heads have 64 dimensions, and two of them share a KV head.
    new_tokens: int = 256  # Tokens of the longer call; the shorter one generates a quarter.
    repetitions: int = 3  # Timed calls of each length.
    output_dir: str = "build/keras_hub"  # Directory of the figures.


def measure(options: Options) -> list[Figure]:
    """Returns memory and time of every cache.

    Args:
        options: the options.

    Returns:
        One figure per cache and metric.
    """
    causal_lm, names = _make_model(options), (KERAS_HUB, *options.policy)
    lengths = [options.context_tokens + new for new in (options.new_tokens // 4, options.new_tokens)]
    tokens = np.random.default_rng(0).integers(3, 1000, (1, lengths[-1])).astype(np.int32)
    inputs = [
        {"token_ids": tokens[:, :length], "padding_mask": np.arange(length)[None] < options.context_tokens}
        for length in lengths
    ]
    functions = {name: _generate_function(causal_lm, name, options) for name in names}
    seconds: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    for repetition in range(options.repetitions + 1):  # the first one compiles
        for name in names:
            for number, batch in enumerate(inputs):
                elapsed = _time_call(functions[name], batch)
                if repetition:
                    seconds[name][number].append(elapsed)
    figures = []
    for name in names:
        short, long = (float(np.min(samples)) for samples in seconds[name])
        per_token = (long - short) / (lengths[1] - lengths[0])
        row = {"cache": name, "context_tokens": options.context_tokens}
        figures.append(figure("cache_mb", _cache_bytes(causal_lm, name, options, lengths[-1]) / 1e6, **row))
        figures.append(figure("ms_per_token", 1e3 * per_token, **row))
    return figures


def _make_model(options: Options) -> Any:
    """Returns a random model of the Llama family."""
    import keras_hub

    heads = options.width // 64
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=1024,
        num_layers=options.layers,
        num_query_heads=heads,
        num_key_value_heads=heads // 2,
        hidden_dim=options.width,
        intermediate_dim=4 * options.width,
    )
    causal_lm = keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)
    causal_lm.compile(sampler="greedy")
    return causal_lm


def _generate_function(causal_lm: Any, name: str, options: Options) -> Any:
    """Returns the compiled function of `generate` with a cache, which stays valid for other caches' turns."""
    _choose(causal_lm, name, options)
    causal_lm.generate_function = None
    return causal_lm.make_generate_function()


def _choose(causal_lm: Any, name: str, options: Options) -> None:
    """Makes a model use a cache."""
    from kvjax_models.adapters import keras_hub as adapter

    if name == KERAS_HUB:
        adapter.restore(causal_lm)
    else:
        takes_budget = kvjax.PolicyChoice.parse(name).takes_budget
        adapter.compress(causal_lm, name, options.budget if takes_budget else None)


def _time_call(generate: Any, batch: dict[str, np.ndarray]) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    jax.block_until_ready(generate(dict(batch), stop_token_ids=None))
    return time.perf_counter() - start


def _cache_bytes(causal_lm: Any, name: str, options: Options, max_length: int) -> int:
    """Returns the bytes of a cache, counted from its arrays."""
    from kvjax_models.adapters import keras_hub as adapter

    _choose(causal_lm, name, options)
    if name != KERAS_HUB:
        caches = adapter.init_caches(causal_lm, 1, options.context_tokens, max_length)
        return kvjax.cache_bytes(caches).device
    backbone = causal_lm.backbone
    shape = (1, backbone.num_layers, 2, max_length, backbone.num_key_value_heads, 64)
    return int(np.prod(shape)) * np.dtype(causal_lm.compute_dtype).itemsize


def main(options: Options) -> None:
    """Prints the table and writes the figures."""
    figures = measure(options)
    title = f"keras-hub, prompt of {options.context_tokens} tokens, batch 1, {jax.devices()[0].device_kind}"
    print_figures(title, figures, "cache")
    write_figures(pathlib.Path(options.output_dir) / "figures.json", figures)


if __name__ == "__main__":
    run_command(main, Options)
