"""How fast decoding is through each cache, against exact attention and against transformers on the same weights.

    python -m experiments.decode_speed

One random-weight Llama in float32 (8 layers, width 512, 8 query heads, 2 kv heads of 64, MLP 1,408, vocabulary 8,192),
caches filled at random, one sequence. Every figure of a run comes from the same process (transformers, where it is
installed, runs in one beside it with the same number of threads), as milliseconds per token and as ratios, next to the
bytes that a token must read and to the rate at which this machine reads memory.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import kvjax
from experiments.common import results, settings, speed, suites
from experiments.common.options import Experiment, Policies, each
from experiments.common.results import Row
from experiments.common.timing import Writer
from kvjax.registry import PolicyChoice
from kvjax_models.formats import huggingface
from kvjax_models.generation import prefill
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import GenerationState, cache_specs
from kvjax_models.model.llama import Llama

NAME = "decode_speed"
# What `transformers_decode.py` exits with where torch or transformers is not installed.
MISSING = 3


@dataclasses.dataclass(frozen=True)
class Options(Policies):
    """Options of this experiment."""

    policy: tuple[str, ...] = each(*suites.SUITES["decoding"].policies)
    budget: tuple[str, ...] = each(*suites.SUITES["decoding"].budgets)
    context_tokens: tuple[int, ...] = each(4096, 16384, 32768)  # cached tokens; repeatable
    tokens: int = 128  # tokens decoded per repetition
    repetitions: int = 5  # repetitions; the median is reported, with the extremes
    transformers: bool = True  # also run transformers where torch and transformers are installed
    transformers_python: str = sys.executable  # interpreter that has torch, transformers

    QUICK: ClassVar[dict[str, Any]] = {"context_tokens": (4096,), "tokens": 32, "repetitions": 2}


def run(options: Options) -> list[Row]:
    """The rows of every context length and setting, and of transformers' caches."""
    tokens, repetitions = options.tokens, options.repetitions
    model = Llama(speed.CONFIG, rngs=nnx.Rngs(options.seed))
    weights = speed.weight_read_bytes(model)
    rate = speed.reading_rate()
    print(f"plain reduction over 512 MiB: {rate / 1e9:.1f} GB/s; weights read per token: {weights / 1e6:.0f} MB")
    rows: list[Row] = []
    for context in options.context_tokens:
        make = functools.partial(make_row, context=context, weights=weights)
        found: list[Row] = []
        if options.transformers:
            spec = cache_specs(model, batch=1, max_prompt_tokens=context, max_new_tokens=1)[0]
            unpadded = spec.full_cache_bytes(context) * spec.layers
            # StaticCache takes 0.4 s per token at 32k: fewer tokens tell as much.
            peers = transformers_times(options.transformers_python, model, context, min(tokens, 24), repetitions)
            found += [make(times, unpadded, None, policy=name, budget=None) for name, times in peers.items()]
        for setting in tqdm(settings.settings(options.policy, options.budget), desc=f"{context} tokens", leave=False):
            try:
                found.append(make(*policy_times(model, setting, context, tokens, repetitions), setting=setting))
            except ValueError as error:
                settings.tell_left_out(setting, error)
        show(found, context, rate)
        rows += found
    return rows


def policy_times(
    model: Llama, setting: PolicyChoice, context: int, tokens: int, repetitions: int
) -> tuple[np.ndarray, int, int]:
    """Seconds per token of every repetition, and the bytes of cache read per token and held."""
    # One block of tokens warms up.
    max_new_tokens = tokens * (repetitions + 1)
    spec = cache_specs(model, batch=1, max_prompt_tokens=context, max_new_tokens=max_new_tokens)[0]
    policy = settings.fitted(setting, spec, context)
    generator = Generator(
        model, policy, batch=1, max_prompt_tokens=context, max_new_tokens=max_new_tokens, allow_beyond_context=True
    )
    state = filled(generator, context)
    read = sum(map(kvjax.read_bytes, state.layers))
    device = kvjax.cache_bytes(state.layers).device
    return speed.seconds(Writer(generator, state, tokens), repetitions=repetitions) / tokens, read, device


