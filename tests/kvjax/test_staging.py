import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.policies.windowed import init_windowed
from kvjax.staging import init_window, settle, stage
from tests.kvjax.support import make_spec

BATCH, SLOTS, WIDEST = 3, 6, 3


@jax.jit
def stage_window(window, keys, values, lengths):
    return dataclasses.replace(window, staging=stage(window.staging, keys, values, lengths))


settle_window = jax.jit(settle)


@functools.cache
def fresh(sinks, recent):
    return init_window(make_spec(head_dim=2, rope_frequencies=None), sinks + recent, sinks, recent, period=SLOTS)


def tokens(firsts, count):
    """Tokens that hold their position: keys p + 1, values -(p + 1), in both heads."""
    position = np.asarray(firsts)[:, None] + np.arange(count) + 1.0
    keys = np.broadcast_to(position[:, :, None, None], (BATCH, count, 2, 2)).astype(np.float32)
    return keys, -keys


class Row:
    """One row as plain lists of positions."""

    def __init__(self, sinks, recent):
        self.limits, self.sinks, self.recent, self.staged, self.total = (sinks, recent), [], [], [], 0

    def settle(self):
        left = []
        for position in self.staged:
            if len(self.sinks) < self.limits[0]:
                self.sinks.append(position)
            else:
                self.recent.append(position)
                if len(self.recent) > self.limits[1]:
                    left.append(self.recent.pop(0))
        self.staged = []
        return left


def check_window(window, rows):
    keys, values, recent_slots = np.asarray(window.keys), np.asarray(window.values), window.recent
    for number, row in enumerate(rows):
        held = {
            "recent": (slice(recent_slots - len(row.recent), recent_slots), row.recent),
            "sinks": (slice(recent_slots, recent_slots + len(row.sinks)), row.sinks),
        }
        for part, (slots, positions) in held.items():
            expected = np.broadcast_to(np.array(positions, np.float32)[:, None] + 1, (2, len(positions), 2))
            np.testing.assert_array_equal(keys[number, :, slots], expected, err_msg=part)
            np.testing.assert_array_equal(values[number, :, slots], -expected, err_msg=part)
    real = np.asarray(window.staging.log_weight) == 0
    for number, row in enumerate(rows):
        for head in range(2):
            staged = np.asarray(window.staging.keys)[number, head][real[number, head], 0] - 1
            np.testing.assert_array_equal(staged, row.staged)


appends = st.tuples(st.integers(1, WIDEST), st.lists(st.integers(0, WIDEST), min_size=BATCH, max_size=BATCH))
# None settles, at whatever filling; anything else appends so many slots, with so many real tokens per row.
histories = st.lists(st.one_of(st.none(), appends), max_size=14)


@pytest.mark.parametrize("sinks, recent", [(2, 4), (0, 3), (3, 0), (0, 0), (2, 9)])
@settings(max_examples=40, deadline=None)
@given(history=histories)
def test_staging_and_settling_do_what_lists_do(sinks, recent, history):
    window, rows = fresh(sinks, recent), [Row(sinks, recent) for _ in range(BATCH)]
    offset, lost = 0, np.zeros(BATCH, int)
    for event in [*history, None]:
        if event is None:
            before = [len(row.sinks) + len(row.recent) for row in rows]
            passed = [row.total - len(row.staged) - held for row, held in zip(rows, before, strict=True)]
            window, block = settle_window(window)
            offset = 0
            for number, row in enumerate(rows):
                left = row.settle()
                assert int(block.count[number]) == len(left)
                assert int(window.total[number]) == row.total
                # Where nothing left, `first` is where the next to leave will be: after sinks and those that left.
                assert int(block.first[number]) == sinks + passed[number]
                expected = np.broadcast_to(np.array(left, np.float32)[:, None] + 1, (2, len(left), 2))
                np.testing.assert_array_equal(block.keys[number, :, : len(left)], expected)
                np.testing.assert_array_equal(block.values[number, :, : len(left)], -expected)
                if left:
                    assert int(block.first[number]) == left[0]
        else:
            count, lengths = event[0], np.minimum(event[1], event[0])
            window = stage_window(window, *tokens([row.total for row in rows], count), lengths.astype(np.int32))
            if offset + count > SLOTS:  # no room: nothing is written, and that is counted
                lost += lengths
            else:
                offset += count
                for row, length in zip(rows, lengths, strict=True):
                    row.staged += range(row.total, row.total + length)
                    row.total += int(length)
        assert int(window.staging.offset) == offset
        np.testing.assert_array_equal(window.staging.count, [len(row.staged) for row in rows])
        np.testing.assert_array_equal(window.staging.overflow, lost)
        check_window(window, rows)


def test_overflow_is_reported_by_check():
    window = fresh(2, 4)
    for _ in range(2):
        kvjax.check(window)
        window = stage_window(window, *tokens((0, 0, 0), 3), np.array([3, 1, 0], np.int32))
    window = stage_window(window, *tokens((6, 2, 0), 1), np.array([1, 0, 1], np.int32))
    with pytest.raises(ValueError, match=r"overflow=\[1, 0, 1\]: tokens were appended to a full staging buffer"):
        kvjax.check(window)


def test_a_staging_buffer_is_never_longer_than_all_that_comes():
    window = init_window(make_spec(new=5), 8, sinks=2, recent=6, period=64)
    assert window.staging.keys.shape[2] == 5


@pytest.mark.parametrize("length", [0, 1, 2, 3, 5, 9, 10])
def test_prompts_shorter_than_sinks_or_window_fill_what_they_can(length):
    # sinks take the first tokens, recents the last of the rest.
    policy = _wide()
    spec = make_spec(batch=BATCH, head_dim=2, prompt=10, new=SLOTS, rope_frequencies=None)
    keys, values = tokens((0, 0, 0), 10)
    state, _ = policy.prefill(policy.init(spec, None), keys, values, jnp.full(BATCH, length))
    rows = [Row(3, 4) for _ in range(BATCH)]
    for row in rows:
        row.staged = list(range(length))
        row.settle()
    check_window(state.window, rows)
    np.testing.assert_array_equal(state.window.total, [length] * BATCH)


@functools.cache
def _wide():
    return kvjax.streaming_llm(7, sinks=3, period=4)


def test_a_cache_knows_its_longest_prompt():
    assert init_windowed(make_spec(prompt=17), fresh(2, 4)).max_prompt == 17
