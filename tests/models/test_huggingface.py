"""Directories in Hugging Face's format: round trips, defaults, refusals and damage."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from kvjax_models.formats import huggingface
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from kvjax_models.model.rotary import RopeScaling
from tests.models.support import assert_equal_parameters

SMALL = LlamaConfig(
    vocab_size=24, width=16, mlp_width=20, layers=2, query_heads=4, kv_heads=2, head_dim=4, max_length=64
)
GEMMA = {"norm_offset": 1.0, "embedding_scale": None, "activation": "gelu_tanh"}
EXPERTS = {"experts": 6, "experts_per_token": 2, "expert_width": 20}
JOINT_NORM = {"query_key_norm": True, "joint_query_key_norm": True}
LONGROPE = RopeScaling(
    "longrope", 2.0, original_length=32, attention_factor=1.1, short_factors=(1.0,) * 3, long_factors=(2.0,) * 3
)
YARN = RopeScaling("yarn", 4.0, original_length=16)
CONFIGS = {
    "llama": {},
    "llama-tied-biases": {"tied_embeddings": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True},
    "llama-llama3": {"rope_theta": 5e5, "rope_scaling": RopeScaling("llama3", 8.0, original_length=16)},
    "llama-linear": {"rope_scaling": RopeScaling("linear", 2.5)},
    "mistral": {"windows": (8, 8)},
    "qwen2": {"qkv_bias": True, "norm_epsilon": 1e-6},
    "qwen2-window": {"qkv_bias": True, "windows": (None, 8), "tied_embeddings": True},
    "qwen3": {"query_key_norm": True, "head_dim": 8},
    "qwen3-window": {"query_key_norm": True, "qkv_bias": True, "output_bias": True, "windows": (8, None)},
    "ministral": {"windows": (None, 8)},
    "gemma": GEMMA | {"tied_embeddings": True},
    "gemma2": GEMMA | {"norms": "sandwich", "attention_logit_cap": 50.0, "logit_cap": 30.0,
                       "attention_scale": 24**-0.5, "windows": (8, None)},
    "gemma3_text": GEMMA | {"norms": "sandwich", "query_key_norm": True, "windows": (8, None),
                            "window_rope_theta": 100.0, "rope_scaling": RopeScaling("linear", 8.0)},
    "qwen3_moe": EXPERTS | {"query_key_norm": True, "expert_width": 10, "normalize_expert_weights": False,
                            "dense_layers": (1,)},
    "mixtral": EXPERTS,
    "gpt_oss": EXPERTS | {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "attention_sinks": True,
                          "activation": "clipped_swiglu", "windows": (8, None),
                          "rope_scaling": dataclasses.replace(YARN, truncate=False, attention_factor=1.2)},
    "glm": {"head_dim": 8, "rotary_dim": 4, "qkv_bias": True},
    "glm4": {"head_dim": 8, "rotary_dim": 4, "norms": "sandwich"},
    "phi3": {"head_dim": 8, "rotary_dim": 6, "windows": (8, 8), "rope_scaling": LONGROPE},
    "olmo2": JOINT_NORM | {"norms": "post"},
    "olmo3": JOINT_NORM | {"norms": "post", "windows": (8, None), "rope_scaling": YARN, "window_rope_theta": 10000.0},
    "smollm3": {"nope_layers": (1,), "mlp_bias": True},
    "granite": {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_divisor": 8.0, "attention_scale": 0.0625},
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24, "hidden_size": 16,
    "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 3}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


def random_model(config, dtype=jnp.float32):
    """A model whose parameters, including biases and norms, are random."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)
    return nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape), dtype), state))


def read_config(directory, values):
    (directory / "config.json").write_text(json.dumps(values))
    return huggingface.load_config(directory)


def small_model(**changes):
    return random_model(dataclasses.replace(SMALL, **changes))


def read_tensors(path):
    return safetensors.numpy.load_file(path)


