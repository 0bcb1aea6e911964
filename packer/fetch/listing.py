"""What a repository holds at one commit: names, lengths and digests, checked before anything is made of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from formats.assets import INDEX_NAME, MAX_ASSET_BYTES, MAX_FILES, WEIGHT_SUFFIXES
from formats.checkpoint import SINGLE_NAME
from formats.errors import FormatError, UsageError
from formats.names import check_distinct, check_relative_name, folded

WORK_DIR = ".moepack-fetch"
RECEIPT_NAME = ".moepack-source.json"
MAX_FILE_BYTES = 1 << 50

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OID = re.compile(r"[0-9a-f]{40}")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
_USUAL_SHARD = re.compile(r"model(?:-[0-9]+-of-[0-9]+)?\.safetensors")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a repository.

    Attributes:
        path: relative POSIX path, safe by the grammar of ``formats.names``.
        bytes: its length.
        sha256: of its bytes in hex, known of files in large file storage (every shard is one).
        git_oid: SHA-1 of its git blob in hex, known of the others.
    """

    path: str
    bytes: int
    sha256: str | None
    git_oid: str | None

    @property
    def digest(self) -> str:
        """The digest that decides whether bytes are this file's, with its kind."""
        return f"SHA-256 {self.sha256}" if self.sha256 is not None else f"git blob {self.git_oid}"


@dataclass(frozen=True)
class Listing:
    """A repository at one commit. ``endpoint`` is where it was asked for, ``revision`` how it was asked for."""

    endpoint: str
    repository: str
    revision: str
    commit: str
    files: tuple[RemoteFile, ...]

    def file(self, path: str) -> RemoteFile | None:
        """The file of that name, if there is one."""
        return next((file for file in self.files if file.path == path), None)


@dataclass(frozen=True)
class Selection:
    """Which files of a listing make up the checkpoint: shards, what goes along, and what is left out."""

    shards: tuple[RemoteFile, ...]
    others: tuple[RemoteFile, ...]
    skipped: tuple[RemoteFile, ...]

    @property
    def wanted(self) -> tuple[RemoteFile, ...]:
        """Everything to fetch: small files first, shards by name."""
        return self.others + self.shards


@dataclass(frozen=True)
class Fetched:
    """A file that stands under its final name.

    Attributes:
        name: its relative path.
        bytes: its length.
        sha256: of its bytes in hex.
        mtime_ns: its modification time; a file with this time and length was not touched since.
        received_bytes: that came over the network for it in this call, all attempts together.
    """

    name: str
    bytes: int
    sha256: str
    mtime_ns: int
    received_bytes: int


