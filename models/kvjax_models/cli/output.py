"""Output of commands."""

import importlib
import sys
from collections.abc import Sequence


def write_output(text: str) -> None:
    """Writes generated text to standard output immediately, in the first process of a run.

    Raises:
        OSError: if standard output is closed.
    """
    if _is_first_process():
        if sys.stdout is None:
            raise OSError("standard output is closed; redirect it to a file")
        sys.stdout.write(text)
        sys.stdout.flush()


def write_status(text: str) -> None:
    """Writes a status message to standard error unless it is closed, in the first process of a run."""
    if _is_first_process() and sys.stderr is not None:  # print would take standard output instead
        print(text, file=sys.stderr, flush=True)


def format_table(lines: Sequence[Sequence[str]]) -> str:
    """Returns lines of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join(rows) + "\n"


def _is_first_process() -> bool:
    # A process without JAX is the only one, and importing JAX would take longer than the rest of the command.
    return "jax" not in sys.modules or importlib.import_module("kvjax_models.devices").is_first_process()
