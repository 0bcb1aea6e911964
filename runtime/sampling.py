"""Choosing the next token from logits: greedy, or drawn at a temperature from the likeliest ones.

The same logits and the same generator give the same token: ties go to the lower id, sums run in a fixed order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError, UsageError

MAX_TEMPERATURE = 100.0
MAX_SEED = (1 << 63) - 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the largest.
        top_p: only the likeliest tokens that together have at least this share are drawn from.
        seed: of the generator.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:  # NaN fails as well
            raise UsageError(
                "temperature is out of range", expected=f"0 to {MAX_TEMPERATURE:g}", found=self.temperature
            )
        if not 0.0 < self.top_p <= 1.0:
            raise UsageError("top-p is out of range", expected="above 0 and at most 1", found=self.top_p)
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError("seed is out of range", expected=f"0 to {MAX_SEED}", found=self.seed)

    def generator(self) -> np.random.Generator:
        """A new generator with this seed; one bit stream (PCG64) for all versions of numpy."""
        return np.random.Generator(np.random.PCG64(self.seed))


def choose(logits: NDArray[np.float32], sampling: Sampling, generator: np.random.Generator) -> int:
    """The next token.

    Args:
        logits: float32 [vocab].
        sampling: how to choose.
        generator: gives one number if the temperature is not 0, none otherwise.

    Raises:
        FormatError: a logit is not finite.
    """
    check_finite(logits)
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))  # the first of equals
    scaled = logits.astype(np.float64)
    scaled -= scaled.max()
    with np.errstate(over="ignore"):  # minus infinity: no weight at all, which is right
        weights = np.exp(scaled / sampling.temperature)
    order = None
    if sampling.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")  # stable: the lower id first among equals
        sums = np.cumsum(weights[order])
        sums = sums[: int(np.searchsorted(sums, sampling.top_p * sums[-1])) + 1]
    else:
        sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, generator.random() * sums[-1], side="right"))
    place = min(place, len(sums) - 1)  # rounding may carry the product up to the sum itself
    return place if order is None else int(order[place])


def top(logits: NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """The ``count`` largest logits with their ids, descending; the lower id first among equals."""
    order = np.argsort(-logits, kind="stable")[:count]
    return [(int(token), float(logits[token])) for token in order]


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Logarithms of the softmax, float64 [vocab], of one position's logits."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= math.log(float(np.exp(shifted).sum()))
    return shifted


def check_finite(logits: NDArray[np.float32]) -> None:
    """Refuse logits that are no numbers: what follows from them would be arbitrary.

    Raises:
        FormatError: naming the first.
    """
    if not np.isfinite(logits).all():
        token = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise FormatError(
            "the model's logits are not finite",
            where=f"token {token}",
            found=float(logits[token]),
            hint="verify the container: moepack verify",
        )
