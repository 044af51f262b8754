"""Logits and greedy tokens against transformers: from golden files always, live where torch is installed."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax_models.formats import huggingface
from tests.models import families

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "transformers"
TOLERANCE = 2e-4
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 16, "truncate": False,
}  # fmt: skip


@pytest.fixture(params=families.GOLDEN, ids=lambda family: family.name)
def golden(request):
    """(directory, arrays) of one family's golden checkpoint; see tests/golden/make_transformers_golden.py."""
    directory = GOLDEN / request.param.name
    with np.load(directory / "golden.npz") as arrays:
        return directory, dict(arrays)


def logits(directory, tokens):
    return np.asarray(
        nnx.jit(lambda model, tokens: model(tokens))(
            huggingface.load_model(directory, jnp.float32), jnp.asarray(tokens)
        )
    )


def test_golden_logits_and_greedy_continuation(golden):
    directory, arrays = golden
    prompt, expected = arrays["prompt"], arrays["greedy"]
    assert arrays["logits"].std() > 1, "too flat to tell a wrong model from a right one"
    assert arrays["margin"] > 2 * TOLERANCE
    # One program for both; what stands behind a token changes nothing.
    continued = np.concatenate([prompt, expected], axis=1)
    length = arrays["tokens"].shape[1]
    tokens = np.pad(arrays["tokens"], ((0, 0), (0, continued.shape[1] - length)))
    found, along = np.split(logits(directory, np.concatenate([tokens, continued])), 2)
    np.testing.assert_allclose(found[:, :length], arrays["logits"], atol=TOLERANCE, rtol=0)
    # Teacher forcing: every step's argmax is the next token exactly if greedy decoding reproduces the continuation.
    np.testing.assert_array_equal(along.argmax(-1)[:, prompt.shape[1] - 1 : -1], expected)


def test_golden_in_the_spelling_of_transformers_4(golden, tmp_path):
    """The same checkpoint under a config.json as transformers 4 wrote it means the same model."""
    directory, _ = golden
    values = json.loads((directory / "config.json").read_text())
    rope = values.pop("rope_parameters")
    if "sliding_attention" in rope:
        values["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    values["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        values["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    values["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    values["torch_dtype"] = values.pop("dtype")
    if "num_local_experts" in values and values["model_type"] == "qwen3_moe":
        values["num_experts"] = values.pop("num_local_experts")
    if values["model_type"] in ("mistral", "qwen2", "qwen3"):
        values.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert huggingface.load_config(tmp_path) == huggingface.load_config(directory)


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
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 16}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 3}),
        ("gpt_oss", {"sliding_window": 9}),
        ("gpt_oss", {"rope_parameters": YARN | {"attention_factor": 1.0}}),
        ("gpt_oss", {"rope_parameters": YARN | {"truncate": True}}),
        ("glm4", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}),
        ("phi3", {"original_max_position_embeddings": 128}),
        ("smollm3", {"no_rope_layers": [1, 1]}),
        ("granite", {"residual_multiplier": 0.6}),
        ("granite", {"logits_scaling": 1.6}),
    ],
)
def test_golden_tells_a_neighbouring_model_apart(family, changes, tmp_path):
    """The tolerance has teeth: each feature, read wrongly, moves logits by far more than it allows."""
    with np.load(GOLDEN / family / "golden.npz") as arrays:
        wrong = logits(edited(GOLDEN / family, tmp_path, **changes), arrays["tokens"])
        assert np.abs(wrong - arrays["logits"]).max() > 20 * TOLERANCE


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."], ids=["4", "5"])
def test_a_gemma_3_that_also_sees_pictures_is_read_without_its_eyes(prefix, tmp_path):
    directory = GOLDEN / "gemma3"
    values = json.loads((directory / "config.json").read_text())
    outside = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(outside | {"text_config": values}))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.embeddings.patch_embedding.bias"] = np.ones(4, np.float32)
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    assert huggingface.load_config(tmp_path) == huggingface.load_config(directory)
    with np.load(directory / "golden.npz") as arrays:
        np.testing.assert_allclose(logits(tmp_path, arrays["tokens"]), arrays["logits"], atol=TOLERANCE, rtol=0)


def errors(found, exact):
    """The median over tokens of how far logits are, in root mean square: a token whose router took another expert is an
    error of its own kind."""
    return float(np.median(np.sqrt(np.mean((found - exact) ** 2, axis=-1))))


@pytest.mark.parametrize("family", ["llama2", "gemma3", "gpt_oss"])
def test_golden_logits_in_the_file_s_own_dtype(family):
    """In bfloat16, as a checkpoint is loaded where nothing is said: a few hundredths off."""
    with np.load(GOLDEN / family / "golden.npz") as arrays:
        model = huggingface.load_model(GOLDEN / family)
        assert model.embedding.param_dtype == jnp.bfloat16
        found = np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(arrays["tokens"])))
        assert 0 < errors(found, arrays["logits"]) < 0.03 * arrays["logits"].std()
        assert (found.argmax(-1) == arrays["logits"].argmax(-1)).mean() > 0.93


# torch cannot multiply bfloat16 experts of so few elements.
IN_BFLOAT16 = [family for family in families.GOLDEN if family.name != "qwen3_moe"]


@pytest.mark.parametrize("family", IN_BFLOAT16, ids=lambda family: family.name)
def test_live_bfloat16_is_as_near_to_float32_as_transformers_is(family, tmp_path):
    """Both round, at other places (we keep norms, rotations, attention and logits in float32), so they differ by about
    both errors together: as errors that know nothing of each other do."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = families.write(family, tmp_path, bfloat16=True)
    tokens = np.random.default_rng(1).integers(0, families.VOCAB, (4, families.SEQUENCE))
    exact = families.hf_logits(model, tokens)
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    theirs = families.hf_logits(rounded.eval(), tokens)
    forward = nnx.jit(lambda model, tokens: model(tokens))
    ours = np.asarray(forward(huggingface.load_model(tmp_path), jnp.asarray(tokens)))
    own, other = errors(ours, exact), errors(theirs, exact)
    assert 0 < own < 1.1 * other
    assert errors(ours, theirs) < 1.15 * np.hypot(own, other)


def test_live_logits(hf_checkpoint):
    directory, model = hf_checkpoint
    tokens = np.random.default_rng(1).integers(0, families.VOCAB, (2, families.SEQUENCE))
    expected = families.hf_logits(model, tokens)
    assert expected.std() > 1
    np.testing.assert_allclose(logits(directory, tokens), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("max_shard_bytes", [huggingface.MAX_SHARD_BYTES, 20_000], ids=["single", "sharded"])
def test_live_round_trip(hf_checkpoint, tmp_path, max_shard_bytes):
    """transformers reads what `save` writes."""
    import transformers

    directory, model = hf_checkpoint
    ours = tmp_path / "saved"
    huggingface.save_model(ours, huggingface.load_model(directory), max_shard_bytes=max_shard_bytes)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        ours, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    tokens = np.random.default_rng(2).integers(0, families.VOCAB, (2, families.SEQUENCE))
    expected = families.hf_logits(model, tokens)
    np.testing.assert_allclose(families.hf_logits(again.eval(), tokens), expected, atol=1e-5, rtol=0)
