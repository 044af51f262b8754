"""Means that take tokens in for as long as a text is, in every form that a cache is kept in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax

HEADS, DIM, EVERY = 2, 16, 128
WINDOW = {"sinks": 4, "recent": 32, "compact_every": EVERY}
POLICIES = {
    "chelsea": kvjax.Chelsea(128, **WINDOW),
    "clustergen": kvjax.ClusterGen(128, **WINDOW),
    "subgen": kvjax.SubGen(128, **WINDOW),
}
# bfloat16 shows means as they are rounded, and their errors do not all come to naught.
FORMS = {"bfloat16": (None, jnp.bfloat16), "int8": ("int8", jnp.float32)}


def stream(tokens):
    """Keys and values about 32 centres, those of values about a half."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 32, (tokens, 1, HEADS))
    head = np.arange(HEADS)
    about = [rng.normal(size=(HEADS, 32, DIM)) * scale + mean for scale, mean in ((1.5, 0.0), (1.0, 0.5))]
    return [(x[head, label] + 0.7 * rng.normal(size=(tokens, 1, HEADS, DIM))).astype(np.float32) for x in about]


def mean_value(policy, kv_dtype, dtype, tokens):
    """What a query of zeros reads behind a stream, and what it should read."""
    keys, values = (jnp.asarray(x, dtype) for x in stream(tokens))
    spec = kvjax.CacheSpec(
        batch=1,
        query_heads=HEADS,
        kv_heads=HEADS,
        head_dim=DIM,
        max_prompt_tokens=1,
        max_new_tokens=tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    cache = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), 1))

    @jax.jit
    def take(cache, keys, values):
        add = lambda cache, new: (kvjax.compact(kvjax.append(cache, *new)), None)  # noqa: E731
        blocks = [x.reshape(-1, 1, EVERY, HEADS, DIM) for x in (keys, values)]
        return jax.lax.scan(add, cache, tuple(blocks))[0]

    cache = take(cache, keys, values)
    kvjax.raise_faults(cache)
    found = kvjax.normalize(kvjax.attend(cache, jnp.zeros((1, 1, HEADS, DIM), dtype)))[0, 0]
    return np.asarray(found), np.asarray(values.astype(jnp.float32)).astype(np.float64).mean((0, 1))


def drifts(tokens, quick):
    """Every policy in every form, of which those that are not quick are heavy."""
    pairs = [(name, form) for name in POLICIES for form in FORMS]
    return [
        pytest.param(*pair, tokens, id="-".join((*pair, str(tokens))), marks=() if pair in quick else pytest.mark.heavy)
        for pair in pairs
    ]


@pytest.mark.parametrize(
    "name, form, tokens",
    [*drifts(4096, quick=[("chelsea", "int8"), ("clustergen", "bfloat16")]), *drifts(131_072, quick=[])],
)
def test_the_mean_value_does_not_drift(name, form, tokens):
    kv_dtype, dtype = FORMS[form]
    found, true = mean_value(POLICIES[name], kv_dtype, dtype, tokens)
    # Values are about 1. What is left is the rounding of the stored means, whatever the length of the stream.
    limit = {"bfloat16": 5e-4, "int8": 1.5e-3}[form]
    assert np.sqrt(np.mean((found - true) ** 2)) < limit
    assert np.max(np.abs(found - true)) < 3 * limit


@pytest.mark.parametrize(
    "name", ["chelsea", *(pytest.param(name, marks=pytest.mark.heavy) for name in ("clustergen", "subgen"))]
)
def test_a_row_without_new_tokens_stays_as_it_is(name):
    """In eight bits, where means are stored again at every compaction."""
    rng = np.random.default_rng(1)
    spec = kvjax.CacheSpec(
        batch=2,
        query_heads=HEADS,
        kv_heads=HEADS,
        head_dim=DIM,
        max_prompt_tokens=512,
        max_new_tokens=EVERY,
        kv_dtype="int8",
    )
    cache = kvjax.init(POLICIES[name], spec, jax.random.split(jax.random.key(0), 2))
    keys, values = (jnp.asarray(rng.normal(size=(2, 512, HEADS, DIM)), jnp.float32) for _ in range(2))
    cache, _ = kvjax.prefill(cache, keys, values, jnp.array([512, 400]))
    new = kvjax.compact(kvjax.append(cache, keys[:, :40], values[:, :40], jnp.array([0, 40])))
    ended, other = ([kvjax.take_rows(x.state, jnp.array([row])) for x in (cache, new)] for row in range(2))
    plain = lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    jax.tree.map(lambda one, two: np.testing.assert_array_equal(plain(one), plain(two)), *ended)
    assert any(np.any(plain(one) != plain(two)) for one, two in zip(*map(jax.tree.leaves, other), strict=True))
