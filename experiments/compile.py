"""Compiles kernels, prefill and decoding for TPUs and GPUs that this machine does not have.

    python -m experiments.compile
    python -m experiments.compile --device v5e --policy snapkv --layers 2
    python -m experiments.compile --device h200 --shape llama-3.1-8b --layers 4 --batch 1
    python -m experiments.compile --device v5e --op cluster_recall --schedule

The compilers are libtpu and JAX's CUDA compiler, which `make aot` and `make aot-gpu` install. For every device this
command compiles the kernels at production shapes, the prefill of one layer, and a block of decode steps of a small
Llama with each policy. It prints seconds, bytes of arguments and temporaries, the number of kernels, and the number of
launched operations per layer and step. It fails if a program does not compile, if an expected kernel is missing, or if
decoding copies a cache: if it writes an array of at least half of a layer's largest buffer, or needs temporaries as
large as the caches. `--schedule` prints the TPU compiler's schedule of every kernel (`common.schedules`).
`experiments.pod_plan` compiles for several chips.
"""

import dataclasses
import functools
import importlib
import importlib.util
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from experiments.common import caches, schedules
from experiments.common.compiled import large_outputs, launches
from experiments.common.compilers import prepare_compiler
from experiments.common.console import print_table
from experiments.common.flags import Flags, repeatable, run_command
from experiments.common.output import Figure, figure, write_figures
from experiments.common.shapes import find_shape, first_layers, random_model, zero_scorer
from kvjax.budget import format_bytes
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import lowering, prefill
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import cache_specs
from pallas_kernels.benchmarking import describe

# The smallest topology of each kind.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# Descriptions of GPUs for XLA.
GPUS = {"h200": pathlib.Path(__file__).parent / "targets" / "h200.txtpb"}
# Their benchmarks define the production shapes.
OPS = ("weighted_decode", "cluster_recall", "select_blocks", "k_means", "soft_match", "balanced_walk")
DECODING_OPS = ("weighted_decode", "cluster_recall")
VOCABULARY = 128  # small, so that only caches are as large as a cache
CHUNK = 256  # tokens per chunk of prefill
COLUMNS = ("compile_seconds", "argument_bytes", "kernels", "launches_per_layer")


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a compilation."""

    policy: tuple[str, ...] = repeatable(
        "exact", "streaming_llm", "uniform", "clustergen", "subgen", "subgen_mean", "balancekv", "chelsea",
        "clusterkv_residual", "quest", "infinigen", "h2o", "cam", "snapkv", "pyramidkv",
    )  # fmt: skip
    budget: tuple[str, ...] = repeatable("4096 slots")
    device: tuple[str, ...] = repeatable(*TOPOLOGIES, choices=(*TOPOLOGIES, *GPUS))  # Repeatable.
    op: tuple[str, ...] = repeatable(*OPS, choices=OPS)  # Kernels that are compiled by themselves; repeatable.
    shape: str | None = None  # Sizes of the Llama (`common.shapes`); by default a small one with many heads.
    layers: int = 8  # Layers of the Llama.
    head_dim: tuple[int, ...] = repeatable(128, 64)  # Head dimensions of the small Llama; repeatable.
    batch: int = 8  # Batch rows of decoding.
    context_tokens: int = 16384  # Maximum length of prompts.
    schedule: bool = False  # Print the schedules of TPU kernels.
    output_dir: pathlib.Path = pathlib.Path("build/compile")  # Directory of the figures.


class Program(NamedTuple):
    """A program to compile.

    Attributes:
        name: name in tables.
        lower: lowers the program.
        kernels: minimum number of kernels in it.
        cache: bytes of the largest buffer that it must not copy; None if it may copy.
        layers: layers per step; None if the program is not a decode step.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    kernels: int = 0
    cache: int | None = None
    layers: int | None = None


