"""Writing a new file under a name that a user gave: where it may be, and how it comes there without touching another.

Until it is complete, the file has a temporary of its own beside the name: NAME.<random>.part, which no other process
uses and no file of the user's has. It is written, flushed, closed and read back as ``packer.storage.durable`` does it.
Then it is published: it gets its name only if nothing has that name, which the file system decides in one step. What
belongs together is published together, once all of it is complete; if that fails, none of it stays.

Whatever ends the writing, the temporary is deleted. Only that of a killed process stays behind; no later one deletes it
unasked, for another may be writing it.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from formats.errors import EnvironmentProblem, UsageError
from formats.manifest import FILE_NAME, INDEX_NAME
from packer.storage import durable
from packer.storage.durable import Extent, Output
from packer.storage.system import SYSTEM, Buffer, System, problem, translated

# What file systems without hard links answer, and those that refuse them (to files of others, say, on network mounts).
# Where it meant something else, that shows again on the other way.
_NO_LINKS = (
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EINVAL,
    errno.EMLINK,
    errno.EXDEV,
)


def check_free(path: Path) -> None:
    """Refuse a name that is taken or too long, or one in a folder that is not there, or in a finished container.

    Raises:
        UsageError: saying so.
        EnvironmentProblem: as of :func:`check_writable`.
    """
    if os.path.lexists(path):
        raise _taken(path)
    if not path.parent.is_dir():
        raise UsageError("no such folder", where=path.parent)
    _check_length(path)
    if all((path.parent / name).exists() for name in (FILE_NAME, INDEX_NAME)):
        raise UsageError("output would lie in a container", where=path, hint="choose a name outside of it")
    check_writable(path.parent)


def _check_length(path: Path) -> None:
    """Refuse a name to which the temporary's ending cannot be added; ``write_new`` would find out at its end."""
    limit = os.pathconf(path.parent, "PC_NAME_MAX")
    length, room = len(os.fsencode(path.name)), limit - len(_ending())
    if limit >= 0 and length > room:  # below 0: the file system has no limit
        raise UsageError("name is too long", where=path, expected=f"at most {room} bytes", found=length)


def _ending() -> str:
    """What a temporary's name has more than the file's."""
    return f".{secrets.token_hex(4)}{durable.SUFFIX}"


