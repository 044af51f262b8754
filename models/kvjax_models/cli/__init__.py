"""The console command: `kvjax generate`, `chat`, `bench`, `policies`; each has its `--help`."""

import argparse
import dataclasses
import os
import re
import sys

import simple_parsing
from absl import app, logging

from kvjax_models.cli import parsing
from kvjax_models.cli.bench import Bench
from kvjax_models.cli.chat import Chat
from kvjax_models.cli.generate import Generate
from kvjax_models.cli.policies import Policies

_COMMANDS = {"generate": Generate, "chat": Chat, "bench": Bench, "policies": Policies}
_TRACEBACK = "KVJAX_TRACEBACK"  # set, an error shows where it came from


class _Help(simple_parsing.help_formatter.SimpleHelpFormatter):
    """Without the places that a parser keeps its values in, and with shares in per cent as they are written."""

    def start_section(self, heading: str | None) -> None:
        super().start_section(heading and heading.partition(" ['")[0])

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        return text and re.sub(r"%(?!\()", "%%", text)


@dataclasses.dataclass(frozen=True)
class Kvjax:
    """Language models through compressed key/value caches."""

    command: Generate | Chat | Bench | Policies = simple_parsing.subparsers(_COMMANDS)


def main(given: Kvjax) -> None:
    """Runs a command; what a user gave wrongly is said in one line."""
    logging.set_verbosity(logging.WARNING)  # orbax reports every step of every save
    try:
        given.command.run()
    except (ValueError, OSError) as error:
        if os.environ.get(_TRACEBACK):
            raise
        sys.exit(f"kvjax: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def parse(argv: list[str]) -> Kvjax:
    """The command that a user typed, the program's name first."""
    parser = simple_parsing.ArgumentParser(prog="kvjax", description=Kvjax.__doc__, formatter_class=_Help)
    parser.add_arguments(Kvjax, dest="given")
    return parsing.parse(parser, argv[1:]).given


def run() -> None:
    """The entry of the console script."""
    app.run(main, flags_parser=parse)
