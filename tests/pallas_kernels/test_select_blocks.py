"""Compares all implementations of `select_blocks`, the oracle among them, with plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.select_blocks import select_blocks
from tests.pallas_kernels import helpers

BLOCK_SIZE = 4
FORMS = {
    **{name: {"implementation": name} for name in ("oracle", "xla_sort", "xla_bisect", "xla_sort_tuples")},
    "mosaic_tpu": {"implementation": "mosaic_tpu", "interpret": True},
    "mosaic_tpu_checked": {"implementation": "mosaic_tpu", "interpret": helpers.CHECKED},
}
QUICK = [form for form in FORMS if form != "mosaic_tpu_checked"]


@functools.partial(jax.jit, static_argnames=("form", "tokens", "blocks", "block_size"))
def select(scores, sizes, first_blocks, tokens, blocks, form="xla_sort", block_size=BLOCK_SIZE):
    limits = {"max_tokens": tokens, "max_blocks": blocks, "block_size": block_size}
    return select_blocks(scores, sizes, first_blocks, **limits, **FORMS[form])


def lay_out(sizes, block_size=BLOCK_SIZE):
    """Returns the first block of each cluster if clusters follow each other."""
    blocks = -(-np.asarray(sizes) // block_size)
    return np.cumsum(blocks) - blocks


def select_by_loops(scores, sizes, first_blocks, tokens, blocks, block_size):
    """Returns blocks with their lengths in the order of the scores, and the tokens of each cluster."""
    read, selected = [], [0] * len(sizes)
    for cluster in sorted(range(len(sizes)), key=lambda cluster: (-scores[cluster], cluster)):
        for place in range(-(-sizes[cluster] // block_size)):
            length = min(block_size, sizes[cluster] - place * block_size, tokens - sum(selected))
            if length > 0 and len(read) < blocks:
                read.append((first_blocks[cluster] + place, length))
                selected[cluster] += length
    return read, selected


def compare(scores, sizes, tokens, blocks, block_size=BLOCK_SIZE, forms=QUICK):
    first_blocks = lay_out(sizes, block_size)
    read, selected = select_by_loops(np.float32(scores), sizes, first_blocks, tokens, blocks, block_size)
    for form in forms if blocks else ("oracle", "xla_sort", "xla_sort_tuples"):
        arrays = np.float32(scores), np.int32(sizes), np.int32(first_blocks)
        actual = jax.tree.map(np.asarray, select(*arrays, tokens, blocks, form, block_size))
        is_used = actual.block_lengths > 0
        pairs = list(zip(actual.block_indices[is_used], actual.block_lengths[is_used], strict=True))
        keeps_order = form in ("xla_bisect", "mosaic_tpu", "mosaic_tpu_checked")  # of the clusters' indices
        assert pairs == (sorted(read) if keeps_order else read)
        np.testing.assert_array_equal(actual.selected_tokens, selected)
        # Unused slots come last and have a valid index.
        assert not is_used[len(read) :].any() and (actual.block_indices[~is_used] == 0).all()
    return selected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([0, 3, 10, 200]),  # each pair of `tokens` and `blocks` is compiled
    blocks=st.sampled_from([0, 3, 60]),
    largest=st.sampled_from([1, 6, 30]),
    kinds=st.sampled_from([1, 2, 1000]),
)
def test_selected_blocks_equal_brute_force(seed, tokens, blocks, largest, kinds):
    rng = np.random.default_rng(seed)
    size = rng.integers(0, largest + 1, 12)
    compare(rng.integers(0, kinds, 12) - kinds // 2, size, tokens, blocks)


@pytest.mark.parametrize("clusters, blocks, block_size", [(128, 130, 16), (300, 60, 16), (1000, 300, 5)])
@pytest.mark.parametrize("kinds", [7, None])
def test_many_clusters(clusters, blocks, block_size, kinds):
    rng = np.random.default_rng(clusters)
    scores = rng.normal(size=clusters) * 1e3 if kinds is None else rng.integers(-3, kinds - 3, clusters)
    for tokens in (4 * blocks, block_size * blocks):
        compare(scores, rng.integers(0, 3 * block_size, clusters), tokens, blocks, block_size)


def test_the_kernel_reads_nothing_out_of_bounds():
    rng = np.random.default_rng(0)
    compare(rng.normal(size=150), rng.integers(0, 9, 150), 60, 30, forms=["mosaic_tpu_checked"])


@pytest.mark.parametrize(
    "score, size, tokens, expected",
    [
        ([1, 1, 1], [4, 4, 4], 8, [4, 4, 0]),  # ties: the first ones
        ([3, 2, 1], [0, 5, 0], 40, [0, 5, 0]),  # empty clusters
        ([9, 1, 1], [97, 1, 1], 10, [10, 0, 0]),  # one huge cluster
        ([9, 1, 1], [97, 1, 1], 98, [97, 1, 0]),
        ([1, 2], [7, 9], 3, [0, 3]),  # a budget smaller than a cluster
        ([1, 2], [7, 9], 0, [0, 0]),
        ([-np.inf, -np.inf], [3, 2], 4, [3, 1]),
        ([np.inf, 3e38, 1e-45], [3, 2, 4], 8, [3, 2, 3]),
        ([-1e-45, -3e38, -np.inf], [3, 2, 4], 8, [3, 2, 3]),
        ([-1, 2, 0], [7, 9, 1], 11, [1, 9, 1]),
    ],
)
def test_adversarial_clusters(score, size, tokens, expected):
    assert compare(score, size, tokens, blocks=40) == expected


@pytest.mark.parametrize("form", ["oracle", "xla_sort", "xla_bisect", "xla_sort_tuples", "mosaic_tpu"])
def test_nan_scores_come_last_and_zeros_are_equal(form):
    actual = select(np.float32([np.nan, -0.0, 0.0]), np.int32([4, 4, 4]), np.int32([0, 1, 2]), 6, 3, form)
    np.testing.assert_array_equal(actual.selected_tokens, [0, 4, 2])


def test_vmap_gives_one_kernel():
    rng = np.random.default_rng(0)
    scores, sizes = np.float32(rng.normal(size=(2, 3, 40))), np.int32(rng.integers(0, 9, (2, 3, 40)))
    first_blocks = np.int32(lay_out(sizes[0, 0]))
    select_heads = jax.vmap(jax.vmap(lambda scores, sizes: select(scores, sizes, first_blocks, 60, 30, "mosaic_tpu")))
    actual = helpers.run_without_loop(select_heads, scores, sizes)
    for at in np.ndindex(2, 3):
        alone = select(scores[at], sizes[at], first_blocks, 60, 30, "mosaic_tpu")
        jax.tree.map(np.testing.assert_array_equal, helpers.pick(actual, *at), alone)


@pytest.mark.parametrize(
    "clusters, limits, message",
    [
        (0, {}, "0 clusters"),
        (2**15, {}, "32768 clusters"),
        (8, {"max_blocks": 0}, "0 blocks"),
        (8, {"max_tokens": 2**22}, "4194304 tokens"),
    ],
)
def test_the_kernel_rejects_unsupported_arguments(clusters, limits, message):
    limits = {"max_tokens": 4, "max_blocks": 4, "block_size": BLOCK_SIZE} | limits
    arrays = jnp.zeros(clusters), jnp.ones(clusters, int), jnp.arange(clusters)
    with pytest.raises(NotImplementedError, match=message):
        select_blocks(*arrays, **limits, implementation="mosaic_tpu")


@pytest.mark.parametrize(
    "platform, max_blocks, sorts, kernels",
    [("cpu", 4, True, 0), ("cpu", 8, False, 0), ("tpu", 4, False, 1), ("cuda", 4, False, 0)],
)
def test_only_cpus_sort_if_few_clusters_are_selected(platform, max_blocks, sorts, kernels):
    arrays = jnp.zeros(8), jnp.ones(8, jnp.int32), jnp.arange(8)
    run = jax.jit(functools.partial(select_blocks, max_tokens=4, max_blocks=max_blocks, block_size=BLOCK_SIZE))
    text = run.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
    assert ("top_k" in text) == sorts
    assert text.count("tpu_custom_call") == kernels
