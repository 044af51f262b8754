"""Greedy continuations under the exact policy against transformers' own generation."""

import numpy as np
import pytest

import kvjax
from models import checkpoint, generate
from tests.models import families
from tests.models.test_parity import GOLDEN

NEW_TOKENS = 64


def continuation(directory, prompts: np.ndarray) -> np.ndarray:
    rows, _ = generate.generate(
        checkpoint.load(directory), kvjax.exact(period=16), prompts.tolist(), max_new_tokens=NEW_TOKENS
    )
    return np.array(rows)


@pytest.mark.parametrize("family", families.GOLDEN, ids=lambda family: family.name)
def test_golden_greedy_tokens(family):
    with np.load(GOLDEN / family.name / "golden.npz") as arrays:
        prompt, expected = arrays["prompt"], arrays["greedy"]
    assert expected.shape[1] == NEW_TOKENS
    np.testing.assert_array_equal(continuation(GOLDEN / family.name, prompt), expected)


def test_live_greedy_tokens(hf_checkpoint):
    torch = pytest.importorskip("torch")
    directory, model = hf_checkpoint
    prompt = np.random.default_rng(3).integers(0, families.VOCAB, size=(2, 12))
    with torch.no_grad():
        expected = model.generate(torch.tensor(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(continuation(directory, prompt), expected[:, prompt.shape[1] :].numpy())
