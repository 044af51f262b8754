"""Results as flat rows: written as JSON, shown as tables, with intervals."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import rich.console
import rich.table
from jaxtyping import Float
from scipy import stats

from kvjax.registry import PolicyChoice
from kvjax_models import atomic_io, devices


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure. None where a field does not apply; `extra` is whatever else identifies the setting."""

    experiment: str
    model: str
    policy: str
    metric: str
    value: float
    task: str | None = None
    stream: str | None = None
    variant: str | None = None
    budget_fraction: float | None = None
    context_tokens: int | None = None
    batch: int | None = None
    question_seen: bool | None = None
    ci95_low: float | None = None
    ci95_high: float | None = None
    n: int | None = None
    seed: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    read_bytes_per_token: int | None = None
    parameter_bytes: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """The row as JSON holds it, `extra` beside the other fields."""
        fields = dataclasses.asdict(self)
        return fields | fields.pop("extra")

    @property
    def estimate(self) -> "Estimate":
        """The value with its 95% interval; NaN bounds where it has none."""
        low, high = (math.nan if bound is None else bound for bound in (self.ci95_low, self.ci95_high))
        return Estimate(self.value, low, high)


def from_flat(flat: Mapping[str, Any]) -> Row:
    """The row that `Row.flat` gave."""
    names = {field.name for field in dataclasses.fields(Row)}
    own = {name: value for name, value in flat.items() if name in names}
    return Row(**own, extra={name: value for name, value in flat.items() if name not in names})


def row(
    experiment: str,
    model: str,
    metric: str,
    found: "float | Estimate",
    setting: PolicyChoice | None = None,
    **others: Any,
) -> Row:
    """A row.

    Args:
        found: the figure, with its interval where it has one.
        setting: what `policy` and `variant` are to be taken from, and, among what `extra` holds, `budget`.
        others: fields; whatever is none goes to `extra`.

    Raises:
        ValueError: where `others` has a figure of its own.
    """
    if "value" in others:
        raise ValueError(f"value={others['value']} would take the place of {metric}: give it another name")
    fields: dict[str, Any] = {"experiment": experiment, "model": model, "metric": metric, "value": found}
    if isinstance(found, Estimate):
        fields |= {"value": found.value, "ci95_low": found.low, "ci95_high": found.high}
    if setting is not None:
        budget = str(setting.budget) if setting.budget else None
        fields |= {"policy": setting.name, "variant": setting.variant, "budget": budget}
    return from_flat(fields | others)


