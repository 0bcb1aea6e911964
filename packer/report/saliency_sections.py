"""Two sections of the page about a prune plan: how saliency is concentrated, and what is kept of it at which size."""

from __future__ import annotations

import numpy as np

from formats.spelling import counted
from packer.output import human_bytes
from packer.prune.job import Pruning
from packer.report import plots
from packer.report.page import Figure, Paragraph, Section, Table
from packer.report.plots import Axis, Line, Mark, from_zero
from packer.report.prune_figures import PERCENTS, PruneFigures, RecordSizes, best_of, table_keeps
from packer.report.spelling import percent, unit_of


def concentration_section(figures: PruneFigures, pruning: Pruning) -> Section:
    """What share of a layer's saliency its best experts hold."""
    counts = [best_of(share, figures.experts) for share in PERCENTS]
    held = figures.held[:, [count - 1 for count in counts]]
    middle = np.median(figures.held, axis=0)
    places = plots.sampled(figures.experts)
    percents = from_zero(100 * (places + 1) / figures.experts)
    lines = [
        Line("one layer" if not number else "", percents, from_zero(100 * curve[places]), plots.FAMILY)
        for number, curve in enumerate(figures.held)
    ]
    lines.append(Line("median of layers", percents, from_zero(100 * middle[places]), plots.FIRST))
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
    levels = [f"best {share}\u00a0%" for share in PERCENTS]
    heat = plots.heat_map("by-layer", 100 * held.T, levels, names, ("layer", "", "share of\nsaliency (%)"))
    columns = (
        *(f">best {share}\u00a0% ({count})" for share, count in zip(PERCENTS, counts, strict=True)),
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


def retention_section(figures: PruneFigures, pruning: Pruning, per_token: int) -> Section:
    """What share of saliency stays, against the bytes that the experts take.

    Args:
        figures, pruning: of the plan.
        per_token: experts that a token uses.
    """
    sizes = figures.sizes
    tiers = [("rvq", sizes.codes, plots.FIRST, plots.LOWEST_FIRST)] if sizes.codes is not None else []
    tiers.append(("MXFP4", sizes.source, plots.SECOND, plots.LOWEST_SECOND))
    layers = len(figures.layers)
    places = plots.sampled(figures.experts)
    mean, lowest = figures.held.mean(axis=0), figures.held.min(axis=0)
    unit, name = unit_of(figures.experts * layers * sizes.source)
    lines = []
    for tier, size, style, low_style in tiers:
        taken = from_zero((places + 1.0) * layers * size / unit)
        lines.append(Line(f"{tier}, mean of layers", taken, from_zero(100 * mean[places]), style))
        lines.append(Line(f"{tier}, lowest layer", taken, from_zero(100 * lowest[places]), low_style))
    lossless = sum(len(kept.lossless) for kept in pruning.kept.values())
    plan = (pruning.kept_experts - lossless) * sizes.usual + lossless * sizes.source
    drawn = plots.line_plot(
        "retention",
        lines,
        Axis(f"bytes of all experts ({name})", 0.0),
        Axis("share of saliency kept (%)", 0.0, 101.0),
        (Mark("this plan", plan / unit, 100 * pruning.retained),),
    )
    rows = [
        (
            str(keep),
            *map(percent, (keep / figures.experts, mean[keep - 1], lowest[keep - 1])),
            *(human_bytes(keep * layers * size) for _, size, _, _ in tiers),
        )
        for keep in table_keeps(figures, pruning.keep, per_token)
    ]
    columns = (">experts a layer", ">of its experts (%)", ">mean of layers (%)", ">lowest layer (%)")
    caption = "Share of saliency kept against the bytes of all experts, for each number of experts a layer."
    return Section(
        "Retention against size",
        (
            Paragraph(_sizes(sizes, human_bytes(plan), per_token)),
            Figure(drawn, caption, "Curves of saliency kept against bytes of experts"),
            Table(
                "Saliency kept, in percent, and bytes of all experts.",
                (*columns, *(f">{tier}" for tier, _, _, _ in tiers)),
                tuple(rows),
            ),
        ),
    )


def _sizes(sizes: RecordSizes, plan: str, per_token: int) -> str:
    """What the sizes assume."""
    record, tiers = f"a record takes {human_bytes(sizes.source)} as an MXFP4 source has it", ""
    if sizes.codes is None:
        record += "; experts are too small here for residual codes, which their codebooks would outweigh"
    else:
        record += (
            f", and {human_bytes(sizes.codes)} as residual codes (rvq, three stages of 256 entries, codebooks for each"
            " expert)"
        )
        tiers = ", lossless experts as MXFP4 and the others as rvq"
    return (
        "The curves keep the best experts, the same number in each layer. Sizes follow from the widths in the"
        f" statistics: {record}. The plan is drawn with its own numbers{tiers}: {plan}. Trunk and tables of a container"
        " come on top, and a recipe or a source that stores experts otherwise has other sizes; moepack plan SOURCE"
        f" --prune PLAN tells them to the byte. A token uses {counted(per_token, 'expert')}: fewer cannot stay."
    )
