"""Attention Matching against a plain float64 implementation of its steps, and its properties."""

import dataclasses
import itertools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods.attention_matching.attention_fit import (
    References,
    Slots,
    attention_shares,
    capped_logits,
    fit_log_weights,
    fit_values,
    matching_loss,
    refine,
)
from kvjax.methods.attention_matching.least_squares import bounded_weights, matching_pursuit, ridge_solve
from kvjax.policy import RepeatedPrompt
from tests.kvjax.support import (
    FREQUENCIES,
    HEAD_DIM,
    LENGTHS,
    after,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    row_keys,
)

POLICY = kvjax.AttentionMatching(12, n_future_positions=None, sinks=2, recent=2, compact_every=8)
BOUNDS = (np.exp(-3.0), np.exp(3.0))


def attention_weights(seed=0, queries=40, keys=24):
    logits = 2 * np.random.default_rng(seed).normal(size=(queries, keys))
    return np.exp(logits) / np.exp(logits).sum(1, keepdims=True)


# --- float64 references ---


def plain_ridge(matrix, target, ridge):
    penalty = ridge * np.sum(matrix**2)
    return np.linalg.solve(matrix.T @ matrix + penalty * np.eye(matrix.shape[1]), matrix.T @ target)


def plain_weights(matrix, target, bounds, iterations, ridge):
    weights = np.clip(1 + plain_ridge(matrix, target - matrix.sum(1), ridge), *bounds)
    step = 1 / np.linalg.norm(matrix, 2) ** 2
    for _ in range(iterations):
        weights = np.clip(weights - step * matrix.T @ (matrix @ weights - target), *bounds)
    return weights


def plain_pursuit(matrix, target, count, bounds, ridge, keys_per_step=4):
    """Returns the chosen columns in order, their weights, and the products of all columns with the residual."""
    penalty, chosen, residual = ridge * np.sum(matrix**2), [], target
    while len(chosen) < count:
        product = matrix.T @ residual
        product[chosen] = -np.inf
        chosen += np.argsort(-product, kind="stable")[:keys_per_step].tolist()
        columns = matrix[:, chosen]
        gram = columns.T @ columns + penalty * np.eye(len(chosen))
        weights = np.clip(1 + np.linalg.solve(gram, columns.T @ (target - columns.sum(1))), *bounds)
        residual = target - columns @ weights
    return chosen, weights, matrix.T @ residual


def softmax(logits, sink_logits=-np.inf):
    """Returns probabilities of keys [R, S] next to the sink logits [R] of every query."""
    weights, sinks = np.exp(logits), np.exp(np.broadcast_to(sink_logits, len(logits)))
    return weights / (weights.sum(1) + sinks)[:, None]


def plain_matching(queries, keys, values, policy, sink_logits=-np.inf, logit_cap=np.inf):
    """Returns kept tokens by rank, log-weights and values of one KV head: queries [R, D], keys and values [T, D]."""
    queries, keys, values = (x.astype(np.float64) for x in (queries, keys, values))
    tokens = len(keys)
    logits = queries @ keys.T / np.sqrt(keys.shape[1])
    logits = logits if logit_cap == np.inf else logit_cap * np.tanh(logits / logit_cap)
    probability = softmax(logits, sink_logits)
    first, last = list(range(policy.sinks)), list(range(tokens - policy.recent, tokens))
    others = [token for token in np.argsort(-np.mean(probability**2, axis=0)) if token not in first + last]
    kept = np.array(first + last[::-1] + others)[: policy.budget]
    fitted = np.arange(policy.budget) >= policy.sinks + policy.recent
    share = probability[:, kept]
    weights = np.ones(policy.budget)
    target = probability.sum(1) - share[:, ~fitted].sum(1)
    weights[fitted] = plain_weights(share[:, fitted], target, BOUNDS, 2, policy.ridge)
    compressed = softmax(logits[:, kept] + np.log(weights), sink_logits)
    new = values[kept]
    gap = probability @ values - compressed @ new
    new[fitted] += plain_ridge(compressed[:, fitted], gap, policy.ridge)
    return kept, np.log(weights), new


# --- steps ---


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)], ids=["more queries", "more keys"])
def test_ridge_regression_solves_the_normal_equations(shape):
    rng = np.random.default_rng(0)
    matrix, target = rng.normal(size=shape), rng.normal(size=(shape[0], 3))
    matrix[:, 5] = 0
    solution = ridge_solve(jnp.float32(matrix), jnp.float32(target), 1e-2)
    np.testing.assert_allclose(solution, plain_ridge(matrix, target, 1e-2), atol=1e-5)
    assert (np.asarray(solution)[5] == 0).all()
    assert np.isfinite(ridge_solve(jnp.zeros(shape), jnp.float32(target), 1e-2)).all()


