"""Storage in eight bits and fewer: what attention reads, what storing again changes, and bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kvjax.policies.clusterkv_certified import ClusterKVCertified

import kvjax
from kvjax.budget import abstract_cache, row_bytes
from kvjax.policies.balancekv_paper import BalanceKVPaper
from kvjax.policies.clusterkv_reference import ClusterKVReference
from kvjax.policies.kvzip import KVzip
from kvjax.policy import RepeatedPrompt
from kvjax.quantization import FORMATS, rotation, store
from kvjax.registry import POLICIES as REGISTERED
from kvjax.segment import map_parts, parts_of, segment_bytes
from kvjax.state import map_fields
from kvjax.stores.append_only_store import AppendOnlyStore
from kvjax.stores.block_store import BlockStore
from tests.kvjax.support import (
    CLUSTERS,
    HEAD_DIM,
    LENGTHS,
    POLICIES,
    WINDOW,
    after,
    begin,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
    whole_run,
)


@dataclasses.dataclass(frozen=True)
class Doubling(kvjax.Uniform):
    """Reads its keys at twice their length: it computes with its entries before they are read."""

    def segments(self, state, num_visible_staged):
        double = lambda part: dataclasses.replace(part, keys=part.keys * 2.0)  # noqa: E731
        return map_parts(double, super().segments(state, num_visible_staged))


PLAIN = POLICIES | {
    # A value's norm is another once it is stored: buckets for that, too.
    "balancekv_paper": BalanceKVPaper(60, **WINDOW, value_exponents=(-1, 1)),
    "clusterkv_certified": ClusterKVCertified(20, **CLUSTERS, target=0.05),
    "clusterkv_reference": ClusterKVReference(20, **WINDOW, clusters=8),
    "doubling": Doubling(20, **WINDOW),
}
# Three bits, but for sinks and recent tokens.
WHOLE = "int3, whole window"
# One of every kind of store: a growing one, a window alone with a turned query, a selection, spread clusters beside it.
QUICK = ("exact", "streaming_llm_reindexed", "uniform", "subgen_mean_value")
# Every policy in every storage; the quick ones see every kind of store, and every storage.
SAMPLED = {*((name, "int4") for name in QUICK), ("clusterkv", "int3"), ("exact", "int8")}
SAMPLED |= {("uniform", "fp8"), ("uniform", "int2"), *((name, WHOLE) for name in (*QUICK, "h2o", "clusterkv"))}
MATRIX = [
    pytest.param(name, storage, marks=() if (name, storage) in SAMPLED else pytest.mark.heavy)
    for name in PLAIN
    for storage in (*FORMATS, WHOLE)
]
every = pytest.mark.parametrize("storage", FORMATS)
every_and_whole = pytest.mark.parametrize("storage", (*FORMATS, WHOLE))
# How far outputs of unit values may be from the policy's own.
ALLOWED = {"int8": 0.02, "fp8": 0.15, "int4": 0.35, "int3": 0.7, "int2": 1.4}


def policy_of(name, storage):
    form, _, whole = storage.partition(", ")
    return kvjax.Quantized(PLAIN[name], form, whole_window=bool(whole))


@functools.cache
def run(name, storage="int8", dtype=jnp.float32):
    stream = make_stream()
    cache = begin(policy_of(name, storage), make_spec(dtype=dtype), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(cache, after(stream, LENGTHS, 20))


def unpacked(packed, bits):
    """The codes of packed numbers, byte by byte."""
    columns = packed.shape[-1] * 8 // bits
    codes = np.zeros((*packed.shape[:-1], columns), np.int64)
    first = shift = 0
    for width in {4: (4,), 3: (2, 1), 2: (2,)}[bits]:
        run = columns * width // 8
        for column in range(columns):
            byte = np.int64(packed[..., first + column % run])
            codes[..., column] += (byte >> (column // run * width) & (2**width - 1)) << shift
        first, shift = first + run, shift + width
    return codes


def stands_for(numbers, scale, form):
    """What numbers and a scale mean, by the definition of the format, in float64."""
    numbers = np.asarray(numbers)
    if form.bits is not None:
        numbers = 2 * np.float64(unpacked(numbers, form.bits)) - (2**form.bits - 1)
    turned = np.float64(numbers) * np.float64(scale)
    return np.float32(turned @ rotation(turned.shape[-1]).T)


def loaded(cache):
    """The policy's own cache with the numbers that are stored, by the definition of the format."""

    form, center = FORMATS[cache.policy.storage], np.asarray(cache.state.center)

    def multiply(field, x, scale, whole):
        # One scale for every entry.
        if field.chosen_by:
            return stands_for(x, scale, FORMATS["int8"])
        if not field.entries:
            return x
        found = stands_for(x, scale, form)
        if field.axes[-1] == "D":
            found = found + np.expand_dims(center, tuple(range(2, found.ndim - 1)))
        return found if whole is None else np.concatenate([whole, found], axis=-2)

    def grown(store):
        if isinstance(store, AppendOnlyStore):
            keys, values = (
                stands_for(x, np.asarray(scale)[..., None], form)
                for x, scale in ((store.keys, store.key_scale), (store.values, store.value_scale))
            )
            keys = keys + np.asarray(store.center)[:, :, None]
            return AppendOnlyStore(keys, values, None, None, None, store.count, store.overflow, store.sinks)
        if isinstance(store, BlockStore):
            halves = np.split(store.entries, 2, axis=-1)
            scales = np.split(np.asarray(store.scale), 2, axis=-1)
            keys, values = [stands_for(half, scale, form) for half, scale in zip(halves, scales, strict=True)]
            entries = np.concatenate([keys + np.asarray(store.center)[:, :, None, None], values], axis=-1)
            return dataclasses.replace(store, entries=entries, scale=None, center=None, storage=None)
        return store

    state = map_fields(multiply, cache.state.numbers, cache.state.scales, cache.state.whole)
    state = jax.tree.map(grown, state, is_leaf=lambda x: isinstance(x, AppendOnlyStore | BlockStore))
    plain = kvjax.init(cache.policy.policy, make_spec(), row_keys()).with_state(jax.tree.map(jnp.asarray, state))
    return dataclasses.replace(plain, staging=cache.staging)


