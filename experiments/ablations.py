"""The papers' ablations: one choice of a system at a time, by the error of attention and by answers.

    python -m experiments.ablations
    python -m experiments.ablations --ablation chelsea_chunk --measure accuracy

An ablation is a line of `choices.ABLATIONS`: settings that differ in one choice, and the tables and figures of the
papers that vary it. Each is measured by `experiments.attention_error` on what the model's layers compute (recorded
streams) and by `experiments.line_retrieval` before the question is seen, in processes of their own. A run that was
stopped goes on where it was: finished ones stand in OUTPUT_DIR/ablations.jsonl. Distances of ClusterKV's clustering are
compared by `experiments.recall_rate`, time without chunks by `experiments.latency`.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags
from tqdm import tqdm

from experiments.common import plots, processes, results, settings
from experiments.common.choices import ABLATIONS, CALIBRATED, Ablation
from experiments.common.resuming import Finished

NAME = "ablations"
MEASURES = {"attention_error": "relative_error", "line_retrieval": "accuracy"}
METRICS = (*MEASURES.values(), "relative_error_clamped", "compress_seconds")

settings.define_run()
# Variants are chosen on seeds 0 to 9 and reported on later ones.
flags.FLAGS.set_default("seed", 10)
_ABLATION = flags.DEFINE_multi_enum("ablation", list(ABLATIONS), list(ABLATIONS), "Which; repeatable.")
_MEASURE = flags.DEFINE_multi_enum("measure", list(MEASURES), list(MEASURES), "By what; repeatable.")
flags.DEFINE_integer("documents", 50, "Documents of line retrieval.")
flags.DEFINE_integer("context_tokens", 2048, "Tokens of a document.")
_SEEDS = flags.DEFINE_integer("seeds", 10, "Seeds of recorded streams.")
_RECORDED_TOKENS = flags.DEFINE_integer("recorded_tokens", 2048, "Tokens of a recorded stream.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    names = _ABLATION.value[:1] if flags.FLAGS.quick else _ABLATION.value
    directory = pathlib.Path(flags.FLAGS.output_dir)
    finished = Finished(directory / f"{NAME}.jsonl")
    rows: list[results.Row] = []
    for name in tqdm(names, desc=NAME, leave=False):
        of_ablation = [row for measure in _MEASURE.value for row in measured(name, measure, finished, directory)]
        show(ABLATIONS[name], of_ablation)
        rows += of_ablation
        results.write_rows(directory / f"{NAME}.json", rows)
    plot(directory / f"{NAME}.png", rows)
    print(f"Rows: {directory / f'{NAME}.json'}   plot: {directory / f'{NAME}.png'}")


def measured(name: str, measure: str, finished: Finished, directory: pathlib.Path) -> list[results.Row]:
    """An ablation's rows by one measure; a quick one is of two settings."""
    policies, budgets = ABLATIONS[name].policies, ABLATIONS[name].budgets
    if flags.FLAGS.quick:
        policies, budgets = policies[:2], budgets[:1]
    calibrated = directory.resolve() / "calibrated"
    if any(CALIBRATED in policy for policy in policies):
        calibrate(finished, calibrated)
    policies = tuple(policy.replace(CALIBRATED, str(calibrated)) for policy in policies)
    arguments = [
        *measure_arguments(measure),
        *(f"--policy={policy}" for policy in policies),
        *(f"--budget={budget}" for budget in budgets),
    ]
    run = functools.partial(processes.run, measure, arguments, directory / name)
    described = [settings.description(setting) for setting in settings.settings(policies, budgets)]
    unit = {"ablation": name, "experiment": measure, "arguments": arguments, "settings": described}
    return [
        dataclasses.replace(
            row,
            experiment=NAME,
            variant=row.variant and row.variant.replace(str(calibrated), CALIBRATED),
            extra=row.extra | {"ablation": name},
        )
        for row in finished.rows(unit, run)
        if row.metric in METRICS
    ]


