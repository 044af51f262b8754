"""The profile of a model: measurement, files, calibration texts, and the command."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax_models import cli, profile
from kvjax_models.model.config import AttentionConfig
from kvjax_models.model.llama import Llama
from kvjax_models.profile import FRACTIONS
from kvjax_models.runner.prefill import prefill_layers
from tests.models import tiny
from tests.models.support import small_config

TEXTS = ["A text of some more tokens. " * 5, "Another one, which differs; and more. " * 3]
# (layers, query heads, KV heads, head dimension, width, layers without a window) of the models with shipped profiles.
SHIPPED = {
    "smollm2-135m": (30, 9, 3, 64, 576, set(range(30))),
    "gemma-3-270m": (18, 4, 1, 256, 640, {5, 11, 17}),
    "qwen2.5-coder-0.5b": (24, 14, 2, 64, 896, set(range(24))),
    "qwen2.5-coder-1.5b": (28, 12, 2, 128, 1536, set(range(28))),
}
# Of the evaluations of this repository, and of published benchmarks.
FORBIDDEN = (
    "access code of the Lisbon", "password of the wireless", "ferry to Oslo", "blue diamond", "Alvarez", "violin",
    "extension of the library", "serial number of the old printer", "steps up to the lighthouse", "farmer near Dublin",
    "Nairobi", "kitchen safe", "special magic", "Paul Graham", "Gutenberg", "REGISTER_CONTENT",
)  # fmt: skip


@pytest.fixture(scope="module")
def llm():
    return tiny.make_llm(layers=3, attention=AttentionConfig(windows=(None, 16, None)))


@pytest.fixture(scope="module")
def measured(llm):
    return profile.measure(llm.model, llm.tokenizer, TEXTS)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    return tmp_path


def assert_equal(first, second, **tolerance):
    for name in ("head_needs", "kept_mass", "scorer", "query_moments", "query_means", "query_norms"):
        arrays = getattr(first, name), getattr(second, name)
        if arrays[0] is None:
            assert arrays[1] is None
        else:
            np.testing.assert_allclose(*arrays, err_msg=name, **tolerance)


def test_heads_share_one_budget():
    scores = np.random.default_rng(0).random((4, 2, 100)) * np.arange(1, 5)[:, None, None]
    needs, mass = profile.head_needs(scores, sinks=2)
    pooled = scores.copy()
    pooled[:, :, :2] = np.inf
    for fraction, need, kept_mass in zip(FRACTIONS, needs, mass, strict=True):
        np.testing.assert_allclose(need.mean(), fraction, atol=0.001)
        assert need.min() >= 0.02  # the sinks
        kept = pooled >= np.sort(pooled, axis=None)[-round(fraction * scores.size)]
        np.testing.assert_allclose(need, kept.mean(axis=2))
        np.testing.assert_allclose(kept_mass, scores[kept].sum() / scores.sum())


def test_a_profile_describes_heads_without_a_window(llm, measured):
    full = [0, 2]
    np.testing.assert_allclose(measured.head_needs[:, full].mean(axis=(1, 2)), FRACTIONS, atol=0.01)
    arrays = (measured.head_needs[:, 1], measured.scorer[1], measured.query_moments[1], measured.query_means[1])
    assert not any(array.any() for array in arrays)
    heads, needs = measured.ranked_heads(), measured.needs(0.125)
    assert f"most retrieving (layer, head): {heads[0]}, " in repr(measured) and len(repr(measured)) < 300
    assert sorted(heads) == [(layer, head) for layer in full for head in range(2)]
    assert [needs[head] for head in heads] == sorted((needs[head] for head in heads), reverse=True)
    assert np.array_equal(measured.needs(0.2), measured.head_needs[3])
    assert np.array_equal(measured.needs(1e-9), measured.head_needs[0])
    assert np.all(np.diff(measured.kept_mass) > 0)


def test_statistics_of_queries(llm, measured):
    """Rotated queries of all tokens come from the prefill; means of unrotated ones from undoing the rotation."""
    model, expected, norms = llm.model, [], []
    for text in TEXTS:
        tokens = llm.tokenizer.encode(text)
        padded, count = np.asarray([tokens], np.int32), len(tokens)
        layers = list(prefill_layers(model, padded, jnp.array([count]), count, [count] * 3))
        queries = np.asarray(layers[2].queries)[0, profile.SKIPPED_TOKENS :].reshape(-1, 2, 2, 16)
        expected.append(np.einsum("thgd,thge->hde", queries, queries) / (2 * len(queries)))
        norms.append(np.linalg.norm(queries, axis=-1).mean(axis=0).reshape(-1))
    np.testing.assert_allclose(measured.query_moments[2], np.mean(expected, axis=0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(measured.query_norms[2], np.mean(norms, axis=0), rtol=1e-4)
    assert np.all(np.linalg.norm(measured.query_means[2], axis=-1) < measured.query_norms[2])


def test_the_scorer_predicts_the_scores(llm, measured):
    """On a text that it was fitted on, it is closer to the log scores than their mean."""
    tokens = llm.tokenizer.encode(TEXTS[0])
    for layer, sample in enumerate(profile.read_layers(llm.model, tokens)):
        if sample is None:
            continue
        scorer, x = measured.scorer[layer], jnp.asarray(sample.x)
        predicted = np.asarray(profile.predict_log_scores(scorer, x))[profile.SKIPPED_TOKENS :]
        np.testing.assert_allclose(predicted, sample.features() @ scorer, rtol=1e-3, atol=1e-3)
        later = profile.predict_log_scores(scorer, x[None, 10:], first=10)[0]
        np.testing.assert_allclose(later, predicted[2:], rtol=1e-3, atol=1e-3)
        error = np.mean((predicted - sample.targets()) ** 2, axis=0)
        assert np.all(error < np.var(sample.targets(), axis=0))


def test_ridge_regression_beats_the_mean_on_new_samples():
    rng = np.random.default_rng(0)
    weights, ridge = rng.normal(size=(20, 3)), profile.Ridge()
    for size in (10, 200):
        features = rng.normal(size=(size, 20))
        ridge.add(features, features @ weights + rng.normal(size=(size, 3)))
    features = rng.normal(size=(500, 20))
    targets = features @ weights + rng.normal(size=(500, 3))
    error = np.mean((features @ ridge.solve() - targets) ** 2, axis=0)
    assert np.all(error < 0.15 * np.var(targets, axis=0))
    assert np.linalg.norm(ridge.solve(1000.0)) < np.linalg.norm(ridge.solve())


def test_a_saved_profile_belongs_to_all_files_of_a_model(llm, measured):
    """Files are read once until they change."""
    assert profile.find(llm.model) is None
    path = profile.save(llm.model, measured)
    graph, state = nnx.split(llm.model)
    narrow = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    for model in (llm.model, narrow):
        assert_equal(profile.find(model), measured, rtol=1e-3, atol=1e-3)
    first = profile.find(llm.model)
    assert profile.find(llm.model) is first
    assert profile.save(llm.model, dataclasses.replace(first, scorer=None)) == path
    os.utime(path, ns=(0, 0))
    assert first.scorer is not None and profile.find(llm.model).scorer is None


def test_damaged_files_are_refused(llm, measured, tmp_path):
    path = profile.save(llm.model, measured)
    intact = path.read_bytes()
    with np.load(path) as file:
        arrays = dict(file)

    def assert_refused(model=llm.model):
        with pytest.raises(ValueError, match="is not a profile of this model; remove it, or run `kvjax calibrate`"):
            profile.find(model)

    for content in (b"", b"no archive", intact[: len(intact) // 2], intact[:3000] + b"x" * 100 + intact[3100:]):
        path.write_bytes(content)
        assert_refused()
    needs = arrays["head_needs"]
    for change in (
        {"head_needs": needs[:, :2]},
        {"head_needs": needs + 2},
        {"head_needs": needs * np.nan},
        {"scorer": arrays["scorer"] + np.inf},
        {"query_norms": -arrays["query_norms"]},
        {"query_means": np.full(arrays["query_means"].shape, "text")},
        {"header": np.asarray(json.dumps({"format": 99, "model": profile.profile_key(llm.model)}))},
        {"header": np.asarray("[]")},
        {"header": np.asarray([{}], object)},
    ):
        np.savez(path, **arrays | change)
        assert_refused()
    for missing in ("query_norms", "scorer"):
        np.savez(path, **{name: array for name, array in arrays.items() if name != missing})
        if missing == "query_norms":
            assert_refused()
    assert profile.find(llm.model).scorer is None
    other = tiny.make_llm(layers=2).model
    path.rename(tmp_path / "profiles" / f"{profile.profile_key(other)}.npz")
    assert_refused(other)


def test_a_model_without_a_profile_is_measured_once(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "TOKENS", 100)
    assert profile.find_or_measure(llm.model, None) is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path / "file"))
    found = profile.find_or_measure(llm.model, llm.tokenizer)  # cannot be saved, and is used
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))
    assert_equal(profile.find_or_measure(llm.model, llm.tokenizer), found)
    monkeypatch.setattr(profile, "measure", None)
    assert_equal(profile.find_or_measure(llm.model, llm.tokenizer), found, rtol=1e-3, atol=1e-3)
    assert profile.find_or_measure(llm.model, None) is not None


def test_what_cannot_be_measured_is_refused(llm, monkeypatch):
    windows = Llama(small_config(layers=2, attention=AttentionConfig(windows=(16, 16))), rngs=nnx.Rngs(0))
    assert profile.find_or_measure(windows, llm.tokenizer) is None
    for model, options, message in (
        (windows, {}, "every layer of the model has a sliding window"),
        (llm.model, {"texts": ["short"]}, "the texts have fewer than 64 tokens"),
        (llm.model, {"max_texts": 0}, "max_texts=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            profile.measure(model, llm.tokenizer, **options)
    monkeypatch.setattr(profile, "mesh_of", lambda _: object())
    with pytest.raises(ValueError, match="a profile is measured on a single device"):
        profile.measure(llm.model, llm.tokenizer)
    assert profile.find_or_measure(llm.model, llm.tokenizer) is None


@pytest.mark.parametrize("path", sorted(profile.shipped_directory().glob("*.npz")), ids=lambda path: path.stem)
def test_shipped_profiles_fit_their_models(path):
    assert path.stat().st_size <= 4 * 2**20 and path in profile._shipped().values()
    with np.load(path) as file:
        arrays = dict(file)
    layers, query_heads, kv_heads, dim, width, full = SHIPPED[path.stem]
    sizes = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": dim, "width": width}
    assert profile._are_valid(arrays, small_config(layers=layers, **sizes)) and "scorer" in arrays
    needs = arrays["head_needs"]
    assert set(np.flatnonzero(needs[0].any(axis=1))) == full
    np.testing.assert_allclose(needs[:, sorted(full)].mean(axis=(1, 2)), FRACTIONS, atol=1e-3)


def test_calibration_texts_fill_all_chunks_and_contain_no_text_of_an_evaluation():
    texts = profile.calibration_texts()
    assert len(texts) == 6 and all(len(text) > 39_000 for text in texts)  # at most 10 characters per token
    chunks = profile.make_chunks(tiny.make_llm().tokenizer, texts, profile.TOKENS, profile.TEXTS)
    assert len(chunks) == profile.TEXTS and {len(chunk) for chunk in chunks} == {profile.TOKENS}
    everything = " ".join(texts).lower()
    assert not [text for text in FORBIDDEN if text.lower() in everything]
    assert not re.search(r"^#### \d", " ".join(texts), re.MULTILINE)  # answers of GSM8K


def test_chunks_of_texts_take_turns():
    tokenizer = tiny.make_llm().tokenizer
    texts = ["abcdefgh", "ABC", "12345678"]
    for size, count, expected in ((4, 9, ["abc", "ABC", "123", "def", "456"]), (6, 2, ["abcde", "ABC"])):
        chunks = profile.make_chunks(tokenizer, texts, size, count)
        assert [tokenizer.decode(chunk, skip_special_tokens=False) for chunk in chunks] == [
            f"{tiny.BOS}{text}" for text in expected
        ]


def test_the_command_saves_a_profile(tmp_path, capsys, cache_directory):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS))
    cli.main(cli.parse(["kvjax", "calibrate", str(tiny.directory()), "--texts", "1", "--text", str(text)]))
    output = capsys.readouterr()
    assert output.out.startswith("4 KV heads in 2 layers without a sliding window.\n") and "saved as" in output.err
    assert len(list((cache_directory / "profiles").glob("*.npz"))) == 1
    with pytest.raises(SystemExit, match="--texts=0 must be at least 1"):
        cli.main(cli.parse(["kvjax", "calibrate", str(tiny.directory()), "--texts", "0"]))
