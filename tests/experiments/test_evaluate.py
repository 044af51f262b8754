"""Evaluations of a tiny random model, against direct use of the library."""

import dataclasses
import gzip
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments import evaluate, tasks
from experiments.common import caches
from experiments.common.caches import Setting
from experiments.common.evaluator import Evaluator
from experiments.common.rows import RowFile, read_rows
from experiments.common.units import encode, make_units
from experiments.tasks.task import Document, Question, Task
from kvjax_models.generation.generator import generate
from tests.experiments.support import request
from tests.kvjax.support import each
from tests.models import tiny

EXACT, SNAPKV = Setting("exact"), Setting("snapkv:window_size=16,compact_every=16", "60%")
TEXT = "".join(f"line {number}: the code is {7 * number}. " for number in range(40))


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm()


def make_task(kind="generate", questions=2, documents=3, **options):
    """Returns documents of slightly different lengths."""
    choices = (" one", " two", " six") if kind == "choose" else ()
    asked = [
        tuple(Question(f"\nWhat is in line {d}{q}?", (str(q),), " It is", choices) for q in range(questions))
        for d in range(documents)
    ]
    made = tuple(Document(TEXT[: 900 + d], of_document, f"d{d}") for d, of_document in enumerate(asked))
    scores = {"score": lambda answer, question: float(len(answer) % 2)} if kind == "generate" else {}
    return Task("made", made, kind, answer_tokens=8, **scores, **options)


def run(llm, task, settings, path, question_seen=False, batch=2, **options):
    with RowFile(path) as rows:
        evaluator = Evaluator(
            llm, "tiny", task, question_seen=question_seen, tokens=1000, seed=0, batch=batch, **options
        )
        evaluator.run(settings, rows)
        return list(rows)


def test_seeds_that_are_too_large_are_refused(llm):
    for seed in (429_496, 2**32 - 1):
        with pytest.raises(ValueError, match=f"seed={seed} must be at most 429495"):
            Evaluator(llm, "tiny", make_task(), question_seen=False, tokens=1000, seed=seed)


def full_prompt(llm, document, question, chat=True):
    """Returns the tokens of a prompt."""
    context, after = encode(llm.tokenizer, document, question, chat)
    return context + after


def full_answers(llm, task):
    """Returns the answers with a full cache to every entire prompt."""
    prompts = [
        full_prompt(llm, document, question, task.chat)
        for document in task.documents
        for question in document.questions
    ]
    rows = []
    for prompt in prompts:
        tokens, _ = generate(llm.model, kvjax.Exact(), [prompt], max_new_tokens=8, eos=llm.tokenizer.eos_ids)
        rows.append(llm.tokenizer.decode(tokens[0]))
    return rows


@pytest.mark.parametrize("questions, batch", each([(1, 2), (2, 2), (2, 1), (3, 2), (2, 8)], quick=[(2, 2), (3, 2)]))
def test_answers_of_the_full_cache_equal_direct_generation(llm, questions, batch, tmp_path):
    task = make_task(questions=questions)
    expected = full_answers(llm, task)
    for seen in (False, True):
        rows = run(llm, task, [EXACT], tmp_path / f"{seen}.jsonl", seen, batch)
        assert [row.answer for row in rows] == expected
        assert [(row.document, row.item) for row in rows] == [(f"d{d}", q) for d in range(3) for q in range(questions)]
        assert {row.question for row in rows} == {"seen" if seen else "unseen"}
        assert all(row.score == len(row.answer) % 2 for row in rows)


def test_a_chat_model_gets_its_template(tmp_path):
    llm = tiny.make_llm(tiny.TEMPLATE)
    document = Document("The text.", (Question(" Who?", (), " It is"),))
    tokens = [llm.tokenizer.decode(part) for part in encode(llm.tokenizer, document, document.questions[0], True)]
    assert tokens == ["[user] The text.", " Who?\n[assistant] It is"]
    tokens = [llm.tokenizer.decode(part) for part in encode(llm.tokenizer, document, document.questions[0], False)]
    assert tokens == ["The text.", " Who? It is"]
    expected = full_answers(llm, make_task())
    assert [row.answer for row in run(llm, make_task(), [EXACT], tmp_path / "r.jsonl")] == expected


