"""Predicts whether a model with compressed caches fits a TPU pod, and the minimum time of a token.

    python -m experiments.pod_plan --shape llama-3.1-70b --context_tokens 1048576 --batch 1 --topology v5p:4x4x4

For every topology and policy, decoding and the prefill of one layer are compiled with the TPU compiler on this machine.
The output has the bytes of weights, caches and temporaries per chip, and the collectives of a decode step. Operations
and bytes of a token follow from shapes, and the minimum time from the chip's published rates. `--largest` also finds
the largest batch that fits.

Compiling 80 layers takes minutes. With `--compiled_layers 4`, four and two layers are compiled and the figures are
extrapolated. For equal layers, this is exact except for temporaries: with few layers they fit in on-chip memory, which
is not counted (96 instead of 147 MiB for 12 layers of Llama-3.1-8B with SubGen on v5e).
"""

import dataclasses
import pathlib
from collections import Counter
from typing import Any

from experiments.common import caches, planning
from experiments.common.compilers import prepare_compiler
from experiments.common.console import print_table
from experiments.common.flags import Flags, one_of, repeatable, run_command
from experiments.common.output import Figure, figure, write_figures
from experiments.common.planning import Plan, Program
from experiments.common.shapes import find_shape, first_layers
from kvjax.budget import format_bytes


@dataclasses.dataclass(frozen=True)
class Options(Flags):
    """Options of a plan."""

    policy: tuple[str, ...] = repeatable("exact", "subgen", "balancekv", "chelsea", "clusterkv")
    budget: tuple[str, ...] = repeatable("4096")
    shape: str = "llama-3.1-8b"  # Sizes of the model: a name of `common.shapes`, or a directory with a config.json.
    topology: tuple[str, ...] = repeatable("v5e:4x4", "v6e:8x8", "v5p:4x4x4")  # As libtpu spells them; repeatable.
    context_tokens: int = 131072  # Maximum length of prompts.
    max_new_tokens: int = 1024  # Maximum number of tokens after it.
    batch: int = 8  # Sequences over all groups of chips.
    layers: int | None = None  # Layers of the model; by default all.
    compiled_layers: int | None = None  # Layers to compile: even, and at least 4; by default all.
    prefill: str = one_of("exact", ("exact", "streaming"))  # Exact prefill, or prefill through the compressed cache.
    prefill_chunk: int = 256  # Tokens per chunk of exact prefill.
    mesh_data: int = 1  # Groups of chips; each group has some of the sequences.
    mesh_sequence: int | None = None  # Chips that share one KV head; by default as few as possible.
    largest: bool = False  # Also find the largest batch that fits.
    output_dir: str = "build/pod_plan"  # Directory of the figures.

    def __post_init__(self) -> None:
        super().__post_init__()
        # The program of a single layer differs: extrapolations from it were off by tens of gigabytes.
        if self.compiled_layers is not None and (self.compiled_layers < 4 or self.compiled_layers % 2):
            raise ValueError(f"compiled_layers={self.compiled_layers} must be even and at least 4")

    @property
    def sizes(self) -> planning.Sizes:
        """Sizes of every plan."""
        names = [field.name for field in dataclasses.fields(planning.Sizes) if field.name != "streaming"]
        values = {name: getattr(self, name) for name in names}
        return planning.Sizes(**values, streaming=self.prefill == "streaming")


def main(options: Options) -> None:
    """Prints the plans and writes the figures."""
    prepare_compiler()
    config = first_layers(find_shape(options.shape), options.layers)
    make = planning.largest if options.largest else planning.plan
    figures: list[Figure] = []
    for topology in options.topology:
        plans = [
            make(config, topology, setting, options.sizes)
            for setting in caches.parse_settings(options.policy, options.budget)
        ]
        print_plans(options, topology, plans)
        figures += [one for plan in plans for one in plan_figures(options, plan)]
        costs = planning.prefill_bounds(config, topology, options.sizes)
        figures += print_prefill(topology, costs)
        write_figures(pathlib.Path(options.output_dir) / "pod_plan.json", figures)


def describe_collectives(program: Program) -> str:
    """Returns the number of collectives of each kind, and their bytes."""
    counts = Counter(collective.kind for collective in program.collectives)
    total = sum(collective.bytes for collective in program.collectives)
    names = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{names}: {format_bytes(total)}" if counts else "none"


def print_plans(options: Options, topology: str, plans: list[Plan]) -> None:
    """Prints a line per plan; bytes are per chip."""
    lines = [
        (
            str(plan.setting),
            format_bytes(plan.parameter_bytes),
            format_bytes(plan.cache_bytes),
            format_bytes(plan.decode.temporaries),
            format_bytes(plan.prefill_temporaries),
            describe_collectives(plan.decode),
            f"{plan.ms_per_token:.2f}",
            "-" if plan.largest is None else str(plan.largest),
            plan.problem or "fits",
        )
        for plan in plans
    ]
    columns = ("", "weights", "caches", "decode", "prefill", "collectives per step", "min. ms", "max. batch", "")
    title = (
        f"{options.shape} on {topology}, {options.batch} sequences of {options.context_tokens} tokens, bytes per chip"
    )
    print_table(title, columns, lines)


def plan_figures(options: Options, plan: Plan) -> list[Figure]:
    """Returns the figures of a plan."""
    labels: dict[str, Any] = {
        "setting": str(plan.setting),
        "shape": options.shape,
        "topology": plan.topology,
        "context_tokens": options.context_tokens,
        "batch": plan.batch,
        "parameter_bytes": plan.parameter_bytes,
        "cache_bytes": plan.cache_bytes,
        "read_bytes": plan.read_bytes,
        "temporaries": {name: program.temporaries for name, program in plan.programs.items()},
        "collectives": [one._asdict() for one in plan.decode.collectives],
        "prefill_collectives": [one._asdict() for one in plan.prefill.collectives],
        "compiled_layers": plan.compiled_layers,
        "largest_batch": plan.largest,
        "problem": plan.problem,
    }
    figures = [figure("ms_per_token_bound", plan.ms_per_token, **labels)]
    return figures if plan.decode.problem else [*figures, figure("bytes_per_device", plan.used, **labels)]


def print_prefill(topology: str, costs: list[planning.prefill_costs.Cost]) -> list[Figure]:
    """Prints and returns the minimum seconds of exact prefill."""
    seconds = [cost.seconds(planning.chip(topology)) for cost in costs]
    lines = [
        (
            cost.way,
            format_bytes(cost.stream_bytes),
            format_bytes(cost.received_bytes),
            *(f"{part:.2f}" for part in parts),
            f"{sum(parts):.2f}",
        )
        for cost, parts in zip(costs, seconds, strict=True)
    ]
    columns = ("", "residual stream", "received", "attention s", "products s", "communication s", "sum")
    print_table(f"Exact prefill on {topology}: bytes per chip, minimum seconds; the last way is used", columns, lines)
    return [
        figure("prefill_seconds_bound", sum(parts), topology=topology, **dataclasses.asdict(cost))
        for cost, parts in zip(costs, seconds, strict=True)
    ]


if __name__ == "__main__":
    run_command(main, Options)
