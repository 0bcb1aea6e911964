"""The identity of source shards: SHA-256 over whole files, the digest under which repositories publish them."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from formats.checkpoint import Checkpoint
from formats.errors import EnvironmentProblem, FormatError, IntegrityError, Interrupted, UsageError
from formats.families import Model
from formats.manifest import TRUNK_NAME, bank_name
from packer.journal import ShardSeen
from packer.plan import Plan

READ_BYTES = 8 << 20


def shards_of(checkpoint: Checkpoint, model: Model, plan: Plan, name: str) -> list[str]:
    """The source files that one of the plan's unit files is made from, sorted by name."""
    if name == TRUNK_NAME:
        return sorted({tensor.shard for segment in plan.segments for tensor in segment.tensors})
    return sorted(
        {
            checkpoint.weight_map[source]
            for layer in plan.layers
            if bank_name(layer.layer) == name
            for record in layer.records
            for names in model.expert_names(layer.layer, record.source_expert).values()
            for source in names
        }
    )


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


def changed_shards(checkpoint: Checkpoint, seen: dict[str, ShardSeen], *, stop: threading.Event) -> list[ShardSeen]:
    """Shards that were touched since an earlier run hashed them, hashed again.

    Raises:
        UsageError: one of them has other bytes now, so what was packed from it does not belong to this source.
    """
    again = []
    for name, before in sorted(seen.items()):
        try:
            found = (checkpoint.directory / name).stat()
        except FileNotFoundError:
            raise FormatError("shard is missing", where=name) from None
        if (found.st_size, _stamp(found)) == (before.bytes, before.stamp):
            continue
        now = hash_shard(checkpoint.directory, name, stop=stop)
        if now.sha256 != before.sha256:
            raise UsageError(
                "source shard is not the one that this output was begun with",
                where=name,
                expected=f"SHA-256 {before.sha256}",
                found=now.sha256,
                hint="bring the old file back, use another output, or --restart to begin anew",
            )
        again.append(now)
    return again


def _stamp(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
