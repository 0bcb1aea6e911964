"""Reads that go from the device straight into their slot, past the system's cache of pages, where that can be had.

What is kept is decided here, not by the system: a page cache beside our own would hold every byte twice and push out
what is needed more. Linux has O_DIRECT and macOS F_NOCACHE. Some file systems refuse direct mode when it is asked for,
others at the first transfer, so one real transfer is tried a file system; where it fails, reads are buffered, the pages
they leave in the cache are dropped, and the session says so once.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from formats.errors import FormatError
from formats.files import file_bytes, fill
from formats.layout import PAGE
from runtime.stream.memory import Area

# Reads under way at a time. A few long ones keep an idle device as busy as many do (1 to 8 reads of 4 MiB: 1.6 GB/s on
# one machine, 2 to 6 of them 1.9 to 2.1 on another); of short ones it takes more (80 KiB: 0.9 GB/s with 3, 1.1 with 6).
# While all processors compute, a reader waits for one before it can ask for more, so more bytes are under way than an
# idle device needs; in few long reads, for each costs them 0.2 ms beside what its bytes do (benchmarks/README.md).
UNDER_WAY_BYTES = 32 << 20
LEAST_READERS, MOST_READERS = 3, 8
Stamp = tuple[int, int, int]  # a file's length, and the times of its contents and of its inode

_NO_CACHE = getattr(fcntl, "F_NOCACHE", None)  # macOS
_DIRECT = getattr(os, "O_DIRECT", None)  # Linux, FreeBSD


def readers_for(part_bytes: int) -> int:
    """How many reads of that length should be under way at a time."""
    return min(max(-(-UNDER_WAY_BYTES // part_bytes), LEAST_READERS), MOST_READERS)


def _set_direct(fd: int, direct: bool) -> None:
    """Turn direct mode of an open file on or off; ``OSError`` where the system or the file refuses."""
    if _NO_CACHE is not None:
        fcntl.fcntl(fd, _NO_CACHE, int(direct))
    elif _DIRECT is not None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _DIRECT if direct else flags & ~_DIRECT)
    else:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def _forget(fd: int, offset: int, length: int) -> None:
    """Let the system drop pages that were read: they have their place in a slot now."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Calls:
    """The system calls of reading, each replaceable."""

    preadv: Callable[[int, Sequence[memoryview], int], int] = os.preadv
    set_direct: Callable[[int, bool], None] = _set_direct
    forget: Callable[[int, int, int], None] = _forget


CALLS = Calls()


class DirectReads:
    """Opens files for direct reads and remembers which file systems take them.

    Safe to use from several threads; close it when nothing reads any more.
    """

    def __init__(self, calls: Calls = CALLS) -> None:
        self.calls = calls
        self._devices: dict[int, bool] = {}
        self._files: list[StreamFile] = []
        self._notes: list[str] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files that were opened here. A second call does nothing."""
        with self._lock:
            files, self._files = self._files, []
        for file in files:
            file.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: file systems, or single files, that are read through the system's cache."""
        with self._lock:
            return tuple(self._notes)

    def open(self, fd: int, where: str) -> StreamFile:
        """Take over a descriptor of a file whose length is a whole number of pages, to be closed with all others."""
        device = os.fstat(fd).st_dev
        with self._lock:
            known = self._devices.get(device)
            if known is None:
                known = self._devices[device] = self._try(fd)
                if not known:
                    self._notes.append(f"{where}: the file system takes no direct reads, so the system's cache is used")
            file = StreamFile(self, fd, where)
            self._files.append(file)
        if known:
            file.go_direct()
        return file

    def refused(self, where: str) -> None:
        """A file turned out to take no direct reads although its file system does."""
        with self._lock:
            self._notes.append(f"{where}: takes no direct reads, so the system's cache is used")

    def _try(self, fd: int) -> bool:
        """Whether a transfer of one page works in direct mode."""
        page = Area(PAGE)
        try:
            self.calls.set_direct(fd, True)
            if self.calls.preadv(fd, [page.view], PAGE if file_bytes(fd) > PAGE else 0) == PAGE:
                return True
        except OSError:
            pass
        with suppress(OSError):
            self.calls.set_direct(fd, False)
        return False


class StreamFile:
    """An open file that is read in whole pages. Safe to use from several threads."""

    def __init__(self, reads: DirectReads, fd: int, where: str) -> None:
        self.where = where
        self._reads = reads
        self._fd = fd
        self._direct = False
        self._leaving = threading.Lock()

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def go_direct(self) -> None:
        """Turn to direct reads; a file that refuses stays as it is."""
        try:
            self._reads.calls.set_direct(self._fd, True)
            self._direct = True
        except OSError:
            self._reads.refused(self.where)

    def stamp(self) -> Stamp:
        """What would be different if the file had been written to."""
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def read(self, offset: int, target: memoryview, *, where: str) -> None:
        """Fill ``target`` with what stands at ``offset``.

        Direct where offset and length are whole pages; what comes back short of a page is read on buffered.

        Args:
            offset: bytes from the start of the file.
            target: all of it is filled.
            where: file and record, for messages.

        Raises:
            FormatError: the file ends before, or the device cannot deliver these bytes; with the offset.
            EnvironmentProblem: reading failed in another way.
        """
        fill(target, offset, lambda view, at: self._read_some(view, at, where), where=where)

    def _read_some(self, view: memoryview, offset: int, where: str) -> int:
        direct = self._direct
        if direct and (offset % PAGE or len(view) % PAGE):
            self._leave_direct()
        try:
            count = self._reads.calls.preadv(self._fd, [view], offset)
        except OSError as error:
            if error.errno == errno.EINVAL and direct:  # perhaps another thread has just left direct mode
                self._leave_direct()
                return self._read_some(view, offset, where)
            if error.errno == errno.EIO:
                raise FormatError(
                    f"cannot be read: {os.strerror(errno.EIO)}",
                    where=where,
                    offset=offset,
                    hint="the device does not deliver these bytes: copy the file from elsewhere",
                ) from None
            raise
        if not self._direct and count > 0:
            self._reads.calls.forget(self._fd, offset, count)
        return count

    def _leave_direct(self) -> None:
        """Buffered from here on. Other threads may be reading: their calls do as well without the flag.

        Whoever comes back from here finds the flag off, also while another thread is turning it off.
        """
        with self._leaving:
            if self._direct:
                self._reads.calls.set_direct(self._fd, False)
                self._direct = False
                self._reads.refused(self.where)
