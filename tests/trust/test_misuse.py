"""What callers get wrong: refused with what it is, or of no consequence; outside jit and under it."""

import contextlib
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
from kvjax.spec import MAX_TOKENS
from kvjax_models.generation.generator import Generator, generate
from kvjax_models.generation.rows import extend_rows
from kvjax_models.generation.sampling import Sampling, sample
from kvjax_models.model.config import LlamaConfig
from kvjax_models.model.llama import Llama
from tests.kvjax.support import BATCH, HEAD_DIM, LENGTHS, POLICIES, each, make_spec
from tests.kvjax.support import ON_A_MESH as ANY_VALUES

CONFIG = LlamaConfig(
    vocab_size=32, width=16, mlp_width=16, layers=1, query_heads=2, kv_heads=1, head_dim=8, max_length=64
)
WINDOW = {"sinks": 1, "recent": 2, "compact_every": 4}


@functools.cache
def model():
    return Llama(CONFIG, rngs=nnx.Rngs(0))


def generator(policy=None, **changes):
    sizes = {"batch": 1, "max_prompt_tokens": 16, "max_new_tokens": 16, "prefill_chunk": 16} | changes
    return Generator(model(), policy or kvjax.Exact(compact_every=4), **sizes)


def written(made, state, tokens):
    rows = [[] for _ in range(made.batch)]
    for newest, new in made.decode(state, tokens):
        state = newest
        extend_rows(rows, new)
    return state, rows


# --- padding ---


def inputs(seed=0, tokens=40):
    """Queries, keys and values of prompts and of two blocks of new tokens."""
    rng = np.random.default_rng(seed)
    draw = lambda count, heads: rng.normal(size=(BATCH, count, heads, HEAD_DIM)).astype(np.float32)  # noqa: E731
    return [(draw(count, 4), draw(count, 2), draw(count, 2)) for count in (tokens, 8, 8)]


def padded(arrays, real, noise):
    return [np.where(real[:, :, None, None], x, np.asarray(noise, np.float32)) for x in arrays]


@functools.partial(jax.jit, static_argnames=("policy", "spec"))
def through(policy, spec, keys, queries, values, lengths, blocks, counts, asked_last):
    """What attention gives of everything that a policy was shown."""
    row_keys = jax.random.split(jax.random.key(1), spec.batch)
    cache = kvjax.init(policy, spec, row_keys)
    needed = kvjax.prompt_queries(cache.policy, queries)
    cache, _ = kvjax.prefill(cache, keys, values, lengths, queries=needed)
    seen = []
    for (query, key, value), count in zip(blocks, counts, strict=True):
        attended, cache = kvjax.step(cache, query, key, value, count)
        seen.append(attended)
        cache = kvjax.compact(cache)
    return seen, kvjax.normalize(kvjax.attend(cache, asked_last)), cache


@pytest.mark.parametrize("name", each(POLICIES, quick=["uniform", "snapkv"]))
def test_padding_of_any_content_never_reaches_a_result(name):
    """Noise past the lengths of rows, in prompts and in later blocks, gives to the bit what zeros there give."""
    if POLICIES[name].requires.repetition is not None:
        pytest.skip("it reads the prompt again")
    (queries, keys, values), *blocks = inputs()
    lengths, counts = np.array(LENGTHS, np.int32), np.array([[8, 0, 3], [2, 8, 0]], np.int32)

    def run(noise):
        real = np.arange(keys.shape[1]) < lengths[:, None]
        late = np.arange(keys.shape[1]) >= keys.shape[1] - lengths[:, None]
        of_blocks = [
            padded(block, np.arange(8) < count[:, None], noise) for block, count in zip(blocks, counts, strict=True)
        ]
        prompt = (*padded([keys], real, noise), *padded([queries], late, noise), *padded([values], real, noise))
        return through(
            ANY_VALUES.get(name, POLICIES[name]), make_spec(), *prompt, lengths, of_blocks, list(counts), queries[:, :1]
        )

    clean, last, _ = run(0.0)
    assert np.isfinite(last).all()
    for noise in (np.nan, np.inf, 3e38):
        noisy, last_noisy, cache = run(noise)
        kvjax.raise_faults(cache)
        for one, other, count in zip(clean, noisy, counts, strict=True):
            real = np.arange(8) < count[:, None]
            np.testing.assert_array_equal(np.asarray(one)[real], np.asarray(other)[real])
        np.testing.assert_array_equal(last, last_noisy)


