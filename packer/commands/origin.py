"""SOURCE of ``plan`` and ``pack``: a local folder, or a repository whose shards come when they are needed."""

from __future__ import annotations

import functools
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.errors import EnvironmentProblem, UsageError
from formats.families import Model
from packer.commands.common import may_be_repository, missing_in_folder, source_directory, typed
from packer.commands.size import parse_size
from packer.disk import other_bytes, with_relief, with_staging
from packer.fetch.hub import Access, list_repository, open_hub
from packer.fetch.listing import Listing, check_repository_name
from packer.fetch.offline import listing_offline
from packer.fetch.provenance import Provenance
from packer.fetch.retry import Limits
from packer.fetch.shards import ShardSource, open_shard_source
from packer.fetch.transfer import Conditions
from packer.job import Releasable
from packer.local_release import check_releasable, kept_headers, open_local_release
from packer.output import Output
from packer.planning.plan import Plan
from packer.progress import ProgressLine
from packer.staging import Supply
from packer.steps import unit_shards


@dataclass(frozen=True)
class OriginOptions:
    """Where shards are while they are needed, and whether they go; as it was typed."""

    revision: str | None
    staging: Path | None
    staging_limit: str | None
    release_source: bool
    release_local: bool

    def folder(self, out: Path | None, *, begin: bool) -> Path | None:
        """The staging folder, of a pack into ``out`` beside it; None if it is not there and must not be begun."""
        if self.staging is not None:
            folder = self.staging
        elif out is not None:
            folder = out.absolute().with_name(out.absolute().name + ".source")
        else:
            return None
        return folder if begin or folder.is_dir() else None


@dataclass(frozen=True)
class Origin:
    """An open source.

    Attributes:
        directory: the checkpoint's folder, or the staging folder.
        name: how messages call it.
        checkpoint: open, with all headers where they can be had.
        shards: brings shards of a repository; None for a local folder.
        options: as they were typed.
    """

    directory: Path
    name: str
    checkpoint: Checkpoint
    shards: ShardSource | None
    options: OriginOptions


def origin_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options about repositories, staging and release; ``function`` gets them together as ``wishes``."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> int:
        wishes = OriginOptions(**{field.name: named.pop(field.name) for field in fields(OriginOptions)})
        return function(*arguments, wishes=wishes, **named)

    options: list[Callable[[Any], Any]] = [
        click.option("--revision", metavar="R", help="Branch, tag or commit of a repository, pinned to its commit."),
        click.option(
            "--staging", type=typed, metavar="DIR", help="Where a repository's shards come to; by default OUT.source."
        ),
        click.option(
            "--staging-limit", metavar="SIZE", help="The most that shards may take there at a time, e.g. 200GiB."
        ),
        click.option("--release-source", is_flag=True, help="Delete each shard once all made from it is durable."),
        click.option("--release-local", is_flag=True, help="Allow --release-source for a local folder."),
    ]
    decorated: Callable[..., int] = wrapper
    for option in reversed(options):
        decorated = option(decorated)
    return decorated


def is_repository(source: Path) -> bool:
    """Whether SOURCE means a repository: ``owner/name``, and nothing here has that name."""
    if not may_be_repository(source):
        return False
    try:
        check_repository_name(str(source))
    except UsageError:
        return False
    return True


@contextmanager
def open_origin(
    output: Output,
    source: Path,
    options: OriginOptions,
    *,
    out: Path | None,
    begin: bool,
    need_headers: bool,
    stop: threading.Event,
) -> Iterator[Origin]:
    """Open SOURCE in a ``with`` block.

    Args:
        output: for progress.
        source: as it was typed.
        options: about it.
        out: what is packed into; None if nothing is.
        begin: make the staging folder of a repository if it is not there; otherwise there is one that is deleted again.
        need_headers: of a local folder, as for ``open_checkpoint``.
        stop: set it to stop.

    Raises:
        UsageError: options that do not go with this kind of source, or a folder begun with another commit.
        MoepackError: as ``open_checkpoint`` and ``open_shard_source``.
    """
    if not is_repository(source):
        directory = source_directory(source)
        _refuse_options(options)
        with open_checkpoint(directory, need_headers=need_headers, headers=kept_headers(directory)) as checkpoint:
            yield Origin(directory, str(source), checkpoint, None, options)
        return
    if options.release_local:
        raise UsageError("goes with a local folder only", where="--release-local", hint="leave it out")
    if options.staging_limit is not None:
        parse_size(options.staging_limit, where="--staging-limit")  # before anything is asked of a server
    with ExitStack() as stack:
        folder = (
            options.folder(out, begin=begin)
            or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moepack-"))) / "source"
        )
        output.note(f"{source}: nothing here has that name, so it is taken for a repository")
        with _told_of_folder(source):
            access, listing = find_repository(output, str(source), options.revision, folder, Limits(), stop)
        with ProgressLine(output, "headers") as progress:
            shards = stack.enter_context(
                open_shard_source(access, listing, folder, conditions=Conditions(stop=stop), progress=progress)
            )
        output.note(f"{listing.repository}, revision {listing.revision}, commit {listing.commit}")
        checkpoint = stack.enter_context(open_checkpoint(folder, headers=shards.headers))
        yield Origin(folder, f"{listing.repository} at {listing.commit}", checkpoint, shards, options)


