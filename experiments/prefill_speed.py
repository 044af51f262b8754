"""What compressing a prompt costs beside reading it, on the model of `decode_speed`.

    python -m experiments.prefill_speed

Every layer is read exactly and then compressed by every policy in turn, all on the same keys and values and in the same
run. Reading is set against the rate of a plain product (2,048 x 2,048, float32) measured in that run, compressing
against reading.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from tqdm import tqdm

from experiments.common import results, settings, speed
from models import generate
from models.llama import Llama, LlamaConfig

NAME = "prefill_speed"
POLICIES = ("streaming_llm", "uniform", "subgen", "balancekv", "balancekv:variant=reference", "chelsea")

settings.define_common(policies=POLICIES, budgets=("20%",))
_CONTEXT = flags.DEFINE_multi_integer("context_tokens", [4096, 16384, 32768], "Tokens of the prompt; repeatable.")
_CHUNK = flags.DEFINE_integer("prefill_chunk", 256, "Tokens per chunk of exact prefill.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    contexts = _CONTEXT.value[:1] if flags.FLAGS.quick else _CONTEXT.value
    model = Llama(speed.CONFIG, rngs=nnx.Rngs(flags.FLAGS.seed))
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    rows: list[results.Row] = []
    for context in contexts:
        rate = speed.matmul_rate()
        reading, compressing = prefill_times(model, chosen, context, flags.FLAGS.seed)
        needed = prefill_operations(speed.CONFIG, context)
        print(
            f"{context} tokens: {reading:.2f} s of exact prefill for {needed / 1e12:.2f} Tflop, "
            f"{needed / reading / rate:.0%} of the {rate / 1e9:.0f} Gflop/s of a plain product"
        )
        shared: dict[str, Any] = {
            "experiment": NAME,
            "model": speed.MODEL_NAME,
            "context_tokens": context,
            "batch": 1,
            "seed": flags.FLAGS.seed,
        }
        share = {"share_of_matmul_rate": needed / reading / rate}
        rows.append(results.Row(**shared, policy="exact", metric="prefill_seconds", value=reading, extra=share))
        lines = []
        for setting, times in zip(chosen, compressing, strict=True):
            total = float(np.sum(times))
            lines.append((str(setting), f"{total:.2f}", f"{total / reading:.1%}"))
            rows.append(
                results.Row(
                    **shared,
                    policy=setting.choice.name,
                    variant=setting.choice.variant,
                    metric="compress_seconds",
                    value=total,
                    extra={"budget": str(setting.budget), "share_of_prefill": total / reading},
                )
            )
        results.print_table(
            f"Compressing a prompt of {context} tokens, batch 1, float32", ("policy", "s", "of prefill"), lines
        )
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows: {path}")


def prefill_times(
    model: Llama, chosen: Sequence[settings.Setting], context: int, seed: int
) -> tuple[float, list[list[float]]]:
    """Seconds of exact prefill, and per setting those of compressing each layer; compilation left out."""
    specs = generate.cache_specs(model, batch=1, max_prompt=context, max_new=64)
    policies = [setting.build(specs[0], context + 64) for setting in chosen]
    tokens = np.zeros((1, -(-context // _CHUNK.value) * _CHUNK.value), np.int32)
    tokens[0, :context] = np.random.default_rng(seed).integers(0, model.config.vocab_size, context)
    lengths = jnp.full(1, context, jnp.int32)
    graph, parameters = nnx.split(model)
    x = generate.embed(graph, parameters, jnp.asarray(tokens))
    reading, compressing = 0.0, [[0.0] * len(specs) for _ in policies]
    for number, layer in enumerate(tqdm(model.layers, desc=f"{context} tokens", leave=False)):
        layer_graph, layer_parameters = nnx.split(layer)
        stage = (layer_graph, model.config, _CHUNK.value, 0, layer_parameters)
        if not number:  # compile; the residual stream is donated
            jax.block_until_ready(generate.prefill_layer(*stage, jnp.copy(x), lengths))
        elapsed, (x, keys, values, _) = speed.timed(generate.prefill_layer, *stage, x, lengths)
        reading += elapsed
        for place, policy in enumerate(policies):
            for _ in range(1 if number else 2):  # the first layer's first run compiles
                cache = policy.init(specs[number], jax.random.split(jax.random.key(seed), 1))
                cache = jax.block_until_ready(jax.tree.map(jnp.copy, cache))
                compressing[place][number], _ = speed.timed(
                    generate.compress, policy, cache, keys, values, lengths, None, None
                )
    return reading, compressing


def prefill_operations(config: LlamaConfig, tokens: int) -> float:
    """Floating-point operations of a prompt's layers: products with the weights, and causal attention's two."""
    attended = config.query_heads * config.head_dim
    projections = config.width * (2 * attended + 2 * config.kv_heads * config.head_dim)
    per_token = 2 * (projections + 3 * config.width * config.mlp_width)
    return config.layers * (per_token * tokens + 4 * attended * tokens * (tokens + 1) / 2)


if __name__ == "__main__":
    app.run(main)