# --- flags of JAX ---

FLAGS = {
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
}


@contextlib.contextmanager
def flag_set(name):
    before = getattr(jax.config, name)
    jax.config.update(name, FLAGS[name])
    try:
        yield
    finally:
        jax.config.update(name, before)


def eager(policy):
    """Every function of a cache, outside jit."""
    (queries, keys, values), block, _ = inputs()
    cache = kvjax.init(policy, make_spec(), jax.random.split(jax.random.key(1), BATCH))
    cache, _ = kvjax.prefill(cache, keys, values, np.array(LENGTHS), kvjax.prompt_queries(cache.policy, queries))
    attended, cache = kvjax.step(cache, *block, np.array([8, 0, 3]))
    cache = kvjax.insert_rows(kvjax.compact(cache), kvjax.compact(kvjax.take_rows(cache, [1])), [0])
    partials = kvjax.attend(kvjax.append(cache, *block[1:]), block[0])
    kvjax.raise_faults(cache)
    return [attended, kvjax.normalize(partials)], kvjax.num_tokens(cache), kvjax.read_bytes(cache), cache


@pytest.mark.parametrize("name", each(POLICIES, quick=["exact", "subgen_paper"]))
def test_flags_of_jax_change_nothing(name):
    """Policies run with the flags that some programs set, and give the same bits, in 32 bits."""
    if POLICIES[name].requires.repetition is not None:
        pytest.skip("it reads the prompt again")
    (queries, keys, values), *blocks = inputs()
    counts = [np.array([8, 0, 3], np.int32), np.array([2, 8, 0], np.int32)]
    prompt = (keys, queries, values, np.array(LENGTHS, np.int32), blocks, counts, queries[:, :1])

    def run():
        jitted = jax.tree.map(np.asarray, through(POLICIES[name], make_spec(), *prompt)[:2])
        return jitted, *eager(POLICIES[name])

    *expected, cache = run()
    for flag in FLAGS:
        with flag_set(flag):
            *found, same = run()
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert jax.tree.map(lambda x: x.dtype, same) == jax.tree.map(lambda x: x.dtype, cache), flag


# --- sizes and counters ---


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"max_prompt_tokens": MAX_TOKENS}, "must be at most 16777216"),
        ({"max_prompt_tokens": 2**31, "max_new_tokens": 2**31}, "must be at most 16777216"),
        ({"max_prompt_tokens": 40.0}, "max_prompt_tokens=40.0 must be an integer"),
        ({"batch": True}, "batch=True must be an integer"),
        ({"kv_heads": "2"}, "kv_heads='2' must be an integer"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"layer": 0.5}, "layer=0.5 must be an integer"),
        ({"layer": -1}, "layer=-1 must be at least 0"),
        ({"layer": 1}, r"layer=1 must be in \[0, layers=1\)"),
        ({"window": 2.5}, "window=2.5 must be an integer"),
        ({"value_dim": True}, "value_dim=True must be an integer"),
        ({"scale": np.inf}, "scale=inf must be a finite number above 0, or None"),
        ({"scale": -1.0}, "scale=-1.0 must be"),
        ({"logit_cap": np.nan}, "logit_cap=nan must be"),
        ({"logit_cap": 10**400}, "logit_cap=1000"),
        ({"rope_frequencies": "abcd"}, "rope_frequencies='abcd' must be head_dim / 2 = 4 finite numbers, or None"),
        ({"rope_frequencies": (1.0, np.inf, 1.0, 1.0)}, "rope_frequencies="),
        ({"rope_frequencies": (1.0,)}, "rope_frequencies="),
        ({"dtype": jnp.int32}, "dtype=.* must be a floating-point dtype"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes, message):
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 2, "head_dim": 8, "max_prompt_tokens": 8, "max_new_tokens": 8}
    with pytest.raises(ValueError, match=message):
        kvjax.CacheSpec(**sizes | changes)


