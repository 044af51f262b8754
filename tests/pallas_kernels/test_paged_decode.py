"""Compares all forms of `paged_decode` and `write_tokens` with plain loops."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import packing
from pallas_kernels.paged_decode import Pages, TpuConfig, pack_words, paged_decode, slot_words, write_tokens
from pallas_kernels.paged_decode.pages import as_unsigned, join_words, split_words
from pallas_kernels.paged_decode.reference import gather_pages
from pallas_kernels.quantized_array import QuantizedArray
from tests.pallas_kernels import helpers, traffic

FORMS = helpers.make_forms(TpuConfig(step_pages=2))
if helpers.ON_GPU:
    del FORMS["device"]  # XLA's products of float32 are TF32, and there is no kernel
WRITE_FORMS = {name: {key: value for key, value in form.items() if key != "config"} for name, form in FORMS.items()}
# Elements per word. The slow interpreter does not load halves of words as words.
DTYPES = {"uint16": 2, "bfloat16": 2, "int32": 1}


def choose_dtype(form):
    """Returns the dtype of pages that a form can interpret; XLA:CPU changes NaNs that the interpreter moves."""
    return {"xla": "bfloat16", "mosaic_tpu": "uint16"}.get(form, "int32")


def make_vectors(rng, shape, bits):
    """Returns random quantized vectors and the vectors that they represent, in float64."""
    scale = (rng.uniform(0.01, 1, shape[:-1]) / 2 ** (bits - 1)).astype(ml_dtypes.bfloat16)
    if bits == 8:
        numbers = rng.integers(-127, 128, shape)
        quantized = QuantizedArray(jnp.asarray(numbers, jnp.int8), jnp.asarray(scale))
    else:
        codes = rng.integers(0, 16, shape)
        numbers = 2 * codes - packing.largest(4)
        quantized = QuantizedArray(packing.pack(jnp.asarray(codes, jnp.uint8), 4), jnp.asarray(scale), bits=4)
    return quantized, numbers * helpers.float64(scale)[..., None]


def make_pages(rng, pages, heads, head_dim, bits, page_size=128, dtype="uint16"):
    """Returns pages filled by `write_tokens`, and their keys and values [N, H, P, D]."""
    shape = (pages * page_size, heads, head_dim)
    (keys, key_array), (values, value_array) = (make_vectors(rng, shape, bits) for _ in range(2))
    empty = jnp.zeros((pages, heads, slot_words(head_dim, bits), DTYPES[dtype], page_size), dtype)
    token = jnp.arange(pages * page_size)
    where = (token // page_size, token % page_size)
    filled = write_tokens(Pages(empty, bits), pack_words(keys, values), *where, max_runs=pages, implementation="xla")
    arrays = (x.reshape(pages, page_size, heads, head_dim).swapaxes(1, 2) for x in (key_array, value_array))
    return filled, *arrays


def attend(queries, keys, values, table, start, stop, cap=None):
    """Returns the maximum, numerator and denominator by loops over sequences and heads, in float64."""
    batch, heads, count, head_dim = queries.shape
    maximum = np.full((batch, heads, count), -np.inf)
    numerator, denominator = np.zeros(queries.shape), np.zeros(maximum.shape)
    for b, h, r in np.ndindex(maximum.shape):
        low, high = (bound[b] if bound.ndim == 1 else bound[b, r] for bound in (start, stop))
        if high <= low:
            continue
        key, value = (np.concatenate([x[page, h] for page in table[b]])[low:high] for x in (keys, values))
        logits = key @ queries[b, h, r] / np.sqrt(head_dim)
        logits = logits if cap is None else cap * np.tanh(logits / cap)
        maximum[b, h, r] = logits.max()
        weights = np.exp(logits - logits.max())
        numerator[b, h, r], denominator[b, h, r] = weights @ value, weights.sum()
    return maximum, numerator, denominator


def make_case(bits, head_dim=64, page_size=128, dtype=jnp.float32, stored="uint16"):
    """Returns arguments of four sequences with 5 pages of 12 each, and the pages' keys and values."""
    rng = np.random.default_rng(0)
    pages, keys, values = make_pages(rng, 12, 2, head_dim, bits, page_size, stored)
    table = np.stack([rng.permutation(12)[:5] for _ in range(4)])
    start = np.array([0, 3 * page_size + 1, 0, page_size - 1])
    stop = np.array([1, 5 * page_size, 0, 2 * page_size + 2])
    queries = jnp.asarray(rng.normal(size=(4, 2, 3, head_dim)), dtype)
    return (queries, pages, table, start, stop), keys, values


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits, head_dim", [(4, 64), (4, 128), (8, 64)])
def test_attention_equals_loops(form, bits, head_dim):
    arguments, keys, values = make_case(bits, head_dim, stored=choose_dtype(form))
    queries, _, *ranges = arguments
    actual = paged_decode(*arguments, **FORMS[form])
    some = helpers.compare_partials(actual, attend(helpers.float64(queries), keys, values, *ranges), 1e-5)
    assert list(some[:, 0, 0]) == [True, True, False, True]


