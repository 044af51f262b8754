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
from tests.kvjax.support import BATCH, HEAD_DIM, LENGTHS, POLICIES, each, make_spec
from tests.kvjax.support import ON_A_MESH as ANY_VALUES
from tests.models.loops import decode, decode_all, generate
from tests.models.support import small_config

WINDOW = {"sinks": 1, "recent": 2, "compact_every": 4}


@functools.cache
def make_model():
    return Llama(small_config(max_length=64), rngs=nnx.Rngs(0))


def make_generator(policy=None, **options):
    sizes = {"batch": 1, "max_prompt_tokens": 16, "max_new_tokens": 16, "prefill_chunk": 16}
    return Generator(make_model(), policy or kvjax.Exact(compact_every=4), **sizes | options)


def exact_state(batch=BATCH):
    """Returns an empty cache and its counters."""
    return kvjax.init(kvjax.Exact(compact_every=8), make_spec(batch=batch), jax.random.split(jax.random.key(0), batch))


def with_overflow(counters, overflow):
    return dataclasses.replace(counters, overflow=jnp.array([overflow], jnp.int32))


# --- Padding ---


def make_blocks(seed=0, tokens=40):
    """Returns queries, keys and values of prompts and of two blocks of new tokens."""
    rng = np.random.default_rng(seed)
    return [
        tuple(rng.normal(size=(BATCH, count, heads, HEAD_DIM)).astype(np.float32) for heads in (4, 2, 2))
        for count in (tokens, 8, 8)
    ]


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def run_policy(policy, spec, keys, queries, values, lengths, blocks, counts, last_query):
    """Returns the outputs of every block and of a last query, and the cache with its counters."""
    cache, counters = kvjax.init(policy, spec, jax.random.split(jax.random.key(1), spec.batch))
    prompt_queries = kvjax.prompt_queries(cache.policy, queries)
    cache, counters, _ = kvjax.prefill(cache, counters, keys, values, lengths, queries=prompt_queries)
    outputs = []
    for block, count in zip(blocks, counts, strict=True):
        output, cache, counters = kvjax.step(cache, counters, *block, count)
        outputs.append(output)
        cache, counters = kvjax.compact(cache, counters)
    return outputs, kvjax.normalize(kvjax.attend(cache, counters, last_query)), (cache, counters)


@pytest.mark.parametrize("name", each(POLICIES, quick=["uniform", "snapkv"]))
def test_padding_has_no_effect(name):
    """Outputs are bitwise equal for any padding of prompts and of blocks."""
    policy = ANY_VALUES.get(name, POLICIES[name])
    (queries, keys, values), *blocks = make_blocks()
    lengths, counts = np.array(LENGTHS, np.int32), np.array([[8, 0, 3], [2, 8, 0]], np.int32)
    block_masks = [np.arange(8) < count[:, None] for count in counts]

    def run(padding):
        def pad(x, mask):
            return np.where(mask[:, :, None, None], x, np.float32(padding))

        mask = np.arange(40) < lengths[:, None]  # prompt queries are aligned on the right
        prompt = pad(keys, mask), pad(queries, mask[:, ::-1]), pad(values, mask)
        padded = [tuple(pad(x, mask) for x in block) for block, mask in zip(blocks, block_masks, strict=True)]
        return run_policy(policy, make_spec(), *prompt, lengths, padded, list(counts), queries[:, :1])

    expected, expected_last, _ = run(0.0)
    assert np.isfinite(expected_last).all()
    for padding in (np.nan, np.inf, 3e38):
        outputs, last, state = run(padding)
        kvjax.raise_faults(state)
        for output, expected_output, mask in zip(outputs, expected, block_masks, strict=True):
            np.testing.assert_array_equal(np.asarray(output)[mask], np.asarray(expected_output)[mask])
        np.testing.assert_array_equal(last, expected_last)


# --- Configuration of JAX ---

CONTEXTS = [
    lambda: jax.enable_x64(True),
    lambda: jax.numpy_dtype_promotion("strict"),
    lambda: jax.numpy_rank_promotion("raise"),
]