def test_sizes_of_numpy_are_sizes():
    sizes = {"batch": 1, "query_heads": 2, "kv_heads": 2, "head_dim": 8, "max_prompt_tokens": 200, "layers": 1}
    one = kvjax.CacheSpec(**sizes, max_new_tokens=200, rope_frequencies=(0.5,) * 4)
    sizes = {name: np.uint8(size) for name, size in sizes.items()}
    other = kvjax.CacheSpec(**sizes, max_new_tokens=np.uint8(200), rope_frequencies=np.full(4, 0.5, np.float32))
    assert one == other and hash(one) == hash(other) and one.capacity == other.capacity == 400


@settings(max_examples=40, deadline=None)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1))
def test_counters_never_come_round_to_sound(length, overflow):
    cache = kvjax.init(kvjax.Exact(compact_every=8), make_spec(batch=1), jax.random.split(jax.random.key(0), 1))
    cache = dataclasses.replace(
        cache, counters=dataclasses.replace(cache.counters, overflow=jnp.array([overflow], jnp.int32))
    )
    keys = jnp.zeros((1, 8, 2, HEAD_DIM))
    for _ in range(2):
        cache = appended(cache, keys, keys, jnp.array([length], jnp.int32))
    sound = overflow == 0 and length == 0  # the second block finds no room
    assert bool((np.asarray(cache.counters.overflow) == 0).all()) == sound
    if not sound:
        with pytest.raises(ValueError, match="overflow="):
            kvjax.raise_faults(cache)


appended = jax.jit(kvjax.append)


def test_faults_of_two_rows_do_not_make_up_for_each_other():
    cache = kvjax.init(kvjax.Exact(compact_every=8), make_spec(batch=2), jax.random.split(jax.random.key(0), 2))
    with pytest.raises(ValueError, match="reused="):
        kvjax.raise_faults(dataclasses.replace(cache, reused=jnp.array([1, -1])))


# --- settings ---

INVALID_VALUES = [
    None, -1, -0.5, 0, 1.5, True, "8", "x", b"", [], {}, (), (None,), (1.5,), 2**40, np.nan, np.inf, -np.inf, object,
]  # fmt: skip
COMBINED = {
    "by_head": kvjax.ByHead((kvjax.Exact(),) * 2),
    "first_layers": kvjax.FirstLayers(1, kvjax.Exact(), kvjax.Exact()),
    "host_memory": kvjax.HostMemory(kvjax.Quest(20, compact_every=8), 2),
}
CLASSES = {type(policy): policy for policy in (POLICIES | COMBINED).values()}


@pytest.mark.parametrize("policy", CLASSES.values(), ids=lambda policy: type(policy).__name__)
def test_a_setting_is_what_it_may_be_or_refused_by_name(policy):
    """Some four thousand values in the place of settings: whatever is taken is of the setting's type, and equal to the
    policy that its text gives."""
    refused = 0
    for field, value in itertools.product(dataclasses.fields(policy), INVALID_VALUES):
        try:
            made = dataclasses.replace(policy, **{field.name: value})
        except ValueError as error:
            assert re.search(rf"\b{field.name}\b|[a-z_]+=", str(error)), (field.name, value, str(error))
            refused += 1
        else:
            assert not isinstance(value, str | bytes | list | dict | type), (field.name, value)
            assert made == made and hash(made) == hash(made), (field.name, value)  # which NaN is not
            assert (type(value) is bool) == (field.type in (bool, "bool")), (field.name, value)
    assert refused > 0.7 * len(INVALID_VALUES) * len(dataclasses.fields(policy))


