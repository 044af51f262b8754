"""Attention over compressed streams, bounds of the papers, and calibrations, in small runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import attention, calibrate, evaluate, theory
from experiments.common import streams
from kvjax.registry import PolicyChoice
from tests.experiments.support import figures
from tests.models import tiny


@pytest.fixture
def tiny_model(monkeypatch):
    monkeypatch.setattr(evaluate, "load_model", lambda name, dtype: tiny.make_llm())


def test_errors_of_recorded_layers(tiny_model, tmp_path):
    policies = ("exact", "uniform", "clustergen:recent=64", "leverage_scores", "chelsea", "snapkv:window_size=16")
    options = attention.Options(
        policy=policies, budget=("60%",), tokens=512, seeds=2, queries=8, measure=("error", "similarity"),
        output_dir=tmp_path,
    )  # fmt: skip
    attention.main(options)
    found = figures(tmp_path / "attention.json")
    errors = {(one["setting"], one["case"]): one for one in found if one["metric"] == "relative_error"}
    assert {case for _, case in errors} == {"layer 0", "layer 1"} and len(errors) == 12
    for (setting, _), one in errors.items():
        if setting == "exact":
            assert one["value"] < 1e-4 and 1 <= one["held"] < 1.2
        else:
            assert 0.001 < one["value"] < 1.5 and one["held"] <= 0.6
    shares = [one["value"] for one in found if one["metric"] == "share_with_edge"]
    assert len(shares) == 4 and all(0 <= share <= 1 for share in shares)


def test_similarity_of_keys_and_values_against_loops():
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.normal(size=(2, 1, 400, 8)), axis=2).astype(np.float32)
    near, far = attention.cosine_by_distance(jnp.asarray(walk))
    for row in range(2):
        units = walk[row, 0] / np.linalg.norm(walk[row, 0], axis=1, keepdims=True)
        pairs = [(abs(i - j), units[i] @ units[j]) for i in range(400) for j in range(i)]
        assert near[row] == pytest.approx(np.mean([c for d, c in pairs if d <= 16]), abs=1e-5)
        assert far[row] == pytest.approx(np.mean([c for d, c in pairs if d > 256]), abs=1e-5)
    centers = 10 * rng.normal(size=(16, 8))
    clustered = centers[rng.integers(0, 16, 256)] + rng.normal(size=(256, 8))
    residuals = attention.cluster_residual(jnp.asarray([[clustered], [rng.normal(size=(256, 8))]], jnp.float32))
    assert residuals[0] < 0.05 < 0.3 < residuals[1] < 1


def test_pages_and_clusters_select_what_a_loop_selects(tmp_path):
    options = attention.Options(
        stream=("tight",), measure=("recall",), tokens=512 + 16, seeds=2, queries=8, budget=("64 slots",),
        output_dir=tmp_path,
    )  # fmt: skip
    attention.main(options)
    found = {(one["setting"], one["metric"]): one["value"] for one in figures(tmp_path / "attention.json")}
    drawn = streams.synthetic("tight", range(2), 528, 8, prompt_queries=True).scaled(8.0)
    recalls, hits = [], []
    for keys, queries in zip(drawn.keys[:, 16:, 0], drawn.queries[:, :, 0], strict=True):
        paged, before = keys.reshape(-1, 16, keys.shape[1]), None
        for step, query in enumerate(queries):
            bound = np.maximum(query * paged.min(axis=1), query * paged.max(axis=1)).sum(axis=1)
            pages = set(np.argsort(-bound)[:4].tolist())
            largest = np.argsort(-(keys @ query))[:64]
            recalls.append(np.isin(largest // 16, list(pages)).mean())
            if step >= 2:
                hits.append(len(pages & before) / 4)
            before = pages
    assert found["pages of 16 @ 64", "recall"] == pytest.approx(np.mean(recalls), abs=1e-3)
    assert found["pages of 16 @ 64", "hit_rate_1"] == pytest.approx(np.mean(hits), abs=1e-3)
    assert found["clusters of 16 @ 64", "recall"] > 2 * found["pages of 16 @ 64", "recall"]
    assert all(found[name, "hit_rate_1"] <= found[name, "hit_rate_2"] for name in {name for name, _ in found})


@pytest.mark.heavy
def test_the_walk_is_balanced_and_errors_decrease_with_samples(tmp_path):
    theory.main(theory.Options(
        seeds=4, queries=16, keys=1024, walk=("16,1,1",), stream=("tight",), head_dim=32, output_dir=tmp_path
    ))  # fmt: skip
    discrepancy = figures(tmp_path / "discrepancy.json")
    by_signs = {
        signs: {one["n"]: one["value"] for one in discrepancy if one["signs"] == signs}
        for signs in (theory.BALANCED, theory.RANDOM)
    }
    assert by_signs[theory.BALANCED][1024] < 0.5 * by_signs[theory.RANDOM][1024]
    [ratio] = [one for one in discrepancy if one["metric"] == "ratio"]
    assert ratio["high"] < 1
    exponents = {
        one["parameter"]: one["value"] for one in figures(tmp_path / "samples.json") if "exponent" in one["metric"]
    }
    assert exponents["s"] == pytest.approx(-0.5, abs=0.15) and exponents["t"] == pytest.approx(-0.5, abs=0.25)
    with pytest.raises(ValueError, match="walk=16,x,1 must be dimensions, norm and c"):
        theory.parse_walk("16,x,1")


def test_calibrations_are_read_by_the_policies(tiny_model, tmp_path):
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "test.txt").write_text("\n".join(f"Sentence {number}." for number in range(2000)))
    calibrate.main(calibrate.Options(
        text=("docs", "wikitext2"), data_dir=tmp_path, seeds=2, tokens=400, fraction=0.25, output_dir=tmp_path
    ))  # fmt: skip
    overlap, correlation = figures(tmp_path / "outlier_heads.json")
    assert overlap["case"] == "1 of 4 heads" and overlap["value"] in (0, 1) and -1 <= correlation["value"] <= 1
    shares = PolicyChoice.parse(f"chelsea:heads={tmp_path / 'heads.json'}@256 slots").make().shares
    assert np.shape(shares) == (2, 2) and np.sum(np.array(shares) == 1.0) == 1
    PolicyChoice.parse(f"infinigen:skew={tmp_path / 'skew.npz'}@256 slots").make()
    with np.load(tmp_path / "skew.npz") as arrays:
        skew, values = arrays["skew"], arrays["singular_values"]
    np.testing.assert_allclose(skew @ skew.swapaxes(-1, -2), np.broadcast_to(np.eye(16), skew.shape), atol=1e-5)
    assert np.all(np.diff(values, axis=-1) <= 0)


def test_singular_vectors_equal_numpys_and_outliers_are_the_largest():
    queries = np.random.default_rng(0).normal(size=(50, 4))
    skew, values = calibrate.skew_of((queries.T @ queries)[None, None])
    _, expected, vectors = np.linalg.svd(queries)
    np.testing.assert_allclose(values[0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(np.abs(np.sum(skew[0, 0] * vectors.T, axis=0)), 1, rtol=1e-5)
    assert calibrate.outliers(np.array([[0.1, 0.9], [0.8, 0.2]]), 0.5) == {(0, 1), (1, 0)}
