"""Invalid input: an error outside jit; under jit a fault counter, and NaN attention of the row from then on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.kvjax.support import POLICIES, after, each, make_spec, make_stream, prompt_of, row_keys

LENGTHS = np.array([37, 12, 1])

append, step, attend, compact = (jax.jit(f) for f in (kvjax.append, kvjax.step, kvjax.attend, kvjax.compact))
step_only = jax.jit(functools.partial(kvjax.step, compact_when_full=False))
prefill = jax.jit(lambda *arguments: kvjax.prefill(*arguments)[:2])


@functools.cache
def stream():
    return make_stream()


def empty_state(name="uniform", **sizes):
    """Returns an empty cache and its counters."""
    return kvjax.init(POLICIES[name], make_spec(**sizes), row_keys())


def prompt(lengths=LENGTHS):
    """Keys, values and lengths of the rows' prompts."""
    return *prompt_of(stream(), lengths)[:2], jnp.asarray(lengths)


def prefilled(name="uniform", lengths=LENGTHS, **sizes):
    return prefill(*empty_state(name, **sizes), *prompt(lengths))


def next_tokens(count, skip=0, lengths=LENGTHS):
    """Queries, keys and values of the rows' next tokens."""
    new = after(stream(), lengths, count, skip)
    return new.queries, new.keys, new.values


def nan_rows(attended):
    """Rows of NaN; the other rows must have none."""
    rows = np.isnan(attended).all((1, 2, 3))
    np.testing.assert_array_equal(np.isnan(attended).any((1, 2, 3)), rows)
    return rows.tolist()


def check_rows(state, faulty, message=None):
    """Checks which rows `attend` and `step` return as NaN, before and after compaction, and the text of the fault."""
    queries, keys, values = next_tokens(1, skip=8)
    none = jnp.zeros(3, jnp.int32)
    for one in (state, compact(*state)):
        stepped, *after_step = step(*one, queries, keys, values, none)
        again, *_ = step(*after_step, queries, keys, values, none)
        for attended in (kvjax.normalize(attend(*one, queries)), stepped, again):
            assert nan_rows(attended) == faulty
        check_fault(one, message)


def check_fault(state, message=None):
    if message is None:
        kvjax.raise_faults(state)
    else:
        check_refused(message, lambda: kvjax.raise_faults(state))


def check_refused(message, *calls):
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


# --- a full staging buffer ---


@pytest.mark.parametrize("staged, count", [(8, 1), (6, 3), (7, 8)])
def test_a_full_staging_buffer_is_an_error(staged, count):
    state = append(*prefilled(), *next_tokens(staged)[1:])
    queries, keys, values = next_tokens(count, skip=staged)
    check_refused(
        rf"{staged} of 8 staging slots are in use and {count} more tokens do not fit; call kvjax.compact first",
        lambda: kvjax.append(*state, keys, values),
        lambda: kvjax.step(*state, queries, keys, values, compact_when_full=False),
        # All rows use the same slots, also rows that append fewer tokens.
        lambda: kvjax.append(*state, keys, values, jnp.array([0, 0, 1])),
    )
    for *_, counters in (
        kvjax.append(*kvjax.compact(*state), keys, values),
        kvjax.step(*state, queries, keys, values),
    ):
        np.testing.assert_array_equal(counters.num_tokens, LENGTHS + staged + count)


def test_a_full_staging_buffer_is_counted_under_jit():
    state = append(*prefilled(), *next_tokens(7)[1:])
    queries, keys, values = next_tokens(2, skip=7)
    lengths = jnp.array([2, 0, 1])
    attended, *stepped = step_only(*state, queries, keys, values, lengths)
    assert nan_rows(attended) == [True, False, True]
    message = r"overflow=\[2, 0, 1\]: tokens were appended to a full staging buffer.* \(3 in total\)"
    for cache, counters in (append(*state, keys, values, lengths), stepped):
        np.testing.assert_array_equal(cache.staging.keys, state[0].staging.keys)
        np.testing.assert_array_equal(counters.num_tokens, LENGTHS + 7)
        check_rows((cache, counters), [True, False, True], message)


