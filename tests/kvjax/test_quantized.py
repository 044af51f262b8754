"""Quantized caches: what attention reads, what compactions leave unchanged, and bytes."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.block_store import BlockStore
from kvjax.budget import abstract_cache, row_bytes
from kvjax.combinators.ada_kv import AdaKVState
from kvjax.methods.balancekv.balancekv_theory import BalanceKVTheory
from kvjax.methods.exact.append_only_store import AppendOnlyStore
from kvjax.quantization import FORMATS, dequantize, quantize
from kvjax.segment import BlockStoreRead
from kvjax.state import RunningMean
from pallas_kernels.quantized_array import array_bytes
from tests.kvjax.support import (
    HEAD_DIM,
    LENGTHS,
    POLICIES,
    WINDOW,
    after,
    begin,
    each,
    go,
    make_spec,
    make_stream,
    prefilled,
    prompt_of,
    row_keys,
)


@dataclasses.dataclass(frozen=True)
class Doubling(kvjax.Uniform):
    """Doubles its keys in `segments`, so that quantized values are read with plain keys."""

    def segments(self, state, num_visible_staged):
        segments = super().segments(state, num_visible_staged)
        return tuple(dataclasses.replace(one, keys=dequantize(one.keys) * 2.0) for one in segments)


PLAIN = POLICIES | {
    # Quantization changes the norms of values, which may leave their bucket.
    "balancekv_theory": BalanceKVTheory(60, **WINDOW, value_exponents=(-1, 1)),
    "clusterkv_400": kvjax.ClusterKV(20, **WINDOW, clusters=8, chunk_tokens=None),
    "doubling": Doubling(20, **WINDOW),
}
# The quick tests cover every kind of store and every format; the others every policy in every format.
QUICK = {("exact", "int8"), ("streaming_llm_reindexed", "int4"), ("uniform", "fp8"), ("uniform", "int2")}
QUICK |= {("subgen_mean", "int4"), ("clusterkv", "int3")}
MATRIX = each(itertools.product(PLAIN, FORMATS), QUICK)

attend, step, compact = jax.jit(kvjax.attend), jax.jit(kvjax.step), jax.jit(kvjax.compact)


def start(name, kv_dtype):
    return prefilled(PLAIN[name], spec=make_spec(kv_dtype=kv_dtype))


@functools.cache
def run(name, kv_dtype="int8"):
    return go(*start(name, kv_dtype), after(make_stream(), LENGTHS, 20))


# --- attention ---


def decode_pool(state):
    """Returns the pool of Ada-KV with plain arrays: keys with the mean of the head to which their slot belongs."""
    keys, values = np.asarray(dequantize(state.keys)), dequantize(state.values)
    slots, start = np.arange(keys.shape[1] * keys.shape[2]), np.asarray(state.start)
    owner = np.sum(slots >= start[:, 1:, None], axis=1)  # the pool of head h starts at start[h]
    means = np.take_along_axis(np.asarray(state.mean), owner[..., None], axis=1)
    return dataclasses.replace(state, keys=keys + means.reshape(keys.shape), values=values, mean=None)


def unquantized(cache):
    """Returns an unquantized cache with the numbers that a quantized one stores."""

    def convert(x):
        if isinstance(x, RunningMean):
            return dequantize(x.stored)
        if isinstance(x, kvjax.QuantizedArray):
            return dequantize(x)
        if isinstance(x, AdaKVState):
            return decode_pool(x)
        if isinstance(x, AppendOnlyStore):
            return dataclasses.replace(x, keys=dequantize(x.keys), values=dequantize(x.values))
        if isinstance(x, BlockStore):
            entries = jnp.concatenate([x.keys, x.values], axis=-1)
            return dataclasses.replace(x, entries=entries, scale=None, offset=None, formats=None)
        return x

    stored = (AdaKVState, RunningMean, kvjax.QuantizedArray, AppendOnlyStore, BlockStore)
    state = jax.tree.map(convert, cache.state, is_leaf=lambda x: isinstance(x, stored))
    plain, _ = kvjax.init(cache.policy, make_spec(), row_keys())
    assert jax.tree.structure(state) == jax.tree.structure(plain.state)
    state = jax.tree.map(jnp.asarray, state)
    return dataclasses.replace(plain, state=state, staging=cache.staging)


@pytest.mark.parametrize(("name", "kv_dtype"), MATRIX)
def test_attention_reads_the_stored_numbers(name, kv_dtype):
    *_, cache, counters = run(name, kv_dtype)
    caches = cache, unquantized(cache)
    query = jnp.asarray(make_stream().queries[:, 40:44])
    np.testing.assert_allclose(*(kvjax.normalize(attend(cache, counters, query)) for cache in caches), atol=2e-5)
    new = after(make_stream(), LENGTHS, 1, 20)
    lengths = jnp.array([1, 1, 0])
    results = (step(cache, counters, new.queries, new.keys, new.values, lengths) for cache in caches)
    outputs, caches, _ = zip(*results, strict=True)
    np.testing.assert_allclose(*(output[:2] for output in outputs), rtol=5e-6, atol=2e-5)
    if PLAIN[name].requires.attention_stats:
        for one, other in zip(*(jax.tree.leaves(cache.state.scores) for cache in caches), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["snapkv", "ada_kv", "attention_matching"])
def test_compaction_of_a_selection_quantizes_only_new_tokens(name):
    cache, counters = start(name, "int4")
    new = after(make_stream(), LENGTHS, cache.policy.compact_every)
    _, *staged = step(cache, counters, new.queries, new.keys, new.values)
    program = str(jax.make_jaxpr(kvjax.compact)(*staged))
    shape = ",".join(map(str, cache.state.keys.shape))
    assert f"f32[{shape}]" not in program and "u8[" in program
    before, after_compaction = (np.asarray(one.state.keys.values) for one, _ in (staged, compact(*staged)))
    changed = (before != after_compaction).any(axis=-1).sum(axis=(1, 2))
    assert (changed <= cache.policy.compact_every * before.shape[1]).all() and changed.all()


def test_shared_slots_are_as_precise_as_separate_ones():
    """Keys with a large mean lose no bits to it, although a slot may belong to any head."""
    stream, shift = make_stream(), 20 * np.random.default_rng(0).normal(size=(1, 1, 2, HEAD_DIM)).astype(np.float32)
    shifted, errors = stream._replace(keys=stream.keys + shift), []
    new = after(shifted, LENGTHS, 8)
    for policy in (kvjax.KeyDiff(24, compact_every=8), kvjax.AdaKV(kvjax.KeyDiff(24, compact_every=8), 1.0)):
        outputs = []
        for kv_dtype in (None, "int4"):
            state = kvjax.append(*prefilled(policy, shifted, make_spec(kv_dtype=kv_dtype)), new.keys, new.values)
            outputs.append(kvjax.normalize(attend(*kvjax.compact(*state), jnp.asarray(stream.queries[:, 40:44]))))
        errors.append(np.mean(np.abs(outputs[0] - outputs[1])))
    assert errors[1] < 1.2 * errors[0]


def test_shared_slots_are_precise_after_an_empty_prompt():
    """The mean key is then that of the first tokens after it."""
    stream, errors = make_stream(), []
    stream = stream._replace(keys=stream.keys + 20)
    for name in ("ada_kv", "exact"):
        outputs = [
            go(*prefilled(POLICIES[name], stream, make_spec(kv_dtype=kv_dtype), (0, 1, 37)), after(stream, (0, 1, 37)))
            for kv_dtype in (None, "int4")
        ]
        errors.append(np.mean(np.abs(outputs[0][0] - outputs[1][0])[0, 8:16]))
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("name", each(("streaming_llm", "uniform", "clustergen", "h2o", "quest"), quick=("uniform",)))
def test_unused_slots_are_no_part_of_the_mean_key(name):
    """Otherwise a short prompt has a mean close to one of its keys, which also depends on the padding."""
    length, stream, spec = 12, make_stream().row(0), make_spec(batch=1, kv_dtype="int4")
    for padded in (length, 40):
        prompt = prompt_of(stream, (length,), padded)
        cache, _ = begin(POLICIES[name], spec, row_keys(1), *prompt, (length,))  # all tokens fit into the window
        mean = stream.keys[0, :length].mean(axis=0)
        np.testing.assert_allclose(cache.state.window.keys.offset[0], mean, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", [kvjax.Exact(), kvjax.StreamingLLM(16)], ids=["exact", "streaming_llm"])
def test_heads_of_one_dimension_are_quantized(policy):
    keys, values, query = np.random.default_rng(0).normal(size=(3, 1, 4, 1, 1)).astype(np.float32)
    outputs = []
    for kv_dtype in (None, "int8"):
        spec = kvjax.CacheSpec(1, 1, 1, head_dim=1, max_prompt_tokens=4, max_new_tokens=4, kv_dtype=kv_dtype)
        cache, counters, _ = kvjax.prefill(*kvjax.init(policy, spec, row_keys(1)), keys, values, jnp.array([4]))
        outputs.append(kvjax.normalize(kvjax.attend(cache, counters, query)))
    np.testing.assert_allclose(*outputs, rtol=1e-2)


@pytest.mark.parametrize("name", ["uniform", "clusterkv", "exact"])
def test_keys_and_values_may_have_different_widths(name):
    """Narrower values take fewer bytes and do not change the logits."""
    query = jnp.asarray(make_stream().queries[:, 40:44])
    wide, narrow = (start(name, ("int4", values)) for values in ("int4", "int2"))
    assert kvjax.cache_bytes(narrow[0]).device < kvjax.cache_bytes(wide[0]).device
    first, second = (attend(*state, query) for state in (wide, narrow))
    np.testing.assert_allclose(first.max, second.max, rtol=1e-5)
    np.testing.assert_allclose(first.denominator, second.denominator, rtol=1e-5)


@pytest.mark.parametrize(("name", "max_index_bytes"), [("quest", 0.3), ("infinigen", 0.7)])
def test_a_quantized_index_selects_the_blocks_of_a_plain_one(name, max_index_bytes):
    stream, selected, sizes = make_stream(), [], []
    for kv_dtype in (None, "int4"):
        cache, counters = start(name, kv_dtype)
        *_, read = cache.policy.segments(cache.state, counters.count[:, None])
        assert isinstance(read, BlockStoreRead)
        sizes.append(array_bytes(read.index))
        for position in range(40, 48):
            selection = read.select(jnp.asarray(stream.queries[:, position : position + 1]))
            blocks, lengths = (x.reshape(-1, x.shape[2]) for x in selection[:2])
            selected.append(
                [set(np.asarray(one[read > 0]).tolist()) for one, read in zip(blocks, lengths, strict=True)]
            )
    pairs = [pair for two in zip(selected[:8], selected[8:], strict=True) for pair in zip(*two, strict=True)]
    assert sum(len(a & b) for a, b in pairs) > 0.95 * sum(len(a | b) for a, b in pairs)
    assert sizes[1] < max_index_bytes * sizes[0]


# --- unchanged entries ---


def stored_tokens(cache, row, tokens):
    """Returns the bytes of a row's first tokens in a store that grows."""
    if hasattr(cache.state, "store"):
        store = cache.state.store
        arrays, tokens = (store.entries, store.scale), tokens // store.position.shape[3]
    else:
        arrays = [x for one in (cache.state.keys, cache.state.values) for x in (one.values, one.scale)]
    return [np.asarray(x[row, :, :tokens]).view(np.uint8) for x in arrays]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("name", ["exact", "infinigen", "quest"])
