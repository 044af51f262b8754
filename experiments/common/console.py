"""Tables on the terminal."""

from collections.abc import Iterable, Sequence

import rich.console
import rich.table


def print_table(title: str, columns: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a table; the first column is left-aligned, the others are right-aligned, and no cell is cut off."""
    table = rich.table.Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    width = rich.console.Console(width=1000).measure(table).maximum
    rich.console.Console(width=max(width, len(title))).print(table)


def markdown_table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown; the first column is left-aligned, the others are right-aligned."""
    rule = ["---", *["---:"] * (len(columns) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, rule, *lines))
