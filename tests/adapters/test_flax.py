"""Attention layers of Flax NNX and Linen with compressed caches, against Flax's own caches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models.adapters.layers import prompt_lengths
from kvjax_models.adapters.linen import KVCache as LinenCache
from kvjax_models.adapters.nnx import KVCache as NnxCache
from tests.adapters.policies import KVGRAD, KVZAP, KVZIP, POLICIES
from tests.kvjax.support import each

BATCH, PROMPT, NEW, WIDTH, DIM = 2, 24, 20, 32, 16
LENGTHS = jnp.array([PROMPT, 9])
PROJECTIONS = ("query", "key", "value", "out")
FREQUENCIES = tuple((10000.0 ** -(np.arange(0, DIM, 2) / DIM)).tolist())


def make_spec(kv_heads):
    sizes = {"query_heads": 4, "kv_heads": kv_heads, "head_dim": DIM, "rope_frequencies": FREQUENCIES}
    return kvjax.CacheSpec(batch=BATCH, max_prompt_tokens=PROMPT, max_new_tokens=NEW, **sizes)


@pytest.fixture(scope="module")
def inputs():
    """Inputs of an attention layer: a prompt and new tokens."""
    x = np.random.default_rng(0).normal(size=(BATCH, PROMPT + NEW, WIDTH)).astype(np.float32)
    return jnp.asarray(x[:, :PROMPT]), jnp.asarray(x[:, PROMPT:])


def padding_mask():
    """An attention mask [B, 1, T, T] that hides padding; the cache applies causality."""
    return jnp.broadcast_to(jnp.arange(PROMPT) < LENGTHS[:, None, None, None], (BATCH, 1, PROMPT, PROMPT))


def make_nnx_layer(**options):
    sizes = {"num_heads": 4, "num_kv_heads": 2, "in_features": WIDTH, "qkv_features": 4 * DIM}
    return nnx.MultiHeadAttention(**sizes, decode=False, rngs=nnx.Rngs(0), **options)


def run_nnx(policy, prompt, new, lengths=None):
    """Returns the outputs of a layer with a compressed cache for the prompt and for new tokens, and the cache."""
    layer = make_nnx_layer(attention_fn=NnxCache(make_spec(2), policy))
    mask = None if lengths is None else padding_mask()
    outputs = [layer(prompt, mask=mask)]
    step = nnx.jit(lambda layer, x: layer(x))
    outputs += [step(layer, new[:, t : t + 1]) for t in range(NEW)]
    return np.asarray(outputs[0]), np.asarray(jnp.concatenate(outputs[1:], axis=1)), layer.attention_fn


def run_linen(policy, prompt, new, lengths=None):
    """Returns the outputs like `run_nnx`, and the counters of the cache."""
    layer = make_linen_layer(attention_fn=LinenCache(make_spec(4), policy))
    variables = layer.init(jax.random.key(0), prompt)
    mask = None if lengths is None else padding_mask()
    output, updated = layer.apply(variables, prompt, mask=mask, mutable="cache")
    outputs, step = [output], jax.jit(lambda variables, x: layer.apply(variables, x, mutable="cache"))
    for token in range(NEW):
        output, updated = step({**variables, **updated}, new[:, token : token + 1])
        outputs.append(output)
    [(_, counters)] = jax.tree.leaves(updated, is_leaf=lambda x: isinstance(x, tuple))
    return np.asarray(outputs[0]), np.asarray(jnp.concatenate(outputs[1:], axis=1)), counters


def make_linen_layer(**options):
    return nn.MultiHeadDotProductAttention(num_heads=4, qkv_features=4 * DIM, **options)


def run_flax_nnx(x):
    """Returns the outputs of the layer with its own cache, token by token."""
    layer = make_nnx_layer()
    layer.init_cache(x.shape)
    return np.asarray(jnp.concatenate([layer(x[:, t : t + 1], decode=True) for t in range(x.shape[1])], axis=1))


def run_flax_linen(x):
    """Returns the outputs of the layer with its own cache, token by token."""
    layer = make_linen_layer(decode=True)
    variables, outputs = layer.init(jax.random.key(0), x), []
    for token in range(x.shape[1]):
        output, updated = layer.apply(variables, x[:, token : token + 1], mutable="cache")
        variables = {**variables, **updated}
        outputs.append(output)
    return np.asarray(jnp.concatenate(outputs, axis=1))


HOSTS = {"nnx": (run_nnx, run_flax_nnx), "linen": (run_linen, run_flax_linen)}
every_host = pytest.mark.parametrize("host", HOSTS)


@every_host
def test_exact_equals_the_cache_of_flax(host, inputs):
    run, run_flax = HOSTS[host]
    prompt, new = inputs
    expected = run_flax(jnp.concatenate([prompt, new], axis=1))
    on_prompt, on_new, _ = run(kvjax.Exact(compact_every=8), prompt, new)
    np.testing.assert_allclose(on_prompt, expected[:, :PROMPT], atol=2e-5)
    np.testing.assert_allclose(on_new, expected[:, PROMPT:], atol=2e-5)
    # The shorter row of a padded batch equals a prompt without padding.
    _, padded, cache = run(kvjax.Exact(compact_every=8), prompt, new, LENGTHS)
    short = jnp.concatenate([prompt[:, : LENGTHS[1]], new], axis=1)
    np.testing.assert_allclose(padded[1], run_flax(short)[1, LENGTHS[1] :], atol=2e-5)
    assert cache.num_tokens.tolist() == (LENGTHS + NEW).tolist()


def test_masks_of_flax_hide_padding():
    valid = jnp.arange(PROMPT) < LENGTHS[:, None]
    pairs, causal = nn.make_attention_mask(valid, valid, dtype=bool), nn.make_causal_mask(valid, dtype=bool)
    for mask in (pairs, causal & pairs, causal & padding_mask()):
        np.testing.assert_array_equal(prompt_lengths(jnp.zeros((BATCH, PROMPT, 4, DIM)), mask), LENGTHS)


def run_kvjax(policy, spec, weights, prompt, new):
    """Returns the outputs for new tokens, computed with the functions of kvjax alone."""

    def project(x):
        return (
            jnp.einsum("btw,whd->bthd", x, weights[name][0]) + weights[name][1] for name in ("query", "key", "value")
        )

    row_keys = jax.random.split(jax.random.fold_in(jax.random.key(0), 0), BATCH)
    (cache, counters), (query, key, value) = kvjax.init(policy, spec, row_keys), project(prompt)
    right_aligned = jnp.stack(
        [jnp.roll(row, PROMPT - length, axis=0) for row, length in zip(query, LENGTHS, strict=True)]
    )
    needed = kvjax.prompt_queries(cache.policy, right_aligned)
    cache, counters, _ = kvjax.prefill(cache, counters, key, value, LENGTHS, needed)
    outputs, step = [], jax.jit(kvjax.step)
    for token in range(NEW):
        attended, cache, counters = step(cache, counters, *project(new[:, token : token + 1]))
        outputs.append(jnp.einsum("bthd,hdw->btw", attended, weights["out"][0]) + weights["out"][1])
    return np.asarray(jnp.concatenate(outputs, axis=1))


def nnx_weights():
    layer = make_nnx_layer()
    return {name: (getattr(layer, name).kernel[...], getattr(layer, name).bias[...]) for name in PROJECTIONS}


def linen_weights():
    params = make_linen_layer().init(jax.random.key(0), jnp.ones((BATCH, 2, WIDTH)))["params"]
    return {name: (params[name]["kernel"], params[name]["bias"]) for name in PROJECTIONS}


@pytest.mark.parametrize("policy", each(POLICIES, ("uniform", "snapkv")))
@every_host
def test_every_policy_equals_the_functions_of_kvjax(host, policy, inputs):
    run, run_flax = HOSTS[host]
    on_prompt, on_new, cache = run(POLICIES[policy], *inputs, LENGTHS)
    weights = nnx_weights() if host == "nnx" else linen_weights()
    expected = run_kvjax(POLICIES[policy], make_spec(2 if host == "nnx" else 4), weights, *inputs)
    np.testing.assert_allclose(on_new, expected, atol=2e-5)
    np.testing.assert_allclose(on_prompt[0], run_flax(inputs[0])[0], atol=2e-5)  # attention of the prompt is exact
    kvjax.raise_faults(cache.cache.get_value() if host == "nnx" else cache)


@every_host
@pytest.mark.parametrize("policy", [KVZIP, KVGRAD, KVZAP], ids=lambda policy: type(policy).__name__)
def test_policies_that_need_more_than_one_pass_are_refused(host, policy, inputs):
    message = "needs (a second pass over the prompt|predicted scores of the prompt's tokens)"
    with pytest.raises(ValueError, match=message):
        HOSTS[host][0](policy, *inputs)
