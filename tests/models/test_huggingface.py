"""Directories in Hugging Face's format: round trips, defaults, refusals and damage."""

import dataclasses
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from kvjax_models import formats
from kvjax_models.formats import huggingface
from tests.models.gguf_files import write_gguf
from tests.models.huggingface_files import save_model
from tests.models.support import GOLDEN, assert_equal_parameters, random_model, small_config

SMALL = small_config(vocab_size=24, mlp_width=20, layers=2, query_heads=4, kv_heads=2, head_dim=4, max_length=64)


def small_model(**changes):
    return random_model(dataclasses.replace(SMALL, **changes))


def rewrite(directory, change):
    """Changes the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = dict(safetensors.numpy.load_file(path))
    change(tensors)
    safetensors.numpy.save_file(tensors, path)


@pytest.fixture
def saved(tmp_path):
    save_model(tmp_path, small_model())
    return tmp_path


def test_incomplete_directories_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        huggingface.load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        huggingface.load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must contain a JSON object, got list"):
        huggingface.load_model(tmp_path)
    shutil.copy(GOLDEN / "llama2" / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        huggingface.load_model(tmp_path)


def test_one_error_lists_all_mismatched_tensors(saved):
    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.2.input_layernorm.weight"] = np.ones(16, np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
        tensors["model.layers.1.self_attn.k_proj.weight"] = np.ones((16, 8), np.float32)
        tensors["lm_head.weight"] = np.ones((24, 16), np.int8)

    rewrite(saved, spoil)
    with pytest.raises(ValueError) as error:
        huggingface.load_model(saved)
    assert sorted(str(error.value).split("\n  ")[1:]) == [
        "lm_head.weight has dtype I8; supported: F64, F32, F16, BF16",
        "missing: model.layers.0.mlp.up_proj.weight",
        "missing: model.norm.weight",
        "model.layers.1.self_attn.k_proj.weight has shape [16, 8], the configuration implies [8, 16]",
        "not part of the model: model.layers.0.self_attn.q_proj.bias",
        "not part of the model: model.layers.2.input_layernorm.weight",
    ]


@pytest.mark.filterwarnings("error")
def test_all_tensors_that_are_not_finite_in_the_dtype_are_named(saved):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = 1e6
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = -1e6

    rewrite(saved, spoil)
    with pytest.raises(ValueError, match=r"not finite as float16 in model\.layers\.0\.mlp\.up_proj.*model\.norm"):
        huggingface.load_model(saved, jnp.float16)
    rewrite(saved, lambda tensors: tensors["model.norm.weight"].fill(np.nan))
    with pytest.raises(ValueError, match=r"not finite as float32 in model\.norm"):
        huggingface.load_model(saved)


def test_truncated_files_are_refused(saved):
    path = saved / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 5, 100, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
            huggingface.load_model(saved)


def test_broken_shards(tmp_path):
    save_model(tmp_path, small_model(), shards=5)
    shards = sorted(tmp_path.glob("*.safetensors"))
    second = shards[1].read_bytes()
    shards[1].write_bytes(second[:-1])
    with pytest.raises(ValueError, match=f"{shards[1].name} is truncated"):
        huggingface.load_model(tmp_path)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match=f"{shards[1].name} repeats tensors of another shard"):
        huggingface.load_model(tmp_path)
    shards[1].unlink()
    shards[2].unlink()
    with pytest.raises(FileNotFoundError, match=f"are missing: {shards[1].name}, {shards[2].name}"):
        huggingface.load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="has no weight_map"):
        huggingface.load_model(tmp_path)


def test_layers_that_predict_several_tokens_are_not_read(tmp_path):
    """GLM-4.5 stores them after the other layers; GGUF files count them, too."""
    shutil.copytree(GOLDEN / "glm4_moe", tmp_path / "glm4_moe")
    expected = huggingface.load_model(tmp_path / "glm4_moe")

    def add_layer(tensors):
        last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.2.")}
        tensors.update({name.replace("layers.2.", "layers.3."): tensor for name, tensor in last.items()})

    rewrite(tmp_path / "glm4_moe", add_layer)
    assert_equal_parameters(huggingface.load_model(tmp_path / "glm4_moe"), expected)
    config = json.loads((tmp_path / "glm4_moe" / "config.json").read_text())
    (tmp_path / "glm4_moe" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    metadata = {"glm4moe.nextn_predict_layers": 1}
    write_gguf(tmp_path / "glm4_moe", tmp_path / "model.gguf", metadata=metadata)
    assert formats.load_config(tmp_path / "model.gguf").layers == 3
    assert_equal_parameters(formats.load_model(tmp_path / "model.gguf", expected.embedding.param_dtype), expected)


@pytest.mark.parametrize("held", ["embedding", "both", "head"])
def test_tied_embeddings_under_either_name_and_rotary_buffers(tmp_path, held):
    original = small_model(tied_embeddings=True)
    save_model(tmp_path, original)

    def hold(tensors):
        assert "lm_head.weight" not in tensors
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)  # of old versions, ignored
        if held != "embedding":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        if held == "head":
            del tensors["model.embed_tokens.weight"]

    rewrite(tmp_path, hold)
    assert_equal_parameters(huggingface.load_model(tmp_path), original)
    if held == "both":
        rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": np.ones((24, 16), np.float32)}))
        with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            huggingface.load_model(tmp_path)


def test_sizes_are_checked_before_allocation(saved):
    """A config with 300 TB of weights gives only a list of mismatches."""
    values = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(values | {"hidden_size": 2**20, "intermediate_size": 2**22}))
    with pytest.raises(
        ValueError, match=r"lm_head\.weight has shape \[24, 16\], the configuration implies \[24, 1048576\]"
    ):
        huggingface.load_model(saved)
