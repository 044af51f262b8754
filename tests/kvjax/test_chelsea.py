"""Chelsea: budgets of its schedules, conserved sums, and outlier heads."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.combinators.outlier_heads import HeadChoice
from kvjax.policies.chelsea import ChelseaState
from kvjax.structures.soft_matching import SCHEDULES
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    NEW,
    POLICIES,
    after,
    decoded,
    each,
    go,
    make_spec,
    make_stream,
    prefilled,
    read_weights,
    whole_run,
)

SINKS, RECENT, EVERY = 2, 8, 8
OPTIONS = {"sinks": SINKS, "recent": RECENT, "compact_every": EVERY, "chunk": 8}


def outlier_heads(budget, choice):
    return kvjax.OutlierHeads(kvjax.Chelsea(budget, **OPTIONS), choice, full=kvjax.Exact(EVERY))


@pytest.mark.parametrize("schedule", each(SCHEDULES, quick=("llama-3",)))
def test_the_budget_is_full_after_every_compaction_for_every_schedule(schedule):
    stream = make_stream()
    cache = prefilled(kvjax.Chelsea(20, schedule=schedule, **OPTIONS), stream)
    for tokens in range(0, NEW + 1, EVERY):
        middle = np.maximum(np.array(LENGTHS) + tokens - SINKS - RECENT, 0)
        np.testing.assert_array_equal(cache.state.count, np.minimum(middle, 10))
        degree = np.asarray(cache.state.degree)
        np.testing.assert_array_equal(degree.sum(-1), np.repeat(middle[:, None], 2, axis=1))
        np.testing.assert_array_equal((degree > 0).sum(-1), np.minimum(middle, 10)[:, None].repeat(2, axis=1))
        if tokens < NEW:
            cache, _, _ = go(cache, after(stream, LENGTHS, EVERY, tokens))


def test_equal_keys_in_every_cluster_make_attention_exact():
    stream = make_stream(7)
    stream = stream._replace(keys=3 * stream.keys[:, np.arange(64) // 16])  # four different keys in long runs
    outputs, expected = (decoded(policy, stream)[1] for policy in (POLICIES["chelsea"], POLICIES["exact"]))
    assert np.abs(outputs - expected).max() < 2e-5


def test_bfloat16_centroids_are_merged_in_float32():
    cache = prefilled(POLICIES["chelsea"], make_stream(), make_spec(dtype=jnp.bfloat16))
    assert kvjax.cache_bytes(cache.state.keys.stored).device == cache.state.keys.stored.size * 2
    weights = read_weights(cache)
    for row in range(len(LENGTHS)):
        present = np.arange(HEAD_DIM) < LENGTHS[row]
        np.testing.assert_allclose(weights[row], np.broadcast_to(present, (2, HEAD_DIM)), atol=2e-2)


# --- outlier heads ---


@pytest.mark.heavy
def test_full_heads_take_their_slots_from_the_others(tmp_path):
    choice = HeadChoice(layers=2, kv_heads=2, full=((0, 1), (1, 0)))
    path = tmp_path / "heads.json"
    choice.save(path, {"model": "none"})
    assert HeadChoice.load(path) == choice
    assert json.loads(path.read_text())["provenance"] == {"model": "none"}
    budget, full = 40, 64
    policy, remaining = outlier_heads(budget, HeadChoice.load(path)), (4 * budget - 2 * full) // 2
    stream, spec = make_stream(), make_spec(layers=2)
    outputs, slots = {}, 0
    for layer in range(2):
        cache = prefilled(policy, stream, dataclasses.replace(spec, layer=layer))
        for group in cache.state:
            centroids = kvjax.Chelsea(remaining, **OPTIONS).num_centroids
            is_chelsea = isinstance(group, ChelseaState)
            slots += group.keys.shape[1] * (group.window.slots + centroids if is_chelsea else group.keys.shape[2])
        cache, outputs[layer], _ = go(cache, after(stream, LENGTHS))
        kvjax.raise_faults(cache)
    assert slots == 2 * (full + remaining)
    assert 4 * budget - 3 < slots <= 4 * budget
    # Head 1 of layer 0 and head 0 of layer 1 are exact; the others are `Chelsea` with the smaller budget.
    np.testing.assert_allclose(outputs[0][:, :, 2:], whole_run("exact")[1][:, :, 2:], atol=1e-5)
    np.testing.assert_allclose(outputs[1][:, :, :2], whole_run("exact")[1][:, :, :2], atol=1e-5)
    _, expected, _ = decoded(kvjax.Chelsea(remaining, **OPTIONS))
    for layer, head in [(0, 0), (1, 1)]:
        queries = slice(2 * head, 2 * head + 2)
        np.testing.assert_allclose(outputs[layer][:, :, queries], expected[:, :, queries], atol=1e-5)


def test_a_file_of_outlier_heads_is_a_setting_in_text(tmp_path):
    choice = HeadChoice(1, 2, full=((0, 0),))
    choice.save(tmp_path / "heads.json", {})
    text = f"chelsea:sinks=2,recent=8,compact_every=8,chunk=8,outlier_heads={tmp_path / 'heads.json'}@40"
    assert kvjax.PolicyChoice.parse(text).make() == outlier_heads(40, choice)
