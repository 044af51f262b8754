"""A module list that cannot fall behind: `{modules} PACKAGE` documents every public module of a package, by name."""

import importlib
import pkgutil

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def modules(package: str, without: set[str]) -> dict[str, bool]:
    """Public modules right inside a package, and which are packages themselves: those show what they export."""
    inside = importlib.import_module(package).__path__
    found = {info.name: info.ispkg for info in pkgutil.iter_modules(inside) if not info.name.startswith("_")}
    return {f"{package}.{name}": found[name] for name in sorted(found) if name not in without}


class Modules(SphinxDirective):
    required_arguments = 1
    has_content = True  # modules that are left out, a line each

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()
        lines = []
        for name, exports in modules(self.arguments[0], {line.strip() for line in self.content}).items():
            options = ["   :members:", *(["   :imported-members:"] if exports else [])]
            lines += [f"## `{name}`", "", "```{eval-rst}", f".. automodule:: {name}", *options, "```", ""]
        holder = nodes.section()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, holder, match_titles=True)
        return holder.children


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("modules", Modules)
    return {"parallel_read_safe": True}
