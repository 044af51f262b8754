"""Invalid arguments and states are refused with a message that names them, or have no effect; with and without jit."""

import dataclasses
import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax_models.model.llama import Llama
from kvjax_models.runner.generator import Generator
from kvjax_models.runner.sampling import Sampling, row_sampling, sample
from tests.kvjax.support import BATCH, HEAD_DIM, LENGTHS, POLICIES, begin, each, make_spec, row_keys
from tests.kvjax.support import ON_A_MESH as ANY_VALUES
from tests.models.loops import decode, decode_all, generate
from tests.models.support import small_config

WINDOW = {"sinks": 1, "recent": 2, "compact_every": 4}


@functools.cache
def make_model():
    return Llama(small_config(max_length=64), rngs=nnx.Rngs(0))


def make_generator(policy=None, **options):
    # Sizes may be integers of NumPy.
    sizes = {"batch": np.int64(1), "max_prompt_tokens": np.uint8(16), "max_new_tokens": np.uint8(16)}
    return Generator(make_model(), policy or kvjax.Exact(compact_every=4), **sizes | options)


def exact_state(batch=BATCH):
    """Returns an empty cache and its counters."""
    return kvjax.init(kvjax.Exact(compact_every=8), make_spec(batch=batch), row_keys(batch))


def with_overflow(counters, overflow):
    return dataclasses.replace(counters, overflow=jnp.array([overflow], jnp.int32))


# --- Padding and flags of JAX ---


append, step, compact = jax.jit(kvjax.append), jax.jit(kvjax.step), jax.jit(kvjax.compact)


def make_blocks():
    """Returns queries, keys and values of prompts and of two blocks of new tokens."""
    rng, shapes = np.random.default_rng(0), ((BATCH, 40), (BATCH, 8), (BATCH, 8))
    return [[rng.normal(size=(*shape, heads, HEAD_DIM)).astype(np.float32) for heads in (4, 2, 2)] for shape in shapes]


@pytest.mark.parametrize("name", each(POLICIES, quick=["uniform", "snapkv"]))
def test_padding_has_no_effect(name):
    """Outputs are bitwise equal for any padding of prompts and of blocks."""
    policy = ANY_VALUES.get(name, POLICIES[name])
    lengths = (40, LENGTHS), (8, [8, 0, 3]), (8, [2, 8, 0])
    masks = [np.arange(size) < np.array(counts)[:, None] for size, counts in lengths]

    def run(padding):
        (queries, keys, values), *blocks = (
            [np.where(mask[..., None, None], x, np.float32(padding)) for x in block]
            for block, mask in zip(make_blocks(), masks, strict=True)
        )
        state, outputs = begin(policy, make_spec(), row_keys(), keys, values, queries, LENGTHS), []
        for block, mask in zip(blocks, masks[1:], strict=True):
            output, *state = step(*state, *block, jnp.asarray(mask.sum(axis=1)))
            outputs.append(np.asarray(output)[mask])
            state = compact(*state)
        kvjax.raise_faults(state)
        return outputs

    expected = run(0.0)
    for padding in (np.nan, np.inf, 3e38):
        jax.tree.map(np.testing.assert_array_equal, run(padding), expected)


def run_eagerly(policy):
    """Calls every function of a cache without jit; returns outputs, numbers of tokens, read bytes and the state."""
    (queries, keys, values), block, _ = make_blocks()
    cache, counters = kvjax.init(policy, make_spec(), row_keys())
    prompt = keys, values, np.array(LENGTHS), kvjax.prompt_queries(cache.policy, queries)
    *state, _ = kvjax.prefill(cache, counters, *prompt)
    output, *state = kvjax.step(*state, *block, np.array([8, 0, 3]))
    state = kvjax.insert_rows(kvjax.compact(*state), kvjax.compact(*kvjax.take_rows(state, [1])), [0])
    partials = kvjax.attend(*kvjax.append(*state, *block[1:]), block[0])
    kvjax.raise_faults(state)
    cache, counters = state
    return [output, kvjax.normalize(partials)], counters.num_tokens, kvjax.read_bytes(cache), state


