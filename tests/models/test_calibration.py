"""Calibrated layer budgets: KVzip's scores of a model, the files, and layer_budget_scale="auto"."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax_models import calibration, cli, formats
from kvjax_models.calibration import calibrate, load_calibration, save_calibration
from kvjax_models.generation.prefill import prefill_layers
from kvjax_models.language_model import load
from kvjax_models.model.llama import Llama
from tests.models.support import CHECKPOINTS, GOLDEN

MODEL = CHECKPOINTS / "kvjax-lm-2k"
TEXT = "The quick brown fox jumps over the lazy dog and counts 1, 2, 3. " * 12


@pytest.fixture(scope="module")
def llm():
    return load(MODEL)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))


def test_the_policy_keeps_the_tokens_of_the_highest_scores(llm):
    tokens = llm.encode(TEXT)
    scores = calibration._kvzip_scores(llm.model, tokens)
    policy = kvjax.KVzip(48, sinks=0, recent=0, compact_every=4)
    generator = llm.generator(policy, max_prompt_tokens=len(tokens), max_new_tokens=4)
    state = generator.prefill(generator.init_state(), [tokens])
    padded = np.zeros((1, 512), np.int32)
    padded[0, : len(tokens)] = tokens
    layers = prefill_layers(llm.model, padded, jnp.array([len(tokens)]), 256, [0] * llm.model.config.layers)
    for cache, layer, layer_scores in zip(state.layers, layers, scores, strict=True):
        assert layer_scores.shape == (llm.model.config.kv_heads, len(tokens))
        for head, head_scores in enumerate(layer_scores):
            best = np.argsort(-head_scores)[:40]  # some of 48 may have equal scores
            keys, kept = np.asarray(layer.keys[0, best, head]), np.asarray(cache.state.keys[0, head])
            distances = np.abs(keys[:, None] - kept).max(axis=-1).min(axis=1)
            assert distances.max() < 1e-4


def test_shares_are_counts_among_the_best_of_all_heads():
    scores = np.array([[[4.0, 3, 2, 1], [0, 0, 0, 9]], [[0, 0, 0, 0.5], [8, 7, 6, 5]]])
    shares = calibration._kept_shares(scores, 0.5)
    # Of 16 scores the best 8 are 9 to 2: 3 and 1 in the first layer, 0 and 4 in the second.
    np.testing.assert_allclose(shares, np.array([[3, 1], [0, 4]]) / 2)


def test_a_calibration_is_saved_and_used(llm):
    with pytest.raises(FileNotFoundError, match="run `kvjax calibrate"):
        llm.generate(TEXT, "snapkv:layer_budget_scale=auto", "50%", max_new_tokens=2)
    measured = calibrate(llm, TEXT)
    layers, heads = llm.model.config.layers, llm.model.config.kv_heads
    assert len(measured.layer_scale) == layers and np.shape(measured.head_scale) == (layers, heads)
    assert np.mean(measured.layer_scale) == pytest.approx(1, abs=1e-3) and min(measured.layer_scale) >= 0
    np.testing.assert_allclose(np.mean(measured.head_scale, axis=1), measured.layer_scale, atol=1e-3)
    uneven = dataclasses.replace(measured, layer_scale=(1.5, *[1.0] * (layers - 2), 0.5))
    save_calibration(llm.model, uneven)
    assert load_calibration(llm.model) == uneven
    options = {"max_prompt_tokens": 128, "max_new_tokens": 32}
    explicit = llm.generator("knorm:layer_budget_scale=" + repr(uneven.layer_scale), 64, **options).policies
    assert [policy.budget for policy in explicit][:: layers - 1] == [96, 32]
    for policy in ("knorm:layer_budget_scale=auto", functools.partial(kvjax.Knorm, layer_budget_scale="auto")):
        assert llm.generator(policy, 64, **options).policies == explicit
    assert llm.generator(kvjax.Knorm(64, layer_budget_scale="auto"), **options).policies == explicit
    assert llm.generator("knorm", 64, **options).policies != explicit


def test_dtypes_share_a_calibration(llm):
    keys = {calibration.model_key(load(MODEL, **options).model) for options in ({}, {"weight_dtype": "int8"})}
    assert keys == {calibration.model_key(load(MODEL, jnp.bfloat16).model)} == {calibration.model_key(llm.model)}
    assert calibration.model_key(formats.load_model(GOLDEN / "qwen2")) not in keys


def test_layers_with_a_window_keep_it(llm):
    model = formats.load_model(GOLDEN / "gemma3", jnp.float32)
    windows = [model.config.window(number) for number in range(model.config.layers)]
    assert None in windows and any(windows)
    tokens = np.random.default_rng(0).integers(3, 60, 200).tolist()

    class Llm:
        def __init__(self, model: Llama):
            self.model = model

        def encode(self, text):
            return tokens

    measured = calibrate(Llm(model), TEXT)
    scales = [scale for scale, window in zip(measured.layer_scale, windows, strict=True) if window is None]
    assert np.mean(scales) == pytest.approx(1, abs=1e-3)
    assert all(scale == 1 for scale, window in zip(measured.layer_scale, windows, strict=True) if window is not None)


@pytest.mark.parametrize(
    "arguments, message",
    [((TEXT, 0.0), "budget=0.0"), ((TEXT, 1.5), "budget=1.5"), (("word", 0.25), "is too short for a calibration")],
)
def test_invalid_calibrations_are_refused(llm, arguments, message):
    text, budget = arguments
    with pytest.raises(ValueError, match=message):
        calibrate(llm, text, budget=budget)


def test_a_damaged_file_is_refused(llm):
    path = save_calibration(llm.model, calibrate(llm, TEXT))
    for content in ("no JSON", "{}", '{"layer_scale": [1]}'):
        path.write_text(content)
        with pytest.raises(ValueError, match="is not a calibration"):
            load_calibration(llm.model)
    path.write_text(json.dumps(dataclasses.asdict(calibration.Calibration((1.0,), ((1.0,),), 0.25, 100, "0"))))
    with pytest.raises(ValueError, match="has 1 layers"):
        load_calibration(llm.model)


def test_the_cache_alone_has_no_calibration():
    spec = kvjax.CacheSpec(batch=1, query_heads=2, kv_heads=1, head_dim=8, max_prompt_tokens=64, max_new_tokens=8)
    with pytest.raises(ValueError, match="needs a model's calibration"):
        kvjax.Knorm(32, layer_budget_scale="auto").for_layer(spec)
    with pytest.raises(ValueError, match="layer_budget_scale='best' must be"):
        kvjax.Knorm(32, layer_budget_scale="best")


def test_command_prints_and_saves(capsys, tmp_path, llm):
    (tmp_path / "text.txt").write_text(TEXT)
    cli.main(cli.parse(["kvjax", "calibrate", f"--model={MODEL}", f"--text_file={tmp_path / 'text.txt'}"]))
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 1 + llm.model.config.layers
    assert load_calibration(llm.model) == calibrate(llm, TEXT)
    assert "calibrations" in output.err


def test_shipped_calibrations_are_valid():
    shipped = json.loads((calibration.importlib.resources.files("kvjax_models") / "calibrations.json").read_text())
    assert shipped
    for values in shipped.values():
        one = calibration.Calibration.from_json(values)
        assert np.shape(one.head_scale)[0] == len(one.layer_scale) and min(one.layer_scale) >= 0
        assert one.tokens >= 1000


def test_default_text_is_long():
    assert len(calibration.default_text()) > 100_000
