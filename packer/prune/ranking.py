"""Which experts of each layer stay: by their saliency, or by any other sum an expert, for comparison.

An expert's score is its share of its layer's sum, averaged over the chosen sources of text, so that neither the length
of a source nor the scale of a layer's outputs counts. Saliency is the sum of gate weight times norm of the output:
router-weighted expert activation pruning (REAP, arXiv:2510.13999, which divides by the tokens routed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Double = NDArray[np.float64]
Whole = NDArray[np.int64]

MODES = ("uniform", "global", "graded")
GLOBAL_FLOOR = 4  # times the experts of a token: what every layer keeps at least in mode global


@dataclass(frozen=True)
class Wish:
    """How much is to stay.

    Attributes:
        mode: one of ``MODES``.
        keep: experts a layer, on the average in mode ``global``.
        lossless: of these, how many a layer stay lossless in mode ``graded``.
        per_token: experts that a token uses: fewer cannot stay.
    """

    mode: str
    keep: int
    lossless: int
    per_token: int

    @property
    def floor(self) -> int:
        """What every layer keeps at least in mode ``global``, if it has so many."""
        return min(self.keep, GLOBAL_FLOOR * self.per_token)


@dataclass(frozen=True)
class Kept:
    """Experts of one layer that stay, in ascending order, and which of them stay lossless."""

    experts: tuple[int, ...]
    lossless: tuple[int, ...]


def shares(sums: Double, sources: Sequence[int]) -> Double:
    """Score of each expert of a layer: float64 [experts] that add up to 1, of sums float64 [labels, experts].

    A source that no expert of the layer was routed for counts for nothing; without any all experts are alike.
    """
    chosen = sums[list(sources)].astype(np.float64)
    totals = chosen.sum(axis=1, keepdims=True)
    seen = totals[:, 0] > 0
    if not seen.any():
        return np.full(sums.shape[1], 1.0 / sums.shape[1])
    score: Double = (chosen[seen] / totals[seen]).mean(axis=0)
    return score


def choose(scores: Mapping[int, Double], wish: Wish) -> dict[int, Kept]:
    """The experts that stay, for every layer that has so many; the lower number wins among equals."""
    ranked = {layer: np.argsort(-score, kind="stable") for layer, score in scores.items()}
    counts = _global_counts(scores, wish) if wish.mode == "global" else dict.fromkeys(scores, wish.keep)
    lossless = min(wish.lossless, wish.keep) if wish.mode == "graded" else 0
    return {
        layer: Kept(_sorted(order[: counts[layer]]), _sorted(order[: min(lossless, counts[layer])]))
        for layer, order in ranked.items()
    }


def _global_counts(scores: Mapping[int, Double], wish: Wish) -> dict[int, int]:
    """How many stay in each layer if all are ranked together, with a floor."""
    floor = {layer: min(len(score), wish.floor) for layer, score in scores.items()}
    rest = wish.keep * len(scores) - sum(floor.values())
    candidates = []
    for layer, score in scores.items():
        order = np.argsort(-score, kind="stable")[floor[layer] :]
        candidates += [(-float(score[expert]), layer, int(expert)) for expert in order]
    counts = dict(floor)
    for _, layer, _ in sorted(candidates)[:rest]:
        counts[layer] += 1
    return counts


def retained(scores: Mapping[int, Double], kept: Mapping[int, Kept]) -> float:
    """The share of all saliency that stays, averaged over layers."""
    return float(np.mean([kept_share(scores[layer], kept[layer]) for layer in scores]))


def kept_share(score: Double, kept: Kept) -> float:
    """The share of a layer that stays; not above 1, as sums of shares may be by a rounding."""
    return min(1.0, float(score[list(kept.experts)].sum()))


def agreement(halves: Sequence[Mapping[int, Double]], wish: Wish) -> float:
    """The share of kept experts that both halves of the text would keep: 1 for a ranking that is sure of itself."""
    first, second = (choose(half, wish) for half in halves)
    common = sum(len(set(first[layer].experts) & set(second[layer].experts)) for layer in first)
    return common / sum(len(kept.experts) for kept in first.values())


def _sorted(order: Whole) -> tuple[int, ...]:
    return tuple(sorted(int(expert) for expert in order))
