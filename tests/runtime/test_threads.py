"""Workers: every task once, whoever does it; errors come out when nothing runs any more; bits do not depend on cuts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import pytest

from formats.encoded import RawMatrix, multiply
from runtime.threads import WORTH_SHARING, WORTH_SPLITTING, Coming, Workers, multiply_rows


def assert_(condition: bool) -> None:
    assert condition


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_every_task_runs_once(threads: int, count: int) -> None:
    done: list[int] = []
    before = threading.active_count()
    with Workers(threads) as workers:
        assert threading.active_count() == before  # none is started before it is needed
        for _ in range(3):
            done.clear()
            workers.run([lambda number=number: done.append(number) for number in range(count)])  # type: ignore[misc]
            assert sorted(done) == list(range(count))
        assert threading.active_count() <= before + threads - 1
    assert threading.active_count() == before


def test_helpers_take_part() -> None:
    """Two tasks that wait for each other need two threads."""
    meeting = threading.Barrier(2, timeout=20)
    with Workers(2) as workers:
        workers.run([meeting.wait, meeting.wait])


def test_the_caller_does_not_wait_for_busy_helpers() -> None:
    gate, done = threading.Event(), []
    with Workers(2) as workers:
        assert workers.submit(lambda: assert_(gate.wait(20)))
        workers.run([lambda: done.append(threading.get_ident())] * 3)
        gate.set()
    assert done == [threading.get_ident()] * 3


@pytest.mark.parametrize("threads", [1, 3])
def test_the_first_error_comes_out(threads: int) -> None:
    running: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        if number == 2:
            raise ZeroDivisionError
        running.remove(number)

    with Workers(threads) as workers:
        with pytest.raises(ZeroDivisionError):
            workers.run([lambda number=number: work(number) for number in range(30)])  # type: ignore[misc]
        assert running == [2]
        workers.run([lambda: running.append(0)] * 2)


def test_ranges_cover_everything_once_and_begin_at_units() -> None:
    with Workers(3) as workers:
        for total, unit in ((1000, 64), (65, 64), (64, 64), (7, 1), (1, 1)):
            ranges: list[tuple[int, int]] = []
            workers.split(total, lambda first, stop: ranges.append((first, stop)), worth=WORTH_SPLITTING, unit=unit)  # noqa: B023
            ranges.sort()
            assert ranges[0][0] == 0
            assert ranges[-1][1] == total
            assert all(before[1] == after[0] for before, after in pairwise(ranges))
            assert all(first % unit == 0 for first, _ in ranges)
            assert (len(ranges) > 1) == (total > unit)


def test_little_work_is_not_cut() -> None:
    ranges: list[tuple[int, int]] = []
    with Workers(3) as workers:
        workers.split(1000, lambda first, stop: ranges.append((first, stop)), worth=WORTH_SPLITTING - 1)
    assert ranges == [(0, 1000)]


@pytest.mark.parametrize("count", [1, 5])
def test_a_product_has_the_same_bits_with_any_number_of_threads(count: int) -> None:
    rng = np.random.default_rng(0)
    matrix = RawMatrix(1000, 1200, "F32", rng.standard_normal((1000, 1200), np.float32))
    inputs = rng.standard_normal((count, 1200), np.float32)
    expected = multiply(matrix, inputs)
    for threads in (1, 2, 3):
        with Workers(threads) as workers:
            assert np.array_equal(multiply_rows(workers, matrix, inputs), expected)


def shared_by(workers: Workers, total: int, **options: int) -> list[tuple[int, int]]:
    """The ranges that work is shared in, ascending."""
    ranges: list[tuple[int, int]] = []
    workers.share(total, lambda first, stop: ranges.append((first, stop)), **options)
    return sorted(ranges)


def test_work_is_shared_with_idle_helpers_alone() -> None:
    much = 10 * WORTH_SHARING
    gate = threading.Event()
    with Workers(3) as workers:
        assert shared_by(workers, 300, worth=much, unit=64) == [(0, 128), (128, 256), (256, 300)]
        until_idle(workers)
        assert shared_by(workers, 300, worth=2 * WORTH_SHARING) == [(0, 150), (150, 300)]  # of which each is worth it
        until_idle(workers)
        assert shared_by(workers, 300, worth=2 * WORTH_SHARING - 1) == [(0, 300)]
        assert shared_by(workers, 64, worth=much, unit=64) == [(0, 64)]
        until_idle(workers)
        assert workers.submit(lambda: assert_(gate.wait(20)))
        assert shared_by(workers, 300, worth=much) == [(0, 150), (150, 300)]
        until_idle(workers, but=1)
        assert workers.submit(lambda: assert_(gate.wait(20)))
        assert shared_by(workers, 300, worth=much) == [(0, 300)]
        gate.set()
    assert shared_by(workers, 300, worth=much) == [(0, 300)]  # closed
    with Workers(1) as alone:
        assert shared_by(alone, 300, worth=much) == [(0, 300)]


def until_idle(workers: Workers, *, but: int = 0) -> None:
    """Wait until as many helpers have nothing to do as can have: one that was late is not to be counted on."""
    end = time.monotonic() + 20
    while workers._given > but:
        assert time.monotonic() < end


def test_idle_helpers_take_part_in_what_is_shared() -> None:
    """Two ranges that wait for each other need two threads."""
    meeting = threading.Barrier(2, timeout=20)
    with Workers(2) as workers:
        workers.share(2, lambda first, stop: assert_(meeting.wait() >= 0), worth=2 * WORTH_SHARING)


def shared_by_a_helper(workers: Workers, work: Callable[[int, int], None], ended: list[BaseException | None]) -> None:
    """What a helper does while the asking thread waits for it."""
    end = time.monotonic() + 20
    while workers._waiting is None:
        assert time.monotonic() < end
    try:
        workers.share(2, work, worth=2 * WORTH_SHARING)
        ended.append(None)
    except BaseException as error:
        ended.append(error)


def test_the_thread_that_waits_takes_part_in_what_a_helper_shares() -> None:
    meeting = threading.Barrier(2, timeout=20)
    ended: list[BaseException | None] = []
    with Workers(2) as workers:
        for _ in range(20):
            news: SimpleQueue[None] = SimpleQueue()  # a token of the last round would end the waiting at once
            work = partial(shared_by_a_helper, workers, lambda first, stop: assert_(meeting.wait() >= 0), ended)
            assert workers.submit(lambda work=work, news=news: (work(), news.put(None)))  # type: ignore[misc]
            while not ended:
                workers.wait(news)
            assert ended.pop() is None


def test_the_thread_that_waits_for_its_tasks_takes_part_in_what_they_share() -> None:
    meeting = threading.Barrier(2, timeout=20)

    def task() -> None:
        if threading.current_thread() is not threading.main_thread():
            ended: list[BaseException | None] = []
            shared_by_a_helper(workers, lambda first, stop: assert_(meeting.wait() >= 0), ended)
            assert ended == [None]

    with Workers(2) as workers:
        both = threading.Barrier(2, timeout=20)  # so that each thread has one of the tasks
        workers.run([lambda: (both.wait(), task())] * 2)  # type: ignore[list-item]


@pytest.mark.parametrize("failing", ["helper", "asking thread"])
def test_an_error_in_what_is_shared_comes_out_where_it_was_shared(failing: str) -> None:
    meeting = threading.Barrier(2, timeout=20)
    ended: list[BaseException | None] = []
    news: SimpleQueue[None] = SimpleQueue()

    def work(first: int, stop: int) -> None:
        meeting.wait()
        if (threading.current_thread() is threading.main_thread()) == (failing == "asking thread"):
            raise ZeroDivisionError

    with Workers(2) as workers:
        assert workers.submit(lambda: (shared_by_a_helper(workers, work, ended), news.put(None)))  # type: ignore[func-returns-value, arg-type, return-value]
        while not ended:
            workers.wait(news)
        assert isinstance(ended[0], ZeroDivisionError)


def test_closing() -> None:
    workers = Workers(3)
    workers.run([lambda: None] * 3)
    workers.close()
    workers.close()
    assert not workers.submit(lambda: None)
    done: list[int] = []
    workers.run([lambda: done.append(1)] * 3)  # the caller can still do it
    assert done == [1, 1, 1]
    with pytest.raises(ValueError, match="at least one"):
        Workers(0)


def test_what_is_coming() -> None:
    good, bad = Coming(lambda: 5), Coming(lambda: 1 // 0)
    assert not good.done
    good.run(), bad.run()
    assert (good.done, good.failed, good.result(), good.result()) == (True, False, 5, 5)
    assert (bad.done, bad.failed) == (True, True)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.result()
