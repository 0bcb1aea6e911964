"""The page about a verification: what was found, and the errors of the container by layer, matrix and role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from formats.container import Container, open_container
from formats.errors import FormatError
from formats.layout import Matrix
from formats.manifest import Manifest
from formats.spelling import counted
from packer.output import human_bytes, human_number
from packer.report import plots
from packer.report.page import Figure, Page, Paragraph, Part, Section, Table, write_page
from packer.report.spelling import percent
from packer.report.verify_figures import (
    PERCENTILES,
    WORST,
    Distribution,
    LayerErrors,
    distribution,
    distributions,
    layer_errors,
    role_errors,
    worst_matrices,
)
from packer.verify_report import VerifyReport

if TYPE_CHECKING:
    from packer.logits_parity import LogitsParity

Double = NDArray[np.float64]

SHOWN_PROBLEMS = 1000
_MATRICES = tuple(matrix.label for matrix in Matrix)


def write_verify_page(path: Path, container: Path, report: VerifyReport) -> None:
    """Write the page.

    Args:
        path: of the page; nothing may have that name.
        container: the directory that was verified.
        report: of the verification.

    Raises:
        UsageError: something has that name already, or its folder is not there.
        FormatError: the container can no longer be opened, or has become another one.
        EnvironmentProblem: matplotlib is not there, or the page cannot be written.
    """
    plots.check_plots()
    with open_container(container) as opened:
        if opened.container_id != report.container_id:
            raise FormatError(
                "container changed since it was verified",
                where=container,
                expected=report.container_id,
                found=opened.container_id,
                hint="verify it again",
            )
        page = verify_page(opened, report)
    write_page(path, page)


def verify_page(container: Container, report: VerifyReport) -> Page:
    """The page about ``container``, of which ``report`` is."""
    manifest = container.manifest
    layers = layer_errors(container)
    verdict = "ok" if report.ok else f"failed, {counted(len(report.problems), 'problem')}"
    return Page(
        f"Verification of a container of {manifest.architecture.family}: {verdict}",
        (_summary(report), Paragraph(_standing(report))),
        (
            _problems(report),
            *((_logits(report.logits),) if report.logits is not None else ()),
            *_experts(layers, manifest),
            _trunk(manifest),
            _provenance(manifest, report),
        ),
    )


def _summary(report: VerifyReport) -> Table:
    rows = [
        ("result", "ok" if report.ok else f"failed: {counted(len(report.problems), 'problem')}"),
        ("container", report.container_id),
        ("level", report.level),
        ("looked at", f"{counted(report.records_checked, 'expert record')}, "
         f"{counted(report.tensors_checked, 'trunk tensor')}"),
    ]  # fmt: skip
    if report.left_out is not None:
        left = [counted(report.left_out.records, "expert record")]
        if report.left_out.shard_digests:
            left.append(f"digests of {counted(report.left_out.shard_digests, 'source shard')}")
        rows.append(("left out, by a sample", ", ".join(left)))
    if report.parity is not None:
        parity = report.parity
        for name, errors in (("experts", parity.experts), ("trunk", parity.trunk)):
            if errors.mean is not None:
                figures = f"mean {human_number(errors.mean, 4)}, largest {human_number(errors.max, 4)}"
                rows.append((f"{name}, measured relative error", figures))
        rows.append(("source", f"{counted(parity.source_tensors, 'tensor')}, {parity.exact_tensors} of them bit for bit,"
                     f" {parity.unaccounted} unaccounted for"))  # fmt: skip
    return Table("The verification.", ("", ""), tuple(rows))


def _standing(report: VerifyReport) -> str:
    """What the errors on the page are worth at the level that was reached."""
    meaning = "The relative error of a matrix or tensor is ||stored - source|| / ||source||, by Frobenius norms. "
    if report.parity is None:
        return (
            f"{meaning}Errors below are those that the packer recorded in the container; at level {report.level} none was"
            " measured: level parity does, and needs the source."
        )
    checked = "each was measured again against the source"
    if report.left_out is not None and report.left_out.records:
        checked = (
            f"those of the trunk and of {counted(report.records_checked, 'expert record')} were measured again against"
            f" the source, those of the other {report.left_out.records} were not"
        )
    return (
        f"{meaning}Errors below are those that the container records; {checked}, by a decoder of its own, and a"
        " recorded error that differs from the measured one is a problem."
    )


def _problems(report: VerifyReport) -> Section:
    if report.ok:
        return Section("Problems", (Paragraph("None were found."),))
    shown = report.problems[:SHOWN_PROBLEMS]
    more = len(report.problems) - len(shown)
    caption = "What is not as it must be." + (f" {more} more are listed by --json." if more else "")
    rows = tuple((problem.where, problem.what) for problem in shown)
    return Section("Problems", (Table(caption, ("where", "what"), rows),))


def _logits(found: LogitsParity) -> Section:
    rows = [
        ("positions", str(found.positions)),
        ("KL divergence from the source (nats)", f"mean {human_number(found.kl_mean, 4)}, largest"
         f" {human_number(found.kl_max, 4)} at position {found.kl_max_position}"),
        ("the same likeliest token", f"{percent(found.top1)} % of the positions"),
        ("of the five likeliest in common", f"{percent(found.top5)} %"),
        ("largest difference between logits", human_number(found.largest, 4)),
    ]  # fmt: skip
    if found.source.tokens:
        before, after = (human_number(loss.perplexity, 6) for loss in (found.source, found.container))
        rows.append(("perplexity", f"source {before}, container {after}, of {counted(found.source.tokens, 'token')}"))
    layers = [(str(item.layer), human_number(item.largest, 4), human_number(item.relative, 4)) for item in found.layers]
    numbers = np.array([item.layer for item in found.layers], np.float64)
    relative = np.array([np.nan if item.relative is None else item.relative for item in found.layers])
    drawn = plots.line_plot(
        "logits",
        [plots.Line("relative error", numbers, relative, plots.FIRST)],
        plots.Axis("layer"),
        plots.Axis("relative error of what it hands on", 0.0),
        height=2.5,
    )
    return Section(
        "Logits of both models",
        (
            Table("Source and container on the same tokens.", ("", ""), tuple(rows)),
            Figure(drawn, "How far what a layer hands on is from the source's, over all positions.",
                   "Curve of the relative error of layer outputs by layer"),
            Table("Differences of what each layer hands on.", ("layer", ">largest difference", ">relative error"),
                  tuple(layers)),
        ),
    )  # fmt: skip


def _experts(layers: tuple[LayerErrors, ...], manifest: Manifest) -> tuple[Section, ...]:
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
    columns = [f">{matrix} {word}" for matrix in _MATRICES for word in ("mean", "median", "99 %", "worst")]
    rows = []
    for name, layer in zip(names, layers, strict=True):
        spreads = [distribution(layer.errors[:, matrix].tolist()) for matrix in Matrix]
        cells = [number for found in spreads for number in (found.mean, *_some(found), found.largest)]
        rows.append((name, str(len(layer.experts)), *(human_number(number, 4) for number in cells)))
    return Section(
        "Errors by layer and matrix",
        (
            Figure(mean_map, "Mean relative error over a layer's experts, by layer and matrix.",
                   "Heat map of mean relative errors by layer and matrix"),
            Figure(worst_map, "Relative error of the worst expert of each layer, by matrix. Its colours have a scale of"
                   " their own.", "Heat map of the largest relative errors by layer and matrix"),
            Table("Relative errors by layer and matrix: mean, median, 99th percentile and worst expert.",
                  ("layer", ">records", *columns), tuple(rows)),
        ),
    )  # fmt: skip


def _some(found: Distribution) -> tuple[float, float]:
    """Median and 99th percentile."""
    return found.percentiles[PERCENTILES.index(50)], found.percentiles[PERCENTILES.index(99)]


def _spread(layers: tuple[LayerErrors, ...]) -> Section:
    errors = np.concatenate([layer.errors for layer in layers])
    series = [(matrix.label, errors[:, matrix]) for matrix in Matrix]
    drawn = plots.histogram("spread", series, "relative error", "experts")
    columns = (">matrices", ">least", *(f">{share} %" for share in PERCENTILES), ">largest", ">mean")
    rows = tuple(
        (codec, matrix, str(found.count), *(human_number(number, 4) for number in _numbers(found)))
        for (codec, matrix), found in distributions(layers).items()
    )
    return Section(
        "Distribution of the experts' errors",
        (
            Figure(drawn, "How many experts have which relative error, in 60 steps of equal width.",
                   "Histogram of relative errors by matrix"),
            Table("Relative errors by codec and matrix over all layers. A percentile is the smallest error that so many"
                  " percent do not exceed.", ("codec", "matrix", *columns), rows),
        ),
    )  # fmt: skip


def _numbers(found: Distribution) -> tuple[float, ...]:
    return (found.least, *found.percentiles, found.largest, found.mean)


def _worst(layers: tuple[LayerErrors, ...], manifest: Manifest) -> Section:
    title = f"The {WORST} worst expert matrices"
    rows = tuple(
        (str(item.layer), str(item.expert), str(item.source), item.matrix, item.codec, human_number(item.error, 6),
         human_number(item.limit, 4))
        for item in worst_matrices(layers, manifest)
    )  # fmt: skip
    if not rows:
        return Section(title, (Paragraph("No expert matrix has an error."),))
    columns = ("layer", ">expert", ">source expert", "matrix", "codec", ">relative error", ">limit of the recipe")
    return Section(title, (Table("The largest relative errors first.", columns, rows),))


def _trunk(manifest: Manifest) -> Section:
    roles = role_errors(manifest)
    columns = (">bytes", ">copied", ">encoded", ">least", ">median", ">largest", ">mean", "tensor with the largest")
    rows = []
    for role in roles:
        found = role.encoded
        cells = ["0", *4 * ["-"]]
        if found is not None:
            middle, _ = _some(found)
            shown = (found.least, middle, found.largest, found.mean)
            cells = [str(found.count), *(human_number(number, 4) for number in shown)]
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


def _provenance(manifest: Manifest, report: VerifyReport) -> Section:
    source, coverage, model = manifest.source, manifest.coverage, manifest.architecture
    codecs = ", ".join(f"{name} {count}" for name, count in _recipe_lines(manifest))
    rows = (
        ("container", report.container_id),
        ("made by", f"{manifest.tool.name} {manifest.tool.version}"),
        ("format", f"version {manifest.format_version}, revision {manifest.format_revision}"),
        ("model", f"{model.family} ({model.name}), {counted(model.hidden_layers, 'layer')}, {model.experts} experts, of"
         f" which a token uses {model.experts_per_token}"),
        ("repository", source.repository or "-"),
        ("commit", source.commit or "-"),
        ("source", f"{counted(source.tensors, 'tensor')}, {human_bytes(source.bytes)}, in"
         f" {counted(len(source.shards), 'shard')}"),
        ("recipe", codecs),
        ("fitting", f"{manifest.fitting.method}, seed {manifest.fitting.seed}, kernels {manifest.fitting.kernel}"),
        ("fates of source tensors", f"packed {coverage.packed}, copied {coverage.copied}, dropped {coverage.dropped},"
         f" omitted {coverage.omitted}"),
        ("experts", f"{manifest.experts.count} records, {human_bytes(manifest.experts.bytes)}"),
        ("trunk", f"{counted(len(manifest.tensors), 'tensor')}, {human_bytes(manifest.trunk.bytes)}"),
        ("whole model", "yes" if manifest.partial is None else "no, a part of it"),
    )  # fmt: skip
    return Section("Provenance", (Table("The container, and where its weights came from.", ("", ""), rows),))
