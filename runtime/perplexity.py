"""How well a model foresees a text: the mean loss a token, and what it means as a perplexity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.errors import UsageError
from runtime.sampling import log_probabilities


@dataclass(frozen=True)
class Loss:
    """Losses of tokens, summed.

    Attributes:
        nats: minus the logarithms of the probabilities that the tokens had.
        tokens: how many were foreseen; the first of a text never is.
    """

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def mean(self) -> float | None:
        """Nats a token, None where no token was foreseen."""
        return self.nats / self.tokens if self.tokens else None

    @property
    def perplexity(self) -> float | None:
        """exp of the mean; None where no token was foreseen, infinity where it is beyond float64."""
        if self.mean is None:
            return None
        return math.exp(self.mean) if self.mean < 700.0 else math.inf


def loss_of(logits: NDArray[np.float32], first: int, ids: Sequence[int]) -> Loss:
    """The loss of the tokens that follow on some positions of a text.

    Args:
        logits: float32 [t, vocab], of positions ``first`` to ``first + t - 1``.
        first: counted from the beginning of ``ids``.
        ids: the whole text.
    """
    nats = 0.0
    count = min(len(logits), len(ids) - 1 - first)
    for place in range(count):  # one position at a time: a chunk in float64 would take 80 MB for Kimi K3
        nats -= float(log_probabilities(logits[place])[ids[first + place + 1]])
    return Loss(nats, max(count, 0))


def windows(ids: Sequence[int], size: int | None, begin: int | None) -> list[tuple[int, ...]]:
    """A text as pieces that are read each with a fresh state.

    Args:
        ids: the text.
        size: positions a piece, ``begin`` included; None for one piece.
        begin: an id to put before every piece, or None.

    Raises:
        UsageError: no ids, or pieces that have no room for two tokens.
    """
    if not ids:
        raise UsageError("no tokens", expected="at least one")
    head = () if begin is None else (begin,)
    if size is None:
        return [(*head, *ids)]
    step = size - len(head)
    if size < 2 or step < 1:
        raise UsageError("window is too small", where="--window", expected="2 or more", found=size)
    return [(*head, *ids[start : start + step]) for start in range(0, len(ids), step)]