def test_answers_and_choices_are_parts_of_the_entire_text(tmp_path):
    """With a tokenizer whose texts without context get a dummy prefix."""
    llm = tiny.make_llm(backend=tiny.make_sentencepiece_backend(), layers=1)
    question = Question("\nWhat is it", ("0",), " It is", (" a", "b c"))
    task = Task("text", (Document("a b c", (question,), "d"),), score=lambda *_: 0.0, answer_tokens=8)
    prompt = llm.tokenizer.encode("a b c\nWhat is it It is")
    assert full_prompt(llm, task.documents[0], question) == prompt
    for number, seen in enumerate((False, True)):
        [row] = run(llm, task, [EXACT], tmp_path / f"{number}.jsonl", seen)
        assert row.answer == "".join(llm.stream("a b c\nWhat is it It is", max_new_tokens=8))
    chooser = Evaluator(
        llm, "tiny", dataclasses.replace(task, kind="choose"), question_seen=False, tokens=99, seed=0, batch=1
    )
    choices = chooser._encode_choices(chooser.units[0], chooser.units[0].items[0])
    assert [prompt + choice for choice in choices] == [
        llm.tokenizer.encode(f"a b c\nWhat is it It is{choice}") for choice in question.choices
    ]


def test_settings_share_a_prefill_and_sizes_are_relative_to_bfloat16(llm, tmp_path):
    rows = run(llm, make_task(), [EXACT, SNAPKV, Setting("exact", kv_dtype="int8")], tmp_path / "rows.jsonl")
    alone = run(llm, make_task(), [SNAPKV], tmp_path / "alone.jsonl", group=1)
    together = [row for row in rows if row.policy == SNAPKV.policy]
    assert [row.answer for row in together] == [row.answer for row in alone]
    by_setting = {row.setting: row for row in rows}
    full, snapkv, int8 = (by_setting[str(one)] for one in (EXACT, SNAPKV, Setting("exact", kv_dtype="int8")))
    assert 1 <= full.cache_fraction < 1.25 and 0.4 < snapkv.cache_fraction <= 0.62
    # Two layers, keys and values of two heads of 16 dimensions in float32.
    assert full.device_bytes == pytest.approx(2 * 2 * 2 * 16 * 4 * full.prompt_tokens, rel=0.3)
    assert 0.5 < int8.cache_fraction / full.cache_fraction < 0.75
    assert snapkv.settings["class"] == "SnapKV" and full.dtype == "float32"


def test_budgets_are_of_a_bfloat16_cache_in_every_dtype(llm):
    spec = kvjax.CacheSpec(batch=1, query_heads=4, kv_heads=2, head_dim=16, max_prompt_tokens=900, max_new_tokens=16)
    budgets = {SNAPKV.fit(dataclasses.replace(spec, dtype=dtype), 900).budget for dtype in (jnp.float32, jnp.bfloat16)}
    assert len(budgets) == 1


def test_an_interrupted_run_continues(llm, tmp_path, monkeypatch):
    task, path = make_task(), tmp_path / "rows.jsonl"
    expected = run(llm, task, [EXACT, SNAPKV], path)
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:40])  # killed while writing
    measured = []
    original = Evaluator._score
    monkeypatch.setattr(Evaluator, "_score", lambda *args: measured.append(args[2]) or original(*args))
    assert sorted(run(llm, task, [EXACT, SNAPKV], path), key=str) == sorted(expected, key=str)
    assert 0 < len(measured) < 6
    measured.clear()
    run(llm, task, [EXACT, SNAPKV], path)
    assert not measured and len(read_rows([path])) == 12
    compressed = path.with_suffix(".jsonl.gz")
    compressed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_rows([compressed]) == read_rows([path])


def test_impossible_settings_are_rows_with_errors_and_run_again(llm, tmp_path):
    setting = Setting("snapkv", "1%")
    for _ in range(2):
        rows = run(llm, make_task(), [EXACT, setting], tmp_path / "rows.jsonl")
        failed = [row for row in rows if row.policy == "snapkv"]
        assert len(failed) == 6 and all(row.score is None and "budget=1%" in row.error for row in failed)
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 18


@pytest.mark.parametrize("seen", each([False, True], quick=[True]))
def test_choices_are_compared_by_mean_log_probability(llm, seen, tmp_path):
    task = make_task("choose")
    rows = run(llm, task, [EXACT], tmp_path / "rows.jsonl", seen)
    for row, document in zip(rows[::2], task.documents, strict=True):
        question = document.questions[0]
        prompt = full_prompt(llm, document, question, True)
        means = []
        for choice in question.choices:
            tokens = llm.tokenizer.encode(choice, add_bos=False)
            logits = llm.model(jnp.asarray([prompt + tokens]))[0]
            log_probs = logits - jnp.log(jnp.sum(jnp.exp(logits), axis=-1, keepdims=True))
            places = np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
            means.append(float(np.mean(np.asarray(log_probs)[places, tokens])))
        assert row.answer == question.choices[int(np.argmax(means))] and row.chance == pytest.approx(1 / 3)
        assert row.score == float(int(np.argmax(means)) == int(question.answers[0]))


