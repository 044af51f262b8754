"""SubGen and SubGenMean against their formulas, and SubGen's theorem; `test_policies` has the laws of all policies."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax.budget import abstract_cache, row_bytes
from kvjax.methods.subgen import cluster_table, streams
from kvjax.shared.per_head import per_head
from kvjax.theory import subgen_settings
from tests.kvjax.support import HEAD_DIM, attend_after_prompt, make_spec, row_keys, with_integer_keys

DIM, TOKENS = 32, 512
# Policies that several tests share, so that each is compiled once.
MEAN = kvjax.SubGenMean(24, sinks=0, recent=0)
SIZES = {"samples": 30, "clusters": 6, "per_cluster": 3, "delta": 1.0, "sinks": 0, "recent": 0}
PAPER = kvjax.SubGen(None, light_values=0, self_normalization=0.0, **SIZES)


def as_float64(*arrays):
    """Returns the arrays of the first row and head in float64."""
    return [np.asarray(x[0, 0], np.float64) for x in arrays]


def weights_of(queries, keys):
    return np.exp(np.asarray(queries, np.float64) @ np.asarray(keys, np.float64).T / math.sqrt(keys.shape[1]))


def weighted_mean(weights, values):
    return weights @ np.asarray(values, np.float64) / weights.sum(axis=1, keepdims=True)


def error(outputs, expected):
    return np.mean(np.linalg.norm(outputs - expected, axis=-1) / np.linalg.norm(expected, axis=-1))


def low_rank(seed, tokens=TOKENS, rank=4, norm=2.0):
    """Keys and values that are linear functions of the same few numbers, and queries."""
    rng = np.random.default_rng(seed)
    maps = [np.linalg.qr(rng.normal(size=(DIM, rank)))[0] for _ in range(2)]
    common = rng.normal(size=(tokens, rank))
    arrays = [common @ each.T + 0.05 * rng.normal(size=(tokens, DIM)) for each in maps]
    arrays.append(rng.normal(size=(20, rank)) @ maps[0].T)
    return [jnp.asarray(norm * x / np.linalg.norm(x, axis=1, keepdims=True), jnp.float32) for x in arrays]


# --- formulas ---


def test_subgen_reads_samples_in_the_numerator_and_clusters_in_the_denominator():
    keys, values, queries = low_rank(0)
    outputs, state = attend_after_prompt(PAPER, keys, values, queries)
    reservoir, table = state.streams.reservoir, state.streams.table
    # 30 samples and 6 clusters, in multiples of 8 slots.
    assert reservoir.keys.shape == (1, 1, 32, DIM) and table.samples.shape == (1, 1, 8, 3, DIM)
    # Algorithm 1, lines 29 and 30, with logits over sqrt(D).
    sample_keys, sample_values = as_float64(reservoir.keys[:, :, :30], reservoir.values[:, :, :30])
    cluster_keys, count = as_float64(table.samples[:, :, :6], table.count[:, :, :6])
    mu = np.sum(np.asarray(values, np.float64) ** 2)
    share = mu / (30 * np.sum(sample_values**2, axis=1))
    numerator = weights_of(queries, sample_keys) * share @ sample_values
    denominator = weights_of(queries, cluster_keys.reshape(-1, DIM)) @ np.repeat(count / 3, 3)
    np.testing.assert_allclose(outputs[0], numerator / denominator[:, None], rtol=1e-4, atol=1e-5)


def test_subgen_mean_reads_mean_keys_and_values_with_their_counts():
    keys, values, queries = low_rank(5)
    outputs, state = attend_after_prompt(MEAN, keys, values, queries)
    table = state.table
    count, mean_key, mean_value = as_float64(table.count, table.centers, table.mean_value)
    assert count.sum() == TOKENS
    expected = weighted_mean(weights_of(queries, mean_key) * count, mean_value)
    np.testing.assert_allclose(outputs[0], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(count @ mean_value, np.asarray(values, np.float64).sum(axis=0), atol=1e-4)


# --- laws ---


def test_subgen_mean_is_nearer_to_exact_attention_than_uniform_at_equal_bytes():
    # Paired over rows; without sinks and recent tokens, which are the same in both.
    keys, values, queries = low_rank(8)
    spec = kvjax.CacheSpec(1, 1, 1, DIM, max_prompt_tokens=TOKENS, max_new_tokens=8)
    uniform = kvjax.fit_bytes(functools.partial(kvjax.Uniform, sinks=0, recent=0), spec, row_bytes(MEAN, spec))
    expected = weighted_mean(weights_of(queries, keys), values)
    errors = [
        np.array([error(row, expected) for row in attend_after_prompt(policy, keys, values, queries, 32)[0]])
        for policy in (MEAN, uniform)
    ]
    difference = errors[0] - errors[1]
    _, high = stats.t.interval(0.999, 31, difference.mean(), stats.sem(difference))
    assert high < 0


@pytest.mark.parametrize("block, is_prompt", [(64, False), (24, True)])
def test_streams_in_sequence_equal_streams_in_parallel(block, is_prompt, monkeypatch):
    """Tokens of a compaction, and blocks of a prompt."""
    # The tables are full, and some streams have widened theirs.
    monkeypatch.setattr(streams, "PROMPT_BLOCK", block)
    in_parallel = functools.partial(streams._fill_in_parallel, cluster_table.extend)
    spec = kvjax.CacheSpec(2, 2, 2, DIM, max_prompt_tokens=64, max_new_tokens=64)
    tables = [MEAN.init(spec, row_keys(2)).table] * 2
    keys, values = jax.random.normal(jax.random.key(0), (2, 2, 2, 64, DIM))
    valid = jnp.arange(64) < jnp.array([[[64], [40]], [[40], [0]]])  # of every row and head
    functions = [functools.partial(streams.fill, cluster_table.extend)]
    functions.append(in_parallel if is_prompt else per_head(cluster_table.extend))
    functions = [jax.jit(function) for function in functions]
    for _ in range(2):
        tables = [function(one, keys, values, valid) for function, one in zip(functions, tables, strict=True)]
        for one, other in zip(*(jax.tree.leaves(with_integer_keys(table)) for table in tables), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
        keys, values = keys[:, :, ::-1] + 1, values[:, :, ::-1] - 1


def test_prompts_of_several_blocks_are_clustered_completely(monkeypatch):
    monkeypatch.setattr(streams, "PROMPT_BLOCK", 48)
    keys, values, queries = low_rank(9, tokens=200)
    _, state = attend_after_prompt(kvjax.SubGenMean(16, sinks=2, recent=8), keys, values, queries)
    count, mean_value = as_float64(state.table.count, state.table.mean_value)
    assert count.sum() == 190
    np.testing.assert_allclose(count @ mean_value, np.asarray(values, np.float64)[2:-8].sum(axis=0), atol=1e-4)


# --- sizes ---


@pytest.mark.parametrize(
    "options, sizes",
    [
        ({}, (7, 20, 3, 1)),
        ({"light_values": 4}, (4, 22, 4, 1)),
        ({"light_values": 0, "per_cluster": 4}, (0, 26, 1, 4)),
        ({"light_values": 0, "samples": 20}, (0, 20, 10, 1)),
        ({"light_values": 0, "clusters": 20}, (0, 10, 20, 1)),
    ],
)
def test_a_budget_is_divided_and_never_exceeded(options, sizes):
    policy = kvjax.SubGen(40, sinks=2, recent=8, **options)
    state = abstract_cache(policy, make_spec())[0].state
    samples, table = state.streams.reservoir.samples, state.streams.table
    assert (state.window.selected, samples, table.clusters, table.samples.shape[3]) == sizes


# --- the theorem's settings ---


def test_settings_equal_those_of_the_theorem():
    settings = functools.partial(subgen_settings, 0.5, tokens=10_000, head_dim=64, query_norm=8.0, delta=0.25)
    fixed, doubled = settings(growth=None), settings()
    assert fixed.samples == 64 / 0.5**2
    assert fixed.per_cluster == math.ceil(math.exp(2 * 0.25 * 8 / math.sqrt(64)) * math.log(10_000) / 0.5**2)
    assert doubled.per_cluster == math.ceil(math.exp(4 * 0.25) * math.log(10_000) / 0.5**2)
    # With a smaller factor, keys may be farther from their center: delta (1 + 1/1.05 + 1/1.05**2 + ...) = 21 delta.
    assert settings(growth=1.05).per_cluster == math.ceil(math.exp(21 * 2 * 0.25) * math.log(10_000) / 0.5**2)
    constants = settings(constant_samples=3, constant_per_cluster=0.5)
    assert (constants.samples, constants.per_cluster) == (768, math.ceil(doubled.per_cluster / 2))


def test_settings_report_whether_they_are_vacuous():
    loose = subgen_settings(0.5, tokens=10**6, head_dim=64, query_norm=8.0, delta=0.25, clusters=100)
    assert not loose.vacuous and "s=256" in loose.message
    # Norms of language models.
    real = subgen_settings(0.1, tokens=32_768, head_dim=128, query_norm=15.0, delta=10.0)
    assert real.vacuous and "vacuous" in real.message and "delta=10" in real.message
    # The exponential overflows.
    assert subgen_settings(0.1, tokens=10**9, head_dim=64, query_norm=1e4, delta=1e4).vacuous


def test_settings_make_the_policy():
    settings = subgen_settings(0.9, tokens=5000, head_dim=HEAD_DIM, query_norm=4.0, delta=0.5)
    policy = settings.policy(clusters=3, sinks=1, recent=2, compact_every=8)
    streams = policy.init(make_spec(), row_keys()).streams
    assert (streams.reservoir.samples, streams.table.clusters) == (settings.samples, 3)
    assert streams.table.samples.shape[3] == settings.per_cluster and float(streams.table.delta[0, 0]) == 0.5


def test_invalid_numbers_of_the_theorem_are_refused():
    valid = {"epsilon": 0.1, "tokens": 10, "head_dim": 4, "query_norm": 1.0, "delta": 1.0}
    invalid = [("epsilon", 0.0), ("epsilon", 1.0), ("delta", 0.0), ("query_norm", -1.0), ("tokens", 0), ("clusters", 0)]
    for name, number in invalid:
        with pytest.raises(ValueError, match=name):
            subgen_settings(**valid | {name: number})
