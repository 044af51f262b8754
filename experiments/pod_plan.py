"""Whether a model with compressed caches fits a pod, and what a token will cost, before renting it.

    python -m experiments.pod_plan --shape llama-3.1-70b --context_tokens 1048576 --batch 1 --topology v5p:4x4x4

For every topology and policy it compiles decoding and one layer of prefill with the real TPU compiler, on this machine,
and reports what the compiler says of every device: bytes of weights, caches and temporaries against the chip's memory,
and the exchanges between chips. A program that does not fit is a row that says so. With two batch sizes it tells the
largest that would fit, and compiles that too (`--largest`). Flops and bytes of a token are counted from shapes; the
time that the chip's bandwidth allows, from what it must read: its part of the weights and of what the caches read.
What exact prefill multiplies and receives is counted from shapes, too, as chips share it and in ways that share less;
the least seconds follow from the chip's published rates.

A program of eighty layers takes the compiler minutes. With `--compiled_layers 4` it is asked about four layers and
about two, and the rest follows on a line, which is exact where layers are alike; weights and caches are of all layers.
A plan that was made is not made again (`--fresh` does).
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from tqdm import tqdm

from experiments.common import planning, plots, results, settings, speed, suites
from experiments.common.compiled import Collective
from experiments.common.compilers import prepare_compiler
from experiments.common.options import Experiment, Policies, each, one_of
from experiments.common.planning import Plan, Program
from experiments.common.prefill_costs import Cost
from experiments.common.results import Row
from experiments.common.resuming import Finished
from kvjax.budget import format_bytes
from kvjax.registry import PolicyChoice
from kvjax_models.model.config import LlamaConfig

NAME = "pod_plan"


@dataclasses.dataclass(frozen=True)
class Options(Policies):
    """Options of this experiment."""

    policy: tuple[str, ...] = each(*suites.SUITES["pods"].policies)
    budget: tuple[str, ...] = each(*suites.SUITES["pods"].budgets)
    shape: str = "llama-3.1-8b"
    """Sizes of the model: those of a shape (llama-3.1-8b, llama-3.1-70b, ...), or of a directory with a config.json."""
    topology: tuple[str, ...] = each("v5e:4x4", "v6e:8x8", "v5p:4x4x4")
    """Chips and how they are joined, as libtpu spells it; repeatable."""
    context_tokens: int = 131072  # longest prompt
    max_new_tokens: int = 1024  # most tokens after it
    batch: int = 8  # sequences, over all groups
    layers: int | None = None  # layers, if not all; weights and caches are then of so many
    compiled_layers: int | None = None  # layers to compile, if not all; even, and 4 at least
    prefill: str = one_of("exact", ("exact", "streaming"))
    """Whether prompts are read exactly or through the cache."""
    prefill_chunk: int = 256  # tokens per chunk of exact prefill
    fresh: bool = False  # make plans anew that an earlier run with this output_dir made
    largest: bool = False  # also find the largest batch that fits, by two more programs

    QUICK: ClassVar[dict[str, Any]] = {"layers": 2}

    def __post_init__(self) -> None:
        super().__post_init__()
        # A single layer's program is not like those of more: lines through it were off by tens of gigabytes.
        if self.compiled_layers is not None and (self.compiled_layers < 4 or self.compiled_layers % 2):
            raise ValueError(f"--compiled_layers={self.compiled_layers}: it must be even, and at least 4")

    def sizes(self) -> planning.Sizes:
        """What every plan is for."""
        kept = [field.name for field in dataclasses.fields(planning.Sizes) if field.name != "streaming"]
        return planning.Sizes(**{name: getattr(self, name) for name in kept}, streaming=self.prefill == "streaming")


def run(options: Options) -> list[Row]:
    """The rows of every topology and setting."""
    config = speed.shape(options.shape)
    if options.layers is not None:
        config = planning.of_layers(config, options.layers)
    prepare_compiler()
    finished = Finished(options.file(f"{NAME}.jsonl"), fresh=options.fresh)
    chosen = settings.settings(options.policy, options.budget)
    plans = [
        kept(options, finished, config, topology, setting)
        for topology, setting in tqdm([(one, setting) for one in options.topology for setting in chosen], leave=False)
    ]
    costs = {one: planning.reading_costs(config, one, options.sizes()) for one in options.topology}
    show(options, plans)
    show_reading(options, costs)
    plot(options, plans)
    return [*(row for planned in plans for row in make_rows(options, planned)), *reading_rows(options, costs)]


def kept(options: Options, finished: Finished, config: LlamaConfig, topology: str, setting: PolicyChoice) -> Plan:
    """The plan of a setting: as it was made before, or made now."""
    asked = {**dataclasses.asdict(options.sizes()), "largest": options.largest}
    unit = {"config": dataclasses.asdict(config), "topology": topology, **settings.description(setting), **asked}
    if unit not in finished:
        make = planning.largest if options.largest else planning.plan
        planned = make(config, topology, setting, options.sizes())
        finished.add(unit, {name: value for name, value in dataclasses.asdict(planned).items() if name != "setting"})
    value = finished[unit]
    programs = {
        name: Program(**program | {"collectives": tuple(Collective(*exchange) for exchange in program["collectives"])})
        for name, program in value["programs"].items()
    }
    return Plan(**value | {"programs": programs, "setting": setting})


def exchanged(program: Program) -> str:
    """The collectives of a program, in words."""
    counts = Counter(collective.kind for collective in program.collectives)
    total = sum(collective.bytes for collective in program.collectives)
    named = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{named}: {format_bytes(total)}" if counts else "none"


def make_rows(options: Options, planned: Plan) -> list[Row]:
    """A row for each figure, which says what else was compiled."""
    of: dict[str, Any] = {
        "context_tokens": options.context_tokens,
        "batch": planned.batch,
        "device_bytes": planned.cache_bytes,
        "read_bytes_per_token": planned.read_bytes,
        "parameter_bytes": planned.parameter_bytes,
        "topology": planned.topology,
        "problem": planned.problem,
        "flops": planned.flops,
        "largest_batch": planned.largest,
        "collectives": [one._asdict() for one in planned.decode.collectives],
        "reading_collectives": [one._asdict() for one in planned.programs["reading"].collectives],
        "prefill": options.prefill,
        "temporaries": {name: program.temporaries for name, program in planned.programs.items()},
        "compiled_layers": planned.compiled_layers,
        "compile_seconds": sum(program.seconds for program in planned.programs.values()),
    }
    found = {"ms_per_token_bound": planned.ms_per_token}
    if planned.decode.problem is None:
        found["bytes_per_device"] = planned.used
    return [results.row(NAME, options.shape, name, value, planned.setting, **of) for name, value in found.items()]


def show(options: Options, plans: Sequence[Plan]) -> None:
    """A line per plan; bytes are of one device."""
    lines = [
        (
            f"{planned.topology}, {settings.label(planned.setting)}",
            *map(
                format_bytes,
                (
                    planned.parameter_bytes,
                    planned.cache_bytes,
                    planned.decode.temporaries,
                    planned.prefill_temporaries,
                ),
            ),
            exchanged(planned.decode),
            f"{planned.ms_per_token:.2f}",
            "-" if planned.largest is None else str(planned.largest),
            planned.problem or "fits",
        )
        for planned in plans
    ]
    columns = ("", "weights", "caches", "decode", "prefill", "exchanged per step", "ms", "rows", "")
    title = (
        f"{options.shape}, {options.batch} sequences of {options.context_tokens} tokens: bytes per chip of weights, "
        "caches and temporaries of decoding and prefill; least ms per step; most rows that fit"
    )
    results.print_table(title, columns, lines)


def reading_rows(options: Options, costs: Mapping[str, Sequence[Cost]]) -> list[Row]:
    """A row for each way to read the prompts exactly."""
    of: dict[str, Any] = {"context_tokens": options.context_tokens, "batch": options.batch, "policy": "any"}
    return [
        results.row(
            NAME,
            options.shape,
            "prefill_seconds_bound",
            sum(cost.seconds(planning.chip(topology))),
            **of,
            topology=topology,
            **dataclasses.asdict(cost),
        )
        for topology, ways in costs.items()
        for cost in ways
    ]


def show_reading(options: Options, costs: Mapping[str, Sequence[Cost]]) -> None:
    """A line per way to read the prompts exactly."""
    lines = [
        (
            f"{topology}, {cost.way}",
            format_bytes(cost.stream_bytes),
            format_bytes(cost.received_bytes),
            *(f"{seconds:.2f}" for seconds in cost.seconds(planning.chip(topology))),
            f"{sum(cost.seconds(planning.chip(topology))):.2f}",
        )
        for topology, ways in costs.items()
        for cost in ways
    ]
    columns = ("", "residual stream", "received", "attention s", "products s", "receiving s", "together")
    title = "Exact prefill, the last way of each is taken: bytes per chip, and seconds at published rates"
    results.print_table(title, columns, lines)


def plot(options: Options, plans: Sequence[Plan]) -> None:
    """Bytes per chip against its memory, a panel per topology."""
    figure, axes = plots.panels(len(options.topology), size=(4.5, 4))
    for axis, name in zip(axes, options.topology, strict=True):
        own = [planned for planned in plans if planned.topology == name]
        labels, base = [settings.label(planned.setting) for planned in own], [0.0] * len(own)
        for part, values in {
            "weights": [planned.parameter_bytes for planned in own],
            "caches": [planned.cache_bytes for planned in own],
            "temporaries": [max(one.used - one.parameter_bytes - one.cache_bytes, 0) for one in own],
        }.items():
            axis.bar(labels, [value / 1e9 for value in values], bottom=base, label=part)
            base = [low + value / 1e9 for low, value in zip(base, values, strict=True)]
        axis.axhline(own[0].chip["memory_gb"], color="black", linestyle="--", label="memory")
        axis.set_title(name, fontsize=10)
        axis.tick_params(axis="x", rotation=60)
    axes[0].set_ylabel("GB per chip")
    axes[-1].legend(fontsize=8)
    plots.save(figure, options.file(f"{NAME}.png"))


EXPERIMENT = Experiment(NAME, Options, run)
if __name__ == "__main__":
    EXPERIMENT.main()
