"""``moepack prune``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from formats.errors import UsageError
from packer.commands.common import EXIT_CODES, common_options, typed
from packer.commands.signals import interrupted_by_term
from packer.output import Output, human_bytes

if TYPE_CHECKING:
    from packer.prune.job import Pruning
    from packer.statistics.file import Statistics


@click.command(epilog=EXIT_CODES, short_help="Plan which experts stay.")
@click.argument("statistics", type=typed)
@click.option(
    "--keep",
    required=True,
    metavar="N|P%",
    help="Experts a layer that stay (global: on the average); a share is rounded to the nearest number.",
)
@click.option(
    "--mode",
    type=click.Choice(("uniform", "global", "graded")),
    default="uniform",
    show_default=True,
    help="The same number in each layer; all layers ranked together, each with four times a token's experts at least"
    " (or --keep, if that is less); or the same number, the best of them lossless.",
)
@click.option("--lossless", metavar="N|P%", help="Of the kept, in mode graded; by default a tenth.")
@click.option("--sources", metavar="LABEL,...", help="Labels of the text that counts; by default all, equally.")
@click.option("--out", required=True, type=typed, metavar="PLAN", help="The plan to write (TOML).")
@click.option("--source", type=typed, metavar="DIR", help="The checkpoint: says what its container will take, exactly.")
@click.option("--html", type=typed, metavar="F", help="Write a page with plots as well.")
@common_options
def prune(
    output: Output,
    *,
    statistics: Path,
    keep: str,
    mode: str,
    lossless: str | None,
    sources: str | None,
    out: Path,
    source: Path | None,
    html: Path | None,
) -> int:
    """Decide by STATISTICS, a file of `moepack calibrate`, which experts of each layer stay, and write a plan.

    Experts are ranked by saliency: the sum of gate weight times the norm of what the expert puts out (REAP). The plan
    is text that you can change; `moepack pack --prune PLAN` carries it out, and `moepack plan SOURCE --prune PLAN` says
    what the container will take, to the byte.

    \b
    Examples:
      moepack prune both.stats --keep 27% --out prune.toml
      moepack prune both.stats --keep 242 --mode graded --lossless 24 --sources code --out code.toml
    """
    from packer.prune.job import prune as plan_pruning
    from packer.prune.plan import prune_plan_bytes
    from packer.report.plots import check_plots
    from packer.statistics.file import open_statistics
    from packer.storage.new_file import check_free, write_all_new

    if lossless is not None and mode != "graded":
        raise UsageError("only mode graded keeps experts lossless", where="--lossless", hint="add --mode graded")
    check_free(out)
    if html == out:
        raise UsageError("plan and page have the same name", where="--html", found=html)
    if html is not None:
        check_free(html)
        check_plots()
    opened = open_statistics(statistics)
    labels = [] if sources is None else [label.strip() for label in sources.split(",")]
    pruning = plan_pruning(opened, keep=keep, mode=mode, lossless=lossless or "10%", sources=labels)
    size = _size(opened, pruning, source)
    files = {out: prune_plan_bytes(pruning.plan)}
    if html is not None:
        from packer.report.page import render
        from packer.report.prune_page import prune_page

        files[html] = render(prune_page(opened, pruning))
    with interrupted_by_term():
        write_all_new(files)
    if pruning.fixed is not None:
        output.note(f"note: {pruning.fixed}")
    if output.json:
        output.result({"plan": str(out), **size, **pruning.to_dict()})
    else:
        _print(output, pruning, size, out)
    return 0


def _size(statistics: Statistics, pruning: Pruning, source: Path | None) -> dict[str, int | None]:
    """What the kept experts take under the bundled 3-bit recipes, and with a source the whole container, exactly."""
    from formats.checkpoint import open_checkpoint
    from formats.families import bind
    from packer.commands.common import source_directory
    from packer.planning.plan import make_plan
    from packer.recipe.recipe import default_recipe
    from packer.report.prune_figures import record_sizes

    sizes = record_sizes(statistics.inputs, statistics.width)
    lossless = pruning.lossless_experts
    experts = (pruning.kept_experts - lossless) * sizes.usual + lossless * sizes.source
    container = None
    if source is not None:
        with open_checkpoint(source_directory(source), need_headers=False) as checkpoint:
            model = bind(checkpoint)
            recipe = default_recipe(model.architecture.family)
            container = make_plan(checkpoint, model, recipe, prune=pruning.plan).container_bytes
    return {"experts_bytes": experts, "container_bytes": container}


def _print(output: Output, pruning: Pruning, size: dict[str, int | None], out: Path) -> None:
    total = pruning.experts * len(pruning.kept)
    counts = sorted(len(kept.experts) for kept in pruning.kept.values())
    spread = f"{counts[0]}" if counts[0] == counts[-1] else f"{counts[0]} to {counts[-1]}"
    output.line(f"experts     {pruning.kept_experts} of {total} stay, {spread} a layer")
    if pruning.lossless_experts:
        output.line(f"lossless    {pruning.lossless_experts} of them")
    output.line(f"saliency    {pruning.retained:.1%} stays, averaged over layers")
    output.line(f"certainty   {pruning.agreement:.1%} of the kept experts are the choice of both halves of the text")
    experts, container = size["experts_bytes"], size["container_bytes"]
    output.line(f"size        about {human_bytes(experts or 0)} of experts under the default recipe")
    if container is not None:
        output.line(f"container   {container} ({human_bytes(container)})")
    output.line(f"plan        {out}")
