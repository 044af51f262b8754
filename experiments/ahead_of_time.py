"""Compiles kernels and decoding for TPUs and GPUs that are not here, with their real compilers.

    python -m experiments.ahead_of_time
    python -m experiments.ahead_of_time --device v5e --policy uniform --layers 2
    python -m experiments.ahead_of_time --device h200 --shape llama-3.1-8b --layers 4 --batch 1
    python -m experiments.ahead_of_time --device v5e --op cluster_recall --schedule

The compilers, libtpu and JAX's for CUDA, come from the package index and need no TPU or GPU (`make aot` and
`make aot-gpu` install them). For every device it compiles the kernels at the shapes of production, one layer of reading
a prompt, and one block of decoding steps of a Llama of a few layers with each policy, its state donated as it is in
use. A line per program says how long that took, bytes of arguments and temporaries, how many kernels the program holds,
and how many operations a step starts for every layer (with those of no layer, shared among all). It fails where
something does not compile, where a kernel that is meant to be used is not, and where decoding copies a cache: where it
writes an array half as large as a layer's largest buffer, or needs as much memory for all layers beside its arguments.
`--schedule` adds what the TPU's compiler says of every kernel: bundles, those of each loop, and the longest chain in a
block.
"""

import dataclasses
import importlib.util
import pathlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from tqdm import tqdm

from experiments.common import results, schedules, settings, speed, suites
from experiments.common.compiled import large_outputs, launches
from experiments.common.compilers import prepare_compiler
from experiments.common.options import Experiment, Policies, each
from experiments.common.results import Row
from kvjax.budget import format_bytes
from kvjax_models.generation import lowering, prefill
from kvjax_models.generation.generator import Generator
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

NAME = "ahead_of_time"
# The smallest topology of each kind.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# What XLA needs to know of a GPU that is not here.
GPUS = {"h200": pathlib.Path(__file__).parent / "targets" / "h200.txtpb"}
# Their benchmarks say at which shapes.
OPS = ("weighted_decode", "cluster_recall", "select_blocks", "k_means", "soft_match", "balanced_walk")
DECODING_OPS = ("weighted_decode", "cluster_recall")
VOCABULARY = 128  # small: what is as large as a cache shall be one
CHUNK = 256  # tokens of a prompt that are read at a time
COLUMNS = ("compile_seconds", "argument_bytes", "kernels", "launches_per_layer")


@dataclasses.dataclass(frozen=True)
class Options(Policies):
    """Options of this experiment."""

    policy: tuple[str, ...] = each(*suites.SUITES["compiled"].policies)
    budget: tuple[str, ...] = each(*suites.SUITES["compiled"].budgets)
    device: tuple[str, ...] = each(*TOPOLOGIES, choices=(*TOPOLOGIES, *GPUS))
    """Devices to compile for, all TPUs by default; repeatable."""
    op: tuple[str, ...] = each(*OPS, choices=OPS)  # ops whose kernels are compiled by themselves; repeatable
    shape: str | None = None
    """Sizes of the Llama: those of a shape (llama-3.1-8b, ...), or of a directory with a config.json; a small one with
    the heads of a large one by default."""
    layers: int = 8  # layers of the Llama
    head_dim: tuple[int, ...] = each(128, 64)  # head dimensions of the Llama, if it has no shape; repeatable
    batch: int = 8  # sequences decoded together
    context_tokens: int = 16384  # longest prompt
    schedule: bool = False  # tell bundles and critical paths of TPU kernels, too

    QUICK: ClassVar[dict[str, Any]] = {"device": tuple(TOPOLOGIES)[:1], "layers": 2}


class Program(NamedTuple):
    """Something to compile."""

    name: str
    lowered: jax.stages.Lowered
    kernels: int  # that it must hold, at least: one per layer or op
    cache: int | None  # bytes of the largest buffer that it may not copy; None: it may
    layers: int | None = None  # that a step goes through


