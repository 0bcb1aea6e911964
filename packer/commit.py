"""The durable commit of one output file: begin or continue, read back, announce, rename, record; or copy in one go.

What stands on the disk counts only as far as the journal knows it, and what the journal knows only as far as it stands
on the disk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

from formats import layout
from formats.errors import FormatError, Interrupted, UsageError
from formats.manifest import ASSETS_DIR, TRUNK_NAME
from packer.job import Job
from packer.preflight import inside
from packer.storage import durable
from packer.storage.durable import Extent, Output
from packer.storage.journal import FileBegun, FileDone, FileIntent
from packer.storage.system import WriteLost

COPY_BYTES = 8 << 20


def check_files(job: Job) -> None:
    """Keep what stands on the disk as the journal says; forget the rest, so that it is made again."""
    known = list(job.outcome.files.items())
    found = job.pool.in_order(lambda item: _digest(job, item[0]), known)
    for (name, (length, digest)), present in zip(known, found, strict=True):
        path = inside(job.out, name)
        job.tell(f"checking {name}")
        if job.stop.is_set():
            job.abandon.set()  # digests not yet begun are not worth the wait
            raise Interrupted("stopped before the container was complete", where=job.out)
        if present is None:
            job.outcome.forget(job.plan, name, keep_units=name in job.outcome.intents)
        elif present != (length, bytes.fromhex(digest)):
            job.system.unlink(path)
            job.outcome.forget(job.plan, name)
        elif name in job.outcome.intents:
            durable.flush_directory(path.parent, system=job.system)
            job.note(FileDone(name, length, digest))
    for name in job.plan.unit_files:
        path = inside(job.out, name)
        if name in job.outcome.files:
            continue
        if os.path.lexists(path):
            raise UsageError("file is in the way, and the journal does not know it", where=path, hint="remove it")
        if name in job.outcome.begun and not _is_whole(job, name):
            job.outcome.forget(job.plan, name)


def _digest(job: Job, name: str) -> tuple[int, bytes] | None:
    """Length and BLAKE3 of a published file as it is now; None if it is not there, or nobody waits any more."""
    path = inside(job.out, name)
    if job.abandon.is_set() or path.is_symlink() or not path.is_file():
        return None
    return durable.file_digest(path, system=job.system)


def _is_whole(job: Job, name: str) -> bool:
    """Whether the temporary of a file is there, with its full length."""
    try:
        found = durable.temporary_path(job.out / name).lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == job.plan.file_bytes(name)


def open_output(job: Job, name: str) -> Output:
    """The temporary of a bank or of the trunk, continued or begun."""
    path = job.out / name
    if path.parent != job.out:
        durable.make_directory(path.parent, system=job.system)
    length = job.plan.file_bytes(name)
    return _continued(job, name, length) or _begun(job, name, length)


def _continued(job: Job, name: str, length: int) -> Output | None:
    """The temporary of an earlier run, if this journal made it and it is whole; any other is deleted."""
    path = job.out / name
    if name not in job.outcome.begun:
        durable.discard(path, system=job.system)
        return None
    output = durable.reopen(path, system=job.system)
    if output is not None and os.fstat(output.fd).st_size != length:
        durable.abandon(output, system=job.system)
        return None
    return output


def _begun(job: Job, name: str, length: int) -> Output:
    """A new temporary; it counts only once the journal knows it."""
    output = durable.create(job.out / name, system=job.system)
    try:
        durable.set_length(output, length, system=job.system)
        if name == TRUNK_NAME:
            durable.write_at(output, 0, layout.pack_trunk_header(length), system=job.system)
        durable.flush(output, system=job.system)
        job.note(FileBegun(name))
    except WriteLost:
        raise  # the flush that failed has deleted it
    except BaseException:
        durable.abandon(output, system=job.system)
        raise
    return output


def publish(job: Job, name: str) -> None:
    """Read back, announce, rename, record: the order of the durable commit."""
    path = job.out / name
    temporary = durable.temporary_path(path)
    extents = [Extent(start, length, digest) for start, length, digest in job.outcome.extents(job.plan, name)]
    try:
        digest = durable.read_back(temporary, extents, system=job.system)
    except WriteLost:
        durable.discard(path, system=job.system)
        raise
    length = job.plan.file_bytes(name)
    job.note(FileIntent(name, length, digest.hex()))
    durable.publish(path, system=job.system)
    job.note(FileDone(name, length, digest.hex()))


def write(job: Job, name: str, pieces: Iterable[bytes]) -> None:
    """A file that is written in one go: the index, the manifest, an asset."""

    def announce(length: int, digest: bytes) -> None:
        job.journal.append(FileIntent(name, length, digest.hex()))

    length, digest = durable.write_file(job.out / name, pieces, before_rename=announce, system=job.system)
    job.note(FileDone(name, length, digest.hex()))


def copy_asset(job: Job, path: str, length: int) -> None:
    """Copy a small file of the source; it must have the length that was planned."""
    source = job.checkpoint.directory / path.removeprefix(f"{ASSETS_DIR}/")
    for parent in reversed([item for item in (job.out / path).parents if job.out in item.parents]):
        durable.make_directory(parent, system=job.system)
    try:
        with source.open("rb") as file:
            write(job, path, iter(lambda: file.read(COPY_BYTES), b""))
    except FileNotFoundError:
        raise FormatError("file is missing", where=source) from None
    found = job.outcome.files[path][0]
    if found != length:
        raise FormatError("file changed since the plan was made", where=source, expected=length, found=found)
