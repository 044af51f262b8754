"""Weights in MXFP4."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from kvjax_models.formats import huggingface
from kvjax_models.formats.weights import dequantize_mxfp4
from kvjax_models.model.config import AttentionConfig, ExpertConfig
from tests.models.huggingface_files import save_model
from tests.models.support import assert_equal_parameters, random_model, small_config

GPT_OSS = small_config(
    width=32, mlp_width=32, layers=2, mlp_bias=True, activation="clipped_swiglu",
    attention=AttentionConfig(qkv_bias=True, output_bias=True, sinks=True), experts=ExpertConfig(3, 2, 32),
)  # fmt: skip


def save_tensors(directory, tensors):
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


def test_mxfp4_values():
    """Every number, in both halves of a byte, with scales of .5, 1 and 4."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    blocks = np.array([number | (15 - number) << 4 for number in range(16)], np.uint8)
    values = dequantize_mxfp4(np.tile(blocks, (1, 1, 3, 1)), np.array([[[126, 127, 129]]], np.uint8))
    assert values.shape == (1, 1, 96) and values.dtype == ml_dtypes.bfloat16
    expected = np.stack([numbers, numbers[::-1]], axis=1).reshape(-1)
    np.testing.assert_array_equal(values.astype(np.float32).reshape(3, 32), np.outer([0.5, 1, 4], expected))


def random_mxfp4(random, experts, outputs, inputs):
    blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return blocks, random.integers(120, 130, blocks.shape[:3], np.uint8)


def test_mxfp4_checkpoint_equals_the_dequantized_one(tmp_path):
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    values = {"model_type": "gpt_oss", "intermediate_size": 32, "num_local_experts": 3, "num_experts_per_tok": 2}
    values |= {"sliding_window": None, "rope_scaling": {"rope_type": "default"}}
    save_model(plain, random_model(GPT_OSS, jnp.bfloat16), **values)
    tensors = dict(safetensors.numpy.load_file(plain / "model.safetensors"))
    mxfp4, random = dict(tensors), np.random.default_rng(0)
    for layer in range(GPT_OSS.layers):
        for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
            full_name = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = random_mxfp4(random, 3, outputs, 32)
            tensors[full_name] = np.ascontiguousarray(dequantize_mxfp4(blocks, scales).swapaxes(1, 2))
            del mxfp4[full_name]
            mxfp4 |= {f"{full_name}_blocks": blocks, f"{full_name}_scales": scales}
    save_tensors(plain, tensors)
    quantized.mkdir()
    values = json.loads((plain / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (quantized / "config.json").write_text(json.dumps(values))
    save_tensors(quantized, mxfp4)
    assert_equal_parameters(huggingface.load_model(quantized), huggingface.load_model(plain))

    mxfp4["model.layers.0.mlp.experts.down_proj_scales"] = np.ones((3, 32, 1), np.float32)
    del mxfp4["model.layers.1.mlp.experts.gate_up_proj_scales"]
    save_tensors(quantized, mxfp4)
    with pytest.raises(ValueError, match="missing: model.layers.1.mlp.experts.gate_up_proj_scales") as error:
        huggingface.load_model(quantized)
    assert "down_proj_scales has dtype F32; supported: U8" in str(error.value)
