"""Greedy continuations with the exact policy against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax_models.formats import huggingface
from kvjax_models.generation.generator import generate
from tests.models import families
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