@pytest.mark.parametrize("name", each(POLICIES, quick=["uniform"]))
def test_flags_of_jax_have_no_effect(name):
    """Outputs are bitwise equal and dtypes unchanged under 64-bit types and strict promotion."""
    *expected, expected_state = run_eagerly(POLICIES[name])
    for context in (jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")):
        with context:
            *outputs, state = run_eagerly(POLICIES[name])
        jax.tree.map(np.testing.assert_array_equal, outputs, expected)
        assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, expected_state)


# --- Sizes and counters ---


def test_sizes_may_be_numpy_integers():
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 2, "head_dim": 8, "max_prompt_tokens": 200, "layers": 1}
    expected = kvjax.CacheSpec(**sizes, max_new_tokens=200, rope_frequencies=(0.5,) * 4)
    sizes = {name: np.uint8(size) for name, size in sizes.items()}
    spec = kvjax.CacheSpec(**sizes, max_new_tokens=np.uint8(200), rope_frequencies=np.full(4, 0.5, np.float32))
    assert spec == expected and hash(spec) == hash(expected) and spec.capacity == expected.capacity == 400


@settings(max_examples=40, deadline=None)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1))
def test_overflow_counters_never_wrap_to_zero(length, overflow):
    (cache, counters), keys = exact_state(1), jnp.zeros((1, 8, 2, HEAD_DIM))
    counters = with_overflow(counters, overflow)
    for _ in range(2):
        cache, counters = append(cache, counters, keys, keys, jnp.array([length], jnp.int32))
    is_valid = overflow == 0 and length == 0  # any other second block overflows
    assert bool((np.asarray(counters.overflow) == 0).all()) == is_valid
    if not is_valid:
        with pytest.raises(ValueError, match="overflow="):
            kvjax.raise_faults((cache, counters))


def test_faults_of_two_rows_do_not_cancel():
    with pytest.raises(ValueError, match="reused="):
        kvjax.raise_faults(dataclasses.replace(exact_state(2)[0], reused=jnp.array([1, -1])))


# --- Settings of policies ---

INVALID_VALUES = [
    None, -1, -0.5, 0, 1.5, True, "8", "x", b"", [], {}, (), (None,), (1.5,), 2**40, np.nan, np.inf, -np.inf, object,
]  # fmt: skip
COMBINATORS = {
    "by_head": kvjax.ByHead((kvjax.Exact(),) * 2),
    "first_layers": kvjax.FirstLayers(1, kvjax.Exact(), kvjax.Exact()),
    "host_memory": kvjax.HostMemory(kvjax.Quest(20, compact_every=8), 2),
}
CLASSES = {type(policy): policy for policy in (POLICIES | COMBINATORS).values()}


@pytest.mark.parametrize("policy", CLASSES.values(), ids=lambda policy: type(policy).__name__)
def test_invalid_settings(policy):
    """Every setting with every value: errors name a setting, and accepted values have the setting's type."""
    num_refused = 0
    for field, value in itertools.product(dataclasses.fields(policy), INVALID_VALUES):
        try:
            changed = dataclasses.replace(policy, **{field.name: value})
        except ValueError as error:
            assert re.search(rf"\b{field.name}\b|[a-z_]+=", str(error)), (field.name, value, str(error))
            num_refused += 1
        else:
            assert not isinstance(value, str | bytes | list | dict | type), (field.name, value)
            assert changed == changed and hash(changed) == hash(changed), (field.name, value)  # unlike NaN
            assert (type(value) is bool) == (field.type in (bool, "bool")), (field.name, value)
    assert num_refused > 0.7 * len(INVALID_VALUES) * len(dataclasses.fields(policy))


