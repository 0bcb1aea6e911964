"""The system calls that writing needs, replaceable one by one, and what their errors mean to a user."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from formats.errors import EnvironmentProblem

MAX_CALL_BYTES = 1 << 30  # Linux transfers at most 2,147,479,552 bytes a call

Buffer: TypeAlias = bytes | bytearray | memoryview

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_REASONS = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "disk quota exceeded",
    errno.EFBIG: "file would pass the largest size allowed here",
    errno.EROFS: "file system is read-only",
    errno.EACCES: "not permitted",
    errno.EPERM: "not permitted",
    errno.EIO: "the device reported an input/output error",
    errno.ENOSYS: "not supported by this file system",
}
_HINTS = {
    errno.ENOSPC: "make room, then give the same command again",
    errno.EDQUOT: "make room, then give the same command again",
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another file system",
    errno.EROFS: "choose an output on a file system that can be written",
    errno.EACCES: "choose an output that you may write to",
    errno.EPERM: "choose an output that you may write to",
    errno.EIO: "check the device; then give the same command again",
}


class NoSpace(EnvironmentProblem):
    """The device, or the user's share of it, is full."""


class WriteLost(EnvironmentProblem):
    """A flush failed, or what was read back is not what was written: the temporary is gone and must be built anew.

    A later flush that succeeds would prove nothing, so nobody may simply flush again.
    """


def _drop_cache(fd: int, offset: int, length: int) -> None:
    """Where the system takes no advice on its cache, reading back still checks what the cache holds."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def _allocate(fd: int, offset: int, length: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, length)
    else:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _lock(fd: int) -> None:
    """The kernel's lock on an open file: it goes away with the process that holds it, however that ends."""
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _available(path: Path) -> int:
    """Bytes that an unprivileged user may still write on the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class System:
    """The system calls that writing needs, each replaceable.

    ``open`` takes a path, flags and a mode; ``allocate`` sets space aside in a file, ``drop_cache`` lets the
    system forget clean cached pages, ``lock`` takes an exclusive lock or raises,
    ``available`` tells the bytes that are free for us at a path.
    """

    open: Callable[[Path, int, int], int] = os.open
    pwrite: Callable[[int, Buffer, int], int] = os.pwrite
    pread: Callable[[int, int, int], bytes] = os.pread
    fsync: Callable[[int], None] = os.fsync
    close: Callable[[int], None] = os.close
    truncate: Callable[[int, int], None] = os.ftruncate
    allocate: Callable[[int, int, int], None] = _allocate
    drop_cache: Callable[[int, int, int], None] = _drop_cache
    rename: Callable[[Path, Path], None] = os.replace
    link: Callable[[Path, Path], None] = os.link
    unlink: Callable[[Path], None] = os.unlink
    lock: Callable[[int], None] = _lock
    mkdir: Callable[[Path, int], None] = os.mkdir
    available: Callable[[Path], int] = _available


SYSTEM = System()


@contextmanager
def translated(
    doing: str, path: Path, *, system: System = SYSTEM, needed: int | None = None, offset: int | None = None
) -> Iterator[None]:
    """Turn an ``OSError`` into an :class:`EnvironmentProblem` that names the path, and the bytes when space ran out."""
    try:
        yield
    except OSError as error:
        raise problem(error, doing, path, system=system, needed=needed, offset=offset) from None


def problem(
    error: OSError,
    doing: str,
    path: Path,
    *,
    system: System = SYSTEM,
    needed: int | None = None,
    offset: int | None = None,
    kind: type[EnvironmentProblem] = EnvironmentProblem,
) -> EnvironmentProblem:
    """The error to raise for ``error``; ``needed`` is how many bytes more were wanted than are written."""
    code = error.errno or 0
    reason = _REASONS.get(code) or error.strerror or type(error).__name__
    expected = found = None
    if code in _NO_SPACE:
        kind = NoSpace if kind is EnvironmentProblem else kind
        expected = None if needed is None else f"{needed} bytes"
        with suppress(OSError):
            found = f"{system.available(path.parent)} bytes available"
    return kind(
        f"cannot {doing}: {reason}", where=path, offset=offset, expected=expected, found=found, hint=_HINTS.get(code)
    )


def write_all(
    fd: int, path: Path, offset: int, data: Buffer, *, needed: int | None = None, system: System = SYSTEM
) -> None:
    """Write all of ``data`` at ``offset``, in calls of at most 1 GiB, continuing after short writes.

    Args:
        fd: where to.
        path: the file's name, for messages.
        offset: bytes from the file's start.
        data: the bytes, contiguous.
        needed: bytes to be written from ``offset`` on in all, for the message when space runs out; those of ``data`` if
            not told.
        system: the system calls.

    Raises:
        EnvironmentProblem: with the path, the offset, and the bytes still needed and available when space ran out.
    """
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        wanted = (len(view) if needed is None else needed) - done  # what is written takes its space already
        try:
            written = system.pwrite(fd, view[done : done + MAX_CALL_BYTES], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise problem(error, "write", path, system=system, needed=wanted, offset=offset + done) from None
        if written <= 0:
            raise EnvironmentProblem("cannot write: the device takes no more bytes", where=path, offset=offset + done)
        done += written


def read_some(fd: int, length: int, offset: int, *, system: System = SYSTEM) -> bytes:
    """At most ``length`` bytes at ``offset``; none at the end of the file."""
    while True:
        try:
            return system.pread(fd, length, offset)
        except InterruptedError:
            continue
