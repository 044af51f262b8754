"""Google's gemma over the page's caches: the tokens of its own cache under exact, and compressed ones."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import POLICIES

gm = pytest.importorskip("gemma.gm")
from gemma.gm.nn import _config, _modules  # noqa: E402

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "adapters" / "gemma.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
PROMPTS, NEW, WINDOW = ([5, 9, 2, 7, 7, 3, 11, 40, 8, 21, 33, 4], [6, 1, 3, 2, 9]), 10, 6
SIZES = {
    "num_embed": 64, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 16, "use_post_attn_norm": True,
    "use_post_ffw_norm": True, "sliding_window_size": WINDOW, "transpose_gating_einsum": True,
    "attention_types": (_modules.AttentionType.LOCAL_SLIDING, _modules.AttentionType.GLOBAL),
}  # fmt: skip
CONFIGS = {
    "gemma2": {
        "num_kv_heads": 2, "final_logit_softcap": 12.0, "attn_logits_soft_cap": 6.0,
        "query_pre_attn_norm": _config.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS,
    },
    "gemma3": {
        "num_kv_heads": 1, "final_logit_softcap": None, "use_qk_norm": True,
        "local_base_frequency": 100, "global_base_frequency": 10_000,
    },
    "one_head_each": {"num_kv_heads": 4, "final_logit_softcap": None},
}  # fmt: skip


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setattr(_modules, "Attention", _modules.Attention)  # put back what the page replaces
    names = {}
    [block] = BLOCK.findall(PAGE.read_text())
    assert len(block.splitlines()) <= 60
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def made(name):
    """A random model in float32, whose logits spread."""
    model = gm.nn.Transformer(config=_config.TransformerConfig(**SIZES | CONFIGS[name]), dtype=jnp.float32)
    variables = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))
    noise = lambda x, key: x + jax.random.normal(key, x.shape) / np.sqrt(x.shape[-1])  # noqa: E731
    leaves, tree = jax.tree.flatten(variables)
    return model, jax.tree.unflatten(tree, map(noise, leaves, jax.random.split(jax.random.key(1), len(leaves))))


def by_its_own_cache(model, variables, prompt):
    """Greedy tokens, and their logits, of one prompt with gemma's cache."""
    length, size = len(prompt), len(prompt) + NEW
    cache = model.config.init_cache(1, jnp.float32, cache_length=size)
    causal = (jnp.arange(size) <= jnp.arange(length)[:, None])[None]
    out = model.apply(variables, jnp.array([prompt]), cache=cache, attention_mask=causal)
    logits = [out.logits[0, -1]]
    for position in range(length, size - 1):
        new = {"positions": jnp.array([[position]]), "attention_mask": (jnp.arange(size) <= position)[None, None]}
        out = model.apply(variables, jnp.argmax(logits[-1])[None, None], cache=out.cache, **new)
        logits.append(out.logits[0, -1])
    return jnp.stack(logits)


def by_the_page(page, model, variables, policy):
    """Of both prompts in a batch the logits of greedy tokens, and the caches behind them."""
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tokens = np.zeros((2, lengths.max()), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    cache = page["caches"](model.config, policy, 2, tokens.shape[1], NEW, jnp.float32)
    apply = jax.jit(model.apply)
    out = apply(variables, tokens, cache=cache)
    logits = [out.logits[jnp.arange(2), lengths - 1]]
    for position in range(NEW - 1):
        new = {"positions": jnp.asarray(lengths + position)[:, None], "attention_mask": jnp.ones((2, 1, 1), bool)}
        out = apply(variables, jnp.argmax(logits[-1], axis=-1)[:, None], cache=out.cache, **new)
        logits.append(out.logits[:, -1])
    return jnp.stack(logits, axis=1), [out.cache[f"layer_{number}"]["kv"] for number in range(2)]


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_gives_the_tokens_of_gemma_s_own_cache(name, request):
    model, variables = made(name)
    own = [by_its_own_cache(model, variables, prompt) for prompt in PROMPTS]
    found, caches = by_the_page(request.getfixturevalue("page"), model, variables, kvjax.Exact(compact_every=8))
    for row, expected in zip(found, own, strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-4)
        np.testing.assert_array_equal(row.argmax(-1), expected.argmax(-1))
    assert caches[0].policy.budget == WINDOW and np.std(own[0]) > 0.5
    assert kvjax.num_tokens(caches[1]).tolist() == [len(prompt) + NEW - 1 for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["subgen_mean_value", "clusterkv", "snapkv"])
def test_compressed_caches_write(policy, page):
    model, variables = made("gemma3")
    found, caches = by_the_page(page, model, variables, POLICIES[policy])
    assert np.isfinite(found).all()
    for cache in caches:
        kvjax.raise_faults(cache)
    assert type(caches[0].policy) is kvjax.StreamingLLM and caches[1].policy == POLICIES[policy]
