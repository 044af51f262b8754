"""The model "kvjax" of lm-evaluation-harness against the harness's own transformers model."""

import dataclasses
import json

import numpy as np
import pytest

from kvjax_models.language_model import load
from kvjax_models.runner.generator import Generator
from tests.models import tiny

lm_eval = pytest.importorskip("lm_eval")
kvjax_lm_eval = pytest.importorskip("kvjax_models.lm_eval")  # registers the model

DIRECTORY = tiny.directory()
NUM_PROBLEMS, NUM_LINES = 6, 24
END = "Now the record is over."
TASKS = {
    "local_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "local_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{prompt}}",
        "metric_list": [{"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A manager of `TASKS` with problems of line retrieval."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = []
    for number in range(NUM_PROBLEMS):
        codes = np.random.default_rng(number).integers(1000, 10_000, NUM_LINES)
        context = "Remember:\n" + "".join(f"line {line}: the code is {code}\n" for line, code in enumerate(codes))
        prompt, answer = f"{context}\n{END} Which code is in line {3 * number}?", str(codes[3 * number])
        choices = [f" {answer}", " 1", " nothing"]
        lines.append({"context": context.strip(), "prompt": prompt, "answer": answer, "choices": choices})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
    for name, task in TASKS.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    manager.lines = lines
    return manager


def evaluate(tasks, model, names=tuple(TASKS), **options):
    """Returns the metrics and the responses of each task."""
    results = lm_eval.simple_evaluate(
        model, options, tasks=list(names), task_manager=tasks, log_samples=True, bootstrap_iters=0
    )
    responses = {name: [sample["resps"] for sample in results["samples"][name]] for name in names}
    return results["results"], responses


def test_exact_equals_the_transformers_model(tasks):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    options = {"batch_size": 4, "dtype": "float32", "device": "cpu"}
    ours, our_responses = evaluate(tasks, "kvjax", path=str(DIRECTORY), **options)
    options["pretrained"] = str(DIRECTORY)
    theirs, their_responses = evaluate(tasks, "hf", names=["local_answers", "local_choices"], **options)
    # Otherwise the harness's model scores its BOS token twice.
    theirs |= evaluate(tasks, "hf", names=["local_text"], add_bos_token=False, **options)[0]
    for name in ours:
        metrics = {key: value for key, value in ours[name].items() if isinstance(value, float)}
        assert metrics and metrics == pytest.approx({key: theirs[name][key] for key in metrics}, rel=1e-4), name
    assert our_responses["local_answers"] == their_responses["local_answers"]
    for responses in zip(our_responses["local_choices"], their_responses["local_choices"], strict=True):
        for (log_prob, is_greedy), (expected, expected_greedy) in zip(
            *([response[0] for response in choices] for choices in responses), strict=True
        ):
            assert float(log_prob) == pytest.approx(float(expected), abs=1e-3) and is_greedy == expected_greedy


@pytest.mark.parametrize(
    ("split", "find_end"),
    [
        ({}, lambda line: len(line["prompt"])),
        ({"split_at": END}, lambda line: line["prompt"].index(END)),
        ({"context_field": "context"}, lambda line: len(line["context"])),
    ],
    ids=["entire", "split_at", "context_field"],
)
def test_options_of_a_question_equal_continuations_of_its_prefix(tasks, split, find_end, monkeypatch):
    prefills = []
    original = Generator.prefill
    monkeypatch.setattr(
        Generator,
        "prefill",
        lambda self, state, prompts, *texts: prefills.append(len(prompts)) or original(self, state, prompts, *texts),
    )
    options = {"path": str(DIRECTORY), "policy": "snapkv", "budget": 400}
    _, responses = evaluate(tasks, "kvjax", names=["local_choices"], **options, **split)
    assert sum(prefills) == NUM_PROBLEMS  # the context of three options is processed once
    monkeypatch.undo()
    llm = load(DIRECTORY)
    for line, choices in zip(tasks.lines, responses["local_choices"], strict=True):
        prompt, end = line["prompt"], find_end(line)
        for choice, [(log_prob, _)] in zip(line["choices"], choices, strict=True):
            context = llm.encode(prompt[:end])
            generator = llm.cache("snapkv", 400).generator(max_prompt_tokens=len(context), max_new_tokens=256)
            question = llm.tokenizer.encode(prompt[end:], add_bos=False)
            continuation = llm.tokenizer.encode(f" {choice}", add_bos=False)  # the harness adds a space
            state = generator.prefill(generator.init_state(), [context])
            _, [log_probs], _ = generator.score(state, [question + continuation])
            assert float(log_prob) == pytest.approx(float(log_probs[len(question) :].sum()), abs=1e-3)


def test_compressed_caches(tasks):
    options = {"path": str(DIRECTORY), "policy": "uniform:recent=16", "budget": "60%", "batch_size": 4}
    metrics, _ = evaluate(tasks, "kvjax", **options, split_at=END)
    assert 0 <= metrics["local_choices"]["acc,none"] <= 1
    assert np.isfinite(metrics["local_text"]["word_perplexity,none"])


def test_apply_chat_template():
    lm = kvjax_lm_eval.KvjaxLM(str(DIRECTORY))
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    bos = lm.tokenizer.backend.id_to_token(lm.prefix_token_id)
    lm.tokenizer = dataclasses.replace(lm.tokenizer, chat_template=template, prefix_ids=(lm.prefix_token_id,))
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}]
    assert lm.apply_chat_template(messages) == f"{bos}<user>Who?<assistant>Ann.<assistant>"
    prefilled = lm.apply_chat_template(messages, add_generation_prompt=False)
    assert prefilled == f"{bos}<user>Who?<assistant>Ann." and lm.chat_template(True) == template
    # The BOS token of a template is not added again.
    assert lm.tok_encode(prefilled).count(lm.prefix_token_id) == 1 == lm.tok_encode("Who?").count(lm.prefix_token_id)
    lm.tokenizer = dataclasses.replace(lm.tokenizer, chat_template=template + "{{ end }}")
    lm.template_options = {"end": "So"}
    assert lm.apply_chat_template(messages, add_generation_prompt=False) == prefilled + "So"


def test_invalid_options_and_requests_are_refused(tasks):
    path = str(DIRECTORY)
    for options, message in (
        ({"batch_size": "auto"}, "batch_size='auto' must be a positive integer"),
        ({"max_length": 9000}, "max_length=9000 must be between"),
        ({"policy": "subgen"}, "policy subgen needs a budget"),
        ({"split_at": "Q:", "context_field": "text"}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax_lm_eval.KvjaxLM(path, **options)
    for split in ({"split_at": "Question:"}, {"context_field": "passage"}):
        with pytest.raises(ValueError, match=r"(split_at='Question:'|context_field='passage') is not in the prompt"):
            evaluate(tasks, "kvjax", names=["local_choices"], path=path, **split)
    with pytest.raises(ValueError, match="generation parameters num_beams are not supported; supported: "):
        kvjax_lm_eval.parse_generation_kwargs({"num_beams": 4}, 16)
    with pytest.raises(ValueError, match="9000 tokens after the prompt must be fewer than max_length"):
        kvjax_lm_eval.KvjaxLM(path)._split_context([1], 9000)
