"""``moepack fetch``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from packer.commands.common import EXIT_CODES, common_options, typed, typed_path
from packer.commands.origin import find_repository
from packer.commands.signals import stop_on_signals
from packer.fetch.listing import Listing, check_repository_name
from packer.fetch.repository import (
    CheckResult,
    FetchResult,
    Outlook,
    Wishes,
    check_repository,
    fetch_repository,
)
from packer.fetch.retry import Limits
from packer.fetch.transfer import Conditions
from packer.output import Output, human_bytes
from packer.progress import ProgressLine

SHOWN = 20
_LIMITS = Limits()


@click.command(epilog=EXIT_CODES)
@click.argument("repository", metavar="REPO")
@click.option("--revision", metavar="R", help="Branch, tag or commit; by default main, pinned to its commit.")
@click.option("--to", "directory", type=typed, metavar="DIR", help="By default the repository's own name, here.")
@click.option("--check", is_flag=True, help="Only compare DIR with the repository, byte for byte; write nothing.")
@click.option("--rehash", is_flag=True, help="Compare files with their digests even if they seem untouched.")
@click.option("--released", is_flag=True, help="Fetch shards again that a pack has used and deleted.")
@click.option("--all", "everything", is_flag=True, help="Weights that the index does not name, and large files, too.")
@click.option("-j", "--jobs", type=click.IntRange(1, 64), default=4, show_default=True, help="Files at a time.")
@click.option(
    "--retries",
    type=click.IntRange(0, 1000),
    default=_LIMITS.attempts - 1,
    show_default=True,
    help="Further attempts at a file in a row that bring nothing new.",
)
@click.option(
    "--stall",
    type=click.FloatRange(min=0.1, max=3600),
    default=_LIMITS.stall_seconds,
    show_default=True,
    metavar="SECONDS",
    help=f"Give a connection up that brings less than {_LIMITS.stall_bytes >> 10} KiB in this time.",
)
@common_options
def fetch(
    output: Output,
    *,
    repository: str,
    revision: str | None,
    directory: Path | None,
    check: bool,
    retries: int,
    stall: float,
    **wishes: Any,
) -> int:
    """Fetch a repository, resumable and verified.

    All shards and small files of the checkpoint REPO of a Hub come along.

    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are respected. Given again after an interruption, it continues inside the
    file that it was stopped in. A file has its name once its digest is right, never before.

    \b
    Examples:
      moepack fetch moonshotai/Kimi-K3 --to checkpoint/
      moepack fetch moonshotai/Kimi-K3 --to checkpoint/ --check
      moepack fetch owner/model --revision v1.0 --json
    """
    check_repository_name(repository)
    folder = directory or Path(repository.rpartition("/")[2])
    limits = Limits(attempts=retries + 1, stall_seconds=stall)
    with stop_on_signals("stopping; what has arrived stays. Ctrl-C again leaves at once.") as stop:
        access, listing = find_repository(output, repository, revision, folder, limits, stop)
        if check:
            with ProgressLine(output, "check") as progress:
                result = check_repository(
                    listing, folder, everything=bool(wishes["everything"]), stop=stop, progress=progress
                )
            return _show_check(output, result)
        conditions = Conditions(limits=limits, stop=stop)
        with ProgressLine(output, "fetch") as progress:
            fetched = fetch_repository(
                access,
                listing,
                folder,
                wishes=Wishes(**wishes),
                conditions=conditions,
                progress=progress,
                announce=lambda outlook: _announce(output, outlook, folder),
            )
    _show(output, fetched)
    return 0


def _announce(output: Output, outlook: Outlook, folder: Path) -> None:
    listing, selection = outlook.listing, outlook.selection
    total = sum(file.bytes for file in selection.wanted)
    output.note(f"{listing.repository}, revision {listing.revision}, commit {listing.commit}, into {folder}")
    output.note(f"{len(selection.wanted)} files, {total} bytes ({human_bytes(total)}), {len(selection.shards)} shards")
    present = len(selection.wanted) - len(outlook.missing) - len(outlook.released)
    part = f", {human_bytes(outlook.partial_bytes)} of the rest" if outlook.partial_bytes else ""
    output.note(f"there already: {present} files{part}")
    output.note(f"to fetch: {len(outlook.missing)} files, {outlook.missing_bytes} bytes")
    if outlook.released:
        names = _some(outlook.released)
        output.note(f"released after a pack had used them, and left so ({len(outlook.released)}): {names}")
    if selection.skipped:
        names = _some([file.path for file in selection.skipped])
        output.note(f"left out, neither shards of the index nor small ({len(selection.skipped)}): {names}")
    if not outlook.space_known:
        output.note("free space is not known here: the file system does not say")


def _some(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _source(listing: Listing, directory: Path) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "endpoint": listing.endpoint,
        "repository": listing.repository,
        "revision": listing.revision,
        "commit": listing.commit,
    }


def _show(output: Output, result: FetchResult) -> None:
    listing, selection = result.listing, result.selection
    total = sum(file.bytes for file in selection.wanted)
    if output.json:
        output.result(
            {
                **_source(listing, result.directory),
                "files": len(selection.wanted),
                "bytes": total,
                "shards": len(selection.shards),
                "fetched": list(result.fetched),
                "received_bytes": result.received_bytes,
                "released": list(result.released),
                "skipped": [file.path for file in selection.skipped],
                "complete": not result.released,
            }
        )
        return
    output.line(f"repository  {listing.repository}")
    output.line(f"commit      {listing.commit}")
    output.line(f"directory   {result.directory}")
    output.line(f"files       {len(selection.wanted)}, {total} bytes, every digest compared")
    output.line(f"fetched     {len(result.fetched)} files, {result.received_bytes} bytes received in this run")
    if result.released:
        output.line(f"released    {len(result.released)} files are not here: a pack has used and deleted them")
    output.hint(f"moepack plan {typed_path(result.directory)}")


def _show_check(output: Output, result: CheckResult) -> int:
    if output.json:
        output.result(
            {
                **_source(result.listing, result.directory),
                "ok": not result.problems,
                "checked": result.checked,
                "problems": [item.to_dict() for item in result.problems],
            }
        )
    else:
        for item in result.problems:
            output.line(f"problem     {item.where}: {item.what}")
        output.line(f"checked     {result.checked} files of {result.listing.repository} at {result.listing.commit}")
        output.line("ok" if not result.problems else f"failed: {len(result.problems)} problems")
    if result.problems:
        output.hint("moepack fetch without --check brings what is absent; with --rehash also what is wrong")
    return 1 if result.problems else 0
