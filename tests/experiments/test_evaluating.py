"""Answers of a small random model: every answer is scored with its prompt."""

import json

import numpy as np
import pytest
from flax import nnx

from experiments.common import answers, evaluating, footprint, settings
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama

CONFIG = LlamaConfig(
    vocab_size=64, width=32, mlp_width=64, layers=1, query_heads=2, kv_heads=1, head_dim=16, max_length=512
)


class Numbers:
    """A tokenizer whose tokens are read as numbers."""

    eos_ids = ()

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


def task(*lengths):
    rng = np.random.default_rng(0)
    prompts = [evaluating.Prompt(rng.integers(0, 64, n).tolist(), rng.integers(0, 64, 3).tolist()) for n in lengths]
    scores = {"number": lambda number, answer: number / 10, "words": lambda number, answer: len(answer.split()) / 10}
    return evaluating.Task("task", prompts, scores, answer_tokens=5)


def evaluator(model, names, sizes, **others):
    made = {"max_new_tokens": 8, "streaming": False, "question_seen": False, "batch": 2, "seed": 0} | others
    return evaluating.Evaluator(model, Numbers(), settings.settings(names, ["60%"]), sizes=sizes, **made)


def test_answers_and_scores_have_the_order_of_prompts_for_all_sizes(model):
    asked = task(90, 20, 100, 30, 25)
    [one_size], [two_sizes] = (evaluator(model, ["exact"], sizes).evaluate(asked) for sizes in ([100], [40, 128]))
    assert one_size.answers == two_sizes.answers and len(set(one_size.answers)) > 1
    for result in (one_size, two_sizes):
        assert result.scores == {"number": [0, 0.1, 0.2, 0.3, 0.4], "words": [0.5] * 5}
    held = [two_sizes.uses[number].device_bytes for number in range(5)]
    assert held[0] == held[2] > held[1] == held[3] == held[4]
    parts = answers.part([two_sizes], [1, 4])
    assert parts[0].answers == [two_sizes.answers[1], two_sizes.answers[4]]
    kept = json.loads(json.dumps(two_sizes.to_json()))
    assert answers.Result.from_json(kept, two_sizes.setting, False, False, 2) == two_sizes
    assert parts[0].scores["number"] == [0.1, 0.4] and parts[0].uses[1] == two_sizes.uses[4]


def test_a_seen_question_is_part_of_the_text(model):
    asked = task(20, 30)
    assert evaluating.room([asked], question_seen=False) == (30, 8)
    assert evaluating.room([asked], question_seen=True) == (33, 5)
    [unseen] = evaluator(model, ["exact"], [33]).evaluate(asked)
    [seen] = evaluator(model, ["exact"], [33], question_seen=True).evaluate(asked)
    assert unseen.answers == seen.answers  # no compression
    with pytest.raises(ValueError, match="task: texts of up to 33 tokens and 5 behind them do not fit in 30 and 8"):
        evaluator(model, ["exact"], [30], question_seen=True).evaluate(asked)


def test_invalid_settings_are_left_out_with_a_reason(model):
    made = evaluator(model, ["exact", "uniform", "snapkv"], [40], streaming=True)
    assert [settings.label(setting) for setting in made.settings] == ["exact"]
    reasons = {settings.label(setting): reason for setting, reason in made.refused.items()}
    assert "too small" in reasons["uniform @ 60%"] or "budget" in reasons["uniform @ 60%"]
    assert set(reasons) == {"uniform @ 60%", "snapkv @ 60%"}
    assert evaluator(model, ["snapkv"], [40], streaming=True).evaluate(task(20)) == []


def result(name, scores, recalls=False):
    [setting] = settings.settings([name], ["25%"])
    uses = dict.fromkeys(range(len(scores)), footprint.CacheUse(100, 0, 50, recalls, 0.25))
    return answers.Result(setting, False, False, 2, ["a"] * len(scores), uses, {"accuracy": scores})


def test_rows_pair_every_setting_with_exact(model):
    answered = [result("exact", [1.0, 1.0, 0.0, 1.0]), result("quest", [1.0, 0.0, 0.0, 1.0], recalls=True)]
    same = {"experiment": "e", "model_name": "m", "task": "t", "context_tokens": 9, "seed": 3}
    rows = answers.rows(answered, model, **same, depth=0.5)
    assert [(row.policy, row.metric) for row in rows] == [
        ("exact", "accuracy"),
        ("quest", "accuracy"),
        ("quest", "accuracy_difference"),
    ]
    difference = rows[-1]
    assert difference.value == -0.25 and -1 < difference.ci95_low < -0.25 < difference.ci95_high < 1
    assert (difference.budget_fraction, difference.device_bytes, difference.read_bytes_per_token) == (0.25, 100, 50)
    assert difference.extra == {"budget": "25%", "prefill": "exact", "recalls": True, "depth": 0.5}
    assert rows[1].extra["first_answer"] == "a" and rows[1].n == 4
    assert [row.metric for row in answers.rows(answered[1:], model, **same)] == ["accuracy"]
