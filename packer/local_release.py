"""A local folder whose shards the user allows to be deleted: ``moepack fetch`` made it, so digests are known.

The folder's receipt remembers what went, and headers of its shards are kept in it, so that it can still be planned.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import UsageError
from formats.headers import LENGTH_BYTES, header_length, header_path, pack_header
from packer.disk import check_whole
from packer.fetch.listing import WORK_DIR
from packer.fetch.partial import make_folders
from packer.fetch.provenance import Provenance
from packer.fetch.receipt import Receipt, read_receipt, write_receipt
from packer.fetch.repository import LOCK_NAME
from packer.fetch.shards import HEADERS_DIR
from packer.planning.plan import Plan
from packer.storage import durable
from packer.storage.lock import exclusive
from packer.storage.system import SYSTEM, System, read_some, translated


class LocalRelease:
    """A folder of which shards may go; made by :func:`open_local_release`."""

    def __init__(self, directory: Path, receipt: Receipt, system: System) -> None:
        self._directory = directory
        self._receipt = receipt
        self._system = system

    def present(self, name: str) -> bool:
        """Whether the receipt lists a shard: the user allowed all of these to go, and its digest was compared."""
        return name in self._receipt.entries and os.path.lexists(self._directory / name)

    def note_released(self, name: str) -> None:
        """Remember in the receipt, durably, that a shard was deleted on purpose."""
        changed = self._receipt.with_released(name)
        if changed != self._receipt:
            write_receipt(self._directory, changed, system=self._system)
            self._receipt = changed


def kept_headers(directory: Path) -> Path | None:
    """Where headers are kept of a folder from which shards are released; None for any other folder.

    They are kept before the first shard goes, and a run can end between that and the receipt's note of it, so the
    folder of headers decides and not the receipt's list.

    Raises:
        FormatError: the folder's receipt is damaged.
    """
    receipt = read_receipt(directory)
    folder = directory / WORK_DIR / HEADERS_DIR
    return folder if receipt is not None and folder.is_dir() else None


def check_releasable(checkpoint: Checkpoint, plan: Plan, provenance: Provenance) -> None:
    """Refuse to release what could be lost by it; nothing is changed.

    Raises:
        UsageError: a partial plan or a shard without a known digest (REL-05), a link in the place of a shard (REL-04).
    """
    directory = checkpoint.directory
    check_whole(plan)
    for name in plan.shard_lengths:
        if name not in provenance.sha256:
            raise UsageError(
                "shard cannot be released: no repository says what its digest must be",
                where=directory / name,
                hint="bring the source here with `moepack fetch`, or leave out --release-source",
            )
        behind = [directory / parent for parent in Path(name).parents if str(parent) != "."]
        for path in (directory / name, *behind):
            if path.is_symlink():
                raise UsageError(
                    "shard cannot be released: it is a link, or lies behind one, and what it leads to is not ours",
                    where=path,
                    hint="leave out --release-source",
                )


@contextmanager
def open_local_release(
    checkpoint: Checkpoint, plan: Plan, provenance: Provenance, *, system: System = SYSTEM
) -> Iterator[LocalRelease]:
    """Prepare a folder for the release of its shards, for the duration of a ``with`` block that holds its lock.

    Raises:
        UsageError: see :func:`check_releasable`.
        EnvironmentProblem: the folder cannot be written, or a fetch is at work in it.
    """
    directory = checkpoint.directory
    check_releasable(checkpoint, plan, provenance)
    durable.make_directory(directory / WORK_DIR, system=system)
    with exclusive(directory / WORK_DIR / LOCK_NAME, system=system):
        receipt = read_receipt(directory, system=system)
        if receipt is None:
            raise UsageError("the folder's receipt is gone", where=directory)
        _keep_headers(directory, plan, system)
        yield LocalRelease(directory, receipt, system)


def _keep_headers(directory: Path, plan: Plan, system: System) -> None:
    """Copy the headers of all shards that are here to where a folder keeps them."""
    folder = directory / WORK_DIR / HEADERS_DIR
    durable.make_directory(folder, system=system)
    for name, length in plan.shard_lengths.items():
        path = directory / name
        if not os.path.lexists(path):
            continue  # it went in an earlier run, which kept its header
        with translated("read", path, system=system):
            fd = system.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0)
            try:
                start = _read(fd, 0, LENGTH_BYTES, system)
                start += _read(fd, LENGTH_BYTES, header_length(start, length, name=name), system)
            finally:
                system.close(fd)
        make_folders(folder, name, system=system)
        durable.write_file(header_path(folder, name), [pack_header(start, length)], system=system)


def _read(fd: int, offset: int, length: int, system: System) -> bytes:
    data = b""
    while len(data) < length and (piece := read_some(fd, length - len(data), offset + len(data), system=system)):
        data += piece
    return data
