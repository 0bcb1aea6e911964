"""A verification as text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.spelling import counted, spelled
from packer.output import Output, human_number
from packer.verify.report import LeftOut, Parity, VerifyReport

if TYPE_CHECKING:
    from packer.verify.logits_parity import LogitsParity

SHOWN_PROBLEMS = 10
SHOWN_LEFT_OUT = 100  # characters of a list of experts


def show_report(output: Output, report: VerifyReport) -> None:
    """A verification for people."""
    output.line(f"container  {report.container_id}")
    records, tensors = counted(report.records_checked, "expert record"), counted(report.tensors_checked, "trunk tensor")
    output.line(f"level      {report.level}: {records}, {tensors}")
    if report.parity is not None:
        for name, errors in (("experts", report.parity.experts), ("trunk", report.parity.trunk)):
            if errors.mean is not None:
                mean, most = human_number(errors.mean, 4), human_number(errors.max, 4)
                output.line(f"{name:<10} relative error mean {mean}, max {most}")
        output.line(f"source     {fates(report.parity)}")
    if report.logits is not None:
        _show_logits(output, report.logits)
    for problem in report.problems[:SHOWN_PROBLEMS]:
        output.line(f"problem    {problem.where}: {problem.what}")
    if len(report.problems) > SHOWN_PROBLEMS:
        output.line(f"           and {len(report.problems) - SHOWN_PROBLEMS} more; --json lists all")
    if report.left_out is not None:
        output.line(f"left out   {_left_out(report.left_out, report.records_checked)}")
    output.line("ok" if report.ok else f"failed: {counted(len(report.problems), 'problem')}")


def fates(parity: Parity) -> str:
    """What became of the source's tensors, in words."""
    return (
        f"{counted(parity.source_tensors, 'tensor')}, {parity.exact_tensors} of them bit for bit,"
        f" {parity.unaccounted} unaccounted for"
        + (f", {parity.dropped} dropped by rule" if parity.dropped else "")
        + (f", {parity.omitted} outside of this partial container" if parity.omitted else "")
    )


def _show_logits(output: Output, found: LogitsParity) -> None:
    mean, most = human_number(found.kl_mean, 4), human_number(found.kl_max, 4)
    output.line(
        f"logits     {counted(found.positions, 'position')}, largest difference {human_number(found.largest, 4)}"
    )
    output.line(f"KL         mean {mean}, max {most} at position {found.kl_max_position} (nats)")
    output.line(f"agreement  top-1 {100 * found.top1:.2f} %, top-5 {100 * found.top5:.2f} %")
    if found.source.tokens:
        before, after = (human_number(loss.perplexity, 6) for loss in (found.source, found.container))
        output.line(f"perplexity source {before}, container {after}, of {counted(found.source.tokens, 'token')}")
    rows = [(item.layer, human_number(item.largest, 4), human_number(item.relative, 4)) for item in found.layers]
    output.table("", ("layer", ">largest difference", ">relative error"), rows)


def _left_out(left_out: LeftOut, checked: int) -> str:
    which = "; ".join(f"layer {layer} experts {spelled(experts)}" for layer, experts in left_out.experts)
    if len(which) > SHOWN_LEFT_OUT:
        which = which[:SHOWN_LEFT_OUT].rpartition(",")[0] + ", ... (--json lists all)"
    text = f"{left_out.records} of {counted(left_out.records + checked, 'expert record')}"
    text += f": {which}" if which else ""
    if left_out.shard_digests:
        text += f"; digests of {counted(left_out.shard_digests, 'source shard')}"
    return text
