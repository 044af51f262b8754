"""How experiments draw: without a display, into files. Import matplotlib from here on, not before."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.common import multihost
from experiments.common.results import Estimate, Row


def save(figure: plt.Figure, path: pathlib.Path) -> None:
    """Writes a figure and frees it; the folder is made. One without a layout of its own is laid out tightly."""
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    if multihost.is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    plt.close(figure)


def with_intervals(axis: plt.Axes, points: Mapping[str, Sequence[tuple[float, Estimate]]]) -> None:
    """A line per label through its points, in order, with their intervals."""
    for label, found in points.items():
        places, estimates = zip(*sorted(found), strict=True)
        value, low, high = np.transpose(estimates)
        errors = np.nan_to_num(np.maximum([value - low, high - value], 0))
        axis.errorbar(places, value, yerr=errors, marker=".", linewidth=1, label=label)


def panels(count: int, across: int = 4, *, size: tuple[float, float] = (4.5, 3.5)) -> tuple[plt.Figure, list[plt.Axes]]:
    """A figure of so many panels, at most `across` in a row.

    Args:
        size: of a panel, in inches.
    """
    width = min(count, across)
    height = -(-count // width)
    figure, axes = plt.subplots(height, width, figsize=(size[0] * width, size[1] * height), squeeze=False)
    for axis in axes.flat[count:]:
        axis.set_visible(False)
    return figure, list(axes.flat[:count])


def by_rows(
    path: pathlib.Path,
    rows: Sequence[Row],
    *,
    panel: Callable[[Row], str],
    x: Callable[[Row], float | None],
    label: Callable[[Row], str],
    across: int = 4,
    ylabel: str | None = None,
    **axes: Any,
) -> None:
    """Figures against something that rows have: a panel per title, a line with intervals per label.

    Args:
        axes: what `matplotlib.axes.Axes.set` takes, for every panel.
    """
    titles = list(dict.fromkeys(map(panel, rows)))
    figure, drawn = panels(len(titles), across)
    for title, axis in zip(titles, drawn, strict=True):
        points: dict[str, list[tuple[float, Estimate]]] = {}
        for row in rows:
            place = x(row)
            if panel(row) == title and place is not None:
                points.setdefault(label(row), []).append((place, row.estimate))
        with_intervals(axis, points)
        axis.set(**axes)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in drawn[::across]:
        axis.set_ylabel(ylabel or "")
    drawn[-1].legend(fontsize=6)
    save(figure, path)
