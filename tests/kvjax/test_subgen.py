"""What is special to `SubGen`; what holds for every policy is tested with the others."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax.budget import abstract_cache, row_bytes
from kvjax.structures import streams as structures
from kvjax.structures.per_head import per_head
from kvjax.theory import SubGenSettings, subgen_settings
from tests.kvjax.support import HEAD_DIM, LENGTHS, make_spec, row_keys, whole_run

DIM, TOKENS = 32, 512


def attended(policy, keys, values, queries, batch=1, seed=0):
    """Attention output [B, Q, D] of queries [Q, D] after a prompt [T, D] in every row, each row with its randomness."""
    tokens, dim = keys.shape
    spec = kvjax.CacheSpec(
        batch=batch, query_heads=1, kv_heads=1, head_dim=dim, max_prompt_tokens=tokens, max_new_tokens=8
    )
    return _attended(policy, spec, keys, values, queries, jax.random.split(jax.random.key(seed), batch))


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def _attended(policy, spec, keys, values, queries, rngs):
    rows = lambda x: jnp.broadcast_to(x[:, None], (spec.batch, len(x), 1, spec.head_dim))  # noqa: E731
    lengths = jnp.full(spec.batch, spec.max_prompt_tokens, jnp.int32)
    cache, _ = kvjax.prefill(kvjax.init(policy, spec, rngs), rows(keys), rows(values), lengths)
    partials = kvjax.attend(cache, rows(queries))
    return kvjax.normalize(partials)[:, :, 0], partials, cache.state


# Compiled once each.
SPREAD = kvjax.SubGen(24, sinks=0, recent=0)
PLAIN = kvjax.SubGen(24, sinks=0, recent=0, spread=False)
SELF_NORMALISED = kvjax.SubGen(40, sinks=0, recent=0, variant="self_normalised")


def exact(keys, values, queries):
    logits = np.asarray(queries, np.float64) @ np.asarray(keys, np.float64).T / math.sqrt(keys.shape[1])
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights @ np.asarray(values, np.float64) / weights.sum(axis=1, keepdims=True)


def error(found, expected):
    return np.mean(np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1))


def low_rank(seed, tokens=TOKENS, rank=4, norm=2.0):
    """Keys and values that follow one law, of few dimensions."""
    rng = np.random.default_rng(seed)
    maps = [np.linalg.qr(rng.normal(size=(DIM, rank)))[0] for _ in range(2)]
    common = rng.normal(size=(tokens, rank))
    keys, values = (common @ each.T + 0.05 * rng.normal(size=(tokens, DIM)) for each in maps)
    queries = rng.normal(size=(20, rank)) @ maps[0].T
    scaled = lambda x: jnp.asarray(norm * x / np.linalg.norm(x, axis=1, keepdims=True), jnp.float32)  # noqa: E731
    return scaled(keys), scaled(values), scaled(queries)


# --- paper: Algorithm 1 ---


def test_paper_reads_samples_in_the_numerator_and_clusters_in_the_denominator():
    keys, values, queries = low_rank(0)
    policy = kvjax.SubGen(None, variant="paper", samples=30, clusters=6, per_cluster=3, delta=1.0, sinks=0, recent=0)
    found, _, state = attended(policy, keys, values, queries)
    held, table = state.streams.reservoir, state.streams.table
    assert held.keys.shape == (1, 1, 30, DIM) and table.samples.shape == (1, 1, 6, 3, DIM)
    # Line 29 and line 30 of Algorithm 1, with the logits' factor.
    picked_keys, picked = np.asarray(held.keys[0, 0], np.float64), np.asarray(held.values[0, 0], np.float64)
    q = np.asarray(queries, np.float64) / math.sqrt(DIM)
    mu = np.sum(np.asarray(values, np.float64) ** 2)
    numerator = np.exp(q @ picked_keys.T) * mu / (30 * np.sum(picked**2, axis=1)) @ picked
    sampled = np.exp(np.einsum("qd,mtd->qmt", q, np.asarray(table.samples[0, 0], np.float64)))
    denominator = np.sum(sampled * np.asarray(table.count[0, 0])[:, None] / 3, axis=(1, 2))
    np.testing.assert_allclose(found[0], numerator / denominator[:, None], rtol=1e-4, atol=1e-5)


# --- self_normalised and sampled clusters ---


def test_self_normalised_reads_its_samples_in_both_sums():
    keys, values, queries = low_rank(3)
    found, _, state = attended(SELF_NORMALISED, keys, values, queries)
    held = state.streams.reservoir
    assert state.streams.table is None and held.mass.shape == (1, 1, 40)
    picked_keys, picked, mass = (np.asarray(x[0, 0], np.float64) for x in (held.keys, held.values, held.mass))
    weights = np.exp(np.asarray(queries, np.float64) @ picked_keys.T / math.sqrt(DIM)) / mass
    np.testing.assert_allclose(found[0], weights @ picked / weights.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_sampled_clusters_are_the_control_variate_of_their_mean_values():
    keys, values, queries = low_rank(4)
    policy = kvjax.SubGen(None, clusters=5, per_cluster=4, sinks=0, recent=0)
    found, _, state = attended(policy, keys, values, queries)
    table = state.streams.table
    count, mean = np.asarray(table.count[0, 0]), np.asarray(table.mean_value[0, 0], np.float64)
    drawn_keys, drawn = (np.asarray(x[0, 0], np.float64) for x in (table.samples, table.sample_values))
    e = np.exp(np.einsum("qd,mtd->qmt", np.asarray(queries, np.float64) / math.sqrt(DIM), drawn_keys))
    e_mean = e.mean(axis=2)
    # sum_i n_i [ebar_i vbar_i + (1 / t) sum_j (e_ij - ebar_i) (v_ij - vbar_i)] over sum_i n_i ebar_i
    inner = np.einsum("qmt,mtd->qmd", e - e_mean[..., None], drawn - mean[:, None]) / e.shape[2]
    numerator = np.einsum("m,qmd->qd", count, e_mean[..., None] * mean + inner)
    np.testing.assert_allclose(found[0], numerator / (e_mean @ count)[:, None], rtol=1e-4, atol=1e-5)


# --- mean_value ---


def test_mean_value_reads_means_with_their_counts_where_it_does_not_spread():
    keys, values, queries = low_rank(5)
    found, _, state = attended(PLAIN, keys, values, queries)
    table = state.streams.table
    count, mean_key, mean_value = (
        np.asarray(x[0, 0], np.float64) for x in (table.count, table.centers, table.mean_value)
    )
    assert count.sum() == TOKENS and state.streams.moments is None
    weights = count * np.exp(np.asarray(queries, np.float64) @ mean_key.T / math.sqrt(DIM))
    np.testing.assert_allclose(
        found[0], weights @ mean_value / weights.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(count @ mean_value, np.asarray(values, np.float64).sum(axis=0), atol=1e-4)


def test_spreading_reads_clusters_scaled_about_their_mean():
    keys, values, queries = low_rank(6)
    found, partials, state = attended(SPREAD, keys, values, queries)
    table, spread = state.streams.table, state.streams.moments
    count, mean_key, mean_value = (
        np.asarray(x[0, 0], np.float64) for x in (table.count, table.centers, table.mean_value)
    )
    scale = float(spread.scale[0, 0])
    assert scale > 1.05
    center = lambda x: count @ x / count.sum()  # noqa: E731
    spread_keys, spread_values = (center(x) + scale * (x - center(x)) for x in (mean_key, mean_value))
    weights = count * np.exp(np.asarray(queries, np.float64) @ spread_keys.T / math.sqrt(DIM))
    np.testing.assert_allclose(
        found[0], weights @ spread_values / weights.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-5
    )
    den = np.asarray(partials.denominator * jnp.exp(partials.max))[0, :, 0]
    np.testing.assert_allclose(den, weights.sum(axis=1), rtol=1e-4)


def test_spreading_keeps_the_covariance_of_tokens_that_follow_a_common_law():
    # What the clusters' means lose of Cov(value, key) comes back, within the sketch's precision.
    keys, values, queries = low_rank(7)
    spread_out, _, state = attended(SPREAD, keys, values, queries)
    plain, _, _ = attended(PLAIN, keys, values, queries)
    table, spread = state.streams.table, state.streams.moments
    share = np.asarray(table.count[0, 0], np.float64) / TOKENS
    deviations = [np.asarray(x[0, 0], np.float64) for x in (table.mean_value, table.centers)]
    deviations = [x - share @ x for x in deviations]
    between = (deviations[0] * share[:, None]).T @ deviations[1]
    whole = np.cov(np.asarray(values, np.float64).T, np.asarray(keys, np.float64).T, bias=True)[:DIM, DIM:]
    scale = float(spread.scale[0, 0])
    assert np.linalg.norm(whole - scale**2 * between) < 0.5 * np.linalg.norm(whole - between)
    expected = exact(keys, values, queries)
    assert error(spread_out[0], expected) < 0.5 * error(plain[0], expected)


def test_clusters_without_a_common_law_are_not_spread():
    rng = np.random.default_rng(0)
    keys, values, queries = (jnp.asarray(rng.normal(size=(count, DIM)), jnp.float32) for count in (TOKENS, TOKENS, 20))
    _, _, state = attended(SPREAD, keys, values, queries)
    assert 1 <= float(state.streams.moments.scale[0, 0]) < 1.02


def test_mean_value_is_nearer_to_exact_attention_than_uniform_at_equal_bytes():
    # Paired over rows; sinks and recent tokens would be the same in both.
    keys, values, queries = low_rank(8)
    spec = kvjax.CacheSpec(batch=1, query_heads=1, kv_heads=1, head_dim=DIM, max_prompt_tokens=TOKENS, max_new_tokens=8)
    limit = row_bytes(SPREAD, spec)
    rival = kvjax.fit_bytes(lambda budget: kvjax.Uniform(budget, sinks=0, recent=0), spec, limit)
    ours, theirs = (
        np.array([error(row, exact(keys, values, queries)) for row in attended(policy, keys, values, queries, 8)[0]])
        for policy in (SPREAD, rival)
    )
    _, high = stats.t.interval(0.999, 7, (ours - theirs).mean(), stats.sem(ours - theirs))
    assert high < 0


def test_mean_value_conserves_every_token_s_mass():
    # A query of zeros reads sum(count * mean value): every token exactly once, at every step and through compactions.
    cache, _, weights = whole_run("subgen_mean_value")
    seen = np.arange(HEAD_DIM) < (np.array(LENGTHS)[:, None] + np.arange(weights.shape[1]) + 1)[..., None]
    np.testing.assert_allclose(weights, np.broadcast_to(seen[:, :, None], weights.shape), atol=2e-5)
    between = np.maximum(np.asarray(cache.state.window.total) - 2 - 8, 0)
    np.testing.assert_array_equal(cache.state.streams.table.count.sum(-1), np.repeat(between[:, None], 2, axis=1))


def test_rows_and_heads_draw_for_themselves():
    keys, values, queries = low_rank(8)
    _, _, state = attended(SELF_NORMALISED, keys, values, queries, batch=3)
    drawn = np.asarray(state.streams.reservoir.keys).reshape(3, -1)
    assert len(np.unique(drawn, axis=0)) == 3


def test_streams_one_after_the_other_are_streams_side_by_side():
    # Tables that are full, and widened by some of the streams.
    policy = kvjax.SubGen(24, sinks=0, recent=0)
    spec = kvjax.CacheSpec(batch=2, query_heads=2, kv_heads=2, head_dim=DIM, max_prompt_tokens=64, max_new_tokens=64)
    streams = policy.init(spec, row_keys(2)).streams
    keys, values = jax.random.normal(jax.random.key(0), (2, 2, 2, 64, DIM))
    valid = jnp.arange(64) < jnp.array([[64], [40]])
    side_by_side = jax.jit(per_head(structures.take, 0, 0, 0, None))
    one, other = streams, streams
    for _ in range(2):
        one = jax.jit(structures.fill)(one, keys, values, valid)
        other = side_by_side(other, keys, values, valid)
        for of_one, of_other in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            if not jnp.issubdtype(of_one.dtype, jax.dtypes.prng_key):
                np.testing.assert_allclose(of_one, of_other, rtol=1e-4, atol=1e-4)
        keys, values = keys[:, :, ::-1] + 1, values[:, :, ::-1] - 1


def test_prompts_of_several_blocks_are_taken_whole(monkeypatch):
    monkeypatch.setattr(structures, "PROMPT_BLOCK", 48)
    keys, values, queries = low_rank(9, tokens=200)
    policy = kvjax.SubGen(16, sinks=2, recent=8)
    _, _, state = attended(policy, keys, values, queries)
    table = state.streams.table
    assert int(table.count.sum()) == 190
    middle = np.asarray(values, np.float64)[2:-8]
    total = np.asarray(table.count[0, 0]) @ np.asarray(table.mean_value[0, 0], np.float64)
    np.testing.assert_allclose(total, middle.sum(axis=0), atol=1e-4)


# --- sizes ---


@pytest.mark.parametrize(
    "options, sizes",
    [
        ({}, (0, 30, 0)),
        ({"per_cluster": 2}, (0, 10, 2)),
        ({"variant": "self_normalised"}, (30, 0, 0)),
        ({"variant": "paper"}, (22, 8, 1)),
        ({"variant": "paper", "per_cluster": 4}, (22, 3, 4)),
        ({"variant": "paper", "samples": 20}, (20, 10, 1)),
        ({"variant": "paper", "clusters": 20}, (10, 20, 1)),
    ],
)
def test_a_budget_is_divided_and_never_exceeded(options, sizes):
    policy = kvjax.SubGen(40, sinks=2, recent=8, **options)
    streams = abstract_cache(policy, make_spec()).state.streams
    held = 0 if streams.reservoir is None else streams.reservoir.mass.shape[-1]
    table = streams.table
    clusters = 0 if table is None else table.count.shape[-1]
    per_cluster = 0 if table is None or table.samples is None else table.samples.shape[-2]
    assert (held, clusters, per_cluster) == sizes


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.SubGen(68), "budget=68 leaves 0 slots"),
        (lambda: kvjax.SubGen(71, per_cluster=3), "budget=71 leaves 3 slots"),
        (lambda: kvjax.SubGen(69, variant="paper"), "budget=69 leaves 1 slots"),
        (lambda: kvjax.SubGen(100, variant="paper", samples=40), "samples=40"),
        (lambda: kvjax.SubGen(100, variant="printed"), "variant='printed'"),
        (lambda: kvjax.SubGen(100, samples=3), "samples=3: 'mean_value' keeps none"),
        (lambda: kvjax.SubGen(100, variant="self_normalised", clusters=3), "clusters=3"),
        (lambda: kvjax.SubGen(None), "budget=None: give clusters instead"),
        (lambda: kvjax.SubGen(None, variant="paper", samples=3), "budget=None: give clusters instead"),
        (lambda: kvjax.SubGen(None, variant="paper"), "budget=None: give samples and clusters instead"),
        (lambda: kvjax.SubGen(100, sinks=-1), "sinks=-1"),
        (lambda: kvjax.SubGen(100, compact_every=0), "compact_every=0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the theorem's settings ---


def test_settings_are_those_of_the_theorem():
    found = subgen_settings(0.5, tokens=10_000, head_dim=64, query_norm=8.0, delta=0.25, doubling=False)
    assert found.samples == 64 / 0.5**2
    assert found.per_cluster == math.ceil(math.exp(2 * 0.25 * 8 / math.sqrt(64)) * math.log(10_000) / 0.5**2)
    doubled = subgen_settings(0.5, tokens=10_000, head_dim=64, query_norm=8.0, delta=0.25)
    assert doubled.per_cluster == math.ceil(math.exp(4 * 0.25) * math.log(10_000) / 0.5**2)
    constants = subgen_settings(
        0.5, tokens=10_000, head_dim=64, query_norm=8.0, delta=0.25, constant_samples=3, constant_per_cluster=0.5
    )
    assert (constants.samples, constants.per_cluster) == (768, math.ceil(doubled.per_cluster / 2))


def test_settings_say_when_they_are_vacuous():
    loose = subgen_settings(0.5, tokens=10**6, head_dim=64, query_norm=8.0, delta=0.25, clusters=100)
    assert not loose.vacuous and "of an exact cache" in loose.message and "s=256" in loose.message
    # Norms as measured in language models.
    real = subgen_settings(0.1, tokens=32_768, head_dim=128, query_norm=15.0, delta=10.0)
    assert real.vacuous and "vacuous" in real.message and "delta=10" in real.message
    # Beyond what floating point holds.
    assert subgen_settings(0.1, tokens=10**9, head_dim=64, query_norm=1e4, delta=1e4).vacuous


def test_settings_make_the_policy():
    settings = subgen_settings(0.9, tokens=5000, head_dim=HEAD_DIM, query_norm=4.0, delta=0.5)
    assert isinstance(settings, SubGenSettings)
    policy = settings.policy(clusters=3, sinks=1, recent=2, compact_every=8)
    streams = abstract_cache(policy, make_spec()).state.streams
    assert streams.reservoir.mass.shape[-1] == settings.samples
    assert streams.table.samples.shape[2:4] == (3, settings.per_cluster)
    assert float(policy.init(make_spec(), row_keys()).streams.table.delta[0, 0]) == 0.5


@pytest.mark.parametrize(
    "change", [{"epsilon": 0.0}, {"epsilon": 1.0}, {"delta": 0.0}, {"query_norm": -1.0}, {"tokens": 0}, {"clusters": 0}]
)
def test_settings_of_numbers_that_cannot_be_are_refused_by_name(change):
    numbers = {"epsilon": 0.1, "tokens": 10, "head_dim": 4, "query_norm": 1.0, "delta": 1.0} | change
    with pytest.raises(ValueError, match=next(iter(change))):
        subgen_settings(numbers.pop("epsilon"), **numbers)
