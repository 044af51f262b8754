"""Ctrl-C ends the process, or the answer of a conversation, also while XLA compiles.

Python calls signal handlers between two instructions of the main thread, which may be inside of a compilation for
seconds. A thread therefore receives the signals. It ends the process without destructors: the main thread would destroy
XLA's client while other threads use it.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

STATUS = 128 + signal.SIGINT
_FLUSH_SECONDS = 0.5  # a reader that does not read must not delay the end
_pending: threading.Event | None = None  # set by Ctrl-C during an answer


def install() -> None:
    """Makes Ctrl-C end the process, except within `deferred`. Call it in the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGINT, _ignore)  # only handled signals are written to the pipe
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_receive, args=(reader,), name="interrupts", daemon=True).start()


@contextlib.contextmanager
def deferred() -> Iterator[threading.Event]:
    """Makes the first Ctrl-C set an event; the next one ends the process.

    Yields:
        The event, which the caller checks between two steps of its work.
    """
    global _pending
    _pending = threading.Event()
    try:
        yield _pending
    finally:
        _pending = None


def exit_now(status: int = STATUS) -> None:
    """Flushes the output and ends the process, by default with the status of Ctrl-C."""
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(_FLUSH_SECONDS)
    os._exit(status)


def _receive(reader: int) -> None:
    """Handles the signals whose numbers arrive in a pipe."""
    while True:
        if signal.SIGINT not in os.read(reader, 64):
            continue
        pending = _pending
        if pending is None or pending.is_set():
            exit_now()
        else:
            pending.set()
            _announce()


def _announce() -> None:
    """Writes when the answer ends, because a step that is being compiled can take seconds."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # standard error is closed
        sys.stderr.write("\n[the answer ends after this step; Ctrl-C again exits]\n")
        sys.stderr.flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing in the main thread; the other thread handles the signal."""