def run_eagerly(policy):
    """Calls every function of a cache without jit; returns outputs, numbers of tokens, read bytes and the state."""
    (queries, keys, values), block, _ = make_blocks()
    cache, counters = kvjax.init(policy, make_spec(), jax.random.split(jax.random.key(1), BATCH))
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
    (queries, keys, values), *blocks = make_blocks()
    counts = [np.array([8, 0, 3], np.int32), np.array([2, 8, 0], np.int32)]
    arrays = (keys, queries, values, np.array(LENGTHS, np.int32), blocks, counts, queries[:, :1])

    def run():
        jitted = jax.tree.map(np.asarray, run_policy(POLICIES[name], make_spec(), *arrays)[:2])
        return jitted, *run_eagerly(POLICIES[name])

    *expected, expected_state = run()
    for number, context in enumerate(CONTEXTS):
        with context():
            *outputs, state = run()
        jax.tree.map(np.testing.assert_array_equal, outputs, expected)
        assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, expected_state), number


# --- Sizes and counters ---


def test_sizes_may_be_numpy_integers():
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 2, "head_dim": 8, "max_prompt_tokens": 200, "layers": 1}
    expected = kvjax.CacheSpec(**sizes, max_new_tokens=200, rope_frequencies=(0.5,) * 4)
    sizes = {name: np.uint8(size) for name, size in sizes.items()}
    spec = kvjax.CacheSpec(**sizes, max_new_tokens=np.uint8(200), rope_frequencies=np.full(4, 0.5, np.float32))
    assert spec == expected and hash(spec) == hash(expected) and spec.capacity == expected.capacity == 400


append = jax.jit(kvjax.append)


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


