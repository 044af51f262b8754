"""Staging buffer and window against lists of positions."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.shared import window as windows
from kvjax.shared.window import Window, init_window
from kvjax.staging import Counters, Staging, append, init_staging, take_staged
from kvjax.state import state
from tests.kvjax.support import POLICIES, each, make_spec, make_stream, prefilled, row_keys

BATCH, SLOTS, WIDEST = 3, 6, 3
SPEC = make_spec(head_dim=2, rope_frequencies=None)


@state
class Store:
    """A window and a staging buffer."""

    window: Window
    staging: Staging
    counters: Counters


@jax.jit
def stage(store, keys, values, lengths):
    staging, counters = append(store.staging, store.counters, keys, values, lengths)
    return dataclasses.replace(store, staging=staging, counters=counters)


@jax.jit
def compact(store):
    new, counters = take_staged(store.staging, store.counters)
    window, left = windows.slide(store.window, new)
    return Store(window, store.staging, counters), new, left


@functools.cache
def empty_store(sinks, recent):
    return Store(init_window(SPEC, sinks, recent), *init_staging(SPEC, SLOTS))


def tokens_at(firsts, count):
    """Returns tokens that encode their position p: keys p + 1 and values -(p + 1) in both heads."""
    position = np.asarray(firsts)[:, None] + np.arange(count) + 1.0
    keys = np.broadcast_to(position[:, :, None, None], (BATCH, count, 2, 2)).astype(np.float32)
    return keys, -keys


class Row:
    """One row as lists of positions."""

    def __init__(self, sinks, recent):
        self.limits, self.sinks, self.recent, self.staged, self.total = (sinks, recent), [], [], [], 0

    def compact(self):
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


def expected_keys(positions):
    """Returns the keys [2, n, 2] of tokens at these positions."""
    return np.broadcast_to(np.array(positions, np.float32)[:, None] + 1, (2, len(positions), 2))


def check_entries(keys, values, positions):
    np.testing.assert_array_equal(keys, expected_keys(positions))
    np.testing.assert_array_equal(values, -expected_keys(positions))


def check_store(store, rows):
    """Compares the window and the staging buffer with the rows' lists."""
    window, counters, recent = store.window, store.counters, store.window.recent
    np.testing.assert_array_equal(counters.count, [len(row.staged) for row in rows])
    for number, row in enumerate(rows):
        for slots, positions in (
            (slice(recent - len(row.recent), recent), row.recent),
            (slice(recent, recent + len(row.sinks)), row.sinks),
        ):
            check_entries(window.keys[number, :, slots], window.values[number, :, slots], positions)
        assert int(counters.first[number]) == row.total - len(row.staged)
        present = np.asarray(counters.present)[number]
        staged = np.asarray(store.staging.keys)[number, :, :SLOTS][:, present]
        np.testing.assert_array_equal(staged, expected_keys(row.staged))


appends = st.tuples(st.integers(1, WIDEST), st.lists(st.integers(0, WIDEST), min_size=BATCH, max_size=BATCH))
# None compacts; a pair appends that number of slots, with that number of tokens per row.
histories = st.lists(st.one_of(st.none(), appends), max_size=14)


@pytest.mark.parametrize(
    "sinks, recent", each([(2, 4), (0, 3), (3, 0), (0, 0), (2, 9)], quick=[(2, 4), (0, 3), (3, 0)])
)
@settings(max_examples=40, deadline=None)
@given(history=histories)
def test_staging_and_compaction_equal_list_operations(sinks, recent, history):
    store, rows = empty_store(sinks, recent), [Row(sinks, recent) for _ in range(BATCH)]
    offset, lost = 0, np.zeros(BATCH, int)
    for event in [*history, None]:
        if event is None:
            buffer, offset = np.asarray(store.staging.keys), 0
            store, new, left = compact(store)
            for number, row in enumerate(rows):
                staged, held = row.staged, len(row.sinks) + len(row.recent)
                first = row.total - len(staged)
                leaving = row.compact()
                # All staged tokens in order, and their slots.
                tokens = slice(len(staged))
                assert (int(new.count[number]), int(new.first[number])) == (len(staged), first)
                check_entries(new.keys[number, :, tokens], new.values[number, :, tokens], staged)
                np.testing.assert_array_equal(new.gather_staged(buffer)[number, :, tokens], expected_keys(staged))
                np.testing.assert_array_equal(new.position[number, tokens], staged)
                np.testing.assert_array_equal(new.present[number], np.arange(SLOTS) < len(staged))
                # The tokens that leave the window; `first` is the position after the sinks and all tokens that left.
                tokens = slice(len(leaving))
                assert (int(left.count[number]), int(store.window.total[number])) == (len(leaving), row.total)
                assert int(left.first[number]) == sinks + first - held
                check_entries(left.keys[number, :, tokens], left.values[number, :, tokens], leaving)
                assert not leaving or int(left.first[number]) == leaving[0]
        else:
            count, lengths = event[0], np.minimum(event[1], event[0])
            store = stage(store, *tokens_at([row.total for row in rows], count), lengths.astype(np.int32))
            if offset + count > SLOTS:  # a full buffer is not changed, and a fault is counted
                lost += lengths
            else:
                offset += count
                for row, length in zip(rows, lengths, strict=True):
                    row.staged += range(row.total, row.total + length)
                    row.total += int(length)
        assert int(store.counters.offset) == offset
        np.testing.assert_array_equal(store.counters.overflow, lost)
        check_store(store, rows)


@pytest.mark.parametrize("new, compact_every, slots", [(5, 64, 5), (64, 5, 5), (64, 64, 64)])
def test_a_staging_buffer_takes_at_most_max_new_tokens(new, compact_every, slots):
    cache, counters = kvjax.init(kvjax.Uniform(20, 2, 6, compact_every), make_spec(new=new), row_keys())
    assert counters.slots == cache.spec.staging_slots == slots
    assert cache.staging.keys.shape[2] == -(-slots // 8) * 8


@pytest.mark.parametrize("name", ["exact", "streaming_llm", "clusterkv"])
def test_a_cache_for_a_prompt_alone_can_be_read(name):
    query = make_stream(seed=1).queries[:, :1]
    outputs = [
        kvjax.normalize(kvjax.attend(*prefilled(POLICIES[name], spec=make_spec(new=new)), query)) for new in (0, 24)
    ]
    np.testing.assert_allclose(*outputs, atol=1e-6)
