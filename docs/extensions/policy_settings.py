"""Directives that describe a policy from its class, so that no page repeats a setting.

`{policy} NAME` inserts the docstring up to its first section. `{policy-settings} NAME` inserts a table of the
fields, and the reference.
"""

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
from kvjax.combinators.head_budgets import HeadBudgets
from kvjax.combinators.host_memory import HostMemory
from kvjax.methods.top_k.top_k_policy import TopKPolicy
from kvjax.registry import POLICIES, settings_of

_OTHERS = (AdaKV, ByHead, ByLayer, FirstLayers, HeadBudgets, HostMemory, TopKPolicy)
CLASSES: dict[str, type] = {**POLICIES, **{policy_class.__name__: policy_class for policy_class in _OTHERS}}

_REFERENCE = re.compile(r"\n\s*Reference:\s*(.*)", flags=re.DOTALL)


@functools.cache
def _parse_docstring(policy_class: type) -> docstring_parser.Docstring:
    text = _REFERENCE.sub("", inspect.getdoc(policy_class) or "")
    return docstring_parser.parse(text, docstring_parser.DocstringStyle.GOOGLE)


def description_of(policy_class: type) -> str:
    """Returns a class docstring up to its first section.

    Args:
        policy_class: the class.

    Returns:
        The summary and the paragraphs after it.
    """
    parsed = _parse_docstring(policy_class)
    return "\n\n".join(filter(None, (parsed.short_description, parsed.long_description)))


def reference_of(policy_class: type) -> str | None:
    """Returns the section `Reference:` of a class docstring.

    Args:
        policy_class: the class.

    Returns:
        The section as one line; None for a class without it.
    """
    match = _REFERENCE.search(inspect.getdoc(policy_class) or "")
    return " ".join(match[1].split()) if match else None


def meanings_of(policy_class: type) -> dict[str, str]:
    """Returns the description of every field; inherited fields may be described by a base class.

    Args:
        policy_class: a dataclass.

    Returns:
        Descriptions by field name; an empty text for a field without description.
    """
    fields = [field.name for field in dataclasses.fields(policy_class)]
    meanings: dict[str, str] = {}
    for base in filter(dataclasses.is_dataclass, policy_class.__mro__):
        for parameter in _parse_docstring(base).params:
            for name in re.split(r",\s*", parameter.arg_name):
                if name in fields:
                    meanings.setdefault(name, " ".join((parameter.description or "").split()))
    return meanings | {name: "" for name in fields if name not in meanings}


def settings_table(policy_class: type) -> list[str]:
    """Returns the settings as lines of a Markdown table.

    Args:
        policy_class: a dataclass.

    Returns:
        One line per setting after the header: name, default, values and meaning.
    """
    settings = {name: (values, default) for name, values, default in settings_of(policy_class)}
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for name, meaning in meanings_of(policy_class).items():
        values, default = settings[name]
        default_text = "" if default is None else f"`{default}`"
        meaning = meaning.replace("|", r"\|")  # a bar would end the cell
        lines.append(f"| `{name}` | {default_text} | {values} | {meaning} |")
    return lines


class _PolicyDirective(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        if name not in CLASSES:
            raise self.error(f"policy {name!r} is unknown; choose one of {', '.join(sorted(CLASSES))}")
        self.env.note_reread()  # the class may have changed
        container = nodes.container()
        text = StringList(self.lines(CLASSES[name]), source=f"docstring of {CLASSES[name].__name__}")
        self.state.nested_parse(text, self.content_offset, container)
        return container.children

    def lines(self, policy_class: type) -> list[str]:
        raise NotImplementedError


class Description(_PolicyDirective):
    """The directive `{policy}`."""

    def lines(self, policy_class: type) -> list[str]:
        """Returns Markdown lines."""
        return description_of(policy_class).splitlines()


class Settings(_PolicyDirective):
    """The directive `{policy-settings}`."""

    def lines(self, policy_class: type) -> list[str]:
        """Returns the table of settings and the reference of a policy.

        Args:
            policy_class: the class.

        Returns:
            Markdown lines.
        """
        reference = reference_of(policy_class)
        return [*settings_table(policy_class), "", *([f"Reference: {reference}"] if reference else [])]


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives with Sphinx.

    Args:
        app: the Sphinx application.

    Returns:
        The properties of the extension.
    """
    app.add_directive("policy", Description)
    app.add_directive("policy-settings", Settings)
    return {"parallel_read_safe": True}
