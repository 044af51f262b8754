"""GGUF files: every architecture against the Hugging Face directory it was converted from, damage, and tokenizers."""

import dataclasses
import json
import math
import random
import shutil
import struct

import gguf
import jax
import numpy as np
import pytest
from flax import traverse_util

from kvjax_models import formats
from kvjax_models.formats import gguf_checkpoint, gguf_file
from kvjax_models.formats.gguf_file import QuantizedTensor
from tests.models.gguf_files import ARCHITECTURES, write_gguf
from tests.models.support import GOLDEN, assert_equal_parameters, damage_bytes, memory_limit, time_limit

Q8_0 = gguf.GGMLQuantizationType.Q8_0


# Settings that GGUF files do not hold, because llama.cpp knows one value only.
IMPLIED = {
    "dots1": {"sliding_window": None, "layer_types": None},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4},
}


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_an_architecture_has_the_weights_and_configuration_of_its_directory(family, tmp_path):
    directory, path = tmp_path / family, tmp_path / "model.gguf"
    shutil.copytree(GOLDEN / family, directory)
    config = json.loads((directory / "config.json").read_text()) | IMPLIED.get(family, {})
    (directory / "config.json").write_text(json.dumps(config))
    write_gguf(directory, path)
    model, expected = formats.load_model(path, "float32"), formats.load_model(directory, "float32")
    # Scales of Gemma's norms are stored as 1 + w.
    assert_equal_parameters(model, expected, atol=1e-7 if family.startswith("gemma") else 0)
    for layer in range(expected.config.layers):
        rotary, wanted = model.config.rotary(layer), expected.config.rotary(layer)
        np.testing.assert_allclose(rotary.frequencies, wanted.frequencies, rtol=1e-6)
    configs = (
        dataclasses.replace(config, rope=dataclasses.replace(config.rope, scaling=None))
        for config in (model.config, expected.config)
    )
    fields, wanted = (traverse_util.flatten_dict(dataclasses.asdict(config), sep=".") for config in configs)
    assert fields == {
        key: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value for key, value in wanted.items()
    }


def test_quantized_tensors_are_dequantized_one_by_one_into_the_dtype(tmp_path):
    write_gguf(GOLDEN / "llama2", tmp_path / "exact.gguf")
    write_gguf(GOLDEN / "llama2", tmp_path / "quantized.gguf", Q8_0)
    exact = formats.load_model(tmp_path / "exact.gguf")
    quantized = formats.load_model(tmp_path / "quantized.gguf")
    assert quantized.embedding.embedding[...].dtype == np.float32
    assert_equal_parameters(quantized, exact, atol=2e-2)
    assert any((a != b).any() for a, b in zip(jax.tree.leaves(quantized), jax.tree.leaves(exact), strict=True))
    half = formats.load_model(tmp_path / "quantized.gguf", "bfloat16")
    assert_equal_parameters(half, jax.tree.map(lambda x: x.astype("bfloat16"), quantized))


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits))
def test_every_type_is_dequantized_in_chunks(kind, monkeypatch):
    monkeypatch.setattr(gguf_file, "_CHUNK_BYTES", 700)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (7, 2 * block_bytes), np.uint8)
    tensor = QuantizedTensor((7, 2 * block), gguf.GGMLQuantizationType(kind), data)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(np.asarray(tensor.read(), np.float32), expected)


def test_a_split_model_is_loaded_from_its_first_file(tmp_path):
    write_gguf(GOLDEN / "qwen3", tmp_path / "model.gguf", split_max_tensors=5)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    expected = formats.load_model(GOLDEN / "qwen3", "float32")
    assert_equal_parameters(formats.load_model(files[0]), expected)
    with pytest.raises(ValueError, match=r"is not the first of \d+ files; pass model-00001-of-"):
        formats.load_model(files[1])
    links = tmp_path / "links"
    links.mkdir()
    for name in ("model.gguf", "latest", files[0].name):  # the other parts are next to the target
        (links / name).symlink_to(files[0])
        assert formats.load_config(links / name) == formats.load_config(files[0])
    files[-1].unlink()
    with pytest.raises(FileNotFoundError, match=files[-1].name):
        formats.load_model(files[0])


@pytest.fixture(scope="module")
def small_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*map(chr, range(33, 96)), "AB"],
        "tokenizer.ggml.merges": ["A B"],
    }
    write_gguf(GOLDEN / "llama31", path, Q8_0, metadata=metadata)
    assert formats.load_tokenizer(path).encode("AB") == [63]
    return path


HEADER = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0)


