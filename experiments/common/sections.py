"""What the pages of results show, read from `experiments/pages`: each section a table or figure of a paper, or a
question of ours, with the rows that answer it.

Figures of the papers are as printed there (SubGen: Zandieh et al. 2024; ClusterGen: its second text, anonymous, under
review at ICLR 2025; BalanceKV: Han et al. 2025; ClusterKV: Liu et al. 2024; Chelsea: Hu et al. 2025).
"""

import dataclasses
import functools
import pathlib
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from experiments.common import suites
from experiments.common.results import Row, policy_label

PAGES = pathlib.Path(__file__).parents[1] / "pages"


@dataclasses.dataclass(frozen=True, eq=False)
class Figure:
    """Rows of jobs that stand for a table or figure.

    Attributes:
        jobs: their names in `jobs.JOBS`.
        metric: of the rows.
        where: fields and the values that rows have there; a list names several.
        without: fields that rows do not have.
        label: the field that tells methods apart; "policy" is the policy with its settings.
        groups: fields within which methods are compared.
        order: methods, from best to worst as the paper has them; one alone is shown and not ranked; empty where the
            paper ranks none.
        others: whether methods that are not in the order are shown too.
        title: what the figures are.
        decimals, lower_is_better: of the metric.
    """

    jobs: tuple[str, ...]
    metric: str
    where: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()
    label: str = "policy"
    groups: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    others: bool = False
    title: str = ""
    decimals: int = 2
    lower_is_better: bool = False

    @property
    def ranked(self) -> bool:
        """Whether the paper puts a method before another."""
        return len(self.order) > 1

    def method(self, row: Row) -> str:
        """What tells a row's method apart."""
        return policy_label(row) if self.label == "policy" else str(row.flat().get(self.label))

    def takes(self, row: Row) -> bool:
        """Whether a row of the jobs is one of these."""
        if row.metric != self.metric or (self.order and not self.others and self.method(row) not in self.order):
            return False
        flat = row.flat()
        return all(flat.get(name) is None for name in self.without) and all(
            flat.get(name) in (wanted if isinstance(wanted, list) else [wanted]) for name, wanted in self.where.items()
        )


@dataclasses.dataclass(frozen=True)
class Section:
    """A table or figure of a paper; several where they report the same of different models.

    Attributes:
        what: what it is of.
        name: as the paper numbers it; empty where it is no paper's.
        setting: models and data that the paper took.
        paper: what it reports.
        command: for the paper's own models and data.
        why: why an order does not hold, as far as measured.
        joined: whether its figures are columns of one table.
        picture: of its figures side by side: its name among the images, and what it shows.
        drawn: the job whose experiment draws that picture instead, from all its rows of these metrics.
    """

    what: str
    name: str = ""
    setting: str = ""
    paper: str = ""
    command: str = ""
    why: str = ""
    joined: bool = False
    picture: tuple[str, str] | None = None
    drawn: str = ""
    figures: tuple[Figure, ...] = ()

    @property
    def title(self) -> str:
        return f"{self.name}: {self.what}" if self.name else self.what

    def draws(self, job: str, row: Row) -> bool:
        """Whether a job's row is in the picture that the job draws."""
        return job == self.drawn and any(row.metric == figure.metric for figure in self.figures)


@dataclasses.dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        path: its place under `docs/`.
        generated: what else stands on it, by the names of `page.GENERATED`.
    """

    path: str
    title: str
    about: str
    sections: tuple[Section, ...]
    generated: tuple[str, ...] = ()


def _figure(found: Mapping[str, Any], metrics: Mapping[str, Any]) -> Figure:
    """A figure from its table in TOML; `ablation` stands for its job and what its rows are known by."""
    fields: dict[str, Any] = dict(metrics[found["metric"]])
    if ablation := found.get("ablation"):
        fields |= {"jobs": [f"ablations_{suites.ABLATIONS[ablation].system}"], "where": {"ablation": ablation}}
        if found["metric"] == "accuracy":
            fields |= {"groups": ["budget"], "title": "line retrieval"}
    fields = fields | {name: value for name, value in found.items() if name != "ablation"}
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Figure(**fields)


def _choices(system: str, named: set[str], metrics: Mapping[str, Any]) -> Iterator[Section]:
    """A section for every ablation of a system that no section of its own names: answers, and errors of attention."""
    for name, one in suites.ABLATIONS.items():
        if one.system == system and name not in named:
            figures = tuple(
                _figure({"ablation": name, "metric": metric}, metrics) for metric in ("accuracy", "relative_error")
            )
            what, _, rest = one.choice.partition(":")
            source = f"{one.source}{';' if rest else ''}{rest}"
            yield Section(what[0].upper() + what[1:], paper=source, joined=True, figures=figures)


@functools.cache
def pages() -> tuple[Page, ...]:
    """All pages, in order of their paths.

    Raises:
        KeyError, TypeError: for a metric that `metrics.toml` does not know, or a field that is none of the above.
    """
    metrics = tomllib.loads((PAGES / "metrics.toml").read_text(encoding="utf-8"))
    files = {path: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(PAGES.glob("*/*.toml"))}
    named = {
        figure.get("ablation", "")
        for file in files.values()
        for section in file["sections"]
        for figure in section.get("figures", ())
    }
    made = []
    for path, file in files.items():
        sections = [
            Section(**section | {"figures": tuple(_figure(one, metrics) for one in section.get("figures", ()))})
            for section in file["sections"]
        ]
        sections += [section for system in file.get("choices", ()) for section in _choices(system, named, metrics)]
        place = path.relative_to(PAGES).with_suffix(".md").as_posix()
        made.append(Page(place, file["title"], file["about"], tuple(sections), tuple(file.get("generated", ()))))
    return tuple(made)


def figures() -> Iterator[tuple[Page, Section, Figure]]:
    """Every figure with its section and page."""
    for page in pages():
        for section in page.sections:
            for figure in section.figures:
                yield page, section, figure
