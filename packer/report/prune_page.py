"""The page about a prune plan: what the kept experts hold, what they cost, and how sure their choice is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.spelling import counted
from packer.calibrate.coverage import coverage_of
from packer.output import human_bytes
from packer.prune.job import Pruning
from packer.report import plots
from packer.report.overlap import agreement_section, overlap_section
from packer.report.page import Figure, Page, Paragraph, Section, Table, write_page
from packer.report.plots import Axis, Line, Mark
from packer.report.prune_figures import PERCENTS, PruneFigures, best_of, prune_figures, table_keeps
from packer.report.spelling import percent, unit_of
from packer.statistics_file import Statistics

Double = NDArray[np.float64]

SHOWN_TEXTS = 40  # files of sample text in the table
_KEPT = Axis("share of saliency kept (%)", 0.0, 101.0)


def write_prune_page(path: Path, statistics: Statistics, pruning: Pruning) -> None:
    """Write the page.

    Args:
        path: of the page; nothing may have that name.
        statistics: that the plan was made from.
        pruning: the plan and what is known of it.

    Raises:
        UsageError: something has that name already, or its folder is not there.
        FormatError: the statistics contradict themselves, or changed.
        EnvironmentProblem: matplotlib is not there, or the page cannot be written.
    """
    plots.check_plots()
    write_page(path, prune_page(statistics, pruning))


def prune_page(statistics: Statistics, pruning: Pruning) -> Page:
    """The page; errors are those of :func:`write_prune_page`."""
    figures = prune_figures(statistics, pruning)
    names = [label.name for label in statistics.provenance.labels]
    return Page(
        f"Prune plan for {statistics.provenance.model.family}",
        (_summary(statistics, pruning, figures),),
        (
            _concentration(figures, pruning),
            _retention(figures, pruning, statistics.provenance.model.experts_per_token),
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
        ("lossless", str(lossless)),
        ("saliency that stays", f"{percent(pruning.retained)} %, averaged over layers"),
        ("in the layers", f"{percent(figures.retained.min())} % to {percent(figures.retained.max())} %"),
        ("split-half agreement", f"{percent(pruning.agreement)} % of the kept experts"),
    ]
    if made is not None:
        rows.append(("asked for", f"keep {made.keep}, mode {made.mode}"))
        rows.append(("text that counts", ", ".join(made.sources) or "all"))
    return Table("The plan.", ("", ""), tuple(rows))


def _concentration(figures: PruneFigures, pruning: Pruning) -> Section:
    counts = [best_of(share, figures.experts) for share in PERCENTS]
    held = figures.held[:, [count - 1 for count in counts]]
    middle = np.median(figures.held, axis=0)
    places = plots.sampled(figures.experts)
    percents = 100 * (places + 1) / figures.experts
    lines = [
        Line("one layer" if not number else "", percents, 100 * curve[places], plots.FAMILY)
        for number, curve in enumerate(figures.held)
    ]
    lines.append(Line("median of layers", percents, 100 * middle[places], plots.FIRST))
    lines.append(Line("all experts alike", percents, percents, plots.REFERENCE))
    kept = 100 * pruning.kept_experts / (figures.experts * len(figures.layers))
    curves = plots.line_plot(
        "concentration",
        lines,
        Axis("experts of a layer, the best first (%)", 0.0, 101.0),
        Axis("share of the layer's saliency (%)", 0.0, 101.0),
        (Mark("experts that stay", kept),),
    )
    names = [str(layer) for layer in figures.layers]
    levels = [f"best {share} %" for share in PERCENTS]
    heat = plots.heat_map("by-layer", 100 * held.T, levels, names, ("layer", "", "share of\nsaliency (%)"))
    columns = (
        *(f">best {share} % ({count})" for share, count in zip(PERCENTS, counts, strict=True)),
        ">experts that stay",
        ">their share",
    )
    rows = [
        (name, *map(percent, shares), str(count), percent(share))
        for name, shares, count, share in zip(names, held, figures.kept.tolist(), figures.retained, strict=True)
    ]
    spread = tuple(
        (
            word,
            *map(percent, function(held, axis=0)),
            f"{function(figures.kept):g}",
            percent(function(figures.retained)),
        )
        for word, function in (("lowest layer", np.min), ("median", np.median), ("highest layer", np.max))
    )
    text = (
        "An expert's saliency is the sum of gate weight times norm of its output over the tokens routed to it; here it"
        " is a share of its layer's, averaged over the texts that count. The more few experts hold, the less is lost"
        " when the others are dropped."
    )
    return Section(
        "Concentration of saliency",
        (
            Paragraph(text),
            Figure(
                curves,
                "Share of saliency that the best experts of each layer hold, layer by layer. The vertical line"
                " is at the share of experts that stay.",
                "Curves of saliency against experts, one a layer",
            ),
            Table(
                "Spread over layers, in percent of a layer's saliency; in brackets the number of experts.",
                ("", *columns),
                spread,
            ),
            Figure(
                heat,
                "The same by layer, for the best 1, 5, 10, 25 and 50 percent of the experts.",
                "Heat map of the share of saliency by layer",
            ),
            Table(
                "Share of each layer's saliency that its best experts hold, and that the experts that stay hold, in"
                " percent.",
                ("layer", *columns),
                tuple(rows),
            ),
        ),
    )


def _retention(figures: PruneFigures, pruning: Pruning, per_token: int) -> Section:
    counts = np.arange(1, figures.experts + 1) * len(figures.layers)
    mean, lowest = figures.held.mean(axis=0), figures.held.min(axis=0)
    places = plots.sampled(figures.experts)
    unit, name = unit_of(int(counts[-1]) * figures.sizes.source)
    lines = []
    for label, size, style, low_style in (
        ("rvq, mean of layers", figures.sizes.codes, plots.FIRST, plots.LOWEST_FIRST),
        ("MXFP4, mean of layers", figures.sizes.source, plots.SECOND, plots.LOWEST_SECOND),
    ):
        lines.append(Line(label, counts[places] * size / unit, 100 * mean[places], style))
        low = label.replace("mean of layers", "lowest layer")
        lines.append(Line(low, counts[places] * size / unit, 100 * lowest[places], low_style))
    lossless = sum(len(kept.lossless) for kept in pruning.kept.values())
    plan = (pruning.kept_experts - lossless) * figures.sizes.codes + lossless * figures.sizes.source
    curve = plots.line_plot(
        "retention",
        lines,
        Axis(f"bytes of all experts ({name})", 0.0),
        _KEPT,
        (Mark("this plan", plan / unit, 100 * pruning.retained),),
    )
    rows = []
    for keep in table_keeps(figures, pruning.keep, per_token):
        row = (str(keep), percent(keep / figures.experts), percent(mean[keep - 1]), percent(lowest[keep - 1]))
        total = keep * len(figures.layers)
        rows.append((*row, human_bytes(total * figures.sizes.codes), human_bytes(total * figures.sizes.source)))
    text = (
        "The curves keep the best experts, the same number in each layer. Sizes follow from the widths in the statistics:"
        f" a record takes {human_bytes(figures.sizes.codes)} as residual codes (rvq, three stages of 256 entries,"
        f" codebooks for each expert) and {human_bytes(figures.sizes.source)} as an MXFP4 source has it. The plan is drawn"
        f" with its own numbers, lossless experts as MXFP4 and the others as rvq: {human_bytes(plan)}. Trunk and tables of"
        " a container come on top, and a recipe or a source that stores experts otherwise has other sizes; moepack plan"
        f" SOURCE --prune PLAN tells them to the byte. A token uses {counted(per_token, 'expert')}: fewer cannot stay."
    )
    return Section(
        "Retention against size",
        (
            Paragraph(text),
            Figure(
                curve,
                "Share of saliency kept against the bytes of all experts, for each number of experts a layer.",
                "Curves of saliency kept against bytes of experts, for two codecs",
            ),
            Table(
                "Saliency kept, in percent, and bytes of all experts.",
                (
                    ">experts a layer",
                    ">of its experts (%)",
                    ">mean of layers (%)",
                    ">lowest layer (%)",
                    ">rvq",
                    ">MXFP4",
                ),
                tuple(rows),
            ),
        ),
    )


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
        ("all" if item.label is None else item.label, str(item.tokens), str(item.never), str(item.hardly))
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
