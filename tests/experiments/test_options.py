"""Flags from dataclasses, and experiments side by side in one process."""

import ast
import dataclasses
import importlib
import re

import pytest

from experiments import line_retrieval, ruler
from experiments.common import ROOT, options, suites
from kvjax.registry import POLICIES

# These have no `EXPERIMENT`: they show results, or run other commands.
OTHERS = {"__init__", "demo", "device"}
MODULES = sorted({path.stem for path in (ROOT / "experiments").glob("*.py")} - OTHERS)
EXPERIMENTS = {name: importlib.import_module(f"experiments.{name}").EXPERIMENT for name in MODULES}


def test_repeated_flags_replace_the_default():
    given = options.parse(ruler.Options, ["--policy=exact", "--policy", "uniform", "--budget=25%", "--documents=3"])
    assert given == ruler.Options(policy=("exact", "uniform"), budget=("25%",), documents=3)
    assert options.parse(ruler.Options, []) == ruler.Options()


def test_quick_runs_use_small_defaults():
    given = options.parse(ruler.Options, ["--quick", "--context_tokens=800", "--context_tokens=900"])
    assert given == ruler.Options.small(context_tokens=(800, 900))
    assert given.quick and given.documents == 4 and given.budget == suites.SUITES["quick"].budgets


@pytest.mark.parametrize("words", [["exact"], ["--task=nothing"], ["--documents=many"], ["--bat=3", "x"]])
def test_unknown_flags_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        options.parse(ruler.Options, words)


def test_values_are_checked_without_a_command_line():
    with pytest.raises(ValueError, match="--task=nothing: give one of niah_single_1, "):
        ruler.Options(task=("nothing",))
    assert line_retrieval.Options(question=["seen"]).question == ("seen",)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_option_has_a_description(name, capsys):
    with pytest.raises(SystemExit):
        options.parse(EXPERIMENTS[name].options, ["--help"])
    told = capsys.readouterr().out
    for field in dataclasses.fields(EXPERIMENTS[name].options):
        assert f"--{field.name}" in told


def test_experiments_have_the_names_of_their_modules():
    assert {name: experiment.name for name, experiment in EXPERIMENTS.items()} == {name: name for name in MODULES}


def test_the_guide_names_every_module():
    guide = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert {*MODULES, *OTHERS} - {"__init__"} == set(re.findall(r"^\| `(\w+)`", guide, flags=re.MULTILINE))


def policies_in(node):
    """How many registered policies a literal names."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        words = [one.value for one in node.elts if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    else:
        words = node.value.split() if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
    named = [name for name in (re.split("[:@]", word)[0] for word in words) if name in POLICIES]
    return len(set(named)) if 2 * len(named) > len(words) else 0  # prose names some, too


def test_lists_of_policies_are_in_one_module():
    found = []
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{path.name}:{node.lineno}" for node in ast.walk(tree) if policies_in(node) >= 3]
    assert {place.partition(":")[0] for place in found} == {"suites.py"}