def test_more_tokens_than_staging_slots_are_an_error_under_jit_too():
    state, new = prefilled(), next_tokens(9)
    check_refused(
        "cannot append 9 tokens to 8 staging slots; .* larger compact_every",
        *(functools.partial(put, *state, *new[1:]) for put in (kvjax.append, append)),
        *(functools.partial(put, *state, *new) for put in (kvjax.step, step)),
    )


# --- more tokens than the cache was made for ---


def test_tokens_beyond_the_capacity_are_an_error():
    lengths = np.array([40, 12, 1])
    _, *state = kvjax.step(*prefilled(lengths=lengths, new=5), *next_tokens(5, lengths=lengths))
    new = next_tokens(1, skip=5, lengths=lengths)
    check_refused(
        r"a row would hold 46 tokens, .* max_prompt_tokens \+ max_new_tokens = 40 \+ 5; pass a larger max_new_tokens",
        lambda: kvjax.step(*state, *new),
        lambda: kvjax.append(*kvjax.compact(*state), *new[1:]),
    )
    # A finished sequence of full length may stay in the batch.
    *_, counters = kvjax.step(*state, *new, jnp.array([0, 1, 1]))
    np.testing.assert_array_equal(counters.num_tokens, lengths + np.array([5, 6, 6]))


@pytest.mark.parametrize("name", ["uniform", "exact", "quest", "clusterkv"])
def test_tokens_beyond_the_capacity_are_counted_under_jit(name):
    lengths = np.array([40, 12, 39])
    state = compact(*append(*prefilled(name, lengths, new=5), *next_tokens(4, lengths=lengths)[1:]))
    new = next_tokens(3, skip=4, lengths=lengths)
    appended = append(*state, *new[1:])
    np.testing.assert_array_equal(appended[1].num_tokens, [47, 19, 46])
    message = r"past=\[2, 0, 1\]: tokens were appended beyond max_prompt_tokens.* \(3 in total\)"
    check_rows(appended, [True, False, True], message)
    for function in (step, step_only) if name == "uniform" else ():
        attended, *stepped = function(*state, *new)
        assert nan_rows(attended) == [True, False, True]
        check_fault(stepped, message)
        check_fault(compact(*stepped), message)


# --- invalid lengths ---


IN_RANGE = r"lengths=\[.*\] must be in \[0, 2\]"


@pytest.mark.parametrize(
    "lengths, message",
    [
        *((jnp.array(lengths), IN_RANGE) for lengths in ([3, 1, 0], [2, -1, 0])),
        *((jnp.array(lengths), "lengths") for lengths in ([1.0, 1.0, 1.0], [True, True, False], [1, 1])),
    ],
)
def test_lengths_must_be_one_integer_per_row_in_the_range(lengths, message):
    new, functions = next_tokens(2), [(kvjax.step, kvjax.append, kvjax.prefill)]
    if message != IN_RANGE:  # an error of types or shapes, also under jit
        functions.append((step, append, prefill))
    for with_queries, without, of_prompt in functions:
        check_refused(
            message,
            functools.partial(with_queries, *prefilled(), *new, lengths),
            functools.partial(without, *prefilled(), *new[1:], lengths),
            functools.partial(of_prompt, *empty_state(), *new[1:], lengths),
        )


def test_lengths_beyond_the_tokens_are_counted_under_jit():
    cache, counters = append(*prefilled(), *next_tokens(2)[1:], jnp.array([5, 2, -1]))
    assert int(counters.num_tokens[1]) == LENGTHS[1] + 2
    np.testing.assert_array_equal(counters.overflow, [3, 0, 1])
    check_rows((cache, counters), [True, False, True], r"overflow=\[3, 0, 1\]: .*invalid lengths.* \(4 in total\)")


@pytest.mark.parametrize("padded, lengths", [(40, (41, 12, -1)), (12, (13, 12, -1)), (45, (41, 12, -2))])
def test_prompts_longer_than_the_tokens_or_the_capacity_are_refused(padded, lengths):
    """They are counted under jit."""
    arguments = *empty_state(), *prompt_of(stream(), (40, 12, 1), padded)[:2], jnp.array(lengths)
    check_refused(rf"lengths=\[.*\] must be in \[0, {min(padded, 40)}\]", lambda: kvjax.prefill(*arguments))
    state = prefill(*arguments)
    np.testing.assert_array_equal(state[1].num_tokens, [min(padded, 40), 12, 0])
    check_rows(state, [True, False, True], r"reused=\[1, 0, 1\]: .* more than max_prompt_tokens")


