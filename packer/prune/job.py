"""From statistics to a prune plan, and what can be said of it before anything is packed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import UsageError
from formats.spelling import counted
from packer.model_stamp import ModelStamp
from packer.prune.plan import LayerKeep, PrunePlan
from packer.prune.ranking import GLOBAL_FLOOR, Kept, Wish, agreement, choose, kept_share, retained, shares
from packer.recipe.pruned import Made
from packer.statistics.file import Statistics
from packer.version import VERSION

Double = NDArray[np.float64]

_KEEP = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(%?)")


@dataclass(frozen=True)
class Pruning:
    """A plan and what is known of it.

    Attributes:
        plan: as it will be written.
        keep: experts a layer, on the average.
        experts: of a layer in the source.
        retained: share of the saliency that stays, averaged over layers.
        agreement: share of the kept experts that both halves of the text would keep.
        fixed: what to say where mode ``global`` had nothing to choose between layers, or None.
        scores: by layer, each expert's share of its layer's saliency.
        kept: by layer.
    """

    plan: PrunePlan
    keep: int
    experts: int
    retained: float
    agreement: float
    fixed: str | None
    scores: Mapping[int, Double]
    kept: Mapping[int, Kept]

    @property
    def kept_experts(self) -> int:
        """In all layers."""
        return sum(len(layer.experts) for layer in self.kept.values())

    @property
    def lossless_experts(self) -> int:
        """Of these, in all layers."""
        return sum(len(layer.lossless) for layer in self.kept.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "mode": self.plan.made.mode if self.plan.made else None,
            "experts_per_layer": self.experts,
            "kept_experts": self.kept_experts,
            "lossless_experts": self.lossless_experts,
            "layers": {
                str(layer): {"kept": len(kept.experts), "retained": kept_share(self.scores[layer], kept)}
                for layer, kept in self.kept.items()
            },
            "retained_saliency": self.retained,
            "split_half_agreement": self.agreement,
        }


def parse_keep(text: str, of: int, *, where: str) -> int:
    """A number of experts, or a percentage of ``of`` rounded to the nearest number.

    Raises:
        UsageError: neither.

    >>> parse_keep("27%", 896, where="--keep"), parse_keep("242", 896, where="--keep")
    (242, 242)
    """
    match = _KEEP.fullmatch(text.strip())
    value = None if match is None else Decimal(match[1])
    if match is None or value is None or (not match[2] and value != int(value)):
        raise UsageError("not a number of experts", where=where, expected="242 or 27%", found=repr(text)[:40])
    if not match[2]:
        return int(value)
    number = round(value * of / 100)
    return max(number, of + 1) if value > 100 else number  # more than all is not rounded down to all


def _found(text: str, number: int, of: int) -> str:
    """A number of experts as it was typed, and for a share what it comes to."""
    typed = text.strip()
    return f"{typed!r} ({number} of {of})" if typed.endswith("%") else typed


def prune(statistics: Statistics, *, keep: str, mode: str, lossless: str, sources: Sequence[str]) -> Pruning:
    """Choose the experts that stay.

    Args:
        keep: how many a layer, as it was typed.
        mode: ``uniform``, ``global`` or ``graded``.
        lossless: how many of the kept ones stay lossless in mode ``graded``, as it was typed.
        sources: labels of the text that counts; none for all.

    Raises:
        UsageError: an unknown label, a number out of range, or fewer experts than a token uses.
        FormatError: the statistics contradict themselves.
    """
    model = statistics.provenance.model
    chosen = _labels(statistics, sources)
    number = parse_keep(keep, model.experts, where="--keep")
    wish = Wish(
        mode=mode,
        keep=number,
        lossless=parse_keep(lossless, number, where="--lossless"),
        per_token=model.experts_per_token,
    )
    if wish.mode == "graded" and wish.lossless > wish.keep:
        raise UsageError(
            "more experts lossless than stay",
            where="--lossless",
            expected=f"at most {wish.keep}",
            found=_found(lossless, wish.lossless, wish.keep),
        )
    scores: dict[int, Double] = {}
    halves: tuple[dict[int, Double], dict[int, Double]] = ({}, {})
    for layer in statistics.layers:  # one layer's sums are held at a time: all of Kimi K3's are 2.2 GB
        found = statistics.layer(layer)
        scores[layer] = shares(found.saliency, chosen)
        for half, halved in enumerate(halves):
            halved[layer] = shares(found.halves[half], chosen)
    most = min(len(score) for score in scores.values())
    if not wish.per_token <= wish.keep <= most:
        raise UsageError(
            "cannot keep that number of experts a layer",
            where="--keep",
            expected=f"{wish.per_token} (experts a token) to {most}",
            found=_found(keep, number, model.experts),
        )
    kept = choose(scores, wish)
    stamp = ModelStamp(**{name: getattr(model, name) for name in ModelStamp.__struct_fields__})
    made = Made(
        by=f"moepack {VERSION}",
        mode=mode,
        keep=keep,
        sources=tuple(sources),
        statistics_blake3=statistics.blake3,
        retained_saliency=retained(scores, kept),
    )
    entries = tuple(
        LayerKeep(layer, tuple(sorted(set(found.experts) - set(found.lossless))), found.lossless)
        for layer, found in sorted(kept.items())
    )
    return Pruning(
        PrunePlan(stamp, made, entries),
        wish.keep,
        model.experts,
        retained(scores, kept),
        agreement(halves, wish),
        _fixed(wish, model.experts),
        scores,
        kept,
    )


def _fixed(wish: Wish, experts: int) -> str | None:
    """Why every layer keeps as many as any other in mode ``global``, and what would change that; None if it need not.

    Together the layers keep ``wish.keep`` each: where that is the floor, nothing is left to be given to better ones.
    """
    if wish.mode != "global" or wish.keep > wish.floor:
        return None
    limit = GLOBAL_FLOOR * wish.per_token
    change = f"from --keep {limit + 1} on layers can differ"
    if limit + 1 >= experts:  # and all of them would stay
        change = f"with {counted(experts, 'expert')} a layer no --keep changes that"
    return (
        f"mode global comes to the same as uniform: each layer keeps its floor of {wish.floor}"
        f" (--keep, or {GLOBAL_FLOOR} times the {wish.per_token} of a token if that is less); {change}"
    )


def _labels(statistics: Statistics, sources: Sequence[str]) -> list[int]:
    names = [label.name for label in statistics.provenance.labels]
    unknown = [source for source in sources if source not in names]
    if unknown:
        raise UsageError("no text with this label", where="--sources", expected=", ".join(names), found=unknown[0])
    return [names.index(source) for source in dict.fromkeys(sources)] or list(range(len(names)))
