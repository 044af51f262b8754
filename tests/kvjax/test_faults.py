"""No token is lost in silence: what cannot be is an error outside jit, and counted under jit, where the row's attention
is NaN from then on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.policies.balancekv_paper import BalanceKVPaper
from tests.kvjax.support import POLICIES, WINDOW, after, make_spec, make_stream, prompt_of, row_keys

LENGTHS = np.array([37, 12, 1])
FULL, SECOND = "full staging buffer", "a prompt came to a cache that had tokens"

append, step, attend, compact = (jax.jit(f) for f in (kvjax.append, kvjax.step, kvjax.attend, kvjax.compact))
step_only = jax.jit(functools.partial(kvjax.step, compact_when_full=False))
prefill = jax.jit(lambda *arguments: kvjax.prefill(*arguments)[0])


@functools.cache
def stream():
    return make_stream()


def fresh(name="uniform", **sizes):
    return kvjax.init(POLICIES[name], make_spec(**sizes), row_keys())


def prompted(name="uniform", lengths=LENGTHS, **sizes):
    keys, values, _ = prompt_of(stream(), lengths)
    return prefill(fresh(name, **sizes), keys, values, jnp.asarray(lengths))


def new_tokens(count, skip=0, lengths=LENGTHS):
    """Queries, keys and values of the rows' next tokens."""
    new = after(stream(), lengths, count, skip)
    return new.queries, new.keys, new.values


def check_rows(cache, unsound, message=None):
    """Which rows are NaN, for `attend`, for `step` and once compacted; all others are not; and what `check` says."""
    queries, keys, values = new_tokens(1, skip=8)
    none = jnp.zeros(3, jnp.int32)
    for sound in (cache, compact(cache)):
        seen = kvjax.normalize(attend(sound, queries))
        stepped, after_step = step(sound, queries, keys, values, none)
        again, _ = step(after_step, queries, keys, values, none)
        for attended in (seen, stepped, again):
            np.testing.assert_array_equal(np.isnan(attended).all((1, 2, 3)), unsound)
            np.testing.assert_array_equal(np.isnan(attended).any((1, 2, 3)), unsound)
        if message is None:
            kvjax.raise_faults(sound)
        else:
            with pytest.raises(ValueError, match=message):
                kvjax.raise_faults(sound)


# --- a full staging buffer ---


@pytest.mark.parametrize("already, count", [(8, 1), (6, 3), (7, 8)])
def test_a_full_staging_buffer_is_an_error(already, count):
    cache = append(prompted(), *new_tokens(already)[1:])
    queries, keys, values = new_tokens(count, skip=already)
    message = rf"{already} of 8 staging slots are taken, {count} more tokens find no room: call kvjax.compact first"
    with pytest.raises(ValueError, match=message):
        kvjax.append(cache, keys, values)
    with pytest.raises(ValueError, match=message):
        kvjax.step(cache, queries, keys, values, compact_when_full=False)
    # Even where rows ask for fewer: slots are the batch's.
    with pytest.raises(ValueError, match=message):
        kvjax.append(cache, keys, values, jnp.array([0, 0, 1]))
    # Compacting makes room, by hand or by itself.
    expected = LENGTHS + already + count
    np.testing.assert_array_equal(kvjax.num_tokens(kvjax.append(kvjax.compact(cache), keys, values)), expected)
    np.testing.assert_array_equal(kvjax.num_tokens(kvjax.step(cache, queries, keys, values)[1]), expected)


