"""A repository as the source of a pack: its headers at once, its shards one by one, for as long as they are needed.

Opening brings the small files and, by range requests, the header of every shard into a staging folder; with these a
checkpoint can be opened and planned to the byte. Shards then come when they are asked for. When they go is for the
pack to decide; what went is remembered, and its digest stays known.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from formats.errors import FormatError, Interrupted, UsageError
from formats.headers import LENGTH_BYTES, header_length, header_path, pack_header, read_kept_header
from packer.fetch import answers
from packer.fetch.client import request
from packer.fetch.hub import Access
from packer.fetch.listing import WORK_DIR, Fetched, Listing, RemoteFile, Selection, needs_index
from packer.fetch.partial import make_folders, partial_bytes
from packer.fetch.receipt import untouched
from packer.fetch.repository import Folder, Meter, Report, fetch_all, fetch_index, open_folder, prepare, select_here
from packer.fetch.retry import Patience, Trouble
from packer.fetch.transfer import Conditions, fetch_file
from packer.pool import Pool
from packer.storage import durable
from packer.storage.lock import exclusive
from packer.storage.system import translated

HEADERS_DIR = "headers"


@dataclass(frozen=True)
class ShardSource:
    """A staging folder that is open for a pack: every method may be called from any thread.

    Attributes:
        directory: the folder; ``open_checkpoint(directory, headers=source.headers)`` opens it.
        headers: where headers of shards are kept.
        listing: the repository at its commit.
        selection: its shards and the small files, which are all here.
    """

    directory: Path
    headers: Path
    listing: Listing
    selection: Selection
    _access: Access
    _folder: Folder

    @property
    def expected_sha256(self) -> Mapping[str, str]:
        """SHA-256 of every shard of which the repository or an earlier fetch told it."""
        return self._folder.receipt.expected_sha256

    def shard_bytes(self, name: str) -> int:
        """Length of a shard, here or not.

        Raises:
            UsageError: no such shard.
        """
        return self._shard(name).bytes

    def held_bytes(self) -> int:
        """Bytes of all shards that are in the folder, whole or in part: what counts against a limit of staging."""
        held = 0
        for file in self.selection.shards:
            with suppress(OSError):
                held += (self.directory / file.path).lstat().st_size
            held += partial_bytes(self.directory, file)
        return held

    def present(self, name: str) -> bool:
        """Whether a shard is here and was compared with its digest; nothing is read of it."""
        return untouched(self.directory, self._folder.receipt.entries[self._shard(name).path])

    def fetch(self, name: str, *, stop: threading.Event | None = None, progress: Report | None = None) -> Fetched:
        """Have a shard here, whole and compared with its digest; one that was released comes again.

        Raises:
            UsageError: no such shard, or another file in its place.
            IntegrityError, EnvironmentProblem, Interrupted: as ``packer.fetch.transfer.fetch_file``.
        """
        file = self._shard(name)
        conditions = replace(self._folder.conditions, stop=stop or self._folder.conditions.stop)
        meter = Meter(progress or (lambda _: None), file.bytes)
        meter.at(name)
        if self._folder.present(file, rehash=False, report=meter.add):
            entry = self._folder.receipt.entries[name]
            return Fetched(name, file.bytes, entry.sha256 or "", entry.mtime_ns or 0, 0)
        conditions = replace(conditions, report=meter.add, keep_wrong=False)
        fetched = fetch_file(self._access, self.listing, name, self.directory, conditions=conditions)
        self._folder.note_present(fetched)
        return fetched

    def note_released(self, name: str) -> None:
        """Remember, durably, that a shard was deleted on purpose; the pack's own journal says when that is allowed."""
        path = self._shard(name).path
        self._folder.update(lambda receipt: receipt.with_released(path))

    def _shard(self, name: str) -> RemoteFile:
        for file in self.selection.shards:
            if file.path == name:
                return file
        raise UsageError("no such shard in the repository", where=f"{self.listing.repository}: {name}")


