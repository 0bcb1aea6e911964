"""What the source takes of the disk beside the container: a staging folder, or shards that go as the output grows."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from formats.errors import UsageError
from formats.headers import header_path
from formats.manifest import TRUNK_NAME
from packer.fetch.shards import ShardSource
from packer.planning.plan import Plan
from packer.planning.plan_types import BLOCK_BYTES, OTHER_NAMES
from packer.preflight import same_file_system
from packer.staging import AHEAD
from packer.steps import Needs, least_staging, make_steps, peak_of_release


def with_staging(
    plan: Plan, needs: Needs, *, limit: int | None, others: int, release: bool, folder: Path | None, out: Path | None
) -> Plan:
    """The plan with a staging folder.

    Args:
        plan: of a repository.
        needs: from ``packer.steps.unit_shards``.
        limit: bytes of shards that may lie in the folder; None for what the work goes well with, or for all of them if
            nothing is released.
        others: bytes of everything else in the folder.
        release: whether shards go once they are used up.
        folder, out: where; None if it is not known yet, and then one file system is assumed.

    Raises:
        UsageError: the limit cannot hold what is needed at a time, or shards of a part of the model were to go.
    """
    if release:
        check_whole(plan)
    steps = make_steps(plan, needs)
    least = least_staging(steps, plan.shard_lengths, {}, release=release)
    largest = max(plan.shard_lengths.values(), default=0)
    if limit is None:
        total = sum(plan.shard_lengths.values())
        limit = min(total, least + AHEAD * largest) if release else total
    check_limit(limit, least, release=release)
    apart = folder is not None and out is not None and not same_file_system(folder, out)
    return replace(plan, staging_bytes=limit, staging_other_bytes=others, staging_apart=apart)


def other_bytes(source: ShardSource) -> int:
    """What a staging folder takes beside its shards: small files, headers, and a block for each of their names."""
    paths = [source.directory / file.path for file in source.selection.others]
    paths += [header_path(source.headers, file.path) for file in source.selection.shards]
    sizes = [path.lstat().st_size for path in paths]
    receipt = 2 * 400 * len(source.listing.files)  # of which a new one is written before the old one goes
    return sum(sizes) + receipt + BLOCK_BYTES * (2 * len(paths) + OTHER_NAMES)


def check_limit(limit: int, least: int, *, release: bool) -> None:
    """Refuse a limit below the least.

    Raises:
        UsageError: with both numbers.
    """
    if limit < least:
        raise UsageError(
            "the staging folder cannot hold the shards that are needed at the same time"
            if release
            else "the staging folder must hold the whole source, as nothing of it is released",
            where="--staging-limit",
            expected=f"at least {least} bytes",
            found=f"{limit} bytes",
            hint=None if release else "with --release-source each shard goes once it is used up",
        )


def check_whole(plan: Plan) -> None:
    """Refuse to release shards of a model of which only a part is packed.

    Raises:
        UsageError: REL-05: what is not packed would be lost.
    """
    if plan.selection is not None or plan.omitted:
        raise UsageError(
            "shards are not released by a pack of a part of the model: the rest of them would be lost",
            where="--release-source",
            hint="leave out --layers and --experts, or --release-source",
        )


def with_relief(plan: Plan, needs: Needs, *, directory: Path, out: Path | None) -> Plan:
    """The plan with a local source whose shards go one by one.

    Space comes back where the shard lies on the output's file system and has no second hard link.
    """
    freed: Mapping[str, int] = {}
    if out is None or same_file_system(directory, out):
        freed = {name: freed_bytes(directory / name) for name in plan.shard_lengths}
    peak = peak_of_release(
        plan,
        make_steps(plan, needs),
        freed,
        plan.output_disk_bytes - plan.trunk_bytes - plan.expert_bytes,
        TRUNK_NAME,
    )
    return replace(plan, relief_bytes=max(0, plan.output_disk_bytes - peak))


def freed_bytes(path: Path) -> int:
    """What deleting a file gives back: nothing if it is a link, or has another name."""
    try:
        found = path.lstat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 else 0
