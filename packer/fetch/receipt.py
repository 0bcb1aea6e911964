"""The receipt of a folder: which repository at which commit it is, and what is known of each of its files.

``.moepack-source.json`` is written before the first body arrives and again after every file, each time whole, by
rename. A file that it calls present was compared with its digest; while length and modification time are as recorded,
that need not be done again. A file that it calls released was deleted on purpose after a pack had used it. The
receipt is input like any other: strict, bounded, and nobody is led out of the folder by it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta

from formats.errors import FormatError, UsageError
from formats.strict_json import parse_object
from packer.fetch.listing import RECEIPT_NAME, Fetched, Listing, RemoteFile, checked_listing, is_commit
from packer.storage.durable import write_file
from packer.storage.system import SYSTEM, System, read_some, translated

VERSION: Final = 1
MAX_BYTES = 16 << 20

Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Oid: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{40}\Z")]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=1024)]
State: TypeAlias = Literal["listed", "present", "released"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file. ``lfs_sha256`` and ``git_oid`` are what the repository says, ``sha256`` is what was found here.

    ``wanted`` is false for what was left out. ``mtime_ns`` and ``sha256`` belong to files that are or were present.
    """

    path: Text
    bytes: Count
    lfs_sha256: Digest | None
    git_oid: Oid | None
    wanted: bool
    state: State
    sha256: Digest | None
    mtime_ns: int | None


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Literal["moepack-source"]
    version: Literal[1]
    endpoint: Text
    repository: Text
    revision: Text
    commit: Annotated[str, Meta(pattern=r"^[0-9a-f]{40}([0-9a-f]{24})?\Z")]
    files: list[Entry]


@dataclass(frozen=True)
class Receipt:
    """What is known of a folder; a changed one is a new object."""

    listing: Listing
    entries: Mapping[str, Entry]

    @property
    def wanted(self) -> tuple[Entry, ...]:
        """What a complete folder holds, by name."""
        return tuple(entry for _, entry in sorted(self.entries.items()) if entry.wanted)

    @property
    def released(self) -> tuple[str, ...]:
        """Wanted files that were deleted after use."""
        return tuple(entry.path for entry in self.wanted if entry.state == "released")

    @property
    def expected_sha256(self) -> dict[str, str]:
        """SHA-256 by name, of every file of which it is known."""
        known = {entry.path: entry.lfs_sha256 or entry.sha256 for entry in self.entries.values()}
        return {path: digest for path, digest in known.items() if digest is not None}

    def with_present(self, fetched: Fetched) -> Receipt:
        """After a file was compared with its digest."""
        return self._with(fetched.name, state="present", sha256=fetched.sha256, mtime_ns=fetched.mtime_ns)

    def with_released(self, path: str) -> Receipt:
        """After a file was deleted on purpose; its digest stays known."""
        return self._with(path, state="released", mtime_ns=None)

    def with_listed(self, path: str) -> Receipt:
        """After a file was found absent or wrong."""
        return self._with(path, state="listed", sha256=None, mtime_ns=None)

    def with_wanted(self, wanted: frozenset[str]) -> Receipt:
        """After it was decided what makes up the checkpoint."""
        entries = {path: msgspec.structs.replace(entry, wanted=path in wanted) for path, entry in self.entries.items()}
        return Receipt(self.listing, MappingProxyType(entries))

    def _with(self, path: str, **changes: object) -> Receipt:
        entries = dict(self.entries)
        entries[path] = msgspec.structs.replace(entries[path], **changes)
        return Receipt(self.listing, MappingProxyType(entries))


def new_receipt(listing: Listing) -> Receipt:
    """The receipt of a folder in which nothing is known to be present."""
    entries = {
        file.path: Entry(file.path, file.bytes, file.sha256, file.git_oid, True, "listed", None, None)
        for file in listing.files
    }
    return Receipt(listing, MappingProxyType(entries))


def untouched(directory: Path, entry: Entry) -> bool:
    """Whether a file that was present is there with the length and time that it had."""
    if entry.state != "present":
        return False
    try:
        found = (directory / entry.path).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and (found.st_size, found.st_mtime_ns) == (entry.bytes, entry.mtime_ns)