attend = jax.jit(kvjax.attend)
step = jax.jit(kvjax.step)


@pytest.mark.parametrize(("name", "storage"), MATRIX)
def test_attention_reads_the_numbers_that_are_stored(name, storage):
    cache, stream = run(name, storage)[0], make_stream()
    if cache.state.value_center is not None:  # it is not stored with them (tests/trust/test_means.py)
        none = jnp.zeros_like(cache.state.value_center)
        cache = cache.with_state(dataclasses.replace(cache.state, value_center=none))
    own = loaded(cache)
    if storage != WHOLE:  # exact has sinks then
        plain = kvjax.init(PLAIN[name], make_spec(), row_keys())
        assert jax.tree.structure(own.state) == jax.tree.structure(plain.state)
    query = jnp.asarray(stream.queries[:, 40:44])
    np.testing.assert_allclose(kvjax.normalize(attend(cache, query)), kvjax.normalize(attend(own, query)), atol=2e-5)
    newest = after(stream, LENGTHS, 1, 20)
    (output, cache), (expected, own) = (
        step(of, newest.queries, newest.keys, newest.values, jnp.array([1, 1, 0])) for of in (cache, own)
    )
    np.testing.assert_allclose(output[:2], expected[:2], rtol=5e-6, atol=2e-5)
    if PLAIN[name].observes_attention:
        learnt, as_own = (jax.tree.leaves(getattr(of, "scores", ())) for of in (cache.state.numbers, own.state))
        for found, wanted in zip(learnt, as_own, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_every_registered_policy_is_tried():
    # But one, whose prompts are read again, and which has a test of its own.
    assert set(REGISTERED.values()) - {type(policy) for policy in PLAIN.values()} == {KVzip}


def test_prompts_that_are_repeated_are_stored_too():
    stream, tokens = make_stream(), 16
    again = make_stream(seed=1)
    lengths = jnp.full(len(LENGTHS), tokens)
    repeated = RepeatedPrompt(again.queries[:, :tokens], again.keys[:, :tokens], lengths[:, None])
    outputs, kept = [], []
    for policy in (KVzip(12, compact_every=4), kvjax.Quantized(KVzip(12, compact_every=4))):
        cache = kvjax.init(policy, make_spec(), row_keys())
        cache, _ = kvjax.prefill(cache, stream.keys[:, :tokens], stream.values[:, :tokens], lengths, repeated=repeated)
        cache, output, _ = go(cache, after(stream, LENGTHS, 8))
        kvjax.raise_faults(cache)
        outputs.append(output)
        kept.append(kvjax.cache_bytes(cache).device)
    np.testing.assert_allclose(*outputs, atol=0.04)
    assert kept[1] < kept[0]


@every
@pytest.mark.parametrize("name", ["exact", "uniform", pytest.param("chelsea", marks=pytest.mark.heavy)])
def test_outputs_are_near_those_of_the_policy_itself(name, storage):
    _, outputs, _ = run(name, storage)
    apart, allowed = np.abs(outputs - whole_run(name)[1][:, :20]), ALLOWED[storage]
    # What is merged with what may change with the last bit; nothing else does.
    assert np.mean(apart) < allowed if name == "chelsea" else np.max(apart) < 2 * allowed


@every_and_whole
@pytest.mark.parametrize(
    "name, dtype",
    [
        ("exact", jnp.float32),
        *(pytest.param(name, jnp.float32, marks=pytest.mark.heavy) for name in PLAIN if name != "exact"),
        pytest.param("chelsea", jnp.bfloat16, marks=pytest.mark.heavy),
    ],
)
def test_storing_again_changes_no_bit_of_what_stays(name, storage, dtype):
    compact = jax.jit(kvjax.compact)
    cache = compact(run(name, storage, dtype)[0])
    again = compact(cache)
    bits = lambda x: x.view(jnp.uint8) if x.dtype.itemsize == 1 else x  # noqa: E731
    for before, later in zip(*(jax.tree.leaves(of.state) for of in (cache, again)), strict=True):
        if not jax.dtypes.issubdtype(before.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(bits(before), bits(later))


@pytest.mark.heavy
@every
def test_a_stream_of_131072_tokens_changes_no_bit_of_what_stays(storage):
    spec = make_spec(new=2**17)
    policy = kvjax.Quantized(kvjax.StreamingLLM(36, compact_every=32), storage)
    cache = kvjax.init(policy, spec, row_keys())
    shape = (spec.batch, 32, spec.kv_heads, HEAD_DIM)
    draw = lambda number: jax.random.normal(jax.random.key(number), (2, *shape))  # noqa: E731

    @jax.jit
    def stream(cache, numbers):
        def block(cache, number):
            return kvjax.compact(kvjax.append(cache, *draw(number))), None

        return jax.lax.scan(block, cache, numbers)[0]

    early = stream(cache, jnp.arange(2))
    late = stream(early, jnp.arange(2, 2**12))
    assert (kvjax.num_tokens(late) == 2**17).all()
    center = late.state.center
    np.testing.assert_array_equal(center, early.state.center)
    kept = [state.numbers.window.keys[:, :, 32:] for state in (early.state, late.state)]  # the sinks
    np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in kept))
    keys, values = (x.swapaxes(1, 2) for x in draw(2**12 - 1))  # the last block, stored once
    expected = store(keys - center[:, :, None], FORMATS[storage], unbiased=True), store(values, FORMATS[storage])
    for name, own in zip(("keys", "values"), expected, strict=True):
        found = getattr(late.state.numbers.window, name)[:, :, :32]
        assert np.mean(np.asarray(found).view(np.uint8) != np.asarray(own.numbers).view(np.uint8)) < 1e-3  # near ties


