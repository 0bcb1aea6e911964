"""The page about a prune plan: what the kept experts hold, what they cost, and how sure their choice is."""

from __future__ import annotations

from formats.spelling import counted
from packer.calibrate.coverage import coverage_of
from packer.prune.job import Pruning
from packer.report import plots
from packer.report.overlap_sections import agreement_section, overlap_section
from packer.report.page import Page, Section, Table
from packer.report.prune_figures import PruneFigures, prune_figures
from packer.report.saliency_sections import concentration_section, retention_section
from packer.report.spelling import percent
from packer.statistics.file import Statistics

SHOWN_TEXTS = 40  # files of sample text in the table


def prune_page(statistics: Statistics, pruning: Pruning) -> Page:
    """The page.

    Args:
        statistics: that the plan was made from.
        pruning: the plan and what is known of it.

    Raises:
        FormatError: the statistics contradict themselves, or changed.
        EnvironmentProblem: matplotlib is not there.
    """
    plots.check_plots()
    figures = prune_figures(statistics, pruning)
    names = [label.name for label in statistics.provenance.labels]
    return Page(
        f"Prune plan for {statistics.provenance.model.family}",
        (_summary(statistics, pruning, figures),),
        (
            concentration_section(figures, pruning),
            retention_section(figures, pruning, statistics.provenance.model.experts_per_token),
            overlap_section(figures, names),
            agreement_section(figures, pruning, statistics.provenance.model.experts_per_token),
            _provenance(statistics),
        ),
    )


def _summary(statistics: Statistics, pruning: Pruning, figures: PruneFigures) -> Table:
    made = pruning.plan.made
    least, most = int(figures.kept.min()), int(figures.kept.max())
    spread = str(least) if least == most else f"{least} to {most}"
    layers = counted(len(figures.layers), "layer")
    lossless = sum(len(kept.lossless) for kept in pruning.kept.values())
    rows = [
        ("experts that stay", f"{pruning.kept_experts} of {figures.experts * len(figures.layers)}, in {layers}"),
        ("a layer", f"{spread} of {figures.experts}"),
        *([("of them lossless", str(lossless))] if lossless else []),
        ("saliency that stays", f"{percent(pruning.retained)} %, averaged over layers"),
        ("in the layers", f"{percent(figures.retained.min())} % to {percent(figures.retained.max())} %"),
        ("split-half agreement", f"{percent(pruning.agreement)} % of the kept experts"),
    ]
    if made is not None:
        rows.append(("asked for", f"keep {made.keep}, mode {made.mode}"))
        rows.append(("text that counts", ", ".join(made.sources) or "all"))
    return Table("The plan.", ("", ""), tuple(rows))


def _provenance(statistics: Statistics) -> Section:
    found = statistics.provenance
    model = found.model
    rows = [
        ("statistics, BLAKE3", statistics.blake3),
        ("made by", found.tool),
        (
            "model",
            f"{model.family}, {counted(model.hidden_layers, 'layer')}, {model.experts} experts, of which a token"
            f" uses {model.experts_per_token}",
        ),
        ("source", model.source),
        ("config.json, BLAKE3", model.config_blake3),
        ("tokens", f"{found.tokens}, in windows of {found.window}"),
    ]
    labels = [
        ("all texts" if item.label is None else item.label, str(item.tokens), str(item.never), str(item.hardly))
        for item in coverage_of(statistics)
    ]
    texts = [(label.name, text.name, str(text.bytes), text.blake3) for label in found.labels for text in label.texts]
    more = f" {len(texts) - SHOWN_TEXTS} more are not listed." if len(texts) > SHOWN_TEXTS else ""
    parts = [
        Table("What the statistics are of.", ("", ""), tuple(rows)),
        Table(
            f"Sources of text, and how many of all {len(statistics.layers) * model.experts} experts they did not"
            " reach: what a text lacks is what will be lost.",
            ("label", ">tokens", ">experts never routed", ">hardly (1-15 tokens)"),
            tuple(labels),
        ),
    ]
    if texts:
        columns = ("label", "file", ">bytes", "BLAKE3")
        parts.append(Table(f"Files of text.{more}", columns, tuple(texts[:SHOWN_TEXTS])))
    return Section("Provenance", tuple(parts))
