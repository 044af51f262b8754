"""The papers' ablations: one choice of a system at a time, by the error of attention and by answers.

    python -m experiments.ablations
    python -m experiments.ablations --ablation chelsea_chunk --measure accuracy

An ablation is a line of `suites.ABLATIONS`: settings that differ in one choice, and the tables and figures of the
papers that vary it. Each is measured by `experiments.attention_error` on what the model's layers compute (recorded
streams) and by `experiments.line_retrieval` before the question is seen. A run that was stopped goes on where it was:
finished ones stand in OUTPUT_DIR/ablations.jsonl. Distances of ClusterKV's clustering are compared by
`experiments.recall_rate`, time without chunks by `experiments.latency`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any, ClassVar

from tqdm import tqdm

from experiments import attention_error, calibrate_heads, line_retrieval
from experiments.common import cases, plots, results, settings, sweeping
from experiments.common.options import Experiment, Run, each
from experiments.common.results import Row
from experiments.common.resuming import Finished
from experiments.common.suites import ABLATIONS, CALIBRATED

NAME = "ablations"
EXPERIMENTS = {one.EXPERIMENT.name: one.EXPERIMENT for one in (attention_error, line_retrieval, calibrate_heads)}
MEASURES = {"attention_error": "relative_error", "line_retrieval": "accuracy"}
METRICS = (*MEASURES.values(), "relative_error_clamped", "compress_seconds")


@dataclasses.dataclass(frozen=True)
class Options(Run):
    """Options of this experiment."""

    # Variants are chosen on seeds 0 to 9 and reported on later ones.
    seed: int = 10
    ablation: tuple[str, ...] = each(*ABLATIONS, choices=ABLATIONS)  # which; repeatable
    measure: tuple[str, ...] = each(*MEASURES, choices=MEASURES)  # by what; repeatable
    documents: int = 50  # documents of line retrieval
    context_tokens: int = 2048  # tokens of a document
    seeds: int = 10  # seeds of recorded streams
    recorded_tokens: int = 2048  # tokens of a recorded stream

    QUICK: ClassVar[dict[str, Any]] = {
        "ablation": tuple(ABLATIONS)[:1],
        "documents": 4,
        "context_tokens": 512,
        "seeds": 4,
        "recorded_tokens": 512,
    }

    def of(self, measure: str) -> dict[str, Any]:
        """What all ablations ask of an experiment."""
        shared: dict[str, Any] = {"model": self.model, "quick": self.quick, "seed": self.seed}
        if measure == "attention_error":
            own: dict[str, Any] = {
                "stream": (cases.RECORDED,),
                "seeds": self.seeds,
                "recorded_tokens": self.recorded_tokens,
            }
        elif measure == "line_retrieval":
            own = {"documents": self.documents, "context_tokens": (self.context_tokens,)}
        else:  # outlier heads are found on texts of seeds 0 to 9
            own = {"seed": 0, "tokens": self.recorded_tokens} | ({"seeds": 2} if self.quick else {})
        return shared | own


def run(options: Options) -> list[Row]:
    """The rows of every ablation and measure."""
    finished = Finished(options.file(f"{NAME}.jsonl"))
    rows: list[Row] = []
    for name in tqdm(options.ablation, desc=NAME, leave=False):
        of_ablation = [row for measure in options.measure for row in measured(options, name, measure, finished)]
        shown = [row for row in of_ablation if row.metric in MEASURES.values()]
        title = f"{ABLATIONS[name].choice} ({ABLATIONS[name].source})"
        results.print_rows(
            title, shown, lambda row: f"{results.setting_label(row)} ({row.budget_fraction:.1%})", column
        )
        rows += of_ablation
        results.write_rows(options.file(f"{NAME}.json"), rows)
    return rows


def measured(options: Options, name: str, measure: str, finished: Finished) -> list[Row]:
    """An ablation's rows by one measure; a quick one is of two settings."""
    policies, budgets = ABLATIONS[name].policies, ABLATIONS[name].budgets
    if options.quick:
        policies, budgets = policies[:2], budgets[:1]
    calibrated = options.file("calibrated").resolve()
    if any(CALIBRATED in policy for policy in policies):
        kept(options, "calibrate_heads", {}, {}, calibrated, finished)
    policies = tuple(policy.replace(CALIBRATED, str(calibrated)) for policy in policies)
    described = [settings.description(setting) for setting in settings.settings(policies, budgets)]
    own = {"policy": policies, "budget": budgets}
    rows = kept(options, measure, own, {"ablation": name, "settings": described}, options.file(name), finished)
    return [
        dataclasses.replace(
            row,
            experiment=NAME,
            variant=row.variant and row.variant.replace(str(calibrated), CALIBRATED),
            extra=row.extra | {"ablation": name},
        )
        for row in rows
        if row.metric in METRICS
    ]


def kept(
    options: Options,
    experiment: str,
    own: dict[str, Any],
    unit: dict[str, Any],
    directory: pathlib.Path,
    finished: Finished,
) -> list[Row]:
    """An experiment's rows: now, or before."""
    of = EXPERIMENTS[experiment]
    given = options.of(experiment) | own
    made = functools.partial(of.write, of.options(**given, output_dir=str(directory)))
    # The model counts by its content, wherever it lies.
    of_model = {"options": given | {"model": settings.model_identity(given["model"])}}
    rows = finished.rows({"experiment": experiment, **of_model, **unit}, made)
    sweeping.drop_programs()
    return rows


def column(row: Row) -> str:
    """What a figure is of: the task, or a layer of the model."""
    return "answers" if row.metric == "accuracy" else f"error, layer {row.extra['layer']:g}"


def draw(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """A panel per ablation and measure, a line per policy (and layer) against the share of exact's bytes."""
    layer = lambda row: f", layer {row.extra['layer']:g}" if "layer" in row.extra else ""  # noqa: E731
    plots.against_bytes(
        path,
        [row for row in rows if row.metric in MEASURES.values()],
        panel=lambda row: f"{row.extra['ablation']}: {row.metric}",
        label=lambda row: results.policy_label(row) + layer(row),
    )


EXPERIMENT = Experiment(NAME, Options, run, draw)
if __name__ == "__main__":
    EXPERIMENT.main()
