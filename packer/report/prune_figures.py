"""What a page about a prune plan tells, as numbers: one pass over the statistics, a layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats import codecs
from formats.codecs import mxfp4, rvq
from formats.layout import Codec
from packer.prune.job import Pruning
from packer.prune.ranking import shares
from packer.statistics.file import Statistics

Double = NDArray[np.float64]
Whole = NDArray[np.int64]

PERCENTS = (1, 5, 10, 25, 50)  # of a layer's experts, the best ones
_CODES = rvq.Parameters()  # three stages of 256 entries, codebooks for each expert: as the bundled recipes have it
_TABLE_PERCENTS = (*PERCENTS, 75, 90, 100)


@dataclass(frozen=True)
class RecordSizes:
    """Bytes of one expert's record.

    Attributes:
        codes: as residual codes of three stages, the bundled recipes' way; None for experts that are too small for it.
        source: as an MXFP4 source has it.
    """

    codes: int | None
    source: int

    @property
    def usual(self) -> int:
        """What experts take that are not to be lossless."""
        return self.source if self.codes is None else self.codes


@dataclass(frozen=True)
class PruneFigures:
    """What the statistics say about a plan.

    Attributes:
        layers: with experts, ascending.
        experts: of each layer in the source.
        held: float64 [layers, experts]: the share of the layer's saliency that its best 1, 2, ... experts have.
        kept: int64 [layers]: experts that the plan keeps.
        retained: float64 [layers]: the share of the layer's saliency that these have.
        agreement: float64 [layers, experts]: of the best 1, 2, ... experts by one half of the text, the share that is
            among as many by the other half; None if a half has no saliency.
        overlap: float64 [labels, labels]: of the experts that each label would keep, as many a layer as the plan keeps,
            the share in common, over all layers.
        layer_overlap: float64 [layers]: the same of two labels layer by layer; None for any other number of labels.
        chance: the overlap of random choices, over all layers.
        sizes: of records.
    """

    layers: tuple[int, ...]
    experts: int
    held: Double
    kept: Whole
    retained: Double
    agreement: Double | None
    overlap: Double
    layer_overlap: Double | None
    chance: float
    sizes: RecordSizes


def prune_figures(statistics: Statistics, pruning: Pruning) -> PruneFigures:
    """Work the figures out.

    Args:
        statistics: that the plan was made from. Each layer is read once and let go.
        pruning: the plan.

    Raises:
        FormatError: the sums of a layer contradict each other, or the file changed.
    """
    labels = [label.name for label in statistics.provenance.labels]
    made = pruning.plan.made
    chosen = [labels.index(name) for name in (() if made is None else made.sources)] or list(range(len(labels)))
    layers = statistics.layers
    held = np.empty((len(layers), pruning.experts))
    agreement: Double | None = np.empty_like(held)
    common = np.zeros((len(layers), len(labels), len(labels)), np.int32)
    for place, layer in enumerate(layers):
        found = statistics.layer(layer)
        held[place] = held_by_best(pruning.scores[layer])
        halves = [found.halves[half][chosen] for half in (0, 1)]
        if agreement is not None and all(half.any() for half in halves):
            first, second = (shares(half, range(len(chosen))) for half in halves)
            agreement[place] = agreements(first, second)
        else:
            agreement = None
        alone = [shares(found.saliency, [label]) for label in range(len(labels))]
        common[place] = in_common(alone, len(pruning.kept[layer].experts))
    kept = np.array([len(pruning.kept[layer].experts) for layer in layers], np.int64)
    return PruneFigures(
        layers,
        pruning.experts,
        held,
        kept,
        np.array([pruning.scores[layer][list(pruning.kept[layer].experts)].sum() for layer in layers]),
        agreement,
        common.sum(axis=0, dtype=np.int64) / kept.sum(),
        common[:, 0, 1] / kept if len(labels) == 2 else None,
        float((kept**2).sum() / (pruning.experts * kept.sum())),
        record_sizes(statistics.inputs, statistics.width),
    )


def held_by_best(score: Double) -> Double:
    """The share that the best 1, 2, ... experts have: float64 [experts], ascending to 1, of shares that add up to 1.

    >>> held_by_best(np.array([0.125, 0.625, 0.25])).tolist()
    [0.625, 0.875, 1.0]
    """
    return np.minimum(np.cumsum(-np.sort(-score)), 1.0)


def agreements(first: Double, second: Double) -> Double:
    """Of the best 1, 2, ... experts by one score the share that is among as many by the other: float64 [experts].

    An expert is among the best k of both if the worse of its two ranks is below k.
    """
    ranks = np.maximum(_ranks(first), _ranks(second))
    return np.cumsum(np.bincount(ranks, minlength=len(ranks))) / np.arange(1, len(ranks) + 1)


def in_common(scores: Sequence[Double], keep: int) -> Whole:
    """How many of the best ``keep`` experts every two scores share: int64 [scores, scores]."""
    best = np.array([_ranks(score) < keep for score in scores]).astype(np.int64)
    return best @ best.T


def _ranks(score: Double) -> Whole:
    """0 for the best expert; the lower number wins among equals, as when a plan is made."""
    ranks = np.empty(len(score), np.int64)
    ranks[np.argsort(-score, kind="stable")] = np.arange(len(score))
    return ranks


def best_of(percent: int, experts: int) -> int:
    """How many experts a percentage of them is, rounded up."""
    return -(-percent * experts // 100)


def table_keeps(figures: PruneFigures, keep: int, per_token: int) -> tuple[int, ...]:
    """Numbers of experts to keep that a table shows: what a token uses, some percentages, and the plan's own."""
    wanted = {best_of(percent, figures.experts) for percent in _TABLE_PERCENTS}
    return tuple(sorted(wanted | {keep, per_token}))


def record_sizes(inputs: int, width: int) -> RecordSizes:
    """Sizes of the records of an expert with ``inputs`` columns in gate and up, and ``width`` in down.

    Recipes give residual codes up where codebooks are larger than the indices that they serve.
    """
    shapes = ((width, inputs), (width, inputs), (inputs, width))
    vectors = sum(rows * rvq.vectors_per_row(cols) for rows, cols in shapes)
    small = vectors < _CODES.entries or rvq.codebook_bytes(_CODES) > vectors * _CODES.stages
    return RecordSizes(
        None if small else codecs.record_bytes(Codec.RVQ, _CODES, shapes),
        codecs.record_bytes(Codec.MXFP4, mxfp4.Parameters(), shapes),
    )
