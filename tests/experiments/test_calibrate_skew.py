"""The skew of `calibrate_skew`: it concentrates products, and the policy loads it."""

import numpy as np
import pytest

import kvjax
from experiments import calibrate_skew
from experiments.common import settings, streams
from experiments.common.options import Run
from kvjax.structures.skew import Skew
from kvjax_models.generation.generator import generate


@pytest.fixture(scope="module")
def shipped():
    return settings.load_model(Run())


@pytest.fixture(scope="module")
def calibrated(shipped):
    return calibrate_skew.calibrate(*shipped, range(2), 256)


def test_columns_are_the_singular_vectors_of_a_group_s_queries(shipped, calibrated):
    skew, values = calibrated
    for layer, drawn in streams.prompt_streams(*shipped, range(2), 256, 256):
        for head in range(2):
            queries = drawn.queries[:, :, 2 * head : 2 * head + 2].reshape(-1, skew.shape[-1])
            np.testing.assert_allclose(
                np.linalg.norm(queries @ skew[layer, head], axis=0), values[layer, head], rtol=0.01
            )
            np.testing.assert_allclose(np.linalg.svd(queries, compute_uv=False), values[layer, head], rtol=0.01)


def test_the_skew_helps_and_changes_no_product(shipped, calibrated):
    skew, _ = calibrated
    plain = np.broadcast_to(np.eye(skew.shape[-1], dtype=np.float32), skew.shape)
    for layer, drawn in streams.prompt_streams(*shipped, range(2, 4), 256, 256):
        keys = drawn.keys.swapaxes(1, 2)
        queries = drawn.queries.reshape(2, -1, 2, 2, keys.shape[-1]).swapaxes(1, 2)
        found = lambda turns, columns: np.asarray(calibrate_skew.speculated(turns[layer], keys, queries, columns, 13))  # noqa: B023, E731
        assert found(skew, 64).min() > 0.999
        assert (found(skew, 12) > found(plain, 12) + 0.05).all()


def test_the_policy_reads_the_file(shipped, calibrated, tmp_path):
    model, _ = shipped
    np.savez(tmp_path / "skew.npz", skew=calibrated[0])
    policy = kvjax.InfiniGen(32, skew=Skew.load(tmp_path / "skew.npz"))
    rows, _ = generate(model, policy, [list(range(100, 180))], max_new_tokens=4)
    assert len(rows[0]) == 4