def shared_arguments() -> list[str]:
    """What every process is given."""
    return [f"--model={flags.FLAGS.model}", *(["--quick"] if flags.FLAGS.quick else [])]


def calibrate(finished: Finished, directory: pathlib.Path) -> None:
    """Finds outlier heads on texts of seeds 0 to 9, once."""
    arguments = [*shared_arguments(), "--seed=0", f"--tokens={_RECORDED_TOKENS.value}"]
    run = functools.partial(processes.run, "calibrate_heads", arguments, directory)
    finished.rows({"experiment": "calibrate_heads", "arguments": arguments}, run)


def measure_arguments(measure: str) -> list[str]:
    """The flags of one experiment that all ablations share."""
    by_measure = {
        "attention_error": [
            "--stream=recorded",
            f"--seeds={_SEEDS.value}",
            f"--recorded_tokens={_RECORDED_TOKENS.value}",
        ],
        "line_retrieval": [
            f"--documents={settings.value('documents', quick=4)}",
            f"--context_tokens={settings.value('context_tokens', quick=512)}",
        ],
    }
    return [*shared_arguments(), f"--seed={flags.FLAGS.seed}", *by_measure[measure]]


def column(row: results.Row) -> str:
    """What a figure is of: the task, or a layer of the model."""
    return "answers" if row.metric == "accuracy" else f"error, layer {row.extra['layer']:g}"


def show(ablation: Ablation, rows: Sequence[results.Row]) -> None:
    """A line per setting: accuracy and the error of every layer, with intervals."""
    shown = [row for row in rows if row.metric in MEASURES.values()]
    columns = list(dict.fromkeys(map(column, shown)))
    lines = []
    for setting, of_setting in results.by_setting(shown).items():
        figures = {column(row): f"{row.value:.3g} [{row.ci95_low:.3g}, {row.ci95_high:.3g}]" for row in of_setting}
        fraction = np.mean([row.budget_fraction for row in of_setting])
        lines.append((setting, f"{fraction:.1%}", *(figures.get(name, "-") for name in columns)))
    results.print_table(f"{ablation.choice} ({ablation.source})", ("policy", "of exact's", *columns), lines)


def plot(path: pathlib.Path, rows: Sequence[results.Row]) -> None:
    """A row of panels per ablation, a panel per measure."""
    names = list(dict.fromkeys(row.extra["ablation"] for row in rows))
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric in MEASURES.values()))
    size = (6 * len(metrics), 3.4 * len(names))
    figure, axes = plt.subplots(len(names), len(metrics), figsize=size, squeeze=False)
    for name, panels in zip(names, axes, strict=True):
        for metric, axis in zip(metrics, panels, strict=True):
            of_metric = [row for row in rows if row.extra["ablation"] == name and row.metric == metric]
            draw(axis, of_metric)
            axis.set_title(f"{name}: {metric}", fontsize=9)
            axis.grid(alpha=0.3)
    plots.save(figure, path)


def draw(axis: Any, rows: Sequence[results.Row]) -> None:
    """A line per policy (and layer) against the share of exact's bytes, with intervals."""
    lines: dict[str, list[results.Row]] = {}
    for row in rows:
        layer = row.extra.get("layer")
        label = results.policy_label(row) + ("" if layer is None else f", layer {layer:g}")
        lines.setdefault(label, []).append(row)
    for label, line in lines.items():
        value, low, high = np.array([(row.value, row.ci95_low, row.ci95_high) for row in line]).T
        shares = [100 * (row.budget_fraction or 0) for row in line]
        axis.errorbar(shares, value, yerr=np.maximum([value - low, high - value], 0), marker=".", label=label)
    axis.set_xlabel("cache bytes (read ones for policies that recall), % of exact's")
    if lines:
        axis.legend(fontsize=5)


if __name__ == "__main__":
    app.run(main)