def passage_task(kind):
    return Task("text", tuple(Document(TEXT[d:], (), f"d{d}") for d in range(3)), kind, answer_tokens=32, chat=False)


def test_likelihoods_equal_the_model_s(llm, tmp_path):
    for kind, first in (("continue", 1000 - 32 + 1), ("stream", 1)):
        rows = run(llm, passage_task(kind), [EXACT], tmp_path / f"{kind}.jsonl")
        for row, document in zip(rows, passage_task(kind).documents, strict=True):
            ids = llm.tokenizer.encode(document.context)[:1000]
            logits = np.asarray(llm.model(jnp.asarray([ids]))[0], np.float64)
            log_probs = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
            losses = -log_probs[np.arange(first - 1, 999), ids[first:]]
            assert row.score == pytest.approx(losses.mean(), abs=2e-4) and row.metric == "nll"


def test_only_streaming_policies_stream(llm, tmp_path):
    rows = run(llm, passage_task("stream"), [Setting("streaming_llm", "50%"), SNAPKV], tmp_path / "rows.jsonl")
    assert [row.error is None for row in sorted(rows, key=str)] == [False] * 3 + [True] * 3
    assert {row.policy for row in rows if row.error is None} == {"streaming_llm"}


def test_traces_agree_with_the_full_cache_itself(llm, tmp_path):
    task = dataclasses.replace(make_task("trace", questions=1), answer_tokens=40)
    rows = run(llm, task, [EXACT, SNAPKV], tmp_path / "rows.jsonl")
    by_policy = {row.policy: row for row in rows if row.document == "d0"}
    full, snapkv = by_policy["exact"], by_policy[SNAPKV.policy]
    assert full.score == 1 and full.kl == pytest.approx(0, abs=1e-6)
    assert 0 <= snapkv.score <= 1 and snapkv.kl > 1e-4 and snapkv.answer == full.answer
    document = task.documents[0]
    prompt = full_prompt(llm, document, document.questions[0], True)
    tokens, _ = generate(llm.model, kvjax.Exact(), [prompt], max_new_tokens=40, eos=llm.tokenizer.eos_ids)
    assert llm.tokenizer.decode(tokens[0]) == full.answer


def test_units_share_lengths_and_are_filled(llm):
    units = make_units(make_task(questions=1), llm.tokenizer, False, 2, 1000)
    assert [len(unit.prompts) for unit in units] == [2, 2] and [len(unit.items) for unit in units] == [2, 1]
    assert units[1].prompts[0] == units[1].prompts[1]
    (unit,) = make_units(make_task(questions=1), llm.tokenizer, False, 8, 1000)
    assert len(unit.prompts) == 3  # no rows without a document


def test_policies_and_budgets_are_combined():
    settings = caches.parse_settings(("exact", "snapkv", "uniform@64"), ("25%", "50%"), ("none", "int8,int4"))
    assert list(map(str, settings)) == [
        "exact", "exact, int8,int4", "snapkv @ 25%", "snapkv @ 25%, int8,int4", "snapkv @ 50%",
        "snapkv @ 50%, int8,int4", "uniform @ 64", "uniform @ 64, int8,int4",
    ]  # fmt: skip
    assert settings[-1].formats == ("int8", "int4") and settings[0].formats is None


def test_two_runs_cannot_write_to_one_file(tmp_path):
    with RowFile(tmp_path / "rows.jsonl"), pytest.raises(ValueError, match="another process writes to"):
        RowFile(tmp_path / "rows.jsonl")


def test_invalid_rows_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"model": "m"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1 is not a row"):
        read_rows([tmp_path / "rows.jsonl"])


def test_the_command_runs_several_tasks(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "load_model", lambda name, dtype: tiny.make_llm())
    options = evaluate.Options(
        model="tiny", task=["niah_single_1", "niah_single_2:docs"], policy=["exact"], tokens=1100, documents=1,
        question=["seen", "unseen"], seed=[3, 4], output=str(tmp_path / "rows.jsonl"),
    )  # fmt: skip
    evaluate.main(options)
    rows = [json.loads(line) for line in pathlib.Path(options.output).read_text().splitlines()]
    assert len(rows) == 8 and {row["task"] for row in rows} == {"niah_single_1", "niah_single_2:docs"}
    assert {row["seed"] for row in rows} == {3, 4} and all(row["score"] == 0 for row in rows)
    task = tasks.make_task("niah_single_1", request(1100, 1, 3))
    assert rows[0]["document"] == task.documents[0].name == "3-0"