def test_settings_may_be_numpy_integers():
    """They are converted, since sums of them could overflow and JSON cannot represent them."""
    for policy in CLASSES.values():
        fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
        integers = {name: np.uint8(value) for name, value in fields.items() if type(value) is int and value < 256}
        changed = dataclasses.replace(policy, **integers)
        assert changed == policy and json.dumps(kvjax.describe(changed)) == json.dumps(kvjax.describe(policy))
    with pytest.raises(ValueError, match="budget=200 slots cannot hold sinks=200 and recent=200"):
        kvjax.Uniform(np.uint8(200), np.uint8(200), np.uint8(200))
    with pytest.raises(ValueError, match="budget=9999.* must be int"):
        kvjax.Uniform(10**400 - 1)


# --- Arrays ---


BIG_ENDIAN = np.dtype(np.float32).newbyteorder(">")
# Index into (queries, keys, values, lengths) of a block of 8 tokens, the change of that array, and the error.
INVALID_ARRAYS = {
    "keys as a list": (1, lambda x: x.tolist(), TypeError, "keys must be a JAX or NumPy array, got list"),
    "values of None": (2, lambda x: None, TypeError, "values must be a JAX or NumPy array, got NoneType"),
    "lengths as a float": (3, lambda x: 8.0, TypeError, "lengths must be a JAX or NumPy array, got float"),
    "lengths as a list": (3, lambda x: [8] * BATCH, TypeError, "lengths must be a JAX or NumPy array, got list"),
    "integer queries": (0, lambda x: x.astype(np.int32), ValueError, "queries have dtype int32"),
    "boolean queries": (0, lambda x: x > 0, ValueError, "queries have dtype bool"),
    "complex queries": (0, lambda x: x + 1j, ValueError, "queries have dtype complex"),
    "big-endian keys": (1, lambda x: x.astype(BIG_ENDIAN), ValueError, "keys have dtype >f4, expected the byte order"),
    "big-endian queries": (0, lambda x: x.astype(BIG_ENDIAN), ValueError, "queries have dtype >f4"),
    "empty keys": (1, lambda x: x[:, :0], ValueError, r"keys have shape .* expected \[B, T, H_kv, D\]"),
}


@pytest.mark.parametrize("name", INVALID_ARRAYS)
def test_invalid_arrays(name):
    index, change, error, message = INVALID_ARRAYS[name]
    arguments = [*make_blocks()[1], np.full(BATCH, 8, np.int32)]
    arguments[index] = change(arguments[index])
    queries, keys, values, lengths = arguments
    calls = [(kvjax.step, arguments), (kvjax.prefill, (keys, values, lengths, queries))]
    calls.append((kvjax.attend, [queries]) if index == 0 else (kvjax.append, arguments[1:]))
    for function, of_function in calls:
        with pytest.raises(error, match=message):
            function(*exact_state(), *of_function)


def test_attention_needs_a_query():
    with pytest.raises(ValueError, match=r"queries have shape .* expected"):
        kvjax.attend(*exact_state(), jnp.zeros((BATCH, 0, 4, HEAD_DIM)))


def test_rows_are_integers_of_any_dtype():
    state = exact_state()
    for rows in (np.array([True, False, True]), 1, [[1], [0]], [1.0], [], None, "1"):
        for function in (kvjax.take_rows, lambda state, rows: kvjax.insert_rows(state, state, rows)):
            with pytest.raises(ValueError, match=r"rows have dtype .* expected integers \[R\]; use jnp.flatnonzero"):
                function(state, rows)
    *_, counters = kvjax.step(*state, *make_blocks()[1], np.array([1, 2, 3], np.int32))
    for rows in (jnp.flatnonzero(jnp.array([True, False, True])), [0, 2], np.array([0, 2], np.uint64)):
        np.testing.assert_array_equal(kvjax.take_rows(counters, rows).num_tokens, [1, 3])


