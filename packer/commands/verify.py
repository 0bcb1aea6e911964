"""``moepack verify``."""

from __future__ import annotations

from pathlib import Path

import click

from formats.spelling import counted, spelled
from packer.commands.common import EXIT_CODES, common_options, container_directory, jobs_option, source_directory, typed
from runtime.machine import processors
from packer.output import Output, human_number
from packer.progress import ProgressLine
from packer.verify import LEVELS
from packer.verify import verify as verify_container
from packer.verify_report import LeftOut, VerifyReport

SHOWN_PROBLEMS = 10
SHOWN_LEFT_OUT = 100  # characters of a list of experts


@click.command(epilog=EXIT_CODES, short_help="Prove that a container is whole and undamaged.")
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

    Damage that can be listed is a failed check: exit code 1, and each problem is named. Exit code 3 means that nothing
    could be checked: the container is too damaged to be opened, or the source is no sound checkpoint.

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
            container_directory(container),
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
    records, tensors = counted(report.records_checked, "expert record"), counted(report.tensors_checked, "trunk tensor")
    output.line(f"level      {report.level}: {records}, {tensors}")
    if report.parity is not None:
        for name, errors in (("experts", report.parity.experts), ("trunk", report.parity.trunk)):
            if errors.mean is not None:
                mean, most = human_number(errors.mean, 4), human_number(errors.max, 4)
                output.line(f"{name:<10} relative error mean {mean}, max {most}")
        tensors = counted(report.parity.source_tensors, "tensor")
        output.line(
            f"source     {tensors}, {report.parity.exact_tensors} of them bit for bit,"
            f" {report.parity.unaccounted} unaccounted for"
        )
    for problem in report.problems[:SHOWN_PROBLEMS]:
        output.line(f"problem    {problem.where}: {problem.what}")
    if len(report.problems) > SHOWN_PROBLEMS:
        output.line(f"           and {len(report.problems) - SHOWN_PROBLEMS} more; --json lists all")
    if report.left_out is not None:
        output.line(f"left out   {_left_out(report.left_out, report.records_checked)}")
    output.line("ok" if report.ok else f"failed: {counted(len(report.problems), 'problem')}")


def _left_out(left_out: LeftOut, checked: int) -> str:
    which = "; ".join(f"layer {layer} experts {spelled(experts)}" for layer, experts in left_out.experts)
    if len(which) > SHOWN_LEFT_OUT:
        which = which[:SHOWN_LEFT_OUT].rpartition(",")[0] + ", ... (--json lists all)"
    text = f"{left_out.records} of {counted(left_out.records + checked, 'expert record')}"
    text += f": {which}" if which else ""
    if left_out.shard_digests:
        text += f"; digests of {counted(left_out.shard_digests, 'source shard')}"
    return text
