"""Greedy continuations with the exact policy against transformers."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax_models
from kvjax_models.formats import huggingface
from kvjax_models.generation.generator import generate
from tests.models import families, tiny
from tests.models.support import GOLDEN

NEW_TOKENS = 64


def generate_greedily(directory, prompts):
    model, policy = huggingface.load_model(directory, jnp.float32), kvjax.Exact(compact_every=16)
    rows, _ = generate(model, policy, prompts.tolist(), max_new_tokens=NEW_TOKENS)
    return np.array(rows)


def each(all_families):
    """Returns test parameters; most are heavy, because test_parity compares the logits of all families."""
    quick = ("llama2", "llama31", "mistral", "qwen2", "qwen3", "gemma3", "gpt_oss")
    return [
        pytest.param(family, marks=[] if family.name in quick else pytest.mark.heavy, id=family.name)
        for family in all_families
    ]


@pytest.mark.parametrize("family", each(families.GOLDEN))
def test_golden_greedy_tokens(family):
    with np.load(GOLDEN / family.name / "golden.npz") as arrays:
        prompt, expected = arrays["prompt"], arrays["greedy"]
    assert expected.shape[1] == NEW_TOKENS
    np.testing.assert_array_equal(generate_greedily(GOLDEN / family.name, prompt), expected)


@pytest.mark.parametrize("family", each(families.LIVE))
def test_live_greedy_tokens(family, tmp_path):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = families.write(family, tmp_path)
    prompt = np.random.default_rng(3).integers(0, families.VOCAB, size=(2, 12))
    with torch.no_grad():
        expected = model.generate(torch.tensor(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(generate_greedily(tmp_path, prompt), expected[:, prompt.shape[1] :].numpy())


@pytest.mark.parametrize("family", [families.GEMMA3, families.QWEN3_MOE], ids=lambda family: family.name)
def test_text_from_a_directory_of_transformers(family, tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    families.write(family.but(family.name, vocab_size=98, max_position_embeddings=512, eos_token_id=97), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.directory() / name, tmp_path)
    text = "".join(f"line {number}: the code is {7 * number}\n" for number in range(20))
    llm = kvjax_models.load(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt = llm.encode(text)
    with torch.no_grad():
        options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        # Without a mask, transformers would take the prompt's tokens 0 for padding.
        options["attention_mask"] = torch.ones(1, len(prompt), dtype=torch.long)
        expected = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    assert llm.generate(text, max_new_tokens=24) == llm.tokenizer.decode(expected) != ""
    assert llm.generate(text, policy="subgen:recent=16,compact_every=8", budget="25%", max_new_tokens=24)