def check_writable(folder: Path) -> None:
    """Refuse a folder in which this user may create nothing, before any work is done for it.

    Raises:
        EnvironmentProblem: saying so.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "file system is read-only" if os.statvfs(folder).f_flag & os.ST_RDONLY else "not permitted"
        raise EnvironmentProblem(f"cannot create files here: {why}", where=folder)


def write_new(
    path: Path, pieces: Iterable[Buffer], *, needed: int | None = None, system: System = SYSTEM
) -> tuple[int, bytes]:
    """Write a new file durably and whole, or not at all.

    Args:
        path: its name; nothing may have it, neither now nor when the file is complete.
        pieces: the bytes in order.
        needed: bytes in all, for the message when space runs out.
        system: the system calls.

    Returns:
        Length and BLAKE3.

    Raises:
        UsageError: as of :func:`check_free`, or something got the name meanwhile.
        EnvironmentProblem: it cannot be written.
    """
    with new_output(path, system=system) as output:
        written = _fill(output, pieces, needed, system)
        publish([output], system=system)
    return written


def write_all_new(contents: Mapping[Path, bytes], *, system: System = SYSTEM) -> None:
    """Write new files that belong together: none gets its name before all are complete on the device.

    Raises:
        UsageError: as of :func:`write_new`, for any of them; none of them is there.
        EnvironmentProblem: one cannot be written; none of them is there.
    """
    with ExitStack() as stack:
        outputs = []
        for path, data in contents.items():
            output = stack.enter_context(new_output(path, system=system))
            _fill(output, [data], len(data), system)
            outputs.append(output)
        publish(outputs, system=system)


@contextmanager
def new_output(path: Path, *, system: System = SYSTEM) -> Iterator[Output]:
    """A temporary for a new file, deleted at the end of the ``with`` block; published, the file has its own name then.

    Its descriptor is open; :func:`writing` closes it.

    Raises:
        UsageError: as of :func:`check_free`.
        EnvironmentProblem: it cannot be made.
    """
    check_free(path)
    temporary = path.with_name(path.name + _ending())
    with translated("create", temporary, system=system):
        fd = system.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield Output(path, temporary, fd)
    finally:
        # What cannot be deleted here is reported by what made the block fail; after a success it is a second name of
        # the published file, which takes no space.
        with suppress(OSError):
            system.unlink(temporary)


@contextmanager
def writing(output: Output, *, system: System = SYSTEM) -> Iterator[None]:
    """Flush and close a temporary when the ``with`` block ends; if an exception ends it, only close and delete it.

    Raises:
        WriteLost: flushing or closing failed.
    """
    try:
        yield
    except BaseException:
        durable.abandon(output, system=system)
        raise
    durable.flush(output, system=system)
    durable.close(output, system=system)


def publish(outputs: Sequence[Output], *, system: System = SYSTEM) -> None:
    """Give temporaries that are closed and read back their names, and make these durable; all of them or none.

    Raises:
        UsageError: something has one of the names; it stays as it is.
        EnvironmentProblem: the file system does not do it.
    """
    with ExitStack() as held, ExitStack() as taken_back:
        for output in outputs:
            fd = held.enter_context(_held_open(output, system))
            taken_back.callback(_take_back, output, fd, system)
            _give_name(output, fd, system)
        for folder in dict.fromkeys(output.path.parent for output in outputs):
            durable.flush_directory(folder, system=system)
        taken_back.pop_all()  # from here on, whatever happens, all of them stay


def _fill(output: Output, pieces: Iterable[Buffer], needed: int | None, system: System) -> tuple[int, bytes]:
    """All steps before publishing, for a file that is written from its start to its end."""
    with writing(output, system=system):
        length, digest = durable.write_pieces(output, pieces, needed=needed, system=system)
    durable.read_back(output.temporary, [Extent(0, length, digest)], system=system)
    return length, digest


@contextmanager
def _held_open(output: Output, system: System) -> Iterator[int]:
    """A descriptor by which the file is known again: while it is open, no other file can get its inode number."""
    with translated("open", output.temporary, system=system):
        fd = system.open(output.temporary, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
    try:
        yield fd
    finally:
        with suppress(OSError):  # nothing was written through it
            system.close(fd)


def _take_back(output: Output, fd: int, system: System) -> None:
    """Delete the name of a file if it has it: what else has that name is not ours."""
    if _is(output.path, fd):
        with suppress(OSError):
            system.unlink(output.path)


def _give_name(output: Output, fd: int, system: System) -> None:
    """A second name, which unlike a new one by ``rename`` replaces nothing; ``fd`` is the open file."""
    try:
        system.link(output.temporary, output.path)
    except FileExistsError:
        if not _is(output.path, fd):  # over a network a link may be made, its answer lost, and the request repeated
            raise _taken(output.path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise problem(error, "create", output.path, system=system) from None
        _rename_to_reserved(output, system)


def _rename_to_reserved(output: Output, system: System) -> None:
    """Without hard links: take the name with an empty file, which only one process can, and rename over that.

    A process that is killed between the two leaves the empty file, which no reader takes for a result, and beside it
    the complete temporary. Another program could still get in between the last check and the rename, if it replaces
    the reservation or writes into it; moepack itself never does that to a name that is taken.
    """
    try:
        fd = system.open(output.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        raise _taken(output.path) from None
    except OSError as error:
        raise problem(error, "create", output.path, system=system) from None
    try:
        if not _is_reserved(output.path, fd):
            raise _taken(output.path)
        with translated("rename", output.temporary, system=system):
            system.rename(output.temporary, output.path)
    except BaseException:
        if _is_reserved(output.path, fd):
            with suppress(OSError):
                system.unlink(output.path)
        raise
    finally:
        with suppress(OSError):  # nothing was written through it
            system.close(fd)


def _is_reserved(path: Path, fd: int) -> bool:
    """Whether a name still belongs to the open, empty file that was made to reserve it."""
    return _is(path, fd) and os.fstat(fd).st_size == 0


def _is(path: Path, fd: int) -> bool:
    """Whether a name belongs to an open file."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(fd))
    except OSError:
        return False


def _taken(path: Path) -> UsageError:
    return UsageError("output is there already", where=path, hint="remove it or choose another name")
