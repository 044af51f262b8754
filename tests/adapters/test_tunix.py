"""tunix's own sampler over the page's caches: the tokens of its own cache under exact, and compressed ones."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from tests.kvjax.support import POLICIES

pytest.importorskip("tunix")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "adapters" / "tunix.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


class Letters:
    """A tokenizer of 64 characters."""

    def encode(self, text, **kwargs):
        return [ord(letter) - 40 for letter in text]

    def decode(self, ids, **kwargs):
        return "".join(chr(int(token) + 40) for token in ids)

    bos_id, eos_id, pad_id = (lambda self: 1), (lambda self: 63), (lambda self: 0)


@pytest.fixture(scope="module")
def page():
    names = {}
    [block] = BLOCK.findall(PAGE.read_text())
    assert len(block.splitlines()) <= 60
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def llama(page):
    config = page["llama3"].ModelConfig(
        num_layers=2, vocab_size=64, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=16, num_kv_heads=2,
        rope_theta=10000, norm_eps=1e-5,
    )  # fmt: skip
    return page["llama3"].Llama3(config, rngs=nnx.Rngs(0))


def gemma(page):
    config = page["gemma3"].ModelConfig(
        num_layers=6, num_embed=64, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=16, num_kv_heads=2,
        sliding_window_size=8,
    )  # fmt: skip
    return page["gemma3"].Gemma3(config, rngs=nnx.Rngs(0))


def compressed(page, name, policy):
    model = spread(MODELS[name](page))
    if name == "llama":
        return page["compress"](model, policy, page["llama3_qkv"], lambda attention: attention.o_proj)
    return page["compress"](model, policy, page["gemma3_qkv"], lambda attention: attention.attn_vec_einsum)


MODELS = {"llama": llama, "gemma": gemma}


def spread(model):
    """Weights in float32, large enough that tokens depend on what is attended to."""
    random = np.random.default_rng(0)

    def draw(x):
        return jnp.asarray(random.normal(size=x.shape) * (0.3 if x.ndim > 1 else 1.0), jnp.float32)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


def sampled(model):
    from tunix.generate import sampler

    config = sampler.CacheConfig(cache_size=128, num_layers=len(model.layers), num_kv_heads=2, head_dim=16)
    made = sampler.Sampler(model, Letters(), config)
    prompts = ["".join(chr(40 + (7 * n + place * place) % 60 + 2) for place in range(25 - 9 * n)) for n in range(2)]
    found = made(prompts, max_generation_steps=24, echo=False, return_logits=False)
    return [np.asarray(tokens).tolist() for tokens in found.tokens]


@pytest.mark.parametrize("name", MODELS)
def test_exact_gives_the_tokens_of_tunix_s_own_cache(page, name):
    own = sampled(spread(MODELS[name](page)))
    found = sampled(compressed(page, name, kvjax.Exact(compact_every=8)))
    assert found == own and len({*own[0], *own[1]}) > 5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["subgen_mean_value", "clusterkv", "snapkv"])
def test_compressed_caches_sample(page, name, policy):
    assert all(sampled(compressed(page, name, POLICIES[policy])))