@pytest.mark.parametrize("iterations", [0, 2])
def test_weights_are_bounded_least_squares(iterations):
    matrix = attention_weights()[:, :16]
    target = np.random.default_rng(1).uniform(0, 2, size=40)
    weights = bounded_weights(jnp.float32(matrix), jnp.float32(target), BOUNDS, iterations, 1e-4)
    expected = plain_weights(matrix, target, BOUNDS, iterations, 1e-4)
    np.testing.assert_allclose(weights, expected, rtol=2e-2 if iterations else 1e-3)
    assert np.isclose(expected, BOUNDS[0]).any() or np.isclose(expected, BOUNDS[1]).any()
    errors = [np.linalg.norm(matrix @ w - target) for w in (np.ones(16), expected)]
    assert np.linalg.norm(matrix @ np.asarray(weights) - target) <= 1.001 * errors[1] < errors[0]


@pytest.mark.parametrize("count", [8, 10])
def test_matching_pursuit_chooses_the_keys_of_a_plain_implementation(count):
    matrix, bounds = attention_weights(1, 40, 32), (np.exp(-7), np.exp(7))
    target = np.random.default_rng(2).uniform(0.5, 1, 40)
    chosen, weights, product = plain_pursuit(matrix, target, count, bounds, 1e-4)
    free = jnp.ones(32, bool)
    score = np.asarray(matching_pursuit(jnp.float32(matrix), jnp.float32(target), free, count, bounds, 1e-4))
    dropped = np.array(chosen)[weights <= bounds[0]]
    kept = [token for token in chosen if token not in dropped]
    assert np.argsort(-score, kind="stable")[: len(kept)].tolist() == kept
    assert (score[dropped] == -2).all()
    others = np.setdiff1d(np.arange(32), chosen)
    np.testing.assert_allclose(score[others], product[others] / np.abs(product).max(), atol=1e-4)
    # Keys that are not candidates are never chosen.
    score = matching_pursuit(jnp.float32(matrix), jnp.float32(target), free.at[chosen[0]].set(False), 8, bounds, 1e-4)
    assert chosen[0] not in np.argsort(-np.asarray(score))[:8]


def test_matching_pursuit_drops_keys_of_the_smallest_weight():
    rng = np.random.default_rng(0)
    useful, spread = rng.uniform(0, 0.1, size=(40, 3)), np.full((40, 1), 0.2)
    # The fourth column alone exceeds the target, with which the others agree.
    matrix = np.concatenate([useful, spread, rng.uniform(0, 0.001, size=(40, 4))], axis=1)
    target = useful.sum(1)
    bounds = (np.exp(-7), np.exp(7))
    chosen, weights, _ = plain_pursuit(matrix, target, 4, bounds, 1e-6)
    assert sorted(chosen) == [0, 1, 2, 3] and weights[chosen.index(3)] == bounds[0]
    score = matching_pursuit(jnp.float32(matrix), jnp.float32(target), jnp.ones(8, bool), 4, bounds, 1e-6)
    assert score[3] == -2 and set(np.argsort(-np.asarray(score))[:3].tolist()) == {0, 1, 2}


# --- the policy ---


def align_right(queries, lengths):
    return np.stack([np.roll(x, len(x) - length, axis=0) for x, length in zip(queries, lengths, strict=True)])


SINK_LOGITS = np.array([2.0, 0.0, 1.0, 3.0], np.float32)


