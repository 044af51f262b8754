"""Evaluations of a tiny random model, against the same questions through the public interface."""

import dataclasses
import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from experiments import evaluate, tasks
from experiments.common import caches, evaluator
from experiments.common.caches import Setting
from experiments.common.evaluator import Evaluator
from experiments.common.rows import RowFile, read_rows
from experiments.common.units import encode, make_units
from experiments.tasks.task import Document, Question, Task
from kvjax_models.model.llama import Llama
from tests.experiments.support import request
from tests.kvjax.support import each
from tests.models import tiny
from tests.models.loops import generate

EXACT, SNAPKV = Setting("exact"), Setting("snapkv:window_size=16,compact_every=16", "60%")
CHELSEA = Setting("chelsea:compact_every=16", "60%")
TEXT = "".join(f"line {number}: the code is {7 * number}. " for number in range(40))


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm()


def narrow_llm(template=None):
    """Returns a bfloat16 model, whose caches have the dtype of budgets, with answers that depend on the cache."""
    graph, parameters = nnx.split(Llama(tiny.make_config(), dtype=jnp.bfloat16, rngs=nnx.Rngs(2)))
    model = nnx.merge(graph, jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, parameters))
    return dataclasses.replace(tiny.make_llm(template), model=model)


def make_task(kind="generate", questions=2, documents=3, **options):
    """Returns documents of slightly different lengths."""
    choices = (" one", " two", " six") if kind == "choose" else ()
    asked = [
        tuple(Question(f"\nWhat is in line {d}{q}?", (str(q),), " It is", choices) for q in range(questions))
        for d in range(documents)
    ]
    made = tuple(Document(TEXT[: 900 + d], of_document, f"d{d}") for d, of_document in enumerate(asked))
    scores = {"score": lambda answer, question: float(len(answer) % 2)} if kind == "generate" else {}
    return Task(made, kind, answer_tokens=8, name="made", **scores, **options)


def run(llm, task, settings, path, question_seen=False, **options):
    with RowFile(path) as rows:
        Evaluator(llm, "tiny", task, question_seen=question_seen, tokens=1000, seed=0, **options).run(settings, rows)
        return list(rows)


@pytest.mark.parametrize("tokens", [1, 0, -4])
def test_a_passage_needs_two_measured_tokens(llm, tokens):
    task = dataclasses.replace(make_task("continue"), answer_tokens=tokens)
    with pytest.raises(ValueError, match=f"made measures {tokens} tokens, but needs two"):
        make_units(task, llm.tokenizer, False, 500)
    [unit, *_] = make_units(dataclasses.replace(task, answer_tokens=2), llm.tokenizer, False, 500)
    assert len(unit.text) == 498 and len(unit.items[0].tokens) == 2


def test_seeds_that_are_too_large_are_refused(llm):
    for seed in (429_496, 2**32 - 1):
        with pytest.raises(ValueError, match=f"seed={seed} must be at most 429495"):
            Evaluator(llm, "tiny", make_task(), question_seen=False, tokens=1000, seed=seed)


def full_prompt(llm, document, question, chat=True):
    """Returns the tokens of a prompt."""
    context, after = encode(llm.tokenizer, document, chat)
    return context + after[document.questions.index(question)]


def test_a_chat_model_gets_its_template():
    llm = tiny.make_llm(tiny.TEMPLATE)
    document = Document("The text.", (Question(" Who?", (), " It is"),))
    for chat, expected in (
        (True, ["[user] The text.", " Who?\n[assistant] It is"]),
        (False, ["The text.", " Who? It is"]),
    ):
        context, [question] = encode(llm.tokenizer, document, chat)
        assert [llm.tokenizer.decode(context), llm.tokenizer.decode(question)] == expected


def test_answers_and_choices_are_parts_of_the_entire_text(tmp_path):
    """With a tokenizer whose texts without context get a dummy prefix."""
    llm = tiny.make_llm(backend=tiny.make_sentencepiece_backend(), layers=1)
    question = Question("\nWhat is it", ("0",), " It is", (" a", "b c"))
    task = Task((Document("a b c", (question,), "d"),), score=lambda *_: 0.0, answer_tokens=8)
    prompt = llm.tokenizer.encode("a b c\nWhat is it It is")
    assert full_prompt(llm, task.documents[0], question) == prompt
    for number, seen in enumerate((False, True)):
        [row] = run(llm, task, [EXACT], tmp_path / f"{number}.jsonl", seen)
        assert row.answer == llm.generate("a b c\nWhat is it It is", max_new_tokens=8)
    [unit] = make_units(dataclasses.replace(task, kind="choose"), llm.tokenizer, False, 99)
    assert [prompt + choice for choice in unit.items[0].choices] == [
        llm.tokenizer.encode(f"a b c\nWhat is it It is{choice}") for choice in question.choices
    ]


