"""The journal of a pack: what is durable so far, so that a run that was stopped continues instead of starting over.

One JSON object a line, appended and flushed one at a time. Every line carries its number and, last, the first 16
hexadecimal digits of the BLAKE3 of all that stands before. A power cut can tear only the line that was being
appended: a last line that is cut short or does not check is dropped, and its unit is done again. Damage anywhere
else means that the file is not to be trusted, and it is refused.

Line 0 is the identity: everything that decides the bytes of the container. A run with another identity must not
continue this one. The journal is input like any other: it is read strictly, and bounded before it is believed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta

from formats.errors import EnvironmentProblem, FormatError
from formats.strict_json import parse_object
from packer.storage.durable import flush_directory, write_file
from packer.storage.identity import check_identity
from packer.storage.system import SYSTEM, NoSpace, System, read_some, translated, write_all

JOURNAL_VERSION = 1
MAX_BYTES = 1 << 30  # K3 takes about 15 MB
RESERVE_SUFFIX = ".reserve"
RESERVE_BYTES = 1 << 20
READ_BYTES = 1 << 20
_RESTART = "use --restart to begin anew: finished files are checked, and kept or built again"

Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
ErrorValue: TypeAlias = Annotated[float, Meta(ge=0.0, le=3.5e38)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that refuses unknown members and wrong types."""


class RecordDone(_Strict, frozen=True, array_like=True):
    """An expert record: its number and BLAKE3, errors of gate, up, down, of all three, of these by weighted columns."""

    expert: Count
    digest: Digest
    matrix_errors: tuple[ErrorValue, ErrorValue, ErrorValue]
    rel_error: ErrorValue
    weighted_error: ErrorValue | None = None


class TensorDone(_Strict, frozen=True, array_like=True):
    """A trunk tensor: BLAKE3 of its stored and of its source bytes, its error, its scale exponent."""

    name: Name
    digest: Digest
    source_digest: Digest
    rel_error: ErrorValue
    scale_exponent: Annotated[int, Meta(ge=-100, le=100)]


class UnitDone(_Strict, frozen=True, tag_field="kind", tag="unit"):
    """A unit of the plan whose bytes are in its file's temporary or final name, flushed and read back."""

    unit: Name
    records: tuple[RecordDone, ...] = ()
    tensors: tuple[TensorDone, ...] = ()


class ShardSeen(_Strict, frozen=True, tag_field="kind", tag="shard"):
    """A source shard as it was when it was hashed.

    ``stamp`` (device, inode, times of modification and of change in ns) tells cheaply that it is still the same file:
    times of modification can be copied along with other contents, the time of change cannot.
    """

    name: Name
    bytes: Count
    sha256: Digest
    stamp: tuple[int, int, int, int]


class ShardReleasing(_Strict, frozen=True, tag_field="kind", tag="releasing"):
    """A source shard that is about to be deleted: all that is made from it is durable, its digest was compared."""

    name: Name
    bytes: Count
    sha256: Digest


class ShardReleased(_Strict, frozen=True, tag_field="kind", tag="released"):
    """A source shard that is gone, durably. If it is seen again, it was fetched again."""

    name: Name


class FileBegun(_Strict, frozen=True, tag_field="kind", tag="begun"):
    """A file's temporary was made afresh: units of this file that were done before are gone with the old one."""

    name: Name


class FileIntent(_Strict, frozen=True, tag_field="kind", tag="intent"):
    """A file that is complete under its temporary name and about to be renamed."""

    name: Name
    bytes: Count
    blake3: Digest


class FileDone(_Strict, frozen=True, tag_field="kind", tag="done"):
    """A file that stands under its final name, durably."""

    name: Name
    bytes: Count
    blake3: Digest


Entry: TypeAlias = UnitDone | ShardSeen | ShardReleasing | ShardReleased | FileBegun | FileIntent | FileDone


@dataclass(frozen=True)
class JournalContents:
    """What a journal says: its identity, its entries, and how many bytes of the file are whole lines or torn off."""

    identity: dict[str, Any]
    entries: tuple[Entry, ...]
    whole_bytes: int
    torn_bytes: int