@pytest.mark.parametrize("form", ["xla", "mosaic_tpu"])
def test_bfloat16_queries_and_capped_logits(form):
    (queries, pages, *ranges), keys, values = make_case(4, dtype=jnp.bfloat16)
    actual = paged_decode(queries, pages, *ranges, logit_cap=2.0, **FORMS[form])
    expected = attend(helpers.float64(queries), keys, values, *ranges, cap=2.0)
    helpers.compare_partials(actual, expected, 1e-2)


@pytest.mark.parametrize("form", FORMS)
def test_ranges_per_query(form):
    (queries, pages, table, *_), keys, values = make_case(4, stored=choose_dtype(form))
    start = np.array([[0, 0, 0], [300, 1, 2], [5, 5, 5], [0, 130, 640]])
    stop = np.array([[1, 2, 3], [301, 500, 640], [5, 4, 6], [640, 131, 640]])
    actual = paged_decode(queries, pages, table, start, stop, **FORMS[form])
    helpers.compare_partials(actual, attend(helpers.float64(queries), keys, values, table, start, stop), 1e-5)


@pytest.mark.parametrize("page_size, dtype", [(4, "uint16"), (96, "int32")])
def test_small_pages_and_ranges_per_query(page_size, dtype):
    rng = np.random.default_rng(1)
    pages, keys, values = make_pages(rng, 40, 2, 16, 4, page_size, dtype)
    table = rng.permutation(40).reshape(2, 20)
    start, stop = rng.integers(0, 10, (2, 70)), rng.integers(5, 20 * page_size, (2, 70))
    queries = rng.normal(size=(2, 2, 70, 16)).astype(np.float32)
    actual = paged_decode(jnp.asarray(queries), pages, table, start, stop)
    helpers.compare_partials(actual, attend(queries, keys, values, table, start, stop), 1e-5)


def test_pages_hold_the_vectors():
    for bits, words in ((4, 33), (8, 65)):
        pages, keys, values = make_pages(np.random.default_rng(2), 3, 2, 128, bits)
        assert (pages.heads, pages.head_dim, pages.page_size) == (2, 128, 128)
        assert pages.data.nbytes == 3 * 2 * 128 * 4 * words
        gathered = gather_pages(pages, jnp.array([[2, 0]]))
        for x, expected in zip(gathered, (keys, values), strict=True):
            vectors = helpers.float64(x.values) * helpers.float64(x.scale)[..., None]
            np.testing.assert_array_equal(vectors[0], np.concatenate([expected[2], expected[0]], axis=1))


# Runs of tokens: page, first slot, tokens.
WRITES = {
    "decode": [(3, 5, 1), (0, 127, 1), (7, 0, 1), (5, 64, 1)],
    "prompt": [(3, 100, 28), (1, 0, 128), (8, 0, 70), (0, 9, 1)],
    "long prompt": [(2, 1, 127), (3, 0, 128), (4, 0, 128), (5, 0, 3)],
    "nothing": [],
}


@pytest.mark.parametrize("form", WRITE_FORMS)
@pytest.mark.parametrize("writes", WRITES)
def test_tokens_are_written_and_nothing_else(form, writes):
    rng, runs = np.random.default_rng(3), WRITES[writes]
    page = np.concatenate([[9] * 3, *([page] * count for page, _, count in runs), [9] * 4])  # 9 is no page
    slot = np.concatenate([[0] * 3, *(np.arange(first, first + count) for _, first, count in runs), [0] * 4])
    old = rng.integers(0, 2**32, (9, 2, 17, 128), dtype=np.uint32)
    words = rng.integers(0, 2**32, (len(page), 2, 17), dtype=np.uint32)
    expected = old.copy()
    for token, (p, s) in enumerate(zip(page, slot, strict=True)):
        if p < 9:
            expected[p, :, :, s] = words[token]
    arrays = jnp.asarray(words), jnp.asarray(page, jnp.int32), jnp.asarray(slot, jnp.int32)
    dtype = choose_dtype(form)
    data = jax.lax.bitcast_convert_type(split_words(old, DTYPES[dtype]).swapaxes(3, 4), dtype)
    actual = write_tokens(Pages(data, 4), *arrays, max_runs=6, **WRITE_FORMS[form])
    np.testing.assert_array_equal(join_words(as_unsigned(actual)), expected)


