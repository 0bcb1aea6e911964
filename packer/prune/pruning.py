"""What a prune plan means for a checkpoint: the experts that each layer keeps, and why a plan may be impossible.

A pruned model has to choose as the full one would if the correction biases of its dropped experts were minus
infinity: what is dropped is never chosen, and everything else stays as it is. Plans under which that cannot be so are
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import msgspec

from formats.checkpoint import CONFIG_NAME, Checkpoint
from formats.errors import UsageError
from formats.families import Architecture, Model, TextConfig, read_text_model
from formats.families.kimi_config import Arithmetic
from packer.model_stamp import check_same_model
from packer.prune.plan import LayerKeep, PrunePlan, kept_entry, layer_keep
from packer.recipe.pruned import Prune
from packer.recipe.types import Recipe


@dataclass(frozen=True)
class Kept:
    """The experts of one layer that stay.

    Attributes:
        experts: their source numbers, ascending; in the container they count from 0 in this order.
        lossless: those of them that are stored with the source's own bytes.
        dropped: all other source numbers, ascending.
    """

    experts: tuple[int, ...]
    lossless: frozenset[int]
    dropped: tuple[int, ...]


KeptByLayer = Mapping[int, Kept]
NOTHING_PRUNED: KeptByLayer = MappingProxyType({})


def pruned_recipe(recipe: Recipe, plan: PrunePlan, checkpoint: Checkpoint, model: Model) -> Recipe:
    """A resolved recipe that says what a plan keeps, once the plan is seen to suit the checkpoint.

    Raises:
        UsageError: the plan is for another model, or cannot be.
    """
    architecture = model.architecture
    check_same_model(plan.model, checkpoint, architecture, what="prune plan")
    own: Literal["mxfp4", "raw"] = "mxfp4" if architecture.expert_format == "mxfp4" else "raw"
    prune = Prune(
        blake3=plan.blake3,
        made=plan.made,
        lossless_codec=own if any(layer.lossless for layer in plan.layers) else None,
        layers=tuple(kept_entry(layer) for layer in plan.layers),
    )
    recipe = msgspec.structs.replace(recipe, prune=prune)
    kept_experts(recipe, checkpoint, architecture)
    return recipe


def kept_experts(recipe: Recipe, checkpoint: Checkpoint, architecture: Architecture) -> KeptByLayer:
    """By layer that the recipe's plan names, the experts that stay; empty without a plan.

    Raises:
        UsageError: the plan cannot be for this model.
    """
    if not isinstance(recipe.prune, Prune):
        return NOTHING_PRUNED
    _, config = read_text_model(checkpoint.config, CONFIG_NAME)
    found: dict[int, Kept] = {}
    for entry in recipe.prune.layers:
        where = f"prune plan: layer {entry.layer}"
        if entry.layer not in architecture.moe_layers:
            raise UsageError("layer has no routed experts in this model", where=where)
        if entry.layer in found:
            raise UsageError("layer stands twice", where=where)
        layer = layer_keep(entry, architecture.experts, where)
        found[entry.layer] = kept_of(layer, architecture.experts)
        _check_routing(found[entry.layer], config, where)
    return MappingProxyType(found)


def kept_of(layer: LayerKeep, experts: int) -> Kept:
    """What stays of ``experts`` experts, and what does not."""
    kept = frozenset((*layer.keep, *layer.lossless))
    dropped = tuple(expert for expert in range(experts) if expert not in kept)
    return Kept(tuple(sorted(kept)), frozenset(layer.lossless), dropped)


def _check_routing(kept: Kept, config: TextConfig, where: str) -> None:
    """Refuse what would make the remaining router choose otherwise than the full one without the dropped experts."""
    if len(kept.experts) < config.experts_per_token:
        raise UsageError(
            "fewer experts stay than a token uses",
            where=where,
            expected=config.experts_per_token,
            found=len(kept.experts),
        )
    if not kept.dropped:
        return
    arithmetic = config.arithmetic
    if arithmetic.scoring == "softmax" and not arithmetic.renormalize:
        raise UsageError(
            "experts cannot be dropped: this router's weights are shares of all experts together",
            where=where,
            expected="a router with sigmoid scores, or with weights that are divided by their sum",
        )
    if arithmetic.grouped and arithmetic.expert_groups > arithmetic.groups_per_token:
        _check_groups(kept, config, arithmetic, where)


def _check_groups(kept: Kept, config: TextConfig, arithmetic: Arithmetic, where: str) -> None:
    """Groups are neighbouring experts, equally many in each, and count as the sum of their two best scores."""
    size = config.experts // arithmetic.expert_groups
    counts = Counter(expert // size for expert in kept.experts)
    of_groups = [counts[group] for group in range(arithmetic.expert_groups)]
    if len(set(of_groups)) != 1:
        raise UsageError(
            "experts are chosen by groups, which must all keep equally many",
            where=where,
            expected=f"{arithmetic.expert_groups} groups alike",
            found=f"{min(of_groups)} to {max(of_groups)} kept in a group of {size}",
        )
    least = max(min(2, size), -(-config.experts_per_token // arithmetic.groups_per_token))
    if of_groups[0] < least:
        raise UsageError(
            "experts are chosen by groups, which keep too few",
            where=where,
            expected=f"{least} of {size} in each: a group counts as its two best, and"
            f" {arithmetic.groups_per_token} groups must offer {config.experts_per_token} experts",
            found=of_groups[0],
        )
