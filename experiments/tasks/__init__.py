"""Tasks by name: `make_task("niah_single_2", request)`.

A name may have an argument after a colon, such as `longeval_lines:200`.
"""

import dataclasses
import functools
from collections.abc import Callable

from experiments.tasks import (
    facts,
    leval,
    longbench,
    longeval,
    loogle,
    needle,
    passages,
    questions,
    reasoning,
    records,
    ruler,
)
from experiments.tasks.task import Request, Task

Make = Callable[[str, Request], Task]

TASKS: dict[str, Make] = {
    **{name: functools.partial(ruler.make_task, name) for name in ruler.TASKS},
    **{name: functools.partial(questions.make_task, name) for name in questions.TASKS},
    **longeval.TASKS,
    "needle": needle.make_task,
    "facts": facts.make_task,
    **{name: functools.partial(leval.make_task, name) for name in leval.TASKS},
    **{name: functools.partial(loogle.make_task, name) for name in loogle.TASKS},
    **records.TASKS,
    **passages.TASKS,
    **reasoning.TASKS,
    "longbench": functools.partial(longbench.make_task, "longbench"),
    "longbench_e": functools.partial(longbench.make_task, "longbench_e"),
}
RULER = (*ruler.TASKS, "qa_1", "qa_2")


def expand(names: tuple[str, ...]) -> list[str]:
    """Returns the names of tasks, with collections ("ruler", "longbench:chelsea") replaced by their tasks."""
    expanded: list[str] = []
    for name in names:
        expanded += RULER if name == "ruler" else longbench.expand(name)
    return list(dict.fromkeys(expanded))


def make_task(name: str, request: Request) -> Task:
    """Returns a task.

    Args:
        name: a name in `TASKS`, with an argument after a colon where the task takes one.
        request: number of documents, tokens, seed and data directory.

    Returns:
        The task.

    Raises:
        ValueError: if the name is unknown, or no document fits.
        FileNotFoundError: if the task needs a file that is not in the data directory.
    """
    family, _, argument = name.partition(":")
    if family not in TASKS:
        raise ValueError(f"task {name!r} is unknown; known tasks: {', '.join(TASKS)}")
    if argument and family in (*leval.TASKS, *loogle.TASKS):
        raise ValueError(f"{name}: {family} takes no argument")
    try:
        return dataclasses.replace(TASKS[family](argument, request), name=name)
    except ValueError as error:
        raise ValueError(f"task {name}: {error}") from error
