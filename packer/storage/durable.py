"""Writing one output file so that its final name always means complete and durable bytes.

Bytes go into a temporary file beside the final name, are flushed to the device, read back around the page cache and
compared with the digest made while writing; only then does a rename publish them, and the directory is flushed too.
The journal's *intent* and *done* entries stand between these steps, so the steps are separate functions; a file that
is written in one go has :func:`write_file`. When to do what is the business of ``packer.pipeline``.

The temporary has a fixed name, NAME.part, so that a later run finds it: that is for names that belong to one writer at
a time. A file that a user named is written with ``packer.storage.new_file``.

All system calls go through a :class:`~packer.storage.system.System`, so that tests can make each of them fail.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from formats.errors import UsageError
from packer.storage.system import SYSTEM, Buffer, System, WriteLost, problem, read_some, translated, write_all

SUFFIX = ".part"
READ_BYTES = 8 << 20

_BLOCK = 512  # what st_blocks counts, whatever the file system's own blocks are
_NOT_OFFERED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)


@dataclass(frozen=True)
class Output:
    """A file being written: the name it will have, the temporary it is in, and the temporary's descriptor."""

    path: Path
    temporary: Path
    fd: int


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a file and the BLAKE3 (32 bytes) that it must have."""

    offset: int
    length: int
    digest: bytes


def temporary_path(path: Path) -> Path:
    """Where ``path`` is written before it is published: beside it, so that the rename stays on one file system."""
    return path.with_name(path.name + SUFFIX)


def create(path: Path, *, system: System = SYSTEM) -> Output:
    """Begin a new file; a link or leftover in the temporary's place is never written through.

    Raises:
        UsageError: the temporary exists; the caller resumes it with :func:`reopen` or removes it with :func:`discard`.
        EnvironmentProblem: the directory cannot be written.
    """
    temporary = temporary_path(path)
    try:
        fd = system.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise UsageError("temporary file is in the way", where=temporary, hint="remove it, or use --restart") from None
    except OSError as error:
        raise problem(error, "create", temporary, system=system) from None
    return Output(path, temporary, fd)


def reopen(path: Path, *, system: System = SYSTEM) -> Output | None:
    """Continue a file that an earlier run began, or None if its temporary is not there.

    Raises:
        EnvironmentProblem: the temporary cannot be opened, or is a link.
    """
    temporary = temporary_path(path)
    try:
        fd = system.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise problem(error, "reopen", temporary, system=system) from None
    return Output(path, temporary, fd)


def set_length(output: Output, length: int, *, system: System = SYSTEM) -> None:
    """Give the temporary its final length, with space set aside where the file system can do that.

    Lack of space then shows before the work, not after it. Bytes that are there already are kept.
    """
    try:
        system.truncate(output.fd, length)
        if length:
            try:
                system.allocate(output.fd, 0, length)
            except OSError as error:
                if error.errno not in _NOT_OFFERED:
                    raise
    except OSError as error:
        # Some file systems keep what they set aside before space ran out, and a file that is resumed has bytes.
        missing = max(0, length - os.fstat(output.fd).st_blocks * _BLOCK)
        raise problem(error, "set space aside", output.temporary, system=system, needed=missing) from None


def write_at(output: Output, offset: int, data: Buffer, *, needed: int | None = None, system: System = SYSTEM) -> None:
    """Write all of ``data`` at ``offset``, in calls of at most 1 GiB, continuing after short writes.

    Args:
        output: the file.
        offset: bytes from its start.
        data: the bytes, contiguous.
        needed: bytes to be written from ``offset`` on in all, for the message when space runs out; those of ``data`` if
            not told.
        system: the system calls.
    """
    write_all(output.fd, output.temporary, offset, data, needed=needed, system=system)


def write_extent(fd: int, path: Path, offset: int, data: Buffer, *, system: System = SYSTEM) -> Extent:
    """Write bytes at ``offset`` of an open file, and say what :func:`read_back` must find there; for any order.

    Args:
        fd: where to.
        path: the name that the file has now, for messages.
        offset: bytes from the file's start.
        data: the bytes, contiguous.
        system: the system calls.

    Raises:
        EnvironmentProblem: they cannot be written.
    """
    write_all(fd, path, offset, data, system=system)
    return Extent(offset, len(data), blake3(data).digest())


def flush(output: Output, *, system: System = SYSTEM) -> None:
    """Bring the temporary's bytes to the device.

    Raises:
        WriteLost: that failed; the temporary has been deleted and its descriptor closed.
    """
    try:
        system.fsync(output.fd)
    except OSError as error:
        lost = problem(error, "flush", output.temporary, system=system, kind=WriteLost)
        abandon(output, system=system)
        raise lost from None


def read_back(path: Path, extents: Sequence[Extent], *, system: System = SYSTEM) -> bytes:
    """Open ``path`` afresh, read ``extents`` past the page cache and compare their digests.

    Args:
        path: a flushed file (only clean pages leave the cache).
        extents: what must be there.
        system: the system calls.

    Returns:
        BLAKE3 of the extents' bytes, one after the other, as read.

    Raises:
        WriteLost: a digest differs, or the file ends early; the file is left for the caller to delete.
    """
    whole = blake3()
    with translated("read back", path, system=system):
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
        try:
            for extent in extents:
                with suppress(OSError):  # advice: a file system may refuse it
                    system.drop_cache(fd, extent.offset, extent.length)
                hasher = blake3()
                for piece in _pieces(fd, path, extent.offset, extent.length, system):
                    hasher.update(piece)
                    whole.update(piece)
                if hasher.digest() != extent.digest:
                    raise WriteLost(
                        "other bytes are here than were written",
                        where=path,
                        offset=extent.offset,
                        expected=extent.digest.hex(),
                        found=hasher.hexdigest(),
                        hint="the device lost them, or another program wrote here; once that is settled, give the same"
                        " command again",
                    )
        finally:
            system.close(fd)
    return whole.digest()


def file_digest(path: Path, *, follow: bool = False, system: System = SYSTEM) -> tuple[int, bytes]:
    """Length and BLAKE3 of a file as it is on the device now.

    Args:
        path: the file; a link is refused unless ``follow`` says that it may be one.
        follow: for files of the source.
        system: the system calls.

    Raises:
        EnvironmentProblem: it cannot be opened or read.
    """
    hasher = blake3()
    position = 0
    with translated("read", path, system=system):
        fd = system.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW), 0)
        try:
            with suppress(OSError):
                system.drop_cache(fd, 0, 0)
            while piece := read_some(fd, READ_BYTES, position, system=system):
                hasher.update(piece)
                position += len(piece)
        finally:
            system.close(fd)
    return position, hasher.digest()


def close(output: Output, *, system: System = SYSTEM) -> None:
    """Close the temporary and keep it.

    Raises:
        WriteLost: closing reported an error, which can be a write that failed late; the temporary has been deleted.
    """
    try:
        system.close(output.fd)
    except OSError as error:
        lost = problem(error, "close", output.temporary, system=system, kind=WriteLost)
        with suppress(OSError):
            system.unlink(output.temporary)
        raise lost from None


def abandon(output: Output, *, system: System = SYSTEM) -> None:
    """Close and delete the temporary, whatever state it is in; used on the way to raising something else."""
    with suppress(OSError):
        system.close(output.fd)
    with suppress(OSError):
        system.unlink(output.temporary)


def discard(path: Path, *, system: System = SYSTEM) -> None:
    """Delete the temporary of ``path`` if there is one."""
    temporary = temporary_path(path)
    with translated("delete", temporary, system=system), suppress(FileNotFoundError):
        system.unlink(temporary)


def publish(path: Path, *, temporary: Path | None = None, system: System = SYSTEM) -> None:
    """Rename the closed, flushed and checked temporary to ``path`` and flush the directory.

    ``temporary`` is for files that grew elsewhere on the same file system.
    """
    temporary = temporary_path(path) if temporary is None else temporary
    with translated("rename", temporary, system=system):
        system.rename(temporary, path)
    flush_directory(path.parent, system=system)


def flush_directory(directory: Path, *, system: System = SYSTEM) -> None:
    """Make the names in ``directory`` durable."""
    with translated("flush", directory, system=system):
        fd = system.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, 0)
        try:
            system.fsync(fd)
        finally:
            system.close(fd)


def make_directory(path: Path, *, system: System = SYSTEM) -> None:
    """Make ``path`` durably if it is not there; its parent must be.

    Raises:
        UsageError: something that is not a directory has that name.
        EnvironmentProblem: it cannot be made.
    """
    with translated("make the directory", path, system=system):
        try:
            system.mkdir(path, 0o755)
        except FileExistsError:
            if path.is_symlink() or not path.is_dir():
                raise UsageError("not a directory of its own, or a link to one", where=path) from None
            return
    flush_directory(path.parent, system=system)


def write_file(
    path: Path,
    pieces: Iterable[Buffer],
    *,
    before_rename: Callable[[int, bytes], None] | None = None,
    needed: int | None = None,
    system: System = SYSTEM,
) -> tuple[int, bytes]:
    """Write a whole file durably, in place of what has its name: all steps from the temporary to the flushed directory.

    Only for names of which this process is the one writer, so that NAME.part is its own or left over from such a
    process: files of a container, with their journal (the pack's lock); in the work folders of ``fetch``, staging and
    ``calibrate`` (their locks); and the receipt in a folder that ``fetch`` fills (its lock). A file that a user named
    is written with :func:`packer.storage.new_file.write_new`, which replaces nothing and shares no temporary.

    Args:
        path: the final name; an existing file of that name is replaced, whole, by the rename.
        pieces: the bytes in order. A leftover temporary is deleted first.
        before_rename: called with length and digest once they are proven on the device: the place to journal *intent*.
        needed: bytes in all, for the message when space runs out.
        system: the system calls.

    Returns:
        Length and BLAKE3.

    Raises:
        WriteLost: nothing was published, the temporary is gone; build it again.
        EnvironmentProblem: nothing was published.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_file(Path(folder) / "a", [b"two ", b"pieces"])[0]
        10
    """
    discard(path, system=system)
    output = create(path, system=system)
    try:
        length, digest = write_pieces(output, pieces, needed=needed, system=system)
    except BaseException:
        abandon(output, system=system)
        raise
    flush(output, system=system)
    close(output, system=system)
    try:
        read_back(output.temporary, [Extent(0, length, digest)], system=system)
        if before_rename is not None:
            before_rename(length, digest)
    except WriteLost:
        discard(path, system=system)
        raise
    publish(path, system=system)
    return length, digest


def write_pieces(
    output: Output, pieces: Iterable[Buffer], *, needed: int | None = None, system: System = SYSTEM
) -> tuple[int, bytes]:
    """Write ``pieces`` in their order, from the file's start, and return their length and BLAKE3.

    Args:
        output: the file.
        pieces: the bytes.
        needed: bytes in all, for the message when space runs out.
        system: the system calls.

    Raises:
        EnvironmentProblem: they cannot be written; the temporary is left for the caller to abandon.
    """
    hasher = blake3()
    length = 0
    for piece in pieces:
        octets = memoryview(piece).cast("B")
        rest = None if needed is None else max(needed - length, len(octets))
        write_at(output, length, octets, needed=rest, system=system)
        hasher.update(octets)
        length += len(octets)
    return length, hasher.digest()


def _pieces(fd: int, path: Path, offset: int, length: int, system: System) -> Iterator[bytes]:
    end = offset + length
    while offset < end:
        try:
            piece = read_some(fd, min(READ_BYTES, end - offset), offset, system=system)
        except OSError as error:
            raise problem(error, "read back", path, system=system, offset=offset, kind=WriteLost) from None
        if not piece:
            raise WriteLost("file ends before what was written", where=path, offset=offset, expected=end, found=offset)
        offset += len(piece)
        yield piece