def rewrite(directory, change):
    """Changes the tensors of a single-file checkpoint."""
    path = directory / "model.safetensors"
    tensors = dict(read_tensors(path))
    change(tensors)
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path):
    huggingface.save_model(tmp_path, small_model())
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name, tmp_path):
    original = small_model(**CONFIGS[name])
    huggingface.save_model(tmp_path, original)
    loaded = huggingface.load_model(tmp_path)
    assert loaded.config == original.config
    assert_equal_parameters(loaded, original)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name.partition("-")[0]


def test_linear_weights_have_the_layout_of_transformers(saved):
    original, tensors = small_model(), read_tensors(saved / "model.safetensors")
    gate = tensors["model.layers.1.mlp.gate_proj.weight"]
    assert gate.shape == (SMALL.mlp_width, SMALL.width)
    np.testing.assert_array_equal(gate.T, original.layers[1].mlp.gate_up.kernel[:, 0])
    np.testing.assert_array_equal(tensors["model.embed_tokens.weight"], original.embedding.embedding[...])
    assert len(tensors) == 3 + 2 * 9


def test_saves_and_loads_bfloat16(tmp_path):
    original = random_model(SMALL, jnp.bfloat16)
    huggingface.save_model(tmp_path, original)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_equal_parameters(huggingface.load_model(tmp_path), original)
    float32 = huggingface.load_model(tmp_path, jnp.float32)
    assert float32.norm.scale[...].dtype == jnp.float32
    np.testing.assert_array_equal(float32.norm.scale[...], original.norm.scale[...].astype(jnp.float32))


def test_saves_in_another_dtype(tmp_path):
    huggingface.save_model(tmp_path, small_model(), jnp.float16)
    assert {tensor.dtype for tensor in read_tensors(tmp_path / "model.safetensors").values()} == {np.dtype("float16")}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "float16"


def test_sharded_and_single_files_replace_each_other(tmp_path):
    original = small_model()
    huggingface.save_model(tmp_path, small_model(layers=1))
    huggingface.save_model(tmp_path, original, max_shard_bytes=4000)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    assert all(sum(tensor.nbytes for tensor in read_tensors(shard).values()) <= 4000 for shard in shards)
    assert_equal_parameters(huggingface.load_model(tmp_path), original)
    huggingface.save_model(tmp_path, original)
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["config.json", "model.safetensors"]
    assert_equal_parameters(huggingface.load_model(tmp_path), original)


def test_a_tensor_larger_than_a_shard_gets_its_own_file(tmp_path):
    huggingface.save_model(tmp_path, small_model(), max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3 + 2 * 9
    assert_equal_parameters(huggingface.load_model(tmp_path), small_model())


def test_a_failed_save_keeps_the_old_checkpoint(saved):
    broken = small_model()
    broken.norm.scale[...] = broken.norm.scale[...].at[0].set(jnp.nan)
    for limit in (huggingface.MAX_SHARD_BYTES, 4000):
        with pytest.raises(ValueError, match=r"model\.norm\.weight has values that are not finite as float32"):
            huggingface.save_model(saved, broken, max_shard_bytes=limit)
    assert sorted(path.name for path in saved.glob("[!.]*")) == ["config.json", "model.safetensors"]
    assert_equal_parameters(huggingface.load_model(saved), small_model())


@pytest.mark.parametrize("eos", [None, 3, (3, 4)])
def test_saves_special_tokens(tmp_path, eos):
    huggingface.save_model(tmp_path, small_model(), bos_token_id=1, eos_token_id=eos)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["bos_token_id"] == 1
    assert values["eos_token_id"] == (list(eos) if isinstance(eos, tuple) else eos)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_key_norm": True, "mlp_bias": True},
        {"output_bias": True},
        {"windows": (4, 8)},
        {"query_key_norm": True, "windows": (4, 8)},
    ],
)
def test_configurations_without_a_family_are_not_saved(tmp_path, changes):
    with pytest.raises(ValueError, match="cannot be expressed by any Hugging Face family"):
        huggingface.save_model(tmp_path / "new", small_model(**changes))
    assert not (tmp_path / "new").exists()


