"""What ``plan`` and ``pack`` share: their options, and the way from them to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from formats.checkpoint import Checkpoint
from formats.families import Model, bind
from packer.commands.common import jobs_option, typed
from packer.output import Output, human_bytes, human_number
from packer.plan import Plan, make_plan
from packer.recipe import bundled_recipes, default_recipe, load_recipe, override
from packer.selection import parse_selection


@dataclass(frozen=True)
class PlanOptions:
    """What decides the bytes of a container, as it was typed."""

    recipe: str | None
    settings: Sequence[str]
    layers: str | None
    experts: str | None
    repository: str | None
    commit: str | None


def plan_options(function: Callable[..., int]) -> Callable[..., int]:
    """Add the options that decide a plan, and SOURCE."""
    known = ", ".join(bundled_recipes())
    options: list[Callable[[Any], Any]] = [
        click.argument("source", type=typed),
        click.option(
            "--recipe", metavar="R", help=f"A TOML file or one of {known}; by default the one of the model's family."
        ),
        click.option(
            "--set", "settings", metavar="K=V", multiple=True, help="Change a key of the recipe, e.g. experts.stages=2."
        ),
        click.option("--layers", metavar="LIST", help="Pack these layers only, e.g. 0-5,9: a partial container."),
        click.option("--experts", metavar="LIST", help="Pack these experts of each layer only."),
        click.option("--repository", metavar="NAME", help="Where the source was published; stored as provenance."),
        click.option("--commit", metavar="SHA", help="The source's revision there; stored as provenance."),
        jobs_option("Units of work at a time"),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def plan_for(output: Output, checkpoint: Checkpoint, options: PlanOptions, jobs: int) -> tuple[Model, Plan]:
    """Bind the checkpoint, choose the recipe and plan; choices and notes are said on stderr."""
    model = bind(checkpoint)
    if options.recipe is None:
        recipe = default_recipe(model.architecture.family)
        output.note(f"recipe {recipe.name}, chosen for the family {model.architecture.family}")
    else:
        recipe = load_recipe(options.recipe)
    plan = make_plan(
        checkpoint,
        model,
        override(recipe, options.settings),
        selection=parse_selection(options.layers, options.experts, model.architecture),
        jobs=jobs,
        repository=options.repository,
        commit=options.commit,
    )
    for note in plan.notes:
        output.note(f"note: {note}")
    return model, plan


def show_plan(output: Output, source: Path, plan: Plan) -> None:
    """A plan as text for people."""
    arch, origin = plan.draft.architecture, plan.draft.source
    output.line(f"model        {arch.name} ({arch.family}), {arch.hidden_layers} layers, width {arch.hidden_size}")
    output.line(f"source       {source}, {origin.tensors} tensors, {human_bytes(origin.bytes)}")
    output.line(f"recipe       {plan.recipe.name}: {plan.recipe.summary or '-'}")
    codec = plan.layers[0].records[0].codec.label if plan.layers else "-"
    record = "-" if plan.expert_record_bytes is None else human_bytes(plan.expert_record_bytes)
    bits = human_number(plan.bits_per_weight, 4)
    output.line(f"experts      {plan.experts} in {len(plan.layers)} layers as {codec}")
    output.line(f"record       {record}, {bits} bits a weight")
    rows = [("experts", plan.expert_bytes), ("trunk", plan.trunk_bytes)]
    roles: dict[str, int] = {}
    for segment in plan.segments:
        for tensor in segment.tensors:
            key = f"  {tensor.role} ({tensor.codec.label})"
            roles[key] = roles.get(key, 0) + tensor.bytes
    rows += sorted(roles.items(), key=lambda item: -item[1])
    rows += [("index, manifest, assets", plan.other_bytes), ("container", plan.container_bytes)]
    output.table("", ("section", ">size", ">bytes"), [(name, human_bytes(size), size) for name, size in rows])
    output.line(f"memory       up to {human_bytes(plan.peak_memory_bytes)} with {plan.jobs} jobs")
    output.line(f"disk         {human_bytes(plan.peak_disk_bytes)} at the fullest moment")
