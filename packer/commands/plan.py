"""``moepack plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from packer.commands.common import EXIT_CODES, common_options
from packer.commands.origin import OriginOptions, open_origin, origin_options, with_disk
from packer.commands.signals import stop_on_signals
from packer.commands.source import PlanOptions, plan_for, plan_options, show_plan
from runtime.machine import processors
from packer.output import Output


@click.command(epilog=EXIT_CODES, short_help="Say to the byte what a pack would write.")
@plan_options
@origin_options
@common_options
def plan(output: Output, *, source: Path, jobs: int | None, wishes: OriginOptions, **options: Any) -> int:
    """Say to the byte what packing SOURCE would write. Reads headers only; of a source without shards, its metadata.

    SOURCE is a local folder or a repository, of which small files and headers are read.

    \b
    Examples:
      moepack plan checkpoint/
      moepack plan checkpoint/ --recipe kimi-k3 --set experts.stages=2
      moepack plan checkpoint/ --layers 0-3 --json
      moepack plan moonshotai/Kimi-K3 --staging-limit 200GiB --release-source
    """
    folder = wishes.staging if wishes.staging is not None and wishes.staging.is_dir() else None  # nothing is begun
    with (
        stop_on_signals("stopping.") as stop,
        open_origin(output, source, wishes, staging=folder, need_headers=False, stop=stop) as origin,
    ):
        model, made, provenance = plan_for(output, origin.checkpoint, PlanOptions(**options), jobs or processors())
        made = with_disk(origin, model, made, provenance, None)
    if output.json:
        output.result(made.to_dict())
    else:
        show_plan(output, origin.name, made)
    return 0
