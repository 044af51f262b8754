"""Greedy continuations with the exact policy against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import kvjax
from kvjax_models import LanguageModel
from kvjax_models.formats import huggingface
from kvjax_models.formats.tokenizer import Tokenizer
from tests.models import families
from tests.models.loops import generate
from tests.models.support import GOLDEN

NEW_TOKENS = 64


def generate_greedily(directory, prompts):
    model, policy = huggingface.load_model(directory, jnp.float32), kvjax.Exact(compact_every=16)
    rows, _ = generate(model, policy, prompts.tolist(), max_new_tokens=NEW_TOKENS)
    return np.array(rows)


def each(all_families, quick=("llama31", "gemma3", "gpt_oss", "qwen3_5")):
    """Returns test parameters; most are heavy, because test_parity compares the logits of all families."""
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


def character_tokenizer():
    """Returns a tokenizer with one printable character per token, and no special tokens."""
    characters = {chr(ord("0") + token): token for token in range(families.VOCAB)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(characters, []))
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend, (), (), {}, None)


@pytest.mark.parametrize("family", each(families.GOLDEN, quick=("glm4_moe",)))
def test_golden_tokens_of_ragged_rows_and_of_a_restored_document(family, tmp_path):
    """The second row and the document exceed the sliding windows."""
    with np.load(GOLDEN / family.name / "golden.npz") as arrays:
        texts = np.concatenate([arrays["prompt"], arrays["greedy"]], axis=1).tolist()
    model = huggingface.load_model(GOLDEN / family.name, jnp.float32)
    policy, lengths, new = kvjax.Exact(compact_every=16), (8, 30), 40
    prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    rows, _ = generate(model, policy, prompts, max_new_tokens=new, prefill_chunk=16)
    assert rows == [text[length : length + new] for text, length in zip(texts, lengths, strict=True)]

    llm = LanguageModel(model, character_tokenizer())
    context, question, answer = (
        "".join(chr(ord("0") + token) for token in part) for part in np.split(texts[1], [lengths[1], 36])
    )
    llm.cache(policy).read(context).save(tmp_path)
    assert llm.open(tmp_path).generate(question, max_new_tokens=len(answer)) == answer


@pytest.mark.parametrize("family", each(families.LIVE))
def test_live_greedy_tokens(family, tmp_path):
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = families.write(family, tmp_path)
    prompt = np.random.default_rng(3).integers(0, families.VOCAB, size=(2, 12))
    with torch.no_grad():
        expected = model.generate(torch.tensor(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(generate_greedily(tmp_path, prompt), expected[:, prompt.shape[1] :].numpy())
