"""Prune plans for small checkpoints, pruned packs, and made-up statistics of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from formats.checkpoint import open_checkpoint
from formats.families import bind
from packer.model_stamp import stamp_of
from packer.pipeline import PackResult, pack
from packer.planning.plan import Plan, make_plan
from packer.planning.selection import parse_selection
from packer.prune.plan import LayerKeep, PrunePlan
from packer.recipe.pruned import Made
from packer.recipe.recipe import default_recipe, load_recipe, override
from packer.statistics.file import LayerStatistics, Provenance, Statistics, open_statistics, write_statistics
from packer.statistics.types import SampledModel, SampleLabel, SampleText
from tests.support.containers import Forge

MADE = Made(
    by="moepack test",
    mode="graded",
    keep="27%",
    sources=("code", "prose"),
    statistics_blake3="cd" * 32,
    retained_saliency=0.8125,
)


def plan_for(
    source: Path,
    keep: Mapping[int, Sequence[int]],
    lossless: Mapping[int, Sequence[int]] | None = None,
    made: Made | None = MADE,
) -> PrunePlan:
    """A plan for the checkpoint at ``source`` that keeps these experts of these layers."""
    lossless = lossless or {}
    with open_checkpoint(source) as checkpoint:
        stamp = stamp_of(checkpoint.config_bytes, bind(checkpoint).architecture)
    layers = sorted({*keep, *lossless})
    return PrunePlan(
        stamp, made, tuple(LayerKeep(n, tuple(keep.get(n, ())), tuple(lossless.get(n, ()))) for n in layers)
    )


def planned(source: Path, *settings: str, recipe: str | None = None, layers: str | None = None, **options: Any) -> Plan:
    """A plan for the checkpoint at ``source``; ``options`` are those of ``make_plan``."""
    with open_checkpoint(source) as checkpoint:
        model = bind(checkpoint)
        chosen = load_recipe(recipe) if recipe else default_recipe(model.architecture.family)
        selection = parse_selection(layers, None, model.architecture)
        return make_plan(checkpoint, model, override(chosen, settings), selection=selection, **options)


def packed(source: Path, out: Path, plan: Plan, **options: Any) -> PackResult:
    """Pack with 2 jobs, unless ``options`` of ``pack`` say otherwise."""
    with open_checkpoint(source) as checkpoint:
        return pack(checkpoint, bind(checkpoint), plan, out, **{"jobs": 2, **options})


def rotate_router(container: Path, layer: int) -> Path:
    """Turn the rows of a layer's stored router by one, every digest made right; the correction biases stay."""
    forge = Forge(container)
    info = next(item for item in forge.document["tensors"] if (item["role"], item["layer"]) == ("router", layer))
    row, end = info["bytes"] // info["shape"][0], info["offset"] + info["bytes"]
    rows = bytes(forge.trunk[info["offset"] : end])
    forge.trunk[info["offset"] : end] = rows[row:] + rows[:row]
    info["source_blake3"] = blake3(rows[row:] + rows[:row]).hexdigest()
    return forge.save()


def provenance_of(source: Path, labels: Mapping[str, int]) -> Provenance:
    """Of the model at ``source``, with so many tokens of each label."""
    with open_checkpoint(source) as checkpoint:
        stamp = stamp_of(checkpoint.config_bytes, bind(checkpoint).architecture)
    texts = (SampleText(name="a novel.txt", bytes=7, blake3="ef" * 32),)
    model = SampledModel(**{name: getattr(stamp, name) for name in stamp.__struct_fields__}, source=str(source.name))
    return Provenance(
        model=model,
        labels=tuple(SampleLabel(name=name, tokens=tokens, texts=texts) for name, tokens in labels.items()),
        window=64,
        tool="moepack test",
    )


def made_up_layer(
    rng: np.random.Generator, provenance: Provenance, inputs: int, width: int, *, spread: float = 1.0
) -> LayerStatistics:
    """Sums that could have been counted; mean squares of columns are spread by exp(``spread`` x N(0, 1))."""
    experts, chosen = provenance.model.experts, provenance.model.experts_per_token
    tokens = np.zeros((len(provenance.labels), experts), np.int64)
    for number, label in enumerate(provenance.labels):
        # So many tokens to each of the first experts, fewer and fewer to the others, none to the last if possible.
        left = label.tokens * chosen
        for expert in range(experts):
            tokens[number, expert] = min(left, label.tokens if expert < chosen - 1 else max(1, left // 2))
            left -= tokens[number, expert]
        tokens[number, chosen] += left
    gate = tokens * rng.uniform(0.1, 0.3, tokens.shape)
    saliency = gate * rng.uniform(1, 2, tokens.shape)
    first = saliency * rng.uniform(0.4, 0.6, tokens.shape)
    seen = tokens.sum(axis=0)
    columns, inner = (np.exp(spread * rng.standard_normal((experts, count))) for count in (inputs, width))
    own, own_inner = seen[:, None] * columns, seen[:, None] * inner
    return LayerStatistics(
        tokens,
        gate,
        saliency,
        np.stack([first, saliency - first]),
        own.sum(axis=0) / chosen,
        own_inner.sum(axis=0),
        own.astype(np.float32),
        own_inner.astype(np.float32),
    )


def made_up_statistics(
    source: Path, path: Path, *, labels: Mapping[str, int] | None = None, seed: int = 0, spread: float = 1.0
) -> Statistics:
    """Write made-up statistics of the model at ``source``, and open them."""
    provenance = provenance_of(source, labels or {"code": 4000, "prose": 2000})
    with open_checkpoint(source) as checkpoint:
        architecture = bind(checkpoint).architecture
    (_, inputs), _, (_, width) = architecture.expert_shapes
    rng = np.random.default_rng(seed)
    sums = [made_up_layer(rng, provenance, inputs, width, spread=spread) for _ in architecture.moe_layers]
    digest = write_statistics(path, provenance, architecture.moe_layers, sums)
    assert digest == blake3(path.read_bytes()).hexdigest()
    return open_statistics(path)