def write_rows(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes rows as a JSON list, in the first process of a run; the folder is made."""
    if not devices.is_first_process():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.write_text(path, json.dumps([row.flat() for row in rows], indent=1) + "\n")


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    interval = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def score_interval(scores: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean of scores from 0 to 1: Wilson's where all are right or wrong, Student's otherwise; all
    of [0, 1] for a single one that is neither."""
    if all(score in (0, 1) for score in scores):
        return share_interval(int(sum(scores)), len(scores))
    if len(scores) < 2:
        return 0.0, 1.0
    _, low, high = mean_interval(np.asarray(scores))
    return max(low, 0.0), min(high, 1.0)


class Estimate(NamedTuple):
    """A mean over independent samples with its 95% interval by Student's t."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        value, low, high = (f"{x:.0f}" if abs(x) >= 1000 else f"{x:.3g}" for x in self)
        return value if math.isnan(self.low) else f"{value} [{low}, {high}]"

    def fixed(self, sign: str = "") -> str:
        """With two decimals; a difference with its sign ("+")."""
        value, low, high = (f"{x:{sign}.2f}" for x in self)
        return f"{value} [{low}, {high}]"

    def exponential(self) -> "Estimate":
        """Of a mean of logarithms: the geometric mean and its interval."""
        return Estimate(*np.exp(self).tolist())


def mean_interval(samples: Float[np.ndarray, "n"]) -> Estimate:
    """The mean of independent samples. Of differences paired by seed, it is the paired comparison.

    Raises:
        ValueError: for fewer than two samples, which have no interval.
    """
    if len(samples) < 2:
        raise ValueError(f"{len(samples)} samples have no interval; measure at least 2 seeds")
    mean, error = float(np.mean(samples)), float(stats.sem(samples))
    half = float(stats.t.ppf(0.975, len(samples) - 1)) * error
    return Estimate(mean, mean - half, mean + half)


def paired_difference(scores: Sequence[float], reference: Sequence[float]) -> Estimate:
    """The mean difference of two ways' scores on the same questions, from 0 to 1 each, with its 95% interval: where all
    are right or wrong Newcombe's (1998, method 10), which is not empty where the two always agree; Student's
    otherwise, and [-1, 1] for a single question.

    Raises:
        ValueError: when they are not as many.
    """
    first, second = np.asarray(scores, float), np.asarray(reference, float)
    if first.shape != second.shape:
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    difference = float(np.mean(first - second))
    if not all(score in (0, 1) for score in (*scores, *reference)):
        return mean_interval(first - second) if len(first) > 1 else Estimate(difference, -1.0, 1.0)
    (p, low, high), (q, q_low, q_high) = (
        (float(np.mean(x)), *share_interval(int(np.sum(x)), len(x))) for x in (first, second)
    )
    return Estimate(
        difference,
        difference - _joint_error(first, second, p - low, q_high - q),
        difference + _joint_error(first, second, high - p, q - q_low),
    )


def _joint_error(first: Float[np.ndarray, "n"], second: Float[np.ndarray, "n"], one: float, other: float) -> float:
    """How far a difference of two shares may be off on one side, from how far each may be (Newcombe 1998)."""
    n = len(first)
    both, neither = float(np.sum(first * second)), float(np.sum((1 - first) * (1 - second)))
    only, only_other = float(np.sum(first)) - both, float(np.sum(second)) - both
    product = (both + only) * (only_other + neither) * (both + only_other) * (only + neither)
    excess = both * neither - only * only_other
    if excess > 0:  # a correction for continuity
        excess = max(excess - n / 2, 0.0)
    phi = excess / np.sqrt(product) if product else 0.0
    return float(np.sqrt(max(one**2 - 2 * phi * one * other + other**2, 0.0)))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates; its interval puts their distances to their bounds together as standard
    deviations add (Zou and Donner 2008)."""
    value, low, high = np.transpose(estimates)
    below, above = (float(np.sqrt(np.sum((bound - value) ** 2))) / len(estimates) for bound in (low, high))
    mean = float(np.mean(value))
    return Estimate(mean, mean - below, mean + above)


def by_setting(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by policy, its settings and its budget, as `settings.label` writes them."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(setting_label(row), []).append(row)
    return found


def setting_label(row: Row) -> str:
    """The policy, its settings and its budget, as `settings.label` writes them."""
    return policy_label(row) + (f" @ {row.extra['budget']}" if row.extra.get("budget") else "")


def policy_label(row: Row) -> str:
    """The policy and its settings, as `kvjax.PolicyChoice` is written."""
    return row.policy + (f":{row.variant}" if row.variant else "")


def median_interval(samples: Float[np.ndarray, "n"]) -> Estimate:
    """The median of independent samples of any law, with the narrowest pair of order statistics that holds the law's
    own median with 95% at least: what timings want, whose outliers lie on one side.

    Raises:
        ValueError: for fewer than six samples, whose extremes hold it with less.
    """
    low, high = stats.quantile_test(samples, p=0.5).confidence_interval()
    if not math.isfinite(low):
        raise ValueError(f"{len(samples)} samples have no 95% interval of the median; measure at least 6")
    return Estimate(float(np.median(samples)), float(low), float(high))


def log_slope(sizes: Sequence[float], measured: Float[np.ndarray, "n S"]) -> Estimate:
    """The exponent b of measured ~ sizes^b: each of n independent series gives its least-squares slope of log measured
    against log size, and these slopes their mean and interval.

    Raises:
        ValueError: for fewer than two series.
    """
    return mean_interval(np.polyfit(np.log(sizes), np.log(measured).T, 1)[0])


def print_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A table on the terminal: the first column left-aligned, figures right-aligned, and none cut off."""
    if not devices.is_first_process():
        return
    table = rich.table.Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    wide = rich.console.Console(width=1000).measure(table).maximum
    rich.console.Console(width=max(wide, len(title))).print(table)


def print_rows(
    title: str, rows: Iterable[Row], line: Callable[[Row], str], column: Callable[[Row], str] = lambda row: row.metric
) -> None:
    """Figures with their intervals on the terminal: a line per label, a column per other label."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(line(row), {})[column(row)] = str(row.estimate)
    columns = list(dict.fromkeys(name for found in cells.values() for name in found))
    lines = [(label, *(found.get(name, "-") for name in columns)) for label, found in cells.items()]
    print_table(title, ("", *columns), lines)
