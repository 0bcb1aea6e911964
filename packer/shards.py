"""The identity of source shards: SHA-256 over whole files, the digest under which repositories publish them."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from formats.errors import EnvironmentProblem, FormatError, IntegrityError, Interrupted, UsageError
from packer.storage.journal import ShardSeen

READ_BYTES = 8 << 20


def hash_shard(directory: Path, name: str, *, stop: threading.Event, expected: str | None = None) -> ShardSeen:
    """Read a shard from end to end.

    ``expected`` is its SHA-256 in hex where its repository says it.

    Raises:
        Interrupted: ``stop`` was set.
        FormatError: the file is gone, or changed while it was read.
        IntegrityError: its bytes are not those of its repository.
        EnvironmentProblem: it cannot be read.
    """
    hasher = hashlib.sha256()
    try:
        with (directory / name).open("rb", buffering=0) as file:
            before = os.fstat(file.fileno())
            while piece := file.read(READ_BYTES):
                if stop.is_set():
                    raise Interrupted("stopped")
                hasher.update(piece)
            after = os.fstat(file.fileno())
    except FileNotFoundError:
        raise FormatError("shard is missing", where=name) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot read: {error.strerror}", where=name) from None
    if (before.st_size, _stamp(before)) != (after.st_size, _stamp(after)):
        raise FormatError("shard changed while it was in use", where=name, hint="start again")
    if expected is not None and hasher.hexdigest() != expected:
        raise IntegrityError(
            "shard is not the one that the repository has",
            where=name,
            expected=f"SHA-256 {expected}",
            found=hasher.hexdigest(),
            hint="fetch it again with: moepack fetch --rehash",
        )
    return ShardSeen(name, before.st_size, hasher.hexdigest(), _stamp(before))


def is_same_file(directory: Path, seen: ShardSeen) -> bool:
    """Whether a shard is still the file that was hashed, as far as its length, inode and times tell.

    Raises:
        FormatError: it is gone.
    """
    try:
        found = (directory / seen.name).stat()
    except FileNotFoundError:
        raise FormatError("shard is missing", where=seen.name) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot look at it: {error.strerror}", where=seen.name) from None
    return (found.st_size, _stamp(found)) == (seen.bytes, seen.stamp)


def hash_again(directory: Path, before: ShardSeen, *, stop: threading.Event, expected: str | None = None) -> ShardSeen:
    """Hash a shard that was touched since an earlier run hashed it.

    Raises:
        UsageError: it has other bytes now, so what was packed from it does not belong to this source.
    """
    now = hash_shard(directory, before.name, stop=stop, expected=expected)
    if now.sha256 != before.sha256:
        raise UsageError(
            "source shard is not the one that this output was begun with",
            where=before.name,
            expected=f"SHA-256 {before.sha256}",
            found=now.sha256,
            hint="bring the old file back, use another output, or --restart to begin anew",
        )
    return now


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
