"""What a page about a verification tells, as numbers: errors by layer and matrix, their distribution, the worst."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.container import Container
from formats.errors import FormatError
from formats.layout import Matrix
from formats.manifest import Manifest, TensorInfo
from packer.limits import expert_limit
from packer.recipe.recipe import recipe_from_builtins
from packer.recipe.types import Recipe
from packer.verify.structure import readable_rows

Double = NDArray[np.float64]
Whole = NDArray[np.int64]

WORST = 20
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
COPIED = "raw"  # the codec of trunk tensors that are stored as they are


@dataclass(frozen=True)
class LayerErrors:
    """The expert records of one layer whose index rows can be proved.

    Attributes:
        layer: its number.
        experts: int64 [records], numbers in the container.
        sources: int64 [records], numbers in the source.
        codecs: names, one a record.
        errors: float64 [records, 3], relative errors of gate, up and down.
    """

    layer: int
    experts: Whole
    sources: Whole
    codecs: tuple[str, ...]
    errors: Double


@dataclass(frozen=True)
class Distribution:
    """How values are spread. Each percentile is the smallest value that so many percent do not exceed.

    Attributes:
        count: of values, at least 1.
        least, largest, mean: of them.
        percentiles: those of ``PERCENTILES``.
    """

    count: int
    least: float
    percentiles: tuple[float, ...]
    largest: float
    mean: float


@dataclass(frozen=True)
class BadMatrix:
    """One of the matrices with the largest errors; ``limit`` is the recipe's, None if it has none."""

    layer: int
    expert: int
    source: int
    matrix: str
    codec: str
    error: float
    limit: float | None


@dataclass(frozen=True)
class RoleErrors:
    """The trunk tensors of one role.

    Attributes:
        role: its name.
        bytes: stored.
        copied: tensors stored as they are, without an error.
        encoded: the others' errors, None if there are none.
        worst: the tensor with the largest error, None likewise.
    """

    role: str
    bytes: int
    copied: int
    encoded: Distribution | None
    worst: str | None


def layer_errors(container: Container) -> tuple[LayerErrors, ...]:
    """Relative errors as the index has them; layers whose rows are damaged are left out, they are problems already."""
    rows, _ = readable_rows(container)
    return tuple(
        LayerErrors(
            layer,
            np.array([row.expert for row in found], np.int64),
            np.array([row.source_expert for row in found], np.int64),
            tuple(row.codec.label for row in found),
            np.array([row.matrix_errors for row in found], np.float64),
        )
        for layer, found in rows.items()
        if found
    )


def distribution(values: Iterable[float]) -> Distribution:
    """How values are spread; there must be some.

    >>> found = distribution([3.0, 1.0, 2.0, 10.0])
    >>> found.least, found.percentiles[3], found.largest, found.mean
    (1.0, 2.0, 10.0, 4.0)
    """
    ordered = sorted(values)
    places = [max(1, math.ceil(percent * len(ordered) / 100)) - 1 for percent in PERCENTILES]
    return Distribution(
        len(ordered),
        ordered[0],
        tuple(ordered[place] for place in places),
        ordered[-1],
        math.fsum(ordered) / len(ordered),
    )


def distributions(layers: Sequence[LayerErrors]) -> dict[tuple[str, str], Distribution]:
    """By codec and matrix, over all layers."""
    found = {}
    for codec in sorted({name for layer in layers for name in layer.codecs}):
        chosen = [layer.errors[np.array([name == codec for name in layer.codecs])] for layer in layers]
        for matrix in Matrix:
            values = np.concatenate([errors[:, matrix] for errors in chosen])
            found[codec, matrix.label] = distribution(values.tolist())
    return found


def worst_matrices(layers: Sequence[LayerErrors], manifest: Manifest) -> tuple[BadMatrix, ...]:
    """The ``WORST`` expert matrices with the largest errors, above zero; among equals the first in the container."""
    recipe = _recipe(manifest)
    found = []
    for layer in layers:
        for place in np.argsort(-layer.errors, axis=None, kind="stable")[:WORST].tolist():
            record, matrix = divmod(place, len(Matrix))
            error = float(layer.errors[record, matrix])
            if error > 0:
                found.append((error, layer, record, Matrix(matrix)))
    found.sort(key=lambda item: -item[0])  # stable: layers and records ascend already
    return tuple(
        BadMatrix(
            layer.layer,
            int(layer.experts[record]),
            int(layer.sources[record]),
            matrix.label,
            layer.codecs[record],
            error,
            None if recipe is None else expert_limit(recipe, layer.codecs[record]),
        )
        for error, layer, record, matrix in found[:WORST]
    )


def role_errors(manifest: Manifest) -> tuple[RoleErrors, ...]:
    """Trunk tensors by role, the roles in the order of the manifest."""
    roles: dict[str, list[TensorInfo]] = {}
    for tensor in manifest.tensors:
        roles.setdefault(tensor.role, []).append(tensor)
    found = []
    for role, tensors in roles.items():
        encoded = [tensor for tensor in tensors if tensor.codec != COPIED]
        found.append(
            RoleErrors(
                role,
                sum(tensor.bytes for tensor in tensors),
                len(tensors) - len(encoded),
                distribution(tensor.rel_error for tensor in encoded) if encoded else None,
                max(encoded, key=lambda tensor: tensor.rel_error).name if encoded else None,
            )
        )
    return tuple(found)


def _recipe(manifest: Manifest) -> Recipe | None:
    """The recipe of the manifest; one that cannot be read is a problem of the verification already."""
    try:
        return recipe_from_builtins(manifest.recipe, where="manifest.json: recipe", error=FormatError)
    except FormatError:
        return None
