"""Which expert gives up its slot: pure bookkeeping on numbers of experts, without threads or memory.

Frequency first: the experts of a mixture are used unevenly, and a token of a large model touches more of them than
fit, so the least recently used ones are always those that the first layers of the next token need: a cache by recency
alone hits next to nothing below one token's working set. Counts of uses decay, so that another topic can take over.
In replays of the bundled model's routes (``benchmarks/hit_rates.py``) with half of a token's experts in the cache,
frequency hits 14 to 16 % and recency none; with a fourth of all experts 41 to 48 against 30 to 34 %. Half lives of 8
to 32 passes do about equally well, plain counts worse by 2 to 8 points.

Layers take turns, so an expert of one that has just had its turn is of no use for a whole pass, while its slot may
serve other layers: of two that are used equally often, the one whose turn is further away leaves. That saves 2 to 4 %
of the reads where a fourth to a half of all experts fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]  # numbers of experts, counted over all layers

HALF_LIFE = 16.0  # passes over all layers after which a use counts half
# The part of its worth that an expert loses whose layer's turn is a whole pass away; 0.3 to 0.8 do about as well.
WAITING = 0.5


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

    Uses count in full for experts of the layer whose turn is next, and the less the further away a layer's turn is.

    What is kept is the logarithm of sum(2^(time of use / half life)) over all uses, which needs no update as time goes
    by: ages change all counts by one factor.
    """

    def __init__(self, layer_experts: Sequence[int], half_life: float = HALF_LIFE, waiting: float = WAITING) -> None:
        """
        Args:
            layer_experts: how many experts each layer has, 0 for dense ones; they take turns in this order.
            half_life: in passes over all layers with experts; infinite for plain counts.
            waiting: the part of its uses that does not count for an expert whose turn is a whole pass away.
        """
        if half_life <= 0:
            raise ValueError("half life must be positive")
        if not 0 <= waiting < 1:
            raise ValueError("waiting must be at least 0 and less than 1")
        experts = sum(layer_experts)
        counts = [count for count in layer_experts if count]
        turns = max(1, len(counts))
        self._turn = np.repeat(np.arange(len(counts)), counts)
        self._waits = np.log2(1.0 - waiting * np.arange(turns) / turns)  # by how many turns lie in between
        self._next_turn = 0
        self._logarithm = np.full(experts, -math.inf)
        self._recency = Recency(experts)
        self._step = 1.0 / (half_life * turns)
        self._now = 0

    def use(self, keys: Keys) -> None:
        """These experts were asked for, in this order."""
        self._now += 1
        self._logarithm[keys] = np.logaddexp2(self._logarithm[keys], self._now * self._step)
        self._recency.use(keys)
        if keys.size:
            self._next_turn = (int(self._turn[keys[0]]) + 1) % self._waits.size

    def least(self, keys: Keys) -> int:
        """The one used least, for how soon its layer's turn comes."""
        between = (self._turn[keys] - self._next_turn) % self._waits.size
        counts = self._logarithm[keys] + self._waits[between]
        lowest = np.flatnonzero(counts == counts.min())
        return int(lowest[0]) if lowest.size == 1 else int(lowest[self._recency.least(keys[lowest])])
