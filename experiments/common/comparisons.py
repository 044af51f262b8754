"""Rows as tables in Markdown, and whether the order of methods that a paper has holds among them."""

import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.common import plots
from experiments.common.results import Row
from experiments.common.sections import Figure

# What methods are compared within: the words of a table's head or line.
Group = str
Methods = dict[str, Row]


def markdown(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; every column but the first is aligned to the right."""
    head = [columns, ["---", *["--:"] * (len(columns) - 1)]]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in [*head, *lines])


def short(text: str) -> str:
    """Figures without the zero before the point."""
    return re.sub(r"(?<![\d.])0\.(?=\d)", ".", text)


def written(row: Row, decimals: int) -> str:
    """A figure, with its 95% interval where it has one."""
    if row.ci95_low is None or row.ci95_high is None or row.ci95_low == row.ci95_high:
        return _number(row.value, decimals)
    value, low, high = (_number(x, decimals) for x in (row.value, row.ci95_low, row.ci95_high))
    return f"{value} [{low}, {high}]"


def _number(value: float, decimals: int) -> str:
    return short(f"{value:z,.{0 if abs(value) >= 1000 else decimals}f}")


def by_group(figure: Figure, rows: Iterable[Row]) -> dict[Group, Methods]:
    """Rows by what they are compared within, and method. Exact's, which have no budget, stand in the groups of every
    budget."""
    found: dict[tuple, Methods] = {}
    for row in rows:
        flat = row.flat()
        found.setdefault(tuple(flat.get(name) for name in figure.groups), {})[figure.method(row)] = row
    if "budget" in figure.groups:
        place = figure.groups.index("budget")
        for group in [group for group in found if group[place] is None]:
            alike = [other for other in found if other != group and _without(other, place) == _without(group, place)]
            for other in alike:
                found[other] = found[group] | found[other]
            if alike:
                del found[group]
    return {_words(figure, group): methods for group, methods in found.items()}


def _without(group: tuple, place: int) -> tuple:
    return group[:place] + group[place + 1 :]


# How the value of a field is written; others stand behind their names.
_WORDS = {
    "context_tokens": "{:,} tokens",
    "recalled_tokens": "{:,} recalled",
    "head_dim": "D = {}",
    "c": "c = {}",
    "key_norm": "norm {}",
    "delta_share": "radius {}",
    "kept_steps": "R = {}",
    **dict.fromkeys(("budget", "part", "rule", "stream", "task", "knob"), "{}"),
}


def _word(name: str, value: Any) -> str:
    value = f"{value:.3g}" if isinstance(value, float) else int(value) if str(value).isdigit() else value
    return _WORDS.get(name, f"{name.replace('_', ' ')} {{}}").format(value)


def _words(figure: Figure, group: tuple) -> Group:
    return ", ".join(_word(name, value) for name, value in zip(figure.groups, group, strict=True) if value is not None)


def table(figures: Mapping[Figure, Sequence[Row]]) -> str:
    """Methods against groups of one figure, or of several side by side; whichever are more become lines.

    Args:
        figures: with their rows; the same field tells the methods of all of them apart.
    """
    first, *more = figures
    columns: dict[str, dict[str, str]] = {}
    for figure, rows in figures.items():
        for group, own in by_group(figure, rows).items():
            head = ", ".join(filter(None, (figure.title if more or not group else "", group)))
            columns[head] = {method: written(row, figure.decimals) for method, row in own.items()}
    named = [method for figure in figures for method in figure.order]
    named += [method for column in columns.values() for method in column]
    methods = [method for method in dict.fromkeys(named) if any(method in column for column in columns.values())]
    form = {"policy": "`{}`", "variant": "{}"}.get(first.label)
    shown = [form.format(method) if form else _word(first.label, method) for method in methods]
    if more or len(columns) <= len(methods):
        lines = [
            [name, *(column.get(method, "-") for column in columns.values())]
            for method, name in zip(methods, shown, strict=True)
        ]
        return markdown(["", *columns], lines)
    lines = [[group, *(column.get(method, "-") for method in methods)] for group, column in columns.items()]
    return markdown(["", *shown], lines)


def draw(figures: Mapping[Figure, Sequence[Row]], path: pathlib.Path) -> None:
    """A panel per figure: a line per policy, a marker per group, with intervals."""
    policies = list(dict.fromkeys(figure.method(row) for figure, rows in figures.items() for row in rows))[::-1]
    size = (4.2 * len(figures) + 2, 1.2 + 0.28 * len(policies))
    drawn, axes = plots.plt.subplots(1, len(figures), figsize=size, layout="constrained", sharey=True, squeeze=False)
    markers: dict[Group, str] = {}
    for axis, (figure, rows) in zip(axes[0], figures.items(), strict=True):
        for number, (group, methods) in enumerate(by_group(figure, rows).items()):
            markers[group] = "osD^v"[number % 5]
            for policy, row in methods.items():
                low, high = (row.value if end is None else end for end in (row.ci95_low, row.ci95_high))
                reach = [[max(row.value - low, 0)], [max(high - row.value, 0)]]
                place = policies.index(policy) - 0.2 * number
                style = {"marker": markers[group], "color": plots.colour(policy), "markersize": 5}
                axis.errorbar(row.value, place, xerr=reach, linestyle="none", **style)
        axis.set_title(figure.title)
        axis.set_yticks(range(len(policies)), policies)
        axis.axvline(1, color=plots.COLOURS["exact"], linewidth=1)
        axis.grid(alpha=0.3)
    for group, marker in markers.items():
        axes[0][0].plot([], [], marker, color="grey", label=group)
    drawn.legend(loc="outside lower right", ncols=len(markers))
    plots.save(drawn, path, dpi=100)


def verdict(figure: Figure, rows: Sequence[Row]) -> str:
    """Whether each method that the paper puts before another comes before it here, by 95% intervals; empty where no two
    of them were run."""
    same, reversed_, apart = 0, dict[str, int](), 0
    for methods in by_group(figure, rows).values():
        for better, worse in zip(figure.order, figure.order[1:], strict=False):
            if better not in methods or worse not in methods:
                continue
            outcome = compare(figure, methods[better], methods[worse])
            if outcome > 0:
                same += 1
            elif outcome < 0:
                pair = f"`{worse}` before `{better}`"
                reversed_[pair] = reversed_.get(pair, 0) + 1
            else:
                apart += 1
    total = same + apart + sum(reversed_.values())
    if not total:
        return ""
    word = "**no**" if reversed_ else "**yes**" if not apart else "**not told apart**" if not same else "**in part**"
    told = f"{word}, {same} of {total} comparisons"
    if apart:
        told += f", {apart} within their intervals"
    if reversed_:
        told += "; the other way round: " + ", ".join(f"{pair} ({count})" for pair, count in reversed_.items())
    return told


def compare(figure: Figure, better: Row, worse: Row) -> int:
    """1 where the first is better and the intervals do not meet, -1 where it is worse and they do not, 0 where they
    meet. A figure without an interval is taken as it is."""
    (low, high), (other_low, other_high) = (
        (row.value, row.value) if row.ci95_low is None or row.ci95_high is None else (row.ci95_low, row.ci95_high)
        for row in (better, worse)
    )
    above, below = low > other_high, high < other_low
    if figure.lower_is_better:
        above, below = below, above
    return int(above) - int(below)
