"""Tasks on threads: order, errors, and a clear end where a thread dies or cannot be started."""

from __future__ import annotations

import logging
import os
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from formats.errors import EnvironmentProblem
from packer.pool import Pool
from tests.support.packs import no_leaks

ROOT = Path(__file__).parents[2]


def test_results_come_in_the_order_of_the_items() -> None:
    def slow_first(item: int) -> int:
        time.sleep(0.05 if item == 0 else 0)
        return item * item

    with no_leaks(), Pool(3, "test") as pool:
        assert list(pool.in_order(slow_first, range(50))) == [item * item for item in range(50)]


def test_an_error_comes_out_and_what_has_not_begun_is_left_out() -> None:
    begun = []

    def one(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("item 1")

    with Pool(1, "test") as pool, pytest.raises(ValueError, match="item 1"):
        list(pool.in_order(one, range(1000)))
    assert len(begun) < 10


class Doomed(Future[int]):
    """A future that finds no memory for what it is told."""

    def set_result(self, result: int) -> None:
        raise MemoryError


@pytest.fixture
def doomed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread whose task has ended dies handing over its result, as one does that finds no memory for it."""
    monkeypatch.setattr("concurrent.futures.thread._base.Future", Doomed)
    monkeypatch.setattr(logging.getLogger("concurrent.futures"), "disabled", True)


@pytest.mark.usefixtures("doomed")
def test_the_result_of_a_dead_thread_is_not_waited_for() -> None:
    with Pool(2, "test") as pool:
        future = pool.submit(int)
        with pytest.raises(EnvironmentProblem, match="a thread died"):
            pool.result(future)
        pool.settle([future])


@pytest.mark.usefixtures("doomed")
def test_a_task_that_nobody_is_left_to_begin_is_not_waited_for() -> None:
    free = threading.Event()
    with Pool(1, "test") as pool:
        first, second = pool.submit(free.wait), pool.submit(int)
        free.set()
        pool.settle([first, second])
        assert not first.done()
        assert not second.done()
        with pytest.raises(EnvironmentProblem, match="a thread died"):
            pool.some_done([second])


SCARCE = """
import resource, sys
from pathlib import Path
from formats.errors import EnvironmentProblem
from packer.pool import Pool
from runtime.threads import Workers
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with Pool(1, "test") as pool:
        print(pool.result(pool.submit(int)))
except EnvironmentProblem as error:
    print(error.line())
with Workers(2) as workers:
    workers.run([lambda: print("a task")] * 2)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs the proc file system")
@pytest.mark.parametrize("room", range(0, 17, 2))
def test_no_thread_is_started_where_its_stack_does_not_fit(room: int) -> None:
    """At any limit a result or one clear line, and never a wait: below 12 MiB there is no room for a stack of 8."""
    stack = (8 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1])
    done = subprocess.run(
        [sys.executable, "-c", SCARCE, str(room << 20)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, stack),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, *rest = done.stdout.splitlines()
    refused = "no memory for another thread (expected 12 MiB)"
    assert first in ({refused} if room < 12 else {refused, "0"})
    assert rest == ["a task"] * 2