@pytest.mark.parametrize("policy", CLASSES.values(), ids=lambda policy: type(policy).__name__)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
def test_integers_of_numpy_are_settings_like_any(dtype, policy):
    """Their sums would overflow in the checks, and JSON has no form for them."""
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    integers = {name: dtype(value) for name, value in fields.items() if type(value) is int and value < 256}
    made = dataclasses.replace(policy, **integers)
    assert made == policy and json.dumps(kvjax.describe(made)) == json.dumps(kvjax.describe(policy))


def test_settings_that_would_wrap_are_refused_by_their_values():
    with pytest.raises(ValueError, match="budget=200 slots cannot hold sinks=200 and recent=200"):
        kvjax.Uniform(np.uint8(200), np.uint8(200), np.uint8(200))
    with pytest.raises(ValueError, match="budget=9999.* must be int"):
        kvjax.Uniform(10**400 - 1)


# --- states ---


def test_rows_of_another_policy_or_spec_are_refused():
    """Inserts the state of every policy into that of every other, of other settings and of another size."""
    keys = jax.random.split(jax.random.key(0), BATCH)
    others = {
        "larger": kvjax.Uniform(24, **WINDOW),
        "chunk": kvjax.Chelsea(20, **WINDOW, chunk=4),
        "lag": kvjax.LagKV(20, sinks=2, lag_size=5, compact_every=8),
    }

    def abstract(policy, spec):
        return jax.eval_shape(functools.partial(kvjax.init, policy, spec), keys)

    caches = [abstract(policy, make_spec()) for policy in (POLICIES | others).values()]
    caches += [abstract(POLICIES["knorm"], make_spec(kv_dtype=kv_dtype)) for kv_dtype in ("int8", "int4")]
    caches += [abstract(POLICIES["uniform"], make_spec(**sizes)) for sizes in ({"new": 23}, {"scale": 1.0})]
    for cache, other in itertools.permutations(caches, 2):
        if (cache.policy, cache.spec) == (other.policy, other.spec):
            continue  # one policy under two names
        with pytest.raises(ValueError, match="insert_rows: the states belong to different policies or specs") as error:
            kvjax.insert_rows(cache, other, jnp.arange(BATCH))
        assert not str(error.value).endswith(": ")


# --- lengths, tokens, seeds ---


@pytest.mark.parametrize("lengths", [np.array([1.0, 2.0, 1.0]), np.array([True, False, True]), np.array([1, 2])])
def test_lengths_are_whole_numbers_of_every_row(lengths):
    cache = kvjax.init(kvjax.Exact(compact_every=8), make_spec(), jax.random.split(jax.random.key(0), BATCH))
    _, keys, values = inputs()[1]
    for function in (kvjax.prefill, jax.jit(kvjax.prefill), kvjax.append, jax.jit(kvjax.append)):
        with pytest.raises(ValueError, match="lengths"):
            function(cache, keys, values, lengths)


def exact_cache(compact_every=8):
    return kvjax.init(kvjax.Exact(compact_every), make_spec(), jax.random.split(jax.random.key(0), BATCH))