@pytest.mark.parametrize("put", ["append", "step"])
def test_a_full_staging_buffer_is_counted_under_jit(put):
    cache = append(prompted(), *new_tokens(7)[1:])
    queries, keys, values = new_tokens(2, skip=7)
    lengths = jnp.array([2, 0, 1])
    if put == "append":
        spilt = append(cache, keys, values, lengths)
    else:
        attended, spilt = step_only(cache, queries, keys, values, lengths)
        np.testing.assert_array_equal(np.isnan(attended).all((1, 2, 3)), [True, False, True])
    np.testing.assert_array_equal(spilt.staging.overflow, [2, 0, 1])
    # What was there is as it was.
    np.testing.assert_array_equal(spilt.staging.keys, cache.staging.keys)
    np.testing.assert_array_equal(kvjax.num_tokens(spilt), LENGTHS + 7)
    check_rows(spilt, [True, False, True], rf"overflow=\[2, 0, 1\]: tokens came to a {FULL}.* \(3 in all\)")


def test_more_tokens_than_there_are_slots_are_always_an_error():
    queries, keys, values = new_tokens(9)
    for put in (kvjax.append, append):
        with pytest.raises(ValueError, match="9 tokens cannot be staged in 8 slots: .* larger compact_every"):
            put(prompted(), keys, values)
    for put in (kvjax.step, step):
        with pytest.raises(ValueError, match="9 tokens cannot be staged in 8 slots"):
            put(prompted(), queries, keys, values)


# --- more than the cache was made for ---


def test_tokens_past_what_the_cache_was_made_for_are_an_error():
    # Row 0 may take five more, row 2 many.
    lengths = np.array([40, 12, 1])
    cache = prompted(lengths=lengths, new=5)
    queries, keys, values = new_tokens(5, lengths=lengths)
    _, cache = kvjax.step(cache, queries, keys, values)
    queries, keys, values = new_tokens(1, skip=5, lengths=lengths)
    message = r"a row would hold 46 tokens; .* max_prompt_tokens \+ max_new_tokens = 40 \+ 5: make it with a larger max_new_tokens"
    with pytest.raises(ValueError, match=message):
        kvjax.step(cache, queries, keys, values)
    with pytest.raises(ValueError, match=message):
        kvjax.append(kvjax.compact(cache), keys, values)
    # A row that has ended may stand at the end for ever.
    _, cache = kvjax.step(cache, queries, keys, values, jnp.array([0, 1, 1]))
    np.testing.assert_array_equal(kvjax.num_tokens(cache), lengths + np.array([5, 6, 6]))


@pytest.mark.parametrize("name", ["uniform", "exact", "quest"])
def test_tokens_past_what_the_cache_was_made_for_are_counted_under_jit(name):
    lengths = np.array([40, 12, 39])
    cache = append(prompted(name, lengths, new=5), *new_tokens(4, lengths=lengths)[1:])
    _, keys, values = new_tokens(3, skip=4, lengths=lengths)
    cache = append(compact(cache), keys, values)
    np.testing.assert_array_equal(kvjax.num_tokens(cache), [47, 19, 46])
    check_rows(cache, [True, False, True], r"past=\[2, 0, 1\]: tokens came past max_prompt_tokens.* \(3 in all\)")


def test_tokens_past_what_the_cache_was_made_for_are_seen_by_every_way_in():
    lengths = np.array([40, 12, 39])
    cache = append(prompted(lengths=lengths, new=5), *new_tokens(4, lengths=lengths)[1:])
    cache = compact(cache)
    new = new_tokens(3, skip=4, lengths=lengths)
    for put in (step, step_only):
        attended, after_step = put(cache, *new)
        np.testing.assert_array_equal(np.isnan(attended).all((1, 2, 3)), [True, False, True])
        # A loop of steps that leaves compaction to others is counted by that.
        with pytest.raises(ValueError, match=r"past=\[2, 0, 1\]"):
            kvjax.raise_faults(compact(after_step))
    with pytest.raises(ValueError, match=r"past=\[2, 0, 1\]"):
        kvjax.raise_faults(step(cache, *new)[1])


# --- lengths that cannot be ---