def main(options: Options) -> None:
    """Compiles everything, prints tables and fails if a program has a problem."""
    dump = pathlib.Path(tempfile.mkdtemp()) if options.schedule else None
    prepare_compiler(dump)
    figures: list[Figure] = []
    for device in options.device:
        compiled = compile_for(options, device, dump)
        lines = [
            (one["program"], *(str(one[name]) for name in COLUMNS), f"{one['value']:.0f}", one["problem"] or "ok")
            for one in compiled
        ]
        print_table(f"Compiled for {device}", ("program", *COLUMNS, "temporary_bytes", ""), lines)
        if kernels := [(one["program"], *schedule) for one in compiled for schedule in one["schedules"]]:
            print_table(f"Schedules for {device}", ("program", *schedules.Schedule._fields), kernels)
        figures += compiled
    if dump is not None:
        shutil.rmtree(dump)
    write_figures(options.output_dir / "compile.json", figures)
    if problems := [f"{one['program']} for {one['target']}: {one['problem']}" for one in figures if one["problem"]]:
        raise SystemExit("\n".join(problems))


def compile_for(options: Options, device: str, dump: pathlib.Path | None = None) -> list[Figure]:
    """Compiles everything for a device; returns a figure per program, with schedules from the directory `dump`."""
    sharding = single_device(device)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):  # kernels depend on the target
        programs = [
            *kernel_programs(options, sharding, device),
            *prefill_programs(options, sharding, device),
            *decoding_programs(options, sharding),
        ]
        return [compile_program(program, device, dump) for program in programs]


def single_device(device: str) -> jax.sharding.NamedSharding:
    """Returns the sharding on one chip of a kind.

    Raises:
        ImportError: if libtpu is not installed.
        NotImplementedError: if JAX's CUDA compiler is not installed.
    """
    if device in GPUS:
        target: dict[str, Any] = {"target_config": GPUS[device].read_text(), "topology": "1x1x1"}
        topology = topologies.get_topology_desc(platform="cuda", topology_name=device, **target)
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[device])
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("chip",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def kernel_programs(options: Options, sharding: jax.sharding.Sharding, device: str) -> Iterator[Program]:
    """Yields every op that has a kernel for the device, at the production shapes that the kernel supports."""
    for name, function, args in kernels(options.op, "PRODUCTION", sharding, device):
        try:
            lowered = function.lower(*args)
        except NotImplementedError as reason:
            print(f"{name} uses XLA on {device}: {reason}")
            continue
        # Compression may change the layout of its inputs; a decode step may not.
        largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(args))
        must_not_copy = largest if name.startswith(DECODING_OPS) else None
        yield Program(name, functools.partial(_lowered, lowered), kernels=1, cache=must_not_copy)


def _lowered(program: jax.stages.Lowered) -> jax.stages.Lowered:
    return program


