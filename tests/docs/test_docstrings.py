"""The examples in docstrings of kvjax give the results that they show."""

import doctest
import importlib
import pathlib

import pytest

import kvjax

ROOT = pathlib.Path(kvjax.__file__).parent
MODULES = sorted(
    ".".join(("kvjax", *path.relative_to(ROOT).with_suffix("").parts))
    for path in ROOT.rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, attempted = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert failed == 0 and attempted > 0
