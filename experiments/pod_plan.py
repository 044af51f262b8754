"""Whether a model with compressed caches fits a pod, and what a token will cost, before renting it.

    python -m experiments.pod_plan --shape llama-3.1-70b --context_tokens 1048576 --batch 1 --topology v5p:4x4x4

For every topology and policy it compiles decoding and one layer of prefill with the real TPU compiler, on this machine,
and reports what the compiler says of every device: bytes of weights, caches and temporaries against the chip's memory,
and the exchanges between chips. A program that does not fit is a row that says so. With two batch sizes it tells the
largest that would fit, and compiles that too (`--largest`). Flops and bytes of a token are counted from shapes; the
time that the chip's bandwidth allows, from what it must read: its part of the weights and of what the caches read.

A program of eighty layers takes the compiler minutes. With `--compiled_layers 4` it is asked about four layers and
about two, and the rest follows on a line, which is exact where layers are alike; weights and caches are of all layers.
A plan that was made is not made again (`--fresh` does).
"""

import dataclasses
import json
import pathlib
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from absl import app, flags
from flax import nnx
from jax.experimental import topologies
from kvjax_models import generate, lowering
from kvjax_models.llama import Llama, LlamaConfig
from kvjax_models.sharding import parameter_shardings
from tqdm import tqdm

import kvjax
from experiments.common import plots, results, settings, speed
from experiments.common.compiled import Collective, collectives
from experiments.common.compilers import prepare_compiler
from experiments.common.resuming import Finished
from kvjax.registry import PolicyChoice

NAME, DECODING = "pod_plan", "decoding"
# Chips and how they are joined, as libtpu spells it.
TOPOLOGIES = ("v5e:4x4", "v6e:8x8", "v5p:4x4x4")
CHIPS = json.loads((pathlib.Path(__file__).parent / "targets" / "tpus.json").read_text())["chips"]

settings.define_common(policies=("exact", "subgen", "balancekv", "chelsea", "clusterkv"), budgets=("4096",))
_SHAPE = flags.DEFINE_string(
    "shape", "llama-3.1-8b", f"Sizes of the model: {', '.join(speed.SHAPES)}, or a directory with a config.json."
)
_TOPOLOGY = flags.DEFINE_multi_string("topology", TOPOLOGIES, "Chips and how they are joined; repeatable.")
_CONTEXT = flags.DEFINE_integer("context_tokens", 131072, "Longest prompt.")
_NEW = flags.DEFINE_integer("max_new_tokens", 1024, "Most tokens after it.")
_BATCH = flags.DEFINE_integer("batch", 8, "Sequences, over all groups.")
_LAYERS = flags.DEFINE_integer("layers", None, "Layers, if not all; weights and caches are then of so many.")
_COMPILED = flags.DEFINE_integer("compiled_layers", None, "Layers to compile, if not all; even, and 4 at least.")
_PREFILL = flags.DEFINE_enum(
    "prefill", "exact", ["exact", "streaming"], "Whether prompts are read exactly or through the cache."
)
_CHUNK = flags.DEFINE_integer("prefill_chunk", 256, "Tokens per chunk of exact prefill.")
_FRESH = flags.DEFINE_bool("fresh", False, "Make plans anew that an earlier run with this output_dir made.")
_LARGEST = flags.DEFINE_bool("largest", False, "Also find the largest batch that fits, by two more programs.")


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiler says of one device's part of a program."""

    arguments: int = 0  # bytes
    temporaries: int = 0  # bytes
    collectives: tuple[Collective, ...] = ()
    seconds: float = 0.0  # to compile
    problem: str | None = None  # the compiler's words, where it refuses


