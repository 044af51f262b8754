"""The named streams: norms, seeds and distributions; errors and effective rank against their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.common import streams
from tests.models import tiny

TOKENS, QUERIES, DIM = 2048, 40, 128


@pytest.fixture(scope="module")
def drawn():
    return {name: streams.synthetic(name, [3], TOKENS, QUERIES, DIM) for name in streams.SYNTHETIC}


@pytest.mark.parametrize("name", streams.SYNTHETIC)
def test_rows_have_their_norm_and_depend_only_on_their_seed(drawn, name):
    for scaled, norms in ((drawn[name].scaled(4.0), (4, 0.8, 4)), (drawn[name].scaled(4.0, 3.0), (4, 3, 4))):
        for part, count, norm in zip(_parts(scaled), (TOKENS, TOKENS, QUERIES), norms, strict=True):
            assert part.dtype == np.float32 and part.shape == (1, count, 1, DIM)
            np.testing.assert_allclose(np.linalg.norm(part, axis=-1), norm, rtol=1e-5)
    many = streams.synthetic(name, [1, 3], TOKENS, QUERIES, DIM, prompt_queries=True)
    for alone, among in zip(_parts(drawn[name]), _parts(many), strict=True):
        np.testing.assert_array_equal(alone[0], among[1])
        assert not np.array_equal(among[0], among[1])
    assert many.scaled(4.0).prompt_queries.shape == (2, TOKENS, 1, DIM)
    # Queries of the prompt differ from later ones and are in the same clusters.
    nearest = lambda queries, others: (queries[:, 0] @ others[:, 0].T).max(axis=1)  # noqa: E731
    for row in range(2):
        asked, prompt = many.queries[row], many.prompt_queries[row]
        assert nearest(asked, prompt).max() < 1 - 1e-5
        if name != "iid":
            assert nearest(asked, prompt).mean() > nearest(asked, many.prompt_queries[1 - row]).mean() + 0.2


def test_unknown_streams_are_refused():
    with pytest.raises(ValueError, match="'loose' is not known; known: iid, tight"):
        streams.synthetic("loose", [0], 8, 1)


def test_iid_keys_are_spread_evenly(drawn):
    keys = _keys(drawn["iid"])
    # The mean of n independent unit vectors has squared norm 1/n; the spectrum follows Marchenko and Pastur.
    assert TOKENS * np.sum(keys.mean(0) ** 2) == pytest.approx(1, abs=0.5)
    spectrum = np.linalg.eigvalsh(keys.T @ keys) * DIM / TOKENS
    edges = (1 - np.sqrt(DIM / TOKENS)) ** 2, (1 + np.sqrt(DIM / TOKENS)) ** 2
    assert edges == pytest.approx((spectrum[0], spectrum[-1]), rel=0.05)


def test_tight_has_64_clusters_of_small_spread(drawn):
    keys = _keys(drawn["tight"])
    cosine = keys @ keys.T
    # Of keys (c + .1 g) / |c + .1 g| one expects 1 / 1.01 within a cluster, and 0 +- 1/sqrt(D) between clusters.
    within = cosine > 0.6
    assert np.all((cosine > 0.9) == within)
    clusters = np.unique(within, axis=0)
    assert len(clusters) == 64
    assert np.all(clusters.sum(0) == 1)
    assert np.mean(cosine[within & ~np.eye(TOKENS, dtype=bool)]) == pytest.approx(1 / 1.01, abs=2e-3)
    # Values of one cluster: (w + .3 g) / norm, so cosine 1 / 1.09.
    values = drawn["tight"].values[0, :, 0]
    assert np.mean((values @ values.T)[within & ~np.eye(TOKENS, dtype=bool)]) == pytest.approx(1 / 1.09, abs=5e-3)


def test_drift_walk_has_the_law_of_its_steps():
    # At any two times c is standard normal with correlation a^gap, a^2 = 1 - 1e-6.
    times = np.array([0, 3, 100_000, 1_000_000])
    seen = streams._walk(np.random.default_rng(0), times, 20_000)
    gaps = np.abs(times[:, None] - times)
    np.testing.assert_allclose(seen @ seen.T / 20_000, (1 - 1e-6) ** (gaps / 2), atol=0.03)
    assert np.mean((seen[1] - seen[0]) ** 2) == pytest.approx(3e-6, rel=0.05)


def test_drift_repeats_within_runs(drawn):
    keys = _keys(drawn["drift"])
    neighbours = np.sum(keys[1:] * keys[:-1], axis=1)
    # 15/16 of neighbours share a run, another 1/32 of 1/16 a centre: cosine 1 / 1.09.
    assert np.mean(neighbours > 0.5) == pytest.approx(15 / 16 + 1 / 512, abs=0.02)
    assert np.mean(neighbours[neighbours > 0.5]) == pytest.approx(1 / 1.09, abs=5e-3)


def test_low_rank_has_eight_directions(drawn):
    spectrum = np.linalg.eigvalsh(np.cov(_keys(drawn["low_rank"]), rowvar=False))[::-1]
    # Eight dimensions of variance 1 + .0025 against 120 of .0025 before norms are set.
    assert spectrum[:8].sum() / spectrum.sum() == pytest.approx(8.02 / 8.32, abs=0.02)
    assert spectrum[7] > 20 * spectrum[8]
    # Values follow from keys linearly, up to their noise.
    keys, values = _keys(drawn["low_rank"]), drawn["low_rank"].values[0, :, 0]
    left = values - keys @ np.linalg.lstsq(keys, values, rcond=None)[0]
    assert np.sum(left**2) / np.sum(values**2) < 0.3


def test_recorded_streams_equal_the_model_s_projections():
    llm = tiny.make_llm()
    prompts = streams.text_prompts(llm.tokenizer, "docs", [5, 6], 224, None)
    assert [len(prompt) for prompt in prompts] == [224, 224] and prompts[0] != prompts[1]
    layers = list(streams.recorded(llm.model, prompts, 24, prompt_queries=True))
    assert [number for number, _ in layers] == [0, 1]
    angles = llm.model.rotation(jnp.arange(224)[None])
    x = llm.model.embed(jnp.asarray(prompts[1])[None])
    for (_, found), layer in zip(layers, llm.model.layers, strict=True):
        query, key, value = layer.project(x, angles)
        for computed, expected in zip(_parts(found), (key[0, :200], value[0, :200], query[0, 200:]), strict=True):
            np.testing.assert_allclose(computed[1], expected, atol=2e-4)
        np.testing.assert_allclose(found.prompt_queries[1], query[0, :200], atol=2e-4)
        x = layer.finish(x, jax.nn.dot_product_attention(query, key, value, is_causal=True))


def test_exact_attention_groups_queries_by_kv_head():
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 2, 5, 2, 4)).astype(np.float32)
    queries = rng.normal(size=(2, 3, 6, 4)).astype(np.float32)
    attended = streams.exact_attention(streams.Streams(keys, values, queries))
    assert attended.shape == queries.shape
    for row, query, head in np.ndindex(2, 3, 6):
        weights = np.exp(keys[row, :, head // 3].astype(float) @ queries[row, query, head] / 2)
        expected = weights @ values[row, :, head // 3] / weights.sum()
        np.testing.assert_allclose(attended[row, query, head], expected, rtol=1e-5)


def test_errors_are_means_over_queries_and_heads():
    exact = np.array([[[[3.0, 4.0]], [[0.0, -2.0]]]])  # one row, two queries, one head
    attended = np.array([[[[3.0, 5.0]], [[1.0, -2.0]]]])
    np.testing.assert_allclose(streams.relative_errors(attended, exact), [(1 / 5 + 1 / 2) / 2])


def _keys(found):
    return found.keys[0, :, 0]


def _parts(found):
    return found.keys, found.values, found.queries
