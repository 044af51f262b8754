"""The results page: every table and figure of the papers beside what was measured here, written from rows alone."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.common import ranking, task_tables
from experiments.common.jobs import JOBS, Job
from experiments.common.papers import PAPERS, Figures, Item
from experiments.common.processes import ROOT, command
from experiments.common.results import Row, from_flat

PAGE = ROOT / "experiments" / "README.md"
RESULTS = ROOT / "experiments" / "results"
NOT_RUN = "not run yet"


class Done(NamedTuple):
    """A job that came to its end."""

    command: str
    rows: Sequence[Row]
    machine: str = ""


Results = Mapping[str, Done]  # by job


def machine() -> str:
    """The devices and the JAX version that experiments here run on; asked in another process, which leaves the devices
    to them."""
    program = "import jax; found = jax.devices(); print(len(found), found[0].device_kind, 'JAX', jax.__version__)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    count, *kind, _, version = said
    device = f"{os.cpu_count()} CPU cores" if kind == ["cpu"] else f"{count} x {' '.join(kind)}"
    return f"{device}, JAX {version}"


def collect(found: Results, machine: str) -> dict[str, Done]:
    """What the page needs of jobs that were run: of their rows those that it shows."""
    wanted: list[task_tables.Swept | Figures] = [*task_tables.SWEPT]
    wanted += [figures for paper in PAPERS for item in paper.items for figures in item.figures]
    return {
        job: Done(
            done.command,
            [row for row in done.rows if job == "peers" or any(one.job == job and one.takes(row) for one in wanted)],
            machine,
        )
        for job, done in found.items()
    }


def save(found: Results, path: pathlib.Path) -> None:
    """Writes results as JSON, a row per line."""
    jobs = {}
    for job, done in sorted(found.items()):
        rows = [{name: value for name, value in row.flat().items() if value is not None} for row in done.rows]
        jobs[job] = {"command": done.command, "machine": done.machine, "rows": rows}
    text = json.dumps(jobs, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: pathlib.Path) -> dict[str, Done]:
    """The results that `save` wrote."""
    jobs = json.loads(path.read_text(encoding="utf-8"))
    return {
        job: Done(done["command"], [from_flat(row) for row in done["rows"]], done["machine"])
        for job, done in jobs.items()
    }


def published() -> dict[str, dict[str, Done]]:
    """The results behind the page in this repository, by profile."""
    return {path.stem: load(path) for path in sorted(RESULTS.glob("*.json"))}


def publish(found: Results, profile: str) -> None:
    """Puts jobs that were run in the place of earlier ones, and of quick ones, and writes the page anew."""
    earlier = published()
    quick = {job: done for job, done in earlier.get("quick", {}).items() if job not in found}
    for name, jobs in {"quick": quick, profile: earlier.get(profile, {}) | dict(found)}.items():
        save(jobs, RESULTS / f"{name}.json")
        rows = {job: done.rows for job, done in jobs.items()}
        if task_tables.lines(rows):
            task_tables.plot(rows, RESULTS / f"{name}.png")
    PAGE.write_text(render(published()), encoding="utf-8")


def render(found: Mapping[str, Results]) -> str:
    """The page in Markdown, from results by profile."""
    parts = [_HEAD]
    for paper in PAPERS:
        parts.append(f"## {paper.name}\n\n{paper.about}\n")
        parts.append("| | the paper | here | the paper's order of methods | command, and what it ran on |")
        parts.append("|---|---|---|---|---|")
        parts += [line(item, found) for item in paper.items]
        parts.append("")
    parts.append(_TASKS)
    swept = {profile: {job: done.rows for job, done in jobs.items()} for profile, jobs in found.items()}
    swept = {profile: rows for profile, rows in swept.items() if task_tables.lines(rows)}
    for profile, rows in swept.items():
        parts.append(f"`--profile {profile}`:\n\n{task_tables.section(rows)}")
        parts.append(f"![what is kept of exact's results against bytes](results/{profile}.png)\n")
    if not swept:
        parts.append(task_tables.section({}))
    parts.append(_PEERS)
    for profile, jobs in found.items():
        if "peers" in jobs:
            done = jobs["peers"]
            parts.append(f"`--profile {profile}`: `{done.command}`; {done.machine}\n\n{ranking.section(done.rows)}")
    parts.append(_OTHERS)
    shown = {"peers"} | {one.job for one in task_tables.SWEPT}
    shown |= {figures.job for paper in PAPERS for item in paper.items for figures in item.figures}
    parts += [f"- `{typed(job)}`" for name, job in JOBS.items() if name not in shown]
    return "\n".join(parts) + "\n"


def typed(job: Job) -> str:
    """What a job is on two cores, as a user would type it."""
    return command(job.experiment, job.arguments("cpu"))


def line(item: Item, found: Mapping[str, Results]) -> str:
    """An item's line of the table."""
    here, orders = [], []
    ran: dict[tuple[str, str], list[Row]] = {}  # by job and profile
    for figures in item.figures:
        title = f"*{figures.title}*" if figures.title else ""
        taken = {
            profile: [row for row in jobs[figures.job].rows if figures.takes(row)]
            for profile, jobs in found.items()
            if figures.job in jobs
        }
        for profile, rows in taken.items():
            if rows:
                ran.setdefault((figures.job, profile), []).extend(rows)
                here.append((f"{title}<br>" if title else "") + _measured(figures, rows))
                if figures.ranked:
                    orders.append((f"{title}: " if title else "") + verdict(figures, rows))
        if not any(taken.values()):
            ran.setdefault((figures.job, NOT_RUN), [])
            here.append((f"{title}: " if title else "") + NOT_RUN)
    if any(figures.ranked for figures in item.figures):
        orders = [*orders, item.why] if orders else [NOT_RUN]
    cells = (
        [f"**{item.name}**", item.what],
        [item.reported],
        here,
        orders,
        [_run(found, *place, rows) for place, rows in ran.items()]
        + ([f"at the paper's size, with its weights and data: `{item.with_weights}`"] if item.with_weights else []),
    )
    return "| " + " | ".join("<br>".join(filter(None, cell)).replace("|", "\\|") or "-" for cell in cells) + " |"