def incomplete_files(directory: Path, receipt: Receipt) -> list[str]:
    """Wanted files that are not there in full, released ones left aside: no digest is computed."""
    absent = []
    for entry in receipt.wanted:
        try:
            size = (directory / entry.path).stat().st_size
        except OSError:
            size = -1
        if size != entry.bytes and entry.state != "released":
            absent.append(entry.path)
    return absent


def write_receipt(directory: Path, receipt: Receipt, *, system: System = SYSTEM) -> None:
    """Write the receipt durably; the caller holds the folder's lock."""
    listing = receipt.listing
    document = _Document(
        "moepack-source",
        VERSION,
        listing.endpoint,
        listing.repository,
        listing.revision,
        listing.commit,
        [entry for _, entry in sorted(receipt.entries.items())],
    )
    data = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    write_file(directory / RECEIPT_NAME, [data], system=system)


def read_receipt(directory: Path, *, system: System = SYSTEM) -> Receipt | None:
    """The receipt of ``directory``, or None if it has none.

    Raises:
        FormatError: it is damaged, or of an unknown version.
        EnvironmentProblem: it cannot be read.
    """
    path = directory / RECEIPT_NAME
    try:
        path.lstat()
    except FileNotFoundError:
        return None
    except OSError:
        pass  # shows again when it is opened
    document = parse_object(_read(path, system), where=str(path))
    if document.get("version") != VERSION and document.get("format") == "moepack-source":
        raise FormatError(
            "receipt has an unknown version", where=path, expected=VERSION, found=str(document.get("version"))[:40]
        )
    try:
        parsed = msgspec.convert(document, _Document, strict=True)
    except msgspec.ValidationError as error:
        raise FormatError(f"receipt is malformed: {error}", where=path, hint=f"remove {path}") from None
    files = [RemoteFile(entry.path, entry.bytes, entry.lfs_sha256, entry.git_oid) for entry in parsed.files]
    listing = checked_listing(parsed.endpoint, parsed.repository, parsed.revision, parsed.commit, files)
    for entry in parsed.files:
        if entry.state == "present" and (entry.sha256 is None or entry.mtime_ns is None):
            raise FormatError("receipt calls a file present and knows no digest of it", where=f"{path}: {entry.path}")
    return Receipt(listing, MappingProxyType({entry.path: entry for entry in parsed.files}))


def check_same_source(receipt: Receipt, listing: Listing, directory: Path) -> None:
    """Refuse to continue a folder with another repository, another commit, or other files at the same commit.

    Raises:
        UsageError: with each difference.
        FormatError: the commit is the same, and its files are not.
    """
    before = receipt.listing
    pairs = [("repository", before.repository, listing.repository), ("commit", before.commit, listing.commit)]
    differences = [f"{name} was {old}, is {new}" for name, old, new in pairs if old != new]
    if differences:
        moved = before.repository == listing.repository and not is_commit(listing.revision)
        hint = f"--revision {before.commit} continues with what was begun" if moved else None
        raise UsageError(
            "folder was begun with another source: " + ", ".join(differences),
            where=directory,
            hint=(f"{hint}; " if hint else "") + "for the other source use another folder",
        )
    if before.files != listing.files:
        old = {file.path: file for file in before.files}
        new = {file.path: file for file in listing.files}
        changed = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
        raise FormatError(
            f"{len(changed)} files of the commit are listed differently than before",
            where=directory,
            found=", ".join(changed[:10]),
            hint="a commit cannot change: the server, or the mirror before it, is not to be trusted",
        )


def _read(path: Path, system: System) -> bytes:
    with translated("read", path, system=system):
        fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
                raise FormatError(
                    "receipt is no regular file, or too long", where=path, expected=f"at most {MAX_BYTES} bytes"
                )
            data = bytearray()
            while piece := read_some(fd, MAX_BYTES + 1 - len(data), len(data), system=system):
                data += piece
            return bytes(data)
        finally:
            system.close(fd)
