"""Reading files that may be hostile or may change: positioned reads, never a mapping, never past a link.

A mapped file that shrinks kills the process; a positioned read comes back short, and that is an error with a place.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from formats.errors import EnvironmentProblem, FormatError, UsageError

MAX_CALL_BYTES = 1 << 30  # Linux transfers at most 2,147,479,552 bytes a call

_NO_FILES_NAME = (errno.ENAMETOOLONG, errno.ELOOP)  # no file can have this name, or links lead in a circle
_NO_REGULAR_FILE = (errno.ENXIO, errno.ENODEV)  # opening a socket, or a device without a driver
_PIECE_BYTES = 1 << 16


def read_exactly(fd: int, offset: int, length: int, *, where: str) -> bytes:
    """``length`` bytes at ``offset``, in as many calls as it takes.

    Raises:
        FormatError: the file ends before; the offset of its end is named.
        EnvironmentProblem: the device failed.
    """
    pieces = []
    position, end = offset, offset + length
    while position < end:
        try:
            piece = os.pread(fd, min(end - position, MAX_CALL_BYTES), position)
        except OSError as error:
            raise EnvironmentProblem(f"cannot read: {error.strerror}", where=where, offset=position) from None
        if not piece:
            raise FormatError(
                "file ends early", where=where, offset=position, expected=f"{end} bytes or more", found=position
            )
        pieces.append(piece)
        position += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def fill(target: memoryview, offset: int, read_some: Callable[[memoryview, int], int], *, where: str) -> None:
    """Fill ``target`` with what stands at ``offset``, in as many calls as it takes.

    Args:
        target: of bytes; all of it is filled.
        offset: in the file.
        read_some: reads into (a part of) a view from an offset on and returns how many bytes it read.
        where: for messages.

    Raises:
        FormatError: the file ends before; the offset of its end is named.
        EnvironmentProblem: the device failed.
    """
    done = 0
    while done < len(target):
        try:
            count = read_some(target[done : done + MAX_CALL_BYTES], offset + done)
        except InterruptedError:
            continue
        except OSError as error:
            raise EnvironmentProblem(f"cannot read: {error.strerror}", where=where, offset=offset + done) from None
        if count <= 0:
            raise FormatError(
                "file ends early",
                where=where,
                offset=offset + done,
                expected=f"{offset + len(target)} bytes or more",
                found=offset + done,
            )
        done += count


def read_into(fd: int, offset: int, target: memoryview, *, where: str) -> None:
    """Fill ``target`` with what stands at ``offset`` of an open file; errors are those of :func:`fill`."""
    fill(target, offset, lambda view, at: os.preadv(fd, [view], at), where=where)


def open_inside(directory_fd: int, name: str, *, where: str) -> int:
    """Open the regular file ``name`` (a checked relative path) below a directory, following no link on the way.

    Returns:
        A descriptor for reading; the caller closes it.
    """
    parts = name.split("/")
    fd = os.dup(directory_fd)
    try:
        for part in parts[:-1]:
            deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = deeper
        # O_NONBLOCK: opening a FIFO that someone put there must not wait for a writer.
        file_fd = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
    except FileNotFoundError:
        raise FormatError("file is missing", where=where) from None
    except (NotADirectoryError, IsADirectoryError):
        raise FormatError("not a regular file reached without links", where=where) from None
    except PermissionError:
        raise EnvironmentProblem("not permitted to read", where=where) from None
    except OSError as error:
        if error.errno == errno.ELOOP:  # what O_NOFOLLOW makes of a link; the system speaks of too many of them
            raise FormatError("not a regular file reached without links: it is a link", where=where) from None
        if error.errno in (*_NO_REGULAR_FILE, errno.ENAMETOOLONG):
            raise FormatError(f"not a regular file reached without links: {error.strerror}", where=where) from None
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=where) from None
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(file_fd).st_mode):
        os.close(file_fd)
        raise FormatError("not a regular file", where=where)
    return file_fd


def open_directory(path: Path, *, where: str) -> int:
    """A descriptor for a directory; the caller closes it.

    Raises:
        UsageError: there is none of that name.
        EnvironmentProblem: it cannot be opened.
    """
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError("no such directory", where=where) from None
    except NotADirectoryError:
        raise UsageError("not a directory", where=where) from None
    except OSError as error:
        if error.errno in _NO_FILES_NAME:
            raise UsageError(f"no such directory: {error.strerror}", where=where) from None
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=where) from None


@contextmanager
def named_file(path: Path, *, hint: str | None = None) -> Iterator[int]:
    """A descriptor for reading of a regular file that the user names, in a ``with`` block.

    Args:
        path: as it was typed; links are followed.
        hint: what to give instead of a name without a file, or of something that is no regular file.

    Raises:
        UsageError: there is no such file, or it is something else.
        EnvironmentProblem: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a FIFO must not wait for a writer
    except (FileNotFoundError, NotADirectoryError):  # the latter, of what should lie below a file
        raise UsageError("no such file", where=path, hint=hint) from None
    except OSError as error:
        if error.errno in _NO_FILES_NAME:
            raise UsageError(f"no such file: {error.strerror}", where=path, hint=hint) from None
        if error.errno in _NO_REGULAR_FILE:
            raise UsageError("not a regular file", where=path, hint=hint) from None
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=path) from None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageError("not a regular file", where=path, hint=hint)
        yield fd
    finally:
        os.close(fd)


def named_bytes(path: Path, *, at_most: int, what: str = "file", hint: str | None = None) -> bytes:
    """All of a regular file that the user names, read to its end: a file of ``/proc`` says that it has no bytes.

    Args:
        path, hint: as for :func:`named_file`.
        at_most: bytes that it may have.
        what: it is, for the message if it has more.

    Raises:
        UsageError: there is no such file, it is something else, or too long.
        FormatError: it became shorter meanwhile.
        EnvironmentProblem: it cannot be opened or read.
    """
    with named_file(path, hint=hint) as fd:
        size = file_bytes(fd)
        if size > at_most:
            raise UsageError(f"{what} is too long", where=path, expected=f"at most {at_most} bytes", found=size)
        pieces = [read_exactly(fd, 0, size, where=str(path))]
        end = size
        while piece := _piece(fd, end, where=str(path)):
            end += len(piece)
            if end > at_most:
                raise UsageError(f"{what} is too long", where=path, expected=f"at most {at_most} bytes", found="more")
            pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _piece(fd: int, offset: int, *, where: str) -> bytes:
    """Some bytes at ``offset``, none at the end of the file."""
    try:
        return os.pread(fd, _PIECE_BYTES, offset)
    except OSError as error:
        raise EnvironmentProblem(f"cannot read: {error.strerror}", where=where, offset=offset) from None


def file_bytes(fd: int) -> int:
    """The present length of an open file."""
    return os.fstat(fd).st_size