def test_settings_share_a_prefill_and_sizes_are_relative_to_bfloat16(llm, tmp_path):
    rows = run(llm, make_task(), [EXACT, SNAPKV, Setting("exact", kv_dtype="int8")], tmp_path / "rows.jsonl")
    # Alone, and one of two questions at a time.
    alone = run(llm, make_task(), [SNAPKV], tmp_path / "alone.jsonl", group=1, batch=1)
    together = [row for row in rows if row.policy == SNAPKV.policy]
    assert [row.answer for row in together] == [row.answer for row in alone]
    by_setting = {row.setting: row for row in rows}
    full, snapkv, int8 = (by_setting[str(one)] for one in (EXACT, SNAPKV, Setting("exact", kv_dtype="int8")))
    assert 1 <= full.cache_fraction < 1.25 and 0.5 < snapkv.cache_fraction <= 0.6
    assert 0.03 < full.tail_fraction < 0.4 and int8.tail_fraction < full.tail_fraction
    # Two layers, keys and values of two heads of 16 dimensions in float32.
    assert full.device_bytes == pytest.approx(2 * 2 * 2 * 16 * 4 * full.prompt_tokens, rel=0.3)
    assert 0.5 < int8.cache_fraction / full.cache_fraction < 0.75
    assert snapkv.settings["class"] == "SnapKV" and full.dtype == "float32"


def test_settings_that_share_a_prefill_fit_into_memory(llm, tmp_path, monkeypatch):
    groups = []
    monkeypatch.setattr(evaluator.Evaluator, "_measure", lambda _, unit, group, rows: groups.append(list(group)))
    asked = Evaluator(llm, "tiny", make_task(), question_seen=False, tokens=1000, seed=0)
    held = asked._sizes(asked.units[0], SNAPKV)[1].row_bytes
    settings = [dataclasses.replace(SNAPKV, policy=f"snapkv:window_size={size}") for size in (8, 9, 10, 11, 12)]
    for memory, group, sizes in ((9 * held, None, [2, 2, 1]), (0, None, [1] * 5), (0, 3, [3, 2])):
        monkeypatch.setattr(evaluator, "memory_bytes", lambda memory=memory: memory)
        run(llm, make_task(documents=1), settings, tmp_path / f"{memory}{group}", group=group)
        assert [len(one) for one in groups] == sizes and [one for group_of in groups for one in group_of] == settings
        groups.clear()
    with pytest.raises(ValueError, match="group=0"):
        run(llm, make_task(), settings, tmp_path / "rows.jsonl", group=0)


def test_budgets_are_of_a_bfloat16_cache_in_every_dtype(llm):
    narrow = narrow_llm()
    generators = [SNAPKV.cache(one).document_generator(900, 64) for one in (llm, narrow)]
    assert generators[0].policies == generators[1].policies
    # The public interface counts the dtype that a cache has.
    assert llm.cache(SNAPKV.policy, SNAPKV.budget).document_generator(900, 64).policies != generators[0].policies


@pytest.mark.parametrize("kv_dtype", each([None, "int8"], quick=["int8"]))
def test_rows_equal_the_public_interface(kv_dtype, tmp_path):
    llm = narrow_llm(tiny.TEMPLATE)
    settings = [dataclasses.replace(one, kv_dtype=kv_dtype) for one in (EXACT, SNAPKV, CHELSEA)]
    task = make_task(questions=3, documents=2)
    rows = {seen: run(llm, task, settings, tmp_path / f"{seen}", seen) for seen in (False, True)}
    assert all(row.question == ("seen" if seen else "unseen") for seen in rows for row in rows[seen])
    for setting in settings:
        cache = llm.cache(setting.policy, setting.budget, kv_dtype=kv_dtype)
        for number, one in enumerate(task.documents):
            document = cache.read(one.context, seed=number)
            asked = document.ask([q.text for q in one.questions], separator="", answer_start="It is", max_new_tokens=8)
            prompts = [[{"role": "user", "content": one.context + q.text}] for q in one.questions]
            told = [
                cache.generate([*prompt, {"role": "assistant", "content": "It is"}], max_new_tokens=8,
                               seed=3 * number + i, template_options={"continue_final_message": True})
                for i, prompt in enumerate(prompts)
            ]  # fmt: skip
            for seen, answers in ((False, asked), (True, told)):
                of_document = [row for row in rows[seen] if (row.setting, row.document) == (str(setting), one.name)]
                assert [(row.item, row.answer) for row in of_document] == list(enumerate(answers))
                assert all(row.score == len(row.answer) % 2 for row in of_document)
            [row, *_] = [row for row in rows[False] if (row.setting, row.document) == (str(setting), one.name)]
            assert row.device_bytes == document.cache_bytes
            assert row.cache_fraction == pytest.approx(document.cache_bytes / document.full_cache_bytes)


