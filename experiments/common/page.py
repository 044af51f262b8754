"""The pages of results under `docs/`, written from rows alone: every table and figure of the papers beside what was
measured here, accuracy, speed and theory."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.common import comparisons, ranking, sections, task_tables, width_tables
from experiments.common.jobs import JOBS, PROFILES
from experiments.common.processes import ROOT, command
from experiments.common.results import Row, from_flat
from experiments.common.sections import Figure, Section

DOCS = ROOT / "docs"
RESULTS = ROOT / "experiments" / "results"
# A page is read in one sitting.
MOST_BYTES = 15_000


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
    """What the pages need of jobs that were run: of their rows those that they show."""

    def shown(job: str, row: Row) -> bool:
        if job in _BESIDE_KVPRESS or any(swept.job == job and swept.takes(row) for swept in task_tables.SWEPT):
            return True
        if width_tables.takes(job, row):
            return True
        if any(section.draws(job, row) for page in sections.pages() for section in page.sections):
            return True
        return any(job in figure.jobs and figure.takes(row) for _, _, figure in sections.figures())

    return {
        job: Done(done.command, [row for row in done.rows if shown(job, row)], machine) for job, done in found.items()
    }


def save(found: Results, path: pathlib.Path) -> None:
    """Writes results as JSON, a row per line."""
    jobs = {}
    for job, done in sorted(found.items()):
        rows = [{name: value for name, value in row.flat().items() if value is not None} for row in done.rows]
        jobs[job] = {"command": done.command, "machine": done.machine, "rows": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(jobs, indent=1) + "\n", encoding="utf-8")


def load(path: pathlib.Path) -> dict[str, Done]:
    """The results that `save` wrote."""
    jobs = json.loads(path.read_text(encoding="utf-8"))
    return {
        job: Done(done["command"], [from_flat(row) for row in done["rows"]], done["machine"])
        for job, done in jobs.items()
    }


def published() -> dict[str, dict[str, Done]]:
    """The results behind the pages in this repository, by profile."""
    return {path.stem: load(path) for path in sorted(RESULTS.glob("*.json"))}


def publish(found: Results, profile: str) -> None:
    """Puts jobs that were run in the place of earlier ones, and of quick ones, and writes the pages anew."""
    earlier = published()
    quick = {job: done for job, done in earlier.get("quick", {}).items() if job not in found}
    for name, jobs in {"quick": quick, profile: earlier.get(profile, {}) | dict(found)}.items():
        save(jobs, RESULTS / f"{name}.json")
    write(published(), DOCS)


def write(found: Mapping[str, Results], directory: pathlib.Path) -> list[pathlib.Path]:
    """Writes all pages and their pictures under a folder, from results by profile, and gives their paths."""
    written = []
    for path, text in render(found).items():
        written.append(directory / path)
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        written[-1].write_text(text, encoding="utf-8")
    if swept := _swept(found):
        written += task_tables.draw({job: done.rows for job, done in swept.items()}, directory / "images")
    if widths := _of_widths(found):
        written += width_tables.draw({job: done.rows for job, done in widths.items()}, directory / "images")
    for section in (section for own in sections.pages() for section in own.sections):
        jobs, taken = _taken(section, found)
        if section.picture and taken:
            written.append(directory / "images" / section.picture[0])
            if section.drawn:
                draw = JOBS[section.drawn].of.after
                assert draw is not None
                draw(written[-1], [row for row in jobs[section.drawn].rows if section.draws(section.drawn, row)])
            else:
                comparisons.draw(taken, written[-1])
    return written


def render(found: Mapping[str, Results]) -> dict[str, str]:
    """The pages in Markdown by their paths, from results by profile; what was not run is left out."""
    pages = {}
    for page in sections.pages():
        told = [text for name in page.generated for text in GENERATED[name](found)]
        told += [text for section in page.sections if (text := render_section(section, found))]
        if bare := [section for section in page.sections if not section.figures]:
            listed = "\n".join(f"- {one.name}, {one.what}: {one.paper}" for one in bare)
            told.append(f"## Illustrations, with nothing to measure\n\n{listed}")
        pages[page.path] = "\n\n".join([f"# {page.title}", page.about, *told, _HOW]) + "\n"
    return pages


def render_section(section: Section, found: Mapping[str, Results]) -> str:
    """A section from the largest profile that ran any of it; empty where none did."""
    jobs, taken = _taken(section, found)
    if not taken:
        return ""
    parts = [f"## {section.title}"]
    if section.paper:
        setting = f" ({section.setting})" if section.setting else ""
        parts.append(f"**The paper**{setting}: {section.paper}." if section.name else f"{section.paper}.")
    if section.joined:
        parts.append(comparisons.table(taken))
    else:
        for figure, rows in taken.items():
            titled = figure.title and figure.groups
            parts.append((f"*{figure.title}*\n\n" if titled else "") + comparisons.table({figure: rows}))
    if section.picture:
        name, shown = section.picture
        parts.append(f"![{shown}](../images/{name})")
    orders = []
    for figure, rows in taken.items():
        if told := comparisons.verdict(figure, rows):
            orders.append((f"{figure.title}: " if figure.title and len(taken) > 1 else "") + told)
    if len(orders) == 1:
        parts.append(f"The paper's order: {orders[0]}.")
    elif orders:
        parts.append("The paper's order:\n\n" + "\n".join(f"- {order}" for order in orders))
    if section.why:
        parts.append(section.why)
    names = dict.fromkeys(job for figure in taken for job in figure.jobs if job in jobs)
    ran = {name: jobs[name]._replace(rows=_of(jobs[name].rows, taken)) for name in names}
    if ablation := next(iter(taken)).where.get("ablation"):  # one of several that its job ran
        others = re.compile(rf" --ablation=(?!{ablation}\b)\S+")
        ran = {name: done._replace(command=others.sub("", done.command)) for name, done in ran.items()}
    parts.append(_typed(ran, section.command))
    return "\n\n".join(parts)


def _taken(section: Section, found: Mapping[str, Results]) -> tuple[Results, dict[Figure, list[Row]]]:
    """The largest profile that ran any of a section, and the rows of each figure that it ran."""
    for jobs in _largest_first(found):
        rows = {
            figure: _of((row for job in figure.jobs if job in jobs for row in jobs[job].rows), [figure])
            for figure in section.figures
        }
        if any(rows.values()):
            return jobs, {figure: own for figure, own in rows.items() if own}
    return {}, {}


def _of(rows: Iterable[Row], figures: Iterable[Figure]) -> list[Row]:
    return [row for row in rows if any(figure.takes(row) for figure in figures)]


def not_run(found: Mapping[str, Results]) -> dict[str, list[str]]:
    """What to type on two cores for figures that no profile has rows of, and where these would stand."""
    missing: dict[str, list[str]] = {}
    for page, section, figure in sections.figures():
        rows = (row for jobs in found.values() for job in figure.jobs if job in jobs for row in jobs[job].rows)
        if not any(map(figure.takes, rows)):
            job = JOBS[figure.jobs[0]]
            typed = command(job.experiment, job.arguments("cpu"))
            missing.setdefault(typed, []).append(": ".join(filter(None, (page.path, section.title, figure.title))))
    return missing


def _largest_first(found: Mapping[str, Results]) -> list[Results]:
    """Results of the profile that takes most first; ones of other names last."""
    order = [*reversed(PROFILES), *(name for name in found if name not in PROFILES)]
    return [found[name] for name in order if name in found]


def _ran_on(rows: Sequence[Row]) -> str:
    words = [", ".join(dict.fromkeys(row.model for row in rows))]
    if lengths := dict.fromkeys(f"{row.context_tokens:,}" for row in rows if row.context_tokens):
        words.append(f"{', '.join(lengths)} tokens")
    if counts := sorted({row.n for row in rows if row.n}):
        words.append(f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}")
    return ", ".join(words)


def _swept(found: Mapping[str, Results]) -> Results:
    """The swept tasks of the profile that ran most of them, of the largest where several did."""
    by_profile = []
    for jobs in _largest_first(found):
        ran = {one.job for one in task_tables.SWEPT if one.job in jobs and any(map(one.takes, jobs[one.job].rows))}
        by_profile.append({job: done for job, done in jobs.items() if job in ran})
    return max(by_profile, key=len, default={})


def _tasks(found: Mapping[str, Results]) -> Iterator[str]:
    if swept := _swept(found):
        yield task_tables.section({job: done.rows for job, done in swept.items()})
        yield _typed(swept)


def _of_widths(found: Mapping[str, Results]) -> Results:
    """The jobs on widths of the largest profile that ran any."""
    of_profiles = (
        {job: jobs[job] for job in width_tables.JOBS.values() if job in jobs} for jobs in _largest_first(found)
    )
    return next(filter(None, of_profiles), {})


def _widths(found: Mapping[str, Results]) -> Iterator[str]:
    if widths := _of_widths(found):
        yield width_tables.section({job: done.rows for job, done in widths.items()})
        yield _typed(widths)


def _peers(found: Mapping[str, Results]) -> Iterator[str]:
    for job, about in _BESIDE_KVPRESS.items():
        if peers := next((jobs[job] for jobs in _largest_first(found) if job in jobs), None):
            yield from (about, ranking.section(peers.rows), _typed({job: peers}))


GENERATED: dict[str, Callable[[Mapping[str, Results]], Iterable[str]]] = {
    "tasks": _tasks,
    "peers": _peers,
    "widths": _widths,
}


def _typed(jobs: Results, at_papers_size: str = "") -> str:
    """What to type, each command behind what its rows ran on."""
    lines = []
    for done in jobs.values():
        if done.rows:
            lines += [f"# {_ran_on(done.rows)}; {done.machine}", done.command]
    if at_papers_size:
        lines += ["# at the paper's size", at_papers_size]
    return "```sh\n" + "\n".join(lines) + "\n```"


_HOW = """---

Written by `python -m experiments.pages` from the rows of `experiments/results`. Brackets are 95% intervals. A paper's
order of methods is asked of every pair of neighbours in its ranking: the first must be better than the second by
intervals that do not meet. What has not been run is left out; the same command names it."""

# By job.
_BESIDE_KVPRESS = {
    "peers_presses": "## Every press\n\nPresses that are missing failed, or have not been run.",
    "peers": "## More documents, fewer bytes",
}
