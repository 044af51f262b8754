"""Recall as the command measures it, in small."""

import numpy as np
import pytest

from experiments import recall_rate
from experiments.common import settings, streams
from experiments.common.options import Run
from tests.experiments.running import run, select


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recall_rate")
    rows = run(recall_rate, directory, stream=("tight", "recorded"), queries=12)
    for name in ("recall_rate", "recall_rate_drift_0", "recall_rate_drift_1"):
        assert (directory / f"{name}.png").stat().st_size > 3_000
    return rows


def test_pages_find_what_a_loop_finds(rows):
    drawn = streams.synthetic("tight", range(2), 1024, 12).scaled(8.0)
    for row in select(rows, stream="tight", policy="quest", metric="recall"):
        found, size = [], row["recalled_tokens"]
        for keys, queries in zip(drawn.keys[:, 16:, 0], drawn.queries[:, :, 0], strict=True):
            paged = keys.reshape(-1, 16, keys.shape[1])
            for query in queries:
                bound = np.maximum(query * paged.min(axis=1), query * paged.max(axis=1)).sum(axis=1)
                pages = np.argsort(-bound)[: size // 16]
                true = np.argsort(-(keys @ query))[:size]
                found.append(np.isin(true // 16, pages).mean())
        assert row["value"] == pytest.approx(np.mean(found), abs=0.01)


def test_clusters_find_more_on_clustered_keys(rows):
    sizes = {row["recalled_tokens"] for row in select(rows, stream="tight", metric="recall")}
    largest = {
        row["policy"]: row["value"] for row in select(rows, stream="tight", metric="recall", recalled_tokens=max(sizes))
    }
    assert largest["clusterkv"] > 2 * largest["quest"]


def test_consecutive_steps_of_a_recorded_stream(rows):
    assert {row["layer"] for row in select(rows, metric="hit_rate")} == {0, 1}
    for layer in (0, 1):
        once, twice = (
            select(rows, metric="hit_rate", policy="clusterkv", layer=layer, kept_steps=steps)[0]["value"]
            for steps in (1, 2)
        )
        assert 0 < once <= twice < 1
        [held] = select(rows, metric="important_per_page", layer=layer)
        assert 1 <= held["value"] < 16
    model, tokenizer = settings.load_model(Run())
    _, drawn = next(iter(streams.recorded(model, tokenizer, range(2), 1024, 12)))
    [row] = select(rows, metric="top_kept", layer=0, steps=4)
    kept, group = [], drawn.queries.shape[2] // drawn.keys.shape[2]
    for keys, queries in zip(drawn.keys[:, 16:], drawn.queries, strict=True):
        for head in range(queries.shape[1]):
            top = np.argsort(-(queries[:, head] @ keys[:, head // group].T), axis=1)[:, : row["recalled_tokens"]]
            kept += [np.isin(one, other).mean() for one, other in zip(top[4:], top[:-4], strict=True)]
    assert row["value"] == pytest.approx(np.mean(kept), abs=0.01)
