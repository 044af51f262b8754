"""The scheduler decides on numbers: these tests have no model and no arrays."""

import hypothesis
import hypothesis.strategies as st
import pytest

from kvjax_models.engine.scheduler import Mixes, Scheduler, Waiting, width_for


def start(scheduler):
    return [request.number for request in scheduler.start()]


def add(scheduler, *numbers, **options):
    for number in numbers:
        scheduler.add(Waiting(number, **{"row_bytes": 10, "prompt": number, "num_tokens": 8} | options))


def test_requests_start_in_order():
    scheduler = Scheduler(2)
    add(scheduler, 0, 1, 2)
    assert [start(scheduler) for _ in range(3)] == [[0], [1], []]
    assert scheduler.num_free_rows == 0 and scheduler.reserved_bytes == 20
    scheduler.finish(0)
    assert start(scheduler) == [2]


def test_a_request_waits_for_bytes_and_no_other_passes_it():
    scheduler = Scheduler(8, max_bytes=35)
    add(scheduler, 0)
    add(scheduler, 1, row_bytes=30)
    add(scheduler, 2)
    assert start(scheduler) == [0] and start(scheduler) == []
    scheduler.finish(0)
    assert start(scheduler) == [1] and start(scheduler) == []
    scheduler.max_bytes = 40
    assert start(scheduler) == [2] and scheduler.reserved_bytes == 40


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ("aaaa", [0, 1, 2, 3]),
        ("aaa", [0, 1]),  # a batch of three would be a program of its own
        ("abaa", [0, 2]),  # the other size waits for its own turn
        ("a", [0]),
    ],
)
def test_prompts_of_one_size_are_one_batch(waiting, expected):
    scheduler = Scheduler(8)
    for number, batch in enumerate(waiting):
        add(scheduler, number, batch=batch)
    assert start(scheduler) == expected


def test_batches_have_limits():
    scheduler = Scheduler(3, max_batch_tokens=60)
    add(scheduler, *range(8), batch="a", num_tokens=20, pads=True)
    assert start(scheduler) == [0, 1, 2]  # 3 rows, 60 tokens
    scheduler = Scheduler(8, max_bytes=25)
    add(scheduler, *range(8), batch="a", pads=True)
    assert start(scheduler) == [0, 1]


def test_rows_without_a_request_have_bytes():
    for max_bytes, expected in ((40, [0, 1, 2]), (39, [0, 1])):
        scheduler = Scheduler(8, max_bytes)
        add(scheduler, 0, 1, 2, batch="a", pads=True)
        assert start(scheduler) == expected


def test_equal_prompts_start_with_the_first_one():
    scheduler = Scheduler(8)
    add(scheduler, 0, 2, prompt="x")
    add(scheduler, 1, batch="a")
    add(scheduler, 3, prompt="x", row_bytes=7)
    assert start(scheduler) == [0, 2, 3] and scheduler.reserved_bytes == 27


def test_a_failed_batch_is_prefilled_one_by_one():
    scheduler = Scheduler(2)
    add(scheduler, 0, 1, batch="a")
    scheduler.retry(scheduler.start())
    assert scheduler.num_free_rows == 2 and start(scheduler) == [0] and start(scheduler) == [1]


@hypothesis.given(
    rows=st.integers(1, 4),
    max_bytes=st.integers(10, 60),
    requests=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=20),
    choices=st.lists(st.sampled_from(["start", "retry", "finish", "cancel"]), max_size=40),
)
def test_every_request_starts_once_within_the_limits(rows, max_bytes, requests, choices):
    scheduler = Scheduler(rows, max_bytes)
    for number, (size, prompt, batch, pads) in enumerate(requests):
        scheduler.add(Waiting(number, size, prompt, 8, batch or None, pads))
    ended = []
    for choice in [*choices, *["start", "finish"] * (len(requests) + 1)]:
        if choice in ("start", "retry"):
            started = scheduler.start()
            if choice == "retry" and len(started) > 1:
                scheduler.retry(started)
        elif choice == "finish":
            for number in [*scheduler.started]:
                scheduler.finish(number)
                ended.append(number)
        elif scheduler.waiting:
            number = scheduler.waiting[-1].number
            scheduler.finish(number)
            ended.append(number)
        assert len(scheduler.started) <= rows and scheduler.reserved_bytes <= max_bytes
        assert not {request.number for request in scheduler.waiting} & {*scheduler.started, *ended}
    assert sorted(ended) == [*range(len(requests))]


@hypothesis.given(st.integers(1, 100), st.integers(0, 100))
def test_widths_follow_the_rows(rows, width):
    chosen = width_for(rows, width)
    assert rows <= chosen and width_for(rows, chosen) == chosen
    assert chosen == width or chosen < rows + 4
    assert len({width_for(count) for count in range(1, rows + 1)}) <= rows // 4 + 3


def test_groups_run_by_one_program_after_they_ran_apart():
    mixes = Mixes(max_groups=2)
    assert mixes.split(["a"]) == [[0]] and mixes.split("abc") == [[0], [1], [2]]
    for _ in range(4):
        assert mixes.split("ab") == [[0], [1]]
        mixes.count("ab", 8)
    assert mixes.split("ab") == [[0, 1]] and mixes.split("ac") == [[0], [1]]
    assert mixes.split("aabb") == [[0, 2], [1, 3]]  # programs of two groups at most
    assert mixes.split("abc") == [[0, 1], [2]]
    for first in range(100):  # further mixes stay apart
        mixes.count([first, first + 1], 100)
    programs = sum(len(mixes.split([first, first + 1])) == 1 for first in range(100))
    assert programs + 1 == 16
