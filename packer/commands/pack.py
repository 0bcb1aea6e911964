"""``moepack pack``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from formats import kernels
from formats.checkpoint import Checkpoint, open_checkpoint
from formats.errors import EnvironmentProblem
from formats.source import read_matrix, scale_bias_doubt
from formats.spelling import counted
from packer.commands.common import EXIT_CODES, common_options, source_directory, typed, typed_path
from packer.commands.signals import stop_on_signals
from packer.commands.source import PlanOptions, plan_for, plan_options, show_plan
from packer.inspect import inspect_summary
from packer.inspect_text import bits_text, show_errors
from packer.inspect_views import Summary
from packer.machine import available_memory, fitting_jobs, processors
from packer.output import Output, human_bytes
from packer.pipeline import PackResult
from packer.pipeline import pack as pack_container
from packer.plan import Plan
from packer.preflight import check_output, check_space, finished
from packer.progress import ProgressLine

SHOWN_OVER_LIMIT = 20


@click.command(epilog=EXIT_CODES, short_help="Write a container, or continue writing it.")
@plan_options
@click.argument("out", type=typed)
@click.option("--dry-run", is_flag=True, help="Print the plan, check the output's place and space, and write nothing.")
@click.option("--restart", is_flag=True, help="Forget an unfinished pack of OUT and begin anew; a finished one stays.")
@common_options
def pack(
    output: Output, *, source: Path, out: Path, jobs: int | None, dry_run: bool, restart: bool, **options: Any
) -> int:
    """Pack the checkpoint SOURCE into the container OUT. Given again after an interruption, it continues.

    \b
    Examples:
      moepack pack checkpoint/ model.moepack
      moepack pack checkpoint/ model.moepack --recipe kimi-k3-lossless --jobs 8
      moepack pack checkpoint/ sample.moepack --layers 3 --experts 0-7
      moepack pack checkpoint/ model.moepack --dry-run
    """
    directory = source_directory(source)
    with open_checkpoint(directory) as checkpoint:
        model, plan = plan_for(output, checkpoint, PlanOptions(**options), jobs or processors())
        if dry_run:
            return _dry_run(output, checkpoint, plan, out)
        if kernels.selection().name == kernels.NUMPY:
            output.note("note: no compiled kernels are in use; numpy gives the same bytes, many times slower")
        if plan.layers:
            first = read_matrix(
                checkpoint, model, plan.layers[0].layer, plan.layers[0].records[0].source_expert, "gate"
            )
            if doubt := scale_bias_doubt(first, plan.recipe.source.mxfp4_bias):
                output.note(f"note: {doubt}")
        fitting = fitting_jobs(plan.memory, plan.jobs, available_memory())
        if fitting < plan.jobs:
            output.note(
                f"{counted(fitting, 'job')} instead of {plan.jobs}: more do not fit into the memory that is available"
            )
            plan = plan.with_jobs(fitting)
        message = "stopping; what is done stays. Again to leave at once."
        with stop_on_signals(message) as stop, ProgressLine(output, "pack") as progress:
            result = pack_container(
                checkpoint, model, plan, out, jobs=plan.jobs, progress=progress, restart=restart, stop=stop
            )
    if result.already_complete:
        output.note("complete already; its bytes were not checked again")
        if restart:
            output.note("--restart changes nothing: a finished container is never overwritten, remove it first")
    elif result.resumed_units:
        output.note(f"continued: {counted(result.resumed_units, 'unit')} done before")
    summary = inspect_summary(result.path)
    if not isinstance(summary, Summary):
        raise EnvironmentProblem("container was removed while it was looked at", where=out)
    if output.json:
        output.result(_document(result, summary))
    else:
        _print(output, result, summary)
    if result.over_limit:
        output.hint(
            f"the container is finished, with errors above the limit in it: remove {typed_path(out)} or choose another"
            " output before packing again with another recipe or limit"
        )
        return 1
    output.hint(f"moepack verify {typed_path(out)} --source {typed_path(directory)}")
    return 0


def _dry_run(output: Output, checkpoint: Checkpoint, plan: Plan, out: Path) -> int:
    check_output(checkpoint.directory, out)
    complete = finished(out, plan)
    if output.json:
        output.result({**plan.to_dict(), "already_complete": bool(complete)})
    else:
        show_plan(output, checkpoint.directory, plan)
    if not complete:
        check_space(out, plan)
    output.note("dry run: nothing was written" + (", the output is complete already" if complete else ""))
    return 0


def _document(result: PackResult, summary: Summary) -> dict[str, Any]:
    return {
        "path": str(result.path),
        "container_id": result.container_id,
        "container_bytes": result.container_bytes,
        "experts": result.records,
        "bits_per_weight": summary.bits_per_weight,
        "rel_error": dataclasses.asdict(summary.matrix_errors),
        "trunk_rel_error": dataclasses.asdict(summary.tensor_errors),
        "resumed_units": result.resumed_units,
        "already_complete": result.already_complete,
        "over_limit": [dataclasses.asdict(item) for item in result.over_limit],
    }


def _print(output: Output, result: PackResult, summary: Summary) -> None:
    output.line(f"container     {result.container_id}")
    output.line(f"bytes         {result.container_bytes} ({human_bytes(result.container_bytes)})")
    if summary.experts:
        bits = bits_text(summary.bits_per_weight, summary.recipe, summary.codecs)
        output.line(f"experts       {summary.experts}, {bits}")
    show_errors(output, summary)
    for item in result.over_limit[:SHOWN_OVER_LIMIT]:
        output.line(f"over limit    {item.where}: error {item.error:.6g}, limit {item.limit:g}")
    if len(result.over_limit) > SHOWN_OVER_LIMIT:
        output.line(f"              and {len(result.over_limit) - SHOWN_OVER_LIMIT} more")
