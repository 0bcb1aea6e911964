"""Shards that come ahead of the work: fetched in the order of need, on threads of their own, within a limit of bytes.

What lies in the staging folder, whole or in part, never takes more than the limit: a shard counts with its full length
from the moment at which it is asked for, and is asked for only when that fits. Because shards are asked for strictly
in the order of the steps, a limit that :func:`packer.steps.least_staging` accepts can never block the work.
When a shard goes is not decided here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from formats.errors import EnvironmentProblem, Interrupted, UsageError
from formats.starting import start
from packer.fetch.listing import RemoteFile
from packer.fetch.local import compare
from packer.fetch.partial import partial_bytes
from packer.fetch.shards import ShardSource
from packer.steps import Step, least_staging

AHEAD = 3  # shards that are fetched before the step that needs them has begun
CONNECTIONS = 2  # shards that come at the same time
_POLL_SECONDS = 0.25


class Supply:
    """Brings shards for the steps of a pack. Use it in a ``with`` block; the methods are for one thread."""

    def __init__(self, source: ShardSource, *, limit: int, release: bool) -> None:
        """Nothing is fetched before :meth:`begin`.

        Args:
            source: the open staging folder.
            limit: bytes of shards that may lie in it at a time.
            release: whether shards go once they are used; else all of them must fit.
        """
        self.source = source
        self.limit = limit
        self._release = release
        self._change = threading.Condition()
        self._stop = threading.Event()
        self._queue: deque[str] = deque()
        self._first: dict[str, int] = {}
        self._current = -1
        self._claims: dict[str, int] = {}
        self._partials: dict[str, int] = {}
        self._here: set[str] = set()
        self._percent: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """The staging folder."""
        return self.source.directory

    def held(self) -> dict[str, int]:
        """Bytes of shards that lie in the folder, by name: whole ones and parts."""
        sizes: dict[str, int] = {}
        for file in self.source.selection.shards:
            size = _size(self.directory / file.path) + partial_bytes(self.directory, file)
            if size:
                sizes[file.path] = size
        return sizes

    def adopt(self, stop: threading.Event) -> None:
        """Enter into the receipt what has its name and right bytes and is not there, after a kill between the two."""
        for file in self.source.selection.shards:
            if not self.source.present(file.path) and self._right(file, stop):
                self.source.fetch(file.path, stop=stop)  # compares once more, and fetches nothing

    def here(self) -> set[str]:
        """Shards that are in the folder and in its receipt, so that their bytes are right."""
        return {file.path for file in self.source.selection.shards if self.source.present(file.path)}

    def _right(self, file: RemoteFile, stop: threading.Event) -> bool:
        if _size(self.directory / file.path) != file.bytes:
            return False
        return not isinstance(compare(self.directory, file, stop=stop, report=lambda count: None), str)

    def begin(self, steps: Sequence[Step], here: Iterable[str]) -> None:
        """Start to fetch what ``steps`` need and what is not ``here``.

        Raises:
            UsageError: the limit is too small for these steps; nothing was fetched.
        """
        lengths = {file.path: file.bytes for file in self.source.selection.shards}
        held = self.held()
        least = least_staging(steps, lengths, held, release=self._release)
        if self.limit < least:
            raise UsageError(
                "the staging folder cannot hold what is still needed beside what lies in it",
                where="--staging-limit",
                expected=f"at least {least} bytes",
                found=f"{self.limit} bytes",
                hint=f"raise the limit, or remove shards from {self.directory} that are not used yet",
            )
        self._here = set(here)
        self._claims = {name: _size(self.directory / name) for name in lengths if _size(self.directory / name)}
        self._partials = {name: size - self._claims.get(name, 0) for name, size in held.items()}
        for number, step in enumerate(steps):
            for shard in step.shards:
                self._first.setdefault(shard, number)
        self._queue.extend(name for name in self._first if name not in self._here)
        for number in range(CONNECTIONS):
            thread = threading.Thread(target=self._run, name=f"staging-{number}", daemon=True)
            start(thread)
            self._threads.append(thread)

    def require(self, number: int, step: Step, *, stop: threading.Event, tell: Callable[[str], None]) -> None:
        """Wait until all shards of step ``number`` are here.

        Raises:
            MoepackError: why one of them cannot be fetched.
            Interrupted: ``stop`` was set.
        """
        with self._change:
            self._current = number
            self._change.notify_all()
            while missing := [name for name in step.shards if name not in self._here]:
                if stop.is_set():
                    raise Interrupted("stopped before the container was complete")
                if self._failure is not None:
                    raise self._failure
                if not any(thread.is_alive() for thread in self._threads):
                    raise EnvironmentProblem("shards are no longer fetched", where=missing[0])
                tell(f"fetching {missing[0]}, {self._percent.get(missing[0], 0)} %")
                self._change.wait(_POLL_SECONDS)

    def gone(self, name: str) -> None:
        """A shard was deleted: there is room for another."""
        with self._change:
            self._claims.pop(name, None)
            self._here.discard(name)
            self._change.notify_all()

    def close(self) -> None:
        """Stop fetching; parts that have arrived stay."""
        self._stop.set()
        with self._change:
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (name := self._next()) is not None:
            try:
                self.source.fetch(name, stop=self._stop, progress=lambda seen: self._see(name, seen.done_bytes))
            except BaseException as error:  # handed over to whoever waits for the shard
                with self._change:
                    self._failure = self._failure or error
                    self._change.notify_all()
                self._stop.set()
                return
            with self._change:
                self._claims[name] = self.source.shard_bytes(name)
                self._here.add(name)
                self._change.notify_all()

    def _see(self, name: str, done: int) -> None:
        self._percent[name] = 100 * done // max(1, self.source.shard_bytes(name))

    def _next(self) -> str | None:
        """Claim the next shard once there is room for it; None when there is none left, or at the end."""
        with self._change:
            while not self._stop.is_set() and self._queue:
                name = self._queue[0]
                if self._wanted(name) and self._room(name):
                    self._partials.pop(name, None)
                    # A damaged file in its place stays until the new one is whole.
                    self._claims[name] = self._claims.get(name, 0) + self.source.shard_bytes(name)
                    return self._queue.popleft()
                self._change.wait(_POLL_SECONDS)
            return None

    def _wanted(self, name: str) -> bool:
        """Whether it is time: for a step that has begun, or not too far ahead of it."""
        ahead = sum(self._first.get(claimed, -1) > self._current for claimed in self._claims)
        return self._first[name] <= self._current or ahead < AHEAD

    def _room(self, name: str) -> bool:
        used = sum(self._claims.values()) + sum(self._partials.values()) - self._partials.get(name, 0)
        return used + self.source.shard_bytes(name) <= self.limit


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0
