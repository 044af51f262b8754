"""InfiniGen's speculation against a plain simulation of the published algorithm."""

import itertools
import shutil

import numpy as np
import pytest

import kvjax
from kvjax.methods.infinigen.skew import Skew
from tests.kvjax.support import HEAD_DIM, LENGTHS, NEW, decoded, make_spec, make_stream, prefilled, row_keys

KV_HEADS, GROUP, STAGED = 2, 2, 8


@pytest.fixture(scope="module")
def skew():
    """Random orthogonal matrices [layers, H_kv, D, D]."""
    return np.linalg.qr(np.random.default_rng(0).normal(size=(2, KV_HEADS, HEAD_DIM, HEAD_DIM)))[0].astype(np.float32)


@pytest.fixture
def skew_file(skew, tmp_path):
    np.savez(tmp_path / "skew.npz", skew=skew)
    return tmp_path / "skew.npz"


def make_skewed_stream(seed=3):
    """A stream whose queries are larger in some dimensions than in others; no query head is zero."""
    stream, rng = make_stream(seed), np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=HEAD_DIM))
    return stream._replace(queries=(scale * rng.normal(size=stream.queries.shape)).astype(np.float32))


def simulate(stream, row, position, stored, budget, alpha, partial, matrices):
    """Returns the stored tokens that each KV head reads for the query at a position."""
    below = []
    for head in range(KV_HEADS):
        keys = stream.keys[row, :stored, head].astype(np.float64) @ matrices[head]
        queries = stream.queries[row, :, head * GROUP : (head + 1) * GROUP].astype(np.float64) @ matrices[head]
        size = np.abs(queries[: LENGTHS[row]]).sum(axis=(0, 1))
        columns = np.argsort(-size)[: int(partial * HEAD_DIM)]
        logits = queries[position][:, columns] @ keys[:, columns].T / np.sqrt(HEAD_DIM)
        below.append((logits - logits.max(axis=1, keepdims=True)).max(axis=0))
    count = min(int(np.mean([(head > -alpha).sum() for head in below])), budget)
    # Every query head has a largest logit; of equal ones the first counts.
    return [set(np.argsort(-head, kind="stable")[:count].tolist()) for head in below]


@pytest.mark.parametrize("partial, alpha, layer", [(0.2, 2.0, 1), (0.5, 1.0, 0), (1.0, 3.0, 1)])
def test_queries_read_the_tokens_of_the_published_speculation(skew, skew_file, partial, alpha, layer):
    budget, stream = 9, make_skewed_stream()
    policy = kvjax.InfiniGen(budget, alpha, partial, Skew.load(skew_file), compact_every=STAGED)
    # Values are one-hot, so outputs show which tokens were read.
    outputs, *_ = decoded(policy, stream, make_spec(layers=2, layer=layer))
    counts = set()
    for row, step in itertools.product(range(3), range(NEW)):
        position = LENGTHS[row] + step
        stored = LENGTHS[row] + step // STAGED * STAGED
        selected = simulate(stream, row, position, stored, budget, alpha, partial, skew[layer].astype(np.float64))
        counts.add(len(selected[0]))
        for head in range(KV_HEADS * GROUP):
            expected = selected[head // GROUP] | set(range(stored, position + 1))
            assert set(np.flatnonzero(outputs[row, step, head])) == expected, f"{row=} {step=} {head=}"
    assert len(counts) > 2


def test_invalid_skews_are_refused(skew, tmp_path):
    path = tmp_path / "other.npz"
    for arrays, message in (
        ({"other": skew}, "other.npz.*'other'.*'skew'"),
        ({"skew": skew[0]}, r"has shape \(2, 64, 64\), expected \[layers, H_kv, D, D\]"),
        ({"skew": 1.01 * skew}, "not orthogonal"),
        ({"skew": skew}, r"\(2, 2, 64, 64\).* = \(1, 2, 64, 64\)"),  # of a model of one layer
    ):
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=message):
            kvjax.InfiniGen(9, skew=Skew.load(path)).init(make_spec(), row_keys())


def test_skews_of_equal_content_are_equal(skew, skew_file, tmp_path):
    copy = shutil.copy(skew_file, tmp_path / "copy.npz")
    first, second = Skew.load(skew_file), Skew.load(copy)
    assert first == second and hash(first) == hash(second)
    assert kvjax.InfiniGen(9, skew=first) == kvjax.InfiniGen(9, skew=second)
    np.savez(copy, skew=-skew)
    assert Skew.load(copy) != first
    with pytest.raises(ValueError, match="has changed"):
        Skew(str(copy), sha256="0").matrices()


def test_the_mean_key_of_a_quantized_store_has_no_padding():
    stream = make_stream()
    cache, _ = prefilled(kvjax.InfiniGen(9, compact_every=STAGED), stream, make_spec(kv_dtype="int4"))
    for row, length in enumerate(LENGTHS):
        mean = stream.keys[row, :length].mean(axis=0)
        np.testing.assert_allclose(cache.state.store.offset[row], mean, rtol=1e-4, atol=1e-5)
