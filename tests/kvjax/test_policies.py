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
from kvjax.budget import abstract_cache, row_bytes, row_read_bytes
from kvjax.registry import POLICIES as REGISTERED
from kvjax.spec import round_to_tiles
from kvjax.state import CacheBytes
from tests.kvjax.support import (
    BATCH,
    FREQUENCIES,
    HEAD_DIM,
    LENGTHS,
    NEW,
    POLICIES,
    PROMPT,
    ROOMY,
    SCORED,
    Stream,
    after,
    begin,
    each,
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

KV_HEADS, QUERY_HEADS = 2, 4
# Policies whose weights stand for all tokens, kept or not.
WEIGHING = (
    "uniform",
    "clustergen_mean_value",
    "chelsea",
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
    stream = make_stream().row(row)
    _, outputs, weights = whole_run(name)
    length = LENGTHS[row : row + 1]
    # Other noise behind the prompt, too: what lies past a row's length must not matter.
    prompt = prompt_of(stream, length, garbage=1)
    cache = begin(POLICIES[name], make_spec(batch=1), row_keys()[row : row + 1], *prompt, length)
    _, alone_outputs, alone_weights = go(cache, after(stream, length))
    np.testing.assert_array_equal(weights[row] > 1e-6, alone_weights[0] > 1e-6)  # the tokens kept
    np.testing.assert_allclose(weights[row], alone_weights[0], atol=1e-5)
    np.testing.assert_allclose(outputs[row], alone_outputs[0], rtol=1e-5, atol=1e-5)


@every_policy
def test_appending_a_block_with_causal_attention_equals_token_by_token(name):
    cache, outputs, weights = whole_run(name)
    block_cache, block_outputs, block_weights = whole_run(name, block=8)
    np.testing.assert_allclose(outputs, block_outputs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(weights, block_weights, atol=1e-5)
    chex.assert_trees_all_close(_plain(cache), _plain(block_cache), atol=1e-5)


@every_policy
def test_the_cache_keeps_its_shapes_and_dtypes(name):
    policy, spec, stream = POLICIES[name], make_spec(dtype=jnp.bfloat16), make_stream()
    fresh = abstract_cache(policy, spec)
    cache = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    new = after(stream, LENGTHS, 3)
    appended = jax.eval_shape(kvjax.append, cache, new.keys, new.values)
    attended, stepped = jax.eval_shape(kvjax.step, cache, new.queries, new.keys, new.values)
    partials = jax.eval_shape(kvjax.attend, cache, stream.queries[:, :1])
    for other in (cache, appended, stepped, jax.eval_shape(kvjax.compact, appended)):
        assert jax.tree.structure(fresh) == jax.tree.structure(other)
        chex.assert_trees_all_equal_shapes_and_dtypes(_plain(fresh), _plain(other))
    assert {leaf.dtype for leaf in jax.tree.leaves((partials, attended))} == {jnp.dtype("float32")}
    assert cache.staging.keys.dtype == jnp.bfloat16


@every_policy
def test_one_trace_serves_all_steps_and_any_cache_may_be_donated(name):
    stream = make_stream()
    once = lambda function, **donate: jax.jit(chex.assert_max_traces(function, n=1), **donate)  # noqa: E731
    chex.clear_trace_counter()
    append = once(lambda cache, keys, values: kvjax.append(cache, keys, values), donate_argnums=0)
    attend = once(lambda cache, query: kvjax.attend(cache, query))
    compact = once(lambda cache: kvjax.compact(cache), donate_argnums=0)
    cache = kvjax.init(POLICIES[name], make_spec(), row_keys())
    steps = 2 * cache.policy.compact_every + 1
    tokens = after(stream, (0,) * BATCH, steps)
    for number in range(steps):
        now = slice(number, number + 1)
        cache = append(cache, tokens.keys[:, now], tokens.values[:, now])
        partials = attend(cache, tokens.queries[:, now])
        if (number + 1) % cache.policy.compact_every == 0:
            cache = compact(cache)
    chex.assert_tree_all_finite(kvjax.normalize(partials))
    np.testing.assert_array_equal(kvjax.num_tokens(cache), [steps] * BATCH)


@pytest.mark.parametrize("name", each(POLICIES, quick=("uniform",)))
def test_a_step_is_append_and_attend_and_compacts_where_tokens_would_find_no_room(name):
    # Three tokens at a time: a buffer of 8 is compacted before the ninth token, with six in it.
    stream = make_stream()
    cache = begin(POLICIES[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    step, append, attend = jax.jit(kvjax.step), jax.jit(kvjax.append), jax.jit(kvjax.attend)
    full_or_not = jax.jit(functools.partial(kvjax.step, compact_when_full=False))
    by_hand = cache
    for number in range(6):
        new = after(stream, LENGTHS, 3, 3 * number)
        attended, cache = step(cache, new.queries, new.keys, new.values)
        if number in (2, 4):
            by_hand = kvjax.compact(by_hand)
        if by_hand.policy.requires.attention_stats:  # attending alone teaches nothing
            last, by_hand = full_or_not(by_hand, new.queries, new.keys, new.values)
        else:
            by_hand = append(by_hand, new.keys, new.values)
            # The last token's query sees all there is.
            last = kvjax.normalize(attend(by_hand, new.queries[:, -1:]))
        assert int(cache.counters.offset) == int(by_hand.counters.offset) == 3 * (number % 2 + 1)
        np.testing.assert_allclose(attended[:, -last.shape[1] :], last, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(kvjax.num_tokens(cache), np.array(LENGTHS) + 18)
    kvjax.raise_faults(cache)


@every_policy
def test_compacting_nothing_changes_nothing(name):
    # A row that has ended is compacted along with those that have not.
    compact, stream = jax.jit(kvjax.compact), make_stream()
    cache = begin(POLICIES[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    for settled in (cache, whole_run(name)[0]):
        chex.assert_trees_all_equal(_plain(compact(settled)), _plain(settled))


@every_policy
def test_compaction_may_come_early(name):
    # Uneven moments change no token that a window or an exact cache keeps, and leave every cache sound.
    stream = make_stream()
    cache = begin(POLICIES[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    cache, outputs, weights = go(cache, after(stream, LENGTHS), 1, 3)
    kvjax.raise_faults(cache)
    if name.startswith(("exact", "streaming_llm")):
        np.testing.assert_allclose(outputs, whole_run(name)[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(weights, whole_run(name)[2], atol=1e-5)
    if name in WEIGHING:
        total = weights[:, -1].sum(-1)
        np.testing.assert_allclose(total, np.array(LENGTHS)[:, None] + NEW + np.zeros(KV_HEADS), rtol=1e-5)


@pytest.mark.parametrize("name", ROOMY)
def test_a_budget_of_all_tokens_gives_exact_attention(name):
    # All but "paper", which drops what leaves its window whatever room it has.
    stream = make_stream()
    cache = begin(ROOMY[name], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, weights = go(cache, after(stream, LENGTHS))
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
# Selections beside whose budget there is room for all that may come.
BESIDE = ("snapkv", "pyramidkv")


def expected_bytes(name, spec, budget, compact_every, sinks, recent):
    """One row's bytes: keys and values of the store and of staging, a byte per staging slot, eight int32 of every cache
    (offset, count, first, overflow, past, reused, not_finite, policy_faults), and the policy's other arrays."""
    itemsize, heads = jnp.dtype(spec.dtype).itemsize, spec.kv_heads
    slots = EXACT_SLOTS if name == "exact" else sinks + recent if name.startswith("subgen") else budget
    slots = -(-(slots + spec.max_new_tokens) // 8) * 8 if name in BESIDE else slots
    # Halved once to 7 of 30, and all that may come; trees of 3 bins of 11 slots.
    slots = {"balancekv_reference": sinks + recent + 7 + spec.max_new_tokens, "balancekv_paper": sinks + recent}.get(
        name, slots
    )
    # What waits to be clustered: up to a chunk of 8 and a block of 8; to be a page: of 16 and 8.
    slots = 0 if name == "infinigen" else slots
    slots = sinks + recent + 15 if name.startswith("clusterkv") else 23 if name == "quest" else slots
    staging = min(compact_every, spec.max_new_tokens)
    common = 2 * heads * (slots + staging) * spec.head_dim * itemsize + staging + 8 * 4
    # A window counts the tokens it took in; a growing store those it has and those it lost.
    common += 8 if name == "exact" else 4
    selected = budget - sinks - recent
    # Residuals of rounded means: int8 values and a bfloat16 scale per vector.
    residual = heads * (spec.head_dim + 2) * (itemsize < 4)
    own = {
        "exact": 0,
        "streaming_llm": 0,
        "streaming_llm_reindexed": 4 * spec.head_dim // 2,  # a frequency per pair of dimensions
        "uniform": 4 * heads * (selected + budget) + 8,  # priorities, log-weights, the row's random key
        "clustergen_paper": 4,  # the number of centres
        "clustergen_mean_value": 4 * heads * (2 * selected + budget)
        + budget * residual,  # counts, separations, log-weights
        # Degrees, log-weights, the number of centroids.
        "chelsea": 4 * heads * 2 * selected + 4 + 2 * selected * residual,
        "chelsea_drop": 4 * heads * 2 * selected + 4,
        "h2o": 4 * heads * (budget + staging),  # attention drawn by every slot
        "h2o_average": 4 * heads * (2 * budget + staging),  # and every selected token's position, of no recent ones
        "cam": 4 * heads * (budget + staging) + 8,  # attention of the newest query, the row's random key
        # Keys, values and position of every token, its key in 12 dimensions, which those are; tokens lost.
        "infinigen": heads * (64 * (2 * spec.head_dim * itemsize + 4 + 12 * itemsize) + 4 * 12 * spec.head_dim) + 4,
        # A table of means, counts and radii.
        "subgen_mean_value": heads * (selected * (2 * spec.head_dim * itemsize + 8) + 24) + 2 * selected * residual,
        # Seven samples with their masses; three clusters with a key each, counts and radii.
        "subgen_paper": heads * (20 * spec.head_dim * itemsize + 7 * 4 + 3 * 8 + 12 + 8 + 24),
        # Trees: log-weights, level and index of every bin, three counters, a random key.
        "balancekv_pairs": heads * (4 * selected + 8 * selected + 12 + 8),
        "balancekv_paper": heads * (33 * 3 * spec.head_dim * itemsize + 2 * (4 * 33 + 8 * 3 + 12 + 8) + 8),
        "balancekv_reference": heads * (4 * slots + 4) + 4 + 8,  # log-weights, marks without a slot, later tokens
        # Keys, values and positions of 17 blocks (9 for 30 tokens in 8 clusters, 2 for each of 4 chunks) or 62 tokens,
        # 16 clusters' means, sizes, first blocks (ours: and root mean squares), a random key; waiting tokens, chunks,
        # lost tokens.
        "clusterkv": heads
        * (17 * 16 * (2 * spec.head_dim * itemsize + 4) + 16 * (2 * spec.head_dim * itemsize + 12) + 8)
        + 12,
        "clusterkv_paper": heads * (62 * (2 * spec.head_dim * itemsize + 4) + 16 * (spec.head_dim * itemsize + 8) + 8)
        + 12,
        **dict.fromkeys(("leverage_scores", *SCORED, *BESIDE), 4),  # tokens of the prompt that stay, and later ones
        "ada_kv": 4 + 12 * heads,  # of every head where its slots begin, ranked and empty ones
        # Four pages and their bounds; tokens that wait, pages, tokens lost.
        "quest": heads * 4 * (16 * (2 * spec.head_dim * itemsize + 4) + 2 * spec.head_dim * itemsize + 4) + 12,
    }
    return common + own[name]


@every_policy
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_are_those_of_the_formula(name, dtype):
    spec = make_spec(dtype=dtype)
    budget = 16 if name.startswith("streaming") else 20
    expected = expected_bytes(name, spec, budget, 8, 2, 8)
    assert row_bytes(POLICIES[name], spec) == expected
    cache = kvjax.init(POLICIES[name], dataclasses.replace(spec, batch=1), row_keys(1))
    assert kvjax.cache_bytes(cache) == CacheBytes(expected, 0)


@every_policy
def test_read_bytes_are_all_slots_and_their_weights(name):
    # Keys and values of all slots; log-weights of staging, and of the store where tokens weigh; three int32 bounds.
    spec = make_spec(dtype=jnp.bfloat16)
    slots = {"exact": EXACT_SLOTS}.get(name, 16 if name.startswith("streaming") else 20)
    weighted = slots if name in WEIGHING else 0
    extra = 0
    if name.startswith("subgen"):  # the window holds sinks and recent tokens only
        slots, weighted = 10, 0
        # Ten means; seven samples with two log-weights and the sampled keys of three clusters.
        sizes = {"subgen_mean_value": 10 * (2 * HEAD_DIM * 2 + 4)}
        extra = KV_HEADS * sizes.get(name, 7 * (2 * HEAD_DIM * 2 + 8) + 3 * (HEAD_DIM * 2 + 4))
    if name.startswith("chelsea"):  # half the slots are centroids with log-weights, and end at a bound of their own
        weighted, extra = 10, 4
    if name.startswith("clusterkv"):  # 4 blocks or ten tokens; of all 16 clusters means, sizes and first blocks
        slots, weighted = 25, 0
        reads = KV_HEADS * 4 * 16 if name == "clusterkv" else QUERY_HEADS * 10
        means = 2 * HEAD_DIM * 2 + 4 + 4 if name == "clusterkv" else HEAD_DIM * 2  # and a weight and a deviation
        extra = reads * (2 * HEAD_DIM * 2 + 4) + KV_HEADS * 16 * (means + 8)
    if name == "quest":  # per query head 3 pages of 4, and the bounds of all
        slots, extra = (
            23,
            QUERY_HEADS * 3 * 16 * (2 * HEAD_DIM * 2 + 4) + KV_HEADS * 4 * (2 * HEAD_DIM * 2 + 4),
        )
    if name == "infinigen":  # ten tokens with a weight, and all in 12 dimensions; nothing but staging in the window
        slots, extra = (
            0,
            KV_HEADS * (10 * (2 * HEAD_DIM * 2 + 4) + 64 * 12 * 2 + 4 * 12 * HEAD_DIM) - 2 * 4,
        )
    if name == "streaming_llm_reindexed":  # sinks are read again, by a query of its own: a bound and 32 angles
        slots, extra = 18, 4 + 4 * HEAD_DIM // 2
    if name == "exact":  # the store begins at its first slot, without a bound
        extra = -4
    if name.startswith(("h2o", "cam")):  # attention scores of every slot
        extra = KV_HEADS * 4 * (20 + 8)
    if name in ("leverage_scores", *SCORED, *BESIDE):
        slots, extra = -(-(slots + NEW) // 8) * 8 if name in BESIDE else slots, -4
    if name == "ada_kv":  # a head's slots begin and end where they do
        extra = 8 * KV_HEADS - 8
    if name == "balancekv_pairs":  # half the slots are a tree's, with log-weights
        weighted = 10
    if name == "balancekv_reference":
        slots = weighted = 41
    if name == "balancekv_paper":  # 33 slots of the numerator's tree, 33 keys of the denominator's
        slots, weighted, extra = 10, 99, KV_HEADS * 33 * 3 * HEAD_DIM * 2
    per_row = 2 * KV_HEADS * (slots + 8) * HEAD_DIM * 2 + 4 * KV_HEADS * (8 + weighted) + 3 * 4 + extra
    assert kvjax.read_bytes(kvjax.init(POLICIES[name], spec, row_keys())) == BATCH * per_row


FITS = {
    "cam": kvjax.CaM,
    "h2o": lambda budget: kvjax.H2O(budget, average=True),
    "streaming_llm": kvjax.StreamingLLM,
    "uniform": lambda budget: kvjax.Uniform(budget, sinks=3, recent=9),
    "clustergen_paper": lambda budget: kvjax.ClusterGen(budget, variant="paper"),
    "clustergen_mean_value": lambda budget: kvjax.ClusterGen(budget, sinks=1),
    "chelsea": lambda budget: kvjax.Chelsea(budget, sinks=3, recent=9),
    "subgen_mean_value": lambda budget: kvjax.SubGen(budget, sinks=3, recent=9),
}


@pytest.mark.parametrize("name", FITS)
@pytest.mark.parametrize("limit", [70_000, 123_456, 1_000_000])
def test_fit_bytes_takes_the_largest_budget_that_fits(name, limit):
    spec = make_spec()
    fitted = row_bytes(kvjax.fit_bytes(FITS[name], spec, limit), spec)
    last, next_one = _around(FITS[name], spec, limit)
    size = lambda budget: row_bytes(FITS[name](budget), spec)  # noqa: E731
    assert size(last) <= limit < size(next_one)
    assert fitted == size(round_to_tiles(last))


def test_whole_tiles_take_away_a_fiftieth_at_most():
    slots = np.arange(1, 3000)
    whole = np.array([round_to_tiles(int(one)) for one in slots])
    assert ((whole == slots) | (whole % 16 == 0)).all()
    assert (whole <= slots).all() and (whole >= 0.98 * slots).all() and (slots - whole < 16).all()
    assert (whole[slots >= 750] % 16 == 0).all()


def _around(make, spec, limit):
    """The last budget that fits and the first that does not, by walking from a linear guess."""
    budget = max(20, limit // (2 * KV_HEADS * HEAD_DIM * 4) - 80)
    assert row_bytes(make(budget), spec) <= limit
    while row_bytes(make(budget + 1), spec) <= limit:
        budget += 1
    return budget, budget + 1


def test_fit_bytes_of_a_policy_that_recalls_goes_by_what_is_read():
    spec = make_spec()
    make = lambda budget: kvjax.Quest(budget, compact_every=8)  # noqa: E731
    reads = lambda budget: row_read_bytes(make(budget), spec)  # noqa: E731
    limit = reads(48)  # three pages are the least, four are all
    assert row_read_bytes(kvjax.fit_bytes(make, spec, limit), spec) == limit < reads(64)
    # A limit beyond reading everything gives just that.
    assert row_read_bytes(kvjax.fit_bytes(make, spec, 10**7), spec) == reads(10**6) == reads(64)


def test_fit_bytes_says_why_nothing_fits():
    spec = make_spec()
    with pytest.raises(ValueError, match=r"limit=3000 .*budget=5 already takes"):
        kvjax.fit_bytes(kvjax.StreamingLLM, spec, 3000)
    with pytest.raises(ValueError, match=r"limit=60 .*cannot hold sinks=4 and recent=64"):
        kvjax.fit_bytes(kvjax.Uniform, spec, 60)
    with pytest.raises(ValueError, match="does not grow with its budget"):
        kvjax.fit_bytes(lambda budget: kvjax.Exact(), spec, 10**6)


# --- streaming_llm ---

# Windows of 6 recent tokens, compacted at several moments (at most 6 tokens apart), and of more than the stream's
# blocks.
STREAMING = {
    (budget, sinks, every): kvjax.StreamingLLM(budget, sinks=sinks, compact_every=every)
    for budget, sinks, every in [(8, 2, 1), (8, 2, 6), (8, 2, 64), (9, 4, 5), (30, 0, 8)]
}


@pytest.mark.parametrize("shape", STREAMING)
def test_streaming_llm_keeps_exactly_sinks_and_recent_tokens_at_every_step(shape):
    budget, sinks, _ = shape
    stream = make_stream()
    cache = begin(STREAMING[shape], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, weights = go(cache, after(stream, LENGTHS))
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
    stream, budget, sinks = make_stream(), 16, 2
    rotated = Stream(_rotated(stream.keys), stream.values, _rotated(stream.queries))
    reindexed = POLICIES["streaming_llm_reindexed"]
    cache = begin(reindexed, make_spec(), row_keys(), *prompt_of(rotated, LENGTHS), LENGTHS)
    _, outputs, _ = go(cache, after(rotated, LENGTHS), block)
    for row, step, head in itertools.product(range(BATCH), range(NEW), (0, 2)):
        end = LENGTHS[row] + step + 1
        tokens = [position for position in range(end) if position < sinks or position >= end - (budget - sinks)]
        keys = _rotated(stream.keys[row, tokens, head // 2][None, :, None])[0, :, 0]
        query = _rotated(stream.queries[row, end - 1, head][None, None, None], [len(tokens) - 1])[0, 0, 0]
        expected = softmax_attention(query, keys, stream.values[row, tokens, 0])
        np.testing.assert_allclose(outputs[row, step, head], expected, atol=2e-5)
    plain = begin(POLICIES["streaming_llm"], make_spec(), row_keys(), *prompt_of(rotated, LENGTHS), LENGTHS)
    _, unmoved, _ = go(plain, after(rotated, LENGTHS), block)
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
    sinks, recent, size, every = 2, 8, 10, 8
    for row, step, head in itertools.product(range(BATCH), range(NEW), range(KV_HEADS)):
        read = weights[row, step, head]
        # Tokens that left the window since the last compaction are still shown.
        compacted = LENGTHS[row] + step // every * every
        between = middles(sinks, recent, compacted)
        expected_weight = max(1.0, between.sum() / size)
        assert np.count_nonzero(read[between]) == min(size, between.sum())
        np.testing.assert_allclose(read[between & (read > 0)], expected_weight, rtol=1e-5)
        np.testing.assert_array_equal(read[~between], (seen(row, step) & ~between)[~between])
        np.testing.assert_allclose(read.sum(), LENGTHS[row] + step + 1, rtol=1e-5)


def test_uniform_draws_for_every_row_and_head():
    # The same stream in every row and head.
    stream = make_stream().row(0)
    stream = Stream(*(np.repeat(part, BATCH, axis=0) for part in stream))
    stream = stream._replace(keys=np.broadcast_to(stream.keys[:, :, :1], stream.keys.shape))
    cache = begin(POLICIES["uniform"], make_spec(), row_keys(), *prompt_of(stream, (37,) * 3), (37,) * 3)
    kept = np.asarray(read_weights(cache)) > 0
    draws = kept.reshape(-1, HEAD_DIM)
    assert len(np.unique(draws, axis=0)) == len(draws)


def test_uniform_samples_the_same_however_a_stream_is_cut():
    stream, finals = make_stream(), []
    for lengths, count, block, every in [
        ((40,) * 3, 24, 1, 8),
        ((40,) * 3, 24, 1, 1),
        ((40,) * 3, 24, 4, 4),
        ((16,) * 3, 48, 8, 8),
    ]:
        cache = begin(POLICIES["uniform"], make_spec(new=48), row_keys(), *prompt_of(stream, lengths), lengths)
        cache, _, _ = go(cache, after(stream, lengths, count), block, every)
        finals.append(read_weights(cache))
    for final in finals[1:]:
        np.testing.assert_allclose(final, finals[0], atol=1e-5)


@pytest.mark.parametrize("decoded", [0, 16])
def test_uniform_includes_every_token_equally_often(decoded):
    batch, sinks, recent, size = 400, 2, 4, 6
    policy = kvjax.Uniform(12, sinks=2, recent=4, compact_every=8)
    spec = make_spec(batch=batch, prompt=48 - decoded, new=16, head_dim=HEAD_DIM, query_heads=2)
    stream = make_stream(batch=1, tokens=48, query_heads=2)
    stream = Stream(*(np.repeat(part, batch, axis=0) for part in stream))
    lengths = np.full(batch, 48 - decoded)
    cache = begin(policy, spec, row_keys(batch, seed=3), *prompt_of(stream, lengths, 48 - decoded), lengths)
    append, compact = jax.jit(kvjax.append), jax.jit(kvjax.compact)
    for first in range(0, decoded, 8):
        part = after(stream, lengths, 8, first)
        cache = compact(append(cache, part.keys, part.values))
    kept = np.asarray(read_weights(cache)) > 0
    between = middles(sinks, recent, 48)
    included = kept[:, :, between].sum(axis=(0, 1))
    tokens, draws = int(between.sum()), batch * KV_HEADS
    expected = draws * size / tokens
    # Without replacement the counts of one draw hang together: their covariance makes the statistic smaller.
    statistic = np.sum((included - expected) ** 2) / (expected * (1 - size / tokens)) * (tokens - 1) / tokens
    assert included.sum() == draws * size
    low, high = stats.chi2.ppf([1e-4, 1 - 1e-4], tokens - 1)
    assert low < statistic < high


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
    stream = make_stream(5)
    rng = np.random.default_rng(0)
    if keys_are == "duplicated":  # fewer distinct keys than centres
        stream = stream._replace(keys=stream.keys[:, rng.integers(0, 5, stream.keys.shape[1])])
    if keys_are == "tied":  # small whole numbers: many distances are equal
        stream = stream._replace(keys=rng.integers(-1, 2, stream.keys.shape).astype(np.float32) * (np.arange(64) < 3))
    lengths = (37, 15, 5)
    cache = begin(POLICIES["clustergen_paper"], make_spec(), row_keys(), *prompt_of(stream, lengths), lengths)
    start = read_weights(cache)
    _, _, weights = go(cache, after(stream, lengths))
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
    stream = make_stream()
    cache = begin(POLICIES["clustergen_mean_value"], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    for _ in range(2):
        between = np.maximum(np.asarray(cache.state.window.total) - 2 - 8, 0)
        count = np.asarray(cache.state.clusters.count)
        assert count.dtype == np.int32
        np.testing.assert_array_equal(count.sum(-1), np.repeat(between[:, None], KV_HEADS, axis=1))
        used = np.minimum(between, 10)[:, None, None]
        np.testing.assert_array_equal(count > 0, np.broadcast_to(np.arange(10) < used, count.shape))  # no gaps
        cache, _, _ = go(cache, after(stream, LENGTHS))


def test_mean_value_keeps_tokens_as_centres():
    # Centres are keys of the stream, never averages.
    cache, _, _ = whole_run("clustergen_mean_value")
    stream = make_stream()
    centers = np.asarray(cache.state.window.keys)[0, :, 10:]
    for head in range(KV_HEADS):
        distance = np.abs(centers[head][:, None] - stream.keys[0, :, head][None]).max(-1)
        assert distance.min(-1).max() == 0


def test_mean_value_is_exact_when_the_keys_of_a_cluster_are_equal():
    stream = make_stream(7)
    kinds = np.random.default_rng(0).integers(0, 6, stream.keys.shape[1])
    stream = stream._replace(keys=3 * stream.keys[:, kinds])
    cache = begin(POLICIES["clustergen_mean_value"], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, _ = go(cache, after(stream, LENGTHS))
    exact = begin(POLICIES["exact"], make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, expected, _ = go(exact, after(stream, LENGTHS))
    np.testing.assert_allclose(outputs, expected, atol=2e-5)


# --- errors ---


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kvjax.StreamingLLM(4, sinks=4), r"budget=4 .*sinks=4 and recent=1"),
        (lambda: kvjax.StreamingLLM(10, sinks=-1), "sinks=-1"),
        (lambda: kvjax.StreamingLLM(10, compact_every=0), "compact_every=0"),
        (lambda: kvjax.Exact(compact_every=0), "compact_every=0"),
        (lambda: kvjax.Uniform(8, sinks=4, recent=5), r"budget=8 .*at least 9"),
        (lambda: kvjax.Uniform(9, sinks=4, recent=5), "budget=9 leaves no slot"),
        (lambda: kvjax.Uniform(9, sinks=-4, recent=5), "sinks=-4"),
        (lambda: kvjax.Uniform(9, sinks=1, recent=-5), "recent=-5"),
        (lambda: kvjax.ClusterGen(0), "budget=0"),
        (lambda: kvjax.ClusterGen(8, recent=8), "budget=8 leaves no slot"),
        (lambda: kvjax.ClusterGen(8, compact_every=-1), "compact_every=-1"),
        (lambda: kvjax.ClusterGen(8, variant="mean"), "variant='mean'"),
        (lambda: kvjax.Chelsea(80), "budget=80 leaves no slot"),
        (lambda: kvjax.Chelsea(100, chunk=15), "chunk=15"),
        (lambda: kvjax.Chelsea(100, first=0.7), "first=0.7"),
        (
            lambda: kvjax.PolicyChoice.parse("lru"),
            r"policy 'lru' is unknown; choose one of .*chelsea, .*exact, .*uniform",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_reindexing_needs_frequencies():
    with pytest.raises(ValueError, match="rope_frequencies"):
        kvjax.init(kvjax.StreamingLLM(10, reindex=True), make_spec(rope_frequencies=None), row_keys())


def test_the_registry_knows_which_policies_take_a_budget():
    assert {name for name in REGISTERED if not kvjax.PolicyChoice(name).takes_budget} == {"exact"}
    assert REGISTERED["uniform"] is kvjax.Uniform


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
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(_fresh(name), jnp.zeros(keys), jnp.zeros(values), jnp.array(lengths))


@pytest.mark.parametrize(
    "keys, values, lengths, message",
    [
        ((3, 9, 2, 64), (3, 9, 2, 64), None, "cannot append 9 tokens to 8 staging slots"),
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
        kvjax.append(_fresh("uniform"), jnp.zeros(keys), jnp.zeros(values), lengths)
    query = jnp.zeros((3, keys[1], 4, 64))
    with pytest.raises(ValueError, match=message):
        kvjax.step(_fresh("uniform"), query, jnp.zeros(keys), jnp.zeros(values), lengths)


@pytest.mark.parametrize("query", [(3, 2, 4, 64), (3, 1, 2, 64), (3, 1, 4, 32), (2, 1, 4, 64), (3, 4, 64)])
def test_queries_that_do_not_fit_are_refused_by_name(query):
    tokens = jnp.zeros((3, 1, 2, 64))
    with pytest.raises(ValueError, match=r"queries have shape"):
        kvjax.step(_fresh("uniform"), jnp.zeros(query), tokens, tokens)
    if query[:2] != (3, 2):  # `attend` takes any number
        with pytest.raises(ValueError, match=r"queries have shape"):
            kvjax.attend(_fresh("uniform"), jnp.zeros(query))


@functools.cache
def _fresh(name):
    return kvjax.init(POLICIES[name], make_spec(), row_keys())


def _plain(cache):
    """The cache with typed random keys as numbers, for chex; shapes and dtypes alone will do, too."""

    def plain(leaf):
        if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)

    return jax.tree.map(plain, cache)