class Journal:
    """An open journal. ``entries`` are those of earlier runs; :meth:`append` adds one and returns once it is durable.

    Made by :func:`open_or_create`, under the lock of :func:`packer.storage.lock.exclusive`; use it in a ``with`` block.
    Appending is safe from several threads.
    """

    def __init__(self, path: Path, fd: int, contents: JournalContents, system: System) -> None:
        self.path = path
        self.entries = contents.entries
        self._fd = fd
        self._system = system
        self._length = contents.whole_bytes
        self._lines = 1 + len(contents.entries)
        self._usable = True
        self._guard = threading.Lock()

    def append(self, entry: Entry) -> None:
        """Append ``entry`` and flush it.

        Space was set aside for this: when the device is full, the reserve is given up and the line written after all.

        Raises:
            EnvironmentProblem: the entry is not durable; the journal takes no more in this run and can be resumed.
        """
        with self._guard:
            if not self._usable:
                raise EnvironmentProblem("journal failed earlier in this run", where=self.path)
            line = _line(self._lines, msgspec.json.encode(entry))
            try:
                try:
                    self._write(line)
                except NoSpace:
                    if not reserve_path(self.path).exists():
                        raise
                    remove_reserve(self.path, system=self._system)
                    self._write(line)
            except BaseException:
                self._usable = False
                with suppress(OSError):  # a line that may not have been flushed must not be believed by the next run
                    self._system.truncate(self._fd, self._length)
                raise
            self._length += len(line)
            self._lines += 1

    def _write(self, line: bytes) -> None:
        write_all(self._fd, self.path, self._length, line, system=self._system)
        with translated("flush", self.path, system=self._system):
            self._system.fsync(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; everything in it is durable already."""
        with self._guard:
            self._usable = False
        with translated("close", self.path, system=self._system):
            self._system.close(self._fd)


def open_or_create(path: Path, identity: Mapping[str, Any], *, system: System = SYSTEM) -> Journal:
    """Continue the journal at ``path``, or begin one.

    Args:
        path: the journal's file; its directory exists and its lock is held.
        identity: JSON values, everything that decides the container's bytes.
        system: the system calls.

    Raises:
        UsageError: the journal has another identity; the first differences are listed, the recipe's name before all.
        FormatError: the journal is damaged before its last line, or is no journal.
        EnvironmentProblem: it cannot be read or written.
    """
    if not path.is_symlink() and not path.exists():
        head = {"kind": "identity", "version": JOURNAL_VERSION, "identity": dict(identity)}
        write_file(path, [_line(0, _canonical(head))], system=system)
    contents = read_journal(path, system=system)
    check_identity(contents.identity, identity, path)
    with translated("open", path, system=system):
        fd = system.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
    try:
        if contents.torn_bytes:
            with translated("drop the torn end of", path, system=system):
                system.truncate(fd, contents.whole_bytes)
                system.fsync(fd)
        if not reserve_path(path).exists():
            # Blocks of zeros might be stored as a hole, which reserves nothing.
            write_file(reserve_path(path), [bytes(range(256)) * (RESERVE_BYTES // 256)], system=system)
    except BaseException:
        system.close(fd)
        raise
    return Journal(path, fd, contents, system)


def read_journal(path: Path, *, system: System = SYSTEM) -> JournalContents:
    """Read and check a journal without changing it.

    Raises:
        FormatError: with line and offset; damaged before its last line, no journal, or of an unknown version.
        EnvironmentProblem: it cannot be read.
    """
    data = _read_all(path, system)
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].split(b"\n")[:-1]
    if len(lines) > 1 and whole == len(data) and not _checks(lines[-1]):
        whole -= len(lines.pop()) + 1  # a torn line whose end reached the device before its middle
    if data.find(_HEAD, whole + 1) >= 0:  # two lines run together: the byte that is damaged is not in the last one
        raise _damaged("line does not check", len(lines), whole, path)
    if not lines:
        raise FormatError("not a journal: its first line is not whole", where=path, offset=0, hint=_RESTART)
    entries: list[Entry] = []
    identity: dict[str, Any] = {}
    offset = 0
    for number, line in enumerate(lines):
        document = _document(line, number, offset, path)
        if number == 0:
            identity = _identity(document, path)
        else:
            try:
                entries.append(msgspec.convert(document, Entry, strict=True))
            except msgspec.ValidationError as error:
                raise _damaged(f"entry is malformed: {error}", number, offset, path) from None
        offset += len(line) + 1
    return JournalContents(identity, tuple(entries), whole, len(data) - whole)


def reserve_path(path: Path) -> Path:
    """The file whose space is given up when the journal finds the device full."""
    return path.with_name(path.name + RESERVE_SUFFIX)


def remove_reserve(path: Path, *, system: System = SYSTEM) -> None:
    """Delete the reserve of the journal at ``path``, if there is one."""
    with translated("delete", reserve_path(path), system=system), suppress(FileNotFoundError):
        system.unlink(reserve_path(path))


def remove_journal(path: Path, *, system: System = SYSTEM) -> None:
    """Delete a journal and its reserve, durably: at the end of a pack, or to begin anew."""
    remove_reserve(path, system=system)
    with translated("delete", path, system=system), suppress(FileNotFoundError):
        system.unlink(path)
    flush_directory(path.parent, system=system)


def _read_all(path: Path, system: System) -> bytes:
    with translated("read", path, system=system):
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise FormatError("journal is not a regular file", where=path)
            if found.st_size > MAX_BYTES:
                raise FormatError(
                    "journal is too long", where=path, expected=f"at most {MAX_BYTES}", found=found.st_size
                )
            data = bytearray()
            while piece := read_some(fd, READ_BYTES, len(data), system=system):
                data += piece
                if len(data) > MAX_BYTES:
                    raise FormatError("journal grew while it was read", where=path)
            return bytes(data)
        finally:
            system.close(fd)


def _line(number: int, entry: bytes) -> bytes:
    body = _HEAD + b'%d,"entry":%s' % (number, entry)
    return b'%s,"check":"%s"}\n' % (body, _check(body))


def _check(body: bytes) -> bytes:
    return blake3(body).hexdigest()[:16].encode()


_HEAD = b'{"seq":'  # strings in JSON cannot spell this, their quotes are escaped: it stands once a line
_TAIL = re.compile(rb',"check":"([0-9a-f]{16})"\}\Z')


def _checks(line: bytes) -> bool:
    tail = _TAIL.search(line, max(0, len(line) - 40))
    return tail is not None and _check(line[: tail.start()]) == tail[1]


def _document(line: bytes, number: int, offset: int, path: Path) -> Any:
    """The entry of a line whose check, number and members are right."""
    if not _checks(line):
        raise _damaged("line does not check", number, offset, path)
    document = parse_object(line, where=f"{path}: line {number + 1}")
    if list(document) != ["seq", "entry", "check"]:
        raise _damaged("line has other members", number, offset, path, "seq, entry, check", ", ".join(document)[:80])
    if type(document["seq"]) is not int or document["seq"] != number:
        raise _damaged("line is out of sequence", number, offset, path, number, str(document["seq"])[:40])
    return document["entry"]


def _identity(entry: Any, path: Path) -> dict[str, Any]:
    if not isinstance(entry, dict) or entry.get("kind") != "identity" or not isinstance(entry.get("identity"), dict):
        raise FormatError("journal does not begin with an identity", where=path, offset=0, hint=_RESTART)
    if type(entry.get("version")) is not int or entry["version"] != JOURNAL_VERSION:
        raise FormatError(
            "journal has an unknown version",
            where=path,
            expected=JOURNAL_VERSION,
            found=str(entry.get("version"))[:40],
            hint="continue with the version of moepack that began it, or " + _RESTART,
        )
    identity: dict[str, Any] = entry["identity"]
    return identity


def _damaged(
    what: str, number: int, offset: int, path: Path, expected: object = None, found: object = None
) -> FormatError:
    return FormatError(
        f"journal is damaged in line {number + 1}: {what}",
        where=path,
        offset=offset,
        expected=expected,
        found=found,
        hint=_RESTART,
    )


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
