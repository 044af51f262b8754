"""The harness's model: its own transformers model on the same checkpoint, tasks and prompts says the same."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from experiments.common.tasks import line_retrieval
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("torch")
pytest.importorskip("transformers")

DIRECTORY = pathlib.Path(__file__).parents[2] / "models" / "checkpoints" / "kvjax-lm-2k"
COUNT = 6
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
    """A manager of three tasks about registers, in a folder of their own."""
    folder = tmp_path_factory.mktemp("tasks")
    tokenizer = load_tokenizer(DIRECTORY)

    def length(text):
        return len(tokenizer.encode(text))

    lines = []
    for number in range(COUNT):
        document = line_retrieval.generate_for_tokens(np.random.default_rng(number), length, 380)
        choices = [f" {document.answer}", f" {document.answer + 1}", " nothing"]
        prompt = document.context + document.question
        lines.append({"prompt": prompt, "answer": str(document.answer), "choices": choices})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
    for name, task in TASKS.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, "test_split": "test", **data, **task}))
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(tasks, model, **given):
    """Metrics by task, and what was answered to every request."""
    names = list(TASKS)
    found = lm_eval.simple_evaluate(model, given, tasks=names, task_manager=tasks, log_samples=True, bootstrap_iters=0)
    answers = {name: [sample["resps"] for sample in found["samples"][name]] for name in names}
    return found["results"], answers


def test_exact_says_what_the_harness_s_transformers_model_says(tasks):
    from kvjax_models import lm_eval as _registers  # noqa: F401

    alike = {"batch_size": 4, "dtype": "float32", "device": "cpu"}
    ours, our_answers = evaluated(tasks, "kvjax", path=str(DIRECTORY), **alike)
    theirs, their_answers = evaluated(tasks, "hf", pretrained=str(DIRECTORY), **alike)
    for name in ours:
        metrics = {key: value for key, value in ours[name].items() if isinstance(value, float)}
        assert metrics and metrics == pytest.approx({key: theirs[name][key] for key in metrics}, rel=1e-4), name
    assert our_answers["local_answers"] == their_answers["local_answers"]
    for one, other in zip(our_answers["local_choices"], their_answers["local_choices"], strict=True):
        for (mine, is_greedy), (likelihood, was_greedy) in zip((r[0] for r in one), (r[0] for r in other), strict=True):
            assert float(mine) == pytest.approx(float(likelihood), abs=1e-3) and is_greedy == was_greedy
    assert ours["local_choices"]["acc,none"] >= 0.8


@pytest.mark.parametrize("more", [{}, {"split_at": "Question"}], ids=["seen", "apart"])
def test_compressed_caches_answer(tasks, more):
    from kvjax_models import lm_eval as _registers  # noqa: F401

    given = {"path": str(DIRECTORY), "policy": "uniform:recent=16", "budget": "60%", "batch_size": 4}
    found, _ = evaluated(tasks, "kvjax", **given, **more)
    assert 0 <= found["local_choices"]["acc,none"] <= 1 and np.isfinite(found["local_text"]["word_perplexity,none"])


def test_conversations_go_through_the_checkpoint_s_template():
    from kvjax_models.lm_eval import KvjaxLM

    lm = KvjaxLM(str(DIRECTORY))
    template = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>{% endif %}"
    bos = lm.tokenizer.backend.id_to_token(lm.prefix_token_id)
    lm.tokenizer = dataclasses.replace(lm.tokenizer, chat_template=template, prefix=(lm.prefix_token_id,))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Ann."}]
    assert lm.apply_chat_template(turns) == f"{bos}<user>Who?<assistant>Ann.<assistant>"
    prefilled = lm.apply_chat_template(turns, add_generation_prompt=False)
    assert prefilled == f"{bos}<user>Who?<assistant>Ann." and lm.chat_template(True) == template
    # What the template puts first is not put there again.
    assert lm.tok_encode(prefilled).count(lm.prefix_token_id) == 1 == lm.tok_encode("Who?").count(lm.prefix_token_id)


def test_what_it_cannot_do_is_named():
    from kvjax_models.lm_eval import KvjaxLM, asked_for

    for given, message in (
        ({"batch_size": "auto"}, "batch_size='auto'; it must be a number of rows"),
        ({"max_length": 5000}, "max_length=5000; it must lie in"),
        ({"policy": "subgen"}, "policy subgen needs a budget"),
    ):
        with pytest.raises(ValueError, match=message):
            KvjaxLM(str(DIRECTORY), **given)
    with pytest.raises(ValueError, match="a request asks for num_beams; known: "):
        asked_for({"num_beams": 4}, 16)
    with pytest.raises(ValueError, match="3000 tokens leave no room"):
        KvjaxLM(str(DIRECTORY))._shortened([1], 3000)
