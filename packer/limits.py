"""The recipe's error limits: which one applies to a matrix or tensor, and which recorded errors are above it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats.container import open_container
from formats.errors import UsageError
from formats.index import IndexRow
from formats.layout import Matrix, record_name
from formats.manifest import Manifest, TensorInfo
from packer.recipe.pruned import Prune
from packer.recipe.recipe import choose_rule
from packer.recipe.types import DropRule, Recipe, Rvq


@dataclass(frozen=True)
class OverLimit:
    """A matrix or trunk tensor whose relative error is above the limit of its recipe."""

    where: str
    error: float
    limit: float


def expert_limit(recipe: Recipe, codec: str) -> float | None:
    """The limit for experts of that codec; None if the recipe gives no expert that codec."""
    if recipe.experts.codec == codec:
        return recipe.experts.max_rel_error
    if isinstance(recipe.prune, Prune) and recipe.prune.lossless_codec == codec:
        return 0.0
    if (
        isinstance(recipe.experts, Rvq)
        and recipe.experts.fallback is not None
        and recipe.experts.fallback.codec == codec
    ):
        return recipe.experts.fallback.max_rel_error
    return None


def tensor_limit(recipe: Recipe, tensor: TensorInfo) -> float | None:
    """The limit for a trunk tensor; None if no rule of the recipe stores it with that codec."""
    try:
        _, rule = choose_rule(recipe, tensor.name, tensor.role, len(tensor.shape))
    except UsageError:
        return None
    return None if isinstance(rule, DropRule) or rule.codec != tensor.codec else rule.max_rel_error


def above(error: float, limit: float) -> bool:
    """Whether an error is above a limit. Errors of experts are stored as float32, so a limit is rounded like them."""
    return error > max(limit, float(np.float32(limit)))


def over_limits(manifest: Manifest, rows: Mapping[int, tuple[IndexRow, ...]], recipe: Recipe) -> list[OverLimit]:
    """Every recorded error above its limit, the worst (in proportion to its limit) first."""
    found = []
    for layer, layer_rows in rows.items():
        for row in layer_rows:
            limit = expert_limit(recipe, row.codec.label)
            if limit is None:
                continue
            found += [
                OverLimit(f"{record_name(layer, row.expert)} {matrix.label}", error, limit)
                for matrix, error in zip(Matrix, row.matrix_errors, strict=True)
                if above(error, limit)
            ]
    for tensor in manifest.tensors:
        limit = tensor_limit(recipe, tensor)
        if limit is not None and above(tensor.rel_error, limit):
            found.append(OverLimit(tensor.name, tensor.rel_error, limit))
    return sorted(found, key=lambda item: (-(item.error / item.limit if item.limit else math.inf), -item.error))


def over_limit(path: Path, recipe: Recipe) -> tuple[OverLimit, ...]:
    """The recorded errors of a finished container that are above the limits of ``recipe``, the worst first.

    Raises:
        FormatError: the container cannot be opened, or an index row is damaged.
    """
    with open_container(path) as container:
        rows = {info.layer: container.rows(info.layer) for info in container.manifest.layers}
        return tuple(over_limits(container.manifest, rows, recipe))