def kernels(
    ops: Sequence[str], shapes: str, sharding: jax.sharding.Sharding, device: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the kernels of ops for a device: name, jitted function and abstract arguments.

    Args:
        ops: names of the ops; those without a kernel for the device are left out.
        shapes: name of the shapes in the benchmarks of the ops: "PRODUCTION" or "MEASURED".
        sharding: sharding on the device.
        device: the device.
    """

    def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    implementation = "mosaic_gpu" if device in GPUS else "mosaic_tpu"
    for op in ops:
        if importlib.util.find_spec(f"pallas_kernels.{op}.{implementation}") is not None:
            for shape in getattr(importlib.import_module(f"pallas_kernels.{op}.benchmark"), shapes):
                yield f"{op} {shape}", jax.jit(shape.function(implementation=implementation)), shape.arguments(array)


def decoding_programs(options: Options, sharding: jax.sharding.Sharding) -> Iterator[Program]:
    """Yields a block of decode steps of every policy and head dimension."""
    for model in abstract_models(options):
        for setting in caches.parse_settings(options.policy, options.budget):
            tokens, batch = options.context_tokens, options.batch
            sizes: dict[str, Any] = {"max_prompt_tokens": tokens, "batch": batch, "max_new_tokens": 512}
            policy = setting.resolve(cache_specs(model, **sizes)[0], tokens)
            scorer = zero_scorer(model.config)
            generator = Generator(model, policy, **sizes, scorer=scorer)
            state = jax.eval_shape(generator.init_state)
            sizes |= {"max_prompt_tokens": tokens // 2, "batch": 2 * batch}
            other = jax.eval_shape(Generator(model, policy, **sizes, scorer=scorer).init_state)
            largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.layers[0]))
            for states in ((state,), (state, other)):
                groups = "" if len(states) == 1 else ", two groups of rows"
                placed = [place(one, sharding) for one in states]
                yield Program(
                    f"{setting} D={model.config.head_dim}, {options.layers} layers{groups}",
                    functools.partial(lowering.lower_decode, generator, *placed, sharding=sharding),
                    kernels=len(states) * options.layers,
                    cache=largest,
                    layers=options.layers,
                )


def prefill_programs(options: Options, sharding: jax.sharding.Sharding, device: str) -> Iterator[Program]:
    """Yields the prefill of one layer of every head dimension; on TPUs it must contain a kernel."""
    for model in abstract_models(options):
        tokens, dtype = options.context_tokens, model.embedding.param_dtype
        x = jax.ShapeDtypeStruct((1, tokens // CHUNK, CHUNK, model.config.width), dtype)
        layer, args = place((model.layers[0], (x, jax.ShapeDtypeStruct((1,), jnp.int32))), sharding)
        rotary = model.config.rotary(0, tokens)
        lower = functools.partial(prefill.prefill_layer.lower, layer, rotary, None, False, 0, *args)
        yield Program(f"prefill D={model.config.head_dim}, one of the layers", lower, int(device in TOPOLOGIES))


def abstract_models(options: Options) -> Iterator[Llama]:
    """Yields models without values: one per head dimension, or one of a shape."""
    if options.shape is None:
        sizes: Any = {"width": 1024, "mlp_width": 2048, "query_heads": 32, "kv_heads": 8, "max_length": 1}
        configs = [
            LlamaConfig(vocab_size=VOCABULARY, layers=options.layers, head_dim=head_dim, **sizes)
            for head_dim in options.head_dim
        ]
    else:
        config = first_layers(find_shape(options.shape), options.layers)
        attention = dataclasses.replace(config.attention, windows=())
        configs = [dataclasses.replace(config, vocab_size=VOCABULARY, attention=attention)]
    for config in configs:
        config = dataclasses.replace(config, max_length=2 * options.context_tokens)
        yield random_model(config, jnp.bfloat16, is_abstract=True).model


def place(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Returns abstract arrays with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_program(program: Program, device: str, dump: pathlib.Path | None = None) -> Figure:
    """Compiles a program; returns a figure with the bytes of temporaries, whose `problem` is a message or None."""
    begin = time.perf_counter()
    labels: dict[str, Any] = {"argument_bytes": 0, "kernels": 0, "launches_per_layer": None, "problem": None}
    temporaries = 0
    try:
        compiled = program.lower().compile()
    except Exception as error:  # any error of the compiler is a result
        labels["problem"] = describe(error)
    else:
        memory = compiled.memory_analysis()
        assert memory is not None
        temporaries, text = memory.temp_size_in_bytes, compiled.as_text() or ""
        kernels = len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', text))
        labels |= {"argument_bytes": memory.argument_size_in_bytes, "kernels": kernels}
        if program.layers is not None:
            labels["launches_per_layer"] = round(launches(text) / program.layers, 1)
        labels["problem"] = find_problem(program, text, kernels, temporaries)
    labels |= {"program": program.name, "target": device, "compile_seconds": round(time.perf_counter() - begin, 1)}
    found = [] if dump is None else schedules.collect(dump, OPS)
    return figure("temporary_bytes", temporaries, schedules=[[str(x) for x in one] for one in found], **labels)


def find_problem(program: Program, text: str, kernels: int, temporaries: int) -> str | None:
    """Returns the problem of a compiled program; None if it has none."""
    if kernels < program.kernels:
        return f"{kernels} kernels, expected at least {program.kernels}"
    if program.cache is None:
        return None
    if copies := large_outputs(text, program.cache // 2):
        names = ", ".join(f"{one.name} {list(one.shape)}" for one in copies[:3])
        return f"{len(copies)} copies of a cache, such as {names}"
    if temporaries >= program.cache * program.kernels:
        return f"temporaries as large as the caches, each {format_bytes(program.cache)}"
    return None


if __name__ == "__main__":
    run_command(main, Options)
