"""Google's gemma with compressed caches, against its own cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.adapters.policies import POLICIES, every_policy, run_page

gm = pytest.importorskip("gemma.gm")
from gemma.gm.nn import _config, _modules  # noqa: E402

from kvjax_models.adapters import gemma as adapter  # noqa: E402

PROMPTS, NUM_NEW, WINDOW = ([5, 9, 2, 7, 7, 3, 11, 40, 8, 21, 33, 4], [6, 1, 3, 2, 9]), 10, 6
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
    "one_head_per_group": {"num_kv_heads": 4, "final_logit_softcap": None},
}  # fmt: skip


@functools.cache
def random_model(name):
    """Returns a model in float32, with noise added so that its logits differ, and its parameters."""
    model = gm.nn.Transformer(config=_config.TransformerConfig(**SIZES | CONFIGS[name]), dtype=jnp.float32)
    variables = model.init(jax.random.key(0), jnp.ones((1, 4), jnp.int32))

    def add_noise(x, key):
        return x + jax.random.normal(key, x.shape) / np.sqrt(x.shape[-1])

    leaves, tree = jax.tree.flatten(variables)
    return model, jax.tree.unflatten(tree, map(add_noise, leaves, jax.random.split(jax.random.key(1), len(leaves))))


def generate_with_gemma(model, variables, prompt):
    """Returns the logits of greedy decoding with gemma's own cache."""
    length, size = len(prompt), len(prompt) + NUM_NEW
    cache = model.config.init_cache(1, jnp.float32, cache_length=size)
    causal = (jnp.arange(size) <= jnp.arange(length)[:, None])[None]
    out = model.apply(variables, jnp.array([prompt]), cache=cache, attention_mask=causal)
    logits = [out.logits[0, -1]]
    for position in range(length, size - 1):
        options = {"positions": jnp.array([[position]]), "attention_mask": (jnp.arange(size) <= position)[None, None]}
        out = model.apply(variables, jnp.argmax(logits[-1])[None, None], cache=out.cache, **options)
        logits.append(out.logits[0, -1])
    return jnp.stack(logits)


def generate_with_kvjax(model, variables, policy):
    """Returns the logits of greedy decoding of both prompts in a batch, and the final caches with counters."""
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tokens = np.zeros((2, lengths.max()), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    sizes = {"batch": 2, "max_prompt_tokens": tokens.shape[1], "max_new_tokens": NUM_NEW, "dtype": jnp.float32}
    cache = adapter.init_caches(model.config, policy, **sizes)
    apply = jax.jit(model.apply)
    out = apply(variables, tokens, cache=cache)
    logits = [out.logits[jnp.arange(2), lengths - 1]]
    for position in range(NUM_NEW - 1):
        options = {"positions": jnp.asarray(lengths + position)[:, None], "attention_mask": jnp.ones((2, 1, 1), bool)}
        out = apply(variables, jnp.argmax(logits[-1], axis=-1)[:, None], cache=out.cache, **options)
        logits.append(out.logits[:, -1])
    return jnp.stack(logits, axis=1), [adapter.unpack(out.cache[f"layer_{number}"]) for number in range(2)]


@pytest.mark.parametrize("name", CONFIGS)
def test_exact_equals_the_cache_of_gemma(name):
    model, variables = random_model(name)
    with adapter.compressed_attention():
        logits, states = generate_with_kvjax(model, variables, kvjax.Exact(compact_every=8))
    expected_logits = [generate_with_gemma(model, variables, prompt) for prompt in PROMPTS]
    for row, expected in zip(logits, expected_logits, strict=True):
        np.testing.assert_allclose(row, expected, atol=2e-4)
        np.testing.assert_array_equal(row.argmax(-1), expected.argmax(-1))
    (window, _), (_, counters) = states
    assert window.policy == kvjax.SlidingWindow(WINDOW, compact_every=WINDOW) and np.std(expected_logits[0]) > 0.5
    assert counters.num_tokens.tolist() == [len(prompt) + NUM_NEW - 1 for prompt in PROMPTS]


@every_policy
def test_every_policy(policy):
    model, variables = random_model("gemma3")
    with adapter.compressed_attention():
        logits, states = generate_with_kvjax(model, variables, POLICIES[policy])
    assert np.isfinite(logits).all()
    kvjax.raise_faults(states)
    (window, _), (cache, _) = states
    assert type(window.policy) is kvjax.SlidingWindow
    assert cache.policy == POLICIES[policy].for_layer(cache.spec)
    # Attention of the prompt is exact.
    expected = [generate_with_gemma(model, variables, prompt)[0] for prompt in PROMPTS]
    np.testing.assert_allclose(logits[:, 0], np.stack(expected), atol=2e-4)


def test_page():
    model, variables = random_model("gemma3")
    tokens = jnp.asarray(np.random.default_rng(0).integers(1, 64, (1, 2048)), jnp.int32)
    names = run_page("gemma", model=model, variables=variables, tokens=tokens, lengths=jnp.array([2048]))
    cache, counters = adapter.unpack(names["out"].cache["layer_1"])
    assert counters.num_tokens.tolist() == [2048 + 255]
    assert type(cache.policy) is kvjax.SubGenMean
    assert np.isfinite(names["out"].logits).all()
