"""What compressing a prompt costs beside reading it, and what decoding then takes, on the model of `decode_speed`.

    python -m experiments.prefill_speed
    python -m experiments.prefill_speed --group 1

Every layer is read exactly and then compressed by every policy in turn, all on the same keys and values and in the same
run; then every policy's caches decode. Reading is set against the rate of a plain product (2,048 x 2,048, float32)
measured in that run, compressing against reading, decoding against exact attention. Budgets of policies that recall are
of what a token reads.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from tqdm import tqdm

import kvjax
from experiments.common import results, settings, speed
from models import generate
from models.llama import Llama, LlamaConfig

NAME = "prefill_speed"
POLICIES = (
    "exact",
    "streaming_llm",
    "uniform",
    "subgen",
    "balancekv",
    "balancekv:variant=reference",
    "chelsea",
    "clusterkv",
    "clusterkv:residual=False",
    "quest",
)

settings.define_common(policies=POLICIES, budgets=("20%",))
_CONTEXT = flags.DEFINE_multi_integer("context_tokens", [4096, 16384, 32768], "Tokens of the prompt; repeatable.")
_CHUNK = flags.DEFINE_integer("prefill_chunk", 256, "Tokens per chunk of exact prefill.")
_GROUP = flags.DEFINE_integer("group", 4, "Query heads per kv head, of 8 query heads.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "Tokens decoded per repetition.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 3, "Repetitions of decoding; the median is reported.")


class Cost(NamedTuple):
    """What one setting took."""

    setting: settings.Setting
    compress_seconds: float  # over all layers
    token_seconds: np.ndarray  # of every repetition
    device_bytes: int  # over all layers
    host_bytes: int
    read_bytes: int  # per token, over all layers


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    contexts = _CONTEXT.value[:1] if flags.FLAGS.quick else _CONTEXT.value
    config = speed.grouped(_GROUP.value)
    model = Llama(config, rngs=nnx.Rngs(flags.FLAGS.seed))
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    rows: list[results.Row] = []
    for context in contexts:
        rate = speed.matmul_rate()
        reading, costs = measure(model, chosen, context, flags.FLAGS.seed)
        needed = prefill_operations(config, context)
        print(
            f"{context} tokens, G = {_GROUP.value}: {reading:.2f} s of exact prefill for {needed / 1e12:.2f} Tflop, "
            f"{needed / reading / rate:.0%} of the {rate / 1e9:.0f} Gflop/s of a plain product"
        )
        shared: dict[str, Any] = {
            "experiment": NAME,
            "model": speed.MODEL_NAME,
            "context_tokens": context,
            "batch": 1,
            "seed": flags.FLAGS.seed,
        }
        extra = {"group": _GROUP.value, "share_of_matmul_rate": needed / reading / rate}
        rows.append(results.Row(**shared, policy="exact", metric="prefill_seconds", value=reading, extra=extra))
        for cost in costs:
            rows += cost_rows(cost, reading, shared)
        show(costs, reading, context)
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows: {path}")


def measure(model: Llama, chosen: Sequence[settings.Setting], context: int, seed: int) -> tuple[float, list[Cost]]:
    """Seconds of exact prefill, and what every setting took; compilation left out."""
    tokens = 16 if flags.FLAGS.quick else _TOKENS.value
    # One block of tokens warms up.
    sizes: dict[str, Any] = {"batch": 1, "max_prompt": context, "max_new": tokens * (_REPETITIONS.value + 1)}
    specs = generate.cache_specs(model, **sizes)
    policies = [setting.build(specs[0], context) for setting in chosen]
    prompt = np.zeros((1, -(-context // _CHUNK.value) * _CHUNK.value), np.int32)
    prompt[0, :context] = np.random.default_rng(seed).integers(0, model.config.vocab_size, context)
    lengths = jnp.full(1, context, jnp.int32)
    tails = [max(generate.query_tail(policy, prompt.shape[1]) for policy in policies)] * len(specs)
    rng = jax.random.split(jax.random.key(seed), 1)

    def read_layers():
        return generate.read_layers(model, prompt, lengths, _CHUNK.value, tails)

    def fresh(policy: kvjax.CachePolicy, spec: kvjax.CacheSpec) -> Any:
        return jax.block_until_ready(jax.tree.map(jnp.copy, policy.init(spec, rng)))

    jax.block_until_ready(next(read_layers()))  # compiles
    layers = read_layers()
    reading = 0.0
    seconds = [0.0] * len(policies)
    caches: list[list[Any]] = [[] for _ in policies]
    shapes: set[Any] = set()
    for spec in tqdm(specs, desc=f"{context} tokens", leave=False):
        elapsed, read = speed.timed(next, layers)
        reading += elapsed
        for place, policy in enumerate(policies):
            program = (place, jax.tree.structure(abstract := kvjax.abstract_state(policy, spec)), str(abstract))
            for _ in range(1 if program in shapes else 2):  # the first run of a program compiles
                elapsed, (cache, _) = speed.timed(generate.compress_layer, policy, fresh(policy, spec), read, lengths)
            shapes.add(program)
            seconds[place] += elapsed
            caches[place].append(cache)
    costs = []
    for place, (setting, policy) in enumerate(zip(chosen, policies, strict=True)):
        generator = generate.Generator(model, policy, **sizes)
        layers_read = tuple(caches[place])
        caches[place] = []
        held = kvjax.cache_bytes(layers_read)
        read_bytes = sum(policy.read_bytes(layer) for layer in layers_read)
        state = dataclasses.replace(generator.start(seed), layers=layers_read, positions=jnp.copy(lengths))
        times = speed.decoding_seconds(generator, state, tokens, _REPETITIONS.value)
        costs.append(Cost(setting, seconds[place], times, held.device, held.host, read_bytes))
    return reading, costs


def cost_rows(cost: Cost, reading: float, shared: dict[str, Any]) -> list[results.Row]:
    """Compressing and decoding, as two rows."""
    own = shared | {
        "policy": cost.setting.choice.name,
        "variant": cost.setting.choice.variant,
        "device_bytes": cost.device_bytes,
        "host_bytes": cost.host_bytes,
        "read_bytes_per_token": cost.read_bytes,
    }
    extra = {"group": _GROUP.value, "budget": str(cost.setting.budget) if cost.setting.budget else None}
    compressing = extra | {"share_of_prefill": cost.compress_seconds / reading}
    return [
        results.Row(**own, metric="compress_seconds", value=cost.compress_seconds, extra=compressing),
        results.Row(
            **own,
            metric="ms_per_token",
            value=1e3 * float(np.median(cost.token_seconds)),
            n=len(cost.token_seconds),
            extra=extra,
        ),
    ]


def show(costs: Sequence[Cost], reading: float, context: int) -> None:
    """The table of one context: seconds, shares of prefill and of exact's decoding time, bytes."""
    exact = next((np.median(one.token_seconds) for one in costs if one.setting.choice.name == "exact"), np.nan)
    lines = []
    for one in costs:
        token = float(np.median(one.token_seconds))
        lines.append(
            (
                str(one.setting),
                f"{one.compress_seconds:.3f}",
                f"{one.compress_seconds / reading:.1%}",
                f"{1e3 * token:.1f}",
                f"{token / exact:.0%}",
                f"{one.read_bytes / 1e6:.1f}",
                f"{one.device_bytes / 1e6:.1f}" + (f" + {one.host_bytes / 1e6:.1f}" if one.host_bytes else ""),
            )
        )
    columns = ("policy", "compress s", "of prefill", "ms/token", "of exact's", "MB read", "MB held")
    title = f"A prompt of {context} tokens, G = {_GROUP.value}, batch 1, float32"
    results.print_table(title, columns, lines)


def prefill_operations(config: LlamaConfig, tokens: int) -> float:
    """Floating-point operations of a prompt's layers: products with the weights, and causal attention's two."""
    attended = config.query_heads * config.head_dim
    projections = config.width * (2 * attended + 2 * config.kv_heads * config.head_dim)
    per_token = 2 * (projections + 3 * config.width * config.mlp_width)
    return config.layers * (per_token * tokens + 4 * attended * tokens * (tokens + 1) / 2)


if __name__ == "__main__":
    app.run(main)
