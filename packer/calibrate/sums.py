"""What is added up in one layer: per expert how often, how much and how strongly; per column the second moments.

Experts are reported from several threads, but each by one thread at a time and in groups that follow each other, and
what a group brings is added up window by window: every sum has one order, whatever the threads and the groups.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        starts: where each window of the group starts, and last how many tokens there are.
        labels: of each window.
        halves: of each window, 0 for even ones and 1 for odd ones.
    """

    def __init__(self, sums: LayerSums, starts: Sequence[int], labels: Sequence[int], halves: Sequence[int]) -> None:
        self._sums = sums
        self._starts = starts
        self._windows = tuple(zip(labels, halves, strict=True))

    def expert(self, layer: int, first: int, seen: ExpertUse) -> None:
        sums, expert = self._sums, seen.expert
        outputs = seen.outputs.astype(np.float64)
        saliency = seen.weights * np.sqrt(np.add.reduce(outputs * outputs, axis=-1))
        bounds = np.searchsorted(seen.tokens, self._starts)
        for (label, half), start, stop in zip(self._windows, bounds, bounds[1:], strict=False):
            if start == stop:
                continue
            part = float(np.add.reduce(saliency[start:stop]))
            sums.tokens[label, expert] += stop - start
            sums.gate[label, expert] += np.add.reduce(seen.weights[start:stop], dtype=np.float64)
            sums.saliency[label, expert] += part
            sums.halves[half, label, expert] += part
            sums.inputs[expert] += _squares(seen.inputs[start:stop])
            sums.activations[expert] += _squares(seen.activated[start:stop])

    def experts_input(self, layer: int, first: int, values: NDArray[np.float32]) -> None:
        for start, stop in zip(self._starts, self._starts[1:], strict=False):
            self._sums.all_inputs[:] += _squares(values[start:stop])


def _squares(values: NDArray[np.float32]) -> Double:
    """Sums over rows of squares, in float64, row after row."""
    exact = values.astype(np.float64)
    total: Double = np.add.reduce(exact * exact, axis=0)
    return total
