"""What a pack will write, to the byte, decided from headers alone: nothing is read of a weight, and nothing written.

:func:`make_plan` is a pure function of the bound source, the recipe and the selection. How many jobs run changes its
estimate of memory and nothing else. Where things lie is worked out by ``packer.planning.layout_plan``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from blake3 import blake3

from formats.checkpoint import Checkpoint
from formats.errors import EnvironmentProblem, UsageError
from formats.families import Model
from formats.layout import Codec
from formats.manifest import BLANK_DIGEST, TRUNK_NAME, Fitting, Manifest, Partial, bank_name, planned_bytes
from formats.spelling import counted, spelled
from packer.assemble import draft_manifest
from packer.encoding.codebooks import ARITHMETIC, METHOD
from packer.model_stamp import check_same_model
from packer.planning.estimate import journal_bytes, memory_of, seconds_of
from packer.planning.layout_plan import (
    LayerPlan,
    RecordPlan,
    SegmentPlan,
    TensorPlan,
    TrunkPlan,
    expert_codec,
    lossless_codec,
    plan_layers,
    plan_trunk,
)
from packer.planning.plan_types import Plan, Unit, checked_jobs
from packer.planning.selection import Selection, normalised
from packer.prune.plan import PrunePlan
from packer.prune.pruning import kept_experts, pruned_recipe
from packer.recipe.pruned import Prune
from packer.recipe.recipe import ColumnWeights, Recipe, Rvq, resolve
from packer.statistics.column_weights import LEAST_TOKENS, seldom_seen
from packer.statistics.file import Statistics

__all__ = ["LayerPlan", "Plan", "RecordPlan", "SegmentPlan", "TensorPlan", "Unit", "make_plan"]

UNIT_BYTES = 128 << 20  # of output: what is lost at most when a job is stopped, and how often the journal is flushed
UNIT_RECORDS = 1024  # bounds a line of the journal
UNITS_PER_LAYER = 8  # at least, where a layer has as many experts, so that jobs have something to share
_SHOWN = 10


def make_plan(
    checkpoint: Checkpoint,
    model: Model,
    recipe: Recipe,
    *,
    selection: Selection | None = None,
    jobs: int = 1,
    repository: str | None = None,
    commit: str | None = None,
    prune: PrunePlan | None = None,
    statistics: Statistics | None = None,
) -> Plan:
    """Plan a container.

    Args:
        checkpoint: the source; shard headers are not needed, the configuration gives the same lengths.
        model: what ``formats.families.bind`` made of it.
        recipe: any; it is checked against the model.
        selection: layers and experts to pack, or None for all.
        jobs: units that are to run at a time; changes the memory only.
        repository, commit: the source's name and revision, if they are known; they stand in the container.
        prune: which experts stay, or None for all.
        statistics: whose second moments weigh the columns of experts, or None for columns that count alike.

    Raises:
        UsageError: the recipe does not suit the model, no rule takes a tensor, the selection is empty or unknown, the
            prune plan or the statistics are of another model, cannot be, or would have no effect.
        EnvironmentProblem: an asset cannot be looked at.

    Example:
        plan = make_plan(checkpoint, bind(checkpoint), default_recipe("kimi_k3"))
        plan.container_bytes
    """
    architecture = model.architecture
    jobs = checked_jobs(jobs)
    recipe = resolve(recipe, family=architecture.family, expert_format=architecture.expert_format)
    selection = normalised(selection, architecture)
    if prune is not None:
        recipe = pruned_recipe(recipe, prune, checkpoint, model)
    kept = kept_experts(recipe, checkpoint, architecture)
    if isinstance(recipe.prune, Prune) and selection is not None and selection.experts is not None:
        raise UsageError("a prune plan says already which experts stay", where="--experts", hint="leave it out")
    codec, parameters, note = expert_codec(recipe, architecture)
    layers = plan_layers(
        architecture, codec, parameters, selection, kept=kept, lossless=lossless_codec(recipe, architecture)
    )
    recipe = _weighted(recipe, statistics, checkpoint, model, layers)
    trunk = plan_trunk(model.trunk, recipe, selection, kept=kept)
    fitting = Fitting(method=_method(recipe, codec), seed=recipe.fitting.seed, kernel=ARITHMETIC)
    draft = draft_manifest(
        checkpoint,
        model,
        recipe,
        layers=layers,
        segments=trunk.segments,
        dropped=trunk.dropped,
        partial=_partial(selection, model),
        shards=_shards(checkpoint, model, selection, layers, trunk),
        assets=_assets(checkpoint),
        fitting=fitting,
        repository=repository,
        commit=commit,
    )
    units = tuple(_units(layers, trunk.segments))
    identity = _identity(checkpoint, draft)
    return Plan(
        recipe=recipe,
        selection=selection,
        layers=layers,
        segments=trunk.segments,
        dropped=trunk.dropped,
        omitted=trunk.omitted,
        draft=draft,
        units=units,
        identity=MappingProxyType(identity),
        notes=tuple(
            _notes(checkpoint, draft, trunk, note if layers else None, _weights_note(recipe, layers, statistics))
        ),
        memory=memory_of(model, layers, trunk.segments),
        jobs=jobs,
        manifest_bytes=planned_bytes(draft),
        journal_bytes=journal_bytes(identity, len(units), draft),
        work_seconds=seconds_of(
            model, layers, trunk.segments, recipe.fitting.effort, weighted=isinstance(recipe.statistics, ColumnWeights)
        ),
        statistics=statistics,
    )


def _weighted(
    recipe: Recipe,
    statistics: Statistics | None,
    checkpoint: Checkpoint,
    model: Model,
    layers: Sequence[LayerPlan],
) -> Recipe:
    """The recipe with the digest of the statistics, once they are seen to be of this model and of use."""
    recorded = recipe.statistics.blake3 if isinstance(recipe.statistics, ColumnWeights) else None
    if statistics is None:
        if recorded is not None:
            raise UsageError("recipe was resolved with statistics, and none are given", expected=f"BLAKE3 {recorded}")
        return recipe
    if recorded not in (None, statistics.blake3):
        raise UsageError(
            "recipe was resolved with other statistics",
            where=statistics.path,
            expected=f"BLAKE3 {recorded}",
            found=statistics.blake3,
        )
    check_same_model(statistics.provenance.model, checkpoint, model.architecture, what="statistics")
    statistics.check_shapes(model.architecture)
    if statistics.provenance.tokens < LEAST_TOKENS:
        raise UsageError(
            "statistics are of too little text to weigh columns by",
            where=statistics.path,
            expected=f"at least {LEAST_TOKENS} tokens",
            found=statistics.provenance.tokens,
        )
    if not any(record.codec == Codec.RVQ for layer in layers for record in layer.records):
        raise UsageError(
            "statistics have no effect: they weigh the columns of experts stored as rvq, and none are",
            where=statistics.path,
            hint="leave them out",
        )
    return msgspec.structs.replace(recipe, statistics=ColumnWeights(blake3=statistics.blake3))


def _method(recipe: Recipe, codec: Codec) -> str:
    """How lossy expert codes are chosen, as the manifest says it."""
    if codec == Codec.RVQ and isinstance(recipe.experts, Rvq):
        weighted = ", columns weighted" if isinstance(recipe.statistics, ColumnWeights) else ""
        return f"{METHOD}, effort {recipe.fitting.effort}{weighted}"
    return "least squares" if codec == Codec.GROUP_INT else "none"


def _units(layers: Sequence[LayerPlan], segments: Sequence[SegmentPlan]) -> Iterator[Unit]:
    for layer in layers:
        count, length = len(layer.records), max(record.bytes for record in layer.records)
        step = max(1, min(UNIT_BYTES // length, UNIT_RECORDS, count // UNITS_PER_LAYER))
        for first in range(0, count, step):
            last = min(first + step, count) - 1
            low, high = layer.records[first].expert, layer.records[last].expert
            yield Unit(
                name=f"layer {layer.layer} experts {low}-{high}",
                label=f"layer {layer.layer}, experts {low} to {high}",
                file=bank_name(layer.layer),
                layer=layer.layer,
                first=first,
                last=last,
                segment="",
                bytes=sum(record.bytes for record in layer.records[first : last + 1]),
            )
    for segment in segments:
        yield Unit(
            name=f"trunk {segment.name}",
            label=f"trunk, {segment.name}",
            file=TRUNK_NAME,
            layer=None,
            first=0,
            last=0,
            segment=segment.name,
            bytes=segment.bytes,
        )


def _partial(selection: Selection | None, model: Model) -> Partial | None:
    if selection is None:
        return None
    layers = model.architecture.moe_layers if selection.layers is None else selection.layers
    return Partial(layers=layers, experts=selection.experts)


def _shards(
    checkpoint: Checkpoint, model: Model, selection: Selection | None, layers: Sequence[LayerPlan], trunk: TrunkPlan
) -> list[tuple[str, int]]:
    """(name, bytes) of the shards that the container is made from, by name: all of them unless it is partial.

    Without headers their lengths are not known and stand as 0; the length of the manifest does not depend on them.
    """
    if selection is None:
        needed = set(checkpoint.weight_map.values())
    else:
        needed = {tensor.shard for segment in trunk.segments for tensor in segment.tensors}
        templates = [template for names in model.expert_templates.values() for template in names]
        for layer in layers:
            of_layer = [template.replace("{layer}", str(layer.layer)) for template in templates]
            for expert in (str(record.source_expert) for record in layer.records):
                needed.update(checkpoint.weight_map[template.replace("{expert}", expert)] for template in of_layer)
    lengths = {shard.name: shard.bytes for shard in checkpoint.shards}
    return [(name, lengths.get(name, 0)) for name in sorted(needed, key=str.encode)]


def _assets(checkpoint: Checkpoint) -> list[tuple[str, int]]:
    try:
        return [(name, (checkpoint.directory / name).stat().st_size) for name in sorted(checkpoint.assets)]
    except OSError as error:
        raise EnvironmentProblem(f"cannot look at an asset: {error.strerror}", where=checkpoint.directory) from None


def _identity(checkpoint: Checkpoint, draft: Manifest) -> dict[str, Any]:
    """What must be equal for an unfinished pack to be continued; the journal's shard digests stand for the weights."""
    source = draft.source
    headers = {shard.name: shard.header_blake3 for shard in checkpoint.shards}
    return {
        "format": f"{draft.format} {draft.format_version}.{draft.format_revision}",
        "tool": msgspec.to_builtins(draft.tool),
        "recipe": draft.recipe,
        "fitting": msgspec.to_builtins(draft.fitting),
        "selection": msgspec.to_builtins(draft.partial),
        "architecture": _json(draft.architecture),
        "records": draft.experts.count,
        "source": {
            "repository": source.repository,
            "commit": source.commit,
            "tensors": source.tensors,
            "bytes": source.bytes,
            "config": blake3(checkpoint.config_bytes).hexdigest(),
            "shards": {
                shard.name: {"bytes": shard.bytes, "header": headers.get(shard.name, BLANK_DIGEST)}
                for shard in source.shards
            },
            "assets": {asset.path: asset.bytes for asset in draft.assets},
        },
    }