def test_growing_stores_write_every_token_once(name, kv_dtype):
    (early, _), (late, _) = start(name, kv_dtype), compact(*run(name, kv_dtype)[2:])
    for row, length in enumerate(LENGTHS):
        pair = (stored_tokens(cache, row, length) for cache in (early, late))
        for before, later in zip(*pair, strict=True):
            np.testing.assert_array_equal(before, later)


@pytest.mark.heavy
@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_a_stream_of_131072_tokens_changes_no_bit_of_the_sinks(kv_dtype):
    spec = make_spec(new=2**17, kv_dtype=kv_dtype)
    empty = kvjax.init(kvjax.StreamingLLM(36, compact_every=32), spec, row_keys())

    def draw(number):
        return jax.random.normal(jax.random.key(number), (2, spec.batch, 32, spec.kv_heads, HEAD_DIM))

    def block(state, number):
        return kvjax.compact(*kvjax.append(*state, *draw(number))), None

    stream = jax.jit(lambda state, numbers: jax.lax.scan(block, state, numbers)[0])
    early = stream(empty, jnp.arange(2))
    late = stream(early, jnp.arange(2, 2**12))
    assert (late[1].num_tokens == 2**17).all()
    windows = [cache.state.window for cache, _ in (early, late)]
    np.testing.assert_array_equal(*(window.keys.offset for window in windows))
    np.testing.assert_array_equal(*(window.keys.values[:, :, 32:] for window in windows))
    # The recent tokens were quantized once; numbers near a tie may differ between compiled programs.
    keys, values = (x.swapaxes(1, 2) for x in draw(2**12 - 1))
    for recent, expected in (
        (windows[1].keys, quantize(keys, kv_dtype, windows[1].keys.offset, unbiased=True)),
        (windows[1].values, quantize(values, kv_dtype)),
    ):
        assert np.mean(np.asarray(recent.values[:, :, :32] != expected.values)) < 1e-3


