"""A progress line on the terminal."""

import sys
import threading
from collections.abc import Iterator

from kvjax_models.devices import is_first_process
from kvjax_models.engine import Engine, Output


def is_terminal() -> bool:
    """Returns whether standard error is a terminal, which shows progress."""
    return sys.stderr is not None and sys.stderr.isatty()


class ProgressLine:
    """A line on standard error that is overwritten; it is shown on terminals only."""

    def __init__(self, quiet: bool = False) -> None:
        """Creates the line.

        Args:
            quiet: whether to show nothing.
        """
        self._is_shown = is_terminal() and not quiet and is_first_process()

    def show(self, text: str) -> None:
        """Replaces the line by a text; an empty text removes it."""
        if self._is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()


def outputs(engine: Engine, line: ProgressLine, stop: threading.Event | None = None) -> Iterator[Output]:
    """Runs an engine with one request, and shows the progress of its prefill.

    Args:
        engine: an engine whose steps are single steps of prefill.
        line: the progress line; empty afterwards.
        stop: an event that aborts the request after a step.

    Yields:
        Outputs of the request.

    Raises:
        ValueError: if the request failed, after its text.
    """
    line.show("compiling, then reading the prompt ...")
    steps = 0
    while engine.has_unfinished:
        if stop is not None and stop.is_set():
            engine.abort_all()
        results = engine.step()
        steps += 1
        line.show("" if results else f"reading the prompt: step {steps} ...")
        yield from results
        for output in results:
            if output.error is not None:
                raise ValueError(output.error)
