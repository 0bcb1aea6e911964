"""Stopping a long command: where there is something to finish, in two steps; else at once, but in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130
_SHOW_CURSOR = b"\x1b[?25h\n"


@contextmanager
def stop_on_signals(message: str) -> Iterator[threading.Event]:
    """Within the ``with`` block SIGINT and SIGTERM set the event; a second one ends the process with 130.

    Args:
        message: written to stderr when the first signal arrives.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            if os.isatty(2):
                os.write(2, _SHOW_CURSOR)  # which a bar of progress hides
            os._exit(_INTERRUPTED)
        stop.set()
        # Not through the buffered stream: the signal may have interrupted a write to it.
        os.write(2, f"\n{message}\n".encode("utf-8", "backslashreplace"))

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_by_term() -> Iterator[None]:
    """Within the ``with`` block SIGTERM raises KeyboardInterrupt, as SIGINT does everywhere: files are cleaned up."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
