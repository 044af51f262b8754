"""Logits and greedy tokens against transformers: always from golden files, and live where torch is installed."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax_models.formats import huggingface
from kvjax_models.formats.config_json import parse_config
from tests.kvjax.support import each
from tests.models import families
from tests.models.support import GOLDEN

TOLERANCE = 2e-4


@pytest.fixture(params=families.GOLDEN, ids=lambda family: family.name)
def golden(request):
    """The directory and arrays of a family's golden checkpoint; see tests/golden/make_transformers_golden.py."""
    directory = GOLDEN / request.param.name
    with np.load(directory / "golden.npz") as arrays:
        return directory, dict(arrays)


def compute_logits(directory, tokens, dtype=jnp.float32):
    model = huggingface.load_model(directory, dtype)
    return np.asarray(nnx.jit(lambda model, tokens: model(tokens))(model, jnp.asarray(tokens)))


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def test_golden_logits_and_greedy_continuation(golden):
    directory, arrays = golden
    prompt, expected = arrays["prompt"], arrays["greedy"]
    assert arrays["logits"].std() > 1, "too flat to detect a wrong model"
    assert arrays["margin"] > 2 * TOLERANCE
    # One program for both: attention is causal, so padding changes nothing.
    sequence = np.concatenate([prompt, expected], axis=1)
    length = arrays["tokens"].shape[1]
    tokens = np.pad(arrays["tokens"], ((0, 0), (0, sequence.shape[1] - length)))
    logits, sequence_logits = np.split(compute_logits(directory, np.concatenate([tokens, sequence])), 2)
    assert_close(logits[:, :length], arrays["logits"])
    # Teacher forcing: greedy decoding reproduces the continuation if and only if all of these are equal.
    np.testing.assert_array_equal(sequence_logits.argmax(-1)[:, prompt.shape[1] - 1 : -1], expected)


def test_config_as_transformers_4_writes_it(golden, tmp_path):
    directory, _ = golden
    if directory.name.startswith("gemma4"):
        pytest.skip("transformers 4 has no Gemma 4")
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


def check_equals_golden(directory, tensors, golden_directory):
    """Checks that a directory with these tensors has the configuration and the logits of a golden checkpoint."""
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    assert huggingface.load_config(directory) == huggingface.load_config(golden_directory)
    with np.load(golden_directory / "golden.npz") as arrays:
        assert_close(compute_logits(directory, arrays["tokens"]), arrays["logits"])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."], ids=["4", "5"])
def test_multimodal_gemma_3_loads_its_text_model(prefix, tmp_path):
    directory = GOLDEN / "gemma3"
    values = json.loads((directory / "config.json").read_text())
    wrapper = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(wrapper | {"text_config": values}))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    renamed["vision_tower.vision_model.embeddings.patch_embedding.bias"] = np.ones(4, np.float32)
    check_equals_golden(tmp_path, renamed, directory)


def test_multimodal_qwen_3_5_loads_its_text_model(tmp_path):
    """Named as published: with experts in one tensor, images and layers that predict further tokens."""
    directory = GOLDEN / "qwen3_5_moe"
    values = json.loads((directory / "config.json").read_text())
    values |= {"attn_output_gate": True, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    wrapper = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    (tmp_path / "config.json").write_text(json.dumps(wrapper | {"text_config": values}))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    renamed = {"model.visual.bias": np.ones(4, np.float32), "mtp.norm.weight": np.ones(4, np.float32)}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            renamed[name.replace("model.", "model.language_model.", 1)] = tensor
    for layer in range(values["num_hidden_layers"]):
        prefix, experts = f"layers.{layer}.mlp.experts", range(values["num_experts"])
        gate, up, down = (
            np.stack([tensors[f"model.{prefix}.{expert}.{name}_proj.weight"] for expert in experts])
            for name in ("gate", "up", "down")
        )
        renamed[f"model.language_model.{prefix}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        renamed[f"model.language_model.{prefix}.down_proj"] = down
    check_equals_golden(tmp_path, renamed, directory)


@pytest.mark.parametrize("family", each([family.name for family in families.GOLDEN], ["llama2", "gemma3", "gpt_oss"]))
def test_golden_logits_in_bfloat16(family):
    """The default is the checkpoint's dtype."""
    assert huggingface.load_model(GOLDEN / family).embedding.param_dtype == jnp.bfloat16
    with np.load(GOLDEN / family / "golden.npz") as arrays:
        expected, logits = arrays["logits"], compute_logits(GOLDEN / family, arrays["tokens"], None)
    # The median ignores tokens that are routed to other experts.
    assert 0 < np.median(np.sqrt(np.mean((logits - expected) ** 2, axis=-1))) < 0.03 * expected.std()
    assert (logits.argmax(-1) == expected.argmax(-1)).mean() > 0.93


ROPE = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "yarn": {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 30.0},
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 4.0},
    "longrope": {"original_max_position_embeddings": 4096, "short_factor": np.linspace(1, 1.4, 64).tolist(),
                 "long_factor": np.linspace(1, 60, 64).tolist()},
}  # fmt: skip


@pytest.mark.parametrize("tokens", [1000, 131072])
@pytest.mark.parametrize("kind", ROPE)
def test_live_angles_of_published_sizes(kind, tokens):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    rope = {"rope_type": kind, "rope_theta": 5e5} | ROPE[kind]
    sizes = {"vocab_size": 24, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 2, "max_position_embeddings": 65536}  # fmt: skip
    config = transformers.LlamaConfig(**sizes, rope_parameters=dict(rope))
    expected, factor = rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=tokens)
    rotary = parse_config({"model_type": "llama", **sizes, "rope_scaling": rope}).rotary(0, tokens)
    assert rotary.factor == pytest.approx(factor)
    np.testing.assert_allclose(rotary.frequencies, expected.numpy(), rtol=2e-7)  # one unit in the last place


def test_live_logits(hf_checkpoint):
    directory, model = hf_checkpoint
    tokens = np.random.default_rng(1).integers(0, families.VOCAB, (2, families.SEQUENCE))
    expected = families.hf_logits(model, tokens)
    assert expected.std() > 1
    assert_close(compute_logits(directory, tokens), expected)