@dataclasses.dataclass(frozen=True)
class Plan:
    """A setting on a topology."""

    topology: str
    setting: PolicyChoice
    batch: int
    programs: dict[str, Program]
    weight_bytes: int  # per device
    cache_bytes: int  # per device
    read_bytes: int  # per device and decoding step, of the caches
    flops: int  # per device and decoding step
    compiled_layers: int  # of the decoding program; what it says of all layers follows from it
    largest: int | None = None  # batch that fits, and was compiled; None where that was not asked

    @property
    def chip(self) -> dict[str, float]:
        return CHIPS[self.topology.partition(":")[0]]

    @property
    def decode(self) -> Program:
        return self.programs[DECODING]

    @property
    def prefill_temporaries(self) -> int:
        """Bytes of the fullest program that reads prompts."""
        return max(program.temporaries for name, program in self.programs.items() if name != DECODING)

    @property
    def used(self) -> int:
        """Bytes of the fullest program on every device: decoding, or prefill beside the caches and weights."""
        prefill = self.weight_bytes + self.cache_bytes + self.prefill_temporaries
        return max(self.decode.arguments + self.decode.temporaries, prefill)

    @property
    def problem(self) -> str | None:
        """Why it cannot be; None where it can."""
        refused = [f"{name}: {program.problem}" for name, program in self.programs.items() if program.problem]
        if refused:
            return "; ".join(refused)
        memory = self.chip["memory_gb"] * 1e9
        return None if self.used <= memory else f"{self.used / 1e9:.1f} GB do not fit in {memory / 1e9:.0f} GB"

    @property
    def ms_per_token(self) -> float:
        """What the memory's bandwidth and the matrix units allow at best."""
        reading = (self.weight_bytes + self.read_bytes) / (1e9 * self.chip["bandwidth_gb_s"])
        return 1e3 * max(reading, self.flops / (1e12 * self.chip["bfloat16_tflops"]))


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    config = speed.shape(_SHAPE.value)
    layers = 2 if flags.FLAGS.quick else _LAYERS.value
    if layers is not None:
        config = of_layers(config, layers)
    prepare_compiler()
    chosen = settings.settings(flags.FLAGS.policy, flags.FLAGS.budget)
    # A single layer's program is not like those of more: lines through it were off by tens of gigabytes.
    if _COMPILED.value is not None and (_COMPILED.value < 4 or _COMPILED.value % 2):
        raise app.UsageError(f"--compiled_layers={_COMPILED.value}: it must be even, and at least 4")
    directory = pathlib.Path(flags.FLAGS.output_dir)
    finished = Finished(directory / f"{NAME}.jsonl", fresh=_FRESH.value)
    plans = []
    progress = tqdm(total=len(_TOPOLOGY.value) * len(chosen), leave=False)
    for topology in _TOPOLOGY.value:
        for setting in chosen:
            progress.set_description(f"{topology}, {settings.label(setting)}")
            plans.append(kept(finished, config, topology, setting))
            progress.update()
    progress.close()
    show(plans)
    results.write_rows(directory / f"{NAME}.json", [row for planned in plans for row in make_rows(planned)])
    plot(directory / f"{NAME}.png", plans)
    print(f"Rows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def kept(finished: Finished, config: LlamaConfig, topology: str, setting: PolicyChoice) -> Plan:
    """The plan of a setting: as it was made before, or made now."""
    names = ("context_tokens", "max_new_tokens", "batch", "prefill", "prefill_chunk", "compiled_layers", "largest")
    options = {name: flags.FLAGS[name].value for name in (*names, "mesh_data", "mesh_sequence")}
    unit = {"config": dataclasses.asdict(config), "topology": topology, **settings.description(setting), **options}
    if unit not in finished:
        planned = largest(config, topology, setting) if _LARGEST.value else plan(config, topology, setting)
        finished.add(unit, {name: value for name, value in dataclasses.asdict(planned).items() if name != "setting"})
    value = finished[unit]
    programs = {
        name: Program(**program | {"collectives": tuple(Collective(*exchange) for exchange in program["collectives"])})
        for name, program in value["programs"].items()
    }
    return Plan(**value | {"programs": programs, "setting": setting})


def plan(config: LlamaConfig, topology: str, setting: PolicyChoice, batch: int | None = None) -> Plan:
    """Compiles a setting's programs for a topology.

    Raises:
        ValueError: for a chip that is not known, or a model that the topology's chips do not divide.
    """
    batch = _BATCH.value if batch is None else batch
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"--topology={topology}: known chips are {', '.join(CHIPS)}")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = kvjax.make_mesh(
        config.kv_heads,
        data=flags.FLAGS.mesh_data,
        tensor=len(devices) // flags.FLAGS.mesh_data,
        sequence=flags.FLAGS.mesh_sequence,
        devices=devices,
    )
    model = abstract_model(config, mesh)
    sizes: dict[str, Any] = {"batch": batch, "max_prompt": _CONTEXT.value, "max_new": _NEW.value}
    sizes["streaming"] = _PREFILL.value == "streaming"
    specs = generate.cache_specs(model, **sizes)
    policy = settings.fitted(setting, specs[0], _CONTEXT.value + _NEW.value)

    def generator_of(model: Llama) -> generate.Generator:
        return generate.Generator(model, policy, **sizes, prefill_chunk=_CHUNK.value)

    generator = generator_of(model)
    state = lowering.placed(jax.eval_shape(generator.start), mesh)

    def through(layers: int) -> dict[str, Program]:
        """The programs that go through so many layers."""
        few = generator_of(abstract_model(of_layers(config, layers), mesh))
        begun = lowering.placed(jax.eval_shape(few.start), mesh)
        lowered = {DECODING: lowering.lower_decode(few, begun)}
        if few.streaming:
            lowered["reading"], *_, lowered["compaction"] = lowering.lower_append(few, begun)
        return {name: compiled(program) for name, program in lowered.items()}

    count = min(config.layers, _COMPILED.value or config.layers)
    programs = through(count)
    if count < config.layers:
        fewer, steps = through(count // 2), (config.layers - count) / (count - count // 2)
        programs = {name: on_a_line(fewer[name], programs[name], steps) for name in programs}
    if not generator.streaming:
        prompt = -(-_CONTEXT.value // _CHUNK.value) * _CHUNK.value
        reading, compression = lowering.lower_prefill(generator, prompt)
        programs |= {"reading": compiled(reading), "compression": compiled(compression)}
    return Plan(
        topology,
        setting,
        batch,
        programs,
        weight_bytes=part_bytes(model),
        cache_bytes=part_bytes(state.layers),
        # Blocks that a query recalls may all lie on one device.
        read_bytes=sum(map(kvjax.read_bytes, part(state.layers))),
        flops=2 * batch * sum(leaf.size for leaf in jax.tree.leaves(model)) // len(devices),
        compiled_layers=count,
    )


def largest(config: LlamaConfig, topology: str, setting: PolicyChoice) -> Plan:
    """The plan, and the largest batch that fits: what a row costs follows from two batches, and the compiler is asked
    about the result."""
    single = plan(config, topology, setting)
    double = plan(config, topology, setting, 2 * single.batch)
    if single.problem or double.decode.problem or double.used <= single.used:
        return dataclasses.replace(single, largest=0) if single.problem else single
    per_row = (double.used - single.used) / single.batch
    rows = int(single.batch + (single.chip["memory_gb"] * 1e9 - single.used) // per_row)
    rows -= rows % flags.FLAGS.mesh_data
    return dataclasses.replace(single, largest=0 if plan(config, topology, setting, rows).problem else rows)


def of_layers(config: LlamaConfig, layers: int) -> LlamaConfig:
    """The config of a model with the first layers alone."""
    return dataclasses.replace(config, layers=layers, windows=config.windows[:layers])


def abstract_model(config: LlamaConfig, mesh: jax.sharding.Mesh) -> Llama:
    """A bfloat16 model without values, on a mesh."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    place = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)  # noqa: E731
    return jax.tree.map(place, model, parameter_shardings(model, config, mesh))


def on_a_line(few: Program, more: Program, steps: float) -> Program:
    """What follows for a program with so many times more layers again than the second has over the first."""
    added = Counter(more.collectives) - Counter(few.collectives)
    again = [collective for collective, count in added.items() for _ in range(round(count * steps))]
    return Program(
        round(more.arguments + steps * (more.arguments - few.arguments)),
        max(more.temporaries, round(more.temporaries + steps * (more.temporaries - few.temporaries))),
        (*more.collectives, *again),
        few.seconds + more.seconds,
        more.problem or few.problem,
    )


def compiled(lowered: jax.stages.Lowered) -> Program:
    """What the compiler says of a program; an oversized one is no error."""
    begin = time.perf_counter()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Program(seconds=time.perf_counter() - begin, problem=next(iter(str(error).splitlines())))
    memory = program.memory_analysis()
    assert memory is not None
    return Program(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(collectives(program.as_text() or "")),
        time.perf_counter() - begin,
    )


def part(tree: Any) -> Any:
    """One device's part of abstract arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


def part_bytes(tree: Any) -> int:
    """Bytes of one device's part of abstract arrays."""
    return kvjax.cache_bytes(part(tree)).device


def exchanged(program: Program) -> str:
    """The collectives of a program, in words."""
    counts = Counter(collective.kind for collective in program.collectives)
    total = sum(collective.bytes for collective in program.collectives)
    named = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{named}: {results.readable_bytes(total)}" if counts else "none"


def make_rows(planned: Plan) -> list[results.Row]:
    """A row for each figure; `extra` says what else was compiled."""
    shared: dict[str, Any] = {
        "experiment": NAME,
        "model": _SHAPE.value,
        "policy": planned.setting.name,
        "variant": planned.setting.variant,
        "context_tokens": _CONTEXT.value,
        "batch": planned.batch,
        "device_bytes": planned.cache_bytes,
        "read_bytes_per_token": planned.read_bytes,
        "weight_bytes": planned.weight_bytes,
        "extra": {
            "budget": str(planned.setting.budget) if planned.setting.budget else None,
            "topology": planned.topology,
            "problem": planned.problem,
            "flops": planned.flops,
            "largest_batch": planned.largest,
            "collectives": [planned._asdict() for planned in planned.decode.collectives],
            "prefill": _PREFILL.value,
            "temporaries": {name: program.temporaries for name, program in planned.programs.items()},
            "compiled_layers": planned.compiled_layers,
            "compile_seconds": sum(program.seconds for program in planned.programs.values()),
        },
    }
    rows = [results.Row(**shared, metric="ms_per_token_bound", value=planned.ms_per_token)]
    if planned.decode.problem is None:
        rows.append(results.Row(**shared, metric="bytes_per_device", value=planned.used))
    return rows


def show(plans: Sequence[Plan]) -> None:
    """A line per plan; bytes are of one device."""
    lines = [
        (
            f"{planned.topology}, {settings.label(planned.setting)}",
            results.readable_bytes(planned.weight_bytes),
            results.readable_bytes(planned.cache_bytes),
            results.readable_bytes(planned.decode.temporaries),
            results.readable_bytes(planned.prefill_temporaries),
            exchanged(planned.decode),
            f"{planned.ms_per_token:.2f}",
            "-" if planned.largest is None else str(planned.largest),
            planned.problem or "fits",
        )
        for planned in plans
    ]
    columns = ("", "weights", "caches", "decode", "prefill", "exchanged per step", "ms", "rows", "")
    title = (
        f"{_SHAPE.value}, {_BATCH.value} sequences of {_CONTEXT.value} tokens: bytes per chip of weights, caches and "
        "temporaries of decoding and prefill; least ms per step; most rows that fit"
    )
    results.print_table(title, columns, lines)


def plot(path: pathlib.Path, plans: Sequence[Plan]) -> None:
    """Bytes per chip against its memory, a panel per topology."""
    names = list(dict.fromkeys(planned.topology for planned in plans))
    figure, axes = plt.subplots(1, len(names), figsize=(1 + 4.5 * len(names), 4), squeeze=False)
    for axis, name in zip(axes[0], names, strict=True):
        of_topology = [planned for planned in plans if planned.topology == name]
        labels = [settings.label(planned.setting) for planned in of_topology]
        base = [0.0] * len(of_topology)
        for part, values in {
            "weights": [planned.weight_bytes for planned in of_topology],
            "caches": [planned.cache_bytes for planned in of_topology],
            "temporaries": [max(plan.used - plan.weight_bytes - plan.cache_bytes, 0) for plan in of_topology],
        }.items():
            heights = [value / 1e9 for value in values]
            axis.bar(labels, heights, bottom=base, label=part)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        axis.axhline(of_topology[0].chip["memory_gb"], color="black", linestyle="--", label="memory")
        axis.set_title(name, fontsize=10)
        axis.tick_params(axis="x", rotation=60)
    axes[0][0].set_ylabel("GB per chip")
    axes[0][-1].legend(fontsize=8)
    plots.save(figure, path)


if __name__ == "__main__":
    app.run(main)
