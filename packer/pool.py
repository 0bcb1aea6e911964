"""A few threads that work through tasks, and a clear end instead of a wait for ever where one of them dies.

A thread whose task ended may find no memory for handing over its result; it dies, and the result never comes. So nobody
waits for a result without looking, twice a second, whether the thread that owes it is alive.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from types import TracebackType
from typing import Any, Self, TypeVar

from formats.errors import EnvironmentProblem
from formats.starting import starting

POLL_SECONDS = 0.5
BACKLOG = 4  # tasks a thread that are handed out before their results are taken

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Pool:
    """``threads`` threads, started as they are needed. Use it in a ``with`` block, which waits for what is running."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = max(1, threads)
        self._name = f"{name}-{id(self):x}"
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix=self._name)
        self._owing: dict[Future[Any], list[threading.Thread]] = {}  # who runs what is not known to have ended

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown()

    def submit(self, task: Callable[..., _Result], *arguments: object) -> Future[_Result]:
        """Have a thread run ``task``; its result is waited for by the methods below.

        Raises:
            EnvironmentProblem: a thread is needed and cannot be started.
        """
        by: list[threading.Thread] = []

        def run() -> _Result:
            by.append(threading.current_thread())
            return task(*arguments)

        with starting() if len(self._alive()) < self.threads else nullcontext():
            future = self._executor.submit(run)
        self._owing[future] = by
        return future

    def some_done(self, running: Collection[Future[_Result]]) -> set[Future[_Result]]:
        """Those of ``running`` that have ended; waits for one, but not for long, so that the caller can look around.

        Raises:
            EnvironmentProblem: one of them never will.
        """
        done, others = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        for future in done:
            self._owing.pop(future, None)
        if any(self._is_lost(future) for future in others):
            raise EnvironmentProblem(
                "a thread died at its work, probably for want of memory", hint="allow more memory, or fewer jobs"
            )
        return done

    def result(self, future: Future[_Result]) -> _Result:
        """What a task gave.

        Raises:
            EnvironmentProblem: it never will.
            BaseException: what the task raised.
        """
        while not self.some_done([future]):
            pass
        return future.result()

    def settle(self, running: Iterable[Future[Any]]) -> None:
        """Wait until all of ``running`` have ended, as far as they will."""
        left = set(running)
        while left := {future for future in left if not (future.done() or self._is_lost(future))}:
            wait(left, timeout=POLL_SECONDS)

    def in_order(self, function: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """The results of ``function`` in the order of ``items``, a few items ahead of whoever takes them.

        If the caller stops early, or a result is an error, what has not begun is left out.
        """
        waiting: deque[Future[_Result]] = deque()
        try:
            for item in items:
                waiting.append(self.submit(function, item))
                if len(waiting) >= BACKLOG * self.threads:
                    yield self.result(waiting.popleft())
            while waiting:
                yield self.result(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    def _alive(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith(self._name)]

    def _is_lost(self, future: Future[Any]) -> bool:
        """Whether a result will never come: who ran it is dead, or nobody is left to begin."""
        by = self._owing.get(future, ())
        dead = not by[0].is_alive() if by else not self._alive()
        return dead and not future.done()