def filled(generator: Generator, context: int) -> GenerationState:
    """A state as after a prompt of so many tokens, with random keys, values and queries, the same in every layer,
    compressed by the policies themselves."""
    config = generator.config
    keys, values = jax.random.normal(jax.random.key(1), (2, 1, context, config.kv_heads, config.head_dim))
    asked = max(policy.requires.num_prompt_queries(context) for policy in generator.policies)
    queries = jax.random.normal(jax.random.key(2), (1, asked, config.query_heads, config.head_dim))
    read = prefill.PrefilledLayer(keys, keys, values, queries if asked else None)
    lengths = jnp.full(1, context, jnp.int32)
    state = generator.init_state()
    compressed = [prefill.compress_layer(cache, state.counters, read, lengths) for cache in state.layers]
    layers, counters = tuple(cache for cache, _, _ in compressed), compressed[-1][1]
    return dataclasses.replace(state, layers=layers, counters=counters, positions=lengths)


def transformers_times(
    python: str, model: Llama, context: int, tokens: int, repetitions: int
) -> dict[str, list[float]]:
    """Seconds per token of every repetition for each of transformers' caches; empty where it is not installed."""
    script = pathlib.Path(__file__).parent / "common" / "transformers_decode.py"
    with tempfile.TemporaryDirectory() as directory:
        huggingface.save_model(directory, model)
        arguments = [directory, str(context), str(tokens), str(repetitions), str(os.cpu_count())]
        done = subprocess.run([python, str(script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode == MISSING:
        print(f"transformers is left out: {done.stderr.strip()}")
        return {}
    if done.returncode:
        raise RuntimeError(f"transformers' run failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def make_row(
    times: Sequence[float] | np.ndarray, read: int, device: int | None, *, context: int, weights: int, **others: Any
) -> Row:
    """The row of seconds per token; `others` name what took them."""
    milliseconds = 1e3 * np.asarray(times)
    sizes: dict[str, Any] = {"device_bytes": device, "read_bytes_per_token": read, "parameter_bytes": weights}
    extremes = {"fastest": float(np.min(milliseconds)), "slowest": float(np.max(milliseconds))}
    shared: dict[str, Any] = {"context_tokens": context, "batch": 1, "n": len(times), **sizes, **extremes}
    return results.row(NAME, speed.MODEL_NAME, "ms_per_token", float(np.median(milliseconds)), **shared, **others)


def show(found: Sequence[Row], context: int, rate: float) -> None:
    """The table of one context: times, ratios, and how they compare with what the bytes promise.

    "cache MB" is read per token; "of rate" is the share of the plain reduction's rate at which cache and weights are
    read; "x exact" the speed relative to exact, "of promise" that ratio over the ratio of bytes; "x peer" the speed
    relative to the faster of transformers' caches.
    """
    exact = next((one for one in found if one.policy == "exact"), None)
    peers = [one for one in found if one.policy.startswith("transformers")]
    peer = min(peers, key=lambda one: one.value) if peers else None

    def moved(one: Row) -> int:
        return (one.read_bytes_per_token or 0) + (one.parameter_bytes or 0)

    lines = []
    for one in found:
        promised = moved(exact) / moved(one) if exact else float("nan")
        gained = exact.value / one.value if exact else float("nan")
        lines.append(
            (
                results.policy_label(one),
                str(one.extra["budget"] or "-"),
                f"{one.value:.1f} [{one.extra['fastest']:.1f}, {one.extra['slowest']:.1f}]",
                f"{1e3 / one.value:.1f}",
                f"{(moved(one) - (one.parameter_bytes or 0)) / 1e6:.0f}",
                f"{moved(one) / one.value * 1e3 / rate:.0%}",
                f"{gained:.2f}",
                f"{gained / promised:.0%}",
                f"{peer.value / one.value:.1f}" if peer else "-",
            )
        )
    columns = ("policy", "budget", "ms/token [range]", "tokens/s", "cache MB", "of rate", "x exact", "of promise")
    results.print_table(f"Decoding with {context} cached tokens, batch 1, float32", (*columns, "x peer"), lines)


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
