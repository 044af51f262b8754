"""Accepted and refused values of config.json; test_parity compares their meaning with transformers."""

import contextlib
import json
import math

import pytest

from kvjax_models.formats.config_json import parse_config
from kvjax_models.model.rotary import RopeScaling
from tests.models.support import GOLDEN

INVALID_VALUES = [
    None, -1, 0, 1e999, float("nan"), "8", "false", "", [], {}, [None], True, False, 10**12, 1.5, {"a": {"b": [1]}},
]  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
QWEN2 = LLAMA | {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
GEMMA3_HUB = {  # like a published config, which leaves most values to defaults
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "vision_config": {"hidden_size": 1152},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    },
}  # fmt: skip


LFM2_HUB = {  # like the published config of the model of 1.2B parameters
    "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 2048,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-05,
    "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "tie_embedding": True, "use_pos_enc": True, "vocab_size": 65536,
}  # fmt: skip
GEMMA4 = LLAMA | {
    "model_type": "gemma4_text", "num_hidden_layers": 7, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0, "sliding_window": 8,
}  # fmt: skip
GEMMA4_EXPERTS = GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}


@pytest.mark.parametrize("key", [*sorted(set(LLAMA) - {"model_type"}), "head_dim"])
@pytest.mark.parametrize("value", [0, -1, -16, "16", 16.0, True, [16], {}, 10**12])
def test_sizes_must_be_positive_integers(key, value):
    with pytest.raises(ValueError, match=f"^{key}="):
        parse_config(LLAMA | {key: value})