@pytest.mark.parametrize(
    "page_size, head_dim, changes, message",
    [
        (16, 64, {}, "16 slots"),
        (128, 48, {}, "6 words"),
        (128, 64, {"dtype": jnp.float16}, "float16"),
        (128, 64, {"pages": 2**17}, "524288 entries"),
    ],
)
def test_the_kernel_rejects_unsupported_arguments(page_size, head_dim, changes, message):
    data = jnp.zeros((2, 2, slot_words(head_dim, 4), 2, page_size), jnp.uint16)
    queries = jnp.zeros((4, 2, 3, head_dim), changes.get("dtype", jnp.float32))
    bound = jnp.zeros(4, jnp.int32)
    table = jnp.zeros((4, changes.get("pages", 5)), jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        paged_decode(queries, Pages(data, 4), table, bound, bound, implementation="mosaic_tpu")
    if page_size == 16:
        words = jnp.zeros((1, 2, 17), jnp.uint32)
        with pytest.raises(NotImplementedError, match=message):
            write_tokens(Pages(data, 4), words, bound[:1], bound[:1], max_runs=1, implementation="mosaic_tpu")


def test_wrong_shapes_are_rejected():
    pages = Pages(jnp.zeros((2, 2, 17, 2, 128), jnp.uint16), 4)
    zeros = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="3 heads of 64"):
        paged_decode(jnp.zeros((1, 3, 1, 64)), pages, zeros[None], zeros, zeros)
    with pytest.raises(ValueError, match="stop has shape"):
        paged_decode(jnp.zeros((1, 2, 1, 64)), pages, zeros[None], zeros, zeros[:0])
    with pytest.raises(ValueError, match="T, 2, 17"):
        write_tokens(pages, jnp.zeros((1, 2, 33), jnp.uint32), zeros, zeros, max_runs=1)
    with pytest.raises(ValueError, match="multiple of 8"):
        slot_words(20, 4)


@pytest.mark.parametrize("platform, kernels", [("cpu", 0), ("tpu", 2), ("cuda", 0)])
def test_programs_for_tpus_use_the_kernels(platform, kernels):
    arguments, *_ = make_case(4)
    queries, pages, table, start, stop = arguments
    words, where = jnp.zeros((4, 2, 17), jnp.uint32), jnp.zeros(4, jnp.int32)

    @jax.jit
    def step(pages, queries):
        pages = write_tokens(pages, words, where, where, max_runs=4)
        return pages, paged_decode(queries, pages, table, start, stop)

    text = step.trace(pages, queries).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("tpu_custom_call") == kernels


def test_pages_are_read_and_written_once():
    rng = np.random.default_rng(4)
    pages, *_ = make_pages(rng, 40, 2, 128, 4)
    page_bytes = pages.data.nbytes // 40
    table = jnp.asarray(rng.permutation(40).reshape(2, 20))
    start, stop = jnp.array([300, 0]), jnp.array([2432, 1000])  # 17 and 8 pages
    queries = jnp.ones((2, 2, 4, 128))
    run = functools.partial(paged_decode, implementation="mosaic_tpu", config=TpuConfig(step_pages=4))
    moved = traffic.moved(run, queries, pages, table, start, stop, run=False)
    others = 4 * (2 * queries.size + 2 * 2 * 2 * 4) + moved.scalars
    assert moved.total == (17 + 8) * page_bytes + others
    words, slots = jnp.zeros((200, 2, 33), jnp.uint32), jnp.arange(200) % 128
    run = functools.partial(write_tokens, max_runs=2, implementation="mosaic_tpu")
    moved = traffic.moved(run, pages, words, jnp.arange(200) // 128, slots, run=False)
    assert moved.total - moved.scalars == 2 * (2 + 2) * page_bytes  # two pages and two columns of words each


def test_only_pages_in_the_range_are_read():
    (queries, pages, table, start, stop), *_ = make_case(4)
    used = {table[b, page] for b in range(4) for page in range(start[b] // 128, -(-stop[b] // 128)) if stop[b]}
    unused = np.array(sorted(set(range(12)) - used))
    assert len(unused)
    changed = Pages(pages.data.at[unused].set(0x7FC0), 4)  # NaN as a scale
    expected = paged_decode(queries, pages, table, start, stop, **FORMS["mosaic_tpu"])
    actual = paged_decode(queries, changed, table, start, stop, **FORMS["mosaic_tpu"])
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
