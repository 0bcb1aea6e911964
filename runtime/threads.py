"""Threads for arithmetic and for reading: independent pieces of work, shared between the caller and a few helpers.

A piece writes its own part of a result, so neither how work is cut nor who does it shows in a result's bits.

An interruption (a signal whose handler raises) may hit the main thread anywhere. Waiting is therefore done on
``SimpleQueue``, which hands over a token or raises and holds no lock meanwhile; a condition of ``threading`` may come
back without its lock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from formats.encoded import EncodedMatrix, multiply
from formats.errors import EnvironmentProblem
from formats.starting import start_some

Single = NDArray[np.float32]
Result = TypeVar("Result")

ROWS_TOGETHER = 64  # rows of a piece are a multiple of it: the block of the codec rvq, and whole cache lines of outputs
WORTH_SPLITTING = 1 << 20  # multiplications; below about 0.1 ms of them, handing work over costs more than it gains
PIECES_EACH = 2  # a thread; more than one, so that a thread that starts late is not waited for
WORTH_SHARING = 1 << 21  # multiplications of a range; each range of rvq rows makes tables anew, as long as 1 << 19 take


class Workers:
    """``threads`` threads in all, the calling one included; none is started before it is needed.

    One thread at a time asks for work. Helpers may also be given single tasks by anyone (``submit``), and whoever is at
    a piece of work may share it with those who have none (``share``).
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError("at least one thread")
        self.threads = threads
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._helpers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._given = 0  # tasks that helpers are at or will be
        self._shared: deque[_Batch] = deque()  # what helpers share with the asking thread
        self._visited: _Batch | None = None  # of that, what the asking thread takes part in
        self._waiting: SimpleQueue[None] | None = None  # where the asking thread waits for news with nothing to do

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the helpers, after what they are at. A second call does nothing."""
        self._closed = True
        self._leave()
        self._tasks.put(None)
        for helper in self._helpers:
            helper.join()

    def submit(self, task: Callable[[], None]) -> bool:
        """Have a helper run ``task``, which must not raise, when one is free; False if there are no helpers."""
        if self.threads == 1 or self._closed:
            return False
        with self._lock:
            if absent := self.threads - 1 - len(self._helpers):
                try:
                    for helper in start_some(
                        threading.Thread(target=self._help, name="moepack-worker", daemon=True) for _ in range(absent)
                    ):
                        self._helpers.append(helper)  # one by one: an interruption must not lose those that run
                except EnvironmentProblem:  # no more threads: those that there are do the work, or the caller alone
                    if not self._helpers:
                        return False
            self._given += 1
        self._tasks.put(task)
        return True

    def _help(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            task()
            with self._lock:
                self._given -= 1
        self._tasks.put(None)  # for the next one

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all ``tasks``, in any order, and return when all have ended.

        The caller does whatever no helper has begun, so it never waits for helpers that are busy elsewhere.

        Raises:
            BaseException: the first that a task raised; tasks not begun by then are left out, running ones have ended.
        """
        if self.threads == 1 or len(tasks) < 2:
            for task in tasks:
                task()
            return
        batch = _Batch(tasks)
        try:
            for _ in range(min(self.threads, len(tasks)) - 1):
                self.submit(batch.help)
            batch.take_part()
        finally:
            batch.end(self.wait)
        if batch.error is not None:
            raise batch.error

    def split(self, total: int, work: Callable[[int, int], None], *, worth: int, unit: int = 1) -> None:
        """Call ``work(first, stop)`` for ranges that make up 0 to ``total``.

        Args:
            total: how many items there are.
            work: does a range of them.
            worth: multiplications in all; a small amount is not cut.
            unit: ranges begin at multiples of it.
        """
        if self.threads == 1 or worth < WORTH_SPLITTING or total <= unit:
            work(0, total)
            return
        step = -(-total // (PIECES_EACH * self.threads * unit)) * unit
        self.run(_ranges(total, step, work))

    def share(self, total: int, work: Callable[[int, int], None], *, worth: int, unit: int = 1) -> None:
        """As :meth:`split`, but from any thread at a piece of work, and only with those that have nothing to do.

        There are as many ranges as threads, since each costs something. Where nobody is idle, or ranges would be too
        small to be worth it, the caller does everything.
        """
        with self._lock:
            waiting = self._waiting
            idle = 0 if self._closed else max(self.threads - 1 - self._given, 0) + (waiting is not None)
        ranges = min(1 + idle, worth // WORTH_SHARING, -(-total // unit))
        if ranges < 2:
            work(0, total)
            return
        step = -(-total // (ranges * unit)) * unit
        batch = _Batch(_ranges(total, step, work))
        try:
            for _ in range(ranges - 1 - (waiting is not None)):
                self.submit(batch.help)
            if waiting is not None:
                with self._lock:
                    self._shared.append(batch)
                waiting.put(None)
            batch.take_part()
        finally:
            batch.end(SimpleQueue.get)
        if batch.error is not None:
            raise batch.error

    def wait(self, news: SimpleQueue[None]) -> None:
        """What the asking thread does instead of ``news.get()``: take a token, or take part in what a helper shares.

        Comes back after either, so whoever waits for something looks again. An interruption leaves nothing behind that
        a helper would wait for.
        """
        try:
            with self._lock:
                self._visited = self._open_batch()
                self._waiting = news if self._visited is None else None
            if self._visited is None:
                news.get()
                with self._lock:
                    self._waiting = None
                    self._visited = self._open_batch()
            if self._visited is not None:
                self._visited.visit()
        finally:
            self._waiting = None
            self._leave()

    def _open_batch(self) -> _Batch | None:
        """A shared batch that has something left to be done."""
        while self._shared and self._shared[0].exhausted:
            self._shared.popleft()
        return self._shared[0] if self._shared else None

    def _leave(self) -> None:
        """The asking thread takes no part in what is shared any more, wherever an interruption hit it."""
        if self._visited is not None:
            self._visited.leave()
            self._visited = None


def _ranges(total: int, step: int, work: Callable[[int, int], None]) -> list[Callable[[], None]]:
    """A task for each range of ``step`` items, the last of what is left."""
    return [partial(work, first, min(first + step, total)) for first in range(0, total, step)]


class _Batch:
    """Tasks that several threads take one by one.

    Attributes:
        error: the first one.
    """

    def __init__(self, tasks: Sequence[Callable[[], None]]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._next = 0
        self._helping = 0  # helpers that are at a task
        self._visiting = False  # a thread that may be interrupted is at a task
        self._ended: SimpleQueue[None] = SimpleQueue()
        self.error: BaseException | None = None

    @property
    def exhausted(self) -> bool:
        """Whether all tasks were taken."""
        return self._next >= len(self._tasks)

    def take_part(self) -> None:
        """What the caller does: take tasks until there are none."""
        while (task := self._take()) is not None:
            self._do(task)

    def help(self) -> None:
        """What a helper does: the same, and say when it has ended one."""
        while (task := self._take(helping=1)) is not None:
            self._do(task)
            with self._lock:
                self._helping -= 1
            self._ended.put(None)

    def visit(self) -> None:
        """What a thread does that helps and may be interrupted; ``leave`` follows, whatever happens."""
        while (task := self._take(visiting=True)) is not None:
            self._do(task)
            with self._lock:
                self._visiting = False
            self._ended.put(None)

    def leave(self) -> None:
        """The visitor is at no task any more; if it was interrupted on the way to one or from it, the batch fails."""
        with self._lock:
            if self._visiting:
                self.error = self.error or InterruptedError("interrupted")
                self._next = len(self._tasks)
                self._visiting = False
        self._ended.put(None)

    def end(self, wait: Callable[[SimpleQueue[None]], None]) -> None:
        """Let nobody begin on another task, and wait until nobody else is at one; ``wait`` takes tokens."""
        with self._lock:
            self._next = len(self._tasks)
        wait_out(lambda: not (self._helping or self._visiting), partial(wait, self._ended))

    def _take(self, *, helping: int = 0, visiting: bool = False) -> Callable[[], None] | None:
        with self._lock:
            if self.exhausted:
                return None
            self._next += 1
            self._helping += helping
            self._visiting |= visiting
            return self._tasks[self._next - 1]

    def _do(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            with self._lock:
                self.error = self.error or error
                self._next = len(self._tasks)


def wait_out(over: Callable[[], bool], wait: Callable[[], None]) -> None:
    """Wait, again and again, until something is over that will be soon; an interruption comes out afterwards."""
    interruption: BaseException | None = None
    while True:
        try:
            while not over():
                wait()
            break
        except BaseException as error:
            interruption = error
    if interruption is not None:
        raise interruption


class Coming(Generic[Result]):
    """What a job will give, which another thread may be doing."""

    def __init__(self, job: Callable[[], Result]) -> None:
        self._job = job
        self._given: Result | None = None
        self._error: BaseException | None = None
        self._ended: SimpleQueue[None] = SimpleQueue()
        self.done = False

    def run(self) -> None:
        """Do the job."""
        try:
            self._given = self._job()
        except BaseException as error:
            self._error = error
        self.done = True
        self._ended.put(None)

    def wait(self) -> None:
        """Return when the job has ended."""
        while not self.done:
            self._ended.get()

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._error is not None

    def result(self) -> Result:
        """What the job gave, once it has ended.

        Raises:
            BaseException: what the job raised.
        """
        self.wait()
        if self._error is not None:
            raise self._error
        return self._given  # type: ignore[return-value]  # it has ended without an error


def multiply_rows(workers: Workers, matrix: EncodedMatrix, inputs: Single) -> Single:
    """inputs x matrix^T by all workers, each a range of the matrix' rows: float32 [n, cols] to [n, rows]."""
    count = inputs.shape[0]
    out = np.empty((count, matrix.rows), np.float32)

    def work(first: int, stop: int) -> None:
        multiply(matrix, inputs, first=first, stop=stop, out=out)

    workers.split(matrix.rows, work, worth=count * matrix.rows * matrix.cols, unit=ROWS_TOGETHER)
    return out
