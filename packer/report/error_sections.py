"""Sections of the page about a verification: errors of experts by layer and matrix, and of the trunk by role."""

from __future__ import annotations

import numpy as np

from formats.layout import Matrix
from formats.manifest import Manifest
from packer.output import human_bytes
from packer.report import plots
from packer.report.page import Figure, Paragraph, Part, Section, Table
from packer.report.spelling import figure
from packer.report.verify_figures import (
    PERCENTILES,
    WORST,
    Distribution,
    LayerErrors,
    distribution,
    distributions,
    role_errors,
    worst_matrices,
)

_MATRICES = tuple(matrix.label for matrix in Matrix)


def expert_sections(layers: tuple[LayerErrors, ...], manifest: Manifest) -> tuple[Section, ...]:
    """The sections about expert records: maps, distribution and the worst.

    Args:
        layers: errors as the index has them.
        manifest: of the container.
    """
    if not layers:
        text = "No expert records: the container has none, or none of its index rows can be proved."
        return (Section("Errors of experts", (Paragraph(text),)),)
    return _maps(layers), _spread(layers), _worst(layers, manifest)


def _maps(layers: tuple[LayerErrors, ...]) -> Section:
    means = np.array([layer.errors.mean(axis=0) for layer in layers])
    worst = np.array([layer.errors.max(axis=0) for layer in layers])
    names = [str(layer.layer) for layer in layers]
    label = "relative\nerror"
    mean_map = plots.heat_map("mean", means.T, _MATRICES, names, ("layer", "", label))
    worst_map = plots.heat_map("worst", worst.T, _MATRICES, names, ("layer", "", label))
    columns = [f">{matrix} {word}" for matrix in _MATRICES for word in ("mean", "median", "99\u00a0%", "worst")]
    rows = []
    for name, layer in zip(names, layers, strict=True):
        spreads = [distribution(layer.errors[:, matrix].tolist()) for matrix in Matrix]
        cells = [number for found in spreads for number in (found.mean, *_some(found), found.largest)]
        rows.append((name, str(len(layer.experts)), *(figure(number) for number in cells)))
    return Section(
        "Errors by layer and matrix",
        (
            Figure(
                mean_map,
                "Mean relative error over a layer's experts, by layer and matrix.",
                "Heat map of mean relative errors by layer and matrix",
            ),
            Figure(
                worst_map,
                "Relative error of the worst expert of each layer, by matrix. Its colours have a scale of their own.",
                "Heat map of the largest relative errors by layer and matrix",
            ),
            Table(
                "Relative errors by layer and matrix: mean, median, 99th percentile and worst expert.",
                ("layer", ">records", *columns),
                tuple(rows),
            ),
        ),
    )


def _some(found: Distribution) -> tuple[float, float]:
    """Median and 99th percentile."""
    return found.percentiles[PERCENTILES.index(50)], found.percentiles[PERCENTILES.index(99)]


def _spread(layers: tuple[LayerErrors, ...]) -> Section:
    errors = np.concatenate([layer.errors for layer in layers])
    series = [(matrix.label, errors[:, matrix]) for matrix in Matrix]
    drawn = plots.histogram("spread", series, "relative error", "experts")
    columns = (">matrices", ">least", *(f">{share}\u00a0%" for share in PERCENTILES), ">largest", ">mean")
    rows = tuple(
        (codec, matrix, str(found.count), *(figure(number) for number in _numbers(found)))
        for (codec, matrix), found in distributions(layers).items()
    )
    return Section(
        "Distribution of the experts' errors",
        (
            Figure(
                drawn,
                "How many experts have which relative error, in steps of equal width.",
                "Histogram of relative errors by matrix",
            ),
            Table(
                "Relative errors by codec and matrix over all layers. A percentile is the smallest error that so many"
                " percent do not exceed.",
                ("codec", "matrix", *columns),
                rows,
            ),
        ),
    )


def _numbers(found: Distribution) -> tuple[float, ...]:
    return (found.least, *found.percentiles, found.largest, found.mean)


def _worst(layers: tuple[LayerErrors, ...], manifest: Manifest) -> Section:
    title = f"The {WORST} worst expert matrices"
    rows = tuple(
        (
            str(item.layer),
            str(item.expert),
            str(item.source),
            item.matrix,
            item.codec,
            figure(item.error, 6),
            figure(item.limit),
        )
        for item in worst_matrices(layers, manifest)
    )
    if not rows:
        return Section(title, (Paragraph("No expert matrix has an error."),))
    columns = ("layer", ">expert", ">source expert", "matrix", "codec", ">relative error", ">limit of the recipe")
    return Section(title, (Table("The largest relative errors first.", columns, rows),))


def trunk_section(manifest: Manifest) -> Section:
    """Errors of trunk tensors by role, as the manifest has them."""
    roles = role_errors(manifest)
    columns = (">bytes", ">copied", ">encoded", ">least", ">median", ">largest", ">mean", "tensor with the largest")
    rows = []
    for role in roles:
        found = role.encoded
        cells = ["0", *4 * ["-"]]
        if found is not None:
            middle, _ = _some(found)
            shown = (found.least, middle, found.largest, found.mean)
            cells = [str(found.count), *(figure(number) for number in shown)]
        rows.append((role.role, human_bytes(role.bytes), str(role.copied), *cells, role.worst or "-"))
    parts: list[Part] = [
        Table("Trunk tensors by role; errors are those of encoded tensors.", ("role", *columns), tuple(rows))
    ]
    encoded = [(role.role, role.encoded) for role in roles if role.encoded is not None]
    if encoded:
        spans = np.array([(found.least, _some(found)[0], found.largest) for _, found in encoded])
        names = [name for name, _ in encoded]
        drawn = plots.span_plot("trunk", names, spans, ("least", "median", "largest"), "relative error")
        caption = "Relative errors of encoded trunk tensors by role."
        parts.insert(0, Figure(drawn, caption, "Least, median and largest relative error of trunk tensors by role"))
    return Section("Errors of the trunk by role", tuple(parts))
