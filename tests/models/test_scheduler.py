"""The scheduler decides on numbers: these tests have no model and no arrays."""

import hypothesis
import hypothesis.strategies as st
import pytest

from kvjax_models.engine.scheduler import Scheduler, Waiting


def start(scheduler, **options):
    return {row: request.number for row, request in scheduler.start(**options).items()}


def add(scheduler, *numbers, **options):
    for number in numbers:
        scheduler.add(Waiting(number, number, **{"num_tokens": 8} | options))


def test_requests_get_rows_in_order():
    scheduler = Scheduler(2)
    add(scheduler, 0, 1, 2)
    for expected in ({0: 0}, {1: 1}, {}):
        assert start(scheduler) == expected
        scheduler.run()
    assert scheduler.num_free_rows == 0 and [one.number for one in scheduler.waiting] == [2]
    scheduler.free([0])
    assert start(scheduler) == {0: 2} and scheduler.num_free_rows == 0


def test_requests_of_a_busy_group_let_others_pass():
    scheduler = Scheduler(4, groups=2)
    for number, prefix in enumerate("aaabc"):
        add(scheduler, number, prefix=prefix)
    rows = []
    while started := start(scheduler):
        rows.append(started)
        scheduler.run()
    assert rows == [{0: 0}, {1: 1}, {2: 3}]  # the third of "a" waits, "b" passes, and "c" has no group
    assert scheduler.prefixes == ["a", "b"]
    scheduler.free([2])
    assert start(scheduler) == {2: 4} and scheduler.prefixes == ["a", "c"]


def test_prefixes_stay_until_their_group_is_needed():
    scheduler = Scheduler(2, groups=2)
    for prefix in "ab":
        add(scheduler, 0, prefix=prefix)
        [row] = start(scheduler)
        scheduler.run()
        scheduler.free([row])
        assert "a" in scheduler.prefixes
    assert scheduler.prefixes == ["a", "b"]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([8, 8, 8, 8], [0, 1, 2, 3]),
        ([8, 8], [0, 1]),  # half of the rows: twice the time of the blocks alone
        ([8, 100], [0]),  # all rows would be padded to 13 blocks
        ([8], [0]),
    ],
)
def test_suffixes_are_prefilled_together_if_that_saves_time(lengths, expected):
    scheduler = Scheduler(4, groups=1, block_size=8)
    for number, length in enumerate(lengths):
        scheduler.add(Waiting(number, number, length, prefix="a", can_batch=True))
    assert list(start(scheduler).values()) == expected


def test_equal_prompts_wait_for_the_first_one():
    scheduler = Scheduler(4, groups=1, block_size=8)
    for number, prompt in enumerate("xyx"):
        scheduler.add(Waiting(number, prompt, 8, prefix="a", can_batch=True))
    assert start(scheduler) == {0: 0, 1: 1}
    scheduler.run()
    assert start(scheduler, ready_prompt="x") == {2: 2}


def test_a_failed_batch_is_prefilled_one_by_one():
    scheduler = Scheduler(2, groups=1, block_size=8)
    for number in range(2):
        scheduler.add(Waiting(number, number, 8, prefix="a", can_batch=True))
    assert start(scheduler) == {0: 0, 1: 1}
    assert scheduler.retry() == [] and scheduler.num_free_rows == 2
    assert start(scheduler) == {0: 0}
    assert scheduler.retry() == [0]
    assert start(scheduler) == {0: 1}


def test_requests_can_be_cancelled_before_they_run():
    scheduler = Scheduler(1)
    add(scheduler, 0, 1)
    start(scheduler)
    assert scheduler.cancel(1) and scheduler.cancel(0) and not scheduler.cancel(2)
    assert not scheduler.waiting and not scheduler.prefilling and scheduler.num_free_rows == 1


@hypothesis.given(
    groups=st.integers(0, 3),
    size=st.integers(1, 3),
    requests=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30), st.booleans()), max_size=20),
    choices=st.lists(st.sampled_from(["run", "retry", "free", "cancel"]), max_size=40),
)
def test_every_request_runs_once_in_a_row_with_its_prefix(groups, size, requests, choices):
    scheduler = Scheduler(max(groups, 1) * size, groups, block_size=8)
    prefixes, ended = {}, []
    for number, (prefix, length, can_batch) in enumerate(requests):
        prefixes[number] = f"prefix {prefix}" if groups else None
        scheduler.add(Waiting(number, number, length, prefixes[number], can_batch and groups > 0))
    for choice in [*choices, *["run", "free"] * (2 * len(requests) + 2)]:
        if not scheduler.prefilling:
            scheduler.start()
        for row, request in scheduler.prefilling.items():
            assert row not in scheduler.running
            if groups:
                assert scheduler.prefixes[row // size] == request.prefix
        if choice == "run":
            scheduler.run()
        elif choice == "retry" and scheduler.prefilling:
            ended += scheduler.retry()
        elif choice == "free" and scheduler.running:
            row = min(scheduler.running)
            ended.append(scheduler.running[row])
            scheduler.free([row])
        elif choice == "cancel" and scheduler.waiting:
            number = scheduler.waiting[-1].number
            assert scheduler.cancel(number)
            ended.append(number)
        occupied = len(scheduler.running) + len(scheduler.prefilling)
        assert scheduler.num_free_rows == scheduler.rows - occupied >= 0
    assert sorted(ended) == sorted(prefixes) and not scheduler.running