def test_missing_keys_are_listed():
    with pytest.raises(ValueError, match="missing keys: hidden_size, intermediate_size, num_hidden"):
        parse_config({"model_type": "llama", "vocab_size": 8})
    with pytest.raises(ValueError, match="missing keys: vocab_size"):
        parse_config(LLAMA | {"vocab_size": None})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_position_embeddings": None}, "max_position_embeddings=None"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps=inf must be a positive number"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None"),
        ({"rope_theta": 0}, "rope_theta=0 must be a positive number"),
        ({"rope_parameters": "default"}, "rope_parameters='default' must be an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor=True"),
        ({"rope_scaling": YARN | {"beta_fast": 1.0, "beta_slow": 2.0}},
         "beta_slow=2.0 must be less than beta_fast=1.0"),
        ({"rope_scaling": YARN | {"attention_factor": 0.0}}, "attention_factor=0.0"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "truncate='no' must be true or false"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}},
         "short_factor must be a list of 2 numbers.*got a list of 1"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 0], "long_factor": [1.0, 2.0]}},
         "short_factor=0"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}},
         "low_freq_factor=4.0 must be less than high_freq_factor=1.0"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings='false' must be true or false"),
        ({"hidden_size": 18}, "hidden_size=18 must be a multiple of num_attention_heads=4, or set head_dim"),
        ({"model_type": "mistral", "sliding_window": True}, "sliding_window=True must be an integer"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1"),
        ({"model_type": "qwen2", "layer_types": "full_attention"}, "layer_types='full_attention' must be a list"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "not supported: attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text",
          "rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
         "is not supported for sliding attention; supported: 'default'"),
        ({"model_type": "glm", "partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries, but num_hidden_layers=2"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 2]}, "no_rope_layers must be a list of ones and zeros, got 2"),
        ({"model_type": "granite", "embedding_multiplier": None}, "embedding_multiplier=None"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts=0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [2]}, r"mlp_only_layers=\[2\] must be a list of layer numbers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit=5.0"),
        ({"model_type": "glm4_moe", "scoring_func": "softmax"}, "scoring_func='softmax'; supported: 'sigmoid', 'noaux"),
        ({"model_type": "glm4_moe", "n_shared_experts": -1}, "n_shared_experts=-1"),
        ({"model_type": "dots1", "num_experts_per_tok": 2}, "n_routed_experts=None must be an integer"),
        ({"model_type": "glm4_moe", "moe_layer_freq": 2}, "moe_layer_freq=2; supported: 1"),
        ({"model_type": "minimax_m2", "shared_intermediate_size": 64}, "shared_intermediate_size=64; supported: 0"),
        ({"model_type": "minimax_m2", "attn_type_list": [0, 1]}, r"attn_type_list=\[0, 1\]; supported: 1 in every"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"model_type": "gemma3"}, "text_config=None must be an object"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512},
         "'deepseek_v3' with kv_lora_rank=512 is not supported: .* latents instead of keys and values"),
        ({"model_type": "mamba"}, "model_type='mamba' is not supported; supported: llama, mistral"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification.*for llama"),
        ({"rope_scaling": {"type": "xpos", "factor": 4.0}}, "rope_type='xpos' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' requires factor"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope' requires short_factor"),
        ({"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"]}, "types=.*for mistral"),
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 2}, "layer_types=.*chunked_attention"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 2}, "sliding_window=None must be"),
        ({"model_type": "qwen2", "layer_types": ["sliding_attention"], "use_sliding_window": True},
         "layer_types has 1 entries"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 8}, "not supported: use_sliding_window=True"),
        ({"embedding_multiplier": 12.0, "is_causal": False}, "embedding_multiplier=12.0, is_causal=False"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "per_layer_config="),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern=0 must be an integer"),
        ({"model_type": "gemma", "hidden_act": "silu"}, "hidden_act='silu'; supported: 'gelu', 'gelu_pytorch_tanh'"),
        ({"model_type": "gpt_oss", "experts_per_token": 2}, "not supported: experts_per_token=2"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha=1.0"),
        ({"model_type": "gemma3_text",
          "rope_parameters": {"full_attention": {}, "sliding_attention": {"partial_rotary_factor": 0.5}}},
         "partial_rotary_factor=0.5 is not supported for gemma3_text"),
        ({"rope_scaling": YARN | {"alpha": 2.0, "attn_factor": 0.5}}, "alpha=2.0, attn_factor=0.5 is not supported"),
        (LFM2_HUB | {"full_attn_idxs": 3}, "full_attn_idxs=3 must be a list"),
        (LFM2_HUB | {"conv_L_cache": 1}, "conv_L_cache=1 must be an integer from 2"),
        (LFM2_HUB | {"layer_types": ["linear_attention"] * 16},
         "linear_attention.* supported: full_attention, conv"),
        (GEMMA4 | {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (GEMMA4 | {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4_EXPERTS, "moe_intermediate_size=None must be"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused_by_key(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_config(LLAMA | changes)


def test_defaults_of_transformers():
    config = parse_config(
        {key: LLAMA[key] for key in LLAMA.keys() - {"num_key_value_heads", "max_position_embeddings"}}
    )
    assert (config.kv_heads, config.max_length, config.norms.epsilon) == (4, 2048, 1e-6)
    assert (config.rope.theta, config.rope.scaling, config.tied_embeddings) == (10000.0, None, False)
    assert parse_config(LLAMA | {"model_type": "mistral"}).attention.windows == (4096, 4096)
    assert parse_config(LLAMA | {"model_type": "qwen3"}).head_dim == 128
    assert parse_config(LLAMA | {"rms_norm_eps": 1e-5}).norms.epsilon == 1e-5
    rope = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    original_length = parse_config(LLAMA | {"rope_scaling": rope}).rope.scaling.original_length
    assert original_length == LLAMA["max_position_embeddings"]


@pytest.mark.parametrize(
    "values, windows",
    [
        (LLAMA | {"sliding_window": 8}, ()),
        (QWEN2 | {"max_window_layers": 1}, ()),
        (QWEN2 | {"max_window_layers": 1, "use_sliding_window": True}, (None, 8, 8)),
        (QWEN2 | {"max_window_layers": 3, "use_sliding_window": True}, ()),
    ],
)
def test_layers_with_a_window(values, windows):
    """Other families and settings are compared with transformers in test_parity."""
    assert parse_config(values).attention.windows == windows


def test_harmless_keys_are_accepted():
    """Keys of published files, and those that transformers and training libraries add."""
    harmless = {
        "_attn_implementation_autoset": True, "_name_or_path": "x", "attention_dropout": 0.1, "attn_pdrop": 0.1,
        "clip_qkv": None, "embedding_multiplier": 1.0, "full_attn_mod": 1, "initializer_range": 0.02,
        "interpolate_factor": 1, "is_causal": True, "layer_norm_eps": 1e-5, "layer_types": ["full_attention"] * 2,
        "max_window_layers": 2, "output_router_logits": True, "pretraining_tp": 2, "rope_interleaved": False,
        "router_aux_loss_coef": 0.9, "sliding_window": 8, "transformers.js_config": {"dtype": "q4"},
        "unsloth_version": "2025.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
    }  # fmt: skip
    assert parse_config(LLAMA | harmless) == parse_config(LLAMA)
    assert parse_config(LLAMA | {"rope_scaling": YARN | {"finetuned": True, "attn_factor": 1}}) == parse_config(
        LLAMA | {"rope_scaling": YARN}
    )
    for model_type, key, value in (
        ("gemma2", "sliding_window_size", 4096),
        ("gpt_oss", "experts_per_token", 4),
        ("gpt_oss", "num_experts", 128),
    ):
        values = LLAMA | {"model_type": model_type}
        assert parse_config(values | {key: value}) == parse_config(values)


def test_sliding_window_pattern_of_gemma3():
    values = LLAMA | {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8}
    assert parse_config(values).attention.windows == (8, 8, 8, 8, 8, None, 8)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        assert parse_config(values | {key: 2}).attention.windows == (8, None) * 3 + (8,)
    assert parse_config(values | {"sliding_window_pattern": 1, "_sliding_window_pattern": 6}).attention.windows == ()
    listed = {"sliding_window_pattern": 2, "layer_types": ["sliding_attention"] * 7}
    assert parse_config(values | listed).attention.windows == (8,) * 7


def test_published_keys_of_families_with_experts():
    glm = {"model_type": "glm4_moe", "n_group": 1, "n_routed_experts": 128, "num_nextn_predict_layers": 1}
    config = parse_config(LLAMA | glm | {"head_dim": 8, "use_qk_norm": True, "first_k_dense_replace": 3})
    assert config.experts.dense_layers == (0, 1) and config.experts.shared_width == 1408 and config.rope.rotary_dim == 4
    dots = {"model_type": "dots1", "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2}
    config = parse_config(LLAMA | dots | {"scoring_func": "noaux_tc", "moe_layer_freq": 1, "sliding_window": None})
    assert config.experts.scoring_func == "sigmoid" and config.experts.shared_width == 2 * 1408
    minimax = {
        "model_type": "minimax_m2", "attn_type_list": [1, 1], "rotary_dim": 64, "scoring_func": "sigmoid",
        "layernorm_full_attention_beta": 1.0, "mlp_intermediate_size": 8192, "num_mtp_modules": 3, "use_mtp": True,
        "qk_norm_type": "per_layer", "shared_moe_mode": "sigmoid", "use_qk_norm": True, "use_routing_bias": True,
    }  # fmt: skip
    assert parse_config(LLAMA | minimax).rope.rotary_dim == 64


def test_multimodal_gemma3_gives_its_text_decoder():
    config = parse_config(GEMMA3_HUB)
    assert (config.query_heads, config.kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262208)
    assert config.attention.windows == (1024,) * 5 + (None, 1024)
    assert config.rope.scaling == RopeScaling("linear", 8.0) and config.rope.window_theta == 1e4
    assert config.rotary(5).frequencies[0] == 1 / 8 and config.rotary(0).frequencies[0] == 1
    assert config.tied_embeddings and config.attention.scale is None


@pytest.mark.parametrize(
    "changes, width",
    [
        ({}, 8192),
        ({"block_ff_dim": 6656}, 4608),
        ({"block_ffn_dim_multiplier": 1.3}, 10752),
        ({"block_ffn_dim_multiplier": None, "block_ff_dim": 1000}, 666),
        ({"block_auto_adjust_ff_dim": False}, 12288),
        ({"block_ff_dim": None, "intermediate_size": 384}, 256),
    ],
)
def test_lfm2_adjusts_the_width_of_its_mlps(changes, width):
    config = parse_config(LFM2_HUB | changes)
    assert config.mlp_width == width and config.tied_embeddings and config.attention_layers == (2, 5, 8, 10, 12, 14)
    assert config.recurrence.sizes.channels == 2048 and config.recurrence.sizes.kernel_size == 3


def test_layers_of_gemma4_have_two_sizes_of_heads():
    config = parse_config(GEMMA4)
    assert config.attention.windows == (8,) * 5 + (None, None) and config.attention.keys_as_values
    assert [(config.of_layer(layer).kv_heads, config.of_layer(layer).head_dim) for layer in (0, 5)] == [(4, 8), (2, 16)]
    # A quarter of the pairs of a head of 16 is rotated.
    assert len(config.rotary(0).frequencies) == 4 and 0.0 not in config.rotary(0).frequencies
    assert [frequency > 0 for frequency in config.rotary(5).frequencies] == [True] * 2 + [False] * 6
    assert parse_config(GEMMA4_EXPERTS | {"moe_intermediate_size": 6}).experts.parallel


def test_yarn_extends_the_context_and_has_defaults():
    values = LLAMA | {"max_position_embeddings": 40}
    assert parse_config(values | {"rope_scaling": YARN}).max_length == 128
    assert parse_config(values | {"rope_scaling": YARN | {"factor": 1.1}}).max_length == 40
    assert parse_config(values | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}).max_length == 40
    scaling = parse_config(LLAMA | {"rope_scaling": YARN}).rope.scaling
    assert scaling.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    no_factor = {key: value for key, value in YARN.items() if key != "factor"}
    assert parse_config(LLAMA | {"rope_scaling": no_factor}).rope.scaling.factor == 2.0
    longrope = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]}
    for rope in (YARN, longrope):
        scaling = parse_config(LLAMA | {"rope_scaling": rope | {"attention_factor": 1.2}}).rope.scaling
        assert scaling.attention_factor == 1.2


def test_only_full_attention_layers_of_olmo3_are_scaled():
    values = {"model_type": "olmo3", "num_hidden_layers": 4, "rope_scaling": YARN, "sliding_window": 8}
    config = parse_config(LLAMA | values)
    assert config.attention.windows == (8, 8, 8, None)
    assert config.rotary(0).factor == 1 and config.rotary(3).factor > 1
    assert config.rotary(0).frequencies != config.rotary(3).frequencies


def test_smollm3_has_layers_without_rope():
    config = parse_config(LLAMA | {"model_type": "smollm3", "num_hidden_layers": 8})
    assert config.rope.nope_layers == (3, 7)
    assert set(config.rotary(3).frequencies) == {0.0} and 0.0 not in config.rotary(2).frequencies


def test_any_value_of_any_key_is_accepted_or_refused():
    """Replaces each key of every family's config.json, and each of its rotary embedding, by each invalid value."""
    for path in sorted(GOLDEN.glob("*/config.json")):
        values = json.loads(path.read_text())
        changed = [{**values, key: invalid} for key in [*values, "architectures"] for invalid in INVALID_VALUES]
        for name in ("rope_parameters", "rope_scaling"):
            rope = values.get(name) or {}
            changed += [{**values, name: {**rope, key: invalid}} for key in rope for invalid in INVALID_VALUES]
        for values in changed:
            with contextlib.suppress(ValueError):
                parse_config(values)
