"""`Document.kept`: shares of slots against the frozen entries, and the figure of them."""

import importlib
import sys

import numpy as np
import pytest

import kvjax
from kvjax.combinators.head_budgets import retrieving_heads
from kvjax_models import plots
from kvjax_models.model.config import AttentionConfig
from tests.models import tiny

TEXT = "The quick brown fox jumps over the lazy dog, and 7315 sheep. " * 3
WINDOW = {"sinks": 2, "recent": 8, "compact_every": 8}
SELECTING = {
    "streaming_llm": kvjax.StreamingLLM(24, sinks=3, compact_every=8),
    "snapkv": kvjax.SnapKV(24, window_size=6, compact_every=8),
    "uniform": kvjax.Uniform(24, **WINDOW),
    "lagkv": kvjax.LagKV(24, sinks=2, lag_size=6, compact_every=8),  # scores the variation of values
    "ada_kv": kvjax.AdaKV(kvjax.SnapKV(24, window_size=6, compact_every=8)),
}
CHELSEA = kvjax.Chelsea(40, **WINDOW, chunk=16)


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm()


def read(llm, policy, budget=None, kv_dtype=None, **options):
    return llm.cache(policy, budget, kv_dtype=kv_dtype).read(TEXT, **options)


@pytest.fixture(scope="module")
def full_keys(llm):
    """Keys [layers, H_kv, T, D] of the text; no two tokens of a head have equal ones."""
    document = read(llm, "exact")
    return np.stack([np.asarray(text.state.keys)[0, :, : document.num_tokens] for text in document.prefix.entries])


def entries(cache):
    """Yields the KV head, and the keys, of the occupied entries of every segment."""
    for segment in cache.policy.segments(cache.state, np.zeros((1, 1), np.int32)):
        keys = np.asarray(segment.keys)[0]
        start = 0 if segment.start is None else int(segment.start[0, 0])
        stop = keys.shape[1] if segment.stop is None else int(segment.stop[0, 0])
        heads = range(len(keys)) if segment.kv_heads is None else np.asarray(segment.kv_heads)
        yield from zip(heads, keys[:, start:stop], strict=True)


@pytest.mark.parametrize("name", SELECTING)
def test_kept_tokens_are_those_whose_keys_the_cache_holds(llm, full_keys, name):
    document = read(llm, SELECTING[name], seed=5)
    shares = document.kept()
    assert shares.shape == full_keys.shape[:3] and shares.dtype == np.float32
    expected = np.zeros_like(shares)
    for layer, cache in enumerate(document.prefix.entries):
        for head, keys in entries(cache):
            expected[layer, head] += (full_keys[layer, head][:, None] == keys).all(axis=-1).sum(axis=-1)
    np.testing.assert_array_equal(shares, expected)
    assert shares.sum(axis=(1, 2)).tolist() == [48, 48] and shares.max() == 1
    if name == "streaming_llm":
        positions = np.flatnonzero(shares[1, 1]).tolist()
        assert positions == [0, 1, 2, *range(document.num_tokens - 21, document.num_tokens)]


def test_merged_tokens_share_a_slot(llm):
    document = read(llm, CHELSEA)
    shares = document.kept()
    assert (shares[:, :, :2] == 1).all() and (shares[:, :, -8:] == 1).all()
    for layer, cache in zip(shares, document.prefix.entries, strict=True):
        count = int(cache.state.count[0])
        for head, degrees in zip(layer, np.asarray(cache.state.degree)[0, :, :count], strict=True):
            expected = np.sort(np.repeat(1 / degrees, degrees))
            np.testing.assert_allclose(np.sort(head[2:-8]), expected, rtol=1e-5)
            assert degrees.max() > 1 and head.sum() == pytest.approx(10 + count, rel=1e-5)


def test_heads_with_the_capacity_of_the_cache_keep_all_tokens(llm):
    heads = [(0, 1), (1, 0)]
    policy = kvjax.HeadBudgets(kvjax.SnapKV(120, window_size=6, compact_every=8), retrieving_heads(2, 2, heads))
    shares = read(llm, policy).kept()
    for head, share in zip(np.ndindex(2, 2), shares.reshape(4, -1), strict=True):
        assert (share == 1).all() if head in heads else 6 <= share.sum() < 60
    assert (read(llm, kvjax.Quest(24, compact_every=8)).kept() == 1).all()  # retrieval


def test_a_sliding_window_and_quantization():
    llm = tiny.make_llm(attention=AttentionConfig(windows=(16, None)))
    shares = read(llm, "snapkv:window_size=6", budget=24, kv_dtype="int8").kept()
    np.testing.assert_array_equal(shares[0], np.arange(shares.shape[2]) >= np.full((2, 1), shares.shape[2] - 16))
    assert shares[1].sum(axis=1).tolist() == [24, 24]


def test_a_restored_document_keeps_the_same_tokens(llm, tmp_path):
    """A random policy draws with the seed of the document."""
    document = read(llm, SELECTING["uniform"], seed=3)
    document.save(tmp_path)
    restored = llm.open(tmp_path)
    assert restored.tokens == document.tokens and restored.seed == 3
    np.testing.assert_array_equal(restored.kept(), document.kept())
    assert (read(llm, SELECTING["uniform"], seed=0).kept() != document.kept()).any()


def test_what_has_no_shares_is_refused(llm):
    with pytest.raises(ValueError, match=r"AttentionMatching.* fits its values"):
        read(llm, kvjax.AttentionMatching(24, sinks=2, compact_every=8)).kept()
    with pytest.raises(ValueError, match="read the text without streaming"):
        read(llm, "streaming_llm", 24, streaming=True).kept()


def test_the_figure_has_one_image_and_marks_heads():
    shares = np.zeros((3, 2, 10), np.float32)
    shares[1, 0] = 1
    figure = plots.plot_kept(shares, heads=[(1, 0), (2, 1)], title="a title")
    [axes] = figure.axes
    [image], [marks] = axes.images, axes.collections
    assert image.get_array().shape == (6, 10) and axes.get_title() == "a title"
    np.testing.assert_array_equal(image.get_array()[:, 0], [0, 0, 1, 0, 0, 0])
    assert marks.get_offsets()[:, 1].tolist() == [2, 5]
    assert axes.get_xlabel() == "position" and axes.get_ylabel() == "layer (2 KV heads each)"
    assert not plots.plot_kept(shares).axes[0].collections
    with pytest.raises(ValueError, match=r"head \(3, 0\) does not exist"):
        plots.plot_kept(shares, heads=[(3, 0)])
    with pytest.raises(ValueError, match=r"expected \[layers, kv_heads, tokens\]"):
        plots.plot_kept(shares[0])


def test_figures_without_matplotlib_name_the_extra(monkeypatch):
    for name in ("matplotlib", "matplotlib.colors", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvjax_models.plots")
    with pytest.raises(ImportError, match=r"pip install 'kvjax\[plots\]'"):
        importlib.import_module("kvjax_models.plots")
