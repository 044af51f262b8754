"""The cluster table of SubGen: invariants of its lemma, laws of its samples, and a float64 reference."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import kvjax
from kvjax.methods.subgen.cluster_table import extend, init_cluster_table, log_counts, log_sample_weights
from kvjax.methods.subgen.cover import greedy_cover
from tests.kvjax.support import check_estimates, with_integer_keys

TOKENS, DIM, CAPACITY, SAMPLES = 24, 3, 5, 2


def extend_by_token(table, keys, values=None, valid=None):
    valid = jnp.ones(len(keys), bool) if valid is None else valid

    def take(table, token):
        return extend(table, *jax.tree.map(lambda x: x[None], token)), None

    return jax.lax.scan(take, table, (keys, values, valid))[0]


_extend, _by_token = jax.jit(extend, static_argnames="block"), jax.jit(extend_by_token)
# Integers give exact distances and many ties and duplicates.
grids = st.lists(st.tuples(*[st.integers(-3, 3)] * DIM), min_size=TOKENS, max_size=TOKENS).map(
    lambda rows: jnp.array(rows, jnp.float32)
)
masks = st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS).map(jnp.array)
# One-hot values identify tokens: count * mean value gives the members of a cluster.
NAMES = jnp.eye(TOKENS)


def empty_table(capacity=CAPACITY, seed=0, dtype=jnp.float32, **options):
    options = {"samples": SAMPLES, "value_dim": TOKENS} | options
    return init_cluster_table(capacity, DIM, dtype, jax.random.key(seed), **options)


def normal_keys(seed, tokens=TOKENS):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(tokens, DIM)), jnp.float32)


def distances(a, b):
    return np.linalg.norm(np.asarray(a, np.float64)[:, None] - np.asarray(b, np.float64)[None], axis=-1)


# --- Lemma 2 ---


def members(table):
    return np.rint(np.asarray(table.mean_value) * np.asarray(table.count)[:, None]).astype(int)


def check_invariants(table, keys, valid):
    size, count, belongs = int(table.size), np.asarray(table.count), members(table)
    keys, centers = np.asarray(keys, np.float64), np.asarray(table.centers)
    assert (count[:size] > 0).all() and not count[size:].any() and size <= CAPACITY
    np.testing.assert_array_equal(belongs.sum(axis=0), valid)
    np.testing.assert_array_equal(belongs.sum(axis=1), count)
    for slot in range(size):
        member_keys = keys[belongs[slot] == 1]
        from_center = distances(member_keys, centers[slot : slot + 1])[:, 0]
        assert from_center.min() == 0
        assert from_center.max() <= table.radius[slot] + 1e-5
        assert np.all(distances(table.samples[slot], member_keys).min(axis=1) == 0)
    check_distances(table)
    # Weights sum to the tokens.
    np.testing.assert_allclose(np.exp(log_counts(table)), table.count, rtol=1e-6)
    assert log_sample_weights(table).dtype == jnp.float32
    np.testing.assert_allclose(np.exp(log_sample_weights(table)).sum(), valid.sum(), rtol=1e-5)


def check_distances(table):
    """Checks the distances between centers, and the radii."""
    size = int(table.size)
    between = distances(table.centers, table.centers)[:size, :size]
    assert (between[~np.eye(size, dtype=bool)] > float(table.delta)).all()
    doublings, growth = int(table.doublings), table.growth
    factor = (1 - growth ** -(doublings + 1)) / (1 - 1 / growth)
    assert (np.asarray(table.radius) <= factor * float(table.delta) + 1e-5).all()


@pytest.mark.parametrize("update", [_extend, _by_token])
@settings(max_examples=30, deadline=None)
@given(keys=grids, more=grids, valid=masks, growth=st.sampled_from([1.25, 2.0]))
def test_invariants(update, keys, more, valid, growth):
    table = update(empty_table(growth=growth), keys, NAMES, valid)
    check_invariants(table, keys, valid)
    # Another update on top of merged clusters.
    again = update(dataclasses.replace(table, mean_value=table.mean_value * 0), more, NAMES, valid)
    assert np.asarray(again.count).sum() == 2 * int(valid.sum())
    check_distances(again)
    assert float(again.delta) >= float(table.delta) * growth ** (int(again.doublings) - int(table.doublings)) - 1e-5


def sampled(cut):
    """Returns the tokens sampled in many streams of equal keys with merges, and the members of the clusters."""
    keys = normal_keys(5)

    def one(rng):
        table = init_cluster_table(3, DIM, jnp.float32, rng, samples=SAMPLES, value_dim=TOKENS)
        start = 0
        for length in cut:
            part = slice(start, start + length)
            table = extend(table, keys[part], NAMES[part], block=8)
            start += length
        if not cut:
            table = extend_by_token(table, keys, NAMES)
        drawn = jnp.argmin(jnp.sum(jnp.abs(table.samples[:, :, None] - keys), axis=-1), axis=-1)
        return drawn, table.doublings, table

    drawn, doublings, tables = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 4000))
    assert (doublings >= 2).all()
    return np.asarray(drawn), members(jax.tree.map(lambda part: part[0], tables))


@pytest.mark.parametrize("cut", [(), (24,), (1, 20, 3)], ids=["tokens", "one update", "uneven updates"])
def test_samples_are_uniform_and_independent_after_merges(cut):
    drawn, belongs = sampled(cut)
    largest, other = belongs.sum(axis=1).argsort()[[-1, -2]]
    assert belongs[largest].sum() >= 6
    # Of one cluster, and of different ones.
    for cluster, sample in ((largest, 1), (other, 0)):
        together = np.zeros((TOKENS, TOKENS))
        np.add.at(together, (drawn[:, largest, 0], drawn[:, cluster, sample]), 1)
        possible = together[np.ix_(np.flatnonzero(belongs[largest]), np.flatnonzero(belongs[cluster]))]
        assert together.sum() == possible.sum()
        assert stats.chisquare(possible.ravel()).pvalue > 1e-3


# --- blocks and single tokens against a plain reference ---


def reference(keys, capacity, growth, delta):
    """Returns centers, labels, delta and doublings in float64, key by key."""
    centers, label, delta, doublings = [], [], delta or 0.0, 0
    for number, key in enumerate(np.asarray(keys, np.float64)):
        while True:
            gaps = [np.linalg.norm(key - center) for _, center in centers]
            if centers and min(gaps) <= delta:
                label.append(centers[int(np.argmin(gaps))][0])
                break
            if len(centers) < capacity:
                centers.append((number, key))
                label.append(number)
                break
            least = min([np.linalg.norm(a - b) for i, (_, a) in enumerate(centers) for _, b in centers[:i]] + gaps)
            delta, doublings = max(growth * delta, least * (1 + 1e-9)), doublings + 1
            remaining = []
            for name, center in centers:
                if all(np.linalg.norm(center - other) > delta for _, other in remaining):
                    remaining.append((name, center))
            new_label = {
                name: remaining[int(np.argmin([np.linalg.norm(center - other) for _, other in remaining]))][0]
                for name, center in centers
            }
            label = [new_label[name] for name in label]
            centers = remaining
    return [name for name, _ in centers], np.array(label), delta, doublings


@pytest.mark.parametrize(
    "growth, capacity, delta", [(1.25, 5, None), (1.25, 5, 0.3), (2.0, 1, None), (1.02, 11, None), (1.5, 11, None)]
)
@pytest.mark.parametrize("seed", range(3))
def test_clusters_of_blocks_and_of_tokens_equal_the_reference(growth, capacity, delta, seed):
    """Of the last seed, some tokens are masked, which equal missing tokens."""
    valid = np.random.default_rng(seed).random(TOKENS) < (0.6 if seed == 2 else 1)
    keys = jnp.where(valid[:, None], normal_keys(seed), 1e3)
    opened, label, expected_delta, doublings = reference(keys[valid], capacity, growth, delta)
    opened, label = np.flatnonzero(valid)[opened], np.flatnonzero(valid)[label]
    start = empty_table(capacity, growth=growth, delta=delta)
    # Several sub-blocks, the last one padded, and all centers compared at once, or in full and partial blocks.
    blocks = (_extend(start, keys, NAMES, valid, block=block) for block in (4, 7, 16))
    for table in (*blocks, _by_token(start, keys, NAMES, valid)):
        assert int(table.size) == len(opened) and int(table.doublings) == doublings
        np.testing.assert_allclose(table.delta, expected_delta, rtol=1e-5)
        np.testing.assert_array_equal(table.centers[: len(opened)], keys[opened])
        np.testing.assert_array_equal(members(table)[: len(opened), valid], label == opened[:, None])


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), share=st.floats(0, 1), density=st.floats(0, 1))
def test_the_greedy_cover_takes_candidates_in_order(seed, share, density):
    rng = np.random.default_rng(seed)
    near = rng.random((12, 12)) < density
    near |= near.T
    candidate = rng.random(12) < share
    cover_members = []
    for number in np.flatnonzero(candidate):
        if not near[number, cover_members].any():
            cover_members.append(number)
    np.testing.assert_array_equal(np.flatnonzero(_cover(near, candidate)), cover_members)


_cover = jax.jit(greedy_cover)


# --- duplicates, masked tokens and moving centers ---


@pytest.mark.parametrize("update", [_extend, _by_token])
def test_duplicates_never_open_a_cluster(update):
    # With large norms, rounding makes computed distances between equal keys large.
    kinds = 30 * normal_keys(1, 4)
    keys = kinds[np.random.default_rng(0).integers(0, 4, TOKENS)]
    table = update(empty_table(), keys, NAMES)
    assert int(table.size) == len(np.unique(np.asarray(keys), axis=0)) == 4
    assert int(table.doublings) == 0 and float(table.delta) == 0 and not table.radius.any()
    one = update(empty_table(capacity=1), jnp.broadcast_to(keys[0], keys.shape), NAMES)
    assert int(one.count[0]) == TOKENS and int(one.doublings) == 0


@pytest.mark.parametrize("update", [_extend, _by_token])
def test_masked_and_non_finite_tokens_change_nothing(update):
    keys, nothing = normal_keys(2), jnp.zeros(TOKENS, bool)
    table = update(empty_table(), keys, NAMES)
    broken = update(table, keys.at[:, 1].set(jnp.nan), NAMES)
    for actual, expected in (
        (update(table, 9 * keys, NAMES, nothing), table),
        (update(empty_table(), keys, NAMES, nothing), empty_table()),
        (dataclasses.replace(broken, unsound=table.unsound), table),
    ):
        chex.assert_trees_all_equal(with_integer_keys(actual), with_integer_keys(expected))
    assert np.isneginf(log_counts(empty_table())).all() and np.isneginf(log_sample_weights(empty_table())).all()
    with pytest.raises(ValueError, match=f"unsound={TOKENS}: keys that are not finite were left out"):
        kvjax.raise_faults(broken)


def test_moving_centers_are_mean_keys():
    keys = normal_keys(4)
    halves = _extend(_extend(empty_table(moving=True), keys[:12], NAMES[:12]), keys[12:], NAMES[12:])
    for table in (halves, _by_token(empty_table(moving=True), keys, NAMES)):
        belongs = members(table)
        assert int(table.doublings) > 0 and belongs.sum() == TOKENS
        for slot in range(int(table.size)):
            member_keys = np.asarray(keys)[belongs[slot] == 1]
            np.testing.assert_allclose(table.centers[slot], member_keys.mean(axis=0), atol=1e-5)
            assert distances(member_keys, table.centers[slot : slot + 1]).max() <= table.radius[slot] + 1e-5


@pytest.mark.heavy
def test_estimates_of_the_denominator_are_unbiased_with_errors_of_order_inverse_square_root():
    # Line 30 of Algorithm 1 against the exact sum.
    keys = normal_keys(9, 128)
    query = np.random.default_rng(0).normal(size=DIM).astype(np.float32)
    exact = np.exp(np.asarray(keys, np.float64) @ query).sum()

    def estimate(samples, rng):
        table = init_cluster_table(4, DIM, jnp.float32, rng, samples=samples)
        table = extend(extend(table, keys[:64]), keys[64:])
        return jnp.sum(jnp.exp(table.samples @ query + log_sample_weights(table)))[None]

    check_estimates([4, 16, 64], estimate, [exact], 0.1)
