"""Predicts whether a model with compressed caches fits a TPU pod, and the minimum time of a token.

    python -m experiments.pod_plan --shape llama-3.1-70b --context_tokens 1048576 --batch 1 --topology v5p:4x4x4

For every topology and policy, decoding and prefill are compiled with the TPU compiler on this machine. The output has
the bytes of weights, caches and temporaries per chip, and the collectives of a decode step. The minimum time of a token
follows from its bytes and operations and the chip's published rates.

Programs of all layers take minutes to compile, so `--compiled_layers` and half of them are compiled and the figures are
extrapolated. For equal layers, this is exact except for temporaries: with few layers they fit in on-chip memory, which
is not counted (96 instead of 147 MiB for 12 layers of Llama-3.1-8B with SubGen on v5e).
"""

import dataclasses
import json
import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import kvjax
from experiments.common import ROOT, caches
from experiments.common.compiled import Collective, collectives
from experiments.common.compilers import prepare_compiler
from experiments.common.console import print_table
from experiments.common.flags import Flags, one_of, repeatable, run_command
from experiments.common.output import Figure, figure, write_figures
from experiments.common.shapes import find_shape, first_layers, random_model, zero_scorer
from kvjax.budget import format_bytes
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import lowering
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.state import cache_specs
from kvjax_models.sharding import parameter_shardings

DECODING = "decoding"
CHIPS = json.loads((ROOT / "experiments" / "targets" / "tpus.json").read_text())["chips"]


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a plan."""

    policy: tuple[str, ...] = repeatable("exact", "subgen", "balancekv", "chelsea", "clusterkv")
    budget: tuple[str, ...] = repeatable("4096 slots")
    shape: str = "llama-3.1-8b"  # Sizes of the model: a name of `common.shapes`, or a directory with a config.json.
    topology: tuple[str, ...] = repeatable("v5e:4x4", "v6e:8x8", "v5p:4x4x4")  # As libtpu spells them; repeatable.
    context_tokens: int = 131072  # Maximum length of prompts.
    max_new_tokens: int = 1024  # Maximum number of tokens after it.
    batch: int = 8  # Sequences over all groups of chips.
    compiled_layers: int = 4  # Layers to compile: even, and at least 4; 0: all.
    prefill: str = one_of("exact", ("exact", "streaming"))  # Exact prefill, or prefill through the compressed cache.
    prefill_chunk: int = 256  # Tokens per chunk of exact prefill.
    mesh_data: int = 1  # Groups of chips; each group has some of the sequences.
    mesh_sequence: int | None = None  # Chips that share one KV head; by default as few as possible.
    output_dir: pathlib.Path = pathlib.Path("build/pod_plan")  # Directory of the figures.

    def __post_init__(self) -> None:
        super().__post_init__()
        # The program of a single layer differs: extrapolations from it were off by tens of gigabytes.
        if self.compiled_layers and (self.compiled_layers < 4 or self.compiled_layers % 2):
            raise ValueError(f"compiled_layers={self.compiled_layers} must be 0, or even and at least 4")


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiler's report of one device's part of a program; sizes are bytes."""

    arguments: int = 0
    temporaries: int = 0
    results: int = 0
    collectives: tuple[Collective, ...] = ()
    problem: str | None = None  # the compiler's error


