"""The sampler of tunix with the caches of docs/adapters/tunix.md, against its own cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from tests.adapters.pages import POLICIES, UNSUPPORTED, load_page, supported_policies, unsupported_policies

pytest.importorskip("tunix")


class CharacterTokenizer:
    """A tokenizer of 64 characters."""

    def encode(self, text, **kwargs):
        return [ord(character) - 40 for character in text]

    def decode(self, ids, **kwargs):
        return "".join(chr(int(token) + 40) for token in ids)

    bos_id, eos_id, pad_id = (lambda self: 1), (lambda self: 63), (lambda self: 0)


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines."""
    return load_page("tunix")


def make_llama(page):
    config = page["llama3"].ModelConfig(
        num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=10000, norm_eps=1e-5,
    )  # fmt: skip
    return page["llama3"].Llama3(config, rngs=nnx.Rngs(0))


def make_gemma(page):
    config = page["gemma3"].ModelConfig(
        num_layers=6, num_embed=64, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=16, num_kv_heads=2,
        sliding_window_size=8,
    )  # fmt: skip
    return page["gemma3"].Gemma3(config, rngs=nnx.Rngs(0))


MODELS = {"llama": make_llama, "gemma": make_gemma}


def make_model(page, name):
    """Returns a model with weights so large that its tokens depend on attention."""
    model, rng = MODELS[name](page), np.random.default_rng(0)

    def random_weights(x):
        return jnp.asarray(rng.normal(size=x.shape) * (0.3 if x.ndim > 1 else 1.0), jnp.float32)

    nnx.update(model, jax.tree.map(random_weights, nnx.state(model)))
    return model


def make_compressed_model(page, name, policy):
    model = make_model(page, name)
    if name == "llama":
        return page["compress"](model, policy, page["llama3_qkv"], lambda attention: attention.o_proj)
    return page["compress"](model, policy, page["gemma3_qkv"], lambda attention: attention.attn_vec_einsum)


def sample_tokens(model):
    from tunix.generate import sampler

    config = sampler.CacheConfig(cache_size=128, num_layers=len(model.layers), num_kv_heads=2, head_dim=16)
    prompts = ["".join(chr(40 + (7 * n + index * index) % 60 + 2) for index in range(25 - 9 * n)) for n in range(2)]
    sample = sampler.Sampler(model, CharacterTokenizer(), config)
    output = sample(prompts, max_generation_steps=24, echo=False, return_logits=False)
    return [np.asarray(tokens).tolist() for tokens in output.tokens]


@pytest.mark.parametrize("name", MODELS)
def test_exact_equals_the_cache_of_tunix(page, name):
    expected = sample_tokens(make_model(page, name))
    assert sample_tokens(make_compressed_model(page, name, kvjax.Exact(compact_every=8))) == expected
    assert len({*expected[0], *expected[1]}) > 5


@supported_policies
def test_compressed_caches(page, policy):
    assert all(sample_tokens(make_compressed_model(page, "llama", POLICIES[policy])))


@pytest.mark.parametrize("policy", ["subgen", "clusterkv", "snapkv"])
def test_compressed_caches_of_gemma(page, policy):
    assert all(sample_tokens(make_compressed_model(page, "gemma", POLICIES[policy])))


@unsupported_policies
def test_unsupported_policies_are_refused(page, policy):
    with pytest.raises(ValueError, match=UNSUPPORTED[policy]):
        sample_tokens(make_compressed_model(page, "llama", POLICIES[policy]))
