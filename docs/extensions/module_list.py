"""The directive `{modules} PACKAGE`, which documents every public module of a package.

Lines of its content name modules to leave out. Packages show the names that they export, or their modules if they
export none.
"""

import importlib
import pkgutil

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def find_modules(package: str, excluded: set[str]) -> dict[str, bool]:
    """Returns the public modules directly inside a package.

    Args:
        package: name of the package.
        excluded: names of modules to leave out.

    Returns:
        Whether each module is a package, by full module name in alphabetical order.
    """
    modules = {}
    for info in sorted(pkgutil.iter_modules(importlib.import_module(package).__path__), key=lambda info: info.name):
        name = f"{package}.{info.name}"
        if info.name.startswith("_") or info.name in excluded:
            continue
        if info.ispkg and not exported_names(name):
            modules |= find_modules(name, excluded)
        else:
            modules[name] = info.ispkg
    return modules


def exported_names(package: str) -> list[str]:
    """Returns the public names of a package that one of its modules defines."""
    members = vars(importlib.import_module(package)).items()
    return [
        name
        for name, value in members
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith(package)
    ]


class Modules(SphinxDirective):
    """The directive `{modules}`."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """Returns one section per module."""
        self.env.note_reread()
        lines = []
        for name, is_package in find_modules(self.arguments[0], {line.strip() for line in self.content}).items():
            members = ", ".join(exported_names(name)) if is_package else ""
            options = [f"   :members: {members}", *(["   :imported-members:"] if is_package else [])]
            lines += [f"## `{name}`", "", "```{eval-rst}", f".. automodule:: {name}", *options, "```", ""]
        section = nodes.section()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, section, match_titles=True)
        return section.children


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive with Sphinx.

    Args:
        app: the Sphinx application.

    Returns:
        The properties of the extension.
    """
    app.add_directive("modules", Modules)
    return {"parallel_read_safe": True}
