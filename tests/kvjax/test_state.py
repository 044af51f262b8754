import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.state import array, stacked, state
from tests.kvjax.support import (
    LENGTHS,
    POLICIES,
    after,
    begin,
    every_policy,
    few_policies,
    go,
    make_spec,
    make_stream,
    prompt_of,
    row_keys,
)

KEYS, WEIGHTS = ("batch", "kv_heads", "slots", "head_dim"), ("batch", "kv_heads", "slots")


def prefilled(name, seed=0, keys_seed=0):
    stream = make_stream(seed)
    keys = row_keys(seed=keys_seed)
    return begin(POLICIES[name], make_spec(), keys, *prompt_of(stream, LENGTHS), LENGTHS), stream


def decoded(name, state, stream, rows, first=0):
    """Eight further tokens of the given rows of the stream (one period), as outputs."""
    tokens = jax.tree.map(lambda part: part[np.asarray(rows)], after(stream, LENGTHS, 8, first))
    return go(POLICIES[name], state, tokens)[:2]


@every_policy
def test_every_array_names_its_axes(name):
    state = POLICIES[name].init(make_spec(), row_keys())
    names = kvjax.axes(state)
    assert names.window.keys == names.window.values == names.window.staging.keys == KEYS
    assert names.window.staging.offset == () and names.window.total == ("batch",)
    selection = {
        "uniform": {"priority": WEIGHTS, "log_weight": WEIGHTS, "row_keys": ("batch",)},
        "clustergen_mean_value": {"count": WEIGHTS, "separation": WEIGHTS, "log_weight": WEIGHTS},
        "clustergen_paper": {"chosen": ("batch",)},
        "streaming_llm_reindexed": {"rope": ("slots",)},
    }
    if name in selection:
        own = names.selection
        assert selection[name] == {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    is_names = lambda node: isinstance(node, tuple) and all(isinstance(axis, str) for axis in node)  # noqa: E731
    for leaf, axes in zip(jax.tree.leaves(state), jax.tree.leaves(names, is_leaf=is_names), strict=True):
        assert leaf.ndim == len(axes)
        if "batch" in axes:
            assert leaf.shape[axes.index("batch")] == len(LENGTHS)


@few_policies
def test_taken_rows_go_on_as_in_their_batch(name):
    state, stream = prefilled(name)
    state, _ = decoded(name, state, stream, [0, 1, 2])
    order = [2, 0, 0]
    _, expected = decoded(name, state, stream, [0, 1, 2], first=8)
    _, taken = decoded(name, kvjax.take_rows(state, jnp.array(order)), stream, order, first=8)
    np.testing.assert_allclose(taken, expected[np.array(order)], rtol=1e-5, atol=1e-5)
    one = kvjax.take_rows(state, jnp.array([2]))
    _, repeated = decoded(name, kvjax.repeat_rows(one, 3), stream, [2, 2, 2], first=8)
    np.testing.assert_allclose(repeated, expected[[2, 2, 2]], rtol=1e-5, atol=1e-5)


@every_policy
def test_inserted_rows_go_on_as_in_the_state_they_came_from(name):
    state, stream = prefilled(name)
    state, _ = decoded(name, state, stream, [0, 1, 2])
    # Another request, of its own stream and randomness, that has decoded nothing yet.
    other, other_stream = prefilled(name, seed=1, keys_seed=1)
    merged = kvjax.insert_rows(state, kvjax.take_rows(other, jnp.array([1, 0])), jnp.array([2, 0]))
    here, there = after(stream, LENGTHS, 8, 8), after(other_stream, LENGTHS, 8)
    tokens = jax.tree.map(lambda a, b: np.stack([b[0], a[1], b[1]]), here, there)
    _, outputs, _ = go(POLICIES[name], merged, tokens)
    _, expected = decoded(name, state, stream, [0, 1, 2], first=8)
    _, other_expected = decoded(name, other, other_stream, [0, 1, 2])
    wanted = np.stack([other_expected[0], expected[1], other_expected[1]])
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-5)


def test_repeating_keeps_forks_of_a_row_together():
    state, _ = prefilled("exact")
    np.testing.assert_array_equal(kvjax.repeat_rows(state, 2).window.total, np.repeat(LENGTHS, 2))


@every_policy
def test_a_fork_shares_no_buffer_with_its_origin(name):
    # Either may be donated; a shared buffer would be deleted under the other.
    state, _ = prefilled(name)
    first = jnp.array([0])
    forks = [kvjax.take_rows(state, first), kvjax.insert_rows(state, kvjax.take_rows(state, first), first)]
    jax.jit(lambda given: given, donate_argnums=0)(state)
    for leaf in jax.tree.leaves(forks):
        assert not leaf.is_deleted()


