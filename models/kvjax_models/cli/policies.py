"""`kvjax policies`: what there is, and what can be set."""

import dataclasses
import inspect
import re

import simple_parsing

from kvjax.registry import POLICIES, settings_of
from kvjax_models.cli.options import write_output


@dataclasses.dataclass(frozen=True)
class Policies:
    """Lists the policies, or what can be set of one."""

    name: str | None = simple_parsing.field(default=None, positional=True)  # A policy, for its settings.

    def run(self) -> None:
        if self.name is None:
            write_output(listed())
        elif self.name in POLICIES:
            write_output(detailed(self.name))
        else:
            raise ValueError(f"policy {self.name!r} is not known; known: {', '.join(sorted(POLICIES))}")


def listed() -> str:
    """Every policy, and what it keeps."""
    width = max(map(len, POLICIES))
    lines = [f"{name:{width}}  {_summary(POLICIES[name])}" for name in POLICIES]
    more = "kvjax policies NAME shows settings. Every policy takes full_layers=N, and --kv_dtype."
    return "\n".join([*lines, "", more, ""])


def detailed(name: str) -> str:
    """A policy's documentation with its settings, their types and defaults."""
    policy = POLICIES[name]
    settings = [
        f"  {key}: {kind}" + ("" if default is None else f" = {default}") for key, kind, default in settings_of(policy)
    ]
    return "\n".join([name, "", inspect.cleandoc(policy.__doc__ or ""), "", "Settings:", *settings, ""])


def _summary(policy: type) -> str:
    """The first sentence of what it says of itself, and the next where that is short."""
    text = " ".join(inspect.cleandoc(policy.__doc__ or "").split("\n\n")[0].split())
    first, *more = re.split(r"(?<=[.;:])\s", text)
    return f"{first} {more[0]}".rstrip(";:") if len(first) < 45 and more else first.rstrip(";:")
