"""Greedy continuations under the exact policy against transformers' own generation."""

import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax_models
from experiments.common.tasks import line_retrieval
from kvjax_models.formats import huggingface
from kvjax_models.formats.huggingface_tokenizer import load_tokenizer
from kvjax_models.generation.generator import generate
from tests.models import families
from tests.models.test_parity import GOLDEN

NEW_TOKENS = 64
SHIPPED = sorted((pathlib.Path(__file__).parents[2] / "models" / "checkpoints").iterdir())


def continuation(directory, prompts: np.ndarray) -> np.ndarray:
    rows, _ = generate(
        huggingface.load_model(directory, jnp.float32),
        kvjax.Exact(compact_every=16),
        prompts.tolist(),
        max_new_tokens=NEW_TOKENS,
    )
    return np.array(rows)


# The others' tokens follow from their logits, which test_parity compares, and from these.
QUICK = ("llama2", "llama31", "mistral", "qwen2", "qwen3", "gemma3", "gpt_oss")


@pytest.mark.parametrize(
    "name",
    [pytest.param(one.name, marks=[] if one.name in QUICK else pytest.mark.heavy) for one in families.GOLDEN],
)
def test_golden_greedy_tokens(name):
    with np.load(GOLDEN / name / "golden.npz") as arrays:
        prompt, expected = arrays["prompt"], arrays["greedy"]
    assert expected.shape[1] == NEW_TOKENS
    np.testing.assert_array_equal(continuation(GOLDEN / name, prompt), expected)


def test_live_greedy_tokens(hf_checkpoint):
    torch = pytest.importorskip("torch")
    directory, model = hf_checkpoint
    prompt = np.random.default_rng(3).integers(0, families.VOCAB, size=(2, 12))
    with torch.no_grad():
        expected = model.generate(torch.tensor(prompt), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    np.testing.assert_array_equal(continuation(directory, prompt), expected[:, prompt.shape[1] :].numpy())


@pytest.mark.parametrize("family", [families.GEMMA3, families.QWEN3_MOE], ids=lambda family: family.name)
def test_text_from_a_directory_that_transformers_made(family, tmp_path):
    """README's five lines, beside a tokenizer: under exact what transformers writes, and through a quarter of it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    shipped = next(path for path in SHIPPED if path.name == "kvjax-lm-2k")
    families.write(family.but(family.name, vocab_size=4096, max_position_embeddings=512, eos_token_id=4095), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, tmp_path)
    text = "".join(f"line {number}: the code is {7 * number}\n" for number in range(20))
    llm = kvjax_models.load(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt = llm.encode(text)
    with torch.no_grad():
        asked = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
        expected = model.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist()
    assert llm.generate(text, max_new_tokens=24) == llm.tokenizer.decode(expected) != ""
    assert llm.generate(text, policy="subgen:recent=16,compact_every=8", budget="25%", max_new_tokens=24)


@pytest.mark.parametrize("directory", SHIPPED, ids=lambda directory: directory.name)
def test_shipped_checkpoints_answer_alike_in_transformers(directory):
    """The same tokens, and so the same accuracy, which is high."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(directory), load_tokenizer(directory)

    def length(text):
        return len(tokenizer.encode(text))

    right = 0
    for seed in range(20):
        document = line_retrieval.generate_for_tokens(np.random.default_rng(seed), length, 1000)
        prompt = tokenizer.encode(document.context + document.question)
        with torch.no_grad():
            asked = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            expected = model.generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist()
        rows, _ = generate(
            huggingface.load_model(directory, jnp.float32),
            kvjax.Exact(),
            [prompt],
            max_new_tokens=8,
            eos=tokenizer.eos_ids,
        )
        assert rows[0] == expected[: len(rows[0])]
        right += line_retrieval.parse_answer(tokenizer.decode(rows[0])) == document.answer
    assert right >= 17
