"""Imports go one way: no circles within a package, and no package imports one above it."""

import ast
import graphlib
import pathlib
import re

import pytest

import kvjax

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
    """Returns the modules, and the names of modules, that a file imports, also for type checkers and in functions."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    sources = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names | {f"{node.module}.{alias.name}" for node in sources for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_circles_and_go_to_no_package_above(package):
    modules, names = find_modules(package), list(PACKAGES)
    above, graph = names[names.index(package) + 1 :], {}
    for name, path in modules.items():
        imports = find_imports(path)
        found = {one for one in imports if one.partition(".")[0] in above}
        assert not found, (name, found)
        # `from a import b` needs the module b, or a name of a.
        graph[name] = {one if one in modules else one.rpartition(".")[0] for one in imports} & modules.keys() - {name}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises a CycleError


def test_kvjax_names_the_modules_that_kvjax_models_imports():
    named = set(re.findall(r"`(\w+)`", kvjax.__doc__))
    imports = {one for path in find_modules("kvjax_models").values() for one in find_imports(path)}
    modules = {one.removeprefix("kvjax.") for one in find_modules("kvjax")}
    used = {one.split(".")[1] for one in imports if one.startswith("kvjax.")} & {one.split(".")[0] for one in modules}
    assert used and used <= named, used - named
