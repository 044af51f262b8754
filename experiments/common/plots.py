"""How experiments draw: without a display, into files. Import matplotlib from here on, not before."""

import pathlib
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.common import multihost
from experiments.common.results import Estimate


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
        axis.errorbar(places, value, yerr=np.maximum([value - low, high - value], 0), marker="o", label=label)
