"""Pictures of results: a matrix of policies and tasks per model, and score against bytes, also by length."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.common import plots
from experiments.summarize import Line

plt = plots.plt
COLORS = plt.colormaps["RdYlGn"]
NLL_RANGE = 0.3  # nats per token above the full cache that are drawn as a total loss
TICKS = (3.1, 6.25, 12.5, 25, 50, 100)
LABEL_GAP = 0.052  # smallest distance of labels, in scores


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
        bytes: bytes of the cache of one text.
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
    bytes: float

    @property
    def column(self) -> tuple[str, str, int, str]:
        """The values that cells of one group of columns share."""
        return self.model, self.task, self.tokens, self.question

    @property
    def value(self) -> float:
        """The mean score."""
        assert self.line.mean is not None
        return self.line.mean.value


def matrix(cells: Sequence[Cell], title: str) -> plt.Figure:
    """Draws scores as a matrix: a row per policy, and a column per task and budget.

    Colors are shares of the full cache's score.

    Args:
        cells: cells of one model and kind of question.
        title: title of the picture.

    Returns:
        The figure. Small numbers are documents.
    """
    full = {cell.column: cell for cell in cells if cell.policy == "full cache"}
    others = [cell for cell in cells if cell.policy != "full cache"]
    columns = sorted({(cell.column, -cell.budget) for cell in others}, key=_column_order)
    rows = sorted({(cell.policy, cell.has_profile) for cell in others}, key=_row_order)
    by_place = {((cell.policy, cell.has_profile), (cell.column, -cell.budget)): cell for cell in others}
    figure, axes = plt.subplots(figsize=(2.2 + 0.62 * (len(columns) + 0.5), 0.9 + 0.34 * (len(rows) + 1)))
    for x, column in enumerate(columns):
        _draw_cell(axes, x, 0, full.get(column[0]), full.get(column[0]))
        for y, row in enumerate(rows, start=1):
            _draw_cell(axes, x, y, by_place.get((row, column)), full.get(column[0]))
    names = ["full cache", *(f"{name}, with profile" if profile else name for name, profile in rows)]
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


def _column_order(column: tuple[tuple[str, str, int, str], float]) -> tuple[bool, str, int, float]:
    """Sorts questions that are unseen first, then by task, length and budget."""
    (_, task, tokens, question), budget = column
    return question == "seen", task, tokens, budget


def _row_order(row: tuple[str, bool]) -> tuple[bool, bool, str]:
    """Sorts `auto` first, then policies with the profile, then the others."""
    policy, has_profile = row
    return policy != "auto", not has_profile, policy


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


def score_by_bytes(cells: Sequence[Cell], systems: Iterable[str]) -> plt.Figure:
    """Draws the scores of one task against the bytes that the caches hold, with labels at the points.

    Args:
        cells: cells of one model and task.
        systems: names of the papers' systems.

    Returns:
        The figure: the full cache, `auto`, the systems as published and with the profile, and kvpress's best press.
    """
    systems = list(systems)
    figure, axes = plt.subplots(figsize=(8.4, 4.4))
    full = [cell for cell in cells if cell.policy == "full cache"]
    presses = [cell for cell in cells if cell.policy.startswith("kvpress ") and cell.line.documents >= 5]
    best = max((cell for cell in presses if cell.budget == 25), key=lambda cell: cell.value, default=None)
    labels: list[tuple[Cell, str]] = []
    for cell in full:
        axes.plot(100 * cell.line.held, cell.value, "s", color="black", markersize=7)
        axes.annotate(
            "full cache",
            (100 * cell.line.held, cell.value),
            (0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    for policy, color in (("auto", "#1f5fa8"), (best.policy if best else "", "0.55")):
        line = sorted((cell for cell in cells if cell.policy == policy), key=lambda cell: cell.line.held)
        if line:
            held, values = [100 * cell.line.held for cell in line], [cell.value for cell in line]
            axes.plot(held, values, "o-", color=color, zorder=3)
            axes.annotate(
                policy,
                (held[0], values[0]),
                (8, -6),
                textcoords="offset points",
                fontsize=10,
                color=color,
                weight="bold",
            )
    for cell in cells:
        if cell.policy in systems and cell.budget == 25:
            color = "#1b8a5a" if cell.has_profile else "#c2513f"
            axes.plot(
                100 * cell.line.held,
                cell.value,
                "o",
                color=color,
                markerfacecolor=color if cell.has_profile else "white",
                markersize=6,
                zorder=4,
            )
            if cell.line.held > 1:
                axes.annotate(
                    f"{cell.policy}\n(reads {cell.line.read:.0%})",
                    (100 * cell.line.held, cell.value),
                    (-9, -3),
                    textcoords="offset points",
                    ha="right",
                    va="center",
                    fontsize=8,
                    color=color,
                )
            else:
                labels.append((cell, color))
    for has_profile, heading in ((True, "with the model's profile"), (False, "as published")):
        _label([one for one in labels if one[0].has_profile == has_profile], heading, axes)
    axes.set(xscale="log", xlim=(2.7, 125), ylim=(-0.04, 1.04))
    axes.set_xticks(TICKS, [f"{tick:g}%" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("bytes of the cache, relative to a full bfloat16 cache", fontsize=9)
    axes.set_ylabel("share of right answers", fontsize=9)
    if full:
        [one, *_] = full
        title = (
            f"{one.model}, questions about {one.line.documents} texts of {one.tokens:,} tokens, asked after compression"
        )
        axes.set_title(title, fontsize=10, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def score_by_length(panels: Mapping[int, Mapping[str, Sequence[Line]]], title: str) -> plt.Figure:
    """Draws the scores of one task against the bytes that the caches hold, with a panel per length of the text.

    Args:
        panels: by length, the lines of every curve by name.
        title: title of the picture.

    Returns:
        The figure. Bars are 95% intervals over documents.
    """
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    colors = dict(zip(names, ("black", "#1f5fa8", "#c2513f", "#1b8a5a", "0.55"), strict=False))
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
        axes.set(xscale="log", xlim=(2.7, 125), ylim=(-0.04, 1.06))
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], fontsize=8)
        axes.minorticks_off()
        axes.set_title(f"{tokens:,} tokens, {documents} texts", fontsize=9)
        axes.set_xlabel("bytes, % of the full cache's", fontsize=9)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0][0].set_ylabel("share of right answers", fontsize=9)
    handles = {name: one for axes in columns[0] for one, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    columns[0][-1].legend(handles.values(), handles.keys(), fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    figure.tight_layout()
    return figure


def _label(labels: Sequence[tuple[Cell, str]], heading: str, axes: plt.Axes) -> None:
    """Writes names next to points, without overlaps, under a heading."""
    if not labels:
        return
    ordered = sorted(labels, key=lambda one: one[0].value)
    center = sum(one[0].value for one in ordered) / len(ordered)
    begin = max(0.0, center - LABEL_GAP * (len(ordered) - 1) / 2)
    for number, (cell, color) in enumerate(ordered):
        point, place = (100 * cell.line.held, cell.value), (33, begin + LABEL_GAP * number)
        axes.annotate(
            f"{cell.policy} {cell.value:.2f}",
            point,
            place,
            fontsize=8,
            color=color,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6},
        )
    top = begin + LABEL_GAP * len(ordered)
    axes.text(33, top, f"{heading}:", fontsize=8, color=ordered[0][1], va="center", weight="bold")
