"""Tensors of files that are not one parameter each: in four bits, fused, in another order of pairs."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import rope
from kvjax_models.formats import huggingface
from kvjax_models.formats.weights import dequantize_mxfp4, head_dim_order
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.rotary import make_rotary, rotation
from tests.models.test_huggingface import assert_same, model

GPT_OSS = LlamaConfig(
    vocab_size=24,
    width=32,
    mlp_width=32,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=8,
    max_length=64,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    attention_sinks=True,
    experts=3,
    experts_per_token=2,
    expert_width=32,
    activation="clipped_swiglu",
)


def test_four_bits_by_hand():
    """Every number there is, in both halves of a byte, under scales of a half, one and four."""
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    blocks = np.array([number | (15 - number) << 4 for number in range(16)], np.uint8)
    found = dequantize_mxfp4(np.tile(blocks, (1, 1, 3, 1)), np.array([[[126, 127, 129]]], np.uint8))
    assert found.shape == (1, 1, 96) and found.dtype == ml_dtypes.bfloat16
    expected = np.stack([numbers, numbers[::-1]], axis=1).reshape(-1)
    np.testing.assert_array_equal(found.astype(np.float32).reshape(3, 32), np.outer([0.5, 1, 4], expected))


def packed(random, experts, outputs, inputs):
    blocks = random.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
    return blocks, random.integers(120, 130, blocks.shape[:3], np.uint8)


def test_a_checkpoint_in_four_bits_is_the_one_of_its_numbers(tmp_path):
    whole, four = tmp_path / "whole", tmp_path / "four"
    huggingface.save_model(whole, model(GPT_OSS, jnp.bfloat16))
    tensors = dict(safetensors.numpy.load_file(whole / "model.safetensors"))
    in_four_bits, random = dict(tensors), np.random.default_rng(0)
    for layer in range(GPT_OSS.layers):
        for name, outputs in (("gate_up_proj", 64), ("down_proj", 32)):
            full = f"model.layers.{layer}.mlp.experts.{name}"
            blocks, scales = packed(random, 3, outputs, 32)
            tensors[full] = np.ascontiguousarray(dequantize_mxfp4(blocks, scales).swapaxes(1, 2))
            del in_four_bits[full]
            in_four_bits |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
    safetensors.numpy.save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    four.mkdir()
    values = json.loads((whole / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (four / "config.json").write_text(json.dumps(values))
    safetensors.numpy.save_file(in_four_bits, four / "model.safetensors", metadata={"format": "pt"})
    assert_same(huggingface.load_model(four), huggingface.load_model(whole))

    in_four_bits["model.layers.0.mlp.experts.down_proj_scales"] = np.ones((3, 32, 1), np.float32)
    del in_four_bits["model.layers.1.mlp.experts.gate_up_proj_scales"]
    safetensors.numpy.save_file(in_four_bits, four / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="missing: model.layers.1.mlp.experts.gate_up_proj_scales") as error:
        huggingface.load_model(four)
    assert "down_proj_scales has dtype F32; supported: U8" in str(error.value)


def test_live_four_bits_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed(np.random.default_rng(0), 2, 6, 64)
    theirs = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    ours = dequantize_mxfp4(blocks, scales).swapaxes(1, 2).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs.float().numpy())


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([(8, 8), (8, 4), (16, 6), (16, 12), (8, 2)]), st.booleans(), st.integers(0, 999))
def test_pairs_of_any_order_give_the_products_of_any_order(sizes, neighbours, seed):
    """Queries and keys turned as a family does it, and in our order after ours: the same products."""
    head_dim, turned = sizes
    random = np.random.default_rng(seed)
    query, key = random.normal(size=(2, 1, 3, 1, head_dim)).astype(np.float32)
    positions = np.array([[0, 5, 40]])
    order = head_dim_order(head_dim, turned, neighbours)
    order = np.arange(head_dim) if order is None else order
    assert sorted(order) == list(range(head_dim))
    cos, sin = rotation(make_rotary(head_dim, 100.0, rotary_dim=turned, tokens=64), jnp.asarray(positions))
    ours = [np.asarray(rope.rotate(jnp.asarray(x[..., order]), cos, sin)) for x in (query, key)]
    angles = positions[0][:, None] * 100.0 ** (-np.arange(0, turned, 2) / turned)

    def family_turned(x):
        x = x.copy()
        for pair in range(turned // 2):
            first, second = (2 * pair, 2 * pair + 1) if neighbours else (pair, pair + turned // 2)
            a, b = x[..., first].copy(), x[..., second].copy()
            c, s = np.cos(angles[:, pair])[None, :, None], np.sin(angles[:, pair])[None, :, None]
            x[..., first], x[..., second] = a * c - b * s, b * c + a * s
        return x

    expected = np.einsum("bqhd,bkhd->bqk", family_turned(query), family_turned(key))
    np.testing.assert_allclose(np.einsum("bqhd,bkhd->bqk", *ours), expected, atol=1e-4)