@dataclasses.dataclass(frozen=True)
class Plan:
    """A setting on a topology; bytes and operations are per device."""

    setting: str
    chip: dict[str, float]  # published figures
    programs: dict[str, Program]
    parameter_bytes: int
    cache_bytes: int
    read_bytes: int  # of the caches, per decode step
    flops: int  # per decode step

    @property
    def prefill_temporaries(self) -> int:
        """Temporary bytes of prefill, with the arrays that exact prefill holds between its programs."""
        held = self.programs["prefill"].results if "prefill" in self.programs else 0
        return held + max(program.temporaries for name, program in self.programs.items() if name != DECODING)

    @property
    def used(self) -> int:
        """Peak bytes of a device, in decoding or in prefill."""
        decoding = self.programs[DECODING]
        prefill = self.parameter_bytes + self.cache_bytes + self.prefill_temporaries
        return max(decoding.arguments + decoding.temporaries, prefill)

    @property
    def problem(self) -> str | None:
        """The reason why the plan is impossible; None if it is possible."""
        refused = [f"{name}: {program.problem}" for name, program in self.programs.items() if program.problem]
        if refused:
            return "; ".join(refused)
        memory = self.chip["memory_gb"] * 1e9
        return None if self.used <= memory else f"{self.used / 1e9:.1f} GB do not fit in {memory / 1e9:.0f} GB"

    @property
    def ms_per_token(self) -> float:
        """Lower bound of a decode step from memory bandwidth and matrix units."""
        reading = (self.parameter_bytes + self.read_bytes) / (1e9 * self.chip["bandwidth_gb_s"])
        return 1e3 * max(reading, self.flops / (1e12 * self.chip["bfloat16_tflops"]))


def main(options: Options) -> None:
    """Prints the plans and writes the figures."""
    prepare_compiler()
    config = find_shape(options.shape)
    figures: list[Figure] = []
    for topology in options.topology:
        settings = caches.parse_settings(options.policy, options.budget)
        plans = [make_plan(config, topology, setting, options) for setting in settings]
        print_plans(options, topology, plans)
        figures += [one for plan in plans for one in plan_figures(options, topology, plan)]
        write_figures(options.output_dir / "pod_plan.json", figures)


