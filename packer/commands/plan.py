"""``moepack plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from formats.checkpoint import open_checkpoint
from packer.commands.common import EXIT_CODES, common_options, source_directory
from packer.commands.source import PlanOptions, plan_for, plan_options, show_plan
from packer.machine import processors
from packer.output import Output


@click.command(epilog=EXIT_CODES, short_help="Say to the byte what a pack would write.")
@plan_options
@common_options
def plan(output: Output, *, source: Path, jobs: int | None, **options: Any) -> int:
    """Say to the byte what packing SOURCE would write. Reads headers only; of a source without shards, its metadata.

    \b
    Examples:
      moepack plan checkpoint/
      moepack plan checkpoint/ --recipe kimi-k3 --set experts.stages=2
      moepack plan checkpoint/ --layers 0-3 --json
    """
    directory = source_directory(source)
    with open_checkpoint(directory, need_headers=False) as checkpoint:
        _, made = plan_for(output, checkpoint, PlanOptions(**options), jobs or processors())
    if output.json:
        output.result(made.to_dict())
    else:
        show_plan(output, directory, made)
    return 0
