"""Parses command lines with simple_parsing, and flags of other libraries with absl."""

import argparse
import re
from collections.abc import Sequence
from typing import Any

import simple_parsing
from absl import flags

from kvjax.messages import did_you_mean


class HelpFormatter(simple_parsing.help_formatter.SimpleHelpFormatter):
    """Omits internal names of argument groups and empty defaults, and escapes percent signs."""

    def start_section(self, heading: str | None) -> None:
        """Starts a group of arguments.

        Args:
            heading: title of the group.
        """
        super().start_section(heading and heading.partition(" ['")[0])

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        if text and action.default in (None, "", []):  # its help says what happens without the option
            text = text.removesuffix(" (default: %(default)s)")
        return text and re.sub(r"%(?!\()", "%%", text)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        # simple_parsing writes brackets around the value of an option that may be None, and none around a positional
        # argument that may be omitted.
        text = re.sub(r"^\[(\w+)\]$", r"\1", super()._format_args(action, default_metavar))
        return f"[{text}]" if action.nargs == argparse.OPTIONAL and not action.option_strings else text


def make_parser(description: str | None, **options: Any) -> simple_parsing.ArgumentParser:
    """Returns a parser without arguments.

    Args:
        description: text at the start of the help.
        **options: further options of `argparse.ArgumentParser`.
    """
    return simple_parsing.ArgumentParser(description=description, formatter_class=HelpFormatter, **options)


def parse(parser: simple_parsing.ArgumentParser, args: Sequence[str]) -> Any:
    """Parses the arguments of a command; exits with a message if they are invalid.

    Args:
        args: arguments without the program's name; flags that the parser does not know are parsed by absl. Names of
            flags may have hyphens instead of underscores.

    Returns:
        The parser's namespace.
    """
    try:
        namespace, other_flags = parser.parse_known_args(list(map(_with_underscores, args)))
        _check_names(parser, other_flags)
        unknown = flags.FLAGS(["", *other_flags])[1:]
    except (ValueError, flags.Error) as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown arguments: {unknown}")
    return namespace


def _check_names(parser: argparse.ArgumentParser, others: Sequence[str]) -> None:
    """Checks the names of options that a parser does not know, of which some are flags of absl.

    Raises:
        ValueError: if an option is unknown to absl, too; suggests a similar one of the command.
    """
    options = [name for action in parser._actions for name in action.option_strings]
    for argument in others:
        name = argument.partition("=")[0]
        flag = name.lstrip("-")
        if name.startswith("--") and flag and not {flag, flag.removeprefix("no")} & set(flags.FLAGS):
            raise ValueError(f"unknown option {name}; {did_you_mean(name, options)}--help lists the options")


def _with_underscores(argument: str) -> str:
    """Returns `--prompt_file=X` for `--prompt-file=X`, and other arguments unchanged."""
    name, equals, value = argument.partition("=")
    if not re.fullmatch(r"--[a-z][a-z0-9_-]*", name):
        return argument
    return f"--{name[2:].replace('-', '_')}{equals}{value}"
