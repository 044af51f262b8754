"""Storage in eight bits: what attention reads, what storing again changes, bytes, and who refuses it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state import map_fields
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    POLICIES,
    QUICKLY,
    after,
    begin,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
    whole_run,
)

# Policies of every kind of store: a window alone, with a selection, with centroids or trees beside it, with blocks.
NAMES = ("exact", "uniform", "chelsea", "balancekv_paper", "clusterkv", "quest")
HEAVY = ("chelsea", "balancekv_paper", "clusterkv", "quest")
STORAGES = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}
both = pytest.mark.parametrize("storage", STORAGES)


@functools.cache
def policy_of(name, storage):
    return kvjax.quantized(POLICIES[name], storage)


@functools.cache
def run(name, storage="int8", dtype=jnp.float32):
    stream, policy = make_stream(), policy_of(name, storage)
    state = begin(policy, make_spec(dtype=dtype), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(policy, state, after(stream, LENGTHS, 20))


def loaded(state):
    """The policy's own state with the numbers that are stored, by the definition of the format."""

    def multiply(field, x, scale):
        # One scale for every entry, of which some stand side by side.
        return np.float32(x) * np.repeat(scale, x.shape[-1] // field.side_by_side, axis=-1) if field.entries else x

    return map_fields(multiply, state.cache, state.scales)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.heavy) if one in HEAVY else one for one in NAMES])
def test_attention_reads_the_numbers_that_are_stored(name):
    state, _, _ = run(name)
    stream, policy = make_stream(), POLICIES[name]
    for tokens, causal in ((1, True), (4, False)):
        query = jnp.asarray(stream.queries[:, 40 : 40 + tokens])
        found, _ = policy_of(name, "int8").attend(state, query, causal)
        expected, _ = policy.attend(loaded(state), query, causal)
        np.testing.assert_allclose(kvjax.output(found), kvjax.output(expected), atol=2e-5)


@both
@pytest.mark.parametrize("name", ["exact", "uniform", pytest.param("chelsea", marks=pytest.mark.heavy)])
def test_outputs_are_near_those_of_the_policy_itself(name, storage):
    _, outputs, _ = run(name, storage)
    allowed = 0.02 if storage == "int8" else 0.15
    apart = np.abs(outputs - whole_run(name)[1][:, :20])
    # What is merged with what may change with the last bit; nothing else does.
    assert np.mean(apart) < allowed if name == "chelsea" else np.max(apart) < 2 * allowed