# --- prefill of a cache with tokens ---


def test_a_second_prompt_is_an_error_that_explains_the_token_of_flax_init():
    _, *stepped = step(*empty_state(), *next_tokens(1))
    for state, counts in ((prefilled(), "37, 12, 1"), (stepped, "1, 1, 1"), (compact(*stepped), "1, 1, 1")):
        message = rf"needs an empty cache, but its rows hold \[{counts}\] tokens.*Flax Linen's init runs a layer once"
        check_refused(message, functools.partial(kvjax.prefill, *state, *prompt()))


def test_a_prompt_after_other_tokens_is_counted_under_jit():
    staged = append(*empty_state(), *next_tokens(1)[1:], jnp.array([1, 0, 1]))
    message = r"reused=\[1, 0, 1\]: prefill was called on a cache with tokens.* \(2 in total\)"
    for state in (staged, compact(*staged)):
        check_rows(prefill(*state, *prompt()), [True, False, True], message)


def test_a_compiled_function_may_close_over_a_cache():
    state, new, (keys, *others) = empty_state(), next_tokens(1), prompt()
    filled = jax.jit(lambda keys: kvjax.prefill(*state, keys, *others)[:2])(keys)
    output = jax.jit(lambda query: kvjax.step(*filled, query, *new[1:])[0])(new[0])
    np.testing.assert_array_equal(output, step(*prefill(*state, keys, *others), *new)[0])


def test_a_row_stays_empty_after_a_prompt_of_no_tokens():
    *state, _ = kvjax.prefill(*empty_state(), *prompt()[:2], jnp.zeros(3, jnp.int32))
    *again, _ = kvjax.prefill(*state, *prompt())
    np.testing.assert_array_equal(again[1].num_tokens, LENGTHS)
    check_rows(again, [False] * 3)


# --- faults of a policy ---


@pytest.mark.parametrize("by_prefill", [True, False])
def test_keys_that_are_not_finite_are_a_fault_of_their_row_alone(by_prefill):
    keys, values, lengths = prompt()
    if by_prefill:
        keys[1, 3] = np.inf
    state = prefill(*empty_state("subgen_mean"), keys, values, lengths)
    if not by_prefill:
        _, keys, values = next_tokens(8)
        keys[1, 0] = np.inf
        state = compact(*append(*state, keys, values))
        state = compact(*append(*state, *next_tokens(8, skip=8)[1:]))
    np.testing.assert_array_equal(state[0].policy_faults > 0, [False, True, False])
    check_fault(state, "keys that are not finite")
    assert nan_rows(kvjax.normalize(attend(*state, next_tokens(1)[0]))) == [False, True, False]


@pytest.mark.parametrize("by_prefill", [True, False])
@pytest.mark.parametrize("name", each(POLICIES, quick=["uniform", "balancekv", "exact", "streaming_llm"]))
def test_entries_that_are_not_finite_are_a_fault_also_of_dropped_tokens(name, by_prefill):
    """Most policies drop some of these tokens; a dropped token leaves nothing that attention could read."""
    keys, values, lengths = prompt()
    queries = np.broadcast_to(stream().queries[:, :1], (3, keys.shape[1], *stream().queries.shape[2:]))
    if by_prefill:
        keys[1, 5], values[0, 7] = np.nan, -np.inf
        keys[2, 1] = np.nan  # past the row's length
    state = empty_state(name)
    state = prefill(*state, keys, values, lengths, kvjax.prompt_queries(state[0].policy, queries))
    if not by_prefill:
        _, keys, values = next_tokens(8)
        keys[1, 2], values[0, 3], keys[2, 5] = -np.inf, np.nan, np.nan
        state = compact(*append(*state, keys, values, jnp.array([8, 8, 5])))
    np.testing.assert_array_equal(np.asarray(state[0].not_finite) > 0, [True, True, False])
    check_fault(state, r"not_finite=\[2, 2, 0\]: tokens had keys or values that are NaN or infinite")
    assert nan_rows(kvjax.normalize(attend(*state, next_tokens(1)[0]))) == [True, True, False]


