"""``moepack pack``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from formats.checkpoint import CONFIG_NAME
from formats.errors import EnvironmentProblem, UsageError
from formats.source import read_matrix, scale_bias_doubt
from formats.spelling import counted
from packer.commands.common import EXIT_CODES, common_options, typed, typed_path
from packer.commands.origin import (
    Origin,
    OriginOptions,
    open_origin,
    open_supply,
    origin_options,
    shards_here,
    with_disk,
)
from packer.commands.signals import stop_on_signals
from packer.commands.source import PlanOptions, note_memory, plan_for, plan_options, show_plan
from packer.inspect.reading import inspect_summary
from packer.inspect.views import Summary
from packer.output import Output
from packer.pack_text import pack_document, show_notes, show_pack
from packer.pipeline import pack as pack_container
from packer.planning.memory import fitting_jobs
from packer.planning.plan import Plan
from packer.preflight import check_begun, check_output, check_space, finished
from packer.progress import ProgressLine
from runtime.machine import available_memory, processors


@click.command(epilog=EXIT_CODES, short_help="Write a container, or continue writing it.")
@plan_options
@click.argument("out", type=typed)
@click.option("--dry-run", is_flag=True, help="Print the plan, check the output's place and space, and write nothing.")
@click.option("--restart", is_flag=True, help="Forget an unfinished pack of OUT and begin anew; a finished one stays.")
@origin_options
@common_options
def pack(
    output: Output,
    *,
    source: Path,
    out: Path,
    jobs: int | None,
    dry_run: bool,
    restart: bool,
    wishes: OriginOptions,
    **options: Any,
) -> int:
    """Pack the checkpoint SOURCE into the container OUT. Given again after an interruption, it continues.

    SOURCE is a local folder or a repository, whose shards come as they are needed. Nothing of the source is ever
    deleted without --release-source. A container with errors above the recipe's limit is finished all the same; they
    are listed, and the exit code is 1.

    \b
    Examples:
      moepack pack checkpoint/ model.moepack
      moepack pack checkpoint/ model.moepack --recipe kimi-k3-lossless --jobs 8
      moepack pack checkpoint/ sample.moepack --layers 3 --experts 0-7
      moepack pack checkpoint/ pruned.moepack --prune plan.toml --stats activations.safetensors
      moepack pack moonshotai/Kimi-K3 k3.moepack --staging-limit 200GiB --release-source
      moepack pack checkpoint/ model.moepack --dry-run
    """
    if not os.path.lexists(source) and (out / CONFIG_NAME).is_file():
        raise UsageError("the checkpoint comes first, then the container", where=out, expected="pack SOURCE OUT")
    message = "stopping; what is done stays. Ctrl-C again leaves at once."
    with (
        stop_on_signals(message) as stop,
        open_origin(output, source, wishes, out=out, begin=not dry_run, need_headers=True, stop=stop) as origin,
    ):
        checkpoint = origin.checkpoint
        model, plan, provenance = plan_for(output, checkpoint, PlanOptions(**options), jobs or processors())
        plan = with_disk(origin, model, plan, provenance, out)
        if dry_run:
            return _dry_run(output, origin, plan, out, restart=restart)
        if plan.layers:
            first = plan.layers[0].layer, plan.layers[0].records[0].source_expert
            if shards_here(checkpoint, model, *first):
                doubt = scale_bias_doubt(read_matrix(checkpoint, model, *first, "gate"), plan.recipe.source.mxfp4_bias)
            else:
                doubt = "whether the bias of MXFP4 scales looks right is not checked: the first expert is not here yet"
            if doubt:
                output.note(f"note: {doubt}")
        fitting = fitting_jobs(plan.memory, plan.jobs, available_memory())
        if fitting < plan.jobs:
            output.note(
                f"{counted(fitting, 'job')} instead of {plan.jobs}: more do not fit into the memory that is available"
            )
            plan = plan.with_jobs(fitting)
        with open_supply(origin, plan, provenance) as (supply, release), ProgressLine(output, "pack") as progress:
            result = pack_container(
                checkpoint,
                model,
                plan,
                out,
                jobs=plan.jobs,
                progress=progress,
                restart=restart,
                stop=stop,
                expected=provenance.sha256,
                supply=supply,
                release=release,
            )
    show_notes(output, result, restart=restart, release=wishes.release_source)
    summary = inspect_summary(result.path)
    if not isinstance(summary, Summary):
        raise EnvironmentProblem("container was removed while it was looked at", where=out)
    if output.json:
        output.result(pack_document(result, summary))
    else:
        show_pack(output, result, summary)
    if result.over_limit:
        output.hint(
            f"the container is finished, with errors above the limit in it: remove {typed_path(out)} or choose another"
            " output before packing again with another recipe or limit"
        )
        return 1
    whole = origin.shards is None and not wishes.release_source
    output.hint(f"moepack verify {typed_path(out)}" + (f" --source {typed_path(origin.directory)}" if whole else ""))
    return 0


def _dry_run(output: Output, origin: Origin, plan: Plan, out: Path, *, restart: bool) -> int:
    check_output(origin.directory, out)
    complete = finished(out, plan)
    if not complete and not restart:
        check_begun(out, plan)
    if output.json:
        output.result({**plan.to_dict(), "already_complete": bool(complete)})
    else:
        show_plan(output, origin.name, plan)
    if not complete:
        note_memory(output, plan)
        check_space(out, plan)
    output.note("dry run: nothing was written" + (", the output is complete already" if complete else ""))
    return 0
