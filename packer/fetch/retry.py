"""How long to try: delays that grow and are jittered, within a budget that every message can state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from formats.errors import EnvironmentProblem


@dataclass(frozen=True)
class Limits:
    """The budget of one file.

    Attributes:
        connect_seconds: for a connection to one address.
        stall_seconds, stall_bytes: a connection that brings less than so many bytes in so many seconds of waiting for
            it is given up (time spent on writing to the disk does not count).
        attempts: in a row that bring nothing new; then the file is given up.
        waiting_seconds: of pauses in a row that bring nothing new.
        failures: of one file in all, whatever they brought.
        progress_bytes: what counts as something new.
        first_delay, longest_delay: seconds of the first pause, and the most that a pause grows to by doubling.
    """

    connect_seconds: float = 15.0
    stall_seconds: float = 30.0
    stall_bytes: int = 16 << 10
    attempts: int = 8
    waiting_seconds: float = 600.0
    failures: int = 1000
    progress_bytes: int = 1 << 20
    first_delay: float = 1.0
    longest_delay: float = 60.0


class Trouble(Exception):
    """A request failed in a way that may pass: try again.

    Args:
        what: one line, not yet escaped.
        retry_after: seconds that the server asks us to wait.
        restart: what is there of the file does not belong to what the server has: begin at its first byte.
    """

    def __init__(self, what: str, *, retry_after: float | None = None, restart: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.retry_after = retry_after
        self.restart = restart


class Patience:
    """Counts the failures of one file against its :class:`Limits`."""

    def __init__(
        self, limits: Limits, where: str, rng: random.Random, tell: Callable[[str], None] | None = None
    ) -> None:
        """``tell`` is told of every pause."""
        self._limits = limits
        self._tell = tell
        self._where = where
        self._rng = rng
        self._best = 0
        self._in_row = 0
        self._waited = 0.0
        self._failures = 0

    def failed(self, trouble: Trouble, position: int) -> float:
        """Seconds to wait after ``trouble``, which came when the file's first ``position`` bytes were here.

        Raises:
            EnvironmentProblem: the budget is used up, or the server asks for more than is left of it.
        """
        limits = self._limits
        if position >= self._best + limits.progress_bytes:
            self._best, self._in_row, self._waited = position, 0, 0.0
        self._in_row += 1
        self._failures += 1
        if self._in_row >= limits.attempts or self._failures >= limits.failures:
            raise self._spent(trouble)
        longest = min(limits.longest_delay, limits.first_delay * 2.0 ** min(self._in_row - 1, 30))
        delay = longest * (0.5 + 0.5 * self._rng.random())
        if trouble.retry_after is not None:
            delay = max(delay, trouble.retry_after)
        if self._waited + delay > limits.waiting_seconds:
            raise self._spent(trouble)
        self._waited += delay
        if self._tell is not None:
            self._tell(f"no answer: {trouble.what}; asking again in {delay:.0f} s")
        return delay

    def _spent(self, trouble: Trouble) -> EnvironmentProblem:
        asked = "" if trouble.retry_after is None else f", the server asks for {trouble.retry_after:.0f} s more"
        return EnvironmentProblem(
            f"given up after {self._in_row} attempts in a row without progress ({self._failures} in all,"
            f" {self._waited:.0f} s of waiting{asked}): {trouble.what}",
            where=self._where,
            hint="give the same command again later: it continues, and what has arrived is kept",
        )


def retry_after(value: str | None, *, now: datetime | None = None) -> float | None:
    """Seconds in a ``Retry-After`` header, in either of its forms; None if it is absent, malformed or negative.

    >>> retry_after("120"), retry_after("soon")
    (120.0, None)
    """
    if value is None:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) <= 9:
        return float(text)
    try:
        moment = parsedate_to_datetime(text[:64])
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    seconds = (moment - (now or datetime.now(UTC))).total_seconds()
    return seconds if seconds >= 0 else None