@pytest.mark.parametrize("policy", CLASSES.values(), ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_settings_may_be_numpy_integers(dtype, policy):
    """They are converted, since sums of them could overflow and JSON cannot represent them."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    integers = {name: dtype(value) for name, value in fields.items() if type(value) is int and value < 256}
    changed = dataclasses.replace(policy, **integers)
    assert changed == policy and json.dumps(kvjax.describe(changed)) == json.dumps(kvjax.describe(policy))


def test_settings_do_not_overflow_in_checks():
    with pytest.raises(ValueError, match="budget=200 slots cannot hold sinks=200 and recent=200"):
        kvjax.Uniform(np.uint8(200), np.uint8(200), np.uint8(200))
    with pytest.raises(ValueError, match="budget=9999.* must be int"):
        kvjax.Uniform(10**400 - 1)


# --- States ---


def test_rows_of_another_policy_or_spec_are_refused():
    """Inserts states of all policies, other settings and other sizes into each other."""
    keys = jax.random.split(jax.random.key(0), BATCH)
    others = {
        "larger": kvjax.Uniform(24, **WINDOW),
        "chunk": kvjax.Chelsea(20, **WINDOW, chunk=4),
        "lag": kvjax.LagKV(20, sinks=2, lag_size=5, compact_every=8),
    }

    def abstract(policy, spec):
        return jax.eval_shape(functools.partial(kvjax.init, policy, spec), keys)[0]

    caches = [abstract(policy, make_spec()) for policy in (POLICIES | others).values()]
    caches += [abstract(POLICIES["knorm"], make_spec(kv_dtype=kv_dtype)) for kv_dtype in ("int8", "int4")]
    caches += [abstract(POLICIES["uniform"], make_spec(**sizes)) for sizes in ({"new": 23}, {"scale": 1.0})]
    for cache, other in itertools.permutations(caches, 2):
        if (cache.policy, cache.spec) == (other.policy, other.spec):
            continue  # two names of one policy
        with pytest.raises(ValueError, match="insert_rows: the states belong to different policies or specs") as error:
            kvjax.insert_rows(cache, other, jnp.arange(BATCH))
        assert not str(error.value).endswith(": ")


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


@pytest.mark.parametrize("rows", [np.array([True, False, True]), 1, [[1], [0]], [1.0], [], None, "1"])
def test_invalid_rows(rows):
    state = exact_state()
    for function in (kvjax.take_rows, lambda state, rows: kvjax.insert_rows(state, state, rows)):
        with pytest.raises(ValueError, match=r"rows have dtype .* expected integers \[R\]; use jnp.flatnonzero"):
            function(state, rows)


def test_rows_may_have_any_integer_dtype():
    *_, counters = kvjax.step(*exact_state(), *make_blocks()[1], np.array([1, 2, 3], np.int32))
    for rows in (jnp.flatnonzero(jnp.array([True, False, True])), [0, 2], np.array([0, 2], np.uint64)):
        np.testing.assert_array_equal(kvjax.take_rows(counters, rows).num_tokens, [1, 3])


# --- Tokens and seeds ---


@pytest.mark.parametrize("prompt", [[1.0, 2.0], [1.7], [True, False], ["1"], [None], [[1], [2]], [32], [-1], [2**40]])
def test_invalid_tokens(prompt):
    generator = make_generator()
    with pytest.raises(ValueError, match="prompt 0 must be a list of integers|token ids must be between 0 and 31"):
        generator.prefill(generator.init_state(), [prompt])


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63, 1.0, True, "1", None])
def test_invalid_seeds(seed):
    with pytest.raises(ValueError, match="seed=.* must be an integer from 0 to"):
        make_generator().init_state(seed)


def test_seeds_of_32_bits_differ():
    generator, seeds = make_generator(), (0, 1, 2**31, 2**32 - 1)
    keys = [np.asarray(jax.random.key_data(generator.init_state(seed).sampling_keys)) for seed in seeds]
    assert len({key.tobytes() for key in keys}) == 4


# --- Sampling ---


@pytest.mark.parametrize("temperature", [1e-30, 1e-20, 1e-3])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_low_temperatures_sample_the_most_likely_token(temperature, options):
    logits = 50 * jax.random.normal(jax.random.key(0), (64, 40))
    sampling = row_sampling([Sampling(temperature=temperature, **options)] * 64, 40)
    sampled = sample(logits, jax.random.split(jax.random.key(1), 64), sampling)
    np.testing.assert_array_equal(sampled.token, jnp.argmax(logits, axis=-1))


# --- Forks ---

SAMPLING = Sampling(temperature=1.0)


def test_forks_sample_independently_and_the_first_continues_its_row():
    generator, fork_generator = make_generator(), make_generator(batch=4)
    state = generator.prefill(generator.init_state(3, SAMPLING), [[1, 2, 3]])
    forks = kvjax.repeat_rows(state, 4)
    keys = np.asarray(jax.random.key_data(kvjax.repeat_rows(kvjax.repeat_rows(forks, 2), 2).sampling_keys))
    assert len(set(map(bytes, keys))) == 16
    rows, _ = decode_all(fork_generator, forks, 12)
    assert len(set(map(tuple, rows))) == 4
    assert decode_all(generator, state, 12)[0] == rows[:1]


def test_forks_never_use_later_keys_of_their_row():
    state = make_generator().init_state()
    key, later_keys = state.sampling_keys, set()
    for _ in range(64):
        split = jax.random.split(key[0])
        later_keys |= {bytes(np.asarray(jax.random.key_data(new_key))) for new_key in split}
        key = split[1][None]
    forks = jax.random.key_data(kvjax.repeat_rows(state, 8).sampling_keys)
    assert not later_keys & set(map(bytes, np.asarray(forks[1:])))


def test_reseed_reseeds_forks():
    generator, fork_generator = make_generator(), make_generator(batch=3)
    state, rows = generator.prefill(generator.init_state(3, SAMPLING), [[1, 2, 3]]), []
    for seed in (0, 1):
        forks = fork_generator.reseed(kvjax.repeat_rows(state, 3), seed)
        expected = fork_generator.init_state(seed).sampling_keys
        np.testing.assert_array_equal(jax.random.key_data(forks.sampling_keys), jax.random.key_data(expected))
        rows += decode_all(fork_generator, forks, 12)[0]
    assert len(set(map(tuple, rows))) == 6


# --- Context length and faults ---


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "message"),
    [(list(range(1, 31)) * 3, 4, "a sequence of 90 tokens"), ([1] * 60, 8, "a sequence of 68 tokens")],
)
def test_sequences_beyond_the_context_are_refused(prompt, max_new_tokens, message, caplog):
    policy = kvjax.Uniform(8, sinks=1, recent=2, compact_every=4)
    with pytest.raises(ValueError, match=f"{message} exceeds the model's context length of 64"):
        generate(make_model(), policy, [prompt], max_new_tokens=max_new_tokens)
    assert not caplog.text


def test_sequences_beyond_the_context_can_be_allowed(caplog):
    policy, prompts = kvjax.Uniform(8, sinks=1, recent=2, compact_every=4), [[1] * 60]
    assert len(generate(make_model(), policy, prompts, max_new_tokens=4)[0][0]) == 4
    assert not caplog.text
    rows, _ = generate(make_model(), policy, prompts, max_new_tokens=8, allow_beyond_context=True)
    assert len(rows[0]) == 8 and "the output may be meaningless" in caplog.text


def test_faults_of_a_cache_stop_generation():
    generator = make_generator()
    state = generator.prefill(generator.init_state(), [[1, 2, 3]])
    with pytest.raises(ValueError, match="is invalid|NaN or infinite"):
        list(decode(generator, dataclasses.replace(state, counters=with_overflow(state.counters, 1)), 8))