def run(options: Options) -> list[Row]:
    """The rows of every program; a program with a problem is a row that says so."""
    dump = pathlib.Path(tempfile.mkdtemp()) if options.schedule else None
    prepare_compiler(dump)
    done: list[Row] = []
    for device in options.device:
        sharding = on_device(device)
        # Kernels ask what they are lowered for.
        with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
            programs = [
                *kernel_programs(options, sharding, device),
                *prefill_programs(options, sharding, device),
                *decoding_programs(options, sharding),
            ]
            compiled = [compile_program(program, device, dump) for program in tqdm(programs, desc=device, leave=False)]
        told = [
            (
                str(row.policy),
                *(str(row.extra[name]) for name in COLUMNS),
                f"{row.value:.0f}",
                row.extra["problem"] or "ok",
            )
            for row in compiled
        ]
        results.print_table(f"Compiled ahead of time for {device}", ("program", *COLUMNS, "temporary_bytes", ""), told)
        if kernels := [(str(row.policy), *one) for row in compiled for one in row.extra["schedules"]]:
            results.print_table(f"Schedules for {device}", ("program", *schedules.Schedule._fields), kernels)
        done += compiled
    if dump is not None:
        shutil.rmtree(dump)
    return done


def fail(_: pathlib.Path, rows: Sequence[Row]) -> None:
    """Ends the command with an error where a program has a problem."""
    wrong = [row for row in rows if row.extra["problem"]]
    if wrong:
        raise SystemExit("\n".join("{} for {device}: {problem}".format(row.policy, **row.extra) for row in wrong))


def on_device(device: str) -> jax.sharding.NamedSharding:
    """Everything on one chip of the kind.

    Raises:
        ImportError: where libtpu is not installed.
        NotImplementedError: where JAX's CUDA compiler is not.
    """
    if device in GPUS:
        given: dict[str, Any] = {"target_config": GPUS[device].read_text(), "topology": "1x1x1"}
        topology = topologies.get_topology_desc(platform="cuda", topology_name=device, **given)
    else:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[device])
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("chip",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def kernel_programs(options: Options, sharding: jax.sharding.Sharding, device: str) -> Iterator[Program]:
    """Every op that has a kernel for the device, at the shapes of production that the kernel takes."""

    def array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    implementation = "mosaic_gpu" if device in GPUS else "mosaic_tpu"
    for op in options.op:
        if importlib.util.find_spec(f"pallas_kernels.{op}.{implementation}") is None:
            continue
        for shape in importlib.import_module(f"pallas_kernels.{op}.benchmark").PRODUCTION:
            arguments = shape.arguments(array)
            try:
                lowered = jax.jit(shape.function(implementation=implementation)).lower(*arguments)
            except NotImplementedError as reason:
                print(f"{op} {shape} is left to XLA on {device}: {reason}")
                continue
            # Compression may lay out anew what it reads; decoding may not, at every token.
            largest = max(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
            yield Program(f"{op} {shape}", lowered, kernels=1, cache=largest if op in DECODING_OPS else None)


def decoding_programs(options: Options, sharding: jax.sharding.Sharding) -> Iterator[Program]:
    """A block of decoding steps with every policy, for every head dimension."""
    for model in models(options):
        head_dim = model.config.head_dim
        for setting in settings.settings(options.policy, options.budget):
            sizes: dict[str, Any] = {
                "batch": options.batch,
                "max_prompt_tokens": options.context_tokens,
                "max_new_tokens": 512,
            }
            spec = cache_specs(model, **sizes)[0]
            generator = Generator(model, settings.fitted(setting, spec, options.context_tokens), **sizes)
            state = jax.eval_shape(generator.init_state)
            largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.layers[0]))
            yield Program(
                f"{settings.label(setting)} D={head_dim}, {options.layers} layers",
                lowering.lower_decode(generator, placed(state, sharding), sharding),
                kernels=options.layers,
                cache=largest,
                layers=options.layers,
            )


