"""The console command `kvjax` with its subcommands."""

import argparse
import importlib
import logging as stdlib_logging
import os
import signal
import sys
import threading
import traceback
import warnings
from types import TracebackType
from typing import Any

from absl import app, logging

import kvjax
from kvjax.messages import describe_os_error
from kvjax_models.cli import interrupts, parsing
from kvjax_models.cli.output import write_status

# Module and class of each command. A command is imported when it is called: most of them import JAX.
_COMMANDS = {
    "generate": ("generate", "Generate"),
    "chat": ("chat", "Chat"),
    "serve": ("serve", "Serve"),
    "bench": ("bench", "Bench"),
    "policies": ("policies", "Policies"),
    "models": ("models", "Models"),
    "download": ("models", "Download"),
    "calibrate": ("calibrate", "Calibrate"),
}
_MAX_MESSAGE = 2000  # characters of an error
_SAVE_LIBRARIES = ("orbax", "tensorstore")
_TRACEBACK = "KVJAX_TRACEBACK"  # environment variable that makes errors show their traceback


def main(command: Any) -> None:
    """Runs a command. A ValueError or OSError of it is printed as one line, and the process exits with status 1.

    Args:
        command: the options of a command, which `run` runs.

    Raises:
        ValueError: the error of the command, if the environment variable KVJAX_TRACEBACK is set.
        OSError: likewise.
    """
    logging.set_verbosity(logging.WARNING)  # orbax logs every step of every save
    try:
        command.run()
    except BrokenPipeError:  # the reader has ended, such as head
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), sys.stdout.fileno())  # for the flush at exit
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, OSError) as error:
        if os.environ.get(_TRACEBACK):
            raise
        message = describe_os_error(error) if isinstance(error, OSError) else str(error)
        sys.exit(f"kvjax: {_cut(message)}")


def _cut(message: str) -> str:
    """Returns a message without the middle if it is very long."""
    half = _MAX_MESSAGE // 2
    return message if len(message) <= _MAX_MESSAGE else f"{message[:half]} ... {message[-half:]}"


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Prints a warning as one line, without the code that gave it."""
    write_status(f"kvjax: {message}")


def _is_of_a_save(trace: TracebackType | None) -> bool:
    """Returns whether an error comes from a library that writes saves, which repeats it in the main thread."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace))
    return any(module.partition(".")[0] in _SAVE_LIBRARIES for module in modules)


def _is_logged(record: stdlib_logging.LogRecord) -> bool:
    """Returns whether to log a record: not if it has the traceback of an error of a save."""
    return not (isinstance(record.exc_info, tuple) and _is_of_a_save(record.exc_info[2]))


def _print_thread_error(error: threading.ExceptHookArgs) -> None:
    """Prints the error that ended a thread, unless it comes from a save."""
    if not _is_of_a_save(error.exc_traceback):
        threading.__excepthook__(error)


def _print_unraisable(error: Any) -> None:
    """Prints an error that cannot be raised, such as one in a destructor, unless it comes from a save.

    tensorstore calls Python in threads that Python has not started.
    """
    is_foreign = isinstance(threading.current_thread(), threading._DummyThread)
    if not is_foreign and not _is_of_a_save(error.exc_traceback):
        sys.__unraisablehook__(error)


def parse(argv: list[str]) -> Any:
    """Parses a command line.

    Args:
        argv: the arguments, starting with the program's name.

    Returns:
        The options of the command.
    """
    name = next((word for word in argv[1:] if not word.startswith("-")), None)
    if name not in _COMMANDS:
        _parse_without_command(argv[1:])
    module, class_name = _COMMANDS[str(name)]
    parser = parsing.make_parser(None, prog=f"kvjax {name}")
    command_class = getattr(importlib.import_module(f"kvjax_models.cli.{module}"), class_name)
    parser.add_arguments(command_class, dest="command")
    arguments = argv[1:]
    arguments.remove(str(name))
    return parsing.parse(parser, arguments).command


def _parse_without_command(arguments: list[str]) -> None:
    """Prints the version or the help, or an error; exits."""
    parser = argparse.ArgumentParser("kvjax", description="Language models with compressed key/value caches.")
    parser.add_argument("--version", action="version", version=f"kvjax {kvjax.__version__}")
    parser.add_argument("command", choices=_COMMANDS, help="`kvjax COMMAND --help` shows its options")
    parser.parse_args(arguments)


def run() -> None:
    """Runs the console script.

    Errors of a save are raised in the main thread. orbax and tensorstore print their tracebacks in others, too.
    """
    if not os.environ.get(_TRACEBACK):
        warnings.showwarning = _print_warning
        logging.get_absl_logger().addFilter(_is_logged)
        threading.excepthook = _print_thread_error
        sys.unraisablehook = _print_unraisable
        # Of writes that orbax drops after another one failed.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    interrupts.install()
    app.run(main, flags_parser=parse)
