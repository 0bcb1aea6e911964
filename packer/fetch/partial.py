"""A file that is still arriving: under a name of its own in a hidden folder, with the etag its bytes came under.

The name is made of the digest that the whole file must have, so bytes of another commit's file are never continued,
and a pack that looks at the folder meanwhile does not take it for anything.
"""

from __future__ import annotations

import hashlib
import os
import stat
from contextlib import suppress
from pathlib import Path

from formats.errors import EnvironmentProblem
from packer.fetch.listing import WORK_DIR, RemoteFile
from packer.storage import durable
from packer.storage.durable import Output
from packer.storage.system import SYSTEM, System, read_some, translated

MAX_ETAG_BYTES = 300
READ_BYTES = 8 << 20


class Partial:
    """An open partial file. ``length`` bytes of it are there; use it in one thread, and close it."""

    def __init__(self, output: Output, length: int, etag: str | None, system: System) -> None:
        self.output = output
        self.length = length
        self.etag = etag
        self._system = system

    def append(self, data: bytes, *, needed: int) -> None:
        """Write what arrived; ``needed`` bytes are still to come, this included."""
        durable.write_at(self.output, self.length, data, needed=needed, system=self._system)
        self.length += len(data)

    def read(self, offset: int) -> bytes:
        """A piece of what is there, for hashing; none at its end."""
        path = self.output.temporary
        with translated("read", path, system=self._system, offset=offset):
            return read_some(self.output.fd, READ_BYTES, offset, system=self._system)

    def restart(self, etag: str | None) -> None:
        """Begin at the first byte, of an object with this etag."""
        path = self.output.temporary
        with translated("empty", path, system=self._system):
            self._system.truncate(self.output.fd, 0)
        self.length = 0
        self.etag = etag
        beside = _etag_path(path)
        with translated("delete", beside, system=self._system), suppress(FileNotFoundError):
            self._system.unlink(beside)
        if etag is not None:
            durable.write_file(beside, [etag.encode("ascii")], system=self._system)

    def publish(self) -> None:
        """Give the complete and proven file its final name, durably."""
        durable.flush(self.output, system=self._system)
        durable.close(self.output, system=self._system)
        durable.publish(self.output.path, temporary=self.output.temporary, system=self._system)
        with suppress(OSError):
            self._system.unlink(_etag_path(self.output.temporary))

    def set_aside(self) -> Path:
        """Close a complete file with the wrong bytes and keep it, beside, for whoever wants to know why."""
        path = self.output.temporary
        wrong = path.with_suffix(".wrong")
        self.close()
        with translated("set aside", path, system=self._system):
            self._system.rename(path, wrong)
        return wrong

    def close(self) -> None:
        """Close the file and keep it."""
        with translated("close", self.output.temporary, system=self._system):
            self._system.close(self.output.fd)


def open_partial(directory: Path, file: RemoteFile, *, system: System = SYSTEM) -> Partial:
    """Begin or continue ``file`` in ``directory``; its folders are made.

    Raises:
        EnvironmentProblem: it cannot be opened or made.
        UsageError: a folder's name is taken by something else.
    """
    folder = directory / WORK_DIR
    durable.make_directory(folder, system=system)
    path = partial_path(directory, file)
    with translated("open", path, system=system):
        fd = system.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    found = os.fstat(fd)
    partial = Partial(Output(directory / file.path, path, fd), found.st_size, None, system)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise EnvironmentProblem("not a regular file", where=path, hint="remove it")
        make_folders(directory, file.path, system=system)
        if partial.length > file.bytes:
            partial.restart(None)
        elif partial.length:
            partial.etag = _read_etag(_etag_path(path))
    except BaseException:
        partial.close()
        raise
    return partial


def partial_bytes(directory: Path, file: RemoteFile) -> int:
    """How much of ``file`` an earlier run left behind, at most its length."""
    try:
        found = partial_path(directory, file).lstat()
    except OSError:
        return 0
    return min(found.st_size, file.bytes) if stat.S_ISREG(found.st_mode) else 0


def partial_path(directory: Path, file: RemoteFile) -> Path:
    """Where ``file`` is while it arrives."""
    name = hashlib.sha256(f"{file.path}\0{file.digest}\0{file.bytes}".encode()).hexdigest()[:40]
    return directory / WORK_DIR / f"{name}.part"


def make_folders(directory: Path, path: str, *, system: System = SYSTEM) -> None:
    """Make the folders below ``directory`` that the relative ``path`` lies in."""
    folder = directory
    for part in path.split("/")[:-1]:
        folder /= part
        durable.make_directory(folder, system=system)


def _etag_path(path: Path) -> Path:
    return path.with_suffix(".etag")


def _read_etag(path: Path) -> str | None:
    """What was stored; anything odd means that it is not known, which costs nothing but a little trust."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, MAX_ETAG_BYTES + 1).decode("ascii", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)
    return text if 3 <= len(text) <= MAX_ETAG_BYTES and text.isprintable() and text.isascii() else None
