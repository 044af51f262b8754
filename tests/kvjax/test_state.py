"""Axes of states, operations on rows, faults, and specs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.methods.exact import append_only_store
from kvjax.spec import MAX_TOKENS
from kvjax.staging import Tokens
from kvjax.state import fault, map_fields, stacked, state
from tests.kvjax.support import (
    LENGTHS,
    POLICIES,
    after,
    begin,
    each,
    every_policy,
    few_policies,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
    with_integer_keys,
)


def prefilled(name, seed=0, **spec):
    """Returns the cache and the counters after the prompts of a stream, and the stream."""
    stream, policy = make_stream(seed), POLICIES[name] if isinstance(name, str) else name
    return begin(policy, make_spec(**spec), row_keys(seed=seed), *prompt_of(stream, LENGTHS), LENGTHS), stream


def decoded(state, stream, rows=(0, 1, 2), first=0):
    """Decodes eight tokens of some rows of the stream; returns the outputs, and the cache with its counters."""
    tokens = jax.tree.map(lambda part: part[np.asarray(rows)], after(stream, LENGTHS, 8, first))
    outputs, _, *state = go(*state, tokens)
    return outputs, tuple(state)


def axes(tree):
    return map_fields(lambda field, _: field.axes, tree)


def is_names(node):
    return isinstance(node, tuple) and all(isinstance(axis, str) for axis in node)


@every_policy
def test_every_array_names_its_axes(name):
    state = kvjax.init(POLICIES[name], make_spec(), row_keys())
    names, counters = axes(state)
    assert names.staging.keys == ("B", "H_kv", "S", "D") and names.staging.values == ("B", "H_kv", "S", "D_v")
    assert counters.offset == () and counters.present == ("B", "P")
    assert counters.count == counters.past == names.reused == names.policy_faults == ("B",)
    sizes = {"B": len(LENGTHS), "H_kv": 2, "H_q": 4}
    for leaf, named in zip(jax.tree.leaves(state), jax.tree.leaves((names, counters), is_leaf=is_names), strict=True):
        assert leaf.ndim == len(named)
        for axis, size in zip(named, leaf.shape, strict=True):
            assert size == sizes.get(axis, size)
    # A buffer that is in two fields could not be donated.
    arrays = [leaf for leaf in jax.tree.leaves(with_integer_keys(state)) if leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in arrays}) == len(arrays)


@few_policies
def test_taken_rows_continue_as_in_their_batch(name):
    state, stream = prefilled(name)
    _, state = decoded(state, stream)
    expected, _ = decoded(state, stream, first=8)
    repeated = kvjax.repeat_rows(kvjax.take_rows(state, jnp.array([2, 1])), 2)
    for rows, selected in (([2, 0, 0], kvjax.take_rows(state, jnp.array([2, 0, 0]))), ([2, 2, 1, 1], repeated)):
        np.testing.assert_allclose(decoded(selected, stream, rows, 8)[0], expected[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", each(POLICIES, quick=("exact", "uniform", "subgen_mean", "clusterkv", "quest", "h2o")))
def test_inserted_rows_continue_as_in_their_cache(name):
    state, stream = prefilled(name)
    _, state = decoded(state, stream)
    # Another request with another stream and other randomness, before its first decode step.
    other, other_stream = prefilled(name, seed=1)
    merged = kvjax.insert_rows(state, kvjax.take_rows(other, jnp.array([1, 0])), jnp.array([2, 0]))
    here, there = after(stream, LENGTHS, 8, 8), after(other_stream, LENGTHS, 8)
    outputs, *_ = go(*merged, jax.tree.map(lambda a, b: np.stack([b[0], a[1], b[1]]), here, there))
    (expected, _), (other_expected, _) = decoded(state, stream, first=8), decoded(other, other_stream)
    wanted = np.stack([other_expected[0], expected[1], other_expected[1]])
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-5)


BY_HEAD = kvjax.ByHead((POLICIES["streaming_llm"], POLICIES["exact"]))


@pytest.mark.parametrize("policy, kv_dtype", [(BY_HEAD, None), (POLICIES["chelsea"], "int8")])
def test_rows_can_be_taken_and_put_back(policy, kv_dtype):
    state, _ = prefilled(policy, kv_dtype=kv_dtype)
    back = kvjax.take_rows(kvjax.take_rows(state, jnp.array([2, 0, 1])), jnp.array([1, 2, 0]))
    chex.assert_trees_all_equal(with_integer_keys(back), with_integer_keys(state))


@few_policies
def test_a_fork_shares_no_buffer_with_its_origin(name):
    # Donating one of them must not delete a buffer of the other.
    state, _ = prefilled(name)
    first = jnp.array([0])
    forks = [kvjax.take_rows(state, first), kvjax.insert_rows(state, kvjax.take_rows(state, first), first)]
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(forks))


def test_rows_with_another_staging_offset_are_not_inserted():
    state, stream = prefilled("exact")
    further = kvjax.append(*state, *after(stream, LENGTHS, 3)[:2])
    with pytest.raises(ValueError, match=r"'offset' is 0 in one state and 3 in the other; compact both"):
        kvjax.insert_rows(state, further, jnp.arange(3))
    _, counters = kvjax.insert_rows(state, kvjax.compact(*further), jnp.arange(3))
    chex.assert_trees_all_equal(counters.num_tokens, jnp.array(LENGTHS) + 3)


def test_an_append_only_store_counts_tokens_beyond_its_capacity():
    # The cache refuses them first.
    count, arrays = jnp.array([64, 10, 0]), jax.random.normal(jax.random.key(0), (4, 3, 2, 64, 64))
    none, position = jnp.zeros(3, jnp.int32), jnp.zeros((3, 64), jnp.int32)
    store = append_only_store.init_append_only_store(make_spec(prompt=4, new=60), 4)
    store = append_only_store.append(store, Tokens(*arrays[:2], count, none, position))
    kvjax.raise_faults(store)
    more = Tokens(*arrays[2:], jnp.array([5, 64, 64]), count, position)
    fuller = append_only_store.append(store, more)
    np.testing.assert_array_equal(fuller.count, [64, 64, 64])
    np.testing.assert_array_equal(fuller.keys[0], store.keys[0])
    np.testing.assert_array_equal(fuller.keys[1, :, 10:], more.keys[1, :, :54])
    with pytest.raises(ValueError, match=r"overflow=\[5, 10, 0\]: tokens were appended to a full .* \(15 in total\)"):
        kvjax.raise_faults(fuller)


def test_states_may_be_nested_in_lists_and_dicts():
    state, _ = prefilled("exact")
    selected = kvjax.take_rows({"layers": [state, state]}, jnp.array([1]))
    np.testing.assert_array_equal(selected["layers"][1][1].num_tokens, [LENGTHS[1]])
    with pytest.raises(TypeError, match="is not a kvjax state"):
        kvjax.take_rows({"keys": jnp.zeros(3)}, jnp.array([0]))


SPEC = {"batch": 1, "query_heads": 4, "kv_heads": 2, "head_dim": 8, "max_prompt_tokens": 8, "max_new_tokens": 8}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": True}, "batch=True must be an integer"),
        ({"kv_heads": 3}, "query_heads=4 must be a multiple of kv_heads=3"),
        ({"kv_heads": "2"}, "kv_heads='2' must be an integer"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"max_prompt_tokens": 40.0}, "max_prompt_tokens=40.0 must be an integer"),
        ({"max_prompt_tokens": MAX_TOKENS}, "must be at most 16777216"),
        ({"max_prompt_tokens": 2**31, "max_new_tokens": 2**31}, "must be at most 16777216"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be at least 0"),
        ({"layer": 0.5}, "layer=0.5 must be an integer"),
        ({"layer": -1}, "layer=-1 must be at least 0"),
        ({"layer": 1}, r"layer=1 must be in \[0, layers=1\)"),
        ({"sequence_shards": 0}, "sequence_shards=0"),
        ({"value_dim": 0}, "value_dim=0 must be at least 1"),
        ({"value_dim": True}, "value_dim=True must be an integer"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": np.nan}, "scale=nan"),
        ({"scale": np.inf}, "scale=inf must be a finite number above 0, or None"),
        ({"logit_cap": -30.0}, "logit_cap=-30.0"),
        ({"logit_cap": 10**400}, "logit_cap=1000"),
        ({"window": 0}, "window=0"),
        ({"window": 2.5}, "window=2.5 must be an integer"),
        ({"rope_frequencies": "abcd"}, "rope_frequencies='abcd' must be head_dim / 2 = 4 finite numbers, or None"),
        ({"rope_frequencies": (1.0, np.inf, 1.0, 1.0)}, "rope_frequencies="),
        ({"rope_frequencies": (1.0,)}, "rope_frequencies="),
        ({"dtype": jnp.int32}, "dtype=.* must be a floating-point dtype"),
    ],
)
def test_invalid_specs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kvjax.CacheSpec(**SPEC | change)


def test_full_cache_bytes_are_keys_and_values_of_the_tokens():
    for dtype in (jnp.bfloat16, jnp.float32):
        assert make_spec(dtype=dtype).full_cache_bytes(10) == 2 * 2 * 64 * 2 * 10
    assert make_spec(dtype=jnp.bfloat16, value_dim=32).full_cache_bytes(10) == 2 * (64 + 32) * 2 * 10


def test_rows_out_of_range_are_refused():
    cache, _ = kvjax.init(kvjax.Exact(compact_every=4), make_spec(batch=2), row_keys(2))
    first = kvjax.take_rows(cache, jnp.array([0]))
    for call, message in (
        *((lambda rows=rows: kvjax.take_rows(cache, jnp.array(rows)), r"in \[0, 2\)") for rows in ([2], [-1, 0])),
        (lambda: kvjax.insert_rows(cache, first, jnp.array([2])), r"must be in \[0, 2\)"),
        (lambda: kvjax.insert_rows(cache, cache, jnp.array([-1, 0])), r"must be in \[0, 2\)"),
        (lambda: kvjax.insert_rows(cache, cache, jnp.array([1, 1])), r"rows=\[1, 1\] must differ"),
        (lambda: kvjax.insert_rows(cache, first, jnp.array([0, 1])), r"rows have shape \(2,\), expected one per row"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@state
class OneStream:
    """A structure of one stream, without a batch axis."""

    items: Int[Array, "M 2"]
    lost: Int[Array, ""] = fault("items were lost")


@state
class ManyStreams:
    stream: OneStream = stacked("B", "H_kv")


def test_stacked_states_have_leading_axes():
    many = ManyStreams(OneStream(items=jnp.arange(12).reshape(3, 2, 1, 2), lost=jnp.zeros((3, 2), jnp.int32)))
    assert axes(many).stream.items == ("B", "H_kv", "M", "2")
    selected = kvjax.take_rows(many, jnp.array([2, 0]))
    np.testing.assert_array_equal(selected.stream.items, many.stream.items[jnp.array([2, 0])])
    with pytest.raises(ValueError, match=r"lost=\[\[0, 0\], \[0, 3\], \[0, 0\]\]: items were lost \(3 in total\)"):
        kvjax.raise_faults(ManyStreams(OneStream(many.stream.items, many.stream.lost.at[1, 1].set(3))))


def test_a_cache_is_described_in_three_lines_also_without_arrays():
    (cache, _), texts = kvjax.init(kvjax.Exact(), make_spec(kv_dtype="int4"), row_keys()), []
    jax.jit(lambda cache: texts.append(repr(cache)))(cache)
    assert texts == [repr(cache)] == [repr(jax.eval_shape(lambda: cache))]
    assert texts[0].count("\n") == 2 and texts[0].startswith(f"Cache({cache.policy}") and "Array" not in texts[0]
    for part in ("batch=3, kv_heads=2", "dtype=int4", f"{kvjax.cache_bytes(cache).device:,} bytes on the device"):
        assert part in texts[0]
    assert "no arrays" in repr(jax.tree.map(lambda _: 0, cache)) and "no arrays" in repr(jax.tree.map(str, cache))


def test_misspelled_axes_are_errors():
    with pytest.raises(TypeError, match="Misspelled.keys has the unknown axis 'H_kw'; did you mean 'H_kv'"):

        @state
        class Misspelled:
            keys: Float[Array, "B H_kw S D"]
