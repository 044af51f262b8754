"""A progress line on the terminal."""

import sys
import threading
from collections.abc import Iterator

from kvjax_models.devices import is_first_process
from kvjax_models.engine import Engine, Output


def is_terminal() -> bool:
    """Returns whether standard error is a terminal, which shows progress."""
    return sys.stderr is not None and sys.stderr.isatty()


def outputs(engine: Engine, *, quiet: bool, stop: threading.Event | None = None) -> Iterator[Output]:
    """Runs an engine with one request; a line on a terminal shows the progress of its prefill.

    Args:
        engine: an engine whose steps are single steps of prefill.
        quiet: whether to show nothing.
        stop: an event that aborts the request after a step.

    Yields:
        Outputs of the request.

    Raises:
        ValueError: if the request failed, after its text.
    """
    is_shown = is_terminal() and not quiet and is_first_process()

    def show(text: str) -> None:
        if is_shown:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    show("compiling, then reading the prompt ...")
    steps = 0
    while engine.has_unfinished:
        if stop is not None and stop.is_set():
            engine.abort_all()
        steps += 1
        results = engine.step()
        show("" if results else f"reading the prompt: step {steps} ...")
        yield from results
        for output in results:
            if output.error is not None:
                raise ValueError(output.error)
