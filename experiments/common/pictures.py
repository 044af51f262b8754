"""Pictures of results: a matrix of policies and tasks per model, and score against bytes, also by length."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.common import plots
from experiments.summarize import Line

plt = plots.plt
COLORS = plt.colormaps["RdYlGn"]
AUTO, PROFILE, AS_PUBLISHED, GRAY = "#1f5fa8", "#1b8a5a", "#c2513f", "0.55"
NLL_RANGE = 0.3  # nats per token above the full cache that are drawn as a total loss
TICKS = (3.1, 6.25, 12.5, 25, 50, 100)
LABEL_GAP = 0.052  # smallest distance of labels, in scores
FULL_CACHE, PRESS = "full cache", "kvpress "  # the full cache in tables, and the prefix of kvpress's presses


class Cell(NamedTuple):
    """A score of a policy at a budget.

    Attributes:
        model: name of the model.
        task: name of the task, or of a group of tasks.
        tokens: maximum length of the text.
        question: whether the compressed text includes the question: "seen" or "unseen".
        metric: "score" or "nll" (nats per token, smaller is better).
        policy: name in tables.
        has_profile: whether it has the heads of the model's profile.
        budget: percent of the bytes of a full bfloat16 cache.
        line: score, bytes, difference to the full cache, documents.
    """

    model: str
    task: str
    tokens: int
    question: str
    metric: str
    policy: str
    has_profile: bool
    budget: float
    line: Line

    @property
    def column(self) -> tuple[str, str, int, str]:
        """The values that cells of one group of columns share."""
        return self.model, self.task, self.tokens, self.question

    @property
    def value(self) -> float:
        """The mean score."""
        assert self.line.mean is not None
        return self.line.mean.value

    @property
    def point(self) -> tuple[float, float]:
        """Percent of the bytes of the full cache, and score."""
        return 100 * self.line.held, self.value


def matrix(cells: Sequence[Cell], title: str) -> plt.Figure:
    """Draws scores as a matrix: a row per policy, and a column per task and budget.

    Colors are shares of the full cache's score.

    Args:
        cells: cells of one model and kind of question.
        title: title of the picture.

    Returns:
        The figure. Small numbers are documents.
    """
    full = {cell.column: cell for cell in cells if cell.policy == FULL_CACHE}
    compressed = [cell for cell in cells if cell.policy != FULL_CACHE]
    others = {((cell.policy, cell.has_profile), (cell.column, -cell.budget)): cell for cell in compressed}
    columns = sorted({column for _, column in others})
    # `auto` comes first, then policies with the profile, then the others.
    rows = sorted({row for row, _ in others}, key=lambda row: (row[0] != "auto", not row[1], row[0]))
    figure, axes = plt.subplots(figsize=(2.2 + 0.62 * (len(columns) + 0.5), 0.9 + 0.34 * (len(rows) + 1)))
    for x, column in enumerate(columns):
        _draw_cell(axes, x, 0, full.get(column[0]), full.get(column[0]))
        for y, row in enumerate(rows, start=1):
            _draw_cell(axes, x, y, others.get((row, column)), full.get(column[0]))
    names = [FULL_CACHE, *(f"{name}, with profile" if profile else name for name, profile in rows)]
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_xticks(range(len(columns)), [f"{-budget:g}%" for _, budget in columns], fontsize=8)
    axes.xaxis.tick_top()
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(names) - 0.5, -0.5))
    for group in dict.fromkeys(column for column, _ in columns):
        places = [x for x, (other, _) in enumerate(columns) if other == group]
        _, task, tokens, _ = group
        text = f"{task.replace('_', ' ')}\n{tokens} tokens"
        axes.text(sum(places) / len(places), -1.25, text, ha="center", va="bottom", fontsize=7)
        axes.axvline(places[-1] + 0.5, color="white", linewidth=4)
    axes.set_title(title, fontsize=10, loc="left", pad=46)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _draw_cell(axes: plt.Axes, x: int, y: int, cell: Cell | None, full: Cell | None) -> None:
    """Draws a score, its color and the number of documents."""
    if cell is None:
        return
    color = "0.9" if full is None else COLORS(0.08 + 0.8 * retained(cell, full))
    axes.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, linewidth=0))
    is_added = cell.metric == "nll" and full is not None and cell is not full
    text = f"{cell.value - full.value:+.2f}" if is_added and full else f"{cell.value:.2f}"
    axes.text(x - 0.02, y - 0.06, text, ha="center", va="center", fontsize=7.5)
    axes.text(x + 0.45, y + 0.43, str(cell.line.documents), ha="right", va="bottom", fontsize=4.5, color="0.25")


def retained(cell: Cell, full: Cell) -> float:
    """Returns how much of the full cache's score a cell keeps, from 0 to 1."""
    if cell.metric == "nll":
        share = 1 - (cell.value - full.value) / NLL_RANGE
    else:
        share = cell.value / full.value if full.value else 0.0
    return min(max(share, 0.0), 1.0)