@pytest.mark.parametrize("lengths", [(3, 1, 0), (2, -1, 0)])
def test_lengths_that_cannot_be_are_an_error(lengths):
    queries, keys, values = new_tokens(2)
    lengths = jnp.array(lengths)
    with pytest.raises(ValueError, match=r"lengths=\[.*\] must lie in \[0, 2\]"):
        kvjax.append(prompted(), keys, values, lengths)
    with pytest.raises(ValueError, match=r"lengths=\[.*\] must lie in \[0, 2\]"):
        kvjax.step(prompted(), queries, keys, values, lengths)
    with pytest.raises(ValueError, match=r"lengths=\[.*\] must lie in \[0, 2\]"):
        kvjax.prefill(fresh(), keys, values, lengths)


@pytest.mark.parametrize("wrong", [jnp.array([1.0, 1.0, 1.0]), jnp.array([True, True, False]), jnp.array([1, 1])])
def test_lengths_are_whole_numbers_of_every_row(wrong):
    queries, keys, values = new_tokens(2)
    for put in (kvjax.step, step):
        with pytest.raises(ValueError, match="lengths"):
            put(prompted(), queries, keys, values, wrong)


def test_lengths_beyond_the_tokens_are_counted_under_jit():
    cache = prompted()
    _, keys, values = new_tokens(2)
    cache = append(cache, keys, values, jnp.array([5, 2, -1]))
    assert int(kvjax.num_tokens(cache)[1]) == LENGTHS[1] + 2
    np.testing.assert_array_equal(cache.counters.overflow, [3, 0, 1])
    check_rows(cache, [True, False, True], r"overflow=\[3, 0, 1\]: .*lengths that cannot be.* \(4 in all\)")


@pytest.mark.parametrize("padded, lengths", [(40, (41, 12, -1)), (12, (13, 12, -1)), (45, (41, 12, -2))])
def test_prompts_longer_than_what_there_is_or_the_cache_was_made_for_are_counted_under_jit(padded, lengths):
    keys, values, _ = prompt_of(stream(), (40, 12, 1), padded)
    cache = prefill(fresh(), keys, values, jnp.array(lengths))
    np.testing.assert_array_equal(kvjax.num_tokens(cache), [min(padded, 40), 12, 0])
    check_rows(cache, [True, False, True], r"reused=\[1, 0, 1\]: a prompt .* was longer than max_prompt_tokens")


@pytest.mark.parametrize("lengths", [(41, 12, 1), (40, 12, -1)])
def test_prompts_longer_than_the_cache_was_made_for_are_an_error(lengths):
    keys, values, _ = prompt_of(stream(), (40, 12, 1), 45)
    with pytest.raises(ValueError, match=r"lengths=\[.*\] must lie in \[0, 40\]"):
        kvjax.prefill(fresh(), keys, values, jnp.array(lengths))


# --- a prompt on top of tokens ---


@pytest.mark.parametrize("name", ["uniform", "exact", "subgen_mean_value", "clusterkv"])
def test_a_second_prompt_is_an_error(name):
    keys, values, _ = prompt_of(stream(), LENGTHS)
    with pytest.raises(
        ValueError, match=r"prefill takes a fresh cache; the rows of this one hold \[37, 12, 1\] tokens"
    ):
        kvjax.prefill(prompted(name), keys, values, jnp.array(LENGTHS))


def test_a_layer_that_was_run_once_to_initialise_it_is_named():
    # Flax Linen's init calls the layer: a step on a fresh cache, whose token would lie under the prompt.
    _, cache = step(fresh(), *new_tokens(1))
    keys, values, _ = prompt_of(stream(), LENGTHS)
    for used in (cache, compact(cache)):
        with pytest.raises(ValueError, match=r"hold \[1, 1, 1\] tokens.*running a layer once to initialise it.*Flax"):
            kvjax.prefill(used, keys, values, jnp.array(LENGTHS))