@contextmanager
def _told_of_folder(source: Path) -> Iterator[None]:
    """Adds to an error of a repository that cannot be had that a local folder may have been meant."""
    try:
        yield
    except (EnvironmentProblem, UsageError) as error:
        error.hint = "; ".join(filter(None, (missing_in_folder(source), error.hint))) or None
        raise


def shards_here(checkpoint: Checkpoint, model: Model, layer: int, expert: int) -> bool:
    """Whether the shards of an expert are here, so that it can be looked at before the work begins."""
    names = [name for tensors in model.expert_names(layer, expert).values() for name in tensors]
    return all(os.path.lexists(checkpoint.directory / checkpoint.weight_map[name]) for name in names)


def find_repository(
    output: Output, repository: str, revision: str | None, folder: Path, limits: Limits, stop: threading.Event
) -> tuple[Access, Listing]:
    """The listing of a repository, from its hub or, with the offline switch set, from what ``folder`` recorded."""
    known = listing_offline(repository, revision, folder)
    if known is not None:
        output.note("HF_HUB_OFFLINE is set: the listing is the one that was recorded when the folder was fetched")
        return known
    hub = open_hub()
    output.note(f"asking {urlsplit(hub.endpoint).hostname} for {repository}")
    return hub, list_repository(hub, repository, revision=revision, limits=limits, stop=stop, tell=output.note)


def _refuse_options(options: OriginOptions) -> None:
    for name, value in (
        ("--revision", options.revision),
        ("--staging", options.staging),
        ("--staging-limit", options.staging_limit),
    ):
        if value is not None:
            raise UsageError("goes with a repository only, and SOURCE is a local folder", where=name)
    if options.release_source and not options.release_local:
        raise UsageError(
            "SOURCE is a folder of yours, and its shards would be deleted",
            where="--release-source",
            hint="add --release-local if that is what you want",
        )
    if options.release_local and not options.release_source:
        raise UsageError("does nothing by itself", where="--release-local", hint="add --release-source")


def with_disk(origin: Origin, model: Model, plan: Plan, provenance: Provenance, out: Path | None) -> Plan:
    """The plan with what the source takes of the disk; what cannot be done is refused here, before any work.

    Raises:
        UsageError: the limit is too small, or the source must not be released.
    """
    options = origin.options
    if origin.shards is not None:
        limit = options.staging_limit
        return with_staging(
            plan,
            unit_shards(origin.checkpoint, model, plan),
            limit=None if limit is None else parse_size(limit, where="--staging-limit"),
            others=other_bytes(origin.shards),
            release=options.release_source,
            folder=origin.directory if options.staging is not None or out is not None else None,
            out=out,
        )
    if not options.release_source:
        return plan
    check_releasable(origin.checkpoint, plan, provenance)
    return with_relief(plan, unit_shards(origin.checkpoint, model, plan), directory=origin.directory, out=out)


@contextmanager
def open_supply(
    origin: Origin, plan: Plan, provenance: Provenance
) -> Iterator[tuple[Supply | None, Releasable | None]]:
    """What brings the shards of ``plan`` and what lets them go, for the duration of a ``with`` block."""
    release = origin.options.release_source
    if origin.shards is not None:
        with Supply(origin.shards, limit=plan.staging_bytes, release=release) as supply:
            yield supply, origin.shards if release else None
    elif release:
        with open_local_release(origin.checkpoint, plan, provenance) as local:
            yield None, local
    else:
        yield None, None