# --- Generation ---

INVALID_PROMPTS = [[1.0, 2.0], [1.7], [True, False], ["1"], [None], [[1], [2]], [32], [-1], [2**40]]


def test_invalid_tokens_and_seeds_are_refused():
    generator = make_generator()
    for prompt in INVALID_PROMPTS:
        with pytest.raises(ValueError, match="prompt 0 must be a list of integers|token ids must be between 0 and 31"):
            generator.prefill(generator.init_state(), [prompt])
    for seed in (-1, 2**32, 2**63, 1.0, True, "1", None):
        with pytest.raises(ValueError, match="seed=.* must be an integer from 0 to"):
            generator.init_state(seed)
    keys = [
        np.asarray(jax.random.key_data(generator.init_state(seed).sampling_keys)) for seed in (0, 1, 2**31, 2**32 - 1)
    ]
    assert len({key.tobytes() for key in keys}) == 4


@pytest.mark.parametrize("temperature", [1e-30, 1e-3])
def test_low_temperatures_sample_the_most_likely_token(temperature):
    logits = 50 * jax.random.normal(jax.random.key(0), (64, 40))
    for options in ({}, {"top_k": 3}, {"top_p": 0.9}):
        sampling = row_sampling([Sampling(temperature=temperature, **options)] * 64, 40)
        sampled = sample(logits, jax.random.split(jax.random.key(1), 64), sampling)
        np.testing.assert_array_equal(sampled.token, jnp.argmax(logits, axis=-1))


def key_bytes(keys):
    """Returns sampling keys as bytes, which a set can hold."""
    return set(map(bytes, np.asarray(jax.random.key_data(keys))))


def test_forks_sample_independently_and_the_first_continues_its_row():
    generator, fork_generator = make_generator(), make_generator(batch=4)
    state = generator.prefill(generator.init_state(3, Sampling(temperature=1.0)), [[1, 2, 3]])
    forks = kvjax.repeat_rows(state, 4)
    assert len(key_bytes(kvjax.repeat_rows(kvjax.repeat_rows(forks, 2), 2).sampling_keys)) == 16
    key, later_keys = state.sampling_keys, set()
    for _ in range(64):
        split = jax.random.split(key[0])
        later_keys |= key_bytes(split)
        key = split[1][None]
    assert not later_keys & key_bytes(forks.sampling_keys[1:])
    reseeded = fork_generator.reseed(forks, 1)
    assert key_bytes(reseeded.sampling_keys) == key_bytes(fork_generator.init_state(1).sampling_keys)
    rows, _ = decode_all(fork_generator, forks, 12)
    assert len(set(map(tuple, rows))) == 4
    assert decode_all(generator, state, 12)[0] == rows[:1]


def test_sequences_beyond_the_context_are_refused_unless_they_are_allowed(caplog):
    policy = kvjax.Uniform(8, sinks=1, recent=2, compact_every=4)
    for prompt, max_new_tokens in (([1] * 90, 4), ([1] * 60, 8)):
        message = f"a sequence of {max(len(prompt), 68)} tokens exceeds the model's context length of 64"
        with pytest.raises(ValueError, match=message):
            generate(make_model(), policy, [prompt], max_new_tokens=max_new_tokens)
    assert len(generate(make_model(), policy, [[1] * 60], max_new_tokens=4)[0][0]) == 4
    assert not caplog.text
    rows, _ = generate(make_model(), policy, [[1] * 60], max_new_tokens=8, allow_beyond_context=True)
    assert len(rows[0]) == 8 and "the output may be meaningless" in caplog.text


def test_faults_of_a_cache_stop_generation():
    generator = make_generator()
    state = generator.prefill(generator.init_state(), [[1, 2, 3]])
    with pytest.raises(ValueError, match="is invalid|NaN or infinite"):
        list(decode(generator, dataclasses.replace(state, counters=with_overflow(state.counters, 1)), 8))
