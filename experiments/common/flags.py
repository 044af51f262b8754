"""Command lines of experiments: a frozen dataclass whose fields are flags, and a function that takes it."""

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import simple_parsing
from absl import app

from kvjax.budget import SmallBudgetWarning
from kvjax_models.cli import parsing


class _Collect(argparse.Action):
    """Collects the values of a flag that is repeated; the first one replaces the default."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if earlier is self.default else earlier), *values])


def repeatable(*default: Any, choices: Iterable[Any] | None = None) -> Any:
    """Returns a dataclass field for a flag that may be repeated and takes several values."""
    allowed = None if choices is None else list(choices)
    return simple_parsing.field(default=default, action=_Collect, nargs="+", required=False, choices=allowed)


def one_of(default: Any, choices: Iterable[Any]) -> Any:
    """Returns a dataclass field for a flag with a fixed set of values."""
    return simple_parsing.field(default=default, choices=list(choices))


@dataclasses.dataclass(frozen=True)
class Flags:
    """Base class of options: repeated flags become tuples."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if isinstance(value := getattr(self, field.name), list):
                object.__setattr__(self, field.name, tuple(value))


def parse(options: type, arguments: Sequence[str]) -> Any:
    """Parses flags.

    Args:
        options: the dataclass.
        arguments: arguments without the program's name; unknown flags are absl's.

    Returns:
        The options.
    """
    parser = parsing.make_parser(sys.modules["__main__"].__doc__, allow_abbrev=False)
    parser.add_arguments(options, dest="options", default=options())
    return parsing.parse(parser, arguments).options


def run_command(main: Callable[[Any], Any], options: type) -> None:
    """Runs `main` with the options of the command line; ends with a message if they are invalid."""

    def run(given: Any) -> None:
        warnings.simplefilter("ignore", SmallBudgetWarning)  # experiments measure what small budgets cost
        try:
            main(given)
        except (ValueError, FileNotFoundError) as error:
            sys.exit(f"{type(error).__name__}: {error}")

    app.run(run, flags_parser=lambda argv: parse(options, argv[1:]))