def entry(shape, kind=0, offset=0, name=b"x"):
    return struct.pack(f"<Q{len(name)}sI{len(shape)}QIQ", len(name), name, len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (b"GGUF\x01\0\0\0" + bytes(40), "version 1 is not supported"),
        (b"GGUF\0\0\0\x03" + bytes(40), "version 50331648 is not supported"),
        (b"GGUF\x03\0\0\0", "it ends too early"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0), "more than the file can hold"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 2**60), "more than the file can hold"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**62) + bytes(40), "more than the file can hold"),
        (HEADER + entry([2**40, 2**20]), "exceeds the end of the file"),
        (HEADER + entry([8], offset=2**63), "exceeds the end of the file"),
        (HEADER + entry([0]), "shape .0."),
        (HEADER + entry([33], kind=8) + bytes(64), "blocks of 32"),
        (HEADER + entry([32], kind=999) + bytes(64), "unknown type 999"),
        (HEADER + entry([1] * 5), "5 dimensions"),
        (HEADER + entry([1], name=b"\xff"), "utf-8"),
    ],
)
def test_damaged_files_are_refused(content, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        formats.load_model(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("cases", [100, pytest.param(300, marks=pytest.mark.heavy)])
def test_damaged_models_are_loaded_or_refused_soon(small_file, cases):
    content, rng, num_refused = small_file.read_bytes(), random.Random(cases), 0
    header, path = len(content) // 2, small_file.with_name("damaged.gguf")
    for _ in range(cases):
        end = header if rng.random() < 0.7 else len(content)
        path.write_bytes(damage_bytes(content[:end], rng)[0] + content[end:])
        try:
            with time_limit(), memory_limit(1500):
                model, tokenizer = formats.load_model(path), formats.load_tokenizer(path)
                assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(model))
                tokenizer.decode(tokenizer.encode("AB"))
        except ValueError as error:
            assert path.name in str(error) and len(str(error)) < 20_000
            num_refused += 1
    assert num_refused >= cases / 4


YARN = {
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "mamba"}, "general.architecture='mamba' is not supported; supported: arcee, "),
        ({"llama.embedding_length": 0}, "hidden_size=0 must be an integer from 1"),
        ({"llama.block_count": 2**31}, "num_hidden_layers=2147483648 must be an integer from 1"),
        ({"llama.attention.value_length": 4}, "value_length must equal llama.attention.key_length=8"),
        ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs between layers"),
        ({"llama.rope.scaling.type": "odd"}, "rope_type='odd' is not supported"),
        ({"tokenizer.ggml.tokens": ["a"]}, "token_embd.weight has 64 rows, but tokenizer.ggml.tokens has 1 tokens"),
        (
            {"llama.attention.causal": False, "llama.embedding_scale": 2.0},
            "not supported: llama.attention.causal=False, llama.embedding_scale=2.0",
        ),
        ({"llama.attention.sliding_window": 8}, "not supported: llama.attention.sliding_window=8"),
        ({"llama.attention.sliding_window_pattern": [True, True]}, "llama.attention.sliding_window_pattern=True"),
        ({"llama.rope.freq_base_swa": 5e5}, "llama.rope.freq_base_swa=500000.0"),
        ({"llama.key_of_next_year": 1}, "llama.key_of_next_year=1"),
        (YARN | {"llama.rope.scaling.yarn_beta_fast": 4.0}, "llama.rope.scaling.yarn_beta_fast=4.0"),
        (YARN | {"llama.rope.scaling.yarn_attn_factor": 2.0}, "yarn_attn_factor=2.0 .* supported: YaRN's 1.13863"),
        ({"llama.rope.scaling.attn_factor": 2.0}, "attn_factor=2.0 is not supported with rope_type='none'"),
    ],
)
def test_metadata_that_no_model_has_is_refused(metadata, message, tmp_path):
    write_gguf(GOLDEN / "llama2", tmp_path / "model.gguf", metadata=metadata)
    with pytest.raises(ValueError, match=message) as error:
        formats.load_config(tmp_path / "model.gguf")
    assert "model.gguf" in str(error.value)


def load_config(family, path, metadata, missing=()):
    """Returns the configuration of a file of a family with additional and without some metadata."""
    write_gguf(GOLDEN / family, path, metadata=metadata)
    file = gguf_file.read_gguf(path)
    metadata = {key: value for key, value in file.metadata.items() if key not in missing}
    return gguf_checkpoint.load_config(dataclasses.replace(file, metadata=metadata))


def test_metadata_that_changes_nothing_is_accepted(tmp_path):
    harmless = {
        "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.layer_norm_epsilon": 1e-5,
        "attention.sliding_window": 0, "embedding_scale": 1.0, "expert_count": 0, "expert_used_count": 0,
        "rope.freq_base_swa": 10000.0, "rope.scaling.finetuned": False, "rope.scaling.type": "none",
        "tensor_data_layout": "Meta AI original pth", "vocab_size": 64,
    }  # fmt: skip
    metadata = {f"llama.{key}": value for key, value in harmless.items()} | {"general.key_of_next_year": 1}
    assert load_config("llama2", tmp_path / "a.gguf", metadata) == load_config("llama2", tmp_path / "b.gguf", {})


def test_older_and_rare_keys_have_the_meaning_of_llama_cpp(tmp_path):
    path = tmp_path / "model.gguf"
    assert load_config("llama2", path, {"llama.rope.scale_linear": 4.0}).rotary(0).frequencies[0] == 0.25
    assert load_config("llama2", path, {"llama.rope.scaling.factor": 2.0}).rotary(0).frequencies[0] == 0.5
    factors = {"llama.rope.scaling.attn_factor": 2.0, "llama.rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1}
    yarn = load_config("llama2", path, YARN | factors)
    assert yarn.rotary(0).factor == pytest.approx(2 * (0.1 * math.log(4) + 1)) and yarn.max_length == 256
    assert load_config("gemma3", path, {"gemma3.attention.sliding_window_pattern": 1}).attention.windows == ()
    assert load_config("gemma3", path, {"gemma3.attention.sliding_window_pattern": 0}).attention.windows == (8, 8)
    assert load_config("gemma2", path, {}, ["gemma2.attention.sliding_window"]).attention.windows == (4096, None)
    assert load_config("phi3", path, {"phi3.attention.sliding_window": 0}).attention.windows == ()
