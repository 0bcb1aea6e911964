"""What is added up in one layer: per expert how often, how much and how strongly; per column the second moments.

Experts are reported from several threads, but each by one thread at a time and in groups that follow each other, so
every sum has one order, whatever the threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.models.observer import ExpertUse, Observer

Double = NDArray[np.float64]
Whole = NDArray[np.int64]


@dataclass(frozen=True)
class LayerSums:
    """Sums of one layer with experts; arrays are changed in place.

    Attributes:
        tokens: int64 [labels, experts], tokens routed.
        gate: float64 [labels, experts], sums of their weights.
        saliency: float64 [labels, experts], sums of weight times the norm of the expert's output.
        halves: float64 [2, labels, experts], the same of even and odd windows alone.
        inputs: float64 [experts, width], sums of squares of the inputs of gate and up.
        activations: float64 [experts, expert width], sums of squares of the inputs of down.
        all_inputs: float64 [width], sums of squares of every token's input once.
    """

    tokens: Whole
    gate: Double
    saliency: Double
    halves: Double
    inputs: Double
    activations: Double
    all_inputs: Double


def empty_sums(labels: int, experts: int, width: int, expert_width: int) -> LayerSums:
    """Zeros."""
    return LayerSums(
        np.zeros((labels, experts), np.int64),
        np.zeros((labels, experts)),
        np.zeros((labels, experts)),
        np.zeros((2, labels, experts)),
        np.zeros((experts, width)),
        np.zeros((experts, expert_width)),
        np.zeros(width),
    )


class Collector(Observer):
    """Adds a group of tokens to the sums of the layer that it passes through.

    Args:
        sums: of the layer.
        labels: int64 [tokens of the group], each token's label.
        halves: int64 [tokens of the group], 0 for tokens of even windows, 1 for those of odd ones.
    """

    def __init__(self, sums: LayerSums, labels: Whole, halves: Whole) -> None:
        self._sums = sums
        self._labels = labels
        self._halves = halves

    def expert(self, layer: int, first: int, seen: ExpertUse) -> None:
        sums, expert = self._sums, seen.expert
        labels, halves = self._labels[seen.tokens], self._halves[seen.tokens]
        count = sums.tokens.shape[0]
        outputs = seen.outputs.astype(np.float64)
        saliency = seen.weights * np.sqrt(np.add.reduce(outputs * outputs, axis=-1))
        sums.tokens[:, expert] += np.bincount(labels, minlength=count)
        sums.gate[:, expert] += np.bincount(labels, seen.weights, minlength=count)
        sums.saliency[:, expert] += np.bincount(labels, saliency, minlength=count)
        for half in (0, 1):
            chosen = halves == half
            sums.halves[half, :, expert] += np.bincount(labels[chosen], saliency[chosen], minlength=count)
        sums.inputs[expert] += _squares(seen.inputs)
        sums.activations[expert] += _squares(seen.activated)

    def experts_input(self, layer: int, first: int, values: NDArray[np.float32]) -> None:
        self._sums.all_inputs[:] += _squares(values)


def _squares(values: NDArray[np.float32]) -> Double:
    """Sums over rows of squares, in float64, row after row."""
    exact = values.astype(np.float64)
    total: Double = np.add.reduce(exact * exact, axis=0)
    return total
