"""What ``bench`` has measured: each token done in several ways, and how they compare."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runtime.bench_alone import Caching
from runtime.budget import BudgetPlan
from runtime.stream.statistics import StreamStatistics, TrunkStatistics


@dataclass(frozen=True)
class Token:
    """A measured token: seconds each way, and the bytes that it needs.

    Attributes:
        together: decoding as it is.
        experts, trunk: plain reads of the experts it needs, and of the trunk where it is streamed.
        computing: arithmetic alone; None where the trunk does not fit into memory.
        apart: reading and arithmetic at once, neither waiting for the other; None likewise.
        expert_bytes, trunk_bytes: what the plain reads bring.
    """

    together: float
    experts: float
    trunk: float
    computing: float | None
    apart: float | None
    expert_bytes: int
    trunk_bytes: int

    @property
    def reading(self) -> float:
        """Plain reads of everything."""
        return self.experts + self.trunk

    @property
    def larger(self) -> float | None:
        """The larger of reading alone and computing alone, if both were measured."""
        return larger_of(self.reading, self.computing)

    def over_larger(self, seconds: float | None) -> float | None:
        """Seconds of this token in proportion to the larger of reading alone and computing alone."""
        return over(seconds, self.larger)


@dataclass(frozen=True)
class Spread:
    """Over all tokens."""

    lower_quartile: float
    median: float
    upper_quartile: float


@dataclass(frozen=True)
class Bench:
    """What was measured.

    Attributes:
        container_id: of the container.
        warm: tokens before the measured ones.
        tokens: measured.
        threads: for arithmetic.
        plan: how the budget was divided.
        stream, trunk: what was done for the measured tokens as they were decoded.
        caching: see there.
        notes: of the reading, for example that direct reads are not possible here.
    """

    container_id: str
    warm: int
    tokens: tuple[Token, ...]
    threads: int
    plan: BudgetPlan
    stream: StreamStatistics
    trunk: TrunkStatistics
    caching: Caching
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Of decoding as it is."""
        return sum(token.together for token in self.tokens)

    @property
    def reading_seconds(self) -> float:
        """Of reading alone."""
        return sum(token.reading for token in self.tokens)

    @property
    def computing_seconds(self) -> float | None:
        """Of computing alone, if it was measured."""
        return _sum(token.computing for token in self.tokens)

    @property
    def apart_seconds(self) -> float | None:
        """Of both at once, neither waiting for the other, if that was measured."""
        return _sum(token.apart for token in self.tokens)

    @property
    def bytes_needed(self) -> int:
        """What reading alone reads."""
        return sum(token.expert_bytes + token.trunk_bytes for token in self.tokens)

    @property
    def bytes_read(self) -> int:
        """What decoding read."""
        return self.stream.bytes_read + self.trunk.bytes_read

    @property
    def stall_seconds(self) -> float:
        """In which arithmetic waited for bytes."""
        return self.stream.stall_seconds + self.trunk.stall_seconds

    @property
    def ratio(self) -> float | None:
        """Together, in proportion to the larger of reading alone and computing alone; sums over all tokens."""
        return over(self.seconds, larger_of(self.reading_seconds, self.computing_seconds))

    @property
    def apart_ratio(self) -> float | None:
        """The same of both at once."""
        return over(self.apart_seconds, larger_of(self.reading_seconds, self.computing_seconds))

    @property
    def larger_seconds(self) -> float | None:
        """The larger of reading alone and computing alone of each token, summed: what a perfect overlap would take.

        A token begins when the one before has ended, so what reading has to spare in one token is of no use to the
        next. Where both take about equally long this is more than the larger of the two sums.
        """
        return _sum(token.larger for token in self.tokens)

    @property
    def paced_ratio(self) -> float | None:
        """Together, in proportion to ``larger_seconds``."""
        return over(self.seconds, self.larger_seconds)

    @property
    def apart_paced_ratio(self) -> float | None:
        """The same of both at once."""
        return over(self.apart_seconds, self.larger_seconds)

    @property
    def token_ratio(self) -> Spread | None:
        """Together, in proportion to the larger of reading alone and computing alone, of each token by itself."""
        return _spread(token.over_larger(token.together) for token in self.tokens)

    @property
    def apart_token_ratio(self) -> Spread | None:
        """The same of both at once."""
        return _spread(token.over_larger(token.apart) for token in self.tokens)


def larger_of(reading: float, computing: float | None) -> float | None:
    """The larger of both; None if one was not measured."""
    return None if computing is None else max(reading, computing)


def over(seconds: float | None, larger: float | None) -> float | None:
    """``seconds`` in proportion to ``larger``; None if one was not measured."""
    return None if seconds is None or larger is None else seconds / larger


def _sum(seconds: Iterable[float | None]) -> float | None:
    """None if one of them is."""
    known = list(seconds)
    return None if None in known else sum(value for value in known if value is not None)


def _spread(values: Iterable[float | None]) -> Spread | None:
    """None if one of them is."""
    known = list(values)
    return None if None in known else Spread(*np.quantile(np.array(known, np.float64), (0.25, 0.5, 0.75)).tolist())