def test_prompts_with_their_questions_are_answered_together(llm, tmp_path, monkeypatch):
    together, original = [], Evaluator._answer

    def record(self, setting, prompts, rows):
        together.append(len(prompts))
        original(self, setting, prompts, rows)

    monkeypatch.setattr(Evaluator, "_answer", record)
    answers = []
    for number, (memory, batch, sizes) in enumerate(((2**40, 4, [4, 4, 2, 2]), (0, 4, [1] * 12), (2**40, 1, [1] * 12))):
        monkeypatch.setattr(evaluator, "memory_bytes", lambda memory=memory: memory)
        rows = run(llm, make_task(), [EXACT, SNAPKV], tmp_path / f"{number}.jsonl", True, batch=batch)
        answers.append({row.key: (row.answer, row.answer_tokens, row.score) for row in rows})
        assert together == sizes
        together.clear()
    assert answers[0] == answers[1] == answers[2] and len(answers[0]) == 12
    assert all(0 < tokens <= 8 for _, tokens, _ in answers[0].values())


def test_a_prompt_that_fails_does_not_end_the_others(llm, tmp_path, monkeypatch):
    expected = run(llm, make_task(), [EXACT], tmp_path / "all.jsonl", True)
    original, added = evaluator.Engine.add, []

    def add(self, *args, **options):
        added.append(args)
        if len(added) == 2:
            raise ValueError("too long")
        return original(self, *args, **options)

    monkeypatch.setattr(evaluator.Engine, "add", add)
    rows = run(llm, make_task(), [EXACT], tmp_path / "rows.jsonl", True)
    failed = [row for row in rows if row.error is not None]
    assert [(row.error, row.score) for row in failed] == [("too long", None)] and len(rows) == 6
    answers = {row.key: row.answer for row in rows if row.error is None}
    assert answers == {row.key: row.answer for row in expected if row.key != failed[0].key}


def test_an_interrupted_run_continues(llm, tmp_path, monkeypatch):
    task, path = make_task(), tmp_path / "rows.jsonl"
    expected = run(llm, task, [EXACT, SNAPKV], path)
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:40])  # killed while writing
    measured = []
    original = Evaluator._ask
    monkeypatch.setattr(Evaluator, "_ask", lambda *args: measured.append(args[2]) or original(*args))
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
    return Task(
        tuple(Document(TEXT[d:], (), f"d{d}") for d in range(3)), kind, answer_tokens=32, chat=False, name="text"
    )


def test_likelihoods_equal_the_model_s(llm, tmp_path):
    for kind, seen in (("continue", False), ("continue", True), ("stream", False)):
        first = 1 if kind == "stream" else 1000 - 32 + 1
        rows = run(llm, passage_task(kind), [EXACT], tmp_path / f"{kind}_{seen}.jsonl", seen)
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
    prompt = full_prompt(llm, task.documents[0], task.documents[0].questions[0])
    tokens, _ = generate(llm.model, kvjax.Exact(), [prompt], max_new_tokens=40, eos=llm.tokenizer.eos_ids)
    assert llm.tokenizer.decode(tokens[0]) == full.answer


def test_policies_budgets_and_formats_are_combined():
    settings = caches.parse_settings(
        ("exact", "snapkv", "uniform@64slots"), ("25%", "410 slots"), ("none", "int4,int2")
    )
    assert list(map(str, settings[::2])) == ["exact", "snapkv @ 25%", "snapkv @ 410", "uniform @ 64"]
    assert list(map(str, settings[1::2])) == [f"{one}, int4,int2" for one in settings[::2]]
    assert settings[-1].formats == ("int4", "int2") and settings[0].formats is None
    assert (settings[-1].budget, settings[-1].label) == ("64 slots", "64")  # rows have slots without a unit
    own_formats = caches.parse_settings(("exact+int4", "uniform@64slots+none", "exact"), ("25%",), ("int8",))
    assert list(map(str, own_formats)) == ["exact, int4", "uniform @ 64", "exact, int8"]
    with pytest.raises(ValueError, match="kv_dtype='in4' is not a quantization format"):
        caches.parse_settings(("exact+in4",), ("25%",))
    for policies, budgets in ((("uniform@64",), ("25%",)), (("snapkv",), ("410",))):
        with pytest.raises(ValueError, match="has no unit; pass"):
            caches.parse_settings(policies, budgets)


def test_invalid_rows_and_a_second_writer_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    with RowFile(path), pytest.raises(ValueError, match="another process writes to"):
        RowFile(path)
    path.write_text('{"model": "m"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 1 is not a row"):
        read_rows([path])


@pytest.mark.heavy
def test_the_command_runs_several_tasks(monkeypatch, tmp_path):
    monkeypatch.setattr(evaluate, "load_model", lambda name, dtype: tiny.make_llm())
    options = evaluate.Options(
        model="tiny", task=["niah_single_1", "niah_single_2:docs"], policy=["exact"], tokens=1100, documents=1,
        question=["seen", "unseen"], seed=[3, 4], output=tmp_path / "rows.jsonl",
    )  # fmt: skip
    evaluate.main(options)
    rows = [json.loads(line) for line in pathlib.Path(options.output).read_text().splitlines()]
    assert len(rows) == 8 and {row["task"] for row in rows} == {"niah_single_1", "niah_single_2:docs"}
    assert {row["seed"] for row in rows} == {3, 4} and all(row["score"] == 0 for row in rows)
    task = tasks.make_task("niah_single_1", request(1100, 1, 3))
    assert rows[0]["document"] == task.documents[0].name == "3-0"
