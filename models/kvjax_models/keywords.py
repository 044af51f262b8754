"""Suggestions for misspelled keyword arguments."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from kvjax.messages import did_you_mean, shorten

P = ParamSpec("P")
R = TypeVar("R")


def suggest_keywords(*sources: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator that makes an unknown keyword of a function a TypeError with a suggestion.

    Args:
        *sources: the decorated functions and TypedDicts whose keywords the function passes on.

    Returns:
        The decorator.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(function).parameters.values()
        names = [one.name for one in parameters if one.kind in kinds and one.name != "self"]
        for source in sources:
            names += getattr(source, "keywords", source.__annotations__)
        names = list(dict.fromkeys(names))

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if (unknown := next((name for name in kwargs if name not in names), None)) is not None:
                raise TypeError(
                    f"{function.__name__} has no argument {shorten(unknown)}; {did_you_mean(unknown, names)}it has "
                    f"{', '.join(names)}"
                )
            return function(*args, **kwargs)

        checked.keywords = names  # type: ignore[attr-defined]
        return checked

    return decorate
