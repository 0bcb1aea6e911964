"""Threads for arithmetic: independent pieces of work, shared between the caller and a few helpers.

A piece writes its own part of a result, so neither how work is cut nor who does it shows in a result's bits.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from formats.encoded import EncodedMatrix, multiply

Single = NDArray[np.float32]

ROWS_TOGETHER = 64  # rows of a piece are a multiple of it: the block of the codec rvq, and whole cache lines of outputs
WORTH_SPLITTING = 1 << 20  # multiplications; below about 0.1 ms of them, handing work over costs more than it gains
PIECES_EACH = 2  # a thread; more than one, so that a thread that starts late is not waited for


class Workers:
    """``threads`` threads in all, the calling one included; none is started before it is needed.

    One thread at a time asks for work. Helpers may also be given single tasks by anyone (``submit``).
    """

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError("at least one thread")
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, "moepack-worker") if threads > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the helpers, after what they are at. A second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def submit(self, task: Callable[[], None]) -> bool:
        """Have a helper run ``task``, which must not raise, when one is free; False if there are no helpers."""
        if self._pool is None:
            return False
        self._pool.submit(task)
        return True

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all ``tasks``, in any order, and return when all have ended.

        The caller does whatever no helper has begun, so it never waits for helpers that are busy elsewhere.

        Raises:
            BaseException: the first that a task raised; tasks not begun by then are left out, running ones have ended.
        """
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                task()
            return
        batch = _Batch(tasks)
        helpers: list[Future[None]] = []
        try:
            for _ in range(min(self.threads, len(tasks)) - 1):
                helpers.append(self._pool.submit(batch.work))
            batch.work()
        finally:
            batch.stop()
            wait([helper for helper in helpers if not helper.cancel()])
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
        pieces = PIECES_EACH * self.threads
        if self._pool is None or worth < WORTH_SPLITTING or total <= unit:
            work(0, total)
            return
        step = -(-total // (pieces * unit)) * unit
        self.run([_Range(work, first, min(first + step, total)) for first in range(0, total, step)])


class _Range:
    """A call of ``work`` for one range."""

    def __init__(self, work: Callable[[int, int], None], first: int, stop: int) -> None:
        self._work, self._first, self._stop = work, first, stop

    def __call__(self) -> None:
        self._work(self._first, self._stop)


class _Batch:
    """Tasks that several threads take one by one."""

    def __init__(self, tasks: Sequence[Callable[[], None]]) -> None:
        self._tasks = tasks
        self._next = itertools.count()
        self._lock = threading.Lock()
        self._stopped = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        """No task is begun any more."""
        self._stopped = True

    def work(self) -> None:
        """Take tasks until there are none; keep the first error and stop at it."""
        while not self._stopped:
            with self._lock:
                number = next(self._next)
            if number >= len(self._tasks):
                return
            try:
                self._tasks[number]()
            except BaseException as error:
                with self._lock:
                    self.error = self.error or error
                self._stopped = True


def multiply_rows(workers: Workers, matrix: EncodedMatrix, inputs: Single) -> Single:
    """inputs x matrix^T by all workers, each a range of the matrix' rows: float32 [n, cols] to [n, rows]."""
    count = inputs.shape[0]
    out = np.empty((count, matrix.rows), np.float32)

    def work(first: int, stop: int) -> None:
        multiply(matrix, inputs, first=first, stop=stop, out=out)

    workers.split(matrix.rows, work, worth=count * matrix.rows * matrix.cols, unit=ROWS_TOGETHER)
    return out
