"""The demo: its text, and the entire command on the small checkpoint of the repository."""

import numpy as np

from experiments import demo
from experiments.common import settings
from experiments.common.options import LANGUAGE_CHECKPOINT


def test_the_text_contains_every_fact_once():
    answers = demo.make_answers(seed=3)
    text = demo.make_text(answers)
    assert len(set(answers)) == len(demo.FACTS) and demo.make_answers(seed=3) == answers != demo.make_answers(seed=4)
    for (_, sentence, form), answer in zip(demo.FACTS, answers, strict=True):
        assert text.count(f"{sentence} {answer}.") == 1 and len(answer) == len(form)
    places = [text.index(answer) for answer in answers]
    assert places == sorted(places) and np.diff(places).max() < len(text) / 5


def test_answers_are_compared_as_words():
    outcome = demo.Outcome(demo.DEMO[0], ["976.", "tangerine-4471, as", "9765 grams"])
    assert outcome.right(["9765", "tangerine-4471", "9765"]) == [False, True, True]


def test_the_demo_answers_and_draws(tmp_path, monkeypatch, capsys):
    """A short text, and a model without a chat template, to which a plain one is given."""
    monkeypatch.setattr(demo, "DEMO", demo.DEMO[:2])
    monkeypatch.setattr(demo, "make_text", lambda answers: "The record. " * 30)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    load = demo.load

    def load_with_template(name):
        llm = load(name)
        tokenizer = demo.dataclasses.replace(llm.tokenizer, chat_template=template)
        return demo.dataclasses.replace(llm, tokenizer=tokenizer)

    monkeypatch.setattr(demo, "load", load_with_template)
    demo.main(demo.Demo(model=str(settings.model_directory(LANGUAGE_CHECKPOINT)), output_dir=str(tmp_path)))
    shown = capsys.readouterr().out
    assert "full cache" in shown and "KVzip, int8" in shown and "of 12" in shown
    assert (tmp_path / "demo.png").stat().st_size > 3_000
