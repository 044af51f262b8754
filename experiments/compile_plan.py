"""Compiles every program of the plan of `experiments.device` for a GPU that this machine does not have.

    python -m experiments.compile_plan
    python -m experiments.compile_plan --step decode_128k --layers 32

The compiler is JAX's for CUDA, which `make aot-gpu` installs. The layers of a model are equal, so that few of them are
compiled; the bytes of weights and caches count all layers. The command prints the compile time, temporaries and
kernels of every program, and fails if a program does not compile or a step needs more than the memory of the device.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import device, speed
from experiments.common import flags, timing
from experiments.common.compilers import prepare_compiler
from experiments.common.console import print_table
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.shapes import find_shape, first_layers, random_model
from experiments.compile import Program, compile_program, kernels, place, single_device
from kvjax_models import LanguageModel
from kvjax_models.runner.generator import common_scorer
from kvjax_models.runner.prefill import prefill_layer
from kvjax_models.runner.repetition import make_repetitions, repeat_layer
from pallas_kernels import benchmark_all
from pallas_kernels.benchmarking import array_bytes

Lower = Callable[[], jax.stages.Lowered]
MEMORY_GB = {"h100": 74.0, "h200": 130.0}  # that JAX may use, with a fraction of .92
COLUMNS = ("step", "program", "seconds", "temporary_gb", "kernels", "problem")


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of the command."""

    step: tuple[str, ...] = repeatable()  # Only these steps; repeatable.
    layers: int = 4  # Layers of the compiled models.
    card: str = flags.one_of("h200", tuple(MEMORY_GB))  # The card whose memory a step may use.


def abstract_llm(name: str, layers: int | None = None) -> LanguageModel:
    """Returns a bfloat16 model without values."""
    return random_model(first_layers(find_shape(name), layers), jnp.bfloat16, is_abstract=True)


def speed_programs(options: speed.Options, layers: int, sharding: jax.sharding.Sharding) -> Iterator[tuple[str, Lower]]:
    """Yields the names of a speed step's programs, and functions that lower them."""
    llm, of_all_layers = abstract_llm(options.shape, layers), abstract_llm(options.shape)
    for context in options.context_tokens:
        # A share that is possible in all layers can be too small for few of them, as ClusterKV's first ones are full.
        generators, rows = speed.latency_generators(options, of_all_layers, context)
        generators |= speed.latency_generators(options, llm, context)[0]
        tokens, config = -(-context // options.prefill_chunk) * options.prefill_chunk, llm.model.config
        policies = [generator.policies[-1] for generator in generators.values()]
        num_queries = max(policy.requires.num_prompt_queries(tokens) for policy in policies)
        shape = (1, tokens // options.prefill_chunk, options.prefill_chunk, config.width)
        x, lengths = place((jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((1,), jnp.int32)), sharding)
        layer, rotary = place(llm.model.layers[-1], sharding), config.rotary(layers - 1, context)
        scorer = common_scorer(list(generators.values()))
        if scorer is not None:
            scorer = place(jax.ShapeDtypeStruct(scorer.shape[1:], scorer.dtype), sharding)
        static: tuple[Any, ...] = (layer, rotary, None, False, num_queries)
        prefilled = place(jax.eval_shape(functools.partial(prefill_layer, *static), x, lengths, scorer), sharding)
        yield f"prefill, {context} tokens", functools.partial(prefill_layer.lower, *static, x, lengths, scorer)
        for setting, generator in generators.items():
            repeat, repeated = generator.policies[-1].requires.repetition, None
            if repeat is not None:
                texts, counts = make_repetitions(repeat, np.zeros((1, tokens), np.int32), np.array([context]))
                text_x = jax.ShapeDtypeStruct((1, 1, texts.size, config.width), jnp.bfloat16)
                args = place((text_x, prefilled.keys, prefilled.values, lengths, jnp.asarray(counts)), sharding)
                static = (layer, repeat, rotary, None, False)
                yield f"{setting}, {context} tokens: repetition", functools.partial(repeat_layer.lower, *static, *args)
                _, repeated = jax.eval_shape(functools.partial(repeat_layer, *static), *args)
            state = place(jax.eval_shape(generator.init_state), sharding)
            programs = timing.lower_sequence(
                generator, state, prefilled._replace(repeated=repeated), lengths, rows[setting], sharding
            )
            yield from ((f"{setting}, {context} tokens: {name}", lower) for name, lower in programs.items())


def step_gigabytes(options: speed.Options) -> float:
    """Returns the bytes of the weights and of all caches that a speed step holds at the same time."""
    llm, most = abstract_llm(options.shape), 0.0
    for context in options.context_tokens:
        generators, rows = speed.latency_generators(options, llm, context)
        copies = max(rows[name] * one.row_bytes if rows[name] > 1 else 0 for name, one in generators.items())
        most = max(most, sum(one.row_bytes for one in generators.values()) + copies)
    return (array_bytes(llm.model) + most) / 1e9


def compile_step(step: device.Step, options: Options, sharding: jax.sharding.Sharding) -> Iterator[dict[str, Any]]:
    """Compiles the programs of a step and yields a row per program."""
    held, largest = 0.0, 0.0
    if step.module == "experiments.speed":
        flags_of_step = flags.parse(speed.Options, step.flags)
        programs = speed_programs(flags_of_step, options.layers, sharding)
        held = step_gigabytes(flags_of_step)
    elif step.module.startswith("pallas_kernels"):
        measured = kernels(benchmark_all.OPS, "MEASURED", sharding, "h200")
        programs = ((name, functools.partial(function.lower, *args)) for name, function, args in measured)
    else:
        return
    for name, lower in programs:
        one = compile_program(Program(name, lower), "h200")
        gigabytes = round(one["value"] / 1e9, 3)
        largest = max(largest, gigabytes)
        values = step.name, name, one["compile_seconds"], gigabytes, one["kernels"], one["problem"] or ""
        yield dict(zip(COLUMNS, values, strict=True))
    if held:
        limit = MEMORY_GB[options.card]
        problem = "" if held + largest < limit else f"more than {limit} GB"
        values = step.name, f"weights and caches: {held:.1f} GB", 0.0, largest, None, problem
        yield dict(zip(COLUMNS, values, strict=True))


def main(options: Options) -> None:
    """Compiles the plan and prints a table."""
    prepare_compiler()
    sharding, rows = single_device("h200"), []
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):  # kernels depend on the target
        for step in device.steps():
            if options.step and step.name not in options.step:
                continue
            for row in compile_step(step, options, sharding):
                rows.append(row)
                print(*row.values(), sep=" | ", flush=True)
    print_table(f"JAX {jax.__version__}", COLUMNS, [[str(row[name]) for name in COLUMNS] for row in rows])
    if problems := [f"{row['step']}: {row['program']}: {row['problem']}" for row in rows if row["problem"]]:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    run_command(main, Options)
