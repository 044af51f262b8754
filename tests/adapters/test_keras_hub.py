"""keras-hub's models with compressed caches, against keras-hub's own cache and against kvjax's own model."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
import pytest

import kvjax
from kvjax_models.formats import huggingface
from kvjax_models.model.config import NormConfig
from kvjax_models.runner.generator import Generator
from tests.adapters.policies import KVGRAD, KVZAP, KVZIP, POLICIES, run_page
from tests.models import tiny
from tests.models.loops import decode_all

keras_hub = pytest.importorskip("keras_hub")
keras = pytest.importorskip("keras")

from kvjax_models.adapters import keras_hub as adapter  # noqa: E402

MAX_LENGTH, PROMPT_TOKENS = 64, 20
VOCAB = 98
_HEADS = {"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 32}
SIZES = {"vocabulary_size": VOCAB, "intermediate_dim": 48, **_HEADS}
_GEMMA = {"head_dim": 16, "use_post_ffw_norm": True, "use_post_attention_norm": True, "sliding_window_size": 8}
_LLAMA31 = {
    "rope_frequency_adjustment_factor": 8.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 4.0,
    "rope_pretraining_sequence_length": 16,
}
FAMILIES = {
    "Llama": {},
    "Llama3": _LLAMA31,
    "Mistral": {"sliding_window": 8},
    "Qwen": {"use_sliding_window_attention": True, "sliding_window_size": 8},
    "Qwen3": {"head_dim": 16, "sliding_window_size": None},
    "Gemma": {"head_dim": 16},
    "Gemma2": _GEMMA
    | {"use_sliding_window_attention": True, "attention_logit_soft_cap": 6.0, "final_logit_soft_cap": 12.0},
    "Gemma3": _GEMMA | {"num_layers": 7, "use_query_key_norm": True, "use_sliding_window_attention": True},
}


def attach(backbone, family, sampler="greedy"):
    """Returns the `CausalLM` of a backbone, without a tokenizer."""
    name = {"Gemma2": "Gemma"}.get(family, family)
    causal_lm = getattr(keras_hub.models, f"{name}CausalLM")(backbone=backbone, preprocessor=None)
    causal_lm.compile(sampler=sampler)
    return causal_lm


def make_random_model(family):
    """Returns a model of a family whose tokens depend on attention."""
    sizes = SIZES | FAMILIES[family]
    if family == "Gemma3":
        sizes |= {"image_size": None, "vision_encoder": None}
    backbone_class = getattr(keras_hub.models, f"{ {'Gemma2': 'Gemma'}.get(family, family) }Backbone")
    backbone, rng = backbone_class(**sizes), np.random.default_rng(0)
    scale = 1.0 if "Gemma" in family else 0.3
    backbone.set_weights(
        [rng.normal(size=x.shape) * (scale / (1 if scale < 1 else x.shape[0] ** 0.5)) if x.ndim > 1 else x
         for x in backbone.get_weights()]
    )  # fmt: skip
    return attach(backbone, family)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny checkpoint of the Llama family in keras-hub and in kvjax_models."""
    directory = tiny.write(tmp_path_factory.mktemp("checkpoint"), width=64, norms=NormConfig(epsilon=1e-6))
    model = attach(keras_hub.models.Backbone.from_preset(str(directory)), "Llama3")
    return model, huggingface.load_model(directory), directory


def make_inputs(lengths, max_length=MAX_LENGTH, seed=0):
    """Returns random prompts, padded to the maximum length."""
    tokens = np.random.default_rng(seed).integers(3, VOCAB - 4, (len(lengths), max_length)).astype(np.int32)
    mask = np.arange(max_length) < np.array(lengths)[:, None]
    return {"token_ids": np.where(mask, tokens, 0), "padding_mask": mask}


def generate(causal_lm, inputs, stop_token_ids=None):
    return np.asarray(causal_lm.make_generate_function()(dict(inputs), stop_token_ids=stop_token_ids)["token_ids"])


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_equals_the_cache_of_keras_hub(family):
    model, inputs = make_random_model(family), make_inputs([PROMPT_TOKENS, 13, 1])
    expected = generate(model, inputs)
    assert adapter.compress(model, kvjax.Exact(compact_every=8)) is model
    np.testing.assert_array_equal(generate(model, inputs), expected)
    assert len(np.unique(expected[:, PROMPT_TOKENS:])) > 5
    caches = adapter.init_caches(model, 3, PROMPT_TOKENS, MAX_LENGTH)
    windows = [type(cache.policy) is kvjax.SlidingWindow for cache, _ in caches]
    expected_windows = {"Mistral": [True] * 2, "Gemma2": [True, False], "Gemma3": [True] * 5 + [False, True]}
    assert windows == expected_windows.get(family, [False] * 2)
    adapter.restore(model)
    np.testing.assert_array_equal(generate(model, inputs), expected)


SUPPORTED = POLICIES | {"kvzip": KVZIP}


@pytest.mark.parametrize("policy", SUPPORTED)
def test_every_policy_equals_the_model_of_kvjax(policy, models):
    (model, own_model, _), inputs = models, make_inputs([PROMPT_TOKENS] * 2)
    adapter.compress(model, SUPPORTED[policy])
    tokens = generate(model, inputs)
    spec = adapter.init_caches(model, 2, PROMPT_TOKENS, MAX_LENGTH)[0][0].spec
    sizes = {"max_prompt_tokens": spec.max_prompt_tokens, "max_new_tokens": spec.max_new_tokens}
    generator = Generator(own_model, SUPPORTED[policy], batch=2, **sizes)
    prompts = inputs["token_ids"][:, :PROMPT_TOKENS].tolist()
    rows, _ = decode_all(generator, generator.prefill(generator.init_state(), prompts), MAX_LENGTH - PROMPT_TOKENS)
    assert tokens[:, PROMPT_TOKENS:].tolist() == rows


