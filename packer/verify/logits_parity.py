"""How far a container's model is from its source's: both run over the same tokens, chunk by chunk in step.

Of logits and layers only those of one chunk are held. The differences are measured in float64:

* KL divergence of a position: sum over tokens of p (log p - log q), p the source's probabilities, q the container's.
* Top-1 agreement: the share of positions where both find the same token likeliest. Top-5 agreement: the mean share of
  the source's five likeliest tokens that are among the container's five.
* Of a layer: the largest difference between what it hands on in both models, and ||difference||_F / ||source||_F over
  all positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packer.progress import Progress
from packer.running.logits import EvaluatedModel, Report, Single
from runtime.models.observer import Observer
from runtime.perplexity import Loss, loss_of
from runtime.sampling import log_probabilities, top

TOP = 5


@dataclass(frozen=True)
class LayerDifference:
    """One layer: the largest absolute difference, and the relative one as a whole; None for a source of zeros."""

    layer: int
    largest: float
    relative: float | None


@dataclass(frozen=True)
class LogitsParity:
    """What the comparison measured.

    Attributes:
        positions: compared.
        kl_mean, kl_max: of the positions, in nats.
        kl_max_position: where the largest is, counted over all texts.
        top1, top5: agreement, 0 to 1.
        largest: difference between two logits.
        layers: one entry a layer.
        source, container: losses on the same tokens.
    """

    positions: int
    kl_mean: float
    kl_max: float
    kl_max_position: int
    top1: float
    top5: float
    largest: float
    layers: tuple[LayerDifference, ...]
    source: Loss
    container: Loss

    def to_dict(self) -> dict[str, Any]:
        """The object ``logits`` in JSON."""
        return {
            "positions": self.positions,
            "kl_divergence": {"mean": self.kl_mean, "max": self.kl_max, "max_position": self.kl_max_position},
            "top1_agreement": self.top1,
            "top5_agreement": self.top5,
            "max_difference": self.largest,
            "layers": [
                {"layer": item.layer, "max_difference": item.largest, "rel_error": item.relative}
                for item in self.layers
            ],
            "perplexity": {"source": self.source.perplexity, "container": self.container.perplexity},
            "loss": {"source": self.source.mean, "container": self.container.mean},
            "predicted_tokens": self.source.tokens,
        }


def compare_models(
    source: EvaluatedModel,
    container: EvaluatedModel,
    texts: Sequence[Sequence[int]],
    progress: Report | None = None,
) -> LogitsParity:
    """Run both models over texts, each with a fresh state, and compare them.

    Args:
        source: an open session; its chunks must be as long as the other's.
        container: another one.
        texts: ids, at least one text and one id in each.
        progress: told how many tokens are done.
    """
    tally, layers = _Tally(), _Layers(source.config.hidden_layers)
    total, row = sum(map(len, texts)), 0
    for number, ids in enumerate(texts):
        if number:
            source.reset()
            container.reset()
        ours = container.stream(ids, observer=_Second(layers))
        for first, theirs in source.stream(ids, observer=_First(layers)):
            at, logits = next(ours)  # after the source's chunk: its layers are held until these have passed
            if at != first or logits.shape != theirs.shape:
                raise ValueError(f"chunks of {theirs.shape} at {first} and {logits.shape} at {at}")
            tally.add(theirs, logits, row + first)
            tally.source += loss_of(theirs, first, ids)
            tally.container += loss_of(logits, first, ids)
            if progress is not None:
                progress(Progress(row + first + len(theirs), total, "tokens"))
        row += len(ids)
    return tally.result(layers.differences())


@dataclass
class _Tally:
    """Sums over positions."""

    positions: int = 0
    kl: float = 0.0
    kl_max: float = -math.inf
    kl_max_position: int = 0
    top1: int = 0
    top5: float = 0.0
    largest: float = 0.0
    source: Loss = field(default_factory=Loss)
    container: Loss = field(default_factory=Loss)

    def add(self, theirs: Single, ours: Single, first: int) -> None:
        for place, (mine, other) in enumerate(zip(theirs, ours, strict=True)):
            kl = divergence(mine, other)
            self.kl += kl
            if kl > self.kl_max:
                self.kl_max, self.kl_max_position = kl, first + place
            best, found = ([token for token, _ in top(row, TOP)] for row in (mine, other))
            self.top1 += best[0] == found[0]
            self.top5 += len(set(best) & set(found)) / len(best)
            self.largest = max(self.largest, float(np.abs(mine.astype(np.float64) - other).max()))
        self.positions += len(theirs)

    def result(self, layers: tuple[LayerDifference, ...]) -> LogitsParity:
        count = self.positions
        return LogitsParity(
            count,
            self.kl / count,
            self.kl_max,
            self.kl_max_position,
            self.top1 / count,
            self.top5 / count,
            self.largest,
            layers,
            self.source,
            self.container,
        )


def divergence(source: Single, container: Single) -> float:
    """KL divergence in nats between the softmaxes of two positions' logits; at least 0, but for rounding."""
    log_p, log_q = log_probabilities(source), log_probabilities(container)
    return max(0.0, float(np.exp(log_p) @ (log_p - log_q)))


class _Layers:
    """What the source's layers handed on in the present chunk, and sums of the differences to the container's."""

    def __init__(self, count: int) -> None:
        self.held: dict[int, Single] = {}
        self._largest = [0.0] * count
        self._squares = [0.0] * count  # of the differences
        self._norms = [0.0] * count  # of the source's values

    def compare(self, layer: int, values: Single) -> None:
        for mine, other in zip(self.held.pop(layer), values, strict=True):
            difference = mine.astype(np.float64) - other
            self._largest[layer] = max(self._largest[layer], float(np.abs(difference).max()))
            self._squares[layer] += float(difference @ difference)
            self._norms[layer] += float(np.square(mine, dtype=np.float64).sum())

    def differences(self) -> tuple[LayerDifference, ...]:
        return tuple(
            LayerDifference(layer, largest, math.sqrt(squares / norm) if norm else None)
            for layer, (largest, squares, norm) in enumerate(
                zip(self._largest, self._squares, self._norms, strict=True)
            )
        )


@dataclass(frozen=True)
class _First(Observer):
    """Keeps what the source's layers hand on."""

    layers: _Layers

    def layer_output(self, layer: int, first: int, values: Single) -> None:
        self.layers.held[layer] = values.copy()


@dataclass(frozen=True)
class _Second(Observer):
    """Compares what the container's layers hand on."""

    layers: _Layers

    def layer_output(self, layer: int, first: int, values: Single) -> None:
        self.layers.compare(layer, values)