BIG_ENDIAN = np.dtype(np.float32).newbyteorder(">")
# What stands in the place of (queries, keys, values, lengths) of a block of 8 tokens.
WRONG_ARRAYS = {
    "keys of a list": (1, lambda x: x.tolist(), TypeError, "keys must be a JAX or NumPy array, got list"),
    "no values": (2, lambda x: None, TypeError, "values must be a JAX or NumPy array, got NoneType"),
    "lengths of a float": (3, lambda x: 8.0, TypeError, "lengths must be a JAX or NumPy array, got float"),
    "lengths of a list": (3, lambda x: [8] * BATCH, TypeError, "lengths must be a JAX or NumPy array, got list"),
    "integer queries": (0, lambda x: x.astype(np.int32), ValueError, "queries have dtype int32"),
    "boolean queries": (0, lambda x: x > 0, ValueError, "queries have dtype bool"),
    "complex queries": (0, lambda x: x + 1j, ValueError, "queries have dtype complex"),
    "big-endian keys": (1, lambda x: x.astype(BIG_ENDIAN), ValueError, "keys have dtype >f4, expected the byte order"),
    "big-endian queries": (0, lambda x: x.astype(BIG_ENDIAN), ValueError, "queries have dtype >f4"),
    "no keys": (1, lambda x: x[:, :0], ValueError, r"keys have shape .* expected \[B, T, H_kv, D\]"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_arrays_of_another_kind_are_refused_by_name(name):
    index, change, kind, message = WRONG_ARRAYS[name]
    arguments = [*inputs()[1], np.full(BATCH, 8, np.int32)]
    arguments[index] = change(arguments[index])
    queries, keys, values, lengths = arguments
    with pytest.raises(kind, match=message):
        kvjax.step(exact_cache(), *arguments)
    with pytest.raises(kind, match=message):
        kvjax.prefill(exact_cache(), keys, values, lengths, queries)
    if index == 0:
        with pytest.raises(kind, match=message):
            kvjax.attend(exact_cache(), queries)


@pytest.mark.parametrize("function", [kvjax.prefill, kvjax.append, kvjax.step, kvjax.attend])
def test_no_tokens_are_refused(function):
    queries, keys, values = (x[:, :0] for x in inputs()[1])
    arguments = {kvjax.step: (queries, keys, values), kvjax.attend: (queries,)}.get(function, (keys, values))
    more = (np.zeros(BATCH, np.int32),) if function is kvjax.prefill else ()
    with pytest.raises(ValueError, match="have shape .* expected"):
        function(exact_cache(), *arguments, *more)


@pytest.mark.parametrize("rows", [np.array([True, False, True]), 1, [[1], [0]], [1.0], [], None, "1"])
def test_rows_are_a_list_of_integers(rows):
    cache = exact_cache()
    for call in (kvjax.take_rows, lambda cache, rows: kvjax.insert_rows(cache, cache, rows)):
        with pytest.raises(ValueError, match=r"rows have dtype .* expected integers \[R\]; use jnp.flatnonzero"):
            call(cache, rows)


def test_rows_of_a_mask_and_of_any_integer_type():
    _, cache = kvjax.step(exact_cache(), *inputs()[1], np.array([1, 2, 3], np.int32))
    for rows in (jnp.flatnonzero(jnp.array([True, False, True])), [0, 2], np.array([0, 2], np.uint64)):
        np.testing.assert_array_equal(kvjax.num_tokens(kvjax.take_rows(cache, rows)), [1, 3])


@pytest.mark.parametrize("heads", [1, 2, 6, 8])
def test_other_query_heads_than_the_specs_are_refused(heads):
    cache = kvjax.init(kvjax.Exact(compact_every=8), make_spec(), jax.random.split(jax.random.key(0), BATCH))
    for function in (kvjax.attend, jax.jit(kvjax.attend)):
        with pytest.raises(ValueError, match="queries have shape"):
            function(cache, jnp.zeros((BATCH, 1, heads, HEAD_DIM)))


@pytest.mark.parametrize("prompt", [[1.0, 2.0], [1.7], [True, False], ["1"], [None], [[1], [2]], [32], [-1], [2**40]])
def test_what_is_no_token_is_refused(prompt):
    made = generator()
    with pytest.raises(ValueError, match="prompt 0 must be a list of integers|token ids must be between 0 and 31"):
        made.prefill(made.init_state(), [prompt])


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63, 1.0, True, "1", None])
def test_seeds_that_would_repeat_are_refused(seed):
    with pytest.raises(ValueError, match="seed=.* must be an integer from 0 to"):
        generator().init_state(seed)


def test_all_seeds_of_32_bits_are_taken():
    made = generator()
    keys = [np.asarray(jax.random.key_data(made.init_state(seed).sampling_keys)) for seed in (0, 1, 2**31, 2**32 - 1)]
    assert len({key.tobytes() for key in keys}) == 4


