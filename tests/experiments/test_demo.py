"""The demo: its text, and the entire command on a tiny model."""

import re

import numpy as np

from experiments import demo
from experiments.tasks import facts
from tests.models import tiny


def test_the_text_contains_every_fact_once():
    answers, same, other = (demo.make_answers(np.random.default_rng(seed)) for seed in (3, 3, 4))
    text = demo.make_text(answers)
    assert len(set(answers)) == len(demo.FACTS) and same == answers != other
    for (_, sentence, form), answer in zip(demo.FACTS, answers, strict=True):
        assert text.count(f"{sentence} {answer}.") == 1 and len(answer) == len(form)
    places = [text.index(answer) for answer in answers]
    assert places == sorted(places) and np.diff(places).max() < len(text) / 5


def test_answers_are_compared_as_words():
    answers = {"976.": "9765", "tangerine-4471, as": "tangerine-4471", "9765 grams": "9765"}
    assert [facts.is_word(*pair) for pair in answers.items()] == [False, True, True]


def test_the_demo_fits_80_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "DEMO", (demo.DEMO[0], demo.DEMO[2]))
    monkeypatch.setattr(demo, "SHOWN", demo.DEMO[1].name)
    monkeypatch.setattr(demo, "CAPACITY", 192)  # of a tokenizer with a token per character
    monkeypatch.setattr(demo, "make_text", lambda answers: "The record. " * 60)
    monkeypatch.setattr(demo, "load", lambda name: tiny.make_llm(tiny.TEMPLATE))
    demo.main(demo.Options(model="tiny", output_dir=tmp_path))
    shown = capsys.readouterr().out.replace(str(tmp_path), "build")
    assert "full cache: 0 of 12 answers are right" in shown
    assert "auto 25%" in shown and re.search(r" x \w", shown) and "0/12" in shown and "ms/token" in shown
    assert max(len(line) for line in shown.split("\n")) <= demo.WIDTH
    assert (tmp_path / "demo.png").stat().st_size > 3_000