@pytest.mark.parametrize("storage", ["int8", "fp8"])  # keys of fewer bits are stretched
@pytest.mark.parametrize("name", ["exact", "uniform"])
def test_the_stored_numbers_are_the_nearest(name, storage):
    stream = make_stream()
    cache = begin(policy_of(name, storage), make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    form = FORMATS[storage]
    if name == "exact":
        # A store that grows quantises for itself.
        tokens, numbers, scales = LENGTHS[0], cache.state.numbers.keys, cache.state.numbers.key_scale
    else:
        # The window's first slots hold its recent tokens.
        tokens, numbers = WINDOW["recent"], cache.state.numbers.window.keys
        scales = cache.state.scales.window.keys[..., 0]
    assert numbers.dtype == form.dtype and cache.staging.keys.dtype == jnp.float32
    keys = stream.keys[0, : LENGTHS[0]]
    keys = (keys - keys.mean(0))[LENGTHS[0] - tokens :].swapaxes(0, 1) @ rotation(HEAD_DIM)  # [H, T, D]
    scale = np.float32(scales)[0, :, :tokens, None]
    stored = stands_for(numbers[0, :, :tokens], scale, form) @ rotation(HEAD_DIM)
    peak = np.abs(keys).max(-1) / form.largest
    assert (peak * min(form.clips) * (1 - 2**-8) <= scale[..., 0]).all() and (scale[..., 0] <= peak * (1 + 2**-8)).all()
    # Half a step of 1 for int8; for fp8 half of 2^-3 of the number, or of the smallest step, 2^-9.
    width = np.maximum(np.abs(keys) / 8, scale * 2**-9) if storage == "fp8" else scale
    inside = np.abs(keys) <= scale * form.largest
    assert (np.abs(stored - keys) <= 0.5001 * width + 1e-6)[inside].all()
    # What is clipped is stored as the largest number.
    np.testing.assert_allclose(
        np.abs(stored)[~inside], np.broadcast_to(scale * form.largest, keys.shape)[~inside], rtol=1e-6
    )


@pytest.mark.parametrize("policy", [kvjax.Exact(), kvjax.StreamingLLM(16)], ids=["exact", "streaming_llm"])
def test_entries_of_one_dimension_keep_their_scales(policy):
    # There a buffer of numbers has the shape of one of scales.
    spec = kvjax.CacheSpec(1, query_heads=1, kv_heads=1, head_dim=1, max_prompt_tokens=4, max_new_tokens=4)
    keys, values, query = np.random.default_rng(0).normal(size=(3, 1, 4, 1, 1)).astype(np.float32)
    outputs = []
    for of in (policy, kvjax.Quantized(policy)):
        cache, _ = kvjax.prefill(kvjax.init(of, spec, row_keys(1)), keys, values, jnp.array([4]))
        outputs.append(kvjax.normalize(kvjax.attend(cache, query)))
    np.testing.assert_allclose(*outputs, rtol=1e-2)


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_row_in_a_ragged_batch_equals_the_row_alone(row):
    policy, stream = policy_of("chelsea", "int8"), make_stream().row(row)
    _, outputs, weights = run("chelsea")
    length = LENGTHS[row : row + 1]
    cache = begin(policy, make_spec(batch=1), row_keys()[row : row + 1], *prompt_of(stream, length, garbage=1), length)
    _, alone, alone_weights = go(cache, after(stream, length, 20))
    np.testing.assert_allclose(outputs[row], alone[0], atol=1e-5)
    np.testing.assert_allclose(weights[row], alone_weights[0], atol=1e-5)


@pytest.mark.parametrize(("storage", "bits"), [("int8", 8), ("int4", 4), ("int3", 3), ("int2", 2)])
def test_bytes_are_real(storage, bits):
    policy, spec = policy_of("chelsea", storage), make_spec(batch=1)
    entries = 2 * 2 * 20 * HEAD_DIM  # keys and values of 2 heads x 20 slots
    # Scales, and the centres of keys and of values.
    saved = entries * 4 - entries * bits // 8 - 2 * 2 * 20 * 2 - 2 * 2 * HEAD_DIM * 4
    rests = 2 * 2 * (20 - WINDOW["sinks"] - WINDOW["recent"]) * (HEAD_DIM + 2)  # which no step reads
    assert row_bytes(policy, spec) == row_bytes(POLICIES["chelsea"], spec) - saved + rests
    cache, plain = (kvjax.init(of, spec, row_keys(1)) for of in (policy, POLICIES["chelsea"]))
    assert kvjax.cache_bytes(cache).device == row_bytes(policy, spec)
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain) - saved


