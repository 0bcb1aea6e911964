"""What is looked at before a pack writes its first byte: the output's place, what stands there, and the free space."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from formats.container import expected_files, open_container
from formats.errors import EnvironmentProblem, MoepackError, UsageError
from formats.manifest import ASSETS_DIR, EXPERTS_DIR, FILE_NAME
from packer import durable
from packer.assemble import blank_manifest
from packer.journal import remove_journal
from packer.plan import Plan
from packer.system import SYSTEM, System, translated

WORK_DIR = ".packing"
JOURNAL_NAME = "journal.jsonl"
LOCK_NAME = "lock"
RESERVE_BYTES = 4 << 20  # the journal with its reserve, directories, rounding to blocks


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
    if out.exists() and not (out / FILE_NAME).exists() and not (out / WORK_DIR).is_dir():
        others = sorted(path.name for path in out.iterdir())
        if others:
            raise UsageError(
                "output is not empty and no pack was begun there",
                where=out,
                found=repr(others[0]),
                hint="choose another output",
            )


def finished(out: Path, plan: Plan) -> str | None:
    """The container id if ``out`` is already the container that ``plan`` describes; None if it has to be made.

    Raises:
        UsageError: a finished container of another plan stands there; it is never overwritten.
    """
    if not os.path.lexists(out / FILE_NAME):
        return None
    try:
        with open_container(out) as container:
            same = blank_manifest(container.manifest) == blank_manifest(plan.draft)
            container_id = container.container_id
    except MoepackError as error:
        raise UsageError(
            f"output holds a container that cannot be read: {error.line()}",
            where=out,
            hint="remove it, or choose another output",
        ) from None
    if not same:
        raise UsageError(
            "output holds a finished container of another source, recipe or version",
            where=out,
            hint="remove it, or choose another output",
        )
    return container_id


def check_space(out: Path, plan: Plan, *, system: System = SYSTEM) -> None:
    """Compare what is still to be allocated with what is available to this user.

    Blocks that an earlier run already holds, in finished files or set aside in temporaries, are not needed again.

    Raises:
        EnvironmentProblem: too little, with both numbers.
    """
    held = 0
    for name, length in (expected_files(plan.draft) | {FILE_NAME: plan.manifest_bytes}).items():
        for path in (out / name, durable.temporary_path(out / name)):
            with suppress(FileNotFoundError):
                held += min(path.lstat().st_blocks * 512, length)
    needed = max(0, plan.container_bytes - held) + RESERVE_BYTES
    with translated("ask for the free space of", out, system=system):
        available = system.available(out)
    if available < needed:
        raise EnvironmentProblem(
            "not enough space",
            where=out,
            expected=f"{needed} bytes",
            found=f"{available} bytes available",
            hint="make room, then give the same command again",
        )


def reset(out: Path, plan: Plan, *, system: System = SYSTEM) -> None:
    """Forget an unfinished pack: its journal and every file that such a pack makes, and nothing else."""
    names = [*plan.unit_files, *(asset.path for asset in plan.draft.assets), plan.draft.index.file]
    for folder in (out / EXPERTS_DIR, out / ASSETS_DIR):
        if folder.is_dir():
            names += [str(path.relative_to(out)) for path in folder.glob("layer-*.bank*")]
    for name in names:
        for path in (out / name, durable.temporary_path(out / name)):
            if os.path.lexists(path):
                with translated("delete", path, system=system):
                    system.unlink(path)
    remove_journal(out / WORK_DIR / JOURNAL_NAME, system=system)


def remove_work_dir(out: Path, *, system: System = SYSTEM) -> None:
    """Delete the work folder of a finished pack, if it holds nothing unknown."""
    folder = out / WORK_DIR
    if folder.is_dir():
        remove_journal(folder / JOURNAL_NAME, system=system)
        with translated("delete", folder, system=system):
            folder.rmdir()
        durable.flush_directory(out, system=system)


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