@contextmanager
def open_shard_source(
    access: Access,
    listing: Listing,
    directory: Path,
    *,
    conditions: Conditions | None = None,
    jobs: int = 4,
    progress: Report | None = None,
) -> Iterator[ShardSource]:
    """Open a staging folder in a ``with`` block, for which its lock is held.

    Args:
        access, listing: from ``packer.fetch.hub``.
        directory: made if it is not there; its parent must be. What an earlier pack or fetch left in it is used.
        conditions: budget, stop event and so on.
        jobs: requests at a time.
        progress: called while small files and headers arrive.

    Raises:
        UsageError: the folder was begun with another source.
        FormatError: the repository has no checkpoint in safetensors, or a header is malformed.
        EnvironmentProblem: network, disk, or another process at work here.
        Interrupted: stopped.

    Example:
        with open_shard_source(hub, listing, Path("staging")) as source:
            with open_checkpoint(source.directory, headers=source.headers) as checkpoint:
                ...
    """
    conditions = conditions or Conditions()
    indexed = needs_index(listing)
    with exclusive(prepare(directory, conditions), system=conditions.system):
        folder = open_folder(directory, listing, conditions)
        if indexed:
            fetch_index(access, folder)
        selection = select_here(listing, directory, indexed=indexed)
        folder.update(lambda receipt: receipt.with_wanted(frozenset(file.path for file in selection.wanted)))
        meter = Meter(progress or (lambda _: None), sum(file.bytes for file in selection.others))
        missing = [file for file in selection.others if not folder.present(file, rehash=False, report=meter.add)]
        for fetched in fetch_all(access, folder, missing, jobs=jobs, meter=meter):
            meter.at(fetched.name)
        headers = directory / WORK_DIR / HEADERS_DIR
        fetch_headers(access, listing, selection.shards, headers, conditions=conditions, jobs=jobs)
        yield ShardSource(directory, headers, listing, selection, access, folder)


def fetch_headers(
    access: Access,
    listing: Listing,
    shards: tuple[RemoteFile, ...],
    folder: Path,
    *,
    conditions: Conditions | None = None,
    jobs: int = 4,
) -> int:
    """Have the header of every shard in ``folder``, by two range requests each; those that are there are checked only.

    Returns:
        Bytes that came over the network.

    Raises:
        FormatError: a header is malformed or too long.
        EnvironmentProblem: network or disk.
        Interrupted: stopped.
    """
    conditions = conditions or Conditions()
    durable.make_directory(folder, system=conditions.system)
    missing = []
    for file in shards:
        make_folders(folder, file.path, system=conditions.system)
        try:
            kept = read_kept_header(folder, file.path)
        except FormatError:  # from an earlier run that was not ours, or a damaged disk: fetch it again
            kept = None
        if kept is None or kept[0].bytes != file.bytes:
            missing.append(file)

    def fetch(file: RemoteFile) -> int:
        return _fetch_header(access, listing, file, folder, conditions)

    with Pool(jobs, "headers") as pool:
        return sum(pool.in_order(fetch, missing))


def _fetch_header(access: Access, listing: Listing, file: RemoteFile, folder: Path, conditions: Conditions) -> int:
    head = _read_range(access, listing, file, 0, min(LENGTH_BYTES, file.bytes), conditions)
    answers.refuse_head(head, file, host=listing.repository)
    length = header_length(head, file.bytes, name=file.path)
    data = _read_range(access, listing, file, LENGTH_BYTES, LENGTH_BYTES + length, conditions)
    path = header_path(folder, file.path)
    durable.write_file(path, [pack_header(head + data, file.bytes)], system=conditions.system)
    try:
        read_kept_header(folder, file.path)  # what is malformed must not be found there by the next run
    except FormatError:
        with translated("delete", path, system=conditions.system):
            conditions.system.unlink(path)
        raise
    return len(head) + len(data)


def _read_range(
    access: Access, listing: Listing, file: RemoteFile, start: int, stop: int, conditions: Conditions
) -> bytes:
    """Bytes ``start`` to ``stop`` of a file, into memory; the caller has bounded them."""
    data = bytearray()
    patience = Patience(conditions.limits, f"header of {file.path}", conditions.rng)
    while start + len(data) < stop:
        try:
            _read_once(access, listing, file, start, stop, data, conditions)
        except Trouble as trouble:
            if trouble.restart:
                data.clear()
            if conditions.stop.wait(patience.failed(trouble, len(data))):
                raise Interrupted("stopped") from None
    return bytes(data)


def _read_once(
    access: Access,
    listing: Listing,
    file: RemoteFile,
    start: int,
    stop: int,
    data: bytearray,
    conditions: Conditions,
) -> None:
    """One request; a server that knows no ranges sends the file from its start, of which the rest is left unread."""
    at = start + len(data)
    headers = {**access.headers(), "Range": f"bytes={at}-{stop - 1}"}
    url = access.url(listing, file.path)
    with request(url, headers, limits=conditions.limits, stop=conditions.stop) as answer:
        skip = at - answers.body_start(answer, listing, file, offset=at, etag=None)
        while skip > 0 or start + len(data) < stop:
            piece = answer.read(skip or stop - start - len(data))
            if not piece:
                raise Trouble(f"{answer.host}: header ends early")
            if skip:
                skip -= len(piece)
            else:
                data += piece
