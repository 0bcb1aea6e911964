"""The page about a verification: what was found, and the errors of the container by layer, matrix and role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from formats.container import Container, open_container
from formats.errors import FormatError
from formats.manifest import Manifest
from formats.spelling import counted
from packer.output import human_bytes, human_number
from packer.report import plots
from packer.report.error_sections import expert_sections, trunk_section
from packer.report.page import Figure, Page, Paragraph, Section, Table, write_page
from packer.report.spelling import figure, percent
from packer.report.verify_figures import layer_errors
from packer.verify.report import VerifyReport
from packer.verify.text import fates

if TYPE_CHECKING:
    from packer.verify.logits_parity import LogitsParity

SHOWN_PROBLEMS = 1000
SHOWN_CHARACTERS = 400  # of a text in the recipe


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
    verdict = "ok" if report.ok else f"failed, {counted(len(report.problems), 'problem')}"
    return Page(
        f"Verification of a container of {manifest.architecture.family}: {verdict}",
        (_summary(report), Paragraph(_standing(report))),
        (
            _problems(report),
            *((_logits(report.logits),) if report.logits is not None else ()),
            *expert_sections(layer_errors(container), manifest),
            trunk_section(manifest),
            _provenance(manifest, report),
        ),
    )


def _summary(report: VerifyReport) -> Table:
    rows = [
        ("result", "ok" if report.ok else f"failed: {counted(len(report.problems), 'problem')}"),
        ("container", report.container_id),
        ("level", report.level),
        (
            "looked at",
            f"{counted(report.records_checked, 'expert record')}, {counted(report.tensors_checked, 'trunk tensor')}",
        ),
    ]
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
        rows.append(("source", fates(parity)))
    return Table("The verification.", ("", ""), tuple(rows))


def _standing(report: VerifyReport) -> str:
    """What the errors on the page are worth at the level that was reached."""
    meaning = "The relative error of a matrix or tensor is ||stored - source|| / ||source||, by Frobenius norms. "
    if report.parity is None:
        return (
            f"{meaning}Errors below are those that the packer recorded in the container; at level {report.level} none"
            " was measured: level parity does that, and needs the source."
        )
    checked = "each was measured again"
    if report.left_out is not None and report.left_out.records:
        measured = counted(report.records_checked, "expert record")
        checked = (
            f"those of the trunk and of {measured}, not of the other {report.left_out.records}, were measured again"
        )
    return (
        f"{meaning}Errors below are those that the container records; {checked} against the source, by a decoder of its"
        " own, and a recorded error that differs from the measured one is a problem."
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
        (
            "KL divergence from the source (nats)",
            f"mean {human_number(found.kl_mean, 4)}, largest"
            f" {human_number(found.kl_max, 4)} at position {found.kl_max_position}",
        ),
        ("the same likeliest token", f"{percent(found.top1)} % of the positions"),
        ("of the five likeliest in common", f"{percent(found.top5)} %"),
        ("largest difference between logits", human_number(found.largest, 4)),
    ]
    if found.source.tokens:
        before, after = (human_number(loss.perplexity, 6) for loss in (found.source, found.container))
        rows.append(("perplexity", f"source {before}, container {after}, of {counted(found.source.tokens, 'token')}"))
    layers = [(str(item.layer), figure(item.largest), figure(item.relative)) for item in found.layers]
    numbers = np.array([item.layer for item in found.layers], np.float64)
    relative = np.array([np.nan if item.relative is None else item.relative for item in found.layers])
    drawn = plots.line_plot(
        "logits",
        [plots.Line("relative error", numbers, relative, plots.FIRST)],
        plots.Axis("layer", whole=True),
        plots.Axis("relative error of its output", 0.0),
        height=2.5,
    )
    return Section(
        "Logits of both models",
        (
            Table("Source and container on the same tokens.", ("", ""), tuple(rows)),
            Figure(
                drawn,
                "How far what a layer hands on is from the source's, over all positions.",
                "Curve of the relative error of layer outputs by layer",
            ),
            Table(
                "Differences of what each layer hands on.",
                ("layer", ">largest difference", ">relative error"),
                tuple(layers),
            ),
        ),
    )


def _provenance(manifest: Manifest, report: VerifyReport) -> Section:
    source, coverage, model = manifest.source, manifest.coverage, manifest.architecture
    rows = (
        ("container", report.container_id),
        ("made by", f"{manifest.tool.name} {manifest.tool.version}"),
        ("format", f"version {manifest.format_version}, revision {manifest.format_revision}"),
        (
            "model",
            f"{model.family} ({model.name}), {counted(model.hidden_layers, 'layer')}, {model.experts} experts, of"
            f" which a token uses {model.experts_per_token}",
        ),
        ("repository", source.repository or "-"),
        ("commit", source.commit or "-"),
        (
            "source",
            f"{counted(source.tensors, 'tensor')}, {human_bytes(source.bytes)}, in"
            f" {counted(len(source.shards), 'shard')}",
        ),
        ("recipe", f"{_word(manifest.recipe, 'name')}: {_word(manifest.recipe, 'summary')}"),
        ("fitting", f"{manifest.fitting.method}, seed {manifest.fitting.seed}, kernels {manifest.fitting.kernel}"),
        (
            "fates of source tensors",
            f"packed {coverage.packed}, copied {coverage.copied}, dropped {coverage.dropped},"
            f" omitted {coverage.omitted}",
        ),
        ("experts", f"{manifest.experts.count} records, {human_bytes(manifest.experts.bytes)}"),
        ("trunk", f"{counted(len(manifest.tensors), 'tensor')}, {human_bytes(manifest.trunk.bytes)}"),
        ("whole model", "yes" if manifest.partial is None else "no, a part of it"),
    )
    return Section("Provenance", (Table("The container, and where its weights came from.", ("", ""), rows),))


def _word(table: dict[str, Any], key: str) -> str:
    """A member of the recipe, whatever it is: that it can be read as one is checked elsewhere."""
    return str(table.get(key) or "-")[:SHOWN_CHARACTERS]