def prefill_programs(options: Options, sharding: jax.sharding.Sharding, device: str) -> Iterator[Program]:
    """One layer over a prompt, for every head dimension: on TPUs with a kernel in place of a loop of products. Whether
    a GPU has cuDNN, only a process on one can say."""
    for model in models(options):
        head_dim = model.config.head_dim
        tokens, dtype = options.context_tokens, model.embedding.param_dtype
        x = jax.ShapeDtypeStruct((1, tokens // CHUNK, CHUNK, model.config.width), dtype)
        given = x, jax.ShapeDtypeStruct((1,), jnp.int32)
        layer, given = placed((model.layers[0], given), sharding)
        lowered = prefill.prefill_layer.lower(layer, model.config.rotary(0, tokens), None, False, 0, *given)
        yield Program(
            f"prefill D={head_dim}, one of the layers", lowered, kernels=int(device in TOPOLOGIES), cache=None
        )


def models(options: Options) -> Iterator[Llama]:
    """The Llamas without values: one of every head dimension, or one of a shape."""
    if options.shape is None:
        sizes: Mapping[str, Any] = {"width": 1024, "mlp_width": 2048, "query_heads": 32, "kv_heads": 8}
        configs = [
            LlamaConfig(vocab_size=VOCABULARY, layers=options.layers, head_dim=head_dim, max_length=1, **sizes)
            for head_dim in options.head_dim
        ]
    else:
        given = speed.shape(options.shape)
        configs = [dataclasses.replace(given, vocab_size=VOCABULARY, layers=options.layers, windows=())]
    for config in configs:
        config = dataclasses.replace(config, max_length=2 * options.context_tokens)
        yield nnx.eval_shape(lambda config=config: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))


def placed(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    """Abstract arrays at a place."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def compile_program(program: Program, device: str, dump: pathlib.Path | None = None) -> Row:
    """What the compiler said, and what it dumped."""
    begin = time.perf_counter()
    problem, kernels, arguments, temporaries, per_layer = None, 0, 0, 0, None
    try:
        compiled = program.lowered.compile()
    except Exception as error:  # whatever the compiler objects to is the finding
        problem = next(iter(str(error).splitlines()), type(error).__name__)
    else:
        memory = compiled.memory_analysis()
        assert memory is not None
        arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
        text = compiled.as_text() or ""
        kernels = len(re.findall(r'custom_call_target="(?:tpu_custom_call|mosaic_gpu\w*)"', text))
        per_layer = None if program.layers is None else round(launches(text) / program.layers, 1)
        problem = fault(program, text, kernels, temporaries)
    of: dict[str, Any] = {
        "compile_seconds": round(time.perf_counter() - begin, 1),
        "argument_bytes": arguments,
        "kernels": kernels,
        "launches_per_layer": per_layer,
    }
    found = [] if dump is None else schedules.taken(dump, OPS)
    of |= {"device": device, "problem": problem, "schedules": [[str(x) for x in one] for one in found]}
    return results.row(NAME, "random", "temporary_bytes", temporaries, policy=program.name, **of)


def fault(program: Program, text: str, kernels: int, temporaries: int) -> str | None:
    """What is wrong with a compiled program, None where nothing is."""
    if kernels < program.kernels:
        return f"{kernels} kernels, at least {program.kernels} were expected"
    if program.cache is None:
        return None
    if copies := large_outputs(text, program.cache // 2):
        named = ", ".join(f"{one.name} {list(one.shape)}" for one in copies[:3])
        return f"{len(copies)} copies of a cache, such as {named}"
    if temporaries >= program.cache * program.kernels:
        return f"temporaries as large as the caches, each {format_bytes(program.cache)}"
    return None


EXPERIMENT = Experiment(NAME, Options, run, fail)
if __name__ == "__main__":
    EXPERIMENT.main()