@pytest.mark.parametrize("sampler", ["beam", "contrastive", "top_k"])
def test_samplers(sampler, models):
    backbone, inputs = models[0].backbone, make_inputs([PROMPT_TOKENS, 13])

    def make_model():
        name = keras_hub.samplers.TopKSampler(3, seed=7) if sampler == "top_k" else sampler
        return attach(backbone, "Llama3", name)

    expected = generate(make_model(), inputs)
    tokens = generate(adapter.compress(make_model(), kvjax.Exact(compact_every=8)), inputs)
    np.testing.assert_array_equal(tokens, expected)
    compressed = generate(adapter.compress(make_model(), POLICIES["balancekv"]), inputs)
    assert compressed.shape == expected.shape and (compressed != expected).any()


def test_stop_tokens_and_compiled_programs(models):
    model, inputs = attach(models[0].backbone, "Llama3"), make_inputs([PROMPT_TOKENS])
    new_tokens = generate(model, inputs)[0, PROMPT_TOKENS:]
    stop = int(new_tokens[6])
    outputs = [model.generate(dict(inputs), stop_token_ids=[stop])]
    adapter.compress(model, kvjax.Exact(compact_every=8))
    outputs.append(model.generate(dict(inputs), stop_token_ids=[stop]))
    for name in ("token_ids", "padding_mask"):
        np.testing.assert_array_equal(*(output[name] for output in outputs))
    assert outputs[0]["padding_mask"].sum() < MAX_LENGTH
    program = model.generate_function.args[0]
    model.generate(make_inputs([PROMPT_TOKENS - 2]), stop_token_ids=[stop])
    assert program._cache_size() == 1
    model.generate(make_inputs([PROMPT_TOKENS + 20]), stop_token_ids=[stop])
    assert program._cache_size() == 2


def test_memory_falls_to_the_budget(models):
    model = attach(models[0].backbone, "Llama3")
    sizes = {"batch": 1, "prompt_tokens": 4000, "max_length": 4096}
    full = kvjax.cache_bytes(adapter.init_caches(adapter.compress(model, "exact"), **sizes)).device
    quarter = kvjax.cache_bytes(adapter.init_caches(adapter.compress(model, "subgen_mean", "25%"), **sizes)).device
    own_bytes = 2 * 2 * 2 * 16 * 4 * 4096  # layers, keys and values, KV heads, dimensions, float32
    assert own_bytes <= full < 1.15 * own_bytes  # prompts of 3585 to 4096 tokens share caches
    assert 0.1 * own_bytes < quarter <= 0.125 * own_bytes + 2**12  # shares refer to bfloat16
    quantized = adapter.compress(model, "exact", kv_dtype="int8")
    assert kvjax.cache_bytes(adapter.init_caches(quantized, **sizes)).device < 0.35 * own_bytes


def test_unsupported_models_and_inputs_are_refused(models):
    gpt = keras_hub.models.GPT2Backbone(VOCAB, num_layers=1, num_heads=2, hidden_dim=8, intermediate_dim=8)
    other = keras_hub.models.GPT2CausalLM(backbone=gpt, preprocessor=None)
    model = attach(models[0].backbone, "Llama3")
    compressed = adapter.compress(attach(models[0].backbone, "Llama3"), "exact")
    padded_first = {"token_ids": np.ones((1, 8), np.int32), "padding_mask": np.arange(8)[None] > 3}
    backbone = keras_hub.models.Backbone.from_preset(str(models[2]))
    value = backbone.transformer_layers[1]._self_attention_layer._value_dense
    value.set_weights([np.full_like(weight, np.nan) for weight in value.get_weights()])
    faulty = adapter.compress(attach(backbone, "Llama3"), "exact")
    kvzap, kvgrad = (adapter.compress(attach(models[0].backbone, "Llama3"), policy) for policy in (KVZAP, KVGRAD))
    for call, message in (
        (lambda: generate(kvzap, make_inputs([PROMPT_TOKENS])), "KVzap needs predicted scores"),
        (lambda: generate(kvgrad, make_inputs([PROMPT_TOKENS])), "KVgrad weighs a repetition of the prompt"),
        (lambda: adapter.compress(other, "exact"), r"GPT2CausalLM has attention layers .* not supported; .*: Llama"),
        (lambda: adapter.compress(model, "snapkv"), "policy snapkv needs a budget"),
        (lambda: adapter.init_caches(model, 1, 8, 16), "the model is not compressed"),
        (lambda: generate(compressed, padded_first), "padding must follow them"),
        (lambda: generate(faulty, make_inputs([PROMPT_TOKENS])), r"caches of rows \[0\] have NaN or infinite entries"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_page(models, monkeypatch):
    model = attach(models[0].backbone, "Llama3")
    monkeypatch.setattr(keras_hub.models.CausalLM, "from_preset", lambda name: model)
    generated = []
    monkeypatch.setattr(type(model), "generate", lambda self, text, **options: generated.append((text, options)))
    run_page("keras_hub")
    assert generated == [("Once upon a time", {"max_length": 4096})]
    assert "make_generate_function" in vars(model)
