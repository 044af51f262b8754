"""What numbers of fewer bits keep of exact's results, alone and behind a selection, by bytes: told and drawn."""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from experiments.common import comparisons, plots, results, task_tables
from experiments.common.results import Row
from experiments.common.task_tables import Line

# Under the names of the sweeps that they are parts of.
JOBS = {"ruler": "few_bits", "line_retrieval": "few_bits_lines", "perplexity": "few_bits_perplexity"}
PICTURE = "few_bits.png"
SCORES = {
    "ruler": "needle tasks, right answers",
    "line_retrieval": "line retrieval, right answers",
    "perplexity": "perplexity, of exact's (less is better)",
}
MARKERS = {None: "o", "int8": "s", "int4": "D", "int3": "^", "int2": "v"}


def found(jobs: Mapping[str, Sequence[Row]]) -> list[Line]:
    """Every setting's scores, from rows by job."""
    return task_tables.lines({sweep: jobs.get(job, ()) for sweep, job in JOBS.items()})


def takes(job: str, row: Row) -> bool:
    """Whether a row of a job is shown."""
    return any(JOBS.get(swept.job) == job and swept.takes(row) for swept in task_tables.SWEPT)


def section(jobs: Mapping[str, Sequence[Row]]) -> str:
    """A line per setting in Markdown; empty where nothing was run."""
    every = sorted(found(jobs), key=lambda line: (line.policy != "exact", -line.fraction))
    if not every:
        return ""
    shown = _shown(every)
    head = ["", "bytes, of float32's", "of bfloat16's", *shown.values()]
    cells = (
        [
            f"`{line.label}`",
            *(f"{times * line.fraction:.1%}" for times in (1, 2)),
            *(task_tables.written(line.of_job(sweep)) for sweep in shown),
        ]
        for line in every
    )
    picture = f"![results against bytes, by bits of a number](../images/{PICTURE})"
    return "\n\n".join(["## By bytes", comparisons.markdown(head, cells), *_best(every), picture])


def _best(every: Sequence[Line]) -> Iterator[str]:
    """Of each budget the best selection and width of the needle tasks, in words, beside exact and each alone."""
    scores = {id(line): score for line in every if (score := line.of_job("ruler"))}
    scored = [line for line in every if id(line) in scores]
    exact = [line for line in scored if line.policy == "exact"]
    for budget in dict.fromkeys(line.budget for line in scored if line.budget is not None):
        own = [line for line in scored if line.budget == budget]
        best = max(own, key=lambda line: scores[id(line)].value)
        alone = [line for line in own if _width(line) is None and line.policy == best.policy]
        against = {"exact": exact[:1], "the selection alone": alone, "the fewest bits alone": exact[-1:]}
        told = [
            f"{comparisons.short(results.difference_of(scores[id(best)], scores[id(other)]).fixed('+'))} to {name}"
            f" (`{other.label}`, {2 * other.fraction:.1%})"
            for name, others in against.items()
            for other in others
            if other is not best
        ]
        where = f"Best of the needle tasks at {2 * best.fraction:.1%} of bfloat16's bytes"
        yield f"{where}: `{best.label}`, {'; '.join(told)}."


def draw(jobs: Mapping[str, Sequence[Row]], directory: pathlib.Path) -> list[pathlib.Path]:
    """A panel per score, against bytes: a marker per width, a colour per policy. Gives where it is."""
    every = found(jobs)
    shown = _shown(every)
    size = (5 * len(shown), 4.4)
    drawn, axes = plots.plt.subplots(1, len(shown), figsize=size, layout="constrained", squeeze=False)
    for axis, (sweep, title) in zip(axes[0], shown.items(), strict=True):
        for line in every:
            if score := line.of_job(sweep):
                style = {"marker": MARKERS[_width(line)], "markersize": 6}
                plots.line_with_interval(axis, [(100 * line.fraction, score)], label=line.label, **style)
        axis.set(title=title, xscale="log", xlabel="bytes, % of float32's")
        ticks = [3, 6, 12, 25, 50, 100]
        axis.set_xticks(ticks, list(map(str, ticks)))
        axis.minorticks_off()
        above = axis.secondary_xaxis("top", functions=(lambda x: 2 * x, lambda x: x / 2))
        above.set_xticks([2 * tick for tick in ticks], [str(2 * tick) for tick in ticks])
        above.minorticks_off()
        above.set_xlabel("of bfloat16's")
        axis.grid(alpha=0.3)
    looks = {policy: ("o", plots.colour(policy)) for policy in dict.fromkeys(line.policy for line in every)}
    looks |= {width or "as they are": (marker, "grey") for width, marker in MARKERS.items()}
    handles = [axes[0][0].plot([], [], marker, color=colour, label=name)[0] for name, (marker, colour) in looks.items()]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    plots.save(drawn, directory / PICTURE, dpi=100)
    return [directory / PICTURE]


def _width(line: Line) -> str | None:
    stored = re.search(r"storage=(\w+)", line.label)
    return None if stored is None else stored[1]


def _shown(every: Sequence[Line]) -> dict[str, str]:
    """The scores that any setting has."""
    return {sweep: title for sweep, title in SCORES.items() if any(line.of_job(sweep) for line in every)}
