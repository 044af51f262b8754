"""Verdicts of the papers' claims: comparisons of measured rows and figures.

`papers/*.toml` lists the claims, with lists of checks by kind (`CHECKS`). A claim holds if all paired differences are
significantly positive; it does not hold if one is significantly negative; otherwise the difference is not significant.
Tasks at the floor, in which all compressed caches have scores near 0, have no verdict. A claim without measurements is
"not run".
"""

import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple

import numpy as np

from experiments import summarize
from experiments.common import caches
from experiments.common.rows import Row, group_by
from experiments.common.statistics import Estimate, mean_interval

HOLDS, FAILS, UNCLEAR, NOT_RUN = "holds", "does not hold", "not significant", "not run"
FLOOR = 0.2  # largest mean score at the floor of a task


class Comparison(NamedTuple):
    """A measured comparison.

    Attributes:
        case: the metric or task that was compared.
        value: the value of the setting that the claim is about.
        other: the value that it is compared with.
        difference: by how much the claim holds; None at the floor of a task, where the order says little.
    """

    case: str
    value: float
    other: float
    difference: Estimate | None


def verdict(result: Mapping[str, Any], rows: Sequence[Row], figures_dir: pathlib.Path) -> str:
    """Returns the verdict of a claim, with the comparison that supports it least.

    Args:
        result: the table or figure, with its checks.
        rows: measured rows.
        figures_dir: directory of other experiments' figures.

    Returns:
        For example "holds: 0.5, 0.4 (recall)"; without a comparison only the verdict.
    """
    comparisons = list[Comparison]()
    for kind, compare in CHECKS.items():
        for check in result.get(kind, []):
            if kind == "compare":
                comparisons += compare(check, rows)
            elif (path := figures_dir / check["file"]).exists():
                comparisons += compare(check, json.loads(path.read_text()))
    if not comparisons:
        return NOT_RUN
    pairs = [(one.difference, one) for one in comparisons if one.difference is not None]
    if not pairs:
        return UNCLEAR
    text = HOLDS if all(pair.low > 0 for pair, _ in pairs) else UNCLEAR
    text = FAILS if any(pair.high < 0 for pair, _ in pairs) else text
    # In units of the intervals' widths.
    _, one = min(pairs, key=lambda pair: pair[0].value / max(pair[0].high - pair[0].low, 1e-9))
    return f"{text}: {one.value:.3g}, {one.other:.3g} ({one.case})"


def _compare_rows(check: Mapping[str, Any], rows: Sequence[Row]) -> list[Comparison]:
    """Compares settings by rows of `experiments.evaluate`, for each model and length."""
    name, others = check["better"], check["than"]
    selected = [
        row
        for row in rows
        if row.question == check["question"]
        and row.setting in (caches.FULL, name, *others)
        and any(fnmatch(row.task, pattern) for pattern in check["tasks"])
    ]
    comparisons = list[Comparison]()
    for table in summarize.summarize(selected):
        means = {line.setting: line.mean.value for line in table.lines if line.mean}
        is_loss = table.metric == "nll"
        is_at_floor = not is_loss and all(mean <= FLOOR for setting, mean in means.items() if setting != caches.FULL)
        of_table = [row for row in selected if (summarize.title_of(row), row.metric) == (table.title, table.metric)]
        counted = [task for task in table.tasks if task not in table.left_out]
        by_setting = group_by(lambda row: row.setting, of_table)
        for other in others:
            settings = by_setting.get(name, []), by_setting.get(other, [])
            pair = summarize.paired_differences(*settings, counted)
            if pair is None or name not in means or other not in means:
                continue
            pair = -pair if is_loss else pair
            if "within" in check:  # the claim is that the settings differ by less
                pair = _margin(pair, check["within"])
            case = counted[0].partition("_")[0] if len(counted) > 1 else counted[0]
            comparisons.append(Comparison(case, means[name], means[other], None if is_at_floor else pair))
    return comparisons


def _margin(difference: Estimate, within: float) -> Estimate:
    """Returns by how much the size of a difference is below `within`."""
    bounds = sorted((abs(difference.low), abs(difference.high)))
    smallest = 0.0 if difference.low < 0 < difference.high else bounds[0]
    return Estimate(within - abs(difference.value), within - bounds[1], within - smallest)


def _compare_figures(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Compares two settings in every case that both have: seed by seed if the figures have samples."""
    names = check["better"], check["than"]
    cases: dict[str, dict[str, Mapping[str, Any]]] = {}
    for one in figures:
        if one["metric"] == check["metric"] and one["setting"] in names:
            case = str(one.get("case", f"{one.get('model')}, {one.get('context_tokens')} tokens"))
            if case in check.get("cases", [case]):
                cases.setdefault(case, {})[one["setting"]] = one
    pairs = [[found[name] for name in names] for found in cases.values() if len(found) == 2]
    if check.get("mean") and pairs:  # the claim is about the mean over the cases
        pairs = [[_mean_of_cases(of_setting) for of_setting in zip(*pairs, strict=True)]]
    # With a factor, the claim is about this multiple of the other setting's value.
    factor = check.get("factor", 1.0)
    comparisons = []
    for better, other in pairs:
        if "samples" in better and "samples" in other:
            pair = mean_interval(np.asarray(better["samples"]) - factor * np.asarray(other["samples"]))
        else:  # disjoint intervals are a significant difference
            bounds = better["low"] - factor * other["high"], better["high"] - factor * other["low"]
            pair = Estimate(better["value"] - factor * other["value"], *bounds)
        pair = pair if check.get("larger") else -pair
        comparisons.append(Comparison(check["metric"], better["value"], other["value"], pair))
    return comparisons


def _mean_of_cases(figures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the mean of a setting's figures, seed by seed."""
    samples = np.mean([one["samples"] for one in figures], axis=0)
    return {"value": float(samples.mean()), "samples": samples}


def _check_range(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Checks that the intervals of a metric overlap a range."""
    comparisons = []
    for one in figures:
        if one["metric"] == check["metric"] and one.get("setting") == check.get("setting"):
            low, high = one.get("low", one["value"]), one.get("high", one["value"])
            sign = 1.0 if low <= check["high"] and high >= check["low"] else -1.0
            bound = check["high"] if one["value"] > check["high"] else check["low"]
            comparisons.append(Comparison(check["metric"], one["value"], bound, Estimate(0.0, sign, sign)))
    return comparisons


def _check_ratio(check: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> list[Comparison]:
    """Checks that the measured ratios of the `walks` are below 1."""
    return [
        Comparison("ratio", one["value"], 1.0, Estimate(1 - one["value"], 1 - one["high"], 1 - one["low"]))
        for one in figures
        if one["metric"] == "ratio" and one["walk"] in check["walks"]
    ]


# Each returns the comparisons of a check.
CHECKS: dict[str, Callable[[Any, Any], list[Comparison]]] = {
    "compare": _compare_rows,
    "figures": _compare_figures,
    "range": _check_range,
    "ratio": _check_ratio,
}