def _run(found: Mapping[str, Results], job: str, profile: str, rows: Sequence[Row]) -> str:
    """A command, and what it ran on."""
    if profile == NOT_RUN:
        return f"`{typed(JOBS[job])}`: {NOT_RUN}"
    done = found[profile][job]
    return f"`{done.command}`: {_ran_on(rows)}{done.machine} (`{profile}`)"


def by_group(figures: Figures, rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Rows by what they are compared within, and method."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        flat = row.flat()
        found.setdefault(tuple(flat.get(name) for name in figures.groups), {})[figures.method(row)] = row
    return found


def _measured(figures: Figures, rows: Sequence[Row]) -> str:
    parts = []
    for group, methods in by_group(figures, rows).items():
        shown = [label for label in figures.order if label in methods]
        shown += [label for label in methods if label not in shown and (not figures.order or figures.others)]
        told = ", ".join(f"`{label}` {_figure(figures, methods[label])}" for label in shown)
        if told:
            parts.append((f"{_group(figures, group)}: " if group else "") + told)
    return "<br>".join(parts)


def _figure(figures: Figures, row: Row) -> str:
    if row.ci95_low is None or row.ci95_low == row.ci95_high:
        return figures.style.format(row.value)
    low, high = figures.style.format(row.ci95_low), figures.style.format(row.ci95_high)
    return f"{figures.style.format(row.value)} [{low}, {high}]"


def _group(figures: Figures, group: tuple[Any, ...]) -> str:
    words = []
    for name, value in zip(figures.groups, group, strict=True):
        if name == "context_tokens":
            words.append(f"{value:,} tokens")
        elif name in ("budget", "part", "task", "stream"):
            words.append("all" if value is None else str(value))
        else:
            words.append(
                f"{name.replace('_', ' ')} {value:g}"
                if isinstance(value, float)
                else f"{name.replace('_', ' ')} {value}"
            )
    return ", ".join(words)


def verdict(figures: Figures, rows: Sequence[Row]) -> str:
    """Whether each method that the paper puts before another comes before it here, by 95% intervals."""
    groups = by_group(figures, rows)
    same, reversed_, apart = 0, dict[str, int](), 0
    for group, methods in groups.items():
        methods = _with_exact(figures, groups, group) | methods
        for better, worse in zip(figures.order, figures.order[1:], strict=False):
            if better not in methods or worse not in methods:
                continue
            outcome = compare(figures, methods[better], methods[worse])
            if outcome > 0:
                same += 1
            elif outcome < 0:
                pair = f"`{worse}` before `{better}`"
                reversed_[pair] = reversed_.get(pair, 0) + 1
            else:
                apart += 1
    total = same + apart + sum(reversed_.values())
    if not total:
        return NOT_RUN
    word = "**no**" if reversed_ else "**yes**" if not apart else "**not told apart**" if not same else "**in part**"
    told = f"{word}: {same} of {total} comparisons as there"
    if apart:
        told += f", {apart} within their intervals"
    if reversed_:
        told += "; the other way round: " + ", ".join(f"{pair} ({count})" for pair, count in reversed_.items())
    return told


def _with_exact(
    figures: Figures, groups: Mapping[tuple[Any, ...], Mapping[str, Row]], group: tuple[Any, ...]
) -> dict[str, Row]:
    """Exact's row, which has no budget, for a group of one."""
    if "budget" not in figures.groups:
        return {}
    place = figures.groups.index("budget")
    without = (*group[:place], None, *group[place + 1 :])
    return {label: row for label, row in groups.get(without, {}).items() if label == "exact"}


def compare(figures: Figures, better: Row, worse: Row) -> int:
    """1 where the first is better and the intervals do not meet, -1 where it is worse and they do not, 0 where they
    meet. A figure without an interval is taken as it is."""
    (low, high), (other_low, other_high) = (
        (row.value, row.value) if row.ci95_low is None or row.ci95_high is None else (row.ci95_low, row.ci95_high)
        for row in (better, worse)
    )
    above, below = low > other_high, high < other_low
    if figures.lower_is_better:
        above, below = below, above
    return int(above) - int(below)


def _ran_on(rows: Sequence[Row]) -> str:
    models = dict.fromkeys(row.model for row in rows)
    lengths = dict.fromkeys(f"{row.context_tokens:,}" for row in rows if row.context_tokens)
    counts = sorted({row.n for row in rows if row.n})
    words = [", ".join(models)]
    if lengths:
        words.append(f"{', '.join(lengths)} tokens")
    if counts:
        words.append(f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}")
    return ", ".join(words) + "; "


_HEAD = """# The papers' tables and figures, measured here

This page is written by `python -m experiments.all --publish` from the rows of `experiments/results`; figures are not
typed by hand. `--profile cpu` runs on two cores, `--profile h200` on one H200, `--model DIRECTORY` on any checkpoint of
the Llama, Mistral or Qwen families.

"The paper's order of methods" takes every pair of neighbours in the paper's ranking and says whether the first is
before the second here, by 95% intervals that do not meet. Figures stand with their 95% intervals where they have one. A
ratio to exact is to exact attention in the same run.
"""

_TASKS = """## Every policy on every task

Of the tasks that need no downloaded data, compressed before the question is seen: means over lengths with 95%
intervals, of perplexity the ratio to exact's. Policies that recall keep everything and are compared by the bytes that
they read.
"""

_PEERS = """## Beside kvpress

kvjax's policies and presses of kvpress 0.5.5 on the same documents (`experiments.peers`), at equal bytes: of all that
exact holds, question and answer included, or of the text's, with as much for later tokens on top, as kvpress counts.
`held` is what is really held: presses that mask what they drop (KVzip, KVgrad, AdaKV) hold all of it, and are compared
as if they had freed it. Differences are paired by document; the best press is the one of the highest mean.
"""

_OTHERS = """## Beside the papers' tables

What the papers prove or leave out, and what this library adds; figures are in the main README:
"""
