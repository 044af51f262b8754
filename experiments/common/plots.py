"""How experiments draw: without a display, into files, a policy in the same colour everywhere. Import matplotlib from
here on, not before."""

import collections
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import PIL.Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.common.results import Estimate, Row, policy_label
from kvjax_models import devices

# The papers' systems have a hue each, their variants its shades.
COLOURS = {
    "exact": "#000000",
    "subgen": "#17803d",
    "subgen_mean": "#3fae6a",
    "clustergen": "#6cc24a",
    "balancekv": "#7b2d9e",
    "balancekv_theory": "#b07cc6",
    "clusterkv": "#1f5fbf",
    "clusterkv_residual": "#6b9be8",
    "chelsea": "#d62728",
    "quest": "#12a5b8",
    "infinigen": "#0a6670",
    "uniform": "#7f7f7f",
    "streaming_llm": "#a9a800",
    "h2o": "#ff7f0e",
    "cam": "#8c564b",
    "attention_matching": "#f15bb5",
    "snapkv": "#e0a100",
    "pyramidkv": "#a6761d",
    "kvzip": "#e377c2",
    "leverage_scores": "#c2185b",
    "expected_attention": "#f4a582",
    "compactor": "#b2182b",
    "tova": "#fdbf6f",
    "keydiff": "#4d4d4d",
    "knorm": "#b3b3b3",
    "lagkv": "#5d6d3a",
    "cur": "#cab2d6",
}
STYLES = ("-", "--", ":", "-.")


def colour(label: str) -> str | None:
    """The colour of a policy, whatever its settings ("chelsea:joins=drop @ 25%"); None for what is no policy, which
    takes matplotlib's next one."""
    return COLOURS.get(re.split("[:@ ]", label, maxsplit=1)[0])


def save(figure: plt.Figure, path: pathlib.Path, dpi: int = 120) -> None:
    """Writes a figure as PNG and frees it; the folder is made. One without a layout of its own is laid out tightly."""
    if figure.get_layout_engine() is None:
        figure.tight_layout()
    if devices.is_first_process():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)
        with PIL.Image.open(path) as drawn:  # in 128 colours, a third of the bytes
            drawn.convert("RGB").quantize(128).save(path, optimize=True)
    plt.close(figure)


def line_with_interval(axis: plt.Axes, points: Sequence[tuple[float, Estimate]], *, label: str, **style: Any) -> None:
    """A line through points, in order, with their intervals, in the policy's colour where the label names one."""
    places, estimates = zip(*sorted(points), strict=True)
    value, low, high = np.transpose(estimates)
    reach = np.nan_to_num(np.maximum([value - low, high - value], 0))  # a figure without an interval has none
    axis.errorbar(places, value, yerr=reach, label=label, color=colour(label), elinewidth=0.8, **style)


def with_intervals(axis: plt.Axes, points: Mapping[str, Sequence[tuple[float, Estimate]]]) -> None:
    """A line per label through its points; those of one policy differ in style."""
    drawn: collections.Counter[str | None] = collections.Counter()
    for label, found in points.items():
        style = STYLES[drawn[colour(label)] % len(STYLES)] if colour(label) else STYLES[0]
        drawn[colour(label)] += 1
        line_with_interval(axis, found, label=label, marker=".", linewidth=1, linestyle=style)


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
        if axes.get("xscale") == "log":
            _powers_of_two(axis)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    for axis in drawn[::across]:
        axis.set_ylabel(ylabel or "")
    named = [axis.get_legend_handles_labels()[1] for axis in drawn]
    for axis, labels in zip(drawn, named, strict=True):
        if labels != named[0] or axis is drawn[0]:
            axis.legend(fontsize=6)
    save(figure, path)


def against_bytes(path: pathlib.Path, rows: Sequence[Row], **given: Any) -> None:
    """The same against the share of exact's bytes that a cache holds, or reads where everything is kept."""
    how: dict[str, Any] = {
        "label": policy_label,
        "xlabel": "cache bytes (read ones for policies that recall), % of exact's",
    }
    by_rows(path, rows, x=lambda row: 100 * (row.budget_fraction or 0), **(how | given))


def _powers_of_two(axis: plt.Axes) -> None:
    """Writes places of a logarithmic axis as numbers; one of less than two octaves becomes linear."""
    low, high = axis.get_xlim()
    if high < 4 * low:
        axis.set_xscale("linear")
    else:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
