"""Likelihoods of texts through caches of a tiny random model, against full attention."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from experiments.common import likelihood, settings
from kvjax_models.model.llama import Llama
from tests.experiments.test_evaluating import CONFIG

TEXTS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (4, 160)).tolist()


@pytest.fixture(scope="module")
def model():
    # Larger matrices than at initialisation, so that attention matters.
    return jax.tree.map(lambda x: 3 * x if x.ndim == 2 else x, Llama(CONFIG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def losses(model):
    """Of each text's tokens, under full attention; nothing for the first."""
    tokens = np.asarray(TEXTS)
    logs = np.asarray(jax.nn.log_softmax(jax.jit(lambda tokens: model(tokens))(tokens)))
    of_next = np.take_along_axis(logs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return np.concatenate([np.full((4, 1), np.nan), -of_next], axis=1)


def test_streamed_likelihoods_equal_full_attention_before_eviction(model, losses):
    chosen = settings.settings(["exact", "streaming_llm", "snapkv"], ["80"])
    (exact, window), refused = likelihood.accumulating(model, chosen, TEXTS, batch=2, seed=0)
    assert [settings.label(setting) for setting in refused] == ["snapkv @ 80"]
    stretches = [(1, 20), (20, 40), (40, 80), (80, 160), (1, 160)]
    for reading in (exact, window):
        assert [(stretch.first, stretch.end) for stretch in reading.stretches] == stretches
    for stretch in exact.stretches:
        np.testing.assert_allclose(stretch.losses, losses[:, stretch.first : stretch.end].mean(axis=1), atol=1e-4)
    for mine, right in list(zip(window.stretches, exact.stretches, strict=True))[:3]:
        np.testing.assert_allclose(mine.losses, right.losses, atol=1e-4)
    assert np.abs(window.stretches[3].losses - exact.stretches[3].losses).max() > 1e-3
    kept = likelihood.Reading.from_json(json.loads(json.dumps(window.to_json())), window.setting)
    assert kept.use == window.use
    for mine, saved in zip(window.stretches, kept.stretches, strict=True):
        np.testing.assert_array_equal(mine.losses, saved.losses)
    assert window.use.device_bytes < exact.use.device_bytes


def test_text_after_a_position_uses_the_compressed_cache(model, losses):
    chosen = settings.settings(["exact", "snapkv"], ["60"])
    (exact, compressed), _ = likelihood.at_position(model, chosen, TEXTS, 120, batch=2, seed=0)
    [stretch] = exact.stretches
    assert (stretch.first, stretch.end) == (121, 160)
    np.testing.assert_allclose(stretch.losses, losses[:, 121:].mean(axis=1), atol=1e-4)
    assert np.abs(compressed.stretches[0].losses - stretch.losses).max() > 1e-3
