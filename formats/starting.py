"""Starting threads where memory may be short.

The interpreter's ``Thread.start`` waits without end for a thread that has no memory for its first steps
(python/cpython, issue 140746). So whoever starts one sees first whether there is room for it: then a process at its
limit says so instead of standing still.
"""

from __future__ import annotations

import mmap
import resource
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from formats.errors import EnvironmentProblem

FIRST_STEPS = 4 << 20  # bytes beside its stack; the interpreter's first objects take an arena of at most one MiB
USUAL_STACK = 8 << 20  # bytes, where the system names no limit


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        EnvironmentProblem: as of :func:`starting`.
    """
    with starting():
        thread.start()


def start_some(threads: Iterable[threading.Thread]) -> Iterator[threading.Thread]:
    """Start threads, or the first of them that there is room for: each is handed out as soon as it runs.

    Raises:
        EnvironmentProblem: there is not even room for one.
    """
    none = True
    for thread in threads:
        try:
            start(thread)
        except EnvironmentProblem:
            if none:
                raise
            return
        none = False
        yield thread


@contextmanager
def starting() -> Iterator[None]:
    """Around whatever starts a thread.

    Raises:
        EnvironmentProblem: its stack and its first steps do not fit into the memory that this process may still take,
            or the system allows no more threads.
    """
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    need = (USUAL_STACK if stack == resource.RLIM_INFINITY else stack) + FIRST_STEPS
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)  # as stacks are taken
    try:
        mmap.mmap(-1, need, flags=flags).close()
    except (OSError, MemoryError):
        raise EnvironmentProblem(
            "no memory for another thread",
            expected=f"{need >> 20} MiB",
            hint="allow the process more memory, or fewer jobs or threads",
        ) from None
    try:
        yield
    except RuntimeError:
        raise EnvironmentProblem(
            "no more threads can be started", hint="raise the limit of processes, or allow fewer jobs or threads"
        ) from None
