"""The sampler of tunix with compressed caches, against its own cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from tests.adapters.policies import POLICIES, every_policy, run_page

pytest.importorskip("tunix")

from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3

from kvjax_models.adapters import tunix as adapter
from kvjax_models.model.config import LlamaConfig, RopeConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner.generator import Generator
from tests.models.loops import decode_all

VOCAB, PAD, BOS, EOS = 64, 0, 1, 63
CACHE_SIZE, NUM_NEW = 128, 24
# Without repeated tokens, whose keys have equal norms: policies that rank by norms would have ties.
PROMPTS = [
    np.random.default_rng(number).permutation(np.arange(2, 62))[: 25 - 9 * number].tolist() for number in range(2)
]


class CharacterTokenizer:
    """A tokenizer of 64 characters."""

    def encode(self, text, **kwargs):
        return [ord(character) - 40 for character in text]

    def decode(self, ids, **kwargs):
        return "".join(chr(int(token) + 40) for token in ids)

    bos_id, eos_id, pad_id = (lambda self: BOS), (lambda self: EOS), (lambda self: PAD)


_SIZES = {"embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
_LLAMA = _SIZES | {"num_layers": 2, "vocab_size": VOCAB, "rope_theta": 10000, "norm_eps": 1e-5}
_GEMMA = _SIZES | {"num_layers": 6, "num_embed": VOCAB, "sliding_window_size": 8}
MODELS = {
    "llama": (llama3.Llama3, llama3.ModelConfig, _LLAMA),
    "qwen": (qwen3.Qwen3, qwen3.ModelConfig, _LLAMA),
    "gemma": (gemma3.Gemma3, gemma3.ModelConfig, _GEMMA),
}


def make_model(name):
    """Returns a model with weights so large that its tokens depend on attention."""
    model_class, config_class, sizes = MODELS[name]
    model, rng = model_class(config_class(**sizes), rngs=nnx.Rngs(0)), np.random.default_rng(0)

    def random_weights(x):
        weights = rng.normal(size=x.shape) * (0.3 if x.ndim > 1 else 1.0)
        # Padding, which tunix masks, and the end-of-text token are never generated.
        if x.ndim == 2 and VOCAB in x.shape:
            np.moveaxis(weights, x.shape.index(VOCAB), 0)[[PAD, EOS]] = 0
        return jnp.asarray(weights, jnp.float32)

    nnx.update(model, jax.tree.map(random_weights, nnx.state(model)))
    return model


def sample_tokens(model):
    from tunix.generate import sampler

    config = sampler.CacheConfig(cache_size=CACHE_SIZE, num_layers=len(model.layers), num_kv_heads=2, head_dim=16)
    prompts = [CharacterTokenizer().decode(prompt) for prompt in PROMPTS]
    sample = sampler.Sampler(model, CharacterTokenizer(), config)
    output = sample(prompts, max_generation_steps=NUM_NEW, echo=False, return_logits=False)
    return [np.asarray(tokens).tolist() for tokens in output.tokens]


@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_the_cache_of_tunix(name):
    expected = sample_tokens(make_model(name))
    model = adapter.compress(make_model(name), kvjax.Exact(compact_every=8))
    assert sample_tokens(model) == expected
    assert len({*expected[0], *expected[1]}) > 5
    windows = [type(cache.policy) is kvjax.SlidingWindow for cache, _ in model.init_cache(1, 64, jnp.float32).values()]
    assert windows == ([True] * 5 + [False] if name == "gemma" else [False] * 2)


def to_kvjax(model):
    """Returns kvjax's model with the weights of tunix's Llama."""
    sizes = {"vocab_size": VOCAB, "width": 32, "mlp_width": 48, "layers": 2, "query_heads": 4, "kv_heads": 2}
    # tunix rotates Llama with its default base, whatever the configuration.
    config = LlamaConfig(**sizes, head_dim=16, max_length=512, rope=RopeConfig(theta=1e6))
    own = Llama(config, rngs=nnx.Rngs(0))
    own.embedding.embedding.set_value(model.embedder.input_embedding[...])
    own.norm.scale.set_value(model.final_norm.w[...])
    own.head.kernel.set_value(model.lm_head.w[...])
    for target, source in zip(own.layers, model.layers, strict=True):
        attention, mlp = source.attn, source.mlp
        query = attention.q_proj.w[...].reshape(32, 2, 2, 16)  # grouped by KV head
        key, value = attention.k_proj.w[...][:, :, None], attention.v_proj.w[...][:, :, None]
        target.attention.qkv.kernel.set_value(jnp.concatenate([query, key, value], axis=2))
        target.attention.output.kernel.set_value(attention.o_proj.w[...].reshape(64, 32))
        target.attention_norm.scale.set_value(source.input_layernorm.w[...])
        target.mlp_norm.scale.set_value(source.post_attention_layernorm.w[...])
        gate_up = jnp.stack([mlp.gate_proj.kernel[...], mlp.up_proj.kernel[...]], axis=1)
        target.mlp.gate_up.kernel.set_value(gate_up)
        target.mlp.down.kernel.set_value(mlp.down_proj.kernel[...])
    return own


@every_policy
def test_every_policy_equals_the_model_of_kvjax(policy):
    model = make_model("llama")
    own = to_kvjax(model)
    adapter.compress(model, POLICIES[policy])
    sizes = {"batch": 2, "max_prompt_tokens": CACHE_SIZE, "max_new_tokens": CACHE_SIZE}
    generator = Generator(own, POLICIES[policy], **sizes)
    state = generator.prefill(generator.init_state(), [[BOS, *prompt] for prompt in PROMPTS])
    assert sample_tokens(model) == decode_all(generator, state, NUM_NEW)[0]


def test_budget_is_a_share_of_the_cache_of_tunix():
    model = adapter.compress(make_model("llama"), "subgen_mean", "25%")
    full = adapter.compress(make_model("llama"), "exact").init_cache(1, 8192, jnp.bfloat16)["layer_0"]
    cache = model.init_cache(1, 8192, jnp.bfloat16)["layer_0"]
    assert 0.2 * 8192 * 128 < kvjax.cache_bytes(cache).device <= 0.25 * 8192 * 128 < kvjax.cache_bytes(full).device


def test_other_models_are_refused():
    model = nnx.Module()
    model.layers = nnx.List([nnx.Module()])
    model.layers[0].attn = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="Module is not supported; supported: Llama3, Qwen3 and Gemma3"):
        adapter.compress(model, "exact")


def test_page():
    model = make_model("llama")
    prompts = [CharacterTokenizer().decode(prompt) for prompt in PROMPTS]
    names = run_page("tunix", model=model, tokenizer=CharacterTokenizer(), prompts=prompts)
    assert [len(tokens) for tokens in names["output"].tokens] == [256, 256]
    assert type(model.init_cache(1, 4096, jnp.bfloat16)["layer_0"][0].policy) is kvjax.SubGenMean
