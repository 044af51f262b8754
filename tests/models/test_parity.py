"""Logits and greedy tokens against transformers: from golden files always, live where torch is installed."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models import checkpoint
from tests.models import families

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
TOLERANCE = 2e-4


@pytest.fixture(params=families.GOLDEN, ids=lambda family: family.name)
def golden(request):
    """(directory, arrays) of one family's golden checkpoint; see tests/golden/make_transformers_golden.py."""
    directory = GOLDEN / request.param.name
    with np.load(directory / "golden.npz") as arrays:
        return directory, dict(arrays)


def logits(directory, tokens):
    return np.asarray(
        nnx.jit(lambda model, tokens: model(tokens))(checkpoint.load(directory, jnp.float32), jnp.asarray(tokens))
    )


def test_golden_logits(golden):
    directory, arrays = golden
    assert arrays["logits"].std() > 1, "too flat to tell a wrong model from a right one"
    np.testing.assert_allclose(logits(directory, arrays["tokens"]), arrays["logits"], atol=TOLERANCE, rtol=0)


def test_golden_greedy_continuation(golden):
    directory, arrays = golden
    prompt, expected = arrays["prompt"], arrays["greedy"]
    assert arrays["margin"] > 2 * TOLERANCE
    # Teacher forcing: every step's argmax is the next token exactly if greedy decoding reproduces the continuation.
    tokens = np.concatenate([prompt, expected], axis=1)
    predicted = logits(directory, tokens).argmax(-1)
    np.testing.assert_array_equal(predicted[:, prompt.shape[1] - 1 : -1], expected)


def test_golden_in_the_spelling_of_transformers_4(golden, tmp_path):
    """The same checkpoint under a config.json as transformers 4 wrote it means the same model."""
    directory, arrays = golden
    values = json.loads((directory / "config.json").read_text())
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    values.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    assert checkpoint.load_config(tmp_path) == checkpoint.load_config(directory)
    np.testing.assert_allclose(logits(tmp_path, arrays["tokens"]), arrays["logits"], atol=TOLERANCE, rtol=0)


def edited(directory, tmp_path, **changes):
    """A copy of a checkpoint with other values in its config.json."""
    values = json.loads((directory / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama31", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("llama31", {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 9}),
        ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
        ("llama2", {"rms_norm_eps": 1e-2}),
    ],
)
def test_golden_tells_a_neighbouring_model_apart(family, changes, tmp_path):
    """The tolerance has teeth: each feature, read wrongly, moves logits by far more than it allows."""
    with np.load(GOLDEN / family / "golden.npz") as arrays:
        wrong = logits(edited(GOLDEN / family, tmp_path, **changes), arrays["tokens"])
        assert np.abs(wrong - arrays["logits"]).max() > 50 * TOLERANCE


def test_live_logits(hf_checkpoint):
    directory, model = hf_checkpoint
    tokens = np.random.default_rng(1).integers(0, families.VOCAB, (2, families.SEQUENCE))
    expected = families.hf_logits(model, tokens)
    assert expected.std() > 1
    np.testing.assert_allclose(logits(directory, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("max_shard_bytes", [checkpoint.MAX_SHARD_BYTES, 20_000], ids=["single", "sharded"])
def test_live_round_trip(hf_checkpoint, tmp_path, max_shard_bytes):
    """transformers reads what `save` writes."""
    import transformers

    directory, model = hf_checkpoint
    ours = tmp_path / "saved"
    checkpoint.save(ours, checkpoint.load(directory), max_shard_bytes=max_shard_bytes)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    tokens = np.random.default_rng(2).integers(0, families.VOCAB, (2, families.SEQUENCE))
    expected = families.hf_logits(model, tokens)
    np.testing.assert_allclose(families.hf_logits(again.eval(), tokens), expected, atol=1e-5, rtol=0)