class Hasher(Protocol):
    """What ``hashlib`` gives."""

    def update(self, data: bytes, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Digest in hex."""


class FileDigest:
    """Both digests of a file, computed while its bytes pass. ``file`` says how long it will be, as git hashes that."""

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self._git: Hasher | None = None
        if file.sha256 is None:
            self._git = hashlib.sha1(b"blob %d\0" % file.bytes, usedforsecurity=False)

    def update(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes so far, in hex."""
        return self._sha256.hexdigest()

    def found(self) -> str:
        """The digest of the bytes so far, in the words of :attr:`RemoteFile.digest`."""
        return f"SHA-256 {self.sha256}" if self._git is None else f"git blob {self._git.hexdigest()}"

    def right(self) -> bool:
        """Whether the bytes are those that the repository has."""
        return self.found() == self._file.digest


def check_repository_name(name: str) -> str:
    """``name`` if it can be that of a repository (``owner/name``, or the bare name of an old one).

    Raises:
        UsageError: it cannot.
    """
    if not _REPOSITORY.fullmatch(name) or any(bad in name for bad in ("..", "--")) or name.endswith((".git", ".")):
        raise UsageError("not the name of a repository", where=repr(name)[:200], expected="OWNER/NAME")
    return name


def is_commit(text: str) -> bool:
    """Whether ``text`` is a whole commit hash."""
    return _COMMIT.fullmatch(text) is not None


def checked_listing(endpoint: str, repository: str, revision: str, commit: str, files: Sequence[RemoteFile]) -> Listing:
    """A listing whose every name, length and digest can be used without another look.

    Raises:
        FormatError: an unsafe or repeated name, a file that is another one's folder, a length or digest out of form.
    """
    where = f"{repository}@{commit[:12]}"
    if len(files) > MAX_FILES:
        raise FormatError("too many files", where=where, expected=f"at most {MAX_FILES}", found=len(files))
    reserved = {folded(RECEIPT_NAME), folded(WORK_DIR)}
    for file in files:
        check_relative_name(file.path, where=where)
        if folded(file.path.split("/")[0]) in reserved:
            raise FormatError("file name is one that moepack uses itself", where=where, found=repr(file.path))
        if type(file.bytes) is not int or not 0 <= file.bytes <= MAX_FILE_BYTES:
            raise FormatError(
                "length is not known or out of range", where=f"{where}: {file.path}", found=repr(file.bytes)[:80]
            )
        known = (file.sha256, _SHA256) if file.sha256 is not None else (file.git_oid, _OID)
        if type(known[0]) is not str or not known[1].fullmatch(known[0]):
            raise FormatError(
                "digest is not known or malformed", where=f"{where}: {file.path}", found=repr(known[0])[:80]
            )
    check_distinct((file.path for file in files), where=where)
    folders = {folded(part) for file in files for part in _folders(file.path)}
    for file in files:
        if folded(file.path) in folders:
            raise FormatError("a file and a folder have one name", where=where, found=repr(file.path))
    return Listing(endpoint, repository, revision, commit, tuple(sorted(files, key=lambda file: file.path)))


def _folders(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def needs_index(listing: Listing) -> bool:
    """Whether the shards are named by an index.

    Raises:
        FormatError: the repository has neither an index nor a single ``model.safetensors``.
    """
    if listing.file(INDEX_NAME) is not None:
        return True
    if listing.file(SINGLE_NAME) is None:
        weights = [file.path for file in listing.files if file.path.lower().endswith(WEIGHT_SUFFIXES)]
        raise FormatError(
            "repository has no checkpoint in safetensors",
            where=f"{listing.repository}@{listing.commit[:12]}",
            expected=f"{INDEX_NAME} or {SINGLE_NAME}",
            found=", ".join(weights[:10]) or "no weights",
            hint="Python pickles and other formats are never opened; look for a conversion to safetensors",
        )
    return False


def select(listing: Listing, shards: Sequence[str], *, everything: bool = False) -> Selection:
    """Choose the files that make up the checkpoint.

    Args:
        listing: of the repository.
        shards: names of the weight files, as the index has them.
        everything: take other weights and large files along as well.

    Raises:
        FormatError: the index names files that the repository does not have.
    """
    by_path = {file.path: file for file in listing.files}
    absent = sorted(name for name in set(shards) if name not in by_path)
    if absent:
        raise FormatError(
            f"repository lacks {len(absent)} of the shards that its index names",
            where=f"{listing.repository}@{listing.commit[:12]}",
            found=", ".join(absent[:10]),
        )
    chosen = frozenset(shards)
    others: list[RemoteFile] = []
    skipped: list[RemoteFile] = []
    for file in listing.files:
        if file.path not in chosen:
            weight = file.path.lower().endswith(WEIGHT_SUFFIXES) or file.bytes > MAX_ASSET_BYTES
            is_index = file.path == INDEX_NAME  # of a very large model it may be longer than any other small file
            (others if everything or is_index or not weight else skipped).append(file)
    return Selection(tuple(by_path[name] for name in sorted(chosen)), tuple(others), tuple(skipped))


def usual_shards(listing: Listing) -> list[str]:
    """Names that are those of shards by custom: what can be said before the index is here."""
    return [file.path for file in listing.files if _USUAL_SHARD.fullmatch(file.path)]
