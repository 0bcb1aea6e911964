"""Opening what should be a file of statistics, and telling at its beginning whether it is one."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from formats.errors import EnvironmentProblem, MoepackError, UsageError
from formats.files import read_exactly

FORMAT = "moepack-statistics"
HINT = "make statistics with moepack calibrate"
LENGTH_BYTES = 8  # of a safetensors file, before its header
_START_BYTES = 256  # the format stands within these


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor of a regular file.

    Raises:
        UsageError: there is no such file, or it is something else.
        EnvironmentProblem: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO must not wait for a writer
    except FileNotFoundError:
        raise UsageError("no such file", where=path) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=path) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError("not a regular file", where=path, hint=HINT)
        yield fd
    finally:
        os.close(fd)


def begins_as_header(start: bytes) -> bool:
    """Whether these bytes begin a safetensors file: a length that no text begins with, and a JSON object."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    return start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and length < 1 << 48


def is_statistics(path: Path) -> bool:
    """Whether a file begins as one of statistics does, for a message where something else is wanted."""
    try:
        with opened(path) as fd:
            size = min(os.fstat(fd).st_size, _START_BYTES)
            start = read_exactly(fd, 0, size, where=str(path)) if size else b""
    except MoepackError:  # whoever reads it next says what is the matter
        return False
    return begins_as_header(start) and FORMAT.encode() in start