@pytest.mark.parametrize(
    "references, dtype, cap",
    [
        *(("prompt", "float32", None), ("repetition", "float32", None), ("both", "float32", None)),
        *(("both", "bfloat16", None), ("prompt", "float32", 2.0)),
    ],
)
def test_entries_equal_those_of_a_plain_implementation(references, dtype, cap):
    """With a cap of logits, there are attention sinks, too."""
    rng, lengths = np.random.default_rng(3), (37, 12, 20)
    policy = dataclasses.replace(POLICY, references=references, max_references=1000)
    keys, values, queries = prompt_of(make_stream(4), lengths)
    keys, values = (np.asarray(jnp.asarray(x, dtype), np.float32) for x in (keys, rng.normal(size=values.shape)))
    chunks, width = 2, 24
    sizes = np.array([[20, 17], [12, 0], [20, 3]], np.int32)
    repeated_queries = 2 * rng.normal(size=(3, chunks, width, 4, HEAD_DIM)).astype(np.float32)
    repeated = RepeatedPrompt(
        jnp.reshape(repeated_queries, (3, chunks * width, 4, HEAD_DIM)),
        jnp.zeros((3, chunks * width, 2, HEAD_DIM)),
        jnp.asarray(sizes),
    )
    inputs = {} if references == "prompt" else {"repeated": repeated}
    inputs |= {} if references == "repetition" else {"queries": align_right(queries, lengths)}
    inputs |= {} if cap is None else {"sink_logits": jnp.asarray(SINK_LOGITS)}
    cache, counters = kvjax.init(policy, make_spec(dtype=jnp.dtype(dtype), logit_cap=cap), row_keys())
    cache, counters, _ = kvjax.prefill(cache, counters, keys, values, jnp.asarray(lengths), **inputs)
    state = jax.tree.map(lambda x: np.asarray(x, np.float32), cache.state)
    tolerance = {"atol": 2e-3, "rtol": 2e-3} if dtype == "float32" else {"atol": 0.05, "rtol": 0.02}
    for (row, length), head in itertools.product(enumerate(lengths), range(2)):
        kept_keys, kept_values, kept_weights = (
            x[row, head, : min(length, policy.budget)] for x in (state.keys, state.values, state.log_weights)
        )
        own_keys, own_values = keys[row, :length, head], values[row, :length, head]
        if length <= policy.budget:
            assert {tuple(key) for key in kept_keys} == {tuple(key) for key in own_keys}
            assert (state.log_weights[row, head] == 0).all()
            continue
        sources = [] if references == "repetition" else [queries[row, :length]]
        sources += [] if references == "prompt" else [repeated_queries[row, i, : sizes[row, i]] for i in range(chunks)]
        heads = slice(2 * head, 2 * head + 2)
        own_queries = np.concatenate(sources)[:, heads].reshape(-1, HEAD_DIM)
        options = () if cap is None else (np.tile(SINK_LOGITS[heads], length), cap)
        tokens, log_weights, new_values = plain_matching(own_queries, own_keys, own_values, policy, *options)
        np.testing.assert_array_equal(kept_keys, own_keys[tokens])
        np.testing.assert_allclose(kept_weights, log_weights, **tolerance)
        np.testing.assert_allclose(kept_values, new_values, **tolerance)
        exact = policy.sinks + policy.recent
        np.testing.assert_array_equal(kept_values[:exact], own_values[tokens[:exact]])


