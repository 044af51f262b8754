"""Runs an experiment's command on a model that is not asked: every answer is the same text. The rest is the command's.

python -m tests.experiments.unanswered MODULE ANSWER FLAGS
"""

import sys

from absl import app

from experiments.common import asking, footprint


def ask(asker, exam):
    use = footprint.CacheUse(100, 0, 50, False, 0.5)
    outcomes = []
    for setting in asker.chosen:
        answers = [ANSWER] * len(exam.prompts)
        scores = {
            metric: [score(number, answer) for number, answer in enumerate(answers)]
            for metric, score in exam.scores.items()
        }
        uses = dict.fromkeys(range(len(answers)), use)
        outcomes.append(
            asking.Outcome(setting, asker.streaming, asker.question_seen, asker.batch, answers, uses, scores)
        )
    return outcomes


if __name__ == "__main__":
    _, module, ANSWER, *flags = sys.argv
    asking.Asker.ask = ask
    experiment = __import__(f"experiments.{module}", fromlist=["main"])
    app.run(experiment.main, argv=[module, *flags])
