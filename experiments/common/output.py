"""Figures of experiments that are not rows of `experiments.evaluate`: flat JSON objects, and tables of them."""

import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

import kvjax
from experiments.common.console import print_table
from experiments.common.statistics import Estimate
from kvjax_models import atomic_io

Figure = dict[str, Any]
# The labels of a measurement, and its values by metric: numbers or estimates.
Measured = tuple[dict[str, Any], dict[str, Any]]


def figure(metric: str, value: float | Estimate, **labels: Any) -> Figure:
    """Returns a figure.

    Args:
        metric: name of the measured quantity.
        value: the value, with its 95% interval if it has one.
        **labels: the settings that identify the figure.

    Returns:
        The object; an interval is `low` and `high`.
    """
    interval = {"low": value.low, "high": value.high} if isinstance(value, Estimate) else {}
    number = value.value if isinstance(value, Estimate) else value
    return {"metric": metric, "value": number, **interval, **labels}


def write_figures(path: pathlib.Path, figures: Sequence[Figure]) -> None:
    """Writes figures as a JSON list, with the version of kvjax and the device."""
    path.parent.mkdir(parents=True, exist_ok=True)
    common = {"version": kvjax.__version__, "device": jax.devices()[0].device_kind}
    atomic_io.write_text(path, json.dumps([one | common for one in figures], indent=1) + "\n")


def append_row(path: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Appends a row to a file of JSON lines; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_io.append_line(path, json.dumps(row))


def as_text(one: Mapping[str, Any]) -> str:
    """Returns the value of a figure with its interval."""
    return str(Estimate(one["value"], one["low"], one["high"]) if "low" in one else Estimate(one["value"]))


def figure_table(figures: Iterable[Figure], line: str, column: str = "metric") -> tuple[list[str], list[list[str]]]:
    """Returns the columns and lines of a table of figures.

    Args:
        figures: the figures.
        line: label that the lines differ in.
        column: label that the columns differ in.
    """
    cells: dict[str, dict[str, str]] = {}
    for one in figures:
        cells.setdefault(str(one[line]), {})[str(one[column])] = as_text(one)
    columns = list(dict.fromkeys(name for values in cells.values() for name in values))
    return ["", *columns], [[label, *(values.get(name, "-") for name in columns)] for label, values in cells.items()]


def print_figures(title: str, figures: Iterable[Figure], line: str, column: str = "metric") -> None:
    """Prints figures as a table; see `figure_table`."""
    print_table(title, *figure_table(figures, line, column))