def clustered(seed, tokens=256, clusters=24):
    """Returns keys and values [1, T, H_kv, D], and two sets of queries [1, T, H_q, D], near the same centers."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(clusters, 2, HEAD_DIM))

    def near(scale, group):
        x = np.repeat(centers[rng.integers(clusters, size=tokens)], group, axis=1)
        return (scale * x + 0.6 * rng.normal(size=x.shape))[None].astype(np.float32)

    return near(2, 1), rng.normal(size=(1, tokens, 2, HEAD_DIM)).astype(np.float32), near(1, 2), near(1, 2)


@pytest.mark.parametrize("selection", ["rms", "omp"])
def test_queries_that_were_not_fitted_are_nearer_to_exact_attention_than_with_selection(selection):
    """Compares outputs and log-denominators to kept tokens without log-weights and fitted values."""
    keys, values, queries, other = clustered(1)
    length = keys.shape[1]
    policy = kvjax.AttentionMatching(48, n_future_positions=None, sinks=2, recent=2, selection=selection)

    def prefill(policy, queries=None):
        state = kvjax.init(policy, make_spec(batch=1, prompt=length), row_keys(1))
        return kvjax.prefill(*state, keys, values, jnp.array([length]), queries)[:2]

    matched, counters = prefill(policy, queries)
    distance = np.abs(np.asarray(matched.state.keys)[0, :, :, None] - keys[0].swapaxes(0, 1)[:, None]).sum(-1)
    plain = np.take_along_axis(values[0].swapaxes(0, 1), distance.argmin(-1)[..., None], axis=1)[None]
    selected = dataclasses.replace(matched.state, log_weights=None, values=jnp.asarray(plain))
    states = prefill(kvjax.Exact()), (matched, counters), (dataclasses.replace(matched, state=selected), counters)
    exact, *partials = (kvjax.attend(*state, other) for state in states)
    for measure in (kvjax.normalize, lambda one: one.max + jnp.log(one.denominator)):
        errors = [np.abs(measure(one) - measure(exact)).mean() for one in partials]
        assert errors[0] < 0.7 * errors[1]


def one_head(seed=0, slots=12, queries=64, tokens=40):
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, tokens, HEAD_DIM)).astype(np.float32)
    reference = 2 * rng.normal(size=(queries, HEAD_DIM)).astype(np.float32)
    logits = reference @ keys.T / np.sqrt(HEAD_DIM)
    outputs, sink_logits = softmax(logits) @ values, np.full(queries, -np.inf)
    arrays = np.ones(queries, bool), np.log(np.exp(logits).sum(1)), sink_logits, outputs, np.zeros(tokens)
    references = References(*(jnp.asarray(x, None if x.dtype == bool else jnp.float32) for x in (reference, *arrays)))
    entries = jnp.asarray(keys[:slots]), jnp.asarray(values[:slots]), jnp.zeros(slots)
    return references, Slots(*entries, jnp.ones(slots, bool), jnp.arange(slots) > 1)


def test_refinement_lowers_the_loss_and_changes_no_exact_entry():
    references, selected = one_head()
    slots = fit_log_weights(references, selected, BOUNDS, 2, 1e-4, jnp.float32)
    fitted = fit_values(references, slots, 1e-4)
    refined = jax.jit(lambda references, slots: refine(references, slots, 200, BOUNDS))(references, fitted)
    losses = [float(matching_loss(references, one)) for one in (selected, fitted, refined)]
    assert losses[2] < 0.9 * losses[1] < 0.5 * losses[0]
    for before, later in zip(selected[:3], refined[:3], strict=True):
        np.testing.assert_array_equal(before[:2], later[:2])
        assert (np.asarray(before[2:]) != np.asarray(later[2:])).any()


def test_the_loss_counts_outputs_and_denominators():
    references, slots = one_head()
    logits = np.asarray(references.queries, np.float64) @ np.asarray(slots.keys, np.float64).T / np.sqrt(HEAD_DIM)
    outputs = np.asarray(references.outputs, np.float64)
    output_error = np.sum((softmax(logits) @ np.asarray(slots.values) - outputs) ** 2) / np.sum(outputs**2)
    mass_error = np.mean((np.log(np.exp(logits).sum(1)) - np.asarray(references.log_mass)) ** 2)
    np.testing.assert_allclose(matching_loss(references, slots), output_error + mass_error, rtol=1e-4)
    # Queries that do not exist do not count.
    half = matching_loss(references._replace(valid=jnp.arange(64) < 32), slots)
    first = jax.tree.map(lambda x: x[:32] if len(x) == 64 else x, references)
    np.testing.assert_allclose(half, matching_loss(first, slots), rtol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"selection": "omp"}, {"refine_steps": 5}], ids=str)
def test_padding_does_not_matter(settings):
    policy, stream = dataclasses.replace(POLICY, **settings), make_stream()
    spec = make_spec(prompt=56)
    states = []
    for padded, garbage in ((40, 0), (56, 1)):
        keys, values, queries = prompt_of(stream, LENGTHS, padded, garbage)
        prompt = keys, values, jnp.asarray(LENGTHS), align_right(queries, LENGTHS)
        states.append(jax.jit(kvjax.prefill)(*kvjax.init(policy, spec, row_keys()), *prompt)[:2])
    query = jnp.asarray(make_stream(5).queries[:, :4])
    np.testing.assert_allclose(*(kvjax.normalize(kvjax.attend(*state, query)) for state in states), atol=1e-3)


@pytest.mark.parametrize("settings", [{"selection": "omp"}, {"refine_steps": 5}], ids=str)
def test_a_budget_of_all_tokens_changes_nothing(settings):
    cache, _ = prefilled(dataclasses.replace(POLICY, budget=40, **settings))
    assert (np.asarray(cache.state.log_weights) == 0).all()
    for values, length in zip(np.asarray(cache.state.values), LENGTHS, strict=True):
        assert (values[:, :length].max(-1) == 1).all() and (values[:, :length].sum(-1) == 1).all()


def test_later_tokens_have_no_log_weight():
    policy, new = dataclasses.replace(POLICY, budget=16), after(make_stream(), LENGTHS, 8)

    def log_weights(policy):
        """Returns the log-weights of the first row before and after new tokens."""
        state = prefilled(policy)
        return [np.asarray(cache.state.log_weights[0]) for cache in (state[0], go(*state, new)[2])]

    before, later = log_weights(policy)
    assert (before[:, 4:16] != 0).all()
    assert (later[:, 8:] == 0).all()  # the slots of lowest rank
    np.testing.assert_array_equal(later[:, :8], before[:, :8])
    np.testing.assert_array_equal(*log_weights(dataclasses.replace(policy, reserve_decode_slots=True)))


@pytest.mark.parametrize("references", ["prompt", "repetition"])
def test_rope_moves_references_to_positions_after_the_prompt(references):
    """Queries at position t, moved by the policy, equal unmoved references at the future positions."""
    rng, tokens, lengths = np.random.default_rng(0), 40, jnp.array([40, 30, 24])
    keys, values, _ = prompt_of(make_stream(7), lengths)
    plain = jnp.asarray(2 * rng.normal(size=(3, tokens, 4, HEAD_DIM)), jnp.float32)
    future = np.floor(24 * (np.arange(8) * (np.sqrt(5) - 1) / 2 % 1)).astype(int)  # 8 references per query head
    policy = dataclasses.replace(POLICY, references=references, n_future_positions=24, max_references=16)

    def rotate(x, positions):
        return kvjax.rope.rotate(x, *kvjax.rope.rotation(positions[None], jnp.asarray(FREQUENCIES)))

    def fill(policy, queries):
        inputs = {"queries": queries}
        if references == "repetition":
            sizes = jnp.full((3, 1), queries.shape[1])
            inputs = {"repeated": RepeatedPrompt(queries, jnp.zeros((3, queries.shape[1], 2, HEAD_DIM)), sizes)}
        return kvjax.prefill(*kvjax.init(policy, make_spec(), row_keys()), keys, values, lengths, **inputs)[0].state

    state = fill(policy, rotate(plain, jnp.arange(tokens) + (40 if references == "repetition" else 0)))
    # Row 0 has 40 queries, of which every fifth is a reference. The plain policy gets the moved ones at their places.
    moved = rotate(plain[:, ::5], 40 + future)
    moved = jnp.repeat(moved, 5, axis=1) if references == "prompt" else moved
    expected = fill(dataclasses.replace(policy, n_future_positions=None), moved)
    np.testing.assert_array_equal(state.keys[0], expected.keys[0])
    np.testing.assert_allclose(state.log_weights[0], expected.log_weights[0], atol=1e-3)
    np.testing.assert_allclose(state.values[0], expected.values[0], atol=1e-3)


# --- errors ---


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.AdaKV(POLICY), "AdaKV needs a policy that selects tokens only"),
        (lambda: prefilled(kvjax.AttentionMatching(24), spec=make_spec(rope_frequencies=None)), "rope_frequencies"),
        (lambda: prefilled(kvjax.AttentionMatching(24, references="both")), 'prompt.repeated, .* or references="promp'),
    ],
)
def test_invalid_uses_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refinement_without_optax_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match="refine_steps=3 needs optax; install it with `pip install optax`"):
        refine(*one_head(), 3, BOUNDS)


def test_shares_are_at_most_one_if_large_logits_are_rounded():
    """Another order of summation gives logits of 1e14 that differ by 1e7."""
    keys, queries = jnp.full((3, 8), 1e14), jnp.ones((2, 8))
    logits = capped_logits(queries, keys, None)
    share = attention_shares(
        queries, jnp.ones(2, bool), logits[:, 0] * (1 - 1e-6), keys, jnp.array([True, True, False]), None
    )
    np.testing.assert_array_equal(share, [[1, 1, 0], [1, 1, 0]])


@pytest.mark.parametrize("selection", ["rms", "omp"])
def test_rows_with_equal_keys_do_not_depend_on_their_batch(selection):
    # All tokens have equal scores up to rounding, and products of other batch sizes round differently.
    random = np.random.default_rng(0)
    shape = (3, 60, 2, 16)
    keys, values, queries = (jnp.asarray(random.normal(size=shape), jnp.float32) for _ in range(3))
    keys = keys.at[0].set(keys[0, :1]).at[1].set(keys[1, :1] * (-1.0) ** jnp.arange(60)[:, None, None])
    policy = kvjax.AttentionMatching(16, sinks=2, compact_every=8, selection=selection, n_future_positions=None)

    def store(rows):
        spec = kvjax.CacheSpec(len(rows), 2, 2, 16, max_prompt_tokens=60, max_new_tokens=8)
        cache, counters = kvjax.init(policy, spec, jax.random.split(jax.random.key(0), len(rows)))
        new = keys[rows], values[rows], jnp.full(len(rows), 60), queries[rows]
        return kvjax.prefill(cache, counters, *new)[0].state

    together = store(np.arange(3))
    for row in (0, 1):
        chex.assert_trees_all_equal(kvjax.take_rows(together, np.array([row])), store(np.array([row])))
