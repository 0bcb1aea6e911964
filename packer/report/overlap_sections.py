"""Two sections of the page about a prune plan: which experts two texts share, and how far two halves agree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from formats.spelling import counted
from packer.prune.job import Pruning
from packer.report import plots
from packer.report.page import Figure, Paragraph, Part, Section, Table
from packer.report.plots import Axis, Line, Mark
from packer.report.prune_figures import PruneFigures, table_keeps
from packer.report.spelling import percent

_SHARE = Axis("experts in common (%)", 0.0, 101.0)


def overlap_section(figures: PruneFigures, names: Sequence[str]) -> Section:
    """Of the experts that each source of text alone would keep: how many are those of another.

    Args:
        figures: of the plan.
        names: of all sources of text in the statistics.
    """
    title = "Overlap of sources"
    if len(names) < 2:
        return Section(title, (Paragraph("The statistics have one source of text: there is nothing to compare."),))
    text = (
        "Each source of text alone would keep its own best experts, as many of each layer as the plan keeps."
        f" Of these, two sources have the share below in common; {percent(figures.chance)} % would be by chance."
        " Where it is small, a plan made from one source drops what the other needs."
    )
    numbers = [str(number) for number in range(1, len(names) + 1)]
    numbered = [f"{number}  {name}" for number, name in zip(numbers, names, strict=True)]
    table = Table(
        "Experts in common, in percent of those that stay, over all layers.",
        ("source of text", *(f">{number}" for number in numbers)),
        tuple((name, *map(percent, shares)) for name, shares in zip(numbered, figures.overlap, strict=True)),
    )
    if figures.layer_overlap is None:
        others = np.where(np.eye(len(names), dtype=bool), np.nan, 100 * figures.overlap)
        labels = ("source of text", "", "in common (%)")
        pairs = [(float(figures.overlap[a, b]), names[a], names[b]) for a, b in combinations(range(len(names)), 2)]
        apart, alike = min(pairs), max(pairs)
        caption = (
            f"Experts in common, for every pair. Least alike are {apart[1]} and {apart[2]} ({percent(apart[0])} %),"
            f" most alike {alike[1]} and {alike[2]} ({percent(alike[0])} %)."
        )
        drawn = plots.heat_map("overlap", others, numbered, numbers, labels)
        alternative = "Heat map of experts in common by pair of sources"
        return Section(title, (Paragraph(text), Figure(drawn, caption, alternative), table))
    return Section(title, (Paragraph(text), table, *_by_layer(figures, names)))


def _by_layer(figures: PruneFigures, names: Sequence[str]) -> tuple[Part, Part]:
    assert figures.layer_overlap is not None
    layers = np.array(figures.layers, np.float64)
    chance = figures.kept / figures.experts
    drawn = plots.line_plot(
        "overlap",
        [
            Line("in common", layers, 100 * figures.layer_overlap, plots.FIRST),
            Line("by chance", layers, 100 * chance, plots.REFERENCE),
        ],
        Axis("layer", whole=True),
        _SHARE,
        height=2.7,
    )
    rows = tuple(
        (str(layer), str(kept), str(round(share * kept)), percent(share), percent(random))
        for layer, kept, share, random in zip(
            figures.layers, figures.kept.tolist(), figures.layer_overlap, chance, strict=True
        )
    )
    columns = (">experts that stay", ">in common", ">in common (%)", ">by chance (%)")
    return (
        Figure(
            drawn,
            f"Experts that {names[0]} and {names[1]} have in common, layer by layer.",
            "Curve of experts in common by layer",
        ),
        Table("The same by layer.", ("layer", *columns), rows),
    )


def agreement_section(figures: PruneFigures, pruning: Pruning, per_token: int) -> Section:
    """How many experts both halves of the text would keep, for every number of experts a layer."""
    title = "Split-half agreement"
    if figures.agreement is None:
        text = "In some layer a half of the text that counts has no saliency, as with a single window: nothing can be"
        return Section(title, (Paragraph(f"{text} said of how sure the ranking is."),))
    places = plots.sampled(figures.experts)
    keeps = np.arange(1.0, figures.experts + 1)
    mean, lowest, chance = figures.agreement.mean(axis=0), figures.agreement.min(axis=0), keeps / figures.experts
    drawn = plots.line_plot(
        "halves",
        [
            Line("mean of layers", keeps[places], 100 * mean[places], plots.FIRST),
            Line("lowest layer", keeps[places], 100 * lowest[places], plots.LOWEST_FIRST),
            Line("by chance", keeps[places], 100 * chance[places], plots.REFERENCE),
        ],
        Axis("experts kept a layer", 0.0, 1.01 * figures.experts, whole=True),
        _SHARE,
        (Mark("this plan", pruning.keep),),
    )
    rows = tuple(
        (str(keep), *map(percent, (mean[keep - 1], lowest[keep - 1], chance[keep - 1])))
        for keep in table_keeps(figures, pruning.keep, per_token)
    )
    text = (
        "Even and odd windows of the text that counts each rank the experts on their own. Where both halves choose the"
        " same experts, more text of the same kind would hardly change the plan; where they agree no better than by"
        " chance, the ranking says nothing. The curves keep the same number in each layer; in the plan's own way"
        f" {percent(pruning.agreement)} % of its {counted(pruning.kept_experts, 'expert')} are the choice of both."
    )
    return Section(
        title,
        (
            Paragraph(text),
            Figure(
                drawn,
                "Share of the kept experts that both halves of the text would keep.",
                "Curves of agreement against the number of experts kept",
            ),
            Table(
                "Experts in common, in percent of those kept.",
                (">experts a layer", ">mean of layers", ">lowest layer", ">by chance"),
                rows,
            ),
        ),
    )
