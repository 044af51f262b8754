"""How fast decoding is through each cache, against exact attention and against transformers on the same weights.

    python -m experiments.decode_speed

One random-weight Llama in float32 (8 layers, width 512, 8 query heads, 2 kv heads of 64, MLP 1,408, vocabulary 8,192),
caches filled at random, one sequence. Every figure of a run comes from the same process (transformers, where it is
installed, runs in one beside it with the same number of threads), as milliseconds per token and as ratios, next to the
bytes that a token must read and to the rate at which this machine reads memory.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from kvjax_models import checkpoint, generate, prefill
from kvjax_models.llama import Llama
from tqdm import tqdm

import kvjax
from experiments.common import results, settings, speed
from kvjax.registry import PolicyChoice

NAME = "decode_speed"
POLICIES = (
    "exact",
    "streaming_llm",
    "uniform",
    "clustergen:variant=paper",
    "clustergen:variant=mean_value",
    "subgen",
    "balancekv",
    "chelsea",
    "clusterkv",
    "quest",
    "h2o",
    "snapkv",
)

# What `transformers_decode.py` exits with where torch or transformers is not installed.
MISSING = 3

settings.define_common(policies=POLICIES, budgets=("20%",))
_CONTEXT = flags.DEFINE_multi_integer("context_tokens", [4096, 16384, 32768], "Cached tokens; repeatable.")
_TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens decoded per repetition.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "Repetitions; the median is reported, with the extremes.")
_PEER = flags.DEFINE_bool("transformers", True, "Also run transformers where torch and transformers are installed.")
_PEER_PYTHON = flags.DEFINE_string("transformers_python", sys.executable, "Interpreter that has torch, transformers.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    contexts = _CONTEXT.value[:1] if flags.FLAGS.quick else _CONTEXT.value
    tokens, repetitions = (32, 2) if flags.FLAGS.quick else (_TOKENS.value, _REPETITIONS.value)
    model = Llama(speed.CONFIG, rngs=nnx.Rngs(flags.FLAGS.seed))
    weights = speed.weight_read_bytes(model)
    rate = speed.reading_rate()
    print(f"plain reduction over 512 MiB: {rate / 1e9:.1f} GB/s; weights read per token: {weights / 1e6:.0f} MB")
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    rows: list[results.Row] = []
    for context in contexts:
        # StaticCache takes 0.4 s per token at 32k: fewer tokens tell as much.
        peers = transformers_times(model, context, min(tokens, 24), repetitions) if _PEER.value else {}
        spec = generate.cache_specs(model, batch=1, max_prompt=context, max_new=1)[0]
        unpadded = spec.exact_bytes(context) * spec.layers
        found: list[results.Row] = [
            make_row(name, None, times, context, weights, unpadded, None) for name, times in peers.items()
        ]
        for setting in tqdm(chosen, desc=f"{context} tokens", leave=False):
            try:
                times, read, device = policy_times(model, setting, context, tokens, repetitions)
            except ValueError as error:
                settings.tell_left_out(setting, error)
                continue
            found.append(make_row(setting.name, setting, times, context, weights, read, device))
        show(found, context, rate)
        rows += found
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows: {path}")


def policy_times(
    model: Llama, setting: PolicyChoice, context: int, tokens: int, repetitions: int
) -> tuple[np.ndarray, int, int]:
    """Seconds per token of every repetition, and the bytes of cache read per token and held."""
    # One block of tokens warms up.
    max_new = tokens * (repetitions + 1)
    spec = generate.cache_specs(model, batch=1, max_prompt=context, max_new=max_new)[0]
    policy = settings.fitted(setting, spec, context)
    generator = generate.Generator(model, policy, batch=1, max_prompt=context, max_new=max_new)
    state = filled(generator, context)
    read = sum(map(kvjax.read_bytes, state.layers))
    device = kvjax.cache_bytes(state.layers).device
    return speed.decoding_seconds(generator, state, tokens, repetitions), read, device


def filled(generator: generate.Generator, context: int) -> generate.GenerationState:
    """A state as after a prompt of so many tokens, with random keys, values and queries, the same in every layer,
    compressed by the policies themselves."""
    config = generator.config
    keys, values = jax.random.normal(jax.random.key(1), (2, 1, context, config.kv_heads, config.head_dim))
    asked = max(prefill.asked_queries(policy, context) for policy in generator.policies)
    queries = jax.random.normal(jax.random.key(2), (1, asked, config.query_heads, config.head_dim))
    read = prefill.ReadLayer(keys, keys, values, queries if asked else None)
    lengths = jnp.full(1, context, jnp.int32)
    state = generator.start()
    layers = tuple(prefill.compress_layer(cache, read, lengths)[0] for cache in state.layers)
    return dataclasses.replace(state, layers=layers, positions=lengths)


def transformers_times(model: Llama, context: int, tokens: int, repetitions: int) -> dict[str, list[float]]:
    """Seconds per token of every repetition for each of transformers' caches; empty where it is not installed."""
    script = pathlib.Path(__file__).parent / "common" / "transformers_decode.py"
    with tempfile.TemporaryDirectory() as directory:
        checkpoint.save(directory, model)
        arguments = [directory, str(context), str(tokens), str(repetitions), str(os.cpu_count())]
        done = subprocess.run(
            [_PEER_PYTHON.value, str(script), *arguments], capture_output=True, text=True, check=False
        )
    if done.returncode == MISSING:
        print(f"transformers is left out: {done.stderr.strip()}")
        return {}
    if done.returncode:
        raise RuntimeError(f"transformers' run failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def make_row(
    policy: str,
    setting: PolicyChoice | None,
    times: Sequence[float] | np.ndarray,
    context: int,
    weights: int,
    read: int,
    device: int | None,
) -> results.Row:
    milliseconds = 1e3 * np.asarray(times)
    return results.Row(
        experiment=NAME,
        model=speed.MODEL_NAME,
        policy=policy,
        variant=setting.variant if setting else None,
        metric="ms_per_token",
        value=float(np.median(milliseconds)),
        context_tokens=context,
        batch=1,
        n=len(times),
        device_bytes=device,
        read_bytes_per_token=read,
        weight_bytes=weights,
        extra={
            "budget": str(setting.budget) if setting and setting.budget else None,
            "fastest": float(np.min(milliseconds)),
            "slowest": float(np.max(milliseconds)),
        },
    )


