"""What a folder holds of a repository: files compared with their digests, pointers told from files, and free space."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

from formats.errors import EnvironmentProblem, Interrupted
from formats.shard import impostor
from packer.fetch.listing import Fetched, FileDigest, RemoteFile

READ_BYTES = 8 << 20
RESERVE_BYTES = 4 << 20  # receipts, folders, rounding to blocks


def compare(
    directory: Path, file: RemoteFile, *, stop: threading.Event, report: Callable[[int], None]
) -> Fetched | str:
    """Compare a file of a folder with the listing, from its first byte to its last. Links to files are followed.

    Returns:
        The file, or in a few words what is wrong with it.

    Raises:
        Interrupted: ``stop`` was set.
        EnvironmentProblem: it cannot be read.
    """
    path = directory / file.path
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return "is absent"
    except OSError as error:
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=path) from None
    try:
        before = os.fstat(fd)
        if not stat.S_ISREG(before.st_mode):
            return "is not a regular file"
        if before.st_size != file.bytes:
            pointer = impostor(os.pread(fd, 1024, 0)) if before.st_size <= 1024 else None
            is_pointer = pointer is not None and "LFS" in pointer
            return f"is {pointer}" if is_pointer else f"has {before.st_size} bytes instead of {file.bytes}"
        digest = FileDigest(file)
        position = 0
        while piece := os.pread(fd, READ_BYTES, position):
            if stop.is_set():
                raise Interrupted("stopped")
            digest.update(piece)
            position += len(piece)
            report(len(piece))
        after = os.fstat(fd)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read: {error.strerror}", where=path) from None
    finally:
        os.close(fd)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        return "changed while it was read"
    if not digest.right():
        report(-position)
        return f"has other bytes: {digest.found()} instead of {file.digest}"
    return Fetched(file.path, file.bytes, digest.sha256, before.st_mtime_ns, 0)


def free_bytes(directory: Path) -> int | None:
    """Bytes that this user may still write below ``directory``; None if its file system does not say.

    A file system without any blocks at all is one that does not count them; one with blocks and none free is full.
    """
    found = os.statvfs(directory)
    return None if found.f_blocks == 0 else found.f_bavail * found.f_frsize


def check_space(directory: Path, needed: int, *, free: Callable[[Path], int | None] = free_bytes) -> bool:
    """Refuse to begin what will not fit.

    Args:
        directory: where files are to go.
        needed: bytes that are still to be written there.
        free: says what is available.

    Returns:
        Whether the free space is known.

    Raises:
        EnvironmentProblem: too little, with both numbers.
    """
    try:
        available = free(directory)
    except OSError as error:
        raise EnvironmentProblem(f"cannot look at the file system: {error.strerror}", where=directory) from None
    if available is None:
        return False
    wanted = needed + RESERVE_BYTES if needed else 0
    if available < wanted:
        raise EnvironmentProblem(
            "too little space on the device",
            where=directory,
            expected=f"{wanted} bytes",
            found=f"{available} bytes available",
            hint="make room or choose another folder; what has arrived is kept",
        )
    return True
