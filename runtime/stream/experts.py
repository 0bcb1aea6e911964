"""A bounded cache of experts that are read as they are needed, or a little before, and worked on as they arrive.

One thread asks (``compute``); a few threads read, and do nothing else, so that the device never waits for a processor;
the asking thread and the helpers of its :class:`~runtime.threads.Workers` prove what was read and do the work.
Everything that they share is in one table under one lock, which nobody holds while reading, proving or working.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Protocol

import numpy as np

from formats.starting import start_some
from runtime.store import Expert
from runtime.stream.call import Call, Job
from runtime.stream.direct import readers_for
from runtime.stream.memory import Slots
from runtime.stream.numbering import Numbering
from runtime.stream.pending import Part, Pending
from runtime.stream.policy import Frequency, Policy
from runtime.stream.slots import Entry, State, Table
from runtime.stream.statistics import StreamStatistics
from runtime.threads import Workers, wait_out

# Of the reads under way, one in so many may be of what is only expected: a read that has begun cannot give way.
EARLY_ONE_IN = 3


class ExpertLoader(Protocol):
    """Where experts come from. Safe to use from several threads."""

    @property
    def layer_experts(self) -> tuple[int, ...]:
        """How many experts each layer has, 0 for dense layers."""

    @property
    def slot_bytes(self) -> int:
        """What the largest expert takes."""

    @property
    def part_bytes(self) -> int:
        """What the largest part of an expert takes."""

    def parts(self, layer: int, expert: int) -> int:
        """How many reads bring an expert in, at least one. Parts may be read at the same time, in any order."""

    def read(self, layer: int, expert: int, part: int, slot: memoryview) -> int:
        """Read a part of an expert into its slot, and do nothing else; returns how many bytes.

        Raises:
            MoepackError: it cannot be read.
        """

    def is_proved(self, layer: int, expert: int) -> bool:
        """Whether an expert, of which all parts have been read, needs no proof; takes no time."""

    def prove(self, layer: int, expert: int, slot: memoryview) -> None:
        """Prove that what was read into a slot is what was once recorded.

        Raises:
            MoepackError: it is not.
        """

    def view(self, layer: int, expert: int, slot: memoryview) -> Expert:
        """The expert that was read into a slot, of which its matrices are views; nothing in a slot does any harm.

        Raises:
            MoepackError: it is malformed.
        """


class ExpertStream:
    """The routed experts of a model in a fixed number of slots. One thread at a time asks; close it."""

    def __init__(
        self,
        loader: ExpertLoader,
        *,
        slots: int,
        workers: Workers,
        readers: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        """
        Args:
            loader: of experts; what it reads from stays open as long as this is used.
            slots: how many experts are in memory at the most, at least one if there are any. A layer may ask for more:
                they flow through.
            workers: whose helpers take part in the work.
            readers: reads under way at a time; by default as many as suit their length.
            policy: who leaves first; by default the least frequently used.
        """
        counts = loader.layer_experts
        if slots < 1 and any(counts):
            raise ValueError("at least one slot")
        self._loader, self._workers = loader, workers
        self._numbering = Numbering(counts)
        self._policy = policy or Frequency(counts)
        self._slots = Slots(slots, loader.slot_bytes) if slots else None
        self._table = Table(slots, self._policy)
        count = (readers or readers_for(loader.part_bytes)) if slots else 0
        self._pending = Pending(self._table, early_reads=max(count // EARLY_ONE_IN, 1))
        self._expected: dict[int, list[Entry]] = {}  # by layer
        self._call: Call | None = None
        self._closed = False
        self._counters = SimpleNamespace(**asdict(StreamStatistics()))
        self._broken: BaseException | None = None
        self._lock = threading.Lock()
        # For readers: there may be something to read, or room for it. One is woken, and wakes another if there is more.
        self._wanted = threading.Condition(self._lock)
        self._readers = list(
            start_some(
                threading.Thread(target=self._read_on, name=f"moepack-reader-{number}", daemon=True)
                for number in range(count)
            )
        )

    def close(self) -> None:
        """End all reading threads, after the reads that they are at. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._pending.clear()
            self._wanted.notify_all()
        for reader in self._readers:
            reader.join()

    def statistics(self) -> StreamStatistics:
        """What was done so far."""
        with self._lock:
            return StreamStatistics(**vars(self._counters))

    def present(self) -> list[Expert]:
        """The experts that have been worked on and still are in memory; good until the next request or expectation."""
        with self._lock:
            entries = list(self._table.entries.values())
            return [entry.value for entry in entries if entry.value and entry.proved and entry.state is State.READY]

    @property
    def complete(self) -> bool:
        """As of :class:`runtime.store.Experts`: each has a slot or waits for one."""
        with self._lock:
            return len(self._table.entries) == sum(self._loader.layer_experts)

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
                ended, and every slot is as good as before. After an interruption at the very end the next call sees to
                that, before anything else.
        """
        keys = [self._numbering.key(layer, expert) for expert in chosen]
        if len(set(keys)) != len(keys):
            raise ValueError("an expert is chosen twice")
        if self._call is not None:  # an interruption hit the end of the last call
            self._end(self._call)
        call = Call(work)
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
        keys = [self._numbering.key(layer, expert) for expert in likely[: self._table.count]]
        with self._lock:
            self._forget_expected(layer)
            expected = self._expected.setdefault(layer, [])
            for key, expert in zip(keys, likely, strict=False):
                entry = self._table.entries.get(key)
                if entry is None:
                    entry = self._table.entries[key] = self._entry(key, layer, expert)
                    entry.ahead = True
                if not entry.pins:
                    self._pending.expect(entry)
                expected.append(entry)
                entry.expected = True
                self._table.settle(entry)
            self._wanted.notify()

    def _entry(self, key: int, layer: int, expert: int) -> Entry:
        """An expert that is not in memory."""
        return Entry(key, layer, expert, parts=self._loader.parts(layer, expert))

    def _begin(self, call: Call, layer: int, chosen: Sequence[int], keys: Sequence[int]) -> None:
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
                entry = self._table.entries.get(key) or self._entry(key, layer, expert)
                call.pinned[key] = entry
                self._table.entries[key] = entry
                used += entry.ahead and entry.state is not State.WAITING
                entry.pins, entry.expected, entry.ahead = 1, False, False
                if entry.state is State.READY:
                    hits += 1
                    call.offer(entry)
                else:
                    joined += entry.state is State.READING
                    self._pending.need(entry)
                self._table.settle(entry)
            self._forget_expected(layer)
            counters = self._counters
            counters.hits += hits
            counters.joined += joined
            counters.misses += len(keys) - hits - joined
            counters.ahead_used += used
            self._wanted.notify()
            self._hire(call)

    def _forget_expected(self, layer: int) -> None:
        """The layer has come, or is expected otherwise: what was expected and still is in no slot need not be read."""
        for entry in self._expected.get(layer, ()):
            if not entry.expected or not self._table.holds(entry):
                continue  # it was asked for, or had to leave
            entry.expected = False
            self._table.settle(entry)
            if entry.state is not State.READY and not entry.pins:  # or it is needed as well, right now
                self._pending.give_up(entry)
        self._expected.pop(layer, None)

    def _hire(self, call: Call) -> None:
        """Ask helpers to take part, at most one for each job."""
        while call.helpers < min(len(call.ready), self._workers.threads - 1):
            call.helpers += 1
            self._workers.submit(partial(self._help, call))

    def _help(self, call: Call) -> None:
        """What a helper does: do jobs until there are none."""
        while True:
            with self._lock:
                job = call.take()
                if job is None:
                    call.helpers -= 1
                    return
                call.busy += 1
            self._do(call, job, helping=True)

    def _take_part(self, call: Call) -> None:
        """What the asking thread does: the same, and wait for the rest."""
        while True:
            with self._lock:
                if call.error is not None or not call.pinned:
                    return
                job = call.take()
                idle = call.busy == 0
            if job is not None:
                self._do(call, job, helping=False)
                continue
            began = time.perf_counter()
            self._workers.wait(call.news)
            if idle:  # nobody worked meanwhile
                with self._lock:
                    self._counters.stall_seconds += time.perf_counter() - began

    def _do(self, call: Call, job: Job, *, helping: bool) -> None:
        """Do a job, and let go of the expert if it was the last one."""
        assert self._slots is not None
        entry, error = job.entry, None
        name, slot = (entry.layer, entry.expert), self._slots[entry.slot]
        began = time.perf_counter()
        try:
            if job.proves:
                self._loader.prove(*name, slot)
            else:
                entry.value = entry.value or self._loader.view(*name, slot)
                call.work(entry.value)
        except BaseException as caught:
            error = caught
        seconds = time.perf_counter() - began
        with self._lock:
            call.busy -= helping
            if job.proves:
                self._counters.proofs += 1
                self._counters.proof_seconds += seconds
            else:
                self._counters.compute_seconds += seconds
            if call.ended(job, error) and entry.error is None:
                self._unpin(entry)
                call.pinned.pop(entry.key, None)
        call.news.put(None)

    def _unpin(self, entry: Entry) -> None:
        """Nobody needs an entry where it is any more: its slot may go to one that waits."""
        entry.pins = 0
        self._table.settle(entry)
        if self._pending.room():
            self._wanted.notify()

    def _end(self, call: Call) -> None:
        """Wait for running work, and let go of whatever was not worked on."""
        with self._lock:
            call.stopped = True
        try:
            wait_out(lambda: not call.busy, partial(self._workers.wait, call.news))
        finally:
            with self._lock:
                if not call.busy:  # or an interruption hit the waiting itself, and the next call waits
                    self._let_go(call)
                    self._call = None

    def _let_go(self, call: Call) -> None:
        """Unpin what was not worked on. May be done again: what was let go of stays as it is."""
        for entry in call.pinned.values():
            if not self._table.holds(entry):
                continue
            self._unpin(entry)
            if entry.state is not State.READY:
                self._pending.give_up(entry)
            elif entry.proved:
                entry.error = None  # that of the work: the expert is as good as ever
            else:
                self._table.drop(entry)

    def _read_on(self) -> None:
        """What a reading thread does: what is needed first, then what is expected."""
        try:
            while True:
                with self._lock:
                    while (part := self._pending.next()) is None and not self._closed:
                        self._wanted.wait()
                    if part is None:
                        return
                    if self._pending.at_hand:
                        self._wanted.notify()
                    self._counters.ahead_reads += part.early and part.first
                    self._counters.evictions = self._table.evictions
                self._read(part)
        except BaseException as error:  # rather than let the asking thread wait for ever
            with self._lock:
                self._broken = error
                if self._call is not None:
                    self._call.fail(error)

    def _read(self, part: Part) -> None:
        assert self._slots is not None
        entry = part.entry
        error: BaseException | None = None
        length, began = 0, time.perf_counter()
        try:
            length = self._loader.read(entry.layer, entry.expert, part.number, self._slots[entry.slot])
        except BaseException as caught:
            error = caught
        seconds = time.perf_counter() - began
        with self._lock:
            self._counters.read_seconds += seconds
            self._counters.bytes_read += length
            if error is not None:
                entry.error = entry.error or error
                entry.handed = entry.parts  # no more of it
            if not self._pending.ended(part):
                return
            if entry.given_up:
                self._table.drop(entry)
                return
            self._counters.reads += 1
            call = self._call if self._call is not None and entry.key in self._call.pinned else None
            if entry.error is not None:
                self._table.drop(entry)  # if it was only expected, whoever needs it will read it again and hear of it
                entry.expected = False
                if call is not None:
                    call.fail(entry.error)
                return
            entry.state, entry.proved = State.READY, self._loader.is_proved(entry.layer, entry.expert)
            self._table.settle(entry)
            if call is not None:
                call.offer(entry)
                call.news.put(None)
                self._hire(call)
