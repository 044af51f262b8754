"""The block store and the selection of its blocks against loops in Python."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvjax import block_store
from kvjax.attention import attend_segments
from kvjax.partials import normalize
from kvjax.segment import Segment
from pallas_kernels.cluster_recall import blocks_as_entries, gather_blocks, padded_width
from tests.kvjax.support import make_spec, softmax_attention

BLOCK_SIZE = 4


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), parts=st.integers(1, 9), tokens=st.integers(0, 90))
def test_max_blocks_suffice_for_any_partition(seed, parts, tokens):
    size = np.random.default_rng(seed).multinomial(tokens, np.ones(parts) / parts)
    assert (-(-size // BLOCK_SIZE)).sum() <= block_store.max_blocks(tokens, parts, BLOCK_SIZE)


def stores(dim, value_dim, blocks=5):
    width = 2 * padded_width(max(dim, value_dim))
    entries = np.random.default_rng(0).normal(size=(2, 3, blocks, BLOCK_SIZE, width))
    position = jnp.zeros(entries.shape[:4], jnp.int32)
    return block_store.BlockStore(jnp.asarray(entries, jnp.float32), None, position, head_dim=dim, value_dim=value_dim)


@pytest.mark.parametrize("dim, value_dim", [(2, 2), (80, 80), (2, 7), (80, 16)])
@pytest.mark.parametrize("group", [1, 2])
def test_attention_reads_the_selected_blocks(group, dim, value_dim):
    store, rng = stores(dim=dim, value_dim=value_dim), np.random.default_rng(1)
    block = rng.integers(0, 5, (2, 3 * group, 4))
    count = rng.integers(0, BLOCK_SIZE + 1, block.shape)
    selected = gather_blocks(store.entries, jnp.asarray(block))
    read = blocks_as_entries(block_store.as_blocks(store), selected, None, jnp.asarray(count), dim)
    keys, values, present = read.keys, read.values, np.asarray(read.log_num) == 0
    for row, head in np.ndindex(2, 3 * group):
        own = row, head // group, block[row, head]
        np.testing.assert_array_equal(keys[row, head], store.keys[own].reshape(-1, dim))
        np.testing.assert_array_equal(values[row, head], store.values[own].reshape(-1, value_dim))
        expected = np.arange(BLOCK_SIZE) < count[row, head][:, None]
        np.testing.assert_array_equal(present[row, head], expected.reshape(-1))
    # Attention to blocks of the store and to fetched blocks.
    query = jnp.asarray(rng.normal(size=(2, 1, 6, dim)), jnp.float32)
    block, count = jnp.asarray(block), jnp.asarray(count)
    gathered = Segment(keys, values, log_num=jnp.where(present, 0.0, -jnp.inf))
    for logit_cap, fetched in itertools.product((None, 0.5), (None, gather_blocks(store.entries, block))):
        expected = attend_segments(query, (gathered,), logit_cap=logit_cap)
        actual = block_store.attend_blocks(query, store, block, count, logit_cap, fetched)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize("is_fetched", [False, True])
def test_logits_of_quantized_blocks_are_capped_with_the_mean_key(is_fetched):
    """q.mean is part of a logit before the cap."""
    rng, dim, cap = np.random.default_rng(0), 16, 2.0
    keys, values = rng.normal(size=(2, 8, dim)).astype(np.float32)
    keys += 3 * rng.normal(size=dim).astype(np.float32)
    spec = make_spec(head_dim=dim, kv_dtype="int8", rope_frequencies=None)
    arranged = block_store.arrange_blocks(np.arange(8).reshape(2, 4), keys, values, np.arange(8))
    one = block_store.write_blocks(block_store.init_block_store(spec, 2, 4), np.arange(2), arranged)
    store = jax.tree.map(lambda x: x[None, None], one)
    query, block = jnp.asarray(rng.normal(size=(1, 1, 2, dim)), jnp.float32), jnp.broadcast_to(jnp.arange(2), (1, 2, 2))
    fetched = gather_blocks(store.entries, block) if is_fetched else None
    read = block_store.attend_blocks(query, store, block, jnp.full_like(block, 4), cap, fetched)
    expected = [softmax_attention(one, keys, values, logit_cap=cap) for one in np.asarray(query)[0, 0]]
    np.testing.assert_allclose(normalize(read)[0, 0], expected, atol=0.02)


@pytest.mark.parametrize("value_dim", [3, 5])
def test_arrange_and_write_blocks(value_dim):
    rng = np.random.default_rng(0)
    keys, values = (rng.normal(size=(6, dim)).astype(np.float32) for dim in (3, value_dim))
    source = np.array([[5, 0, 6, 6], [3, 6, 6, -1]])
    arranged = block_store.arrange_blocks(source, keys, values, 10 + np.arange(6))
    np.testing.assert_array_equal(arranged.position, [[15, 10, -1, -1], [13, -1, -1, -1]])
    np.testing.assert_array_equal(arranged.keys[0, :2], keys[[5, 0]])
    np.testing.assert_array_equal(arranged.values[1, 0], values[3])
    assert not np.asarray(arranged.keys)[np.asarray(arranged.position) < 0].any()
    empty = block_store.init_block_store(
        make_spec(head_dim=3, value_dim=value_dim, dtype=jnp.bfloat16, rope_frequencies=None), 3, 4
    )
    store = block_store.write_blocks(empty, np.array([2, 3]), arranged)
    assert store.keys.dtype == jnp.bfloat16
    np.testing.assert_array_equal(store.position, [[-1] * 4, [-1] * 4, [15, 10, -1, -1]])
