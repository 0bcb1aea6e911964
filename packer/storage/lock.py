"""One writer at a time: a lock file that the kernel releases when its holder dies, however that happens."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from formats.errors import EnvironmentProblem
from packer.storage.system import SYSTEM, System, problem, read_some, translated, write_all


@contextmanager
def exclusive(path: Path, *, system: System = SYSTEM) -> Iterator[None]:
    """Hold the lock file at ``path`` for the duration of a ``with`` block, then delete it.

    The lock is the kernel's and dies with its holder: a file that a killed process left behind does not block, and
    the process number in it is for messages only.

    Raises:
        EnvironmentProblem: another process holds it (nothing was touched), or the file system has no locks.
    """
    fd = _acquire(path, system)
    try:
        yield
    finally:
        # Deleted while still held: whoever opened the old file meanwhile finds that its name is gone, and retries.
        with suppress(OSError):
            system.unlink(path)
        with suppress(OSError):
            system.close(fd)


def _acquire(path: Path, system: System) -> int:
    for _ in range(100):
        with translated("open the lock", path, system=system):
            fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            _take(fd, path, system)
            if _same_file(fd, path):
                with suppress(EnvironmentProblem, OSError):  # the number is a courtesy, the lock holds without it
                    system.truncate(fd, 0)
                    write_all(fd, path, 0, f"{os.getpid()}\n".encode(), system=system)
                return fd
        except BaseException:
            system.close(fd)
            raise
        system.close(fd)
    raise EnvironmentProblem("lock file is replaced all the time", where=path)


def _take(fd: int, path: Path, system: System) -> None:
    try:
        system.lock(fd)
    except BlockingIOError:
        holder = ""
        with suppress(OSError):
            holder = read_some(fd, 32, 0, system=system).decode("ascii", "replace").strip()
        raise EnvironmentProblem(
            "another process is writing this output",
            where=path,
            found=f"process {holder}" if re.fullmatch(r"[0-9]{1,20}", holder) else None,
            hint="wait until it has ended, or choose another output",
        ) from None
    except OSError as error:
        raise problem(error, "lock", path, system=system) from None


def _same_file(fd: int, path: Path) -> bool:
    try:
        named = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
