"""Results as flat rows: written as JSON, shown as tables, with intervals."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import rich.console
import rich.table
from scipy import stats


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure. None where a field does not apply; `extra` is whatever else identifies the setting."""

    experiment: str
    model: str
    policy: str
    metric: str
    value: float
    task: str | None = None
    stream: str | None = None
    variant: str | None = None
    budget_fraction: float | None = None
    context_tokens: int | None = None
    batch: int | None = None
    question_seen: bool | None = None
    ci95_low: float | None = None
    ci95_high: float | None = None
    n: int | None = None
    seed: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    read_bytes_per_token: int | None = None
    weight_bytes: int | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """The row as JSON holds it, `extra` beside the other fields."""
        fields = dataclasses.asdict(self)
        return fields | fields.pop("extra")


def write_rows(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes rows as a JSON list; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.flat() for row in rows], indent=1) + "\n")


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95% interval of a share."""
    interval = stats.binomtest(successes, trials).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def print_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """A table on the terminal: the first column left-aligned, figures right-aligned."""
    table = rich.table.Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    rich.console.Console(width=140).print(table)


def readable_bytes(count: float) -> str:
    """Bytes in binary units: 1536 is "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
