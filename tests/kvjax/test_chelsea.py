"""Chelsea beyond what holds for every policy: its slope, and heads that keep all or drop."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.combinators.head_choice import HeadChoice

import kvjax
from kvjax.policies.chelsea import SLOPE_LIMIT, ChelseaState
from kvjax.structures.soft_matching import SCHEDULES
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    NEW,
    POLICIES,
    after,
    begin,
    each,
    go,
    make_spec,
    make_stream,
    prompt_of,
    read_weights,
    row_keys,
    whole_run,
)

SINKS, RECENT, EVERY = 2, 8, 8
OPTIONS = {"sinks": SINKS, "recent": RECENT, "compact_every": EVERY, "chunk": 8}


def begun(policy, stream, spec=None, lengths=LENGTHS):
    return begin(policy, spec or make_spec(), row_keys(), *prompt_of(stream, lengths), lengths)


@pytest.mark.parametrize("schedule", each(SCHEDULES, quick=("llama-3",)))
def test_the_budget_is_full_after_every_compaction_for_every_schedule(schedule):
    stream = make_stream()
    cache = begun(kvjax.Chelsea(20, schedule=schedule, **OPTIONS), stream)
    for tokens in range(0, NEW + 1, EVERY):
        between = np.maximum(np.array(LENGTHS) + tokens - SINKS - RECENT, 0)
        np.testing.assert_array_equal(cache.state.count, np.minimum(between, 10))
        degree = np.asarray(cache.state.degree)
        np.testing.assert_array_equal(degree.sum(-1), np.repeat(between[:, None], 2, axis=1))
        np.testing.assert_array_equal((degree > 0).sum(-1), np.minimum(between, 10)[:, None].repeat(2, axis=1))
        if tokens < NEW:
            cache, _, _ = go(cache, after(stream, LENGTHS, EVERY, tokens))


@pytest.mark.parametrize("name", each(["chelsea", "chelsea_paper"]))
def test_means_read_every_token_once_and_sums_are_conserved(name):
    # A query of zeros reads degree times mean value: every token exactly once, through all compactions.
    cache, _, weights = whole_run(name)
    for row, step in np.ndindex(len(LENGTHS), NEW):
        seen = np.arange(HEAD_DIM) < LENGTHS[row] + step + 1
        np.testing.assert_allclose(weights[row, step], np.broadcast_to(seen, (2, HEAD_DIM)), atol=1e-5)
    merged, stream = cache.state, make_stream()
    for row, head in np.ndindex(len(LENGTHS), 2):
        end = LENGTHS[row] + NEW - RECENT
        summed = np.asarray(merged.degree[row, head], np.float64) @ np.asarray(merged.keys[row, head], np.float64)
        np.testing.assert_allclose(summed, stream.keys[row, SINKS:end, head].sum(0), atol=1e-4)


def test_dropping_keeps_tokens_as_they_are_and_all_their_mass():
    cache, _, _ = whole_run("chelsea_drop")
    merged, stream = cache.state, make_stream()
    for row, head in np.ndindex(len(LENGTHS), 2):
        count = int(merged.count[row])
        named = np.asarray(merged.values[row, head, :count]).argmax(-1)
        assert (np.diff(named) > 0).all()  # in the order of the text
        np.testing.assert_array_equal(merged.keys[row, head, :count], stream.keys[row, named, head])
        assert int(merged.degree[row, head].sum()) == LENGTHS[row] + NEW - SINKS - RECENT or count == 0


@pytest.mark.parametrize("name", each(["chelsea", "chelsea_paper", "chelsea_drop"]))
def test_equal_keys_in_every_cluster_make_attention_exact(name):
    # Four kinds of keys in long runs; values differ, so that dropping is not exact.
    stream = make_stream(7)
    stream = stream._replace(keys=3 * stream.keys[:, np.arange(64) // 16])
    outputs, expected = (
        go(begun(policy, stream), after(stream, LENGTHS))[1] for policy in (POLICIES[name], POLICIES["exact"])
    )
    apart = np.abs(outputs - expected).max()
    assert apart > 1e-2 if name == "chelsea_drop" else apart < 2e-5


def test_the_slope_is_the_covariance_inside_centroids_through_prompt_and_compactions():
    """In float64, from the tokens that each centroid was merged of: one-hot values name them."""
    stream = make_stream(3)
    merged = go(begun(POLICIES["chelsea"], stream), after(stream, LENGTHS))[0].state
    for row, head in [(0, 0), (0, 1), (1, 0)]:
        tokens = np.arange(SINKS, LENGTHS[row] + NEW - RECENT)
        keys = stream.keys[row, tokens, head].astype(np.float64)
        values = stream.values[row, tokens, head].astype(np.float64)
        members = np.asarray(merged.values[row, head], np.float64)[:, tokens] > 1e-6  # [M, N]
        np.testing.assert_array_equal(members.sum(0), 1)
        np.testing.assert_array_equal(members.sum(1), merged.degree[row, head])
        inside = [values[of] - values[of].mean(0) for of in members], [keys[of] - keys[of].mean(0) for of in members]
        covariance = sum(v.T @ k for v, k in zip(*inside, strict=True)) / len(tokens)
        variance = sum((v**2).sum() for v in inside[0]) / len(tokens)
        np.testing.assert_allclose(merged.pooled.covariance[row, head], covariance, atol=1e-5)
        np.testing.assert_allclose(merged.pooled.variance[row, head], variance, rtol=1e-4)


def test_a_slope_moves_values_as_its_formula_says():
    stream = make_stream(3)
    cache = begun(POLICIES["chelsea"], stream)
    query = stream.queries[:, 40:42]
    attended = kvjax.normalize(kvjax.attend(cache, jnp.asarray(query)))
    merged = cache.state
    row, head, token, of = 0, 1, 1, 2  # query head 2 reads kv head 1
    q = query[row, token, of].astype(np.float64)
    window = slice(0, SINKS + RECENT)
    keys = np.concatenate([merged.window.keys[row, head, window], merged.keys[row, head]]).astype(np.float64)
    values = np.concatenate([merged.window.values[row, head, window], merged.values[row, head]]).astype(np.float64)
    change = np.asarray(merged.pooled.covariance[row, head], np.float64) @ q / np.sqrt(HEAD_DIM)
    limit = SLOPE_LIMIT * np.sqrt(float(merged.pooled.variance[row, head]))
    values[SINKS + RECENT :] += change * limit / np.hypot(np.linalg.norm(change), limit)
    weight = np.exp(keys @ q / np.sqrt(HEAD_DIM)) * np.concatenate([np.ones(10), merged.degree[row, head]])
    np.testing.assert_allclose(attended[row, token, of], weight @ values / weight.sum(), atol=1e-5)


def test_the_slope_lowers_the_error_where_values_follow_keys():
    rng = np.random.default_rng(0)
    norm, tokens, dim, batch = 4, 256, 32, 4
    latent = rng.normal(size=(batch, tokens, 1, 4))
    to_key, to_value = rng.normal(size=(2, 4, dim))
    unit = lambda x, length: (length * x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)  # noqa: E731
    keys, values = unit(latent @ to_key, norm), unit(latent @ to_value, 1)
    query = unit(rng.normal(size=(batch, 16, 1, 4)) @ to_key, norm)
    spec = kvjax.CacheSpec(batch, 1, 1, dim, max_prompt_tokens=tokens, max_new_tokens=1)

    def error(policy):
        @jax.jit
        def run(keys, values, query):
            lengths = jnp.full(batch, tokens, jnp.int32)
            cache = kvjax.prefill(kvjax.init(policy, spec, row_keys(batch)), keys, values, lengths)[0]
            return kvjax.normalize(kvjax.attend(cache, query))

        found = np.asarray(run(keys, values, query), np.float64)
        exact = np.asarray(
            jax.nn.softmax(query[:, :, 0] @ keys[:, :, 0].swapaxes(1, 2) / np.sqrt(dim), axis=-1) @ values[:, :, 0]
        )
        return np.linalg.norm(found[:, :, 0] - exact, axis=-1).mean()

    make = functools.partial(kvjax.Chelsea, 64, sinks=0, recent=0, chunk=64)
    assert error(make()) < 0.7 * error(make(slope=None))


@pytest.mark.heavy
def test_heads_that_keep_all_take_their_slots_from_the_others(tmp_path):
    choice = HeadChoice(layers=2, kv_heads=2, full=((0, 1),), drop=((1, 0),))
    path = tmp_path / "heads.json"
    choice.save(path, {"model": "none"})
    assert HeadChoice.load(path) == choice
    assert json.loads(path.read_text())["provenance"] == {"model": "none"}
    budget, full = 40, 64
    policy = kvjax.Chelsea(budget, heads=HeadChoice.load(path), **OPTIONS)
    left = (4 * budget - full) // 3
    stream = make_stream()
    spec = make_spec(layers=2)
    outputs, slots = {}, 0
    for layer in range(2):
        cache = begun(policy, stream, dataclasses.replace(spec, layer=layer))
        for group in cache.state:
            of_window = group.window.keys.shape[2] if isinstance(group, ChelseaState) else 0
            slots += group.keys.shape[1] * (of_window + group.keys.shape[2])
        cache, outputs[layer], _ = go(cache, after(stream, LENGTHS))
        kvjax.raise_faults(cache)
    assert slots == full + 3 * left
    assert 4 * budget - 3 < slots <= 4 * budget
    # Each head does what its policy does: head 1 of layer 0 is exact, the others as `Chelsea` of the smaller budget.
    np.testing.assert_allclose(outputs[0][:, :, 2:], whole_run("exact")[1][:, :, 2:], atol=1e-5)
    for layer, head, joins in [(0, 0, "mean"), (1, 0, "drop"), (1, 1, "mean")]:
        alone = begun(kvjax.Chelsea(left, joins=joins, **OPTIONS), stream)
        _, expected, _ = go(alone, after(stream, LENGTHS))
        queries = slice(2 * head, 2 * head + 2)
        np.testing.assert_allclose(outputs[layer][:, :, queries], expected[:, :, queries], atol=1e-5)


def test_equal_settings_are_compiled_once():
    policies = [kvjax.Chelsea(40, heads=HeadChoice(1, 2, full=((0, 0),)), **OPTIONS) for _ in range(2)]
    caches = [kvjax.init(policy, make_spec(), row_keys()) for policy in policies]
    assert jax.tree.structure(caches[0]) == jax.tree.structure(caches[1])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: HeadChoice(1, 2, full=((1, 0),)), "head \\(1, 0\\) is none of 1 layers x 2 kv heads"),
        (lambda: HeadChoice(1, 2, full=((0, 0),), drop=((0, 0),)), "named twice"),
        (
            lambda: kvjax.Chelsea(20, schedule="llama", **OPTIONS),
            "schedule='llama'; it must be 'llama-2' or ",
        ),
        (lambda: kvjax.Chelsea(20, slope="rank-1", **OPTIONS), "slope='rank-1'"),
        (lambda: kvjax.Chelsea(20, joins="max", **OPTIONS), "joins='max'"),
        (
            lambda: kvjax.Chelsea(20, heads=HeadChoice(1, 3), **OPTIONS).for_layer(make_spec()),
            "heads are those of 1 layers x 3 kv heads; the cache has 1 x 2",
        ),
        (
            lambda: kvjax.Chelsea(30, heads=HeadChoice(1, 2, full=((0, 0),)), **OPTIONS).for_layer(make_spec()),
            "budget=30 is 60 slots over all heads; 1 heads that keep all take 64 each and leave -4",
        ),
    ],
)
def test_choices_that_cannot_be_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_read_weights_of_a_prompt_are_those_of_its_tokens():
    # bfloat16 storage: merged in float32, rounded once.
    cache = begun(POLICIES["chelsea"], make_stream(), make_spec(dtype=jnp.bfloat16))
    assert cache.state.keys.dtype == jnp.bfloat16
    weights = read_weights(cache)
    for row in range(len(LENGTHS)):
        seen = np.arange(HEAD_DIM) < LENGTHS[row]
        np.testing.assert_allclose(weights[row], np.broadcast_to(seen, (2, HEAD_DIM)), atol=2e-2)
