"""Every form of the choice of parts against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.select_blocks import mosaic_tpu, reference, select_blocks

PLACES = 4
FORMS = {
    "sorting": reference.select_by_sorting,
    "comparing": reference.select_by_comparing,
    "mosaic_tpu": functools.partial(mosaic_tpu.select_blocks, interpret=True),
}
every_form = pytest.mark.parametrize("form", FORMS)


@functools.partial(jax.jit, static_argnames=("form", "tokens", "blocks", "places"))
def best(score, size, first, tokens, blocks, form="sorting", places=PLACES):
    return FORMS[form](score, size, first, limits=reference.Limits(tokens, blocks, places))


def laid_out(size, places=PLACES):
    """Where each part begins when they follow one another in whole blocks."""
    needed = -(-np.asarray(size) // places)
    return np.cumsum(needed) - needed


def by_loops(score, size, first, tokens, blocks, places=PLACES):
    """Blocks with the tokens read of each, part by part; tokens taken of each part."""
    read, taken = [], [0] * len(size)
    for part in sorted(range(len(size)), key=lambda part: (-score[part], part)):
        for place in range(-(-size[part] // places)):
            count = min(places, size[part] - place * places, tokens - sum(taken))
            if count > 0 and len(read) < blocks:
                read.append((first[part] + place, count))
                taken[part] += count
    return read, taken


def compare(score, size, tokens, blocks, forms=FORMS, places=PLACES):
    first = laid_out(size, places)
    read, taken = by_loops(np.float32(score), size, first, tokens, blocks, places)
    for form in forms if blocks else [form for form in forms if form != "mosaic_tpu"]:
        found = best(np.float32(score), np.int32(size), np.int32(first), tokens, blocks, form, places=places)
        used = np.asarray(found.block_lengths) > 0
        told = list(zip(np.asarray(found.block_indices)[used], np.asarray(found.block_lengths)[used], strict=True))
        assert told == (sorted(read) if form == "mosaic_tpu" else read)  # whose parts come in the order of the store
        np.testing.assert_array_equal(found.selected_tokens, taken)
        # Unused slots come last and name some block that exists.
        assert not used[len(read) :].any() and (np.asarray(found.block_indices)[~used] == 0).all()
    return taken


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([0, 1, 3, 4, 10, 40, 200]),
    blocks=st.sampled_from([0, 1, 3, 12, 60]),
    largest=st.sampled_from([1, 6, 30]),
    kinds=st.sampled_from([1, 2, 1000]),
)
def test_the_select_blocks_are_those_of_brute_force(seed, tokens, blocks, largest, kinds):
    rng = np.random.default_rng(seed)
    size = rng.integers(0, largest + 1, 12)
    compare(rng.integers(0, kinds, 12) - kinds // 2, size, tokens, blocks)


@pytest.mark.parametrize("parts, blocks, places", [(128, 130, 16), (300, 60, 16), (1000, 300, 5)])
@pytest.mark.parametrize("kinds", [7, None])
def test_many_parts(parts, blocks, places, kinds):
    rng = np.random.default_rng(parts)
    score = rng.normal(size=parts) * 1e3 if kinds is None else rng.integers(-3, kinds - 3, parts)
    compare(score, rng.integers(0, 3 * places, parts), 4 * blocks, blocks, places=places)
    compare(score, rng.integers(0, 3 * places, parts), places * blocks, blocks, places=places)


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
def test_adversarial_parts(score, size, tokens, expected):
    assert compare(score, size, tokens, blocks=40) == expected


@pytest.mark.parametrize("form", ["comparing", "mosaic_tpu"])
def test_scores_that_are_no_numbers_come_last_and_zeros_are_equal(form):
    found = best(np.float32([np.nan, -0.0, 0.0]), np.int32([4, 4, 4]), np.int32([0, 1, 2]), 6, 3, form)
    np.testing.assert_array_equal(found.selected_tokens, [0, 4, 2])


def test_blocks_may_run_out_before_tokens():
    assert compare([3, 2, 1, 0], [1, 1, 5, 9], 16, blocks=3) == [1, 1, 4, 0]


def test_one_kernel_serves_all_heads_under_vmap():
    rng = np.random.default_rng(0)
    score, size = np.float32(rng.normal(size=(2, 3, 40))), np.int32(rng.integers(0, 9, (2, 3, 40)))
    first = np.int32(laid_out(size[0, 0]))
    of_heads = jax.vmap(jax.vmap(lambda score, size: best(score, size, first, 60, 30, "mosaic_tpu")))
    jaxpr = str(jax.make_jaxpr(of_heads)(score, size))
    assert jaxpr.count("pallas_call[") == 1 and "while[" not in jaxpr.replace("pallas_call[", "", 1).split("jaxpr=")[0]
    found = of_heads(score, size)
    for row, head in np.ndindex(2, 3):
        alone = best(score[row, head], size[row, head], first, 60, 30, "mosaic_tpu")
        jax.tree.map(lambda x, y, at=(row, head): np.testing.assert_array_equal(x[at], y), found, alone)


def test_the_kernel_reads_nothing_outside():
    rng = np.random.default_rng(0)
    score, size = jnp.float32(rng.normal(size=150)), jnp.int32(rng.integers(0, 9, 150))
    checked = pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")
    sizes = {"max_tokens": 60, "max_blocks": 30, "block_size": PLACES, "implementation": "mosaic_tpu"}
    first = jnp.int32(laid_out(size))
    found = select_blocks(score, size, first, **sizes, interpret=checked)
    jax.tree.map(np.testing.assert_array_equal, found, select_blocks(score, size, first, **sizes, interpret=True))


@pytest.mark.parametrize(
    "parts, sizes, message",
    [
        (0, {}, "0 clusters"),
        (2**15, {}, "32768 clusters"),
        (8, {"max_blocks": 0}, "0 blocks"),
        (8, {"max_tokens": 2**22}, "4194304 tokens"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(parts, sizes, message):
    given_ = {"max_tokens": 4, "max_blocks": 4, "block_size": PLACES} | sizes
    with pytest.raises(NotImplementedError, match=message):
        select_blocks(jnp.zeros(parts), jnp.ones(parts, int), jnp.arange(parts), **given_, implementation="mosaic_tpu")


def test_devices_do_not_sort_where_a_cpu_does():
    parts = jnp.zeros(8), jnp.ones(8, jnp.int32), jnp.arange(8)
    of_budget = functools.partial(select_blocks, max_tokens=4, max_blocks=4, block_size=PLACES)
    for platform, sorts, kernels in (("cpu", True, 0), ("tpu", False, 1), ("cuda", False, 0)):
        text = jax.jit(of_budget).trace(*parts).lower(lowering_platforms=(platform,)).as_text()
        assert ("top_k" in text) == sorts
        assert text.count("tpu_custom_call") == kernels
