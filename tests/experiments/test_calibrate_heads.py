"""The calibration of heads, and the texts that it reads."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import calibrate_heads
from experiments.common import corpora, settings
from experiments.common.options import Run
from kvjax import rope
from kvjax.combinators.outlier_heads import HeadChoice
from tests.experiments.running import run, select


def test_unrotate_inverts_rope():
    keys = np.random.default_rng(0).normal(size=(2, 50, 1, 8)).astype(np.float32)
    frequencies = jnp.array([1.0, 0.3, 0.1, 0.01])
    turned = rope.rotate(keys, *rope.rotation(jnp.broadcast_to(jnp.arange(50), (2, 50)), frequencies))
    assert np.abs(turned - keys).max() > 1
    np.testing.assert_allclose(rope.unrotate(turned, frequencies), keys, atol=1e-5)


def test_corpora_are_decided_by_their_seeds():
    _, tokenizer = settings.load_model(Run())
    for name in corpora.CORPORA:
        both = corpora.prompts(name, tokenizer, [3, 4], 200)
        assert both[0] != both[1]
        assert corpora.prompts(name, tokenizer, [4], 200) == both[1:]
        assert min(map(len, both)) >= 200
    with pytest.raises(ValueError, match="corpus 'web' is not known; known: lines, code"):
        corpora.prompts("web", tokenizer, [0], 10)


@pytest.mark.heavy
def test_calibration_writes_files_that_the_policy_reads(tmp_path):
    rows = run(calibrate_heads, tmp_path)
    for rule in ("share", "error"):
        choice = HeadChoice.load(tmp_path / f"heads_{rule}.json")
        assert (choice.layers, choice.kv_heads, len(choice.full)) == (2, 2, 1)
        made = json.loads((tmp_path / f"heads_{rule}.json").read_text())["provenance"]
        assert made["rule"] == rule and made["corpora"] == ["lines", "code"]
        # The head that keeps all is the one that ranks highest on the mean of both kinds of text.
        ranked = {}
        for layer, head in np.ndindex(2, 2):
            place = {"layer": layer, "kv_head": head}
            metric = "share_without_edge" if rule == "share" else "relative_error"
            found = select(rows, metric=metric, **place)
            by_corpus = {}
            for row in found:
                by_corpus.setdefault(row["task"], []).append(row["value"])
            ranked[layer, head] = np.mean([min(values) for values in by_corpus.values()])
        assert choice.full == (max(ranked, key=ranked.get),)
    assert len(select(rows, metric="overlap")) == len(select(rows, metric="rank_correlation")) == 2
    assert {row["variant"] for row in select(rows, metric="relative_error_minus_none")} == {
        "heads=none",
        "heads=share",
        "heads=error",
    }
