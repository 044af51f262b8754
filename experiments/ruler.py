"""RULER's synthetic tasks through compressed caches: needles, variables, common and frequent words.

    python -m experiments.ruler --model DIRECTORY --policy exact --policy clusterkv --budget 25% --context_tokens 4096

Tasks that need no downloaded data, as published; essays are replaced by local prose (see `tasks.ruler`). A cache is
compressed before the question is seen unless `--question=seen` says otherwise. A run that was stopped goes on where it
was: finished tasks stand in OUTPUT_DIR/ruler.jsonl.
"""

import functools
from collections.abc import Sequence

from absl import app, flags

from experiments.common import evaluating, results, settings, sweeping
from experiments.common.named_tasks import make_task
from experiments.common.tasks import ruler as task

NAME = "ruler"
QUICK_TASKS = ("niah_single_1", "niah_single_2")

sweeping.define_flags(documents=50, batch=10)
flags.DEFINE_multi_enum("task", list(task.TASKS), list(task.TASKS), "Tasks; repeatable.")
flags.DEFINE_multi_integer("context_tokens", [2048], "Most tokens of prompt and answer; repeatable.")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {argv[1:]}")
    count = settings.value("documents", quick=4)
    names = settings.value("task", quick=QUICK_TASKS)
    sweep = sweeping.Sweep(NAME, count)
    rows: list[results.Row] = []
    for tokens in settings.value("context_tokens", quick=[1024]):
        make = functools.cache(functools.partial(make_tasks, sweep, names, tokens))
        for prefill, question in sweep.kinds():
            answered = sweep.evaluate_all(names, make, prefill, question, context_tokens=tokens)
            found = [row for name in names for row in sweep.rows(answered[name], name, tokens)]
            title = f"RULER: {count} problems of up to {tokens} tokens, prefill {prefill}, question {question}"
            sweeping.show(title, found)
            rows += found
    sweep.write(rows, sweeping.plot)


def make_tasks(sweep: sweeping.Sweep, names: Sequence[str], tokens: int) -> dict[str, evaluating.Task]:
    """Fresh problems of every task at one length."""
    return {name: make_task(name, sweep.tokenizer, tokens, [sweep.seed], sweep.documents) for name in names}


if __name__ == "__main__":
    app.run(main)
