"""What is looked at before a pack writes its first byte: the output's place, what stands there, and the free space."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from formats.container import open_container
from formats.errors import EnvironmentProblem, FormatError, MoepackError, UsageError
from formats.manifest import ASSETS_DIR, EXPERTS_DIR, FILE_NAME, WORK_DIR, Manifest
from packer.assemble import blank_manifest
from packer.planning.plan import Plan
from packer.storage import durable
from packer.storage.identity import check_identity, differences
from packer.storage.journal import ShardSeen, read_journal, remove_journal, reserve_path
from packer.storage.lock import exclusive
from packer.storage.new_file import check_writable
from packer.storage.system import SYSTEM, System, translated

JOURNAL_NAME = "journal.jsonl"
LOCK_NAME = "lock"
_SHOWN = 10


def check_output(source: Path, out: Path) -> None:
    """Refuse an output that is the source, lies inside it, contains it, or stands in the way of it.

    Folders are compared by device and inode, so another path to the same place is seen.

    Raises:
        UsageError: see above; or ``out`` exists and is neither a container, an unfinished pack nor an empty folder.
    """
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError("output exists and is not a directory", where=out)
    parent = out.absolute().parent
    if not parent.is_dir():
        raise UsageError("the output's parent directory does not exist", where=parent)
    place = out if out.exists() else parent
    lineage = [_identity(item) for item in (place.resolve(), *place.resolve().parents)]
    if _identity(source) in lineage:
        raise UsageError("output is the source or lies inside it", where=out, hint="choose a place outside of it")
    if out.exists() and _identity(out) in [_identity(item) for item in source.resolve().parents]:
        raise UsageError("output contains the source", where=out, hint="choose a place of its own")
    if (out / WORK_DIR).is_symlink():
        raise UsageError("a link stands in the output", where=out / WORK_DIR, hint="remove it")
    if out.exists() and not (out / FILE_NAME).exists() and not (out / WORK_DIR).is_dir():
        others = sorted(path.name for path in out.iterdir())
        if others:
            raise UsageError(
                "output is not empty and no pack was begun there",
                where=out,
                found=repr(others[0]),
                hint="choose another output",
            )


def inside(out: Path, name: str) -> Path:
    """The path of one of the container's files, after making sure that no folder on the way is a link.

    Raises:
        UsageError: a link stands in the output; what lies behind it is not ours.
    """
    path = out / name
    for parent in path.relative_to(out).parents:
        if (out / parent).is_symlink() and out / parent != out:
            raise UsageError("a link stands in the output", where=out / parent, hint="remove it")
    return path


def finished(out: Path, plan: Plan) -> Manifest | None:
    """The manifest if ``out`` is already a container as ``plan`` describes it; None if it has to be made.

    Digests are not compared: see :func:`check_same_source`.

    Raises:
        UsageError: a finished container of another plan stands there; it is never overwritten.
    """
    if not os.path.lexists(out / FILE_NAME):
        return None
    try:
        with open_container(out) as container:
            manifest = container.manifest
    except MoepackError as error:
        raise UsageError(
            f"output holds a container that cannot be read: {error.line()}",
            where=out,
            hint="remove it, or choose another output",
        ) from None
    there, wanted = blank_manifest(manifest), blank_manifest(plan.draft)
    if there != wanted:
        other = differences({"recipe": there.recipe}, {"recipe": wanted.recipe})
        raise UsageError(
            f"output holds a finished container of another {' and '.join(_other_parts(there, wanted))}"
            + (f": {other}" if other else ""),
            where=out,
            hint="remove it, or choose another output",
        )
    return manifest


def _other_parts(there: Manifest, wanted: Manifest) -> list[str]:
    """What makes one manifest another than the other, at least one thing.

    What is read of a source follows from the recipe and the choice, so that it tells sources apart only where these
    are the same.
    """
    members = {
        "source": ("architecture", "assets"),
        "recipe": ("recipe",),
        "choice of layers or experts": ("partial",),
        "version of moepack": ("tool", "format_version", "format_revision"),
    }
    other = [
        part for part, names in members.items() if any(getattr(there, name) != getattr(wanted, name) for name in names)
    ]
    return other or ["source"]


def check_begun(out: Path, plan: Plan) -> None:
    """Insist that an unfinished pack in ``out``, if there is one, is one of ``plan``; writes nothing.

    Raises:
        UsageError: it was begun with other settings; they are listed.
        FormatError: its journal is damaged.
        EnvironmentProblem: its journal cannot be read.
    """
    journal = out / WORK_DIR / JOURNAL_NAME
    if journal.exists():
        check_identity(read_journal(journal).identity, plan.identity, journal)


def check_same_source(directory: Path, manifest: Manifest, hashes: Iterable[ShardSeen]) -> None:
    """Insist that a finished container was made from these very files.

    Args:
        directory: the source.
        manifest: of the container.
        hashes: of the source's shards as they are now, in the order of the manifest.

    Raises:
        UsageError: a shard or an asset has other bytes.
    """
    for shard, found in zip(manifest.source.shards, hashes, strict=True):
        if found.sha256 != shard.sha256:
            raise _another_source(shard.name, shard.sha256, found.sha256)
    for asset in manifest.assets:
        path = directory / asset.path.removeprefix(f"{ASSETS_DIR}/")
        _, digest = durable.file_digest(path, follow=True)
        if digest.hex() != asset.blake3:
            raise _another_source(path.name, asset.blake3, digest.hex())


def _another_source(name: str, expected: str, found: str) -> UsageError:
    return UsageError(
        "output holds a finished container of another source",
        where=name,
        expected=expected,
        found=found,
        hint="remove it, or choose another output",
    )


def check_space(out: Path, plan: Plan, *, staged: int = 0, system: System = SYSTEM) -> None:
    """Compare what is still to be allocated with what is available to this user, who may write; writes nothing.

    What the plan states as the fullest moment counts. Blocks that an earlier run already holds, in finished files, set
    aside in temporaries, or in its work folder, are not needed again.

    Args:
        out: the output; it need not exist, its parent must.
        staged: bytes that a staging folder holds already; they count if it is on the same file system.

    Raises:
        EnvironmentProblem: too little, with both numbers, or as of :func:`packer.storage.new_file.check_writable`.
    """
    place = out if out.is_dir() else out.absolute().parent
    check_writable(place)
    held = 0 if plan.staging_apart else min(staged, plan.staging_bytes) + plan.staging_other_bytes
    for name, length in plan.file_lengths.items():
        for path in (out / name, durable.temporary_path(out / name)):
            with suppress(OSError):
                held += min(path.lstat().st_blocks * 512, length)
    if (out / WORK_DIR).is_dir():
        held += sum(path.lstat().st_blocks * 512 for path in (out / WORK_DIR).iterdir())
    needed = max(0, plan.peak_disk_bytes - held)
    with translated("ask for the free space of", place, system=system):
        available = system.available(place)
    if available < needed:
        raise _no_space(place, needed, available)


def check_staging_space(directory: Path, limit: int, held: int, *, system: System = SYSTEM) -> None:
    """Compare what a staging folder on a file system of its own may still take with what is free there.

    Args:
        directory: the staging folder.
        limit: bytes that it may hold.
        held: bytes that it holds already.

    Raises:
        EnvironmentProblem: too little, with both numbers.
    """
    needed = max(0, limit - held)
    with translated("ask for the free space of", directory, system=system):
        available = system.available(directory)
    if available < needed:
        raise _no_space(directory, needed, available)


def same_file_system(first: Path, second: Path) -> bool:
    """Whether two places share their free space, as far as device numbers tell; a place that is not there counts as
    its parent."""
    devices = [(path if path.exists() else path.absolute().parent).stat().st_dev for path in (first, second)]
    return devices[0] == devices[1]


def check_shards(directory: Path, names: Iterable[str], expected: Mapping[str, str]) -> None:
    """Insist that shards which are still needed are here.

    Raises:
        FormatError: some are not, by name.
    """
    absent = sorted(name for name in names if not os.path.lexists(directory / name))
    if absent:
        known = all(name in expected for name in absent)
        raise FormatError(
            f"{len(absent)} shards are needed and not here: {', '.join(absent[:_SHOWN])}"
            + (", ..." if len(absent) > _SHOWN else ""),
            where=directory,
            hint="they were released by a pack: `moepack fetch --released` brings them back" if known else None,
        )


def _no_space(place: Path, needed: int, available: int) -> EnvironmentProblem:
    return EnvironmentProblem(
        "not enough space",
        where=place,
        expected=f"{needed} bytes",
        found=f"{available} bytes available",
        hint="make room, then give the same command again",
    )


def reset(out: Path, plan: Plan, *, system: System = SYSTEM) -> None:
    """Forget an unfinished pack: its journal and every file that such a pack makes, and nothing else."""
    names = [*plan.unit_files, *(asset.path for asset in plan.draft.assets), plan.draft.index.file]
    for folder in (out / EXPERTS_DIR, out / ASSETS_DIR):
        if inside(out, f"{folder.name}/any").parent.is_dir():
            names += [str(path.relative_to(out)) for path in folder.glob("layer-*.bank*")]
    for name in names:
        for path in (inside(out, name), durable.temporary_path(out / name)):
            if os.path.lexists(path):
                with translated("delete", path, system=system):
                    system.unlink(path)
    remove_journal(out / WORK_DIR / JOURNAL_NAME, system=system)


def remove_work_dir(out: Path, *, system: System = SYSTEM) -> None:
    """Delete the work folder of a finished pack with all that a pack keeps there, whatever moment it ended at.

    Raises:
        EnvironmentProblem: another process still works there, or the folder holds something that no pack made.
    """
    folder = out / WORK_DIR
    if not folder.is_dir():
        return
    with exclusive(folder / LOCK_NAME, system=system):
        for path in (folder / JOURNAL_NAME, reserve_path(folder / JOURNAL_NAME)):
            durable.discard(path, system=system)
        remove_journal(folder / JOURNAL_NAME, system=system)
    with translated("delete", folder, system=system):
        folder.rmdir()
    durable.flush_directory(out, system=system)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
