"""Imports go one way: no circles within a package, and no package imports one above it."""

import ast
import graphlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = {
    "pallas_kernels": ROOT / "pallas_kernels",
    "kvjax": ROOT / "kvjax",
    "kvjax_models": ROOT / "models" / "kvjax_models",
    "experiments": ROOT / "experiments",
}


def find_modules(package):
    """Returns the files of a package by module."""
    directory = PACKAGES[package]
    paths = {path.relative_to(directory.parent).with_suffix(""): path for path in directory.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def find_imports(path):
    """Returns the modules and names that a file imports, also for type checkers and within functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {(node.module, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {(alias.name, None) for alias in node.names}
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_circles(package):
    modules = find_modules(package)
    graph = {}
    for name, path in modules.items():
        # `from a import b` needs the module b, or a name of a.
        imports = {f"{one}.{other}" if f"{one}.{other}" in modules else one for one, other in find_imports(path)}
        graph[name] = imports & modules.keys() - {name}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_none_above_them(package):
    names = list(PACKAGES)
    above = names[names.index(package) + 1 :]
    for name, path in find_modules(package).items():
        found = {one for one, _ in find_imports(path) if one.partition(".")[0] in above}
        assert not found, (name, found)