# --- bytes ---


@pytest.mark.parametrize(("kv_dtype", "bits"), [("int8", 8), ("int4", 4), ("int3", 3), ("int2", 2)])
def test_bytes_include_numbers_scales_offsets_and_residuals(kv_dtype, bits):
    policy, spec, plain = PLAIN["chelsea"], make_spec(batch=1, kv_dtype=kv_dtype), make_spec(batch=1)
    slots, centroids = 32, 16  # the window has the others; 10 each, in multiples of 8
    numbers = 2 * 2 * slots * HEAD_DIM  # of keys and values of 2 heads
    saved = numbers * 4 - numbers * bits // 8 - 2 * 2 * slots * 2 - 2 * 2 * HEAD_DIM * 4  # scales and offsets
    residuals = 2 * 2 * centroids * (HEAD_DIM + 2)  # not read by a step
    assert row_bytes(policy, spec) == row_bytes(policy, plain) - saved + residuals
    state, (plain_cache, _) = (kvjax.init(policy, one, row_keys(1)) for one in (spec, plain))
    assert kvjax.cache_bytes(state).device == row_bytes(policy, spec)
    assert kvjax.read_bytes(state[0]) == kvjax.read_bytes(plain_cache) - saved


def test_read_bytes_include_the_retrieval_index():
    # Quest(20) reads 3 pages of 16 per query head, a window of 24 slots per KV head and two bounds of 4 pages.
    vectors = {"pages": 2 * 3 * 16 * 4, "window": 2 * 24 * 2, "bounds": 2 * 4 * 2}
    specs = (make_spec(batch=1, kv_dtype=kv_dtype) for kv_dtype in ("int8", None))
    cache, plain = (kvjax.init(PLAIN["quest"], spec, row_keys(1))[0] for spec in specs)
    saved = sum(vectors.values()) * (3 * HEAD_DIM - 2)  # a byte per number instead of four, and a scale
    offsets = 2 * 2 * HEAD_DIM * 4  # of the window and of the store
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain) - saved + offsets


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_decoding_does_not_dequantize_the_entire_store(kv_dtype):
    state = abstract_cache(PLAIN["exact"], make_spec(batch=1, prompt=32768, new=64, kv_dtype=kv_dtype))

    def decode(state, query, key, value):
        return jax.lax.fori_loop(0, 8, lambda _, state: kvjax.step(*state, query, key, value)[1:], state)

    shapes = [jax.ShapeDtypeStruct((1, 1, heads, HEAD_DIM), jnp.float32) for heads in (4, 2, 2)]
    compiled = jax.jit(decode, donate_argnums=0).lower(state, *shapes).compile()
    float32_keys = 2 * 32768 * HEAD_DIM * 4
    assert compiled.memory_analysis().temp_size_in_bytes < float32_keys / 2


# --- errors ---


@pytest.mark.parametrize(
    "kv_dtype, head_dim, message",
    [
        ("int5", 64, "kv_dtype='int5' is not a quantization format; pass one of int8, .* bfloat16 or None"),
        (("int4",), 64, r"kv_dtype=\('int4',\) is not a quantization format"),
        (("int4", None), 64, r"kv_dtype=\('int4', None\) is not a quantization format"),
        (("int8", "int2"), 64, "keys and values may differ only if both have fewer than 8 bits"),
        (("int8", "fp8"), 64, "keys and values may differ only if both have fewer than 8 bits"),
        ("int4", 12, "kv_dtype='int4' needs heads with a multiple of 8 dimensions, got 12"),
    ],
)
def test_invalid_formats_are_refused(kv_dtype, head_dim, message):
    with pytest.raises(ValueError, match=message):
        make_spec(kv_dtype=kv_dtype, head_dim=head_dim, rope_frequencies=None)