def _json(value: Any) -> Any:
    """A struct as the journal gives it back, lists included."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _weights_note(recipe: Recipe, layers: Sequence[LayerPlan], statistics: Statistics | None) -> str | None:
    """Whose second moments weigh the columns, if any do."""
    if statistics is None:
        return None
    weighed = {
        layer.layer: [record.source_expert for record in layer.records if record.codec == Codec.RVQ] for layer in layers
    }
    seldom = sum(seldom_seen(statistics, layer, experts) for layer, experts in weighed.items())
    total = sum(map(len, weighed.values()))
    note = f"columns of {counted(total, 'expert')} are weighted by the statistics"
    if seldom:
        note += f"; {seldom} of them, which fewer than {LEAST_TOKENS} tokens chose, by those of their layer"
    if (
        recipe.fitting.effort == "fast"
    ):  # measured: mean squares spread by exp(N(0, 0.25)) lose 1 %, exp(N(0, 1)) gain 6 %
        note += "; the greedy search of effort fast gains by it only where columns differ much"
    return note


def _notes(
    checkpoint: Checkpoint, draft: Manifest, trunk: TrunkPlan, fallback: str | None, weights: str | None
) -> Iterator[str]:
    if fallback is not None:
        yield fallback
    if weights is not None:
        yield weights
    if draft.partial is not None:
        experts = "all experts" if draft.partial.experts is None else f"experts {spelled(draft.partial.experts)}"
        yield f"partial container: layers {spelled(draft.partial.layers)}, {experts}; it cannot run as a model"
    if isinstance(draft.recipe.get("prune"), dict):
        yield _pruned_note(draft)
    if trunk.dropped:
        names = _some([item.name for item in trunk.dropped])
        yield f"dropped by rules of the recipe, {_count(trunk.dropped, 'tensor')}: {names}"
    if checkpoint.ignored:
        yield f"ignored beside the weights, {_count(checkpoint.ignored, 'file')}: {_some(checkpoint.ignored)}"
    if not checkpoint.has_headers:
        yield "no shard is here: shapes come from the configuration, and assets are those that are here"


def _pruned_note(draft: Manifest) -> str:
    """How many experts a plan leaves, and which layers it says nothing of."""
    counts = [info.experts for info in draft.layers]
    dropped = sum(len(info.dropped_experts) for info in draft.layers)
    if not dropped:
        return "pruned: the plan drops no expert"
    span = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{counts[0]}"
    named = {entry["layer"] for entry in draft.recipe["prune"]["layers"]}
    others = [info.layer for info in draft.layers if info.layer not in named]
    return (
        f"pruned: {dropped} of {sum(info.source_experts for info in draft.layers)} experts are dropped,"
        f" {span} of {draft.architecture.experts} stay in a layer"
        + (f"; the plan does not name {_layers(others)}, where all stay" if others else "")
    )


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'' if len(numbers) == 1 else 's'} {spelled(numbers)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}" if len(items) == 1 else f"{len(items)} {noun}s"