def score_by_bytes(cells: Sequence[Cell], systems: Collection[str]) -> plt.Figure:
    """Draws the scores of one task against the bytes that the caches hold, with labels at the points.

    Args:
        cells: cells of one model and task.
        systems: names of the papers' systems.

    Returns:
        The figure: the full cache, `auto`, the systems as published and with the profile, and kvpress's best press.
    """
    figure, axes = plt.subplots(figsize=(8.4, 4.4))

    def label(text: str, cell: Cell, offset: tuple[int, int], **style: Any) -> None:
        axes.annotate(text, cell.point, offset, textcoords="offset points", **style)

    [full] = [cell for cell in cells if cell.policy == FULL_CACHE]
    axes.plot(*full.point, "s", color="black", markersize=7)
    label(FULL_CACHE, full, (0, 9), ha="center", fontsize=9)
    presses = [cell for cell in cells if cell.policy.startswith(PRESS) and cell.budget == 25]
    best = max(presses, key=lambda cell: cell.value)
    for policy, color in (("auto", AUTO), (best.policy, GRAY)):
        curve = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.line.held)
        axes.plot(*zip(*(cell.point for cell in curve), strict=True), "o-", color=color, zorder=3)
        label(policy, curve[0], (8, -6), fontsize=10, color=color, weight="bold")
    of_systems = [cell for cell in cells if cell.policy in systems and cell.budget == 25]
    headings = (True, "with the model's profile", PROFILE), (False, "as published", AS_PUBLISHED)
    for has_profile, heading, color in headings:
        chosen = [cell for cell in of_systems if cell.has_profile == has_profile]
        face = color if has_profile else "white"
        for cell in chosen:
            axes.plot(*cell.point, "o", color=color, markerfacecolor=face, markersize=6, zorder=4)
            if cell.line.held > 1:
                text = f"{cell.policy}\n(reads {cell.line.read:.0%})"
                label(text, cell, (-9, -3), ha="right", va="center", fontsize=8, color=color)
        _label_column([cell for cell in chosen if cell.line.held <= 1], heading, color, axes)
    _set_axes(axes, 1.04)
    axes.set_xticks(TICKS, [f"{tick:g}%" for tick in TICKS])
    axes.set_xlabel("bytes of the cache, relative to a full bfloat16 cache", fontsize=9)
    axes.set_ylabel("share of right answers", fontsize=9)
    texts = f"{full.line.documents} texts of {full.tokens:,} tokens"
    axes.set_title(f"{full.model}, questions about {texts}, asked after compression", fontsize=10, loc="left")
    return figure


def _label_column(cells: Sequence[Cell], heading: str, color: str, axes: plt.Axes) -> None:
    """Writes names in a column next to points, without overlaps, under a heading."""
    ordered = sorted(cells, key=lambda cell: cell.value)
    center = sum(cell.value for cell in ordered) / len(ordered)
    begin = max(0.0, center - LABEL_GAP * (len(ordered) - 1) / 2)
    arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6}
    for number, cell in enumerate(ordered):
        text, place = f"{cell.policy} {cell.value:.2f}", (33, begin + LABEL_GAP * number)
        axes.annotate(text, cell.point, place, fontsize=8, color=color, va="center", arrowprops=arrow)
    top = begin + LABEL_GAP * len(ordered)
    axes.text(33, top, f"{heading}:", fontsize=8, color=color, va="center", weight="bold")


def score_by_length(panels: Mapping[int, Mapping[str, Sequence[Line]]], title: str) -> plt.Figure:
    """Draws the scores of one task against the bytes that the caches hold, with a panel per length of the text.

    Args:
        panels: by length, the lines of every curve by name.
        title: title of the picture.

    Returns:
        The figure. Bars are 95% intervals over documents.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    palette = itertools.cycle(("black", AUTO, AS_PUBLISHED, PROFILE, GRAY, "tab:brown", "tab:olive"))
    colors = dict(zip(names, palette, strict=False))
    figure, columns = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.6), sharey=True, squeeze=False)
    for axes, (tokens, curves) in zip(columns[0], sorted(panels.items()), strict=True):
        for name, lines in curves.items():
            points = sorted((100 * line.held, *line.mean) for line in lines if line.mean)
            held, values, low, high = np.asarray(points).T
            bars = np.nan_to_num(np.stack([values - low, high - values])).clip(0)
            marker = "s" if len(points) == 1 else "o-"
            axes.errorbar(held, values, bars, fmt=marker, color=colors[name], label=name, capsize=2, elinewidth=0.8)
        counts = sorted({line.documents for lines in curves.values() for line in lines})
        documents = " to ".join(str(one) for one in dict.fromkeys((counts[0], counts[-1])))
        _set_axes(axes, 1.06)
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], fontsize=8)
        axes.set_title(f"{tokens:,} tokens, {documents} texts", fontsize=9)
        axes.set_xlabel("bytes, % of the full cache's", fontsize=9)
    columns[0][0].set_ylabel("share of right answers", fontsize=9)
    handles = {name: one for axes in columns[0] for one, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.legend(handles.values(), handles.keys(), fontsize=8, loc="lower center", ncols=3)
    return figure


def _set_axes(axes: plt.Axes, top: float) -> None:
    """Sets the limits and the style of axes of scores, up to `top`, against bytes."""
    axes.set(xscale="log", xlim=(2.7, 125), ylim=(-0.04, top))
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
