"""The documentation of all policies, read from their source: importing the policies takes seconds, because of JAX."""

import ast
import importlib.util
import pathlib

# Algorithms whose guarantees are proven, which pretrained models do not answer with.
THEORY = ("subgen", "balancekv_theory")


def in_order(names: set[str]) -> list[str]:
    """Returns names of policies in the order of lists."""
    first = ("exact", "streaming_llm", "uniform")
    return [*first, *sorted(names.difference(first))]


def docstrings() -> dict[str, str]:
    """Returns the docstring of every policy of `kvjax.methods.table`, by the policy's name and in order."""
    found = {}
    for statement in _parse("kvjax.methods.table").body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            name, class_name = statement.module.rpartition(".")[2], statement.names[0].name
            classes = {one.name: one for one in _parse(statement.module).body if isinstance(one, ast.ClassDef)}
            found[name] = ast.get_docstring(classes[class_name]) or ""
    return {name: found[name] for name in in_order(set(found))}


def _parse(module: str) -> ast.Module:
    """Returns the syntax tree of a module, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None  # a module of this package
    return ast.parse(pathlib.Path(spec.origin).read_text("utf-8"))
