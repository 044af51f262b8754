"""Storage in eight bits: what attention reads, what storing again changes, and bytes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.budget import row_bytes
from kvjax.growing import Growing
from kvjax.policies.clusterkv_certified import ClusterKVCertified
from kvjax.policies.clusterkv_reference import ClusterKVReference
from kvjax.policies.kvzip import KVzip
from kvjax.policy import Repeated
from kvjax.recall import BlockStore
from kvjax.registry import POLICIES as REGISTERED
from kvjax.segment import map_parts
from kvjax.state import map_fields
from tests.kvjax.support import (
    CLUSTERS,
    HEAD_DIM,
    LENGTHS,
    POLICIES,
    QUICKLY,
    WINDOW,
    after,
    begin,
    each,
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

    def read(self, state, newer):
        double = lambda part: dataclasses.replace(part, keys=part.keys * 2.0)  # noqa: E731
        return map_parts(double, super().read(state, newer))


PLAIN = POLICIES | {
    "clusterkv_certified": ClusterKVCertified(20, **CLUSTERS, target=0.05),
    "clusterkv_reference": ClusterKVReference(20, **WINDOW, clusters=8),
    "doubling": Doubling(20, **WINDOW),
}
# One of every kind of store: a growing one, a window alone with a turned query, a selection, spread clusters beside it.
QUICK = ("exact", "streaming_llm_reindexed", "uniform", "subgen_mean_value")
STORAGES = {"int8": (jnp.int8, 127), "fp8": (jnp.float8_e4m3fn, 448)}
both = pytest.mark.parametrize("storage", STORAGES)


def policy_of(name, storage):
    return kvjax.Quantized(PLAIN[name], storage)


@functools.cache
def run(name, storage="int8", dtype=jnp.float32):
    stream = make_stream()
    cache = begin(policy_of(name, storage), make_spec(dtype=dtype), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    return go(cache, after(stream, LENGTHS, 20))


def loaded(cache):
    """The policy's own cache with the numbers that are stored, by the definition of the format."""

    def multiply(field, x, scale):
        # One scale for every entry.
        return np.float32(x) * scale if field.entries else x

    def grown(store):
        if isinstance(store, Growing):
            keys, values = (
                np.float32(x) * np.asarray(scale)[..., None]
                for x, scale in ((store.keys, store.key_scale), (store.values, store.value_scale))
            )
            return dataclasses.replace(store, keys=keys, values=values, key_scale=None, value_scale=None)
        if isinstance(store, BlockStore):
            entries = np.float32(store.entries) * np.repeat(store.scale, store.entries.shape[-1] // 2, axis=-1)
            return dataclasses.replace(store, entries=entries, scale=None)
        return store

    state = map_fields(multiply, cache.state.numbers, cache.state.scales)
    state = jax.tree.map(grown, state, is_leaf=lambda x: isinstance(x, Growing | BlockStore))
    return dataclasses.replace(cache, state=jax.tree.map(jnp.asarray, state), policy=cache.policy.policy)


attend = jax.jit(kvjax.attend, compiler_options=QUICKLY)
step = jax.jit(kvjax.step, compiler_options=QUICKLY)


@pytest.mark.parametrize("name", each(PLAIN, quick=QUICK))
def test_attention_reads_the_numbers_that_are_stored(name):
    cache, stream = run(name)[0], make_stream()
    own = loaded(cache)
    assert jax.tree.structure(own.state) == jax.tree.structure(kvjax.init(PLAIN[name], make_spec(), row_keys()).state)
    query = jnp.asarray(stream.queries[:, 40:44])
    np.testing.assert_allclose(kvjax.output(attend(cache, query)), kvjax.output(attend(own, query)), atol=2e-5)
    newest = after(stream, LENGTHS, 1, 20)
    output, expected = (
        step(of, newest.queries, newest.keys, newest.values, jnp.array([1, 1, 0]))[0] for of in (cache, own)
    )
    np.testing.assert_allclose(output[:2], expected[:2], atol=2e-5)


def test_every_registered_policy_is_tried():
    # But one, whose prompts are read again, and which has a test of its own.
    assert set(REGISTERED.values()) - {type(policy) for policy in PLAIN.values()} == {KVzip}


def test_prompts_that_are_repeated_are_stored_too():
    stream, tokens = make_stream(), 16
    again = make_stream(seed=1)
    lengths = jnp.full(len(LENGTHS), tokens)
    repeated = Repeated(again.queries[:, :tokens], again.keys[:, :tokens], lengths[:, None])
    outputs, kept = [], []
    for policy in (KVzip(12, compact_every=4), kvjax.Quantized(KVzip(12, compact_every=4))):
        cache = kvjax.init(policy, make_spec(), row_keys())
        cache, _ = kvjax.prefill(cache, stream.keys[:, :tokens], stream.values[:, :tokens], lengths, repeated=repeated)
        cache, output, _ = go(cache, after(stream, LENGTHS, 8))
        kvjax.check(cache)
        outputs.append(output)
        kept.append(kvjax.cache_bytes(cache).device)
    np.testing.assert_allclose(*outputs, atol=0.04)
    assert kept[1] < kept[0]


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
    "name, dtype",
    [
        ("exact", jnp.float32),
        *(pytest.param(name, jnp.float32, marks=pytest.mark.heavy) for name in PLAIN if name != "exact"),
        pytest.param("chelsea", jnp.bfloat16, marks=pytest.mark.heavy),
    ],
)
def test_storing_again_changes_no_bit_of_what_stays(name, storage, dtype):
    compact = jax.jit(kvjax.compact, compiler_options=QUICKLY)
    cache = compact(run(name, storage, dtype)[0])
    again = compact(cache)
    bits = lambda x: x.view(jnp.uint8) if x.dtype in [dtype for dtype, _ in STORAGES.values()] else x  # noqa: E731
    for before, later in zip(*(jax.tree.leaves(of.state) for of in (cache, again)), strict=True):
        if not jax.dtypes.issubdtype(before.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(bits(before), bits(later))


@both
@pytest.mark.parametrize("name", ["exact", "uniform"])
def test_the_stored_numbers_are_the_nearest(name, storage):
    stream = make_stream()
    cache = begin(policy_of(name, storage), make_spec(), row_keys(), *prompt_of(stream, LENGTHS), LENGTHS)
    dtype, largest = STORAGES[storage]
    if name == "exact":
        # A store that grows quantises for itself.
        tokens, numbers, scales = LENGTHS[0], cache.state.numbers.keys, cache.state.numbers.key_scale
    else:
        # The window's first slots hold its recent tokens.
        tokens, numbers = WINDOW["recent"], cache.state.numbers.window.keys
        scales = cache.state.scales.window.keys[..., 0]
    assert numbers.dtype == dtype and cache.staging.keys.dtype == jnp.float32
    keys = stream.keys[0, LENGTHS[0] - tokens : LENGTHS[0]].swapaxes(0, 1)  # [H, T, D]
    scale = np.asarray(scales)[0, :, :tokens, None]
    stored = np.float32(numbers[0, :, :tokens]) * scale
    np.testing.assert_allclose(scale[..., 0], np.abs(keys).max(-1) / largest, rtol=2**-16)
    # Half a step of 1 for int8; for fp8 half of 2^-3 of the number, or of the smallest step, 2^-9.
    width = scale if storage == "int8" else np.maximum(np.abs(keys) / 8, scale * 2**-9)
    assert (np.abs(stored - keys) <= 0.5001 * width).all()


@pytest.mark.parametrize("policy", [kvjax.Exact(), kvjax.StreamingLLM(16)], ids=["exact", "streaming_llm"])
def test_entries_of_one_dimension_keep_their_scales(policy):
    # There a buffer of numbers has the shape of one of scales.
    spec = kvjax.CacheSpec(1, query_heads=1, kv_heads=1, head_dim=1, max_prompt=4, max_new=4)
    keys, values, query = np.random.default_rng(0).normal(size=(3, 1, 4, 1, 1)).astype(np.float32)
    outputs = []
    for of in (policy, kvjax.Quantized(policy)):
        cache, _ = kvjax.prefill(kvjax.init(of, spec, row_keys(1)), keys, values, jnp.array([4]))
        outputs.append(kvjax.output(kvjax.attend(cache, query)))
    np.testing.assert_allclose(*outputs, rtol=1e-4)


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_a_row_in_a_ragged_batch_equals_the_row_alone(row):
    policy, stream = policy_of("chelsea", "int8"), make_stream().row(row)
    _, outputs, weights = run("chelsea")
    length = LENGTHS[row : row + 1]
    cache = begin(policy, make_spec(batch=1), row_keys()[row : row + 1], *prompt_of(stream, length, garbage=1), length)
    _, alone, alone_weights = go(cache, after(stream, length, 20))
    np.testing.assert_allclose(outputs[row], alone[0], atol=1e-5)
    np.testing.assert_allclose(weights[row], alone_weights[0], atol=1e-5)


def test_bytes_are_real():
    policy, spec = policy_of("chelsea", "int8"), make_spec(batch=1)
    entries = 2 * 2 * 20 * HEAD_DIM  # keys and values of 2 heads x 20 slots
    saved = entries * (4 - 1) - 2 * 2 * 20 * 4
    assert row_bytes(policy, spec) == row_bytes(POLICIES["chelsea"], spec) - saved
    cache, plain = (kvjax.init(of, spec, row_keys(1)) for of in (policy, POLICIES["chelsea"]))
    assert kvjax.cache_bytes(cache).device == row_bytes(policy, spec)
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain) - saved


def test_what_is_read_beside_attention_is_counted():
    # Quest(20) reads 3 pages of 16 and the window's 15 + 8 slots per head, and the bounds of its 4 pages in full.
    pages, window, heads = 3 * 16, 15 + 8, 4
    spec = make_spec(batch=1)
    cache, plain = (kvjax.init(of, spec, row_keys(1)) for of in (policy_of("quest", "int8"), POLICIES["quest"]))
    quantised = 2 * HEAD_DIM * (pages * heads + window * 2)  # numbers that take a byte instead of four
    scales = 2 * 4 * (pages * heads + window * 2)
    assert kvjax.read_bytes(cache) == kvjax.read_bytes(plain) - 3 * quantised + scales


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
    with pytest.raises(ValueError, match="storage='int4'; it must be one of 'int8', 'fp8'"):
        kvjax.Quantized(POLICIES["exact"], "int4")
