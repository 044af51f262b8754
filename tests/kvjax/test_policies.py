import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import kvjax
from kvjax.policy import whole_tiles
from tests.kvjax.support import (
    FREQUENCIES,
    HEAD_DIM,
    LENGTHS,
    NEW,
    POLICIES,
    PROMPT,
    Stream,
    after,
    begin,
    every_policy,
    go,
    make_spec,
    make_stream,
    prompt_of,
    read_weights,
    row_keys,
    softmax_attention,
    whole_run,
)

BATCH, KV_HEADS, QUERY_HEADS = len(LENGTHS), 2, 4
# Policies whose weights stand for all tokens, kept or not.
WEIGHING = (
    "uniform",
    "clustergen_mean_value",
    "chelsea",
    "chelsea_paper",
    "chelsea_drop",
    "subgen_mean_value",
    "balancekv_pairs",
    "clusterkv",
)


def seen(row, step):
    """Which positions of the stream a row has read after `step + 1` appended tokens."""
    return np.arange(HEAD_DIM) < LENGTHS[row] + step + 1


# --- what holds for every policy ---


@every_policy
@pytest.mark.parametrize("row", range(BATCH))
def test_a_row_in_a_ragged_batch_equals_the_row_alone(name, row):
    policy, stream = POLICIES[name], make_stream().row(row)
    _, outputs, weights = whole_run(name)
    length = LENGTHS[row : row + 1]
    # Other noise behind the prompt, too: what lies past a row's length must not matter.
    prompt = prompt_of(stream, length, garbage=1)
    state = begin(policy, make_spec(batch=1), row_keys()[row : row + 1], *prompt, length)
    _, alone_outputs, alone_weights = go(policy, state, after(stream, length))
    np.testing.assert_array_equal(weights[row] > 1e-6, alone_weights[0] > 1e-6)  # the tokens kept
    np.testing.assert_allclose(weights[row], alone_weights[0], atol=1e-5)
    np.testing.assert_allclose(outputs[row], alone_outputs[0], rtol=1e-5, atol=1e-5)


@every_policy
def test_appending_a_block_with_causal_attention_equals_token_by_token(name):
    state, outputs, weights = whole_run(name)
    block_state, block_outputs, block_weights = whole_run(name, block=8)
    np.testing.assert_allclose(outputs, block_outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights, block_weights, atol=1e-5)
    chex.assert_trees_all_close(_plain(state), _plain(block_state), atol=1e-5)


@every_policy
def test_the_state_keeps_its_shapes_and_dtypes(name):
    policy, spec, stream = POLICIES[name], make_spec(dtype=jnp.bfloat16), make_stream()
    fresh = jax.eval_shape(lambda: policy.init(spec, row_keys()))
    state = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    chex.assert_trees_all_equal_shapes_and_dtypes(_plain(fresh), _plain(state))
    extended = jax.eval_shape(policy.extend, state, *after(stream, LENGTHS, 3)[:2])
    chex.assert_trees_all_equal_shapes_and_dtypes(_plain(fresh), _plain(extended))
    chex.assert_trees_all_equal_shapes_and_dtypes(_plain(fresh), _plain(jax.eval_shape(policy.compact, extended)))
    partials, attended = jax.eval_shape(policy.attend, state, stream.queries[:, :1])
    chex.assert_trees_all_equal_shapes_and_dtypes(_plain(fresh), _plain(attended))
    assert {leaf.dtype for leaf in jax.tree.leaves(partials)} == {jnp.dtype("float32")}
    assert state.window.keys.dtype == jnp.bfloat16


@every_policy
def test_one_trace_serves_all_steps_and_any_state_may_be_donated(name):
    policy, stream = POLICIES[name], make_stream()
    once = lambda function, **donate: jax.jit(chex.assert_max_traces(function, n=1), **donate)  # noqa: E731
    chex.clear_trace_counter()
    extend = once(lambda state, keys, values: policy.extend(state, keys, values), donate_argnums=0)
    attend = once(lambda state, query: policy.attend(state, query)[0])
    compact = once(lambda state: policy.compact(state), donate_argnums=0)
    state = policy.init(make_spec(), row_keys())
    steps = 2 * policy.period + 1
    tokens = after(stream, (0,) * BATCH, steps)
    for number in range(steps):
        now = slice(number, number + 1)
        state = extend(state, tokens.keys[:, now], tokens.values[:, now])
        partials = attend(state, tokens.queries[:, now])
        if (number + 1) % policy.period == 0:
            state = compact(state)
    chex.assert_tree_all_finite(kvjax.output(partials))
    np.testing.assert_array_equal(state.window.total + state.window.staging.count, [steps] * BATCH)


