"""Parses command lines with simple_parsing, and flags of other libraries with absl."""

from collections.abc import Sequence
from typing import Any

import simple_parsing
from absl import flags


def parse(parser: simple_parsing.ArgumentParser, args: Sequence[str]) -> Any:
    """Parses the arguments of a command; exits with a message if they are invalid.

    Args:
        parser: parser of the command.
        args: arguments without the program's name; flags that the parser does not know are parsed by absl.

    Returns:
        The parser's namespace.
    """
    try:
        namespace, other_flags = parser.parse_known_args(list(args))
        unknown = flags.FLAGS(["", *other_flags])[1:]
    except (ValueError, flags.Error) as error:
        parser.error(str(error))
    if unknown:
        parser.error(f"unknown arguments: {unknown}")
    return namespace
