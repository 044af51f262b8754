"""InfiniGen's speculation against a plain simulation of what is published."""

import itertools
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.structures.skew import Skew
from tests.kvjax.support import HEAD_DIM, LENGTHS, NEW, after, begin, go, make_spec, make_stream, prompt_of, row_keys

KV_HEADS, GROUP, STAGED = 2, 2, 8


@pytest.fixture(scope="module")
def skew():
    """Random orthogonal matrices [layers, H_kv, D, D]."""
    rng = np.random.default_rng(0)
    return np.linalg.qr(rng.normal(size=(2, KV_HEADS, HEAD_DIM, HEAD_DIM)))[0].astype(np.float32)


@pytest.fixture
def skew_file(skew, tmp_path):
    np.savez(tmp_path / "skew.npz", skew=skew)
    return tmp_path / "skew.npz"


def full_stream(seed=3):
    """A stream in which every query head asks, of some dimensions more than of others."""
    stream, rng = make_stream(seed), np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=HEAD_DIM))
    return stream._replace(queries=(scale * rng.normal(size=stream.queries.shape)).astype(np.float32))


def simulate(stream, row, position, stored, budget, alpha, partial, turns):
    """Which stored tokens each kv head reads for the query at a position."""
    below = []
    for head in range(KV_HEADS):
        keys = stream.keys[row, :stored, head].astype(np.float64) @ turns[head]
        asked = stream.queries[row, :, head * GROUP : (head + 1) * GROUP].astype(np.float64) @ turns[head]
        size = np.abs(asked[: LENGTHS[row]]).sum(axis=(0, 1))
        columns = np.argsort(-size)[: int(partial * HEAD_DIM)]
        logits = asked[position][:, columns] @ keys[:, columns].T / np.sqrt(HEAD_DIM)
        below.append((logits - logits.max(axis=1, keepdims=True)).max(axis=0))
    count = min(int(np.mean([(head > -alpha).sum() for head in below])), budget)
    # Every query head has a largest one: of those the earlier come first.
    return [set(np.argsort(-head, kind="stable")[:count].tolist()) for head in below]


def visible(policy, stream, spec):
    """Which tokens [B, N, H_kv, D] are read at every step: those without which the output would be another."""
    cache = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(cache, after(stream, LENGTHS))[1]


@pytest.mark.parametrize("partial, alpha, layer", [(0.2, 2.0, 1), (0.5, 1.0, 0), (1.0, 3.0, 1)])
def test_it_reads_what_the_published_speculation_chooses(skew, skew_file, partial, alpha, layer):
    budget, stream = 9, full_stream()
    policy = kvjax.InfiniGen(budget, alpha, partial, Skew.load(skew_file), compact_every=STAGED)
    outputs = visible(policy, stream, make_spec(layers=2, layer=layer))
    counts = set()
    for row, step in itertools.product(range(3), range(NEW)):
        position = LENGTHS[row] + step
        stored = LENGTHS[row] + step // STAGED * STAGED
        chosen = simulate(stream, row, position, stored, budget, alpha, partial, skew[layer].astype(np.float64))
        counts.add(len(chosen[0]))
        for head in range(KV_HEADS * GROUP):
            expected = chosen[head // GROUP] | set(range(stored, position + 1))
            # Values are one-hot: what is read shows in the output.
            assert set(np.flatnonzero(outputs[row, step, head])) == expected, f"{row=} {step=} {head=}"
    assert len(counts) > 2


def test_a_skew_leaves_whole_products_as_they_are(skew_file):
    stream, spec = full_stream(), make_spec(layers=2)
    plain, skewed = (
        visible(kvjax.InfiniGen(9, alpha=2.0, partial=1.0, skew=skew, compact_every=STAGED), stream, spec)
        for skew in (None, Skew.load(skew_file))
    )
    np.testing.assert_allclose(plain, skewed, atol=1e-5)


def test_skews_that_cannot_be_are_refused_by_name(skew, tmp_path):
    def saved(**arrays):
        np.savez(tmp_path / "other.npz", **arrays)
        return tmp_path / "other.npz"

    with pytest.raises(ValueError, match="other.npz holds .*'turn'.* must hold an array 'skew'"):
        Skew.load(saved(turn=skew))
    with pytest.raises(ValueError, match="must be \\[layers, H_kv, D, D\\]"):
        Skew.load(saved(skew=skew[0]))
    with pytest.raises(ValueError, match="not orthogonal"):
        Skew.load(saved(skew=1.01 * skew))
    of_two_layers = kvjax.InfiniGen(9, skew=Skew.load(saved(skew=skew)))
    with pytest.raises(ValueError, match=r"has shape \(2, 2, 64, 64\); it must be .* = \(1, 2, 64, 64\)"):
        of_two_layers.init(make_spec(), row_keys())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.InfiniGen(0), "budget=0"),
        (lambda: kvjax.InfiniGen(9, alpha=0), "alpha=0"),
        (lambda: kvjax.InfiniGen(9, partial=0), "partial=0"),
        (lambda: kvjax.InfiniGen(9, partial=1.2), "partial=1.2"),
        (lambda: kvjax.InfiniGen(9, compact_every=0), "compact_every=0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_prompts_need_their_queries():
    cache = kvjax.init(kvjax.InfiniGen(9), make_spec(), row_keys())
    keys, values, _ = prompt_of(make_stream(), LENGTHS)
    with pytest.raises(ValueError, match="queries=None; InfiniGen needs"):
        kvjax.prefill(cache, keys, values, jnp.array(LENGTHS))


def test_a_skew_is_known_by_its_content(skew, skew_file, tmp_path):
    copy = shutil.copy(skew_file, tmp_path / "copy.npz")
    first, second = Skew.load(skew_file), Skew.load(copy)
    assert first == second and hash(first) == hash(second)
    assert kvjax.InfiniGen(9, skew=first) == kvjax.InfiniGen(9, skew=second)
    np.savez(copy, skew=-skew)
    assert Skew.load(copy) != first
    with pytest.raises(ValueError, match="has changed since it was loaded"):
        Skew(str(copy), sha256="0").matrices()