@both
@pytest.mark.parametrize(
    "name, dtype", [("exact", jnp.float32), pytest.param("chelsea", jnp.bfloat16, marks=pytest.mark.heavy)]
)
def test_storing_again_changes_no_bit_of_what_stays(name, storage, dtype):
    state, _, _ = run(name, storage, dtype)
    compact = jax.jit(policy_of(name, storage).compact, compiler_options=QUICKLY)
    state = compact(state)
    again = compact(state)
    bits = lambda x: x.view(jnp.uint8) if x.dtype in [dtype for dtype, _ in STORAGES.values()] else x  # noqa: E731
    for part in ("cache", "scales"):
        for one, other in zip(*(jax.tree.leaves(getattr(of, part)) for of in (state, again)), strict=True):
            if not jax.dtypes.issubdtype(one.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(bits(one), bits(other))


@both
def test_the_stored_numbers_are_the_nearest(storage):
    stream, policy = make_stream(), policy_of("exact", storage)
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    dtype, largest = STORAGES[storage]
    assert state.cache.selection.keys.dtype == dtype
    assert state.cache.window.staging.keys.dtype == jnp.float32
    keys = stream.keys[0, : LENGTHS[0]].swapaxes(0, 1)  # [H, T, D]
    numbers, scales = loaded(state).selection.keys, np.asarray(state.scales.selection.keys)
    stored, scale = numbers[0, :, : LENGTHS[0]], scales[0, :, : LENGTHS[0]]
    np.testing.assert_allclose(scale[..., 0], np.abs(keys).max(-1) / largest, rtol=2**-16)
    # Half a step of 1 for int8; for fp8 half of 2^-3 of the number, or of the smallest step, 2^-9.
    step = scale if storage == "int8" else np.maximum(np.abs(keys) / 8, scale * 2**-9)
    assert (np.abs(stored - keys) <= 0.5001 * step).all()


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_row_in_a_ragged_batch_equals_the_row_alone(row):
    policy, stream = policy_of("chelsea", "int8"), make_stream().row(row)
    _, outputs, weights = run("chelsea")
    length = LENGTHS[row : row + 1]
    state = begin(policy, make_spec(batch=1), row_keys()[row : row + 1], *prompt_of(stream, length, garbage=1), length)
    _, alone, alone_weights = go(policy, state, after(stream, length, 20))
    np.testing.assert_allclose(outputs[row], alone[0], atol=1e-5)
    np.testing.assert_allclose(weights[row], alone_weights[0], atol=1e-5)


def test_bytes_are_real():
    policy, spec = policy_of("chelsea", "int8"), make_spec(batch=1)
    entries = 2 * 2 * 20 * HEAD_DIM  # keys and values of 2 heads x 20 slots
    expected = kvjax.row_bytes(POLICIES["chelsea"], spec) - entries * (4 - 1) + 2 * 2 * 20 * 4
    assert kvjax.row_bytes(policy, spec) == expected
    state = policy.init(spec, row_keys(1))
    assert kvjax.cache_bytes(state).device == expected
    plain = POLICIES["chelsea"]
    read = plain.read_bytes(plain.init(spec, row_keys(1))) - entries * (4 - 1) + 2 * 2 * 20 * 4
    assert policy.read_bytes(state) == read


def test_what_is_read_beside_attention_is_counted():
    # quest(20) reads 3 pages of 16 and the window's 15 + 8 slots per head, and the bounds of its 4 pages in full.
    policy, plain = policy_of("quest", "int8"), POLICIES["quest"]
    pages, window, heads, row = 3 * 16, 15 + 8, 4, row_keys(1)
    spec = make_spec(batch=1)
    quantised = 2 * HEAD_DIM * (pages * heads + window * 2)  # numbers that take a byte instead of four
    scales = 2 * 4 * (pages * heads + window * 2)
    assert policy.read_bytes(policy.init(spec, row)) == plain.read_bytes(plain.init(spec, row)) - 3 * quantised + scales


@pytest.mark.heavy
def test_layers_may_be_inside_or_outside():
    layers = [POLICIES["exact"], POLICIES["chelsea"]]
    inside = kvjax.quantized(kvjax.by_layer(layers))
    outside = kvjax.by_layer([policy_of(name, "int8") for name in ("exact", "chelsea")])
    spec = make_spec(layer=1, layers=2)
    stream = make_stream()
    for policy in (inside, outside):
        state = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
        _, outputs, _ = go(policy, state, after(stream, LENGTHS, 20))
        np.testing.assert_allclose(outputs, run("chelsea")[1], atol=1e-6)
        assert kvjax.row_bytes(policy, spec) == kvjax.row_bytes(policy_of("chelsea", "int8"), make_spec())


def test_heads_of_their_own_may_be_quantised_inside():
    policy = kvjax.by_head([[policy_of("exact", "int8"), POLICIES["streaming_llm"]]])
    stream = make_stream()
    state = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    _, outputs, _ = go(policy, state, after(stream, LENGTHS, 20))
    np.testing.assert_allclose(outputs[:, :, :2], run("exact")[1][:, :, :2], atol=1e-5)


def test_rows_can_be_taken():
    state, _, _ = run("chelsea")
    back = kvjax.take_rows(kvjax.take_rows(state, jnp.array([2, 0, 1])), jnp.array([1, 2, 0]))
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_it_cannot_follow_is_refused_by_name():
    with pytest.raises(ValueError, match="storage='int4'; known: int8, fp8"):
        kvjax.quantized(POLICIES["exact"], "int4")
    with pytest.raises(ValueError, match="quantized: subgen.* does more than attend to its segments"):
        kvjax.quantized(POLICIES["subgen_mean_value"])
    with pytest.raises(ValueError, match="quantized: by_head"):
        kvjax.quantized(kvjax.by_head([[POLICIES["exact"], POLICIES["streaming_llm"]]]))

    def doubled(state, query, causal=False):
        shown = POLICIES["exact"].segments(state, query, causal)
        return tuple(kvjax.segment(one.keys * 2.0, one.values, stop=one.stop) for one in shown)

    policy = kvjax.quantized(POLICIES["exact"]._replace(name="doubling", segments=doubled))
    state = policy.init(make_spec(), row_keys())
    with pytest.raises(ValueError, match=r"quantized\(doubling, int8\): the policy computes with its stored entries"):
        policy.attend(state, jnp.zeros((len(LENGTHS), 1, 4, HEAD_DIM)))
