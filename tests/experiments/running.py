"""Runs small experiments in this process."""

import subprocess
import sys

from experiments.common import ROOT, answers, footprint


def command(*arguments):
    """Runs a module as a command in another process."""
    words = [sys.executable, "-m", *map(str, arguments)]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def run(module, directory, *, quick=True, **given):
    """Returns the rows of an experiment as in its JSON file."""
    options = module.EXPERIMENT.options
    options = (options.small if quick else options)(output_dir=str(directory), **given)
    return [row.flat() for row in module.EXPERIMENT.write(options)]


def select(rows, **wanted):
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def answering(answer):
    """Returns a replacement of `Evaluator.evaluate` that gives this answer to every question."""

    def evaluate(evaluator, task):
        use = footprint.CacheUse(100, 0, 50, False, 0.5)
        given = [answer] * len(task.prompts)
        scores = {
            metric: [score(number, one) for number, one in enumerate(given)] for metric, score in task.scores.items()
        }
        uses = dict.fromkeys(range(len(given)), use)
        kind = (evaluator.streaming, evaluator.question_seen, evaluator.batch)
        return [answers.Result(setting, *kind, given, uses, scores) for setting in evaluator.settings]

    return evaluate
