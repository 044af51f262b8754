"""Means that absorb tokens over a long text, in every dtype of a cache."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import each
from tests.models.support import key_data

HEADS, DIM, EVERY = 2, 16, 128
WINDOW = {"sinks": 4, "recent": 32, "compact_every": EVERY}
POLICIES = {
    "chelsea": kvjax.Chelsea(128, **WINDOW),
    "subgen_mean": kvjax.SubGenMean(128, **WINDOW),
}
# In bfloat16 rounding errors of the means do not cancel.
FORMS = {"bfloat16": (None, jnp.bfloat16), "int8": ("int8", jnp.float32)}
QUICK = {("chelsea", "int8", 4096), ("subgen_mean", "bfloat16", 4096)}


def make_spec(**sizes):
    return kvjax.CacheSpec(query_heads=HEADS, kv_heads=HEADS, head_dim=DIM, **sizes)


def make_stream(tokens):
    """Returns keys and values around 32 centers; values have a mean of about 0.5."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 32, (tokens, 1, HEADS))
    head = np.arange(HEADS)
    about = [rng.normal(size=(HEADS, 32, DIM)) * scale + mean for scale, mean in ((1.5, 0.0), (1.0, 0.5))]
    return [(x[head, label] + 0.7 * rng.normal(size=(tokens, 1, HEADS, DIM))).astype(np.float32) for x in about]


def attend_uniformly(policy, kv_dtype, dtype, tokens):
    """Returns the output of a zero query after a stream, and its exact value, the mean of all values."""
    keys, values = (jnp.asarray(x, dtype) for x in make_stream(tokens))
    spec = make_spec(batch=1, max_prompt_tokens=1, max_new_tokens=tokens, dtype=dtype, kv_dtype=kv_dtype)
    empty = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), 1))

    @jax.jit
    def append_stream(state, keys, values):
        def append_block(state, block):
            return kvjax.compact(*kvjax.append(*state, *block)), None

        blocks = [x.reshape(-1, 1, EVERY, HEADS, DIM) for x in (keys, values)]
        return jax.lax.scan(append_block, state, tuple(blocks))[0]

    cache, counters = append_stream(empty, keys, values)
    kvjax.raise_faults((cache, counters))
    output = kvjax.normalize(kvjax.attend(cache, counters, jnp.zeros((1, 1, HEADS, DIM), dtype)))[0, 0]
    return np.asarray(output), np.asarray(values.astype(jnp.float32)).astype(np.float64).mean((0, 1))


@pytest.mark.parametrize("name, form, tokens", each(itertools.product(POLICIES, FORMS, (4096, 131_072)), QUICK))
def test_the_mean_value_does_not_drift(name, form, tokens):
    kv_dtype, dtype = FORMS[form]
    output, expected = attend_uniformly(POLICIES[name], kv_dtype, dtype, tokens)
    # For values of about 1, the error is the rounding of the stored means, for any length of the stream.
    limit = {"bfloat16": 5e-4, "int8": 1.5e-3}[form]
    assert np.sqrt(np.mean((output - expected) ** 2)) < limit
    assert np.max(np.abs(output - expected)) < 3 * limit


def test_a_row_without_new_tokens_does_not_change():
    """In int8, where every compaction stores means again."""
    rng = np.random.default_rng(1)
    spec = make_spec(batch=2, max_prompt_tokens=256, max_new_tokens=EVERY, kv_dtype="int8")
    cache, counters = kvjax.init(POLICIES["chelsea"], spec, jax.random.split(jax.random.key(0), 2))
    keys, values = (jnp.asarray(rng.normal(size=(2, 256, HEADS, DIM)), jnp.float32) for _ in range(2))
    cache, counters, _ = kvjax.prefill(cache, counters, keys, values, jnp.array([256, 200]))
    new, _ = kvjax.compact(*kvjax.append(cache, counters, keys[:, :40], values[:, :40], jnp.array([0, 40])))
    finished, other = ([kvjax.take_rows(x.state, jnp.array([row])) for x in (cache, new)] for row in range(2))
    jax.tree.map(lambda one, two: np.testing.assert_array_equal(key_data(one), key_data(two)), *finished)
    assert any(np.any(key_data(one) != key_data(two)) for one, two in zip(*map(jax.tree.leaves, other), strict=True))
