"""Memory of prompts that are streamed through a compressed cache, on the model of `decode_speed`.

    python -m experiments.streaming_prefill

For each policy and prompt length: the largest sum of argument, temporary and unaliased output bytes over the programs
that read a prompt (which the compiler reports), the peak of a process of its own that reads one, and its speed. Random
weights and random tokens. Accuracy under streaming is measured by `experiments.line_retrieval --prefill streaming`.
"""

import concurrent.futures
import multiprocessing
import pathlib
import resource
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from absl import app, flags
from flax import nnx
from kvjax_models import generate, lowering
from kvjax_models.llama import Llama
from tqdm import tqdm

from experiments.common import results, settings, speed
from kvjax.registry import PolicyChoice

T = TypeVar("T")

NAME = "streaming_prefill"
POLICIES = tuple(f"{name}:compact_every=256" for name in ("streaming_llm", "uniform", "subgen", "balancekv"))

settings.define_common(policies=POLICIES, budgets=("2048",))
_CONTEXT = flags.DEFINE_multi_integer("context_tokens", [16384, 131072], "Tokens of the prompt; repeatable.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    contexts = [1024, 2048] if flags.FLAGS.quick else _CONTEXT.value
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    rows: list[results.Row] = []
    lines = []
    for setting in tqdm(chosen, desc=NAME, leave=False):
        for context in contexts:
            try:
                program, peak, elapsed = in_own_process(measure, setting, context, flags.FLAGS.seed)
            except ValueError as error:
                settings.tell_left_out(setting, error)
                continue
            lines.append(
                (
                    settings.label(setting),
                    str(context),
                    results.readable_bytes(program),
                    results.readable_bytes(peak),
                    f"{context / elapsed:.0f}",
                )
            )
            for metric, value in {
                "largest_program_bytes": program,
                "peak_process_bytes": peak,
                "tokens_per_second": context / elapsed,
            }.items():
                rows.append(
                    results.Row(
                        experiment=NAME,
                        model=speed.MODEL_NAME,
                        policy=setting.name,
                        variant=setting.variant,
                        metric=metric,
                        value=value,
                        context_tokens=context,
                        batch=1,
                        seed=flags.FLAGS.seed,
                        extra={"budget": str(setting.budget), "prefill": "streaming"},
                    )
                )
    columns = ("policy", "tokens", "largest program", "process peak", "tokens/s")
    results.print_table("Streaming prefill, batch 1, float32", columns, lines)
    path = pathlib.Path(flags.FLAGS.output_dir) / f"{NAME}.json"
    results.write_rows(path, rows)
    print(f"Rows: {path}")


def in_own_process(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function run in a fresh process, whose peak of memory is then its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def measure(setting: PolicyChoice, context: int, seed: int) -> tuple[int, int, float]:
    """Bytes of the largest program, bytes of this process's peak, seconds of reading (compilation left out)."""
    model = Llama(speed.CONFIG, rngs=nnx.Rngs(seed))
    sizes: dict[str, Any] = {"batch": 1, "max_prompt": context, "max_new": 64, "streaming": True}
    policy = settings.fitted(setting, generate.cache_specs(model, **sizes)[0], context)
    generator = generate.Generator(model, policy, **sizes)
    prompt = np.random.default_rng(seed).integers(0, model.config.vocab_size, context).tolist()
    jax.block_until_ready(generator.read(generator.start(seed), [prompt[: 2 * generator.block]]))
    elapsed, _ = speed.timed(lambda: generator.read(generator.start(seed), [prompt]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return largest_program(generator), peak, elapsed


def largest_program(generator: generate.Generator) -> int:
    """The most bytes that a program which reads a block or compacts a layer has at once, as the compiler counts."""
    programs = lowering.lower_append(generator, jax.eval_shape(generator.start))
    return max(speed.held_bytes(lowered.compile()) for lowered in programs)


if __name__ == "__main__":
    app.run(main)
