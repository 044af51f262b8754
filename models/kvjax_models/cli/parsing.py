"""What commands are given, from the words that a user typed."""

from collections.abc import Sequence
from typing import Any

import simple_parsing
from absl import flags


def parse(parser: simple_parsing.ArgumentParser, words: Sequence[str]) -> Any:
    """The parser's namespace; flags that it does not know go to absl.

    Raises:
        SystemExit: for what is no flag, or has a wrong value, with the reason.
    """
    try:
        namespace, rest = parser.parse_known_args(list(words))
        stray = flags.FLAGS(["", *rest])[1:]
    except (ValueError, flags.Error) as error:
        parser.error(str(error))
    if stray:
        parser.error(f"unknown arguments: {stray}")
    return namespace
