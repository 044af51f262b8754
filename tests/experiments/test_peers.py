"""The comparison with kvpress: requests to its presses, and live runs with kvpress."""

import dataclasses
import stat
import sys

import numpy as np
import pytest

from experiments import evaluate, peers, tasks
from experiments.common import presses
from experiments.common.rows import read_rows
from experiments.common.transformers_decode import TransformersWriter
from kvjax_models.formats import load_config, load_model, load_tokenizer
from tests.experiments.support import request
from tests.models import tiny
from tests.models.gguf_files import write_gguf
from tests.models.support import GOLDEN, assert_equal_parameters

# Replaces the interpreter with kvpress: SnapKV is always wrong, KVzip is always right, others fail.
STUB = f"""#!{sys.executable}
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    reply = {{"kept": request["kept"], "held": len(request["text"])}}
    answer = {{"SnapKV": " none", "KVzip": " 1234567890"}}.get(request["press"])
    answers = answer and [answer] * len(request["questions"])
    print(json.dumps(reply | {{"answers": answers}} if answers else {{"error": "ValueError: no"}}), flush=True)
"""


@pytest.fixture
def stub(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "load_model", lambda name, dtype: tiny.make_llm())
    path = tmp_path / "python"
    path.write_text(STUB)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_presses_have_rows_like_policies(stub, tmp_path):
    options = {"model": str(tiny.directory()), "task": ("niah_single_1",), "tokens": 1100, "documents": 2}
    options |= {"question": ("unseen", "seen"), "press": ("KVzip", "SnapKV", "Knorm")}
    options |= {"budget": ("70%", "70% of the prompt", "5%"), "kvpress_python": str(stub)}
    options["output"] = tmp_path / "peers.jsonl"
    peers.main(peers.Options(**options))
    rows = read_rows([tmp_path / "peers.jsonl"])
    assert len(rows) == 3 * 3 * 2 * 2
    for row in rows:
        failed = row.policy == "kvpress Knorm" or row.budget == "5%"
        assert (row.score is None) == failed == (row.error is not None)
        if row.budget == "70%" and not failed:
            assert 0.69 < row.cache_fraction <= 0.7
    assert {row.error for row in rows if row.policy == "kvpress Knorm" and row.budget == "70%"} == {"ValueError: no"}
    seen, unseen = (next(r for r in rows if r.question == kind and r.budget == "70%") for kind in ("seen", "unseen"))
    assert seen.prompt_tokens > unseen.prompt_tokens
    # A second run starts no process.
    stub.write_text("#!/bin/false\n")
    rows_without_errors = [row for row in rows if row.error is None]
    peers.main(peers.Options(**options | {"press": ("KVzip", "SnapKV"), "budget": ("70%",)}))
    assert [row for row in read_rows([tmp_path / "peers.jsonl"]) if row.error is None] == rows_without_errors


def test_budgets_are_percentages_of_all_tokens_or_of_the_prompt():
    assert peers.kept_tokens("25%", 900, 100) == 150 and peers.kept_tokens("25% of the prompt", 900, 100) == 225
    assert peers.kept_tokens("5%", 900, 100) == -50
    with pytest.raises(ValueError, match="budget=512 slots must be a percentage"):
        peers.kept_tokens("512 slots", 900, 100)


def test_a_process_that_ended_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match="/bin/false .* ended; its Python must have torch and kvpress"):
        presses.Presses("/bin/false", tmp_path, "float32").answer(press="KVzip")


def test_every_press_is_compared_or_left_out_with_a_reason():
    kvpress = pytest.importorskip("kvpress")
    compared = {type(presses.make_press(kvpress, press, 0.5)).__name__ for press in presses.PRESSES}
    left_out = {name for names in presses.LEFT_OUT.values() for name in names}
    assert compared.isdisjoint(left_out)
    assert {name for name in vars(kvpress) if name.endswith("Press")} <= compared | left_out


def test_answers_equal_the_pipeline_of_kvpress(tmp_path):
    kvpress = pytest.importorskip("kvpress")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    tiny.write(tmp_path)
    tokenizer = tiny.make_llm().tokenizer
    documents = tasks.make_task("niah_multikey_1:docs", request(1800)).documents
    # Short: kvpress masks with a hyperplane that separates a question's queries, and random weights rarely have one.
    questions = [document.questions[0].text[-2:] for document in documents]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    pipeline = transformers.pipeline(
        "kv-press-text-generation", model=model, tokenizer=transformers.AutoTokenizer.from_pretrained(tmp_path)
    )
    # The pipeline appends a newline to questions of models without a chat template.
    encoded = [tokenizer.encode(question + "\n", add_bos=False) for question in questions]
    process = presses.Presses(sys.executable, tmp_path, "float32")
    for name in ("SnapKV", "KVzip"):
        for context in (document.context for document in documents):
            text = tokenizer.encode(context)
            press = presses.make_press(kvpress, name, 1 - (200 + 0.5) / len(text))
            expected = pipeline(context, questions=questions, press=press, max_new_tokens=24)["answers"]
            reply = process.answer(press=name, kept=200, text=text, questions=encoded, answer_tokens=24)
            assert reply["answers"] == expected
            np.testing.assert_allclose(reply["kept"], 200, atol=1)  # KVzip masks a share of all layers together
            assert reply["held"] == (200 if name == "SnapKV" else len(text))
    process.close()


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_gguf_file_becomes_a_directory_for_transformers(family, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(GOLDEN / family, path)
    tokenizer = dataclasses.replace(tiny.make_llm().tokenizer, eos_ids=(3,))
    peers.save_for_transformers(path, tokenizer, tmp_path)
    assert load_config(tmp_path) == load_config(path)
    assert_equal_parameters(load_model(tmp_path), load_model(path))
    assert load_tokenizer(tmp_path).encode("Who?") == tokenizer.encode("Who?")


def test_transformers_decodes_with_its_caches():
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    for cache in ("dynamic", "static"):
        writer = TransformersWriter(tiny.make_config(), "float32", context=20, tokens=3, cache=cache)
        keys = writer.cache.layers[0].keys
        assert len(writer()) == len(writer()) == 1
        assert writer.cache.get_seq_length() == 26
        torch.testing.assert_close(writer.cache.layers[0].keys[:, :, :20], keys[:, :, :20])
