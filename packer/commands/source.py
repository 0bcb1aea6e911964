"""What ``plan`` and ``pack`` share: their options, and the way from them to a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from formats import kernels
from formats.checkpoint import Checkpoint
from formats.errors import EnvironmentProblem
from formats.families import Model, bind
from formats.spelling import counted
from packer.commands.common import jobs_option, typed, typed_source
from packer.fetch.provenance import Provenance, provenance_of
from packer.inspect.text import bits_text
from packer.output import Output, human_bytes, human_seconds
from packer.planning.estimate import TIME_BASIS
from packer.planning.memory import fitting_jobs
from packer.planning.plan import Plan, make_plan
from packer.planning.selection import parse_selection
from packer.prune.plan import read_prune_plan
from packer.recipe.recipe import (
    bundled_recipes,
    default_recipe,
    load_recipe,
    moved_limits,
    override,
    plain,
    with_weighted_limit,
)
from packer.statistics.file import open_statistics
from runtime.machine import available_memory

_PARTIAL = ": a partial container, which leaves out embedding, head, final norm, and vision towers."


@dataclass(frozen=True)
class PlanOptions:
    """What decides the bytes of a container, as it was typed."""

    recipe: str | None
    settings: Sequence[str]
    effort: str | None
    layers: str | None
    experts: str | None
    prune: Path | None
    stats: Path | None
    repository: str | None
    commit: str | None


def plan_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options that decide a plan, and SOURCE."""
    known = ", ".join(bundled_recipes())
    options: list[Callable[[Any], Any]] = [
        click.argument("source", type=typed_source),
        click.option(
            "--recipe", metavar="R", help=f"A TOML file or one of {known}; by default the one of the model's family."
        ),
        click.option(
            "--set", "settings", metavar="K=V", multiple=True, help="Change a key of the recipe, e.g. experts.stages=2."
        ),
        click.option(
            "--effort",
            type=click.Choice(("fast", "default", "max")),
            help="How much work goes into each expert (fitting.effort of the recipe): less error takes longer.",
        ),
        click.option("--layers", metavar="LIST", help=f"Pack these layers only, e.g. 0-5,9{_PARTIAL}"),
        click.option("--experts", metavar="LIST", help=f"Pack these experts of each layer only, e.g. 0-7{_PARTIAL}"),
        click.option(
            "--prune", metavar="PLAN", type=typed, help="Keep the experts that this plan names, and drop all others."
        ),
        click.option(
            "--stats",
            metavar="STATS",
            type=typed,
            help="Weigh the columns of experts by what these statistics saw in them.",
        ),
        click.option("--repository", metavar="NAME", help="Where the source was published; stored as provenance."),
        click.option("--commit", metavar="SHA", help="The source's revision there; stored as provenance."),
        jobs_option("Units of work at a time"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def plan_for(output: Output, checkpoint: Checkpoint, options: PlanOptions, jobs: int) -> tuple[Model, Plan, Provenance]:
    """Bind the checkpoint, choose the recipe and plan; choices and notes are said on stderr."""
    model = bind(checkpoint)
    if options.recipe is None:
        recipe = default_recipe(model.architecture.family)
        output.note(f"recipe {recipe.name}, chosen for the family {model.architecture.family}")
    else:
        recipe = load_recipe(options.recipe)
    effort = [] if options.effort is None else [f"fitting.effort={options.effort}"]
    settings = [*options.settings, *effort]
    changed = override(recipe, settings)
    statistics = None if options.stats is None else open_statistics(options.stats)
    limited = changed if statistics is None else with_weighted_limit(changed, settings)
    if limited != changed:
        output.note(
            "note: --stats raises the limit of expert errors to 1: they are measured with all columns alike, and"
            " columns that carry little may lose much; --set experts.max_rel_error=X sets another"
        )
    for note in moved_limits(recipe, changed, settings):
        output.note(f"note: {note}")
    origin = provenance_of(checkpoint, repository=options.repository, commit=options.commit)
    plan = make_plan(
        checkpoint,
        model,
        limited,
        selection=parse_selection(options.layers, options.experts, model.architecture),
        jobs=jobs,
        repository=origin.repository,
        commit=origin.commit,
        prune=None if options.prune is None else read_prune_plan(options.prune),
        statistics=statistics,
    )
    if kernels.selection().name == kernels.NUMPY:
        output.note("note: no compiled kernels are in use; numpy gives the same bytes, up to a hundred times slower")
    for note in plan.notes:
        output.note(f"note: {note}")
    return model, plan, origin


def note_memory(output: Output, plan: Plan) -> None:
    """Say how many jobs the memory that is free here allows; the plan itself is the same on every machine."""
    try:
        fitting = fitting_jobs(plan.memory, plan.jobs, available_memory())
    except EnvironmentProblem as problem:
        output.note(f"note: {problem.line()}")
        return
    if fitting < plan.jobs:
        output.note(f"note: {counted(fitting, 'job')} of {plan.jobs} would fit into the memory that is available here")


def show_plan(output: Output, source: str, plan: Plan) -> None:
    """A plan as text for people."""
    arch, origin = plan.draft.architecture, plan.draft.source
    depth = counted(arch.hidden_layers, "layer")
    output.line(f"model        {arch.name} ({arch.family}), {depth}, width {arch.hidden_size}")
    output.line(f"source       {source}, {counted(origin.tensors, 'tensor')}, {human_bytes(origin.bytes)}")
    output.line(f"recipe       {plan.recipe.name}: {plan.recipe.summary or '-'}")
    if plan.layers:
        codecs = Counter(record.codec.label for layer in plan.layers for record in layer.records)
        most = human_bytes(max(record.bytes for layer in plan.layers for record in layer.records))
        record = most if plan.expert_record_bytes is not None else f"up to {most}"
        bits = bits_text(plan.bits_per_weight, plain(plan.recipe), codecs)
        spelled_codecs = ", ".join(f"{codec} ({count})" for codec, count in sorted(codecs.items()))
        how = next(iter(codecs)) if len(codecs) == 1 else spelled_codecs
        output.line(f"experts      {plan.experts} in {counted(len(plan.layers), 'layer')} as {how}")
        output.line(f"record       {record}, {bits}")
    else:
        output.line("experts      no experts in this selection")
    rows = [("experts", plan.expert_bytes), ("trunk", plan.trunk_bytes)]
    roles: dict[str, int] = {}
    for segment in plan.segments:
        for tensor in segment.tensors:
            key = f"  {tensor.role} ({tensor.codec.label})"
            roles[key] = roles.get(key, 0) + tensor.bytes
    rows += sorted(roles.items(), key=lambda item: -item[1])
    rows += [("index, manifest, assets", plan.other_bytes), ("container", plan.container_bytes)]
    output.table("", ("section", ">size", ">bytes"), [(name, human_bytes(size), size) for name, size in rows])
    output.line(f"memory       up to {human_bytes(plan.peak_memory_bytes)} with {counted(plan.jobs, 'job')}")
    output.line(f"disk         {human_bytes(plan.peak_disk_bytes)} at the fullest moment{_staging_text(plan)}")
    basis = TIME_BASIS.partition(",")[0]
    output.line(f"time         about {human_seconds(plan.estimated_seconds)} ({basis}; --json says more)")


def _staging_text(plan: Plan) -> str:
    if plan.staging_bytes:
        size = human_bytes(plan.staging_bytes)
        return f", and {size} for shards elsewhere" if plan.staging_apart else f", {size} of it for shards"
    return f", {human_bytes(plan.relief_bytes)} less because shards go meanwhile" if plan.relief_bytes else ""
