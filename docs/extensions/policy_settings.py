"""Directives that read policies from their classes, so that no page copies a setting:

`{policy} NAME` says what the docstring says before its sections, and `{policy-settings} NAME` tables its fields."""

import dataclasses
import functools
import inspect
import re

import docstring_parser
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvjax.combinators.ada_kv import AdaKV
from kvjax.combinators.by_head import ByHead
from kvjax.combinators.by_layer import ByLayer, FirstLayers
from kvjax.combinators.host_memory import HostMemory
from kvjax.combinators.quantized import Quantized
from kvjax.registry import POLICIES, settings_of
from kvjax.selection import Selection

COMBINATORS = {kind.__name__: kind for kind in (AdaKV, ByHead, ByLayer, FirstLayers, HostMemory, Quantized)}
CLASSES: dict[str, type] = {**POLICIES, **COMBINATORS, "Selection": Selection}


@functools.cache
def _docstring(kind: type) -> docstring_parser.Docstring:
    return docstring_parser.parse(inspect.getdoc(kind) or "", docstring_parser.DocstringStyle.GOOGLE)


def what_it_keeps(kind: type) -> str:
    """A policy's docstring up to its sections: Markdown already."""
    parsed = _docstring(kind)
    text = "\n\n".join(filter(None, (parsed.short_description, parsed.long_description)))
    return re.split(r"\n\s*Source:", text)[0]


def source_of(kind: type) -> str | None:
    """What stands behind "Source:"."""
    found = re.search(r"Source: (.*)", inspect.getdoc(kind) or "", flags=re.DOTALL)
    return " ".join(found[1].split()) if found else None


def settings(kind: type) -> list[tuple[str, str]]:
    """Every field with what is said of it, in the order of the docstring; fields that only a class above describes
    stand behind."""
    missing = [field.name for field in dataclasses.fields(kind)]
    told: list[tuple[str, str]] = []
    for of in filter(dataclasses.is_dataclass, kind.__mro__):
        for parameter in _docstring(of).params:
            for name in re.split(r",\s*", parameter.arg_name):
                if name in missing:
                    missing.remove(name)
                    told.append((name, " ".join((parameter.description or "").split())))
    return told + [(name, "") for name in missing]


def table(kind: type) -> list[str]:
    """The settings as lines of Markdown."""
    told = {name: (may_be, default) for name, may_be, default in settings_of(kind)}
    lines = ["| setting | default | may be | what it is |", "|---|---|---|---|"]
    for name, meaning in settings(kind):
        # A table's row is one line, in which a bar would end a cell.
        meaning = meaning.replace("|", r"\|")
        may_be, default = told[name]
        lines.append(f"| `{name}` | {f'`{default}`' if default is not None else ''} | {may_be} | {meaning} |")
    return lines


class _OfPolicy(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in CLASSES:
            raise self.error(f"policy {name!r} is not known; known: {', '.join(sorted(CLASSES))}")
        self.env.note_reread()  # its class may have changed
        holder = nodes.container()
        text = StringList(self.lines(CLASSES[name]), source=f"docstring of {CLASSES[name].__name__}")
        self.state.nested_parse(text, self.content_offset, holder)
        return holder.children

    def lines(self, kind: type) -> list[str]:
        raise NotImplementedError


class Keeps(_OfPolicy):
    def lines(self, kind: type) -> list[str]:
        return what_it_keeps(kind).splitlines()


class Settings(_OfPolicy):
    def lines(self, kind: type) -> list[str]:
        source = source_of(kind)
        return [*table(kind), "", *([f"Source: {source}"] if source else [])]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("policy", Keeps)
    app.add_directive("policy-settings", Settings)
    return {"parallel_read_safe": True}
