"""Deleting source shards that are used up, in the one order in which nothing can be lost.

A shard goes when every unit made from it is durable and was read back past the cache, and when its own bytes were
compared with the digest that its repository has. The journal says *releasing* before the file is unlinked, and
*released* once the folder that held it is flushed. A run that finds the first without the second repeats the checks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from formats.errors import FormatError, UsageError
from packer.job import Job
from packer.shards import hash_again, is_same_file
from packer.storage import durable
from packer.storage.durable import Extent
from packer.storage.journal import ShardReleased, ShardReleasing
from packer.storage.system import WriteLost, translated


def settle_releases(job: Job) -> None:
    """After an interruption: finish what was begun, and remember what is gone; then release what is used up."""
    directory = job.checkpoint.directory
    for name in sorted(job.outcome.releasing):
        if not os.path.lexists(directory / name):
            durable.flush_directory((directory / name).parent, system=job.system)
            job.note(ShardReleased(name))
    if job.release is None:
        return
    for name in sorted(job.outcome.released):
        if not os.path.lexists(directory / name):
            job.release.note_released(name)  # no more than a look if that is known
    release_used(job, job.plan.shard_lengths)


def release_used(job: Job, names: Iterable[str]) -> None:
    """Delete those of the shards ``names`` that are here and that nothing left to do needs.

    Raises:
        WriteLost: other bytes are on the device than were written: nothing was deleted, the file is built again.
        IntegrityError, FormatError: the shard is not the one that was packed; it stays.
        EnvironmentProblem: it cannot be deleted.
    """
    if job.release is None:
        return
    for name in sorted(names):
        used = all(unit.name in job.outcome.units for unit in job.users[name])
        if used and name in job.outcome.shards and os.path.lexists(job.checkpoint.directory / name):
            _release(job, name)


def _release(job: Job, name: str) -> None:
    path = job.checkpoint.directory / name
    found = _releasable(job.checkpoint.directory, name)
    _prove_units(job, name)
    _prove_shard(job, name)
    seen = job.outcome.shards[name]
    assert job.release is not None
    if not job.release.present(name):
        raise FormatError("shard is not as it was fetched, and stays", where=path, hint="start again")
    job.note(ShardReleasing(name, seen.bytes, seen.sha256))
    with translated("delete", path, system=job.system):
        job.system.unlink(path)
    durable.flush_directory(path.parent, system=job.system)
    job.note(ShardReleased(name))
    job.release.note_released(name)
    job.freed[name] = seen.bytes if found.st_nlink == 1 else 0  # another name keeps the space
    if job.supply is not None:
        job.supply.gone(name)
    linked = "" if found.st_nlink == 1 else ", which frees nothing: it has another hard link"
    job.tell(f"released {name}{linked}")


def _releasable(directory: Path, name: str) -> os.stat_result:
    """The status of a shard that may be deleted: a regular file of its own, reached without any link.

    Raises:
        UsageError: it is a link, or lies behind one.
    """
    path = directory / name
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise UsageError("only regular files are released, never what a link leads to", where=path)
    for parent in path.relative_to(directory).parents:
        if (directory / parent).is_symlink() and directory / parent != directory:
            raise UsageError("shard lies behind a link, and is not released", where=directory / parent)
    return found


def _prove_units(job: Job, name: str) -> None:
    """Everything made from the shard was read back in full: with its file, or now from the file's temporary."""
    for unit in job.users[name]:
        finished = unit.file in job.outcome.files and unit.file not in job.outcome.intents
        if finished or unit.name in job.outcome.proven:
            continue
        path = job.out / unit.file
        extents = [Extent(*extent) for extent in job.outcome.unit_extents(job.plan, unit)]
        try:
            durable.read_back(durable.temporary_path(path), extents, system=job.system)
        except WriteLost:
            durable.discard(path, system=job.system)
            raise
        job.outcome.proven.add(unit.name)


def _prove_shard(job: Job, name: str) -> None:
    """The shard is the file that was hashed, and its digest is the one that its repository has."""
    seen, expected = job.outcome.shards[name], job.expected.get(name)
    if expected is None:
        raise UsageError("shard is not released: nobody says what its digest must be", where=name)
    if seen.sha256 != expected or not is_same_file(job.checkpoint.directory, seen):
        job.note(hash_again(job.checkpoint.directory, seen, stop=job.stop, expected=expected))