def make_plan(config: LlamaConfig, topology: str, setting: caches.Setting, options: Options) -> Plan:
    """Compiles the programs of a setting for a topology.

    Args:
        config: configuration of the model.
        topology: topology, as libtpu spells it.
        setting: settings of the cache.
        options: the options.

    Returns:
        The plan.

    Raises:
        ValueError: if the chip is unknown, or the chips cannot share the model.
    """
    chip = topology.partition(":")[0]
    if chip not in CHIPS:
        raise ValueError(f"--topology={topology}: known chips are {', '.join(CHIPS)}")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    parts: dict[str, Any] = {"data": options.mesh_data, "tensor": len(devices) // options.mesh_data}
    mesh = kvjax.make_mesh(config.kv_heads, **parts, sequence=options.mesh_sequence, devices=devices)
    model = abstract_model(config, mesh)
    sizes: dict[str, Any] = {"batch": options.batch, "max_prompt_tokens": options.context_tokens}
    sizes |= {"max_new_tokens": options.max_new_tokens, "streaming": options.prefill == "streaming"}
    policy = setting.resolve(cache_specs(model, **sizes)[0], options.context_tokens + options.max_new_tokens)

    def make_generator(model: Llama) -> Generator:
        scorer = jax.eval_shape(lambda: zero_scorer(model.config))
        return Generator(model, policy, **sizes, prefill_chunk=options.prefill_chunk, scorer=scorer)

    def compile_layers(layers: int) -> dict[str, Program]:
        """Compiles the programs of the first `layers` layers."""
        few = make_generator(abstract_model(first_layers(config, layers), mesh))
        state = lowering.abstract_state(jax.eval_shape(few.init_state), mesh)
        lowered = {DECODING: lowering.lower_decode(few, state)}
        if few.streaming:
            lowered["append"], *_, lowered["compaction"] = lowering.lower_append(few, state)
        return {name: compile_program(program) for name, program in lowered.items()}

    generator = make_generator(model)
    state = lowering.abstract_state(jax.eval_shape(generator.init_state), mesh)
    count = min(config.layers, options.compiled_layers or config.layers)
    programs = compile_layers(count)
    if count < config.layers:
        fewer, steps = compile_layers(count // 2), (config.layers - count) / (count - count // 2)
        programs = {name: extrapolate(fewer[name], programs[name], steps) for name in programs}
    if not generator.streaming:
        prefill, compression = lowering.lower_prefill(generator, options.context_tokens)
        programs |= {"prefill": compile_program(prefill), "compression": compile_program(compression)}
    return Plan(
        str(setting),
        CHIPS[chip],
        programs,
        parameter_bytes=kvjax.cache_bytes(device_part(model)).device,
        cache_bytes=kvjax.cache_bytes(device_part(state.layers)).device,
        # All blocks that a query selects may be on one device.
        read_bytes=sum(map(kvjax.read_bytes, device_part(state.layers))),
        flops=2 * options.batch * sum(leaf.size for leaf in jax.tree.leaves(model)) // mesh.size,
    )


def abstract_model(config: LlamaConfig, mesh: jax.sharding.Mesh) -> Llama:
    """Returns a bfloat16 model without values, on a mesh."""
    model = random_model(config, jnp.bfloat16, is_abstract=True).model

    def place(x: Any, sharding: jax.sharding.Sharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(place, model, parameter_shardings(model, config, mesh))


def extrapolate(few: Program, more: Program, steps: float) -> Program:
    """Extrapolates linearly from two programs.

    Args:
        few: program with fewer layers.
        more: program with more layers.
        steps: how many times the difference of layers is added to the second.

    Returns:
        The program.
    """
    added = Counter(more.collectives) - Counter(few.collectives)
    again = [collective for collective, count in added.items() for _ in range(round(count * steps))]
    return Program(
        round(more.arguments + steps * (more.arguments - few.arguments)),
        max(more.temporaries, round(more.temporaries + steps * (more.temporaries - few.temporaries))),
        collectives=(*more.collectives, *again),
        problem=more.problem or few.problem,
    )


def compile_program(lowered: jax.stages.Lowered) -> Program:
    """Compiles a program; one that exceeds the memory is reported as a problem."""
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Program(problem=next(iter(str(error).splitlines())))
    memory = program.memory_analysis()
    assert memory is not None
    return Program(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        tuple(collectives(program.as_text() or "")),
    )


def device_part(tree: Any) -> Any:
    """Returns one device's part of abstract arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


def describe_collectives(collectives: Sequence[Collective]) -> str:
    """Returns the number of collectives of each kind, and their bytes."""
    counts = Counter(collective.kind for collective in collectives)
    names = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{names}: {format_bytes(sum(one.bytes for one in collectives))}" if counts else "none"


def print_plans(options: Options, topology: str, plans: list[Plan]) -> None:
    """Prints a line per plan; bytes are per chip."""
    lines = []
    for plan in plans:
        decoding = plan.programs[DECODING]
        sizes = plan.parameter_bytes, plan.cache_bytes, decoding.temporaries, plan.prefill_temporaries
        collectives = describe_collectives(decoding.collectives)
        line = plan.setting, *map(format_bytes, sizes), collectives, f"{plan.ms_per_token:.2f}", plan.problem or "fits"
        lines.append(line)
    columns = ("", "weights", "caches", "decode", "prefill", "collectives per step", "min. ms", "")
    title = f"{options.shape} on {topology}, {options.batch} sequences of {options.context_tokens} tokens"
    print_table(f"{title}, bytes per chip", columns, lines)


def plan_figures(options: Options, topology: str, plan: Plan) -> list[Figure]:
    """Returns the figures of a plan."""
    names = "setting", "parameter_bytes", "cache_bytes", "read_bytes", "problem"
    labels: dict[str, Any] = {name: getattr(plan, name) for name in names} | {"topology": topology}
    labels |= {name: getattr(options, name) for name in ("shape", "context_tokens", "batch")}
    labels["temporaries"] = {name: program.temporaries for name, program in plan.programs.items()}
    labels["collectives"] = {
        name: [one._asdict() for one in program.collectives] for name, program in plan.programs.items()
    }
    figures = [figure("ms_per_token_bound", plan.ms_per_token, **labels)]
    is_compiled = plan.programs[DECODING].problem is None
    return [*figures, figure("bytes_per_device", plan.used, **labels)] if is_compiled else figures


if __name__ == "__main__":
    run_command(main, Options)
