"""A bounded cache of experts that are read as they are needed, or a little before, and worked on as they arrive.

One thread asks (``compute``); a few threads read; the asking thread and the helpers of its
:class:`~runtime.threads.Workers` do the work. Everything that they share is in one table under one lock, which nobody
holds while reading or working.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Protocol

import numpy as np

from formats.errors import EnvironmentProblem, UsageError
from formats.layout import record_name
from runtime.store import Expert
from runtime.stream.memory import Slots
from runtime.stream.policy import Frequency, Policy
from runtime.stream.slots import Entry, State, Table
from runtime.stream.statistics import StreamStatistics
from runtime.threads import Workers, wait_out

READERS = 8  # reads under way at a time
AHEAD_READERS = 2  # of them, for what is only expected: a read that has begun cannot give way to one that is needed


class ExpertLoader(Protocol):
    """Where experts come from. Safe to use from several threads."""

    @property
    def layer_experts(self) -> tuple[int, ...]:
        """How many experts each layer has, 0 for dense layers."""

    @property
    def slot_bytes(self) -> int:
        """What the largest expert takes."""

    def read_bytes(self, layer: int, expert: int) -> int:
        """How much :meth:`load` reads."""

    def load(self, layer: int, expert: int, slot: memoryview) -> Expert:
        """Read an expert into a slot, of which its matrices are views.

        Raises:
            MoepackError: it cannot be read, or is not what it should be.
        """


@dataclass
class _Call:
    """One ``compute`` under way.

    Attributes:
        work: what to do with each expert.
        news: for the asking thread: a token whenever something became ready, ended or failed.
        pinned: the entries that are still to be worked on, by key.
        ready: those of them that are in their slot and nobody works on.
        helpers: helpers that were asked to take part and have not found everything taken yet.
        busy: helpers that are working on an expert.
        stopped: nobody begins on another expert.
        error: the first one.
    """

    work: Callable[[Expert], None]
    pinned: dict[int, Entry] = field(default_factory=dict)
    ready: deque[Entry] = field(default_factory=deque)
    helpers: int = 0
    busy: int = 0
    stopped: bool = False
    error: BaseException | None = None
    news: SimpleQueue[None] = field(default_factory=SimpleQueue)


class ExpertStream:
    """The routed experts of a model in a fixed number of slots. One thread at a time asks; close it."""

    def __init__(
        self,
        loader: ExpertLoader,
        *,
        slots: int,
        workers: Workers,
        readers: int = READERS,
        policy: Policy | None = None,
    ) -> None:
        """
        Args:
            loader: of experts; what it reads from stays open as long as this is used.
            slots: how many experts are in memory at the most, at least one if there are any. A layer may ask for more:
                they flow through.
            workers: whose helpers take part in the work.
            readers: reads under way at a time.
            policy: who leaves first; by default the least frequently used.
        """
        counts = loader.layer_experts
        if slots < 1 and any(counts):
            raise ValueError("at least one slot")
        self._loader, self._workers = loader, workers
        self._counts = counts
        self._first = [sum(counts[:layer]) for layer in range(len(counts))]
        self._policy = policy or Frequency(sum(counts), sum(count > 0 for count in counts))
        self._slots = Slots(slots, loader.slot_bytes) if slots else None
        self._table = Table(slots, self._policy)
        self._demand: deque[Entry] = deque()
        self._ahead: deque[Entry] = deque()
        self._expected: dict[int, list[Entry]] = {}  # by layer
        self._ahead_reads = 0  # under way
        self._call: _Call | None = None
        self._closed = False
        self._counters = SimpleNamespace(**asdict(StreamStatistics()))
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        self._wanted = threading.Condition(self._lock)  # for readers: there may be something to read, or room for it
        self._readers = [
            threading.Thread(target=self._read_on, name=f"moepack-reader-{number}", daemon=True)
            for number in range(readers if slots else 0)
        ]
        started: list[threading.Thread] = []
        for reader in self._readers:
            try:
                reader.start()
            except RuntimeError:
                if not started:
                    raise EnvironmentProblem("no thread can be started for reading") from None
                break
            started.append(reader)
        self._readers = started

    def close(self) -> None:
        """End all reading threads, after the reads that they are at. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._demand.clear()
            self._ahead.clear()
            self._wanted.notify_all()
        for reader in self._readers:
            reader.join()

    def statistics(self) -> StreamStatistics:
        """What was done so far."""
        with self._lock:
            return StreamStatistics(**vars(self._counters))

    def compute(
        self,
        layer: int,
        chosen: Sequence[int],
        work: Callable[[Expert], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Call ``work`` once for each chosen expert, as in :class:`runtime.store.Experts`.

        Raises:
            UsageError: there is no such expert.
            BaseException: the first error of a read, of ``work`` or of ``meanwhile``; by then all running work has
                ended, and every slot is as good as before.
        """
        keys = [self._key(layer, expert) for expert in chosen]
        if len(set(keys)) != len(keys):
            raise ValueError("an expert is chosen twice")
        call = _Call(work)
        try:
            self._begin(call, layer, chosen, keys)
            if meanwhile is not None:
                meanwhile()
            self._take_part(call)
        finally:
            self._end(call)
        if call.error is not None:
            raise call.error

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """Read these experts of a layer, best first, when nothing else is to be read, and keep them until it comes."""
        keys = [self._key(layer, expert) for expert in likely[: self._table.count]]
        with self._lock:
            self._forget_expected(layer)
            expected = self._expected.setdefault(layer, [])
            for key, expert in zip(keys, likely, strict=False):
                entry = self._table.entries.get(key)
                if entry is None:
                    entry = self._table.entries[key] = Entry(key, layer, expert, ahead=True)
                    self._ahead.append(entry)
                entry.expected = True
                self._table.settle(entry)
                expected.append(entry)
            self._wanted.notify(len(self._ahead))

    def _key(self, layer: int, expert: int) -> int:
        if not 0 <= layer < len(self._counts) or not 0 <= expert < self._counts[layer]:
            raise UsageError("no such expert", where=record_name(layer, expert))
        return self._first[layer] + expert

    def _begin(self, call: _Call, layer: int, chosen: Sequence[int], keys: Sequence[int]) -> None:
        """Pin what is here, join what is on its way, and ask for the rest.

        An interruption may come between any two steps: ``call.pinned`` knows of an entry before anything else does.
        """
        hits = joined = used = 0
        with self._lock:
            if self._closed or self._broken is not None:
                raise ValueError("stream is closed") from self._broken
            self._call = call
            self._policy.use(np.array(keys, np.int64))
            for key, expert in zip(keys, chosen, strict=True):
                entry = self._table.entries.get(key) or Entry(key, layer, expert)
                call.pinned[key] = entry
                self._table.entries[key] = entry
                used += entry.ahead and entry.state is not State.WAITING
                entry.pins, entry.expected, entry.ahead = 1, False, False
                if entry.state is State.WAITING:
                    self._demand.append(entry)
                elif entry.state is State.READING:
                    joined += 1
                else:
                    hits += 1
                    call.ready.append(entry)
                self._table.settle(entry)
            self._forget_expected(layer)
            counters = self._counters
            counters.hits += hits
            counters.joined += joined
            counters.misses += len(keys) - hits - joined
            counters.ahead_used += used
            self._wanted.notify(len(self._demand))
            self._hire(call)

    def _forget_expected(self, layer: int) -> None:
        """The layer has come, or is expected otherwise: what was expected and still is in no slot need not be read."""
        for entry in self._expected.get(layer, ()):
            if not entry.expected or not self._table.holds(entry):
                continue  # it was asked for, or had to leave
            entry.expected = False
            if entry.state is State.WAITING:
                self._table.drop(entry)
            else:
                self._table.settle(entry)
        self._expected.pop(layer, None)

    def _hire(self, call: _Call) -> None:
        """Ask helpers to take part, at most one for each expert that is ready."""
        while call.helpers < min(len(call.ready), self._workers.threads - 1):
            call.helpers += 1
            self._workers.submit(partial(self._help, call))

    def _help(self, call: _Call) -> None:
        """What a helper does: work on ready experts until there are none."""
        while True:
            with self._lock:
                if call.stopped or not call.ready:
                    call.helpers -= 1
                    return
                entry = call.ready.popleft()
                call.busy += 1
            self._work_on(call, entry, busy=1)

    def _take_part(self, call: _Call) -> None:
        """What the asking thread does: the same, and wait for the rest."""
        while True:
            with self._lock:
                if call.error is not None or not call.pinned:
                    return
                entry = call.ready.popleft() if call.ready else None
                idle = call.busy == 0
            if entry is not None:
                self._work_on(call, entry, busy=0)
                continue
            began = time.perf_counter()
            call.news.get()
            if idle:  # nobody worked meanwhile
                with self._lock:
                    self._counters.stall_seconds += time.perf_counter() - began

    def _work_on(self, call: _Call, entry: Entry, *, busy: int) -> None:
        """Do the work on one expert and let go of it."""
        assert entry.value is not None
        error: BaseException | None = None
        began = time.perf_counter()
        try:
            call.work(entry.value)
        except BaseException as caught:
            error = caught
        seconds = time.perf_counter() - began
        with self._lock:
            call.busy -= busy
            self._unpin(entry)
            call.pinned.pop(entry.key, None)
            self._counters.compute_seconds += seconds
            if error is not None:
                self._fail(call, error)
        call.news.put(None)

    def _unpin(self, entry: Entry) -> None:
        """Nobody needs an entry where it is any more: its slot may go to one that waits."""
        entry.pins = 0
        self._table.settle(entry)
        if self._demand or self._ahead:
            self._wanted.notify()

    def _fail(self, call: _Call, error: BaseException) -> None:
        """Stop a call; the first error counts."""
        call.error = call.error or error
        call.stopped = True
        call.news.put(None)

    def _end(self, call: _Call) -> None:
        """Wait for running work, and let go of whatever was not worked on."""
        with self._lock:
            call.stopped = True
        try:
            wait_out(lambda: not call.busy, call.news)
        finally:
            with self._lock:
                self._call = None
                for entry in call.pinned.values():
                    if self._table.holds(entry) and entry.state is State.WAITING:
                        self._table.drop(entry)
                    self._unpin(entry)

    def _read_on(self) -> None:
        """What a reading thread does: what is needed first, then what is expected."""
        try:
            while True:
                with self._lock:
                    while (entry := self._next()) is None and not self._closed:
                        self._wanted.wait()
                if entry is None:
                    return
                self._read(entry)
        except BaseException as error:  # rather than let the asking thread wait for ever
            with self._lock:
                self._broken = error
                if self._call is not None:
                    self._fail(self._call, error)

    def _next(self) -> Entry | None:
        """The next entry to read, with a slot; None if there is none, or no room for it.

        Queues may still hold what was dropped or has come into the other queue since.
        """
        for queue in (self._demand, self._ahead):
            while queue and (queue[0].state is not State.WAITING or not self._table.holds(queue[0])):
                queue.popleft()
            if queue:
                early = queue is self._ahead
                if (early and self._ahead_reads == AHEAD_READERS) or not self._table.take_slot(queue[0]):
                    return None
                queue[0].early = early
                self._ahead_reads += early
                self._counters.ahead_reads += early
                self._counters.evictions = self._table.evictions
                return queue.popleft()
        return None

    def _read(self, entry: Entry) -> None:
        assert self._slots is not None
        value: Expert | None = None
        error: BaseException | None = None
        length, began = 0, time.perf_counter()
        try:
            value = self._loader.load(entry.layer, entry.expert, self._slots[entry.slot])
            length = self._loader.read_bytes(entry.layer, entry.expert)
        except BaseException as caught:
            error = caught
        seconds = time.perf_counter() - began
        with self._lock:
            self._counters.reads += 1
            self._counters.bytes_read += length
            self._counters.read_seconds += seconds
            self._ahead_reads -= entry.early
            call = self._call if self._call is not None and entry.key in self._call.pinned else None
            if error is not None:
                self._table.drop(entry)  # if it was only expected, whoever needs it will read it again and hear of it
                entry.expected = False
                if call is not None:
                    self._fail(call, error)
                return
            entry.value, entry.state = value, State.READY
            self._table.settle(entry)
            if call is not None:
                call.ready.append(entry)
                call.news.put(None)
                self._hire(call)
            elif self._demand or self._ahead:
                self._wanted.notify()
