"""What a verification finds, and how its work is spread over threads without losing the order of the findings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from formats.errors import Interrupted, MoepackError
from packer.pool import Pool
from packer.progress import Progress

CHUNK_BYTES = 8 << 20  # of a file or section held at a time

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Problem:
    """Something that is not as it must be: in which record, tensor or file, and what."""

    where: str
    what: str

    def to_dict(self) -> dict[str, str]:
        """The members of ``problems`` in JSON."""
        return {"where": self.where, "what": self.what}


def problem_of(error: MoepackError, where: str | None = None) -> Problem:
    """A reader's refusal as a finding; ``where`` names the record or tensor if the error names only a file."""
    if where is None or where == error.where:
        text = error.line()
        place = f"{error.where}: "
        return Problem(error.where or "container", text.removeprefix(place) if error.offset is None else text)
    return Problem(where, error.line().removeprefix(f"{where}: "))


class Work:
    """Counts the bytes that are done, for progress, and carries the wish to stop into the threads."""

    def __init__(self, total_bytes: int, progress: Callable[[Progress], None] | None) -> None:
        self._total = total_bytes
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._stop = threading.Event()

    def done(self, count: int, what: str) -> None:
        """``count`` more bytes are done.

        Raises:
            Interrupted: the command was asked to stop.
        """
        if self._stop.is_set():
            raise Interrupted("interrupted")
        with self._lock:
            self._done += count
            if self._progress is not None:
                self._progress(Progress(self._done, self._total, what))

    def stop(self) -> None:
        """Let the threads end at their next step."""
        self._stop.set()

    def in_order(self, function: Callable[[_Item], _Result], items: Iterable[_Item], jobs: int) -> list[_Result]:
        """The results of ``function`` in the order of ``items``, computed by ``jobs`` threads, few items at a time."""
        with Pool(jobs, "verify") as pool:
            try:
                return list(pool.in_order(function, items))
            except BaseException:
                self.stop()
                raise