def test_configs_of_transformers_4_and_5_are_equivalent(tmp_path):
    rope = LLAMA3_ROPE | {"original_max_position_embeddings": 32}
    four = LLAMA | {"rope_theta": 500000, "rope_scaling": rope, "torch_dtype": "bfloat16", "head_dim": None}
    five = LLAMA | {"rope_parameters": rope | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 32)
    for values in (four, five, four | {"rope_scaling": {"type": "llama3", **rope}}):
        config = read_config(tmp_path, values)
        assert (config.rope_theta, config.rope_scaling, config.head_dim) == (5e5, expected, 4)


def test_defaults_of_transformers(tmp_path):
    bare = {key: value for key, value in LLAMA.items() if key not in (
        "architectures", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")}  # fmt: skip
    config = read_config(tmp_path, bare)
    assert (config.kv_heads, config.max_length, config.norm_epsilon) == (4, 2048, 1e-6)
    assert (config.rope_theta, config.rope_scaling, config.tied_embeddings) == (10000.0, None, False)
    assert read_config(tmp_path, MISTRAL).windows == (4096, 4096)
    assert read_config(tmp_path, LLAMA | {"model_type": "qwen3", "architectures": None}).head_dim == 128
    original_length = read_config(tmp_path, LLAMA | {"rope_scaling": LLAMA3_ROPE}).rope_scaling.original_length
    assert original_length == LLAMA["max_position_embeddings"]


@pytest.mark.parametrize(
    "values, windows",
    [
        (MISTRAL | {"sliding_window": None}, ()),
        (MISTRAL | {"sliding_window": 8}, (8, 8)),
        (LLAMA | {"sliding_window": 8}, ()),
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 1}, ()),
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 1, "use_sliding_window": True}, (None, 8, 8)),
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 3, "use_sliding_window": True}, ()),
        (QWEN2 | WINDOW | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}, (8, None, None)),
    ],
)
def test_layers_with_a_window(tmp_path, values, windows):
    assert read_config(tmp_path, values).windows == windows


def test_incomplete_directories_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        huggingface.load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        huggingface.load_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must contain a JSON object, got list"):
        huggingface.load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
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


def test_all_non_finite_tensors_are_named(saved):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = np.nan
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.inf

    rewrite(saved, spoil)
    with pytest.raises(ValueError, match=r"not finite as float32 in model\.layers\.0\.mlp\.up_proj.*model\.norm"):
        huggingface.load_model(saved)


@pytest.mark.filterwarnings("error")
def test_overflow_in_the_requested_dtype_is_an_error(saved):
    rewrite(saved, lambda tensors: tensors["model.norm.weight"].fill(1e6))
    huggingface.load_model(saved)
    with pytest.raises(ValueError, match=r"not finite as float16 in model\.norm\.weight"):
        huggingface.load_model(saved, jnp.float16)
    with pytest.raises(ValueError, match=r"model\.norm\.weight has values that are not finite as float16"):
        huggingface.save_model(saved / "half", huggingface.load_model(saved), jnp.float16)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(saved, kept):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or not a safetensors file"):
        huggingface.load_model(saved)


def test_broken_shards(tmp_path):
    huggingface.save_model(tmp_path, small_model(), max_shard_bytes=4000)
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


def test_rotary_buffers_of_old_versions_are_ignored(saved):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    rewrite(saved, lambda tensors: tensors.update(buffer))
    assert_equal_parameters(huggingface.load_model(saved), small_model())


@pytest.mark.parametrize("held", ["embedding", "both", "head"])
def test_tied_embeddings_under_either_name(tmp_path, held):
    original = small_model(tied_embeddings=True)
    huggingface.save_model(tmp_path, original)

    def hold(tensors):
        assert "lm_head.weight" not in tensors
        if held != "embedding":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        if held == "head":
            del tensors["model.embed_tokens.weight"]

    rewrite(tmp_path, hold)
    assert_equal_parameters(huggingface.load_model(tmp_path), original)


def test_different_tied_embeddings_are_refused(tmp_path):
    huggingface.save_model(tmp_path, small_model(tied_embeddings=True))
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
