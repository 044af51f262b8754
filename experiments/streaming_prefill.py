"""Memory of prompts that are streamed through a compressed cache, on the model of `decode_speed`.

    python -m experiments.streaming_prefill

For each policy and prompt length: the largest sum of argument, temporary and unaliased output bytes over the programs
that read a prompt (which the compiler reports), the peak of a process of its own that reads one, and its speed. Random
weights and random tokens. Accuracy under streaming is measured by `experiments.line_retrieval --prefill streaming`.
"""

import dataclasses
import resource
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from tqdm import tqdm

from experiments.common import processes, results, settings, speed, suites
from experiments.common.options import Experiment, Policies, each
from experiments.common.results import Row
from kvjax.registry import PolicyChoice
from kvjax_models import generate, lowering
from kvjax_models.llama import Llama

NAME = "streaming_prefill"


@dataclasses.dataclass(frozen=True)
class Options(Policies):
    """Options of this experiment."""

    policy: tuple[str, ...] = each(*suites.SUITES["streaming"].policies)
    budget: tuple[str, ...] = each(*suites.SUITES["streaming"].budgets)
    context_tokens: tuple[int, ...] = each(16384, 131072)  # tokens of the prompt; repeatable

    QUICK: ClassVar[dict[str, Any]] = {"context_tokens": (1024, 2048)}


def run(options: Options) -> list[Row]:
    """The rows of every setting and prompt length."""
    rows: list[Row] = []
    for setting in tqdm(settings.settings(options.policy, options.budget), desc=NAME, leave=False):
        for context in options.context_tokens:
            try:  # in a process whose peak of memory is its own
                program, peak, elapsed = processes.apart(measure, setting, context, options.seed)
            except ValueError as error:
                settings.tell_left_out(setting, error)
                continue
            rate = context / elapsed
            found = {"largest_program_bytes": program, "peak_process_bytes": peak, "tokens_per_second": rate}
            shared: dict[str, Any] = {
                "context_tokens": context,
                "batch": 1,
                "seed": options.seed,
                "prefill": "streaming",
            }
            rows += [
                results.row(NAME, speed.MODEL_NAME, metric, one, setting, **shared) for metric, one in found.items()
            ]
    title = "Streaming prefill, batch 1, float32"
    results.print_rows(title, rows, lambda row: f"{results.setting_label(row)}, {row.context_tokens} tokens")
    return rows


def measure(setting: PolicyChoice, context: int, seed: int) -> tuple[int, int, float]:
    """Bytes of the largest program, bytes of this process's peak, seconds of reading (compilation left out)."""
    model = Llama(speed.CONFIG, rngs=nnx.Rngs(seed))
    sizes: dict[str, Any] = {"batch": 1, "max_prompt": context, "max_new": 64, "streaming": True}
    policy = settings.fitted(setting, generate.cache_specs(model, **sizes)[0], context)
    generator = generate.Generator(model, policy, **sizes, beyond_positions=True)
    prompt = np.random.default_rng(seed).integers(0, model.config.vocab_size, context).tolist()
    jax.block_until_ready(generator.read(generator.start(seed), [prompt[: 2 * generator.block]]))
    elapsed, _ = speed.timed(lambda: generator.read(generator.start(seed), [prompt]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return largest_program(generator), peak, elapsed


def largest_program(generator: generate.Generator) -> int:
    """The most bytes that a program which reads a block or compacts a layer has at once, as the compiler counts."""
    programs = lowering.lower_append(generator, jax.eval_shape(generator.start))
    return max(speed.held_bytes(lowered.compile()) for lowered in programs)


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
