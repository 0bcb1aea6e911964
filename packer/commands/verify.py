"""``moepack verify``."""

from __future__ import annotations

from pathlib import Path

import click

from packer.commands.common import EXIT_CODES, common_options, jobs_option, source_directory, typed
from packer.machine import processors
from packer.output import Output, human_number
from packer.progress import ProgressLine
from packer.verify import LEVELS, VerifyReport
from packer.verify import verify as verify_container

SHOWN_PROBLEMS = 50


@click.command(epilog=EXIT_CODES)
@click.argument("container", type=typed)
@click.option("--source", metavar="DIR", type=typed, help="The checkpoint directory, for level parity.")
@click.option("--level", type=click.Choice(LEVELS), help="By default hashes, and parity if a source is given.")
@click.option(
    "--sample", type=float, metavar="P", help="Look at this share of the records only, above 0 and at most 1."
)
@jobs_option("Threads")
@common_options
def verify(
    output: Output, *, container: Path, source: Path | None, level: str | None, sample: float | None, jobs: int | None
) -> int:
    """Prove that CONTAINER is whole, undamaged and, given its source, what the source says.

    \b
    Levels, each includes the one before:
      structure  files, headers, padding, counts, error limits
      hashes     every byte against its digest
      parity     every source tensor against the container

    \b
    Examples:
      moepack verify model.moepack
      moepack verify model.moepack --source checkpoint/
      moepack verify model.moepack --level structure --json
    """
    level = level or ("parity" if source is not None else "hashes")
    if source is not None:
        source = source_directory(source)
        if level != "parity":
            output.note(f"the source is not used at level {level}")
    with ProgressLine(output, "verify") as progress:
        report = verify_container(
            container,
            level=level,
            source=source if level == "parity" else None,
            sample=sample,
            jobs=jobs or processors(),
            progress=progress,
        )
    if output.json:
        output.result(report.to_dict())
    else:
        _print(output, report)
    return 0 if report.ok else 1


def _print(output: Output, report: VerifyReport) -> None:
    output.line(f"container  {report.container_id}")
    output.line(
        f"level      {report.level}: {report.records_checked} expert records, {report.tensors_checked} trunk tensors"
    )
    if report.parity is not None:
        for name, errors in (("experts", report.parity.experts), ("trunk", report.parity.trunk)):
            output.line(
                f"{name:<10} relative error mean {human_number(errors.mean, 4)}, max {human_number(errors.max, 4)}"
            )
        output.line(
            f"source     {report.parity.source_tensors} tensors, {report.parity.exact_tensors} of them bit for bit,"
            f" {report.parity.unaccounted} unaccounted for"
        )
    for problem in report.problems[:SHOWN_PROBLEMS]:
        output.line(f"problem    {problem.where}: {problem.what}")
    if len(report.problems) > SHOWN_PROBLEMS:
        output.line(f"           and {len(report.problems) - SHOWN_PROBLEMS} more problems")
        output.hint("--json lists all of them")
    if report.left_out is not None:
        left_out = report.left_out
        output.line(f"left out   {left_out.records} expert records, digests of {left_out.shard_digests} source shards")
    output.line("ok" if report.ok else f"failed: {len(report.problems)} problems")