def test_rows_at_another_point_of_staging_are_not_inserted():
    policy = POLICIES["exact"]
    state, stream = prefilled("exact")
    further = policy.extend(state, *after(stream, LENGTHS, 3)[:2])
    with pytest.raises(ValueError, match=r"'offset' is 0 in one state and 3 in the other; compact both"):
        kvjax.insert_rows(state, further, jnp.arange(3))
    chex.assert_trees_all_equal(
        kvjax.insert_rows(state, policy.compact(further), jnp.arange(3)).window.total, jnp.array(LENGTHS) + 3
    )


def test_check_names_an_exact_cache_that_was_overfilled():
    policy = kvjax.exact(period=4)
    spec = make_spec(prompt=4, new=60)  # 64 slots, a whole block
    stream = make_stream()
    prompt = prompt_of(stream, (4, 3, 0), padded=4)
    state = begin(policy, spec, row_keys(), *prompt, (4, 3, 0))
    append = jax.jit(lambda state: policy.compact(policy.extend(state, stream.keys[:, 4:8], stream.values[:, 4:8])))
    for _ in range(15):
        state = append(state)
    kvjax.check(state)
    state = append(append(state))
    with pytest.raises(ValueError, match=r"overflow=\[8, 7, 4\]: tokens came to a full cache .* \(19 in all\)"):
        kvjax.check(state)
    stored = np.asarray(state.selection.keys)[0].swapaxes(0, 1)
    np.testing.assert_array_equal(stored[:4], stream.keys[0, :4])  # what was there is as it was
    np.testing.assert_array_equal(stored[4:], np.tile(stream.keys[0, 4:8], (15, 1, 1)))


def test_what_is_no_state_is_refused():
    with pytest.raises(TypeError, match="is not a state"):
        kvjax.take_rows({"keys": jnp.zeros(3)}, jnp.array([0]))


def test_states_may_lie_in_lists_and_dicts():
    state, _ = prefilled("exact")
    taken = kvjax.take_rows({"layers": [state, state]}, jnp.array([1]))
    np.testing.assert_array_equal(taken["layers"][1].window.total, [LENGTHS[1]])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"batch": 0}, "batch=0"),
        ({"kv_heads": 3}, "query_heads=4 must be a multiple of kv_heads=3"),
        ({"head_dim": -1}, "head_dim=-1"),
        ({"prompt": 0}, "max_prompt=0"),
        ({"new": 0}, "max_new=0"),
        ({"layer": 2, "layers": 2}, r"layer=2 must lie in \[0, layers=2\)"),
        ({"layer": -1}, "layer=-1"),
    ],
)
def test_specs_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_spec(**change)


def test_exact_bytes_are_keys_and_values_of_the_tokens():
    assert make_spec(dtype=jnp.bfloat16).exact_bytes(10) == 2 * 2 * 64 * 2 * 10


def test_rows_out_of_range_are_refused():
    policy = kvjax.exact(period=4)
    spec = kvjax.CacheSpec(batch=2, query_heads=2, kv_heads=1, head_dim=4, max_prompt=4, max_new=4)
    cache = policy.init(spec, jax.random.split(jax.random.key(0), 2))
    for rows in ([2], [-1, 0]):
        with pytest.raises(ValueError, match=r"must lie in \[0, 2\)"):
            kvjax.take_rows(cache, jnp.array(rows))
        with pytest.raises(ValueError, match=r"must lie in \[0, 2\)"):
            kvjax.insert_rows(cache, kvjax.take_rows(cache, jnp.array([0] * len(rows))), jnp.array(rows))


@state
class OneStream:
    """What a stream structure looks like: no batch axis of its own."""

    items: jax.Array = array("slots")
    lost: jax.Array = array(fault="items were lost")


@state
class ManyStreams:
    stream: OneStream = stacked("batch", "kv_heads")


def test_states_of_one_stream_are_handled_under_their_leading_axes():
    many = ManyStreams(OneStream(items=jnp.arange(12).reshape(3, 2, 2), lost=jnp.zeros((3, 2), jnp.int32)))
    assert kvjax.axes(many).stream.items == ("batch", "kv_heads", "slots")
    taken = kvjax.take_rows(many, jnp.array([2, 0]))
    np.testing.assert_array_equal(taken.stream.items, many.stream.items[jnp.array([2, 0])])
    with pytest.raises(ValueError, match=r"lost=\[\[0, 0\], \[0, 3\], \[0, 0\]\]: items were lost \(3 in all\)"):
        kvjax.check(ManyStreams(OneStream(many.stream.items, many.stream.lost.at[1, 1].set(3))))