# --- sampling ---


@pytest.mark.parametrize("temperature", [1e-31, 1e-38, 1e-45, -1.0, float("nan"), float("inf")])
def test_temperatures_that_cannot_be_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature="):
        Sampling(temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-30, 1e-20, 1e-3])
@pytest.mark.parametrize("filtered", [{}, {"top_k": 3}, {"top_p": 0.9}])
def test_low_temperatures_take_the_most_likely_token(temperature, filtered):
    logits = 50 * jax.random.normal(jax.random.key(0), (64, 40))
    keys = jax.random.split(jax.random.key(1), 64)
    found = sample(logits, keys, Sampling(temperature=temperature, **filtered))
    np.testing.assert_array_equal(found, jnp.argmax(logits, axis=-1))


# --- forks ---


def test_forks_sample_apart_and_the_first_goes_on_as_before():
    hot = {"sampling": Sampling(temperature=1.0)}
    alone, four = generator(**hot), generator(batch=4, **hot)
    state = alone.prefill(alone.init_state(3), [[1, 2, 3]])
    forks = kvjax.repeat_rows(state, 4)
    keys = np.asarray(jax.random.key_data(kvjax.repeat_rows(kvjax.repeat_rows(forks, 2), 2).sampling_keys))
    assert len(set(map(bytes, keys))) == 16
    found = written(four, forks, 12)[1]
    assert len(set(map(tuple, found))) == 4
    assert written(alone, state, 12)[1] == found[:1]


def test_forks_draw_none_of_the_keys_that_their_row_will():
    made = generator()
    key = made.init_state().sampling_keys
    later = set()
    for _ in range(64):
        both = jax.random.split(key[0])
        later |= {bytes(np.asarray(jax.random.key_data(one))) for one in both}
        key = both[1][None]
    forks = jax.random.key_data(kvjax.repeat_rows(made.init_state(), 8).sampling_keys)
    assert not later & set(map(bytes, np.asarray(forks[1:])))


def test_a_seed_reaches_the_forks_of_a_prefix():
    hot = {"sampling": Sampling(temperature=1.0)}
    alone, three = generator(**hot), generator(batch=3, **hot)
    state = alone.prefill(alone.init_state(3), [[1, 2, 3]])
    texts = []
    for seed in (0, 1):
        forks = three.reseed(kvjax.repeat_rows(state, 3), seed)
        fresh = three.init_state(seed).sampling_keys
        np.testing.assert_array_equal(jax.random.key_data(forks.sampling_keys), jax.random.key_data(fresh))
        texts += map(tuple, written(three, forks, 12)[1])
    assert len(set(texts)) == 6


# --- the model's positions ---


def test_texts_past_the_models_positions_are_refused_or_warned_of(caplog):
    policy = kvjax.Uniform(8, **WINDOW)
    long, short = list(range(1, 31)) * 3, [1] * 60
    with pytest.raises(ValueError, match="a sequence of 90 tokens exceeds the model's context length of 64"):
        generate(model(), policy, [long], max_new_tokens=4)
    with pytest.raises(ValueError, match="a sequence of 68 tokens exceeds the model's context length of 64"):
        generate(model(), policy, [short], max_new_tokens=8)
    assert not caplog.text
    rows, _ = generate(model(), policy, [short], max_new_tokens=8, allow_beyond_context=True)
    assert len(rows[0]) == 8 and "the output may be meaningless" in caplog.text
    assert len(generate(model(), policy, [short], max_new_tokens=4)[0][0]) == 4  # up to the last of them


def test_a_cache_that_is_not_sound_ends_the_writing():
    made = generator()
    state = made.prefill(made.init_state(), [[1, 2, 3]])
    counters = dataclasses.replace(state.counters, overflow=jnp.array([1], jnp.int32))
    with pytest.raises(ValueError, match="is invalid|NaN or infinite"):
        written(made, dataclasses.replace(state, counters=counters), 8)
