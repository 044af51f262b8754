"""Runs an experiment's command on a model that is not asked: every answer is the same text. The rest is the command's.

python -m tests.experiments.unanswered MODULE ANSWER FLAGS
"""

import sys

from absl import app

from experiments.common import evaluating, footprint


def evaluate(evaluator, task):
    use = footprint.CacheUse(100, 0, 50, False, 0.5)
    answered = []
    for setting in evaluator.settings:
        answers = [ANSWER] * len(task.prompts)
        scores = {
            metric: [score(number, answer) for number, answer in enumerate(answers)]
            for metric, score in task.scores.items()
        }
        uses = dict.fromkeys(range(len(answers)), use)
        answered.append(
            evaluating.Result(
                setting, evaluator.streaming, evaluator.question_seen, evaluator.batch, answers, uses, scores
            )
        )
    return answered


if __name__ == "__main__":
    _, module, ANSWER, *flags = sys.argv
    evaluating.Evaluator.evaluate = evaluate
    experiment = __import__(f"experiments.{module}", fromlist=["main"])
    app.run(experiment.main, argv=[module, *flags])
