"""Which expert gives up its slot: pure bookkeeping on numbers of experts, without threads or memory.

Frequency first: the experts of a mixture are used unevenly, and a token of a large model touches more of them than
fit, so the least recently used ones are always those that the first layers of the next token need: a cache by recency
alone hits next to nothing below one token's working set. Counts of uses decay, so that another topic can take over.
In replays of the bundled model's routes (``benchmarks/hit_rates.py``) with half of a token's experts in the cache,
frequency hits 14 to 16 % and recency none; with a fourth of all experts 39 to 47 against 30 to 34 %. Half lives of 8
to 32 passes do about equally well, plain counts worse by 2 to 8 points.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]  # numbers of experts, counted over all layers

HALF_LIFE = 16.0  # passes over all layers after which a use counts half


class Policy(Protocol):
    """Ranks experts by what they are worth keeping. Deterministic: ranks follow from the uses, in order, alone."""

    def use(self, keys: Keys) -> None:
        """These experts, all of one layer, were asked for."""

    def least(self, keys: Keys) -> int:
        """Where in ``keys`` (at least one) the expert stands that is worth the least."""


class Recency:
    """Least recently used goes first."""

    def __init__(self, experts: int) -> None:
        """``experts`` of all layers."""
        self._last = np.zeros(experts, np.int64)
        self._now = 0

    def use(self, keys: Keys) -> None:
        """These experts were asked for, in this order."""
        self._last[keys] = self._now + 1 + np.arange(keys.size)
        self._now += keys.size

    def least(self, keys: Keys) -> int:
        """The one used longest ago; of those never used the first."""
        return int(np.argmin(self._last[keys]))


class Frequency:
    """Least used goes first, each use counting 2^(-age / half life); among equals the least recently used.

    What is kept is the logarithm of sum(2^(time of use / half life)) over all uses, which needs no update as time goes
    by: ages change all counts by one factor.
    """

    def __init__(self, experts: int, layers: int, half_life: float = HALF_LIFE) -> None:
        """
        Args:
            experts: of all layers.
            layers: with experts; time moves on by one when all of them were used.
            half_life: in such passes; infinite for plain counts.
        """
        if half_life <= 0:
            raise ValueError("half life must be positive")
        self._logarithm = np.full(experts, -math.inf)
        self._recency = Recency(experts)
        self._step = 1.0 / (half_life * max(1, layers))
        self._now = 0

    def use(self, keys: Keys) -> None:
        """These experts were asked for, in this order."""
        self._now += 1
        self._logarithm[keys] = np.logaddexp2(self._logarithm[keys], self._now * self._step)
        self._recency.use(keys)

    def least(self, keys: Keys) -> int:
        """The one used least."""
        counts = self._logarithm[keys]
        lowest = np.flatnonzero(counts == counts.min())
        return int(lowest[0]) if lowest.size == 1 else int(lowest[self._recency.least(keys[lowest])])
