"""Attention residuals: a layer reads a mix of the states after earlier blocks of layers and of the running sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.models.arithmetic import normalised, softmax
from runtime.store import Tensors

Single = NDArray[np.float32]


def mix(tensors: Tensors, name: str, states: Sequence[Single], epsilon: float) -> Single:
    """The weighted sum of states, weights by softmax of their scores (the released modelling code of Kimi K3).

    A state's score is sum(RMS-normalised state * norm.weight * proj.weight).

    Args:
        tensors: that hold ``{name}_norm.weight`` and ``{name}_proj.weight``.
        states: float32 [n, hidden] each; the running sum last.
        epsilon: of the norm.

    Returns:
        float32 [n, hidden], a new array.
    """
    direction = tensors.vectors[f"{name}_norm.weight"] * tensors.vectors[f"{name}_proj.weight"].reshape(-1)
    scored = [_rowwise_dot(normalised(state, epsilon), direction) for state in states]
    weights = softmax(np.stack(scored, axis=-1))
    total = states[0] * weights[:, 0, None]
    for number in range(1, len(states)):
        total = total + states[number] * weights[:, number, None]
    return total


def _rowwise_dot(x: Single, direction: Single) -> Single:
    sums: Single = np.add.reduce(np.multiply(x, direction, dtype=np.float64), axis=-1).astype(np.float32)
    return sums
