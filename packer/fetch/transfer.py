"""One file from a repository to its final name: resumed inside, hashed while it streams, named when it is right."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from formats.errors import IntegrityError, Interrupted, UsageError
from packer.fetch import answers
from packer.fetch.client import CHUNK_BYTES, request
from packer.fetch.hub import Access
from packer.fetch.listing import Fetched, FileDigest, Listing, RemoteFile
from packer.fetch.partial import Partial, open_partial
from packer.fetch.retry import Limits, Patience, Trouble
from packer.storage.system import SYSTEM, System

ETAG_FROM_BYTES = 1 << 20  # a file that is shorter is not worth a second one beside it


def _silent(count: int) -> None:
    """Nobody asked."""


@dataclass(frozen=True)
class Conditions:
    """Under which files are fetched.

    Attributes:
        limits: the budget of each file.
        stop: set it to stop; what has arrived is kept.
        report: called with bytes as they become part of a file, and with a negative number when some turn out wrong.
        keep_wrong: set files with wrong bytes aside instead of deleting them.
        rng: for the jitter of delays.
        system: the system calls.
    """

    limits: Limits = field(default_factory=Limits)
    stop: threading.Event = field(default_factory=threading.Event)
    report: Callable[[int], None] = _silent
    keep_wrong: bool = True
    rng: random.Random = field(default_factory=random.Random)
    system: System = SYSTEM


def fetch_file(
    access: Access, listing: Listing, name: str, directory: Path, *, conditions: Conditions | None = None
) -> Fetched:
    """Fetch the file ``name`` of ``listing`` into ``directory``, continuing where an earlier call stopped.

    A file of that name is replaced, by rename, once the new one is proven. The caller holds the directory's lock; files
    with different names may be fetched at the same time.

    Args:
        access: where files are and with which credentials.
        listing: what the repository holds.
        name: a path of the listing.
        directory: exists.
        conditions: budget, stop event and so on.

    Raises:
        UsageError: no such file in the listing.
        IntegrityError: the bytes are not those of the listing, twice over.
        FormatError: a Git LFS pointer in the place of a shard.
        EnvironmentProblem: network, disk or permissions; what has arrived is kept.
        Interrupted: the stop event was set; what has arrived is kept.

    Example:
        hub = open_hub()
        listing = list_repository(hub, "owner/name", revision="main")
        fetch_file(hub, listing, "config.json", Path("folder")).sha256
    """
    conditions = conditions or Conditions()
    file = listing.file(name)
    if file is None:
        raise UsageError("no such file in the repository", where=f"{listing.repository}: {name}")
    received, wrong = 0, None
    while True:
        partial = open_partial(directory, file, system=conditions.system)
        try:
            transfer = _Transfer(access, listing, file, partial, conditions)
            transfer.run()
        except BaseException:
            with suppress(Exception):
                partial.close()
            raise
        received += transfer.received
        if transfer.digest.right():
            mtime_ns = _publish(partial, file)
            if wrong is not None:
                with suppress(OSError):
                    conditions.system.unlink(wrong)
            return Fetched(file.path, file.bytes, transfer.digest.sha256, mtime_ns, received)
        conditions.report(-file.bytes)
        second = wrong is not None
        wrong = _put_away(partial, keep=conditions.keep_wrong, system=conditions.system)
        if second:
            raise IntegrityError(
                "fetched twice, and twice its bytes were not those that the repository lists",
                where=file.path,
                expected=file.digest,
                found=transfer.digest.found(),
                hint=f"set aside as {wrong}"
                if conditions.keep_wrong
                else "the mirror, a proxy or this disk is at fault",
            )


def _publish(partial: Partial, file: RemoteFile) -> int:
    head = partial.read(0)[: answers.HEAD_BYTES] if file.bytes < answers.HEAD_BYTES else b""
    try:
        answers.refuse_head(head, file, host="repository")
    except BaseException:
        partial.close()
        raise
    partial.publish()
    return (partial.output.path).stat().st_mtime_ns


def _put_away(partial: Partial, *, keep: bool, system: System) -> Path:
    wrong = partial.set_aside()
    if not keep:
        with suppress(OSError):
            system.unlink(wrong)
    return wrong


class _Transfer:
    """The attempts at one body."""

    def __init__(
        self, access: Access, listing: Listing, file: RemoteFile, partial: Partial, conditions: Conditions
    ) -> None:
        self.digest = FileDigest(file)
        self.received = 0
        self._access = access
        self._listing = listing
        self._file = file
        self._partial = partial
        self._conditions = conditions

    def run(self) -> None:
        """Until all bytes are there, right or wrong."""
        conditions, partial = self._conditions, self._partial
        self._hash_what_is_there()
        patience = Patience(conditions.limits, self._file.path, conditions.rng)
        while partial.length < self._file.bytes:
            try:
                self._attempt()
            except Trouble as trouble:
                if trouble.restart:
                    self._restart(None)
                if conditions.stop.wait(patience.failed(trouble, partial.length)):
                    raise Interrupted("stopped") from None

    def _hash_what_is_there(self) -> None:
        position = 0
        while position < self._partial.length:
            if self._conditions.stop.is_set():
                raise Interrupted("stopped")
            piece = self._partial.read(position)
            if not piece:  # shorter than it was when it was opened
                self._restart(None)
                return
            self.digest.update(piece)
            position += len(piece)
            self._conditions.report(len(piece))

    def _restart(self, etag: str | None) -> None:
        if self._partial.length:
            self._conditions.report(-self._partial.length)
        self._partial.restart(etag if self._file.bytes >= ETAG_FROM_BYTES else None)
        self.digest = FileDigest(self._file)

    def _attempt(self) -> None:
        """One request, and as much of its body as comes."""
        file, partial, conditions = self._file, self._partial, self._conditions
        offset = partial.length
        headers = dict(self._access.headers())
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if partial.etag is not None:
                headers["If-Range"] = partial.etag
        url = self._access.url(self._listing, file.path)
        with request(url, headers, limits=conditions.limits, stop=conditions.stop) as answer:
            start = answers.body_start(answer, self._listing, file, offset=offset, etag=partial.etag)
            if start == 0:
                self._restart(answers.strong_etag(answer))
            while partial.length < file.bytes:
                if conditions.stop.is_set():
                    raise Interrupted("stopped")
                rest = file.bytes - partial.length
                data = answer.read(min(CHUNK_BYTES, rest))
                if not data:
                    raise Trouble(f"{answer.host}: body ends {rest} bytes early")
                self.received += len(data)
                if partial.length == 0:
                    answers.refuse_head(data[: answers.HEAD_BYTES], file, host=answer.host)
                partial.append(data, needed=rest)
                self.digest.update(data)
                conditions.report(len(data))
