"""What a container says about experts that are left out, checked against its plan and against its numbering.

A container that lacks experts names them layer by layer, and its recipe holds the plan that says so. Which source
expert a record holds follows from its number: the kept ones count from 0 in the order of their source numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from formats.errors import FormatError
from formats.index import IndexRow
from formats.layout import record_name
from formats.manifest import LayerInfo, Manifest
from formats.spelling import counted, spelled
from packer.prune.plan import layer_keep
from packer.prune.pruning import Kept, kept_of
from packer.recipe.pruned import Prune
from packer.recipe.types import Recipe, Rvq
from packer.verify.findings import Problem, problem_of

Rows = Mapping[int, Sequence[IndexRow]]

_SHOWN = 80  # characters of a list of experts


def kept_sources(info: LayerInfo) -> tuple[int, ...]:
    """The source experts that a layer keeps, in the order of their numbers in the container."""
    dropped = frozenset(info.dropped_experts)
    return tuple(expert for expert in range(info.source_experts) if expert not in dropped)


def numbering_problems(manifest: Manifest, rows: Rows) -> Iterator[Problem]:
    """Records of another source expert than their number stands for (SPEC section 4.3)."""
    for info in manifest.layers:
        kept = kept_sources(info)
        for row in rows.get(info.layer, ()):
            expected = kept[row.expert] if row.expert < len(kept) else None
            if row.source_expert != expected:
                yield Problem(
                    record_name(info.layer, row.expert),
                    f"holds another source expert than its number stands for (expected {expected},"
                    f" found {row.source_expert})",
                )


def pruning_problems(manifest: Manifest, rows: Rows, recipe: Recipe) -> Iterator[Problem]:
    """What is dropped, and what is lossless, against the plan that the recipe records."""
    plan: dict[int, Kept] = {}
    codec = None
    if isinstance(recipe.prune, Prune):
        codec = recipe.prune.lossless_codec
        try:
            for entry in recipe.prune.layers:
                where = f"manifest.json: recipe.prune: layer {entry.layer}"
                layer = layer_keep(entry, manifest.architecture.experts, where, FormatError)
                plan[entry.layer] = kept_of(layer, manifest.architecture.experts)
        except FormatError as error:
            yield problem_of(error)
            return
    for info in manifest.layers:
        kept = plan.get(info.layer)
        expected = () if kept is None else kept.dropped
        if info.dropped_experts != expected:
            yield Problem(f"layer {info.layer}", _other_dropped(info.dropped_experts, expected, bool(plan)))
        elif kept is not None and codec is not None:
            yield from _tier_problems(rows.get(info.layer, ()), kept, codec, recipe)


def _other_dropped(found: Sequence[int], expected: Sequence[int], planned: bool) -> str:
    if not planned:
        return f"{counted(len(found), 'expert')} dropped, and no plan of the recipe says so"
    return (
        f"dropped experts are not those that the recipe's plan drops (expected {spelled(expected)[:_SHOWN] or 'none'},"
        f" found {spelled(found)[:_SHOWN] or 'none'})"
    )


def _tier_problems(rows: Sequence[IndexRow], kept: Kept, lossless: str, recipe: Recipe) -> Iterator[Problem]:
    others = {recipe.experts.codec}
    if isinstance(recipe.experts, Rvq) and recipe.experts.fallback is not None:
        others.add(recipe.experts.fallback.codec)
    for row in rows:
        allowed = {lossless} if row.source_expert in kept.lossless else others
        if row.codec.label not in allowed:
            yield Problem(
                record_name(row.layer, row.expert),
                f"is in another tier than the recipe's plan says (expected {' or '.join(sorted(allowed))},"
                f" found {row.codec.label})",
            )
