"""Layer budgets of a model: their measurement, their files, and `policy="auto"`."""

import json

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.registry import PolicyChoice
from kvjax_models import calibration
from kvjax_models.calibration import FRACTIONS, Calibration, calibrate
from kvjax_models.generation.auto_policy import resolve_auto
from kvjax_models.generation.state import cache_specs
from kvjax_models.model.llama import Llama
from tests.models.support import small_config

LAYERS = 4
TOKENS = np.random.default_rng(0).integers(0, 32, 100).tolist()
SCALE = {0.25: (0.5, 0.5, 2.0, 1.0), 0.75: (1.0, 1.0, 1.5, 0.5)}


@pytest.fixture(scope="module")
def model():
    return Llama(small_config(layers=LAYERS, query_heads=4, kv_heads=2, width=32), rngs=nnx.Rngs(0))


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    return tmp_path


def resolve(model, policy, budget=None, kv_dtype=None, tokens=100, new=4):
    spec = cache_specs(model, batch=1, max_prompt_tokens=tokens - new, max_new_tokens=new, streaming=False)[0]
    return resolve_auto(model, policy, budget, kv_dtype, spec, tokens)


def test_layers_get_their_share_of_the_tokens_with_the_highest_scores(model):
    """The factors follow from the scores of all layers as one pool, rounded to powers of the square root of 2."""
    rngs = np.random.default_rng(1)
    scores = np.exp(rngs.normal(size=(LAYERS, 2, len(TOKENS))) + np.arange(LAYERS)[:, None, None])
    sinks = 2
    policy = kvjax.KVzip(40, sinks=sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_layer_scores", lambda *_: iter(scores.copy()))
        found = calibrate(model, TOKENS, policy)
    assert tuple(found.scales) == FRACTIONS
    for fraction, factors in found.scales.items():
        np.testing.assert_allclose(np.mean(factors), 1, atol=1e-3)
        count = int(fraction * scores.size)
        pooled = scores.copy()
        pooled[:, :, :sinks] = np.inf
        order = np.argsort(-pooled.reshape(-1))[:count]
        kept = np.bincount(order // (2 * len(TOKENS)), minlength=LAYERS)
        ratio = np.asarray(factors) / np.maximum(kept / np.mean(kept), 2**-3)
        assert np.max(ratio) / np.min(ratio) <= 2**0.5 * 1.01
    assert found.scale(0.2) == found.scales[0.25] and found.scale(1e-9) == found.scales[min(FRACTIONS)]


def test_scores_are_those_of_the_policy(model):
    """KVzip's scores need a repetition, and every token of the text has one."""
    [*scores] = calibration._layer_scores(model, TOKENS, kvjax.KVzip(40))
    assert len(scores) == LAYERS and all(score.shape == (2, len(TOKENS)) for score in scores)
    assert all(score.min() >= 0 and score.max() <= 1 for score in scores)
    assert calibrate(model, TOKENS).scales == calibrate(model, TOKENS, kvjax.KVzip(len(TOKENS))).scales


def test_layers_with_a_window_have_no_share():
    config = small_config(layers=2, windows=(16, None))
    found = calibrate(Llama(config, rngs=nnx.Rngs(0)), TOKENS)
    assert all(factors == (1.0, 1.0) for factors in found.scales.values())


def test_short_texts_are_refused(model):
    with pytest.raises(ValueError, match="tokens has 63 token ids; calibration needs at least 64"):
        calibrate(model, TOKENS[:63])


def test_a_saved_calibration_belongs_to_all_files_of_a_model(model, cache_directory):
    assert calibration.find(model) is None
    path = calibration.save(model, Calibration(SCALE))
    assert calibration.find(model) == Calibration(SCALE)
    graph, state = nnx.split(model)
    narrow = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    assert calibration.find(narrow) == Calibration(SCALE)
    for text in ("{}", "[]", '{"0.5": [1]}', '{"2": [1, 1, 1, 1]}', '{"0.5": [1, 1, 1, -1]}', "{"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a calibration of this model; remove it"):
            calibration.find(model)


def test_shipped_calibrations_are_valid():
    shipped = json.loads((calibration.importlib.resources.files("kvjax_models") / "calibrations.json").read_text())
    for entry in shipped.values():
        assert entry["name"] and {float(key) for key in entry["scales"]} == set(FRACTIONS)
        for factors in entry["scales"].values():
            assert min(factors) > 0 and abs(np.mean(factors) - 1) < 0.01


@pytest.mark.parametrize(
    ("budget", "kv_dtype", "expected", "fraction", "compact_every"),
    [
        ("10%", None, "int4", 0.25, 4),  # 10% of the bytes hold 38% of the tokens
        ("8%", None, ("int4", "int2"), 0.25, 4),
        ("25%", None, "int8", 0.75, 4),
        (None, None, "int8", 0.75, 4),
        ("70%", None, "int8", 0.75, 4),
        ("25%", "int8", "int8", 0.75, 4),
        (25, "int8", "int8", 0.25, 4),  # slots are tokens
    ],
)
def test_auto_stores_few_bits_and_uses_the_calibration(model, budget, kv_dtype, expected, fraction, compact_every):
    calibration.save(model, Calibration(SCALE))
    choice, resolved_budget, resolved_dtype = resolve(model, "auto", budget, kv_dtype)
    assert resolved_dtype == expected and resolved_budget == ("25%" if budget is None else budget)
    policy = choice.make(64)
    assert policy == kvjax.LayerBudgets(
        kvjax.AdaKV(kvjax.KVzip(64, reserve_decode_slots=True, compact_every=compact_every), alpha_safeguard=0.0),
        SCALE[fraction],
    )


def test_other_policies_use_the_calibration_on_request(model):
    calibration.save(model, Calibration(SCALE))
    choice, budget, kv_dtype = resolve(model, "snapkv:layer_budget_scale=auto@25%")
    assert (budget, kv_dtype) == (None, None)
    assert choice.make(64) == kvjax.LayerBudgets(kvjax.SnapKV(64), SCALE[0.25])
    unchanged = (PolicyChoice.parse("snapkv@25%"), None, None)
    assert resolve(model, *unchanged) == unchanged
    assert resolve(model, "snapkv", 40) == ("snapkv", 40, None)


def test_models_without_calibration_have_equal_budgets(model):
    choice, *_ = resolve(model, "auto")
    assert choice.make(64) == kvjax.AdaKV(
        kvjax.KVzip(64, reserve_decode_slots=True, compact_every=4), alpha_safeguard=0.0
    )


def test_auto_stages_more_tokens_in_a_large_cache(model):
    for tokens, compact_every in ((3000, 4), (3300, 16)):  # 16 tokens are 2% of 800
        choice, *_ = resolve(model, "auto", "25%", tokens=tokens)
        assert choice.make(64).policy.compact_every == compact_every


def test_later_tokens_of_a_long_generation_have_no_slots_of_their_own(model):
    for new, reserved in ((10, True), (40, False)):  # int8 keeps 47 of 100 tokens
        choice, *_ = resolve(model, "auto", "25%", new=new)
        assert choice.make(64).policy.reserve_decode_slots == reserved


def test_kvjax_alone_has_no_calibration():
    with pytest.raises(ValueError, match="layer_budget_scale=auto needs a model"):
        PolicyChoice.parse("auto@25%").make(64)