@pytest.mark.parametrize("staged", [True, False])
def test_a_prompt_on_top_of_tokens_is_counted_under_jit(staged):
    # Row 1 alone is fresh.
    cache = append(fresh(), *new_tokens(1)[1:], jnp.array([1, 0, 1]))
    keys, values, _ = prompt_of(stream(), LENGTHS)
    cache = prefill(cache if staged else compact(cache), keys, values, jnp.array(LENGTHS))
    check_rows(cache, [True, False, True], rf"reused=\[1, 0, 1\]: {SECOND}.* \(2 in all\)")


def test_a_row_without_a_prompt_may_be_given_one_later():
    # A prompt of no tokens leaves a row fresh.
    keys, values, _ = prompt_of(stream(), LENGTHS)
    cache = kvjax.prefill(fresh(), keys, values, jnp.zeros(3, jnp.int32))[0]
    again = kvjax.prefill(cache, keys, values, jnp.array(LENGTHS))[0]
    np.testing.assert_array_equal(kvjax.num_tokens(again), LENGTHS)
    check_rows(again, [False] * 3)


# --- faults of a policy ---


def test_a_fault_of_the_policy_makes_its_rows_nan_too():
    # Values of norm 3 belong to no bucket of the numerator's trees; while they are in the window, nothing is lost.
    policy = BalanceKVPaper(60, **WINDOW, value_exponents=(0, 0))
    keys, values, _ = prompt_of(stream(), LENGTHS)
    cache = prefill(kvjax.init(policy, make_spec(), row_keys()), keys, values, jnp.array(LENGTHS))
    check_rows(cache, [False] * 3)
    for first in (0, 8):
        _, keys, values = new_tokens(8, skip=first)
        cache = append(cache, keys, values * jnp.array([1.0, 3.0, 1.0])[:, None, None, None])
        if first == 0:
            assert not np.isnan(kvjax.normalize(attend(cache, new_tokens(1)[0]))).any()
        cache = compact(cache)
    np.testing.assert_array_equal(cache.faulty > 0, [False, True, False])
    check_rows(cache, [False, True, False], "not sound")


@pytest.mark.parametrize("by_prefill", [True, False])
def test_keys_that_are_not_finite_are_a_fault_of_their_row_alone(by_prefill):
    keys, values, _ = prompt_of(stream(), LENGTHS)
    if by_prefill:
        keys[1, 3] = np.inf
    cache = prefill(fresh("subgen_mean_value"), keys, values, jnp.array(LENGTHS))
    if not by_prefill:
        _, keys, values = new_tokens(8)
        keys[1, 0] = np.inf
        cache = compact(append(cache, keys, values))
        cache = compact(append(cache, *new_tokens(8, skip=8)[1:]))
    np.testing.assert_array_equal(cache.faulty > 0, [False, True, False])
    with pytest.raises(ValueError, match="keys that are not finite were left out"):
        kvjax.raise_faults(cache)
    seen = kvjax.normalize(attend(cache, new_tokens(1)[0]))
    np.testing.assert_array_equal(np.isnan(seen).all((1, 2, 3)), [False, True, False])


# --- rows and faults ---


def test_a_fault_goes_where_its_row_goes():
    cache = append(prompted(), *new_tokens(2)[1:], jnp.array([3, 2, 2]))
    cache = compact(cache)
    other = compact(append(prompted(), *new_tokens(2)[1:]))
    queries = new_tokens(1)[0]
    taken = kvjax.take_rows(cache, jnp.array([1, 0, 0]))
    np.testing.assert_array_equal(np.isnan(kvjax.normalize(attend(taken, queries))).all((1, 2, 3)), [False, True, True])
    # A row that is overwritten is sound again.
    mended = kvjax.insert_rows(cache, kvjax.take_rows(other, jnp.array([0])), jnp.array([0]))
    kvjax.raise_faults(mended)
    np.testing.assert_array_equal(kvjax.normalize(attend(mended, queries)), kvjax.normalize(attend(other, queries)))
