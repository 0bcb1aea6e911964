"""``moepack plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from formats.checkpoint import CONFIG_NAME
from formats.errors import UsageError
from packer.commands.common import EXIT_CODES, common_options
from packer.commands.model import MAX_CHUNK, MAX_CONTEXT
from packer.commands.origin import OriginOptions, open_origin, origin_options, with_disk
from packer.commands.signals import stop_on_signals
from packer.commands.source import PlanOptions, note_memory, plan_for, plan_options, show_plan
from packer.output import Output
from runtime.assets import is_container
from runtime.machine import processors


@click.command(epilog=EXIT_CODES, short_help="Say to the byte what a pack would write, or what running takes.")
@plan_options
@origin_options
@click.option(
    "--context", type=click.IntRange(1, MAX_CONTEXT), metavar="N", help="Of a container: tokens of the state; 4096."
)
@click.option(
    "--chunk", type=click.IntRange(1, MAX_CHUNK), metavar="N", help="Of a container: tokens computed together; 64."
)
@common_options
def plan(
    output: Output,
    *,
    source: Path,
    jobs: int | None,
    wishes: OriginOptions,
    context: int | None,
    chunk: int | None,
    **options: Any,
) -> int:
    """Say to the byte what packing SOURCE would write. Reads headers only; of a source without shards, its metadata.

    SOURCE is a local folder or a repository, of which small files and headers are read. Of a container it says what
    running it takes in memory at the least, part by part.

    \b
    Examples:
      moepack plan checkpoint/
      moepack plan checkpoint/ --recipe kimi-k3 --set experts.stages=2
      moepack plan checkpoint/ --layers 0-3 --json
      moepack plan moonshotai/Kimi-K3 --staging-limit 200GiB --release-source
      moepack plan model.moepack --context 4096
    """
    if is_container(source) and not (source / CONFIG_NAME).exists():
        if any(options.values()) or any(vars(wishes).values()):
            raise UsageError("this is a container: options about packing mean nothing here", where=source)
        return _plan_memory(output, source, context, chunk, jobs or processors())
    if context is not None or chunk is not None:
        raise UsageError("--context and --chunk are about running a container", where=source)
    with (
        stop_on_signals("stopping.") as stop,
        open_origin(output, source, wishes, out=None, begin=False, need_headers=False, stop=stop) as origin,
    ):
        model, made, provenance = plan_for(output, origin.checkpoint, PlanOptions(**options), jobs or processors())
        made = with_disk(origin, model, made, provenance, None)
    if output.json:
        output.result(made.to_dict())
    else:
        show_plan(output, origin.name, made)
    note_memory(output, made)
    return 0


def _plan_memory(output: Output, container: Path, context: int | None, chunk: int | None, threads: int) -> int:
    from packer.running.memory_plan import plan_memory, show_memory
    from runtime.opening import DEFAULT_CHUNK, DEFAULT_CONTEXT

    made = plan_memory(container, context=context or DEFAULT_CONTEXT, chunk=chunk or DEFAULT_CHUNK, threads=threads)
    if output.json:
        output.result(made.to_dict())
    else:
        show_memory(output, made)
    return 0