def test_entries_that_overflow_in_the_cache_are_a_fault():
    keys, values, lengths = prompt()
    values[1, 3] = 1e5  # beyond float16
    check_fault(prefill(*empty_state(dtype=jnp.float16), keys, values, lengths), r"not_finite=\[0, 2, 0\]")


def test_a_numerator_without_a_denominator_is_a_fault():
    # Algorithm 1: both sums have their own samples. At these norms, the denominator of a query underflows.
    policy = kvjax.SubGen(16, sinks=1, recent=2, light_values=0, self_normalization=0.0, compact_every=8)
    keys, values, lengths = prompt()
    queries, new_keys, new_values = next_tokens(1)
    scale = np.array([400, 0.1, 0.1])[:, None, None, None]
    state = prefill(*kvjax.init(policy, make_spec(), row_keys()), scale * keys, 8000 * values, lengths)
    check_fault(state)
    assert nan_rows(kvjax.normalize(attend(*state, scale * queries))) == [True, False, False]
    attended, *state = step(*state, scale * queries, scale * new_keys, 8000 * new_values)
    assert nan_rows(attended) == [True, False, False]
    check_fault(state, r"not_finite=\[1, 0, 0\]: .* or such an attention output")


@pytest.mark.parametrize(
    "sinks, message",
    [
        (np.ones(4, complex), "expected a floating-point dtype"),
        (np.array([0, np.nan, 0, 0]), r"sink_logits=\[0.0, nan, 0.0, 0.0\] must be finite, or -inf"),
        (np.full(4, np.inf), "must be finite, or -inf"),
        (np.ones(3), r"shape \(3,\), expected \[H_q\] = \(4,\)"),
    ],
)
def test_sink_logits_are_checked(sinks, message):
    state, new = prefilled(), next_tokens(1)
    check_refused(
        message,
        lambda: kvjax.prefill(*empty_state(), *prompt(), sink_logits=sinks),
        lambda: kvjax.step(*state, *new, sink_logits=sinks),
        lambda: kvjax.attend(*state, new[0], sink_logits=sinks),
    )


# --- rows and faults ---


def test_a_fault_moves_with_its_row_and_ends_when_the_row_is_overwritten():
    state = compact(*append(*prefilled(), *next_tokens(2)[1:], jnp.array([3, 2, 2])))
    other = compact(*append(*prefilled(), *next_tokens(2)[1:]))
    queries = next_tokens(1)[0]
    rows = kvjax.take_rows(state, jnp.array([1, 0, 0]))
    assert nan_rows(kvjax.normalize(attend(*rows, queries))) == [False, True, True]
    repaired = kvjax.insert_rows(state, kvjax.take_rows(other, jnp.array([0])), jnp.array([0]))
    kvjax.raise_faults(repaired)
    outputs = [kvjax.normalize(attend(*one, queries)) for one in (repaired, other)]
    np.testing.assert_array_equal(*outputs)


# --- counters ---


def test_counters_of_another_cache_are_refused():
    state, new = prefilled(), next_tokens(1)
    cache, counters = state
    fewer_rows = kvjax.take_rows(counters, jnp.array([0, 1]))
    _, fewer_slots = empty_state(new=5)
    for wrong, sizes in ((fewer_rows, "2 rows and 8 staging slots"), (fewer_slots, "3 rows and 5 staging slots")):
        check_refused(
            rf"counters of {sizes} do not belong to a cache of 3 rows and 8 slots; pass the counters that kvjax",
            lambda wrong=wrong: kvjax.prefill(empty_state()[0], wrong, *new[1:], jnp.ones(3, jnp.int32)),
            *(lambda wrong=wrong, put=put: put(cache, wrong, *new) for put in (kvjax.step, step)),
            lambda wrong=wrong: kvjax.append(cache, wrong, *new[1:]),
            lambda wrong=wrong: kvjax.attend(cache, wrong, new[0]),
            lambda wrong=wrong: kvjax.compact(cache, wrong),
            lambda wrong=wrong: kvjax.freeze(cache, wrong),
        )
    with pytest.raises(TypeError, match=r"counters must be kvjax.Counters, which kvjax.init returns, got ndarray"):
        kvjax.attend(cache, new[0], new[0])