@every_policy
def test_compacting_nothing_changes_nothing(name):
    # A row that has ended is compacted along with those that have not.
    compact, stream = jax.jit(POLICIES[name].compact), make_stream()
    state = begin(POLICIES[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    for settled in (state, whole_run(name)[0]):
        chex.assert_trees_all_equal(_plain(compact(settled)), _plain(settled))


@every_policy
def test_compaction_may_come_early(name):
    # Uneven moments change no token that a window or an exact cache keeps, and leave every cache sound.
    policy, stream = POLICIES[name], make_stream()
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    state, outputs, weights = go(policy, state, after(stream, LENGTHS), 1, 3)
    kvjax.check(state)
    if name.startswith(("exact", "streaming_llm")):
        np.testing.assert_allclose(outputs, whole_run(name)[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(weights, whole_run(name)[2], atol=1e-5)
    if name in WEIGHING:
        total = weights[:, -1].sum(-1)
        np.testing.assert_allclose(total, np.array(LENGTHS)[:, None] + NEW + np.zeros(KV_HEADS), rtol=1e-5)


BIG = HEAD_DIM
ROOMY = {
    "infinigen": kvjax.infinigen(BIG, alpha=1e6, period=8),
    "cam": kvjax.cam(BIG + 8, sinks=2, period=8),
    "h2o": kvjax.h2o(BIG + 8, recent=8, period=8),
    "snapkv": kvjax.snapkv(BIG + 8, window=6, period=8),
    "pyramidkv": kvjax.pyramidkv(BIG + 8, window=6, period=8),
    "streaming_llm": kvjax.streaming_llm(BIG, sinks=2, period=8),
    "streaming_llm_reindexed": kvjax.streaming_llm(BIG, sinks=2, period=8, reindex=True),
    "uniform": kvjax.uniform(BIG + 8, sinks=2, recent=8, period=8),
    "clustergen_mean_value": kvjax.clustergen(BIG + 8, sinks=2, recent=8, period=8),
    "chelsea": kvjax.chelsea(BIG + 8, sinks=2, recent=8, period=8),
    "chelsea_drop": kvjax.chelsea(BIG + 8, sinks=2, recent=8, period=8, joins="drop"),
    "subgen_mean_value": kvjax.subgen(BIG + 8, sinks=2, recent=8, period=8),
    "clusterkv": kvjax.clusterkv(BIG, sinks=2, recent=8, cluster_tokens=4, every=8, chunk_clusters=2, period=8),
    "quest": kvjax.quest(BIG, period=8),
}


@pytest.mark.parametrize("name", ROOMY)
def test_a_budget_of_all_tokens_gives_exact_attention(name):
    # All but "paper", which drops what leaves its window whatever room it has.
    stream = make_stream()
    state = begin(ROOMY[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, weights = go(ROOMY[name], state, after(stream, LENGTHS))
    np.testing.assert_allclose(outputs, whole_run("exact")[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights, whole_run("exact")[2], atol=1e-5)


def test_exact_is_causal_softmax_attention():
    stream = make_stream()
    _, outputs, weights = whole_run("exact")
    for row, head, step in itertools.product(range(BATCH), range(QUERY_HEADS), (0, 7, 8, NEW - 1)):
        end = LENGTHS[row] + step + 1
        np.testing.assert_array_equal(weights[row, step, head // 2], seen(row, step))
        expected = softmax_attention(
            stream.queries[row, end - 1, head], stream.keys[row, :end, head // 2], stream.values[row, :end, head // 2]
        )
        np.testing.assert_allclose(outputs[row, step, head], expected, atol=1e-5)


# --- bytes ---


# Exact's store is rounded up to whole blocks of slots.
EXACT_SLOTS = -(-(PROMPT + NEW) // 64) * 64
# Stores of the prompt's budget and all that may come, rounded up likewise.
GROWING = ("exact", "snapkv", "pyramidkv")


def expected_bytes(name, spec, budget, period, sinks, recent):
    """One row's bytes: keys and values of the store and of staging, staging's float32 weights, six int32 per row
    (offset, count, two overflows, total; exact and others alike) and what the policy keeps beside them."""
    itemsize, heads = jnp.dtype(spec.dtype).itemsize, spec.kv_heads
    slots = EXACT_SLOTS if name in GROWING else sinks + recent if name.startswith("subgen") else budget
    # Halved once to 7 of 30, and all that may come; trees of 3 bins of 11 slots.
    slots = {"balancekv_reference": sinks + recent + 7 + spec.max_new, "balancekv_paper": sinks + recent}.get(
        name, slots
    )
    # What waits to be clustered: up to a chunk of 8 and a block of 8; to be a page: of 16 and 8.
    slots = 0 if name == "infinigen" else slots
    slots = sinks + recent + 15 if name.startswith("clusterkv") else 23 if name == "quest" else slots
    staging = min(period, spec.max_new)
    common = 2 * heads * (slots + staging) * spec.head_dim * itemsize + 4 * heads * staging + 5 * 4
    selected = budget - sinks - recent
    own = {
        "exact": 0,
        "streaming_llm": 0,
        "streaming_llm_reindexed": 4 * spec.head_dim // 2,  # a frequency per pair of dimensions
        "uniform": 4 * heads * (selected + budget) + 8,  # priorities, log-weights, the row's random key
        "clustergen_paper": 4,  # the number of centres
        "clustergen_mean_value": 4 * heads * (2 * selected + budget),  # counts, separations, log-weights
        # Degrees, log-weights, the number of centroids; a float32 covariance and a variance per head.
        "chelsea": 4 * heads * (2 * selected + spec.head_dim**2 + 1) + 4,
        "chelsea_paper": 4 * heads * 2 * selected + 4,
        "chelsea_drop": 4 * heads * 2 * selected + 4,
        "h2o": 4 * heads * (budget + staging),  # attention drawn by every slot
        "h2o_average": 4 * heads * (2 * budget + staging),  # and every selected token's position, of no recent ones
        "cam": 4 * heads * (budget + staging) + 8,  # attention of the newest query, the row's random key
        # Keys, values and position of every token, its key in 12 dimensions, which those are.
        "infinigen": heads * (64 * (2 * spec.head_dim * itemsize + 4 + 12 * itemsize) + 4 * 12 * spec.head_dim),
        "snapkv": 4,  # tokens dropped
        "pyramidkv": 4,
        # A table of float32 means, counts and radii; 16 x 16 moments, two means and a scale.
        "subgen_mean_value": heads * (selected * (8 * spec.head_dim + 8) + 24 + 4 * (16**2 + 2 * spec.head_dim + 1)),
        # Seven samples with their masses; three clusters with a key each, counts and radii.
        "subgen_paper": heads * (20 * spec.head_dim * itemsize + 7 * 4 + 3 * 8 + 12 + 8 + 24),
        # Trees: log-weights, level and index of every bin, three counters, a random key.
        "balancekv_pairs": heads * (4 * selected + 8 * selected + 12 + 8),
        "balancekv_paper": heads * (33 * 3 * spec.head_dim * itemsize + 2 * (4 * 33 + 8 * 3 + 12 + 8) + 8),
        "balancekv_reference": heads * (4 * slots + 4) + 4 + 8,  # log-weights, marks without a slot, later tokens
        # Keys, values and positions of 17 blocks (9 for 30 tokens in 8 clusters, 2 for each of 4 chunks), 16 clusters'
        # means, sizes, first blocks and radii, a random key; two int32 per row.
        "clusterkv": heads * (17 * 16 * (2 * spec.head_dim * itemsize + 4) + 16 * (8 * spec.head_dim + 12) + 8) + 8,
        "clusterkv_paper": heads * (17 * 16 * (2 * spec.head_dim * itemsize + 4) + 16 * (4 * spec.head_dim + 12) + 8)
        + 8,
        # Four pages and their bounds.
        "quest": heads * 4 * (16 * (2 * spec.head_dim * itemsize + 4) + 2 * spec.head_dim * itemsize + 4) + 8,
    }
    return common + own[name]


@every_policy
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_are_those_of_the_formula(name, dtype):
    spec = make_spec(dtype=dtype)
    budget = 16 if name.startswith("streaming") else 20
    expected = expected_bytes(name, spec, budget, 8, 2, 8)
    assert kvjax.row_bytes(POLICIES[name], spec) == expected
    state = POLICIES[name].init(dataclasses.replace(spec, batch=1), row_keys(1))
    assert kvjax.cache_bytes(state) == kvjax.CacheBytes(expected, 0)


@every_policy
def test_read_bytes_are_all_slots_and_their_weights(name):
    # Keys and values of all slots; log-weights of staging, and of the store where tokens weigh; three int32 bounds.
    policy, spec = POLICIES[name], make_spec(dtype=jnp.bfloat16)
    slots = {"exact": EXACT_SLOTS}.get(name, 16 if name.startswith("streaming") else 20)
    weighted = slots if name in WEIGHING else 0
    beside = 0
    if name.startswith("subgen"):  # the window holds sinks and recent tokens only
        slots, weighted = 10, 0
        # Ten float32 means and the spread; seven samples and the sampled keys of three clusters.
        sized = {"subgen_mean_value": 10 * (2 * HEAD_DIM * 4 + 4) + 4 * (2 * HEAD_DIM + 1)}
        beside = KV_HEADS * sized.get(name, 7 * (2 * HEAD_DIM * 2 + 4) + 3 * (HEAD_DIM * 2 + 4))
    if name.startswith("chelsea"):  # half the slots are centroids with log-weights, and end at a bound of their own
        weighted, beside = 10, 4 + (KV_HEADS * 4 * (HEAD_DIM**2 + 1) if name == "chelsea" else 0)
    if name.startswith("clusterkv"):  # 4 blocks; of all 16 clusters means, sizes and first blocks
        slots, weighted = 25, 0
        reads = KV_HEADS if name == "clusterkv" else QUERY_HEADS
        means = 2 * HEAD_DIM * 4 + 4 if name == "clusterkv" else HEAD_DIM * 4
        beside = reads * 4 * 16 * (2 * HEAD_DIM * 2 + 4) + KV_HEADS * 16 * (means + 8)
    if name == "quest":  # per query head 3 pages of 4, and the bounds of all
        slots, beside = 23, QUERY_HEADS * 3 * 16 * (2 * HEAD_DIM * 2 + 4) + KV_HEADS * 4 * (2 * HEAD_DIM * 2 + 4)
    if name == "infinigen":  # ten tokens with a weight, and all in 12 dimensions; nothing but staging in the window
        slots, beside = 0, KV_HEADS * (10 * (2 * HEAD_DIM * 2 + 4) + 64 * 12 * 2 + 4 * 12 * HEAD_DIM) - 2 * 4
    if name in GROWING:  # the store begins at its first slot, without a bound
        slots, beside = EXACT_SLOTS, -4
    if name.startswith("h2o"):  # sums of every slot
        beside = KV_HEADS * 4 * (20 + 8)
    if name == "balancekv_pairs":  # half the slots are a tree's, with log-weights
        weighted = 10
    if name == "balancekv_reference":
        slots = weighted = 41
    if name == "balancekv_paper":  # 33 slots of the numerator's tree, 33 keys of the denominator's
        slots, weighted, beside = 10, 66, KV_HEADS * 33 * 3 * HEAD_DIM * 2
    per_row = 2 * KV_HEADS * (slots + 8) * HEAD_DIM * 2 + 4 * KV_HEADS * (8 + weighted) + 3 * 4 + beside
    assert policy.read_bytes(policy.init(spec, row_keys())) == BATCH * per_row


FITS = {
    "cam": lambda budget: kvjax.cam(budget),
    "h2o": lambda budget: kvjax.h2o(budget, average=True),
    "streaming_llm": lambda budget: kvjax.streaming_llm(budget),
    "uniform": lambda budget: kvjax.uniform(budget, sinks=3, recent=9),
    "clustergen_paper": lambda budget: kvjax.clustergen(budget, variant="paper"),
    "clustergen_mean_value": lambda budget: kvjax.clustergen(budget, sinks=1),
    "chelsea_paper": lambda budget: kvjax.chelsea(budget, sinks=3, recent=9, slope=None),
    "subgen_mean_value": lambda budget: kvjax.subgen(budget, sinks=3, recent=9),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("limit", [70_000, 123_456, 1_000_000])
def test_fit_bytes_takes_the_largest_budget_that_fits(name, limit):
    spec = make_spec()
    fitted = kvjax.row_bytes(kvjax.fit_bytes(FITS[name], spec, limit), spec)
    last, next_one = _around(FITS[name], spec, limit)
    size = lambda budget: kvjax.row_bytes(FITS[name](budget), spec)  # noqa: E731
    assert size(last) <= limit < size(next_one)
    assert fitted == size(whole_tiles(last))


def test_whole_tiles_take_away_a_fiftieth_at_most():
    slots = np.arange(1, 3000)
    whole = np.array([whole_tiles(int(one)) for one in slots])
    assert ((whole == slots) | (whole % 16 == 0)).all()
    assert (whole <= slots).all() and (whole >= 0.98 * slots).all() and (slots - whole < 16).all()
    assert (whole[slots >= 750] % 16 == 0).all()


def _around(make, spec, limit):
    """The last budget that fits and the first that does not, by walking from a linear guess."""
    budget = max(20, limit // (2 * KV_HEADS * HEAD_DIM * 4) - 80)
    assert kvjax.row_bytes(make(budget), spec) <= limit
    while kvjax.row_bytes(make(budget + 1), spec) <= limit:
        budget += 1
    return budget, budget + 1


def test_fit_bytes_of_a_policy_that_recalls_goes_by_what_is_read():
    spec = make_spec()
    make = lambda budget: kvjax.quest(budget, period=8)  # noqa: E731
    reads = lambda budget: kvjax.row_read_bytes(make(budget), spec)  # noqa: E731
    limit = reads(48)  # three pages are the least, four are all
    assert kvjax.row_read_bytes(kvjax.fit_bytes(make, spec, limit), spec) == limit < reads(64)
    # A limit beyond reading everything gives just that.
    assert kvjax.row_read_bytes(kvjax.fit_bytes(make, spec, 10**7), spec) == reads(10**6) == reads(64)


def test_fit_bytes_says_why_nothing_fits():
    spec = make_spec()
    with pytest.raises(ValueError, match=r"limit=3000 .*budget=5 already takes"):
        kvjax.fit_bytes(kvjax.streaming_llm, spec, 3000)
    with pytest.raises(ValueError, match=r"limit=60 .*cannot hold sinks=4 and recent=64"):
        kvjax.fit_bytes(kvjax.uniform, spec, 60)
    with pytest.raises(ValueError, match="does not grow with its budget"):
        kvjax.fit_bytes(lambda budget: kvjax.exact(), spec, 10**6)


# --- streaming_llm ---

# Windows of 6 recent tokens, and of more than the stream's blocks.
STREAMING = {
    (budget, sinks, period): kvjax.streaming_llm(budget, sinks=sinks, period=period)
    for budget, sinks, period in [(8, 2, 1), (8, 2, 6), (9, 4, 5), (30, 0, 8)]
}


@pytest.mark.parametrize("shape", STREAMING)
def test_streaming_llm_keeps_exactly_sinks_and_recent_tokens_at_every_step(shape):
    budget, sinks, _ = shape
    stream = make_stream()
    state = begin(STREAMING[shape], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, weights = go(STREAMING[shape], state, after(stream, LENGTHS))
    position = np.arange(HEAD_DIM)
    for row, step in itertools.product(range(BATCH), range(NEW)):
        end = LENGTHS[row] + step + 1
        kept = (position < end) & ((position < sinks) | (position >= end - (budget - sinks)))
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(weights[row, step, head], kept, err_msg=f"{row=} {step=}")
        tokens = position[kept]
        keys, values = stream.keys[row, tokens, 1], stream.values[row, tokens, 1]
        expected = softmax_attention(stream.queries[row, end - 1, 2], keys, values)
        np.testing.assert_allclose(outputs[row, step, 2], expected, atol=1e-5)


@pytest.mark.parametrize("block", [1, 8])
def test_reindexed_streaming_llm_rotates_at_positions_inside_the_cache(block):
    # The reference keeps keys unrotated, as the paper does, and rotates them at their place in the cache.
    stream, policy = make_stream(), POLICIES["streaming_llm_reindexed"]
    budget, sinks = 16, 2
    rotated = Stream(_rotated(stream.keys), stream.values, _rotated(stream.queries))
    state = begin(policy, make_spec(), row_keys(), *prompt_of(rotated, LENGTHS), LENGTHS)
    _, outputs, _ = go(policy, state, after(rotated, LENGTHS), block)
    for row, step, head in itertools.product(range(BATCH), range(NEW), (0, 2)):
        end = LENGTHS[row] + step + 1
        tokens = [position for position in range(end) if position < sinks or position >= end - (budget - sinks)]
        keys = _rotated(stream.keys[row, tokens, head // 2][None, :, None])[0, :, 0]
        query = _rotated(stream.queries[row, end - 1, head][None, None, None], [len(tokens) - 1])[0, 0, 0]
        expected = softmax_attention(query, keys, stream.values[row, tokens, 0])
        np.testing.assert_allclose(outputs[row, step, head], expected, atol=2e-5)
    plain = begin(POLICIES["streaming_llm"], make_spec(), row_keys(), *prompt_of(rotated, LENGTHS), LENGTHS)
    _, unmoved, _ = go(POLICIES["streaming_llm"], plain, after(rotated, LENGTHS), block)
    assert np.abs(outputs - unmoved)[0].max() > 1e-3  # re-indexing is no empty gesture


def _rotated(x, positions=None):
    """x [B, T, H, D] rotated at 0, 1, ... or at the given positions."""
    positions = np.arange(x.shape[1]) if positions is None else np.asarray(positions)
    angles = (positions[:, None] * np.array(FREQUENCIES))[:, None]
    first, second = np.split(x.astype(np.float64), 2, axis=-1)
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(turned, axis=-1).astype(np.float32)


# --- uniform ---


def middles(policy_sinks, policy_recent, end):
    position = np.arange(HEAD_DIM)
    return (position >= policy_sinks) & (position < end - policy_recent)


def test_uniform_samples_without_replacement_with_weights_that_sum_to_the_tokens():
    _, _, weights = whole_run("uniform")
    sinks, recent, size, period = 2, 8, 10, 8
    for row, step, head in itertools.product(range(BATCH), range(NEW), range(KV_HEADS)):
        read = weights[row, step, head]
        # Tokens that left the window since the last compaction are still shown.
        compacted = LENGTHS[row] + step // period * period
        between = middles(sinks, recent, compacted)
        expected_weight = max(1.0, between.sum() / size)
        assert np.count_nonzero(read[between]) == min(size, between.sum())
        np.testing.assert_allclose(read[between & (read > 0)], expected_weight, rtol=1e-5)
        np.testing.assert_array_equal(read[~between], (seen(row, step) & ~between)[~between])
        np.testing.assert_allclose(read.sum(), LENGTHS[row] + step + 1, rtol=1e-5)


def test_uniform_draws_for_every_row_and_head():
    # The same stream in every row and head.
    stream, policy = make_stream().row(0), POLICIES["uniform"]
    stream = Stream(*(np.repeat(part, BATCH, axis=0) for part in stream))
    stream = stream._replace(keys=np.broadcast_to(stream.keys[:, :, :1], stream.keys.shape))
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, (37,) * 3), (37,) * 3)
    kept = np.asarray(read_weights(policy, state)) > 0
    draws = kept.reshape(-1, HEAD_DIM)
    assert len(np.unique(draws, axis=0)) == len(draws)


def test_uniform_samples_the_same_however_a_stream_is_cut():
    stream, policy = make_stream(), POLICIES["uniform"]
    finals = []
    for lengths, count, block, every in [
        ((40,) * 3, 24, 1, 8),
        ((40,) * 3, 24, 1, 1),
        ((40,) * 3, 24, 4, 4),
        ((16,) * 3, 48, 8, 8),
    ]:
        state = begin(policy, make_spec(new=48), row_keys(), *prompt_of(stream, lengths), lengths)
        state, _, _ = go(policy, state, after(stream, lengths, count), block, every)
        finals.append(read_weights(policy, state))
    for final in finals[1:]:
        np.testing.assert_allclose(final, finals[0], atol=1e-5)


@pytest.mark.parametrize("decoded", [0, 16])
def test_uniform_includes_every_token_equally_often(decoded):
    batch, sinks, recent, size = 400, 2, 4, 6
    policy = _small_uniform()
    spec = make_spec(batch=batch, prompt=32, new=16, head_dim=HEAD_DIM, query_heads=2)
    stream = make_stream(batch=1, tokens=48, query_heads=2)
    stream = Stream(*(np.repeat(part, batch, axis=0) for part in stream))
    lengths = np.full(batch, 48 - decoded)
    state = begin(policy, spec, row_keys(batch, seed=3), *prompt_of(stream, lengths, 48 - decoded), lengths)
    if decoded:
        extend, compact = jax.jit(policy.extend), jax.jit(policy.compact)
        for begin_at in range(0, decoded, 8):
            part = after(stream, lengths, 8, begin_at)
            state = compact(extend(state, part.keys, part.values))
    kept = np.asarray(read_weights(policy, state)) > 0
    between = middles(sinks, recent, 48)
    included = kept[:, :, between].sum(axis=(0, 1))
    tokens, draws = int(between.sum()), batch * KV_HEADS
    expected = draws * size / tokens
    # Without replacement the counts of one draw hang together: their covariance makes the statistic smaller.
    statistic = np.sum((included - expected) ** 2) / (expected * (1 - size / tokens)) * (tokens - 1) / tokens
    assert included.sum() == draws * size
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], tokens - 1)
    assert low < statistic < high


@functools.cache
def _small_uniform():
    return kvjax.uniform(12, sinks=2, recent=4, period=8)


# --- clustergen ---


def farthest_first(keys, valid, size):
    """Indices of the centres, one by one, in float64."""
    chosen = []
    free = list(np.flatnonzero(valid))
    while free and len(chosen) < size:
        if not chosen:
            best = free[0]
        else:
            gaps = [min(np.sum((keys[i].astype(np.float64) - keys[c]) ** 2) for c in chosen) for i in free]
            best = free[int(np.argmax(gaps))]
        chosen.append(best)
        free.remove(best)
    return chosen


@pytest.mark.parametrize("keys_are", ["random", "duplicated", "tied"])
def test_paper_keeps_farthest_first_centres_of_the_prompt_and_the_window(keys_are):
    stream, policy = make_stream(5), POLICIES["clustergen_paper"]
    rng = np.random.default_rng(0)
    if keys_are == "duplicated":  # fewer distinct keys than centres
        stream = stream._replace(keys=stream.keys[:, rng.integers(0, 5, stream.keys.shape[1])])
    if keys_are == "tied":  # small whole numbers: many distances are equal
        stream = stream._replace(keys=rng.integers(-1, 2, stream.keys.shape).astype(np.float32) * (np.arange(64) < 3))
    lengths = (37, 15, 5)
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, lengths), lengths)
    start = read_weights(policy, state)
    _, _, weights = go(policy, state, after(stream, lengths))
    position = np.arange(HEAD_DIM)
    for row, head in itertools.product(range(BATCH), range(KV_HEADS)):
        centers = farthest_first(stream.keys[row, :, head], middles(2, 8, lengths[row]), size=10)
        fixed = np.isin(position, centers) | (position < 2)
        recent = lambda end: (position >= end - 8) & (position < end)  # noqa: E731
        np.testing.assert_array_equal(start[row, head], (position < lengths[row]) & (fixed | recent(lengths[row])))
        for step in range(NEW):
            end = lengths[row] + step + 1
            np.testing.assert_array_equal(weights[row, step, head], (position < end) & (fixed | recent(end)))


def test_mean_value_conserves_every_token_s_mass():
    # A query of zeros reads sum(count * mean value): every token exactly once, at every step and through compactions.
    _, _, weights = whole_run("clustergen_mean_value")
    for row, step in itertools.product(range(BATCH), range(NEW)):
        expected = np.broadcast_to(seen(row, step), (KV_HEADS, HEAD_DIM))
        np.testing.assert_allclose(weights[row, step], expected, atol=1e-5)


def test_mean_value_counts_are_the_tokens_in_between():
    policy, stream = POLICIES["clustergen_mean_value"], make_stream()
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    for _ in range(2):
        between = np.maximum(np.asarray(state.window.total) - 2 - 8, 0)
        count = np.asarray(state.selection.count)
        assert count.dtype == np.int32
        np.testing.assert_array_equal(count.sum(-1), np.repeat(between[:, None], KV_HEADS, axis=1))
        used = np.minimum(between, 10)[:, None, None]
        np.testing.assert_array_equal(count > 0, np.broadcast_to(np.arange(10) < used, count.shape))  # no gaps
        state, _, _ = go(policy, state, after(stream, LENGTHS))


def test_mean_value_keeps_tokens_as_centres():
    # Centres are keys of the stream, never averages.
    state, _, _ = whole_run("clustergen_mean_value")
    stream = make_stream()
    centers = np.asarray(state.window.keys)[0, :, 10:]
    for head in range(KV_HEADS):
        distance = np.abs(centers[head][:, None] - stream.keys[0, :, head][None]).max(-1)
        assert distance.min(-1).max() == 0


def test_mean_value_is_exact_when_the_keys_of_a_cluster_are_equal():
    stream, policy = make_stream(7), POLICIES["clustergen_mean_value"]
    kinds = np.random.default_rng(0).integers(0, 6, stream.keys.shape[1])
    stream = stream._replace(keys=3 * stream.keys[:, kinds])
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, _ = go(policy, state, after(stream, LENGTHS))
    exact = begin(POLICIES["exact"], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, expected, _ = go(POLICIES["exact"], exact, after(stream, LENGTHS))
    np.testing.assert_allclose(outputs, expected, atol=2e-5)


# --- errors ---


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.streaming_llm(4, sinks=4), r"budget=4 .*sinks=4 and recent=1"),
        (lambda: kvjax.streaming_llm(10, sinks=4, period=7), r"period=7 .*= 6"),
        (lambda: kvjax.streaming_llm(10, sinks=-1), "sinks=-1"),
        (lambda: kvjax.streaming_llm(10, period=0), "period=0"),
        (lambda: kvjax.exact(period=0), "period=0"),
        (lambda: kvjax.uniform(8, sinks=4, recent=5), r"budget=8 .*at least 9"),
        (lambda: kvjax.uniform(9, sinks=4, recent=5), "budget=9 leaves no slot"),
        (lambda: kvjax.uniform(9, sinks=-4, recent=5), "sinks=-4"),
        (lambda: kvjax.uniform(9, sinks=1, recent=-5), "recent=-5"),
        (lambda: kvjax.clustergen(0), "budget=0"),
        (lambda: kvjax.clustergen(8, recent=8), "budget=8 leaves no slot"),
        (lambda: kvjax.clustergen(8, period=-1), "period=-1"),
        (lambda: kvjax.clustergen(8, variant="mean"), "variant='mean'"),
        (lambda: kvjax.chelsea(80), "budget=80 leaves no slot"),
        (lambda: kvjax.chelsea(100, chunk=15), "chunk=15"),
        (lambda: kvjax.chelsea(100, first=0.7), "first=0.7"),
        (lambda: kvjax.factory("lru"), r"policy 'lru' is not known; known: .*chelsea, .*exact, .*uniform"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_reindexing_needs_frequencies():
    with pytest.raises(ValueError, match="rope_frequencies"):
        kvjax.streaming_llm(10, reindex=True).init(make_spec(rope_frequencies=None), row_keys())


def test_the_registry_knows_which_policies_take_a_budget():
    assert {name for name in kvjax.REGISTRY if not kvjax.takes_budget(name)} == {"exact"}
    assert kvjax.factory("uniform") is kvjax.uniform


@every_policy
@pytest.mark.parametrize(
    "keys, values, lengths, message",
    [
        ((3, 5, 2, 64), (3, 5, 2, 64), (5, 6, 1), "lengths"),
        ((3, 5, 2, 64), (3, 5, 2, 64), (5, -1, 1), "lengths"),
        ((3, 50, 2, 64), (3, 50, 2, 64), (5, 41, 1), "lengths"),
        ((3, 5, 2, 64), (3, 5, 2, 64), (5, 1), "lengths"),
        ((3, 5, 2, 64), (3, 4, 2, 64), (1, 1, 1), "values"),
        ((3, 5, 2, 64), (3, 5, 2, 1), (1, 1, 1), "values"),
        ((3, 5, 1, 64), (3, 5, 1, 64), (1, 1, 1), "keys"),
        ((3, 5, 2, 1), (3, 5, 2, 1), (1, 1, 1), "keys"),
        ((2, 5, 2, 64), (2, 5, 2, 64), (1, 1), "keys"),
    ],
)
def test_prompts_that_do_not_fit_are_refused_by_name(name, keys, values, lengths, message):
    state = _fresh(name)
    with pytest.raises(ValueError, match=message):
        POLICIES[name].prefill(state, jnp.zeros(keys), jnp.zeros(values), jnp.array(lengths))


@pytest.mark.parametrize(
    "keys, values, lengths, message",
    [
        ((3, 9, 2, 64), (3, 9, 2, 64), None, "9 tokens cannot be staged in 8 slots"),
        ((3, 1, 1, 64), (3, 1, 1, 64), None, "keys"),
        ((3, 1, 2, 64), (3, 1, 1, 64), None, "values"),
        ((3, 2, 2, 64), (3, 2, 2, 64), (3, 1, 1), "lengths"),
        ((3, 2, 2, 64), (3, 2, 2, 64), (1, 1, -1), "lengths"),
        ((3, 2, 2, 64), (3, 2, 2, 64), (1, 1), "lengths"),
    ],
)
def test_appended_tokens_that_do_not_fit_are_refused_by_name(keys, values, lengths, message):
    lengths = None if lengths is None else jnp.array(lengths)
    with pytest.raises(ValueError, match=message):
        POLICIES["uniform"].extend(_fresh("uniform"), jnp.zeros(keys), jnp.zeros(values), lengths)


@functools.cache
def _fresh(name):
    return POLICIES[name].init(make_spec(), row_keys())


def _plain(state):
    """The state with typed random keys as numbers, for chex; shapes and dtypes alone will do, too."""

    def plain(leaf):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)

    return jax.tree.map(plain, state)