def test_what_is_read_beside_attention_is_counted():
    # Quest(20) reads 3 pages of 16 and the window's 15 + 8 slots per head, and the bounds of its 4 pages in full.
    pages, window, heads = 3 * 16, 15 + 8, 4
    spec = make_spec(batch=1)
    cache, plain = (kvjax.init(of, spec, row_keys(1)) for of in (policy_of("quest", "int8"), POLICIES["quest"]))
    bounds = 4 * 2  # of two heads
    quantised = 2 * HEAD_DIM * (pages * heads + window * 2 + bounds)  # numbers that take a byte instead of four
    scales = 2 * 2 * (pages * heads + window * 2 + bounds)
    centers = 2 * 2 * 4 * HEAD_DIM  # of the window and of the store
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain) - 3 * quantised + scales + centers


@pytest.mark.heavy
def test_layers_may_be_inside_or_outside():
    inside = kvjax.Quantized(kvjax.ByLayer((POLICIES["exact"], POLICIES["chelsea"])))
    outside = kvjax.ByLayer((policy_of("exact", "int8"), policy_of("chelsea", "int8")))
    spec = make_spec(layer=1, layers=2)
    stream = make_stream()
    for policy in (inside, outside):
        cache = begin(policy, spec, row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
        _, outputs, _ = go(cache, after(stream, LENGTHS, 20))
        np.testing.assert_allclose(outputs, run("chelsea")[1], atol=1e-6)
        assert row_bytes(policy, spec) == row_bytes(policy_of("chelsea", "int8"), make_spec())


def test_heads_may_be_inside_or_outside():
    policies = (POLICIES["exact"], POLICIES["streaming_llm"])
    inside = kvjax.Quantized(kvjax.ByHead(policies))
    outside = kvjax.ByHead(tuple(kvjax.Quantized(policy) for policy in policies))
    stream = make_stream()
    for policy in (inside, outside):
        cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
        _, outputs, _ = go(cache, after(stream, LENGTHS, 20))
        np.testing.assert_allclose(outputs[:, :, :2], run("exact")[1][:, :, :2], atol=1e-5)
        np.testing.assert_allclose(outputs[:, :, 2:], run("streaming_llm")[1][:, :, 2:], atol=1e-5)
        assert row_bytes(policy, make_spec()) == row_bytes(inside, make_spec())


def test_rows_can_be_taken():
    cache, _, _ = run("chelsea")
    back = kvjax.take_rows(kvjax.take_rows(cache, jnp.array([2, 0, 1])), jnp.array([1, 2, 0]))
    for before, later in zip(jax.tree.leaves(cache), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(before, later)


def test_storages_that_there_are_not_are_refused_by_name():
    with pytest.raises(ValueError, match="storage='int5'; it must be 'int8' or 'fp8' or 'int4' or 'int3' or 'int2'"):
        kvjax.Quantized(POLICIES["exact"], "int5")
    for values in ("int2", "fp8"):
        with pytest.raises(ValueError, match=f"storage='int8' and value_storage='{values}': .* fewer than eight bits"):
            kvjax.Quantized(POLICIES["exact"], "int8", values)
    spec = kvjax.CacheSpec(1, query_heads=1, kv_heads=1, head_dim=12, max_prompt_tokens=4, max_new_tokens=4)
    with pytest.raises(ValueError, match="int4 takes vectors of a multiple of 8 coordinates, not 12"):
        kvjax.init(kvjax.Quantized(kvjax.Exact(), "int4"), spec, row_keys(1))


@pytest.mark.parametrize("storage", ["int8", "int4"])
def test_decoding_widens_a_block_at_a_time(storage):
    """A compiled loop over steps never holds the store in float32, nor its keys alone."""
    spec = make_spec(batch=1, prompt=32768, new=64)
    cache = abstract_cache(policy_of("exact", storage), spec)

    def decode(cache, query, key, value):
        return jax.lax.fori_loop(0, 8, lambda _, cache: kvjax.step(cache, query, key, value)[1], cache)

    shaped = lambda heads: jax.ShapeDtypeStruct((1, 1, heads, HEAD_DIM), jnp.float32)  # noqa: E731
    compiled = jax.jit(decode, donate_argnums=0).lower(cache, shaped(4), shaped(2), shaped(2)).compile()
    widened = 2 * 32768 * HEAD_DIM * 4
    assert compiled.memory_analysis().temp_size_in_bytes < widened / 2


@pytest.mark.parametrize("name", ["uniform", "clusterkv", "exact"])
def test_keys_and_values_have_widths_of_their_own(name):
    """Narrow values leave the logits, and so who is attended to, as they are with wide ones."""
    stream, kept, seen = make_stream(), [], []
    for values in ("int4", "int2"):
        policy = kvjax.Quantized(PLAIN[name], "int4", values)
        cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
        kept.append(kvjax.cache_bytes(cache).device)
        partials = attend(cache, jnp.asarray(stream.queries[:, 40:44]))
        seen.append((partials.max, partials.denominator))
    assert kept[1] < kept[0]
    for first, second in zip(*seen, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-5)


# The slots of sinks and recent tokens of policies of one window, and the text's tokens that lie there after 57.
FIXED = {
    "exact": [0, 1, 2, 3],
    "streaming_llm": [*range(43, 57), 0, 1],
    "uniform": [*range(49, 57), 0, 1],
    "clustergen_mean_value": [*range(49, 57), 0, 1],
    "leverage_scores": [0, 1],
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sinks_and_recent_tokens_stay_as_they_came_where_that_is_asked_for(name, dtype):
    stream = make_stream()
    cache = kvjax.compact(run(name, WHOLE, dtype)[0])
    first, *others = parts_of(cache.policy.segments(cache.state, cache.counters.count[:, None]))
    assert kvjax.num_tokens(cache)[0] == 57 and first.keys.dtype == dtype and first.keys.shape[2] == len(FIXED[name])
    assert all(part.keys.dtype == jnp.uint8 for part in others) and bool(others) == (name != "streaming_llm")
    for found, came in ((first.keys, stream.keys), (first.values, stream.values)):
        np.testing.assert_array_equal(found[0], jnp.asarray(came[0, FIXED[name]], dtype).swapaxes(0, 1))
    narrow, spec = policy_of(name, "int3"), make_spec(batch=1, dtype=dtype)
    more = 2 * HEAD_DIM * dtype.dtype.itemsize - (0 if name == "exact" else 2 * (HEAD_DIM * 3 // 8 + 2))
    # Of sinks and recent tokens beside mean values storing leaves nothing then.
    rests = 2 * len(FIXED[name]) * (HEAD_DIM + 2) if name == "clustergen_mean_value" else 0
    total = 4 if name == "exact" else 0  # how many sinks there are
    grown = row_bytes(cache.policy, spec) - row_bytes(narrow, spec)
    assert grown == 2 * len(FIXED[name]) * more - rests + total


def test_a_window_alone_loses_nothing_where_it_stays_whole():
    np.testing.assert_array_equal(run("streaming_llm", WHOLE)[1], whole_run("streaming_llm")[1][:, :20])


@pytest.mark.parametrize(("name", "share"), [("quest", 0.3), ("infinigen", 0.7)])
def test_recall_chooses_from_narrow_copies(name, share):
    """What is chosen by numbers of eight bits is what would be chosen by float32."""
    stream, chosen, sizes = make_stream(), [], []
    for policy in (PLAIN[name], policy_of(name, "int4")):
        cache = begin(policy, make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
        *_, part = parts_of(cache.policy.segments(cache.state, cache.counters.count[:, None]))
        sizes.append(segment_bytes(part.index))
        for position in range(40, 48):
            choice = part.choose(jnp.asarray(stream.queries[:, position : position + 1]), None)
            blocks, tokens = (x.reshape(-1, x.shape[2]) for x in choice[:2])
            chosen.append([{*np.asarray(own[read > 0])} for own, read in zip(blocks, tokens, strict=True)])
    pairs = [pair for of_two in zip(chosen[:8], chosen[8:], strict=True) for pair in zip(*of_two, strict=True)]
    assert sum(len(a & b) for a, b in pairs) > 0.95 * sum(len(a | b) for a, b in pairs)
    assert sizes[1] < share * sizes[0]
