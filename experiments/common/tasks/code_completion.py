"""The next line of code in packages that no model here was trained on, in the roles of LongBench's LCC and RepoBench-P.

- `file` (LCC): a line of a long file, from the file's own lines before it.
- `repository` (RepoBench-P's first use across files): the first line of a file that uses a name which it imports from
  another file of its package, from definitions of other files, that name's among them, and the file's own lines before.

Scored as LongBench scores both. A model that continues text is shown the code alone (`plain`); `longbench` puts the
benchmark's words around it, for models that follow instructions.
"""

import ast
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.common import metrics, sources
from experiments.common.tasks import longbench
from experiments.common.tasks.problem import Problem, longest_that_fits

TASKS = {"file": "lcc", "repository": "repobench-p"}  # with LongBench's names of the roles
TEMPLATES = ("plain", "longbench")
ANSWER_TOKENS = 64

LEAST_LINE = 10  # characters of a line that is worth predicting
LONGEST_SNIPPET = 30  # lines of a definition that are shown
OWN_LINES = 20  # of the file before the line, where the rest of the context is other files'
# A problem of so many tokens is drawn from files with so many times as many characters before the line.
CHARACTERS_PER_TOKEN = 4


Metric = Callable[[str, str], float]  # of a prediction and the right line


class Target(NamedTuple):
    """A line to predict, counted from 0, and the definition in another file that it is the first to use, if it is."""

    file: sources.SourceFile
    line: int
    definition: str | None = None


def generate(
    task: str, template: str, rng: np.random.Generator, token_length: Callable[[str], int], tokens: int
) -> Problem:
    """A problem whose prompt and answer take at most `tokens` tokens, as many as fit.

    Raises:
        ValueError: for an unknown task or template, or where no line makes a problem of that size.
    """
    if task not in TASKS or template not in TEMPLATES:
        raise ValueError(f"{task}, {template}: tasks are {', '.join(TASKS)}, templates {', '.join(TEMPLATES)}")
    targets = file_targets(CHARACTERS_PER_TOKEN * tokens) if task == "file" else repository_targets()
    for number in rng.permutation(len(targets)):
        make = functools.partial(problem, targets[number], template, int(rng.integers(2**63)))
        if token_length(make(1).prompt) + ANSWER_TOKENS <= tokens:
            return longest_that_fits(make, token_length, tokens, most=tokens)
    raise ValueError(f"tokens={tokens}: none of {len(targets)} lines of held-out packages makes a problem of that size")


def problem(target: Target, template: str, seed: int, size: int) -> Problem:
    """A line to predict from so many lines before it in its file, or from its file's last lines and so many definitions
    of other files. The question is what comes last: a line, or the file's own."""
    lines = target.file.text.split("\n")
    header = sources.FILE_HEADER.format(path=target.file.path)
    if target.definition is None:
        context = header + _joined(lines[max(target.line - 1 - size, 0) : target.line - 1])
        own = _joined(lines[target.line - 1 : target.line])
    else:
        rng = np.random.default_rng(seed)
        others = _other_definitions(target)
        # A longer context has the same others and more.
        shown = [others[number] for number in rng.permutation(len(others))[: size - 1]]
        shown.insert(int(rng.random() * (len(shown) + 1)), target.definition)
        context = "".join(shown)
        begin = max(target.line - OWN_LINES, 0)
        own = header + _joined(_imports(target.file, begin) + lines[begin : target.line])
    before, behind = "", ""
    if template == "longbench":
        before, behind = longbench.tasks()[TASKS["file"]].prompt.split("{context}")
    return Problem(before + context, own + behind, (lines[target.line],), ANSWER_TOKENS)


def exact_match(prediction: str, line: str) -> float:
    """Whether the first line of code of a prediction is the right one but for the spaces around it."""
    return float(metrics.first_code_line(prediction).strip() == line.strip())


def _joined(lines: Sequence[str]) -> str:
    return "".join(line + "\n" for line in lines)


# --- lines that are worth predicting ---


@functools.cache
def file_targets(characters: int) -> tuple[Target, ...]:
    """All lines of held-out packages that begin a statement and have so many characters of their file before them."""
    found = []
    for file in sources.documents(held_out=True):
        before = list(itertools.accumulate(len(line) + 1 for line in file.text.split("\n")))
        found += [Target(file, line) for line in _statements(file) if before[line - 1] >= characters]
    return tuple(found)


@functools.cache
def repository_targets() -> tuple[Target, ...]:
    """In each file of the held-out packages, for each function or class that it imports from another file of its
    package, the first line that uses it."""
    found = []
    for package in sources.packages(held_out=True):
        by_path = {file.path: file for file in sources.files(package)}
        for file in by_path.values():
            for node in ast.parse(file.text).body:
                if isinstance(node, ast.ImportFrom) and (origin := _imported_file(file, node, by_path)) is not None:
                    for name in node.names:
                        definition = definitions(origin).get(name.name)
                        line = _first_use(file, name.asname or name.name, node.end_lineno or node.lineno)
                        if definition is not None and line is not None:
                            found.append(Target(file, line, definition))
    return tuple(found)


@functools.cache
def definitions(file: sources.SourceFile) -> Mapping[str, str]:
    """The functions and classes of a file by name: the first lines of each, behind the file's path."""
    lines = file.text.split("\n")
    header = sources.FILE_HEADER.format(path=file.path)
    return {
        node.name: header + _joined(lines[node.lineno - 1 : node.end_lineno][:LONGEST_SNIPPET]) + "\n"
        for node in ast.parse(file.text).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }


def _other_definitions(target: Target) -> list[str]:
    """All definitions of the package's other files but the one that is used."""
    return [
        definition
        for file in sources.files(target.file.path.split("/")[0])
        if file != target.file
        for definition in definitions(file).values()
        if definition != target.definition
    ]


def _imports(file: sources.SourceFile, end: int) -> list[str]:
    """The lines of a file's imports before a line."""
    lines = file.text.split("\n")
    nodes = (node for node in ast.parse(file.text).body if isinstance(node, ast.Import | ast.ImportFrom))
    return [line for node in nodes for line in lines[node.lineno - 1 : min(node.end_lineno or node.lineno, end)]]


@functools.cache
def _statements(file: sources.SourceFile) -> tuple[int, ...]:
    """The lines, from 0, that begin a statement (a text is none), are long enough, and hold nothing that the scorer
    takes for a comment."""
    lines = file.text.split("\n")
    begins = {
        node.lineno - 1
        for node in ast.walk(ast.parse(file.text))
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }
    return tuple(
        line
        for line in sorted(begins)
        if len(lines[line].strip()) >= LEAST_LINE and metrics.first_code_line(lines[line]) and line > 0
    )


def _imported_file(
    file: sources.SourceFile, node: ast.ImportFrom, by_path: Mapping[str, sources.SourceFile]
) -> sources.SourceFile | None:
    """The file of the package that a statement imports from, if it does."""
    folder = file.path.split("/")[: -node.level] if node.level else []
    module = "/".join([*folder, *(node.module.split(".") if node.module else [])])
    return by_path.get(f"{module}.py") or by_path.get(f"{module}/__init__.py")


def _first_use(file: sources.SourceFile, name: str, behind: int) -> int | None:
    """The first line, from 0, behind so many that begins a statement and uses a name."""
    lines = file.text.split("\n")
    used = re.compile(rf"\b{re.escape(name)}\b")
    return next((line for line in _statements(file) if line >= behind and used.search(lines[line])), None)