def show(found: Sequence[results.Row], context: int, rate: float) -> None:
    """The table of one context: times, ratios, and how they compare with what the bytes promise.

    "cache MB" is read per token; "of rate" is the share of the plain reduction's rate at which cache and weights are
    read; "x exact" the speed relative to exact, "of promise" that ratio over the ratio of bytes; "x peer" the speed
    relative to the faster of transformers' caches.
    """
    exact = next((one for one in found if one.policy == "exact"), None)
    peers = [one for one in found if one.policy.startswith("transformers")]
    peer = min(peers, key=lambda one: one.value) if peers else None

    def moved(one: results.Row) -> int:
        return (one.read_bytes_per_token or 0) + (one.weight_bytes or 0)

    lines = []
    for one in found:
        promised = moved(exact) / moved(one) if exact else float("nan")
        gained = exact.value / one.value if exact else float("nan")
        lines.append(
            (
                one.policy + (f":{one.variant}" if one.variant else ""),
                str(one.extra["budget"] or "-"),
                f"{one.value:.1f} [{one.extra['fastest']:.1f}, {one.extra['slowest']:.1f}]",
                f"{1e3 / one.value:.1f}",
                f"{(moved(one) - (one.weight_bytes or 0)) / 1e6:.0f}",
                f"{moved(one) / one.value * 1e3 / rate:.0%}",
                f"{gained:.2f}",
                f"{gained / promised:.0%}",
                f"{peer.value / one.value:.1f}" if peer else "-",
            )
        )
    columns = (
        "policy",
        "budget",
        "ms/token [range]",
        "tokens/s",
        "cache MB",
        "of rate",
        "x exact",
        "of promise",
        "x peer",
    )
    results.print_table(f"Decoding with {context} cached tokens, batch 1, float32", columns, lines)


if __name__ == "__main__":
    app.run(main)
