"""Predicted scores of a prompt's tokens: exact prefill, generators, and language models."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvjax
from kvjax_models import profile
from kvjax_models.adapters import layers as adapter_layers
from kvjax_models.model.config import AttentionConfig
from kvjax_models.model.llama import Llama
from kvjax_models.runner import lowering, prefill
from kvjax_models.runner.generator import Generator, prefill_together
from tests.models import tiny
from tests.models.loops import decode_all
from tests.models.support import compile_counts, key_data, small_config

VOCABULARY, CHUNK, PADDED = 128, 16, 80
LENGTHS = (70, 33, 1)
SIZES = {"vocab_size": VOCABULARY, "width": 32, "mlp_width": 64, "query_heads": 4, "kv_heads": 2, "head_dim": 16}
CONFIG = small_config(**SIZES, max_length=512, layers=3, attention=AttentionConfig(windows=(None, 20, None)))
PROMPTS = [np.random.default_rng(length).integers(0, VOCABULARY, length).tolist() for length in LENGTHS]
POLICY = kvjax.KVzap(24, compact_every=8)


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("KVJAX_CACHE", str(tmp_path))


@functools.cache
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


@functools.cache
def scorer():
    shape = CONFIG.layers, CONFIG.width + 2, CONFIG.kv_heads
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def make_generator(policy=POLICY, **changes):
    sizes = {"batch": 3, "max_prompt_tokens": 70, "max_new_tokens": 40, "prefill_chunk": CHUNK, "scorer": scorer()}
    return Generator(model(), policy, **sizes | changes)


def start(generator):
    return generator.prefill(generator.init_state(), PROMPTS)


def assert_equal_states(state, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(key_data(a), key_data(b)), state, other)


def prefilled(chunk, with_scorer=True):
    """Returns the results of all layers as NumPy arrays, and the residual stream before each of them."""
    tokens = np.zeros((3, PADDED), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    x = np.asarray(prefill.embed(model(), tokens)).reshape(3, PADDED, -1)
    inputs, results = [], []
    options = {"scorer": jnp.asarray(scorer())} if with_scorer else {}
    for layer in prefill.prefill_layers(model(), tokens, jnp.array(LENGTHS), chunk, [0] * 3, **options):
        inputs.append(x)
        x = np.asarray(layer.x).reshape(3, PADDED, -1)
        results.append(layer)
    return inputs, results


def test_chunks_have_the_scores_of_the_entire_residual_stream():
    """The residual stream comes from one chunk, the scores from five."""
    inputs, _ = prefilled(PADDED)
    _, results = prefilled(CHUNK)
    for number, (x, layer, result) in enumerate(zip(inputs, model().layers, results, strict=True)):
        expected = profile.predict_log_scores(scorer()[number], layer.normalize(jnp.asarray(x)))
        assert result.predicted_scores.shape == (3, 2, PADDED) and result.predicted_scores.dtype == jnp.float32
        for row, length in enumerate(LENGTHS):
            scores = result.predicted_scores[row, :, :length]
            np.testing.assert_allclose(scores, expected[row, :length].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shares", [None, ((0.5, 0.7), None, (1.0, 0.001))])
def test_caches_keep_the_tokens_with_the_highest_scores(shares):
    policy = POLICY if shares is None else kvjax.HeadBudgets(POLICY, shares)
    state, (_, results) = start(make_generator(policy)), prefilled(CHUNK)
    assert isinstance(state.layers[1].policy, kvjax.SlidingWindow)
    for number in (0, 2):
        cache, result = state.layers[number], results[number]
        groups = [(cache.policy, range(2), cache.state)]
        if shares is not None:
            heads = [index.index.tolist() for index in cache.state.heads]
            groups = list(zip(cache.policy.groups(), heads, cache.state.groups, strict=True))
        for policy, heads, store in groups:
            if isinstance(policy, kvjax.Exact):
                continue
            for (row, length), (position, head) in itertools.product(enumerate(LENGTHS), enumerate(heads)):
                scores = np.asarray(result.predicted_scores[row, head, :length]).copy()
                scores[: policy.sinks] = np.inf
                best = np.argsort(-scores, kind="stable")[: policy.budget]
                kept = store.keys[row, position, : len(best)]
                np.testing.assert_array_equal(kept, result.keys[row, best, head])


def test_generation_continues_with_later_tokens():
    generator = make_generator()
    rows, state = decode_all(generator, start(generator), 30)
    assert [len(row) for row in rows] == [30] * 3
    np.testing.assert_array_equal(state.positions, np.array(LENGTHS) + 30)
    # A budget for all tokens gives the tokens of a full cache.
    exact, roomy = (make_generator(policy) for policy in (kvjax.Exact(8), kvjax.KVzap(112, compact_every=8)))
    assert decode_all(roomy, start(roomy), 30)[0] == decode_all(exact, start(exact), 30)[0]
    assert start(generator.with_batch(3)).positions.tolist() == list(LENGTHS)


def test_streamed_tokens_have_the_scores_of_an_entire_prompt():
    generator = make_generator(kvjax.KVzap(112, compact_every=8), streaming=True)
    state, (_, results) = start(generator), prefilled(CHUNK)
    for number in (0, 2):
        for row, length in enumerate(LENGTHS):
            scores = np.asarray(state.layers[number].state.scores[row, :, :length], np.float32)
            expected = results[number].predicted_scores[row, :, :length]
            np.testing.assert_allclose(scores, expected, rtol=0.01, atol=0.01)  # bfloat16
    entire = make_generator(kvjax.Exact(8))
    assert decode_all(generator, state, 30)[0] == decode_all(entire, start(entire), 30)[0]


def test_long_answers_have_bounded_memory():
    policy = kvjax.KVzap(24, recent=8, compact_every=8)
    generator = make_generator(policy, max_new_tokens=64)
    state = decode_all(generator, start(generator), 60)[1]
    store = state.layers[0].state
    assert store.keys.shape[2] == 24 and np.isfinite(np.asarray(store.scores, np.float32)).all()
    newest = np.asarray(store.newest)
    assert ((newest >= policy.sinks) & (newest < 24)).all() and all(len(set(one)) == 8 for one in newest.reshape(-1, 8))


def test_other_policies_predict_no_scores():
    generator = make_generator(kvjax.SnapKV(40, window_size=8, compact_every=8))
    assert generator.scorer is None
    assert all(result.predicted_scores is None for result in prefilled(CHUNK, with_scorer=False)[1])
    start(generator)
    with compile_counts([prefill.prefill_layer, prefill.prefill_cache], [0, 0]):
        start(make_generator(kvjax.SnapKV(40, window_size=8, compact_every=8), scorer=None))


def test_generators_without_a_scorer_are_refused():
    with pytest.raises(ValueError, match=r"KVzap\(budget=24.* requires predicted scores.*run `kvjax calibrate`"):
        make_generator(scorer=None)
    with pytest.raises(ValueError, match=r"scorer has shape \(2, 34, 2\), expected \[L, W\+2, H_kv\] = \(3, 34, 2\)"):
        make_generator(scorer=scorer()[:2])
    empty = kvjax.init(POLICY, make_generator().specs[0], jax.random.split(jax.random.key(0), 3))
    with pytest.raises(ValueError, match="KVzap needs predicted scores of the prompt's tokens, which adapters do not"):
        adapter_layers.prefill(*empty, *[jnp.ones((3, 8, heads, 16)) for heads in (4, 2, 2)], jnp.array([8, 8, 8]))


def test_one_prefill_for_several_policies():
    policies = POLICY, kvjax.Exact(8), kvjax.KVzip(24, compact_every=8), kvjax.KVzip(24, compact_every=8, sinks=2)
    generators = [make_generator(policy) for policy in policies]
    *_, states = prefill_together(generators, [generator.init_state() for generator in generators], PROMPTS)
    for generator, state in zip(generators, states, strict=True):
        assert_equal_states(state, start(generator))
    other = make_generator(scorer=2 * scorer())
    with pytest.raises(ValueError, match="generators that read one prompt need the same scorer"):
        next(prefill_together([generators[0], other], [generators[0].init_state(), other.init_state()], PROMPTS))


def test_programs_are_lowered_as_they_run():
    generator = make_generator(max_new_tokens=24)
    start(generator)
    with compile_counts([prefill.prefill_layer, prefill.prefill_cache], [0, 0]):
        for program in lowering.lower_prefill(generator, max(LENGTHS)):
            program.compile()


def test_generators_have_a_scorer_if_their_policy_requires_it(monkeypatch):
    monkeypatch.setattr(profile, "TOKENS", 100)
    llm, sizes = tiny.make_llm(), {"max_prompt_tokens": 512, "max_new_tokens": 8}
    requiring = (POLICY, kvjax.KVzap, functools.partial(kvjax.KVzap, sinks=2), "kvzap:heads=auto")
    budgets = (None, 64, 64, 64)
    generators = [llm.cache(*choice).generator(**sizes) for choice in zip(requiring, budgets, strict=True)]
    assert all(generator.scorer is not None for generator in generators)
    others = (kvjax.KVzip, functools.partial(kvjax.SnapKV, sinks=2), "chelsea:heads=auto")
    assert all(llm.cache(policy, 160).generator(**sizes).scorer is None for policy in others)


def test_a_profile_without_a_scorer_is_measured_again(monkeypatch):
    monkeypatch.setattr(profile, "TOKENS", 100)
    llm = tiny.make_llm()
    profile.save(llm.model, dataclasses.replace(llm.profile(), scorer=None))
    quick = llm.profile()
    assert quick.scorer is None
    sizes = {"max_prompt_tokens": 64, "max_new_tokens": 8}
    generator = llm.cache("kvzap:heads=auto", 32).generator(**sizes)
    found = llm.profile()
    np.testing.assert_allclose(generator.scorer, found.scorer, rtol=1e-2, atol=1e-3)  # files have float16
    np.testing.assert_array_equal(found.head_needs, quick.head_needs)
    monkeypatch.setattr(profile, "measure", None)
    assert llm.generate("Some text of a few more words.", "kvzap", 32, max_new_tokens=8) is not None
    document = llm.cache("kvzap:heads=auto", 32, kv_dtype="int8").read(4 * "Some text of a few more words. ")
    np.testing.assert_array_equal(document.prefix.generator.scorer, found.scorer)
    # The scorer of a profile that is passed takes precedence.
    other = dataclasses.replace(found, scorer=2 * found.scorer)
    np.testing.assert_array_equal(llm.cache("kvzap", 64, heads=other).generator(**sizes).scorer, other.scorer)


def test_a_model_that_cannot_be_measured_is_refused(monkeypatch):
    llm = tiny.make_llm()
    monkeypatch.setattr(profile, "mesh_of", lambda _: object())
    with pytest.raises(ValueError, match="run `kvjax calibrate`"):
        llm.cache("kvzap", 64).generator(max_prompt_tokens=64, max_new_tokens=8)
