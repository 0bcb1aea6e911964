"""What is to be read next, part by part: what is needed first, then what is only expected. Without threads.

A part is some megabytes, and several reads are under way at a time. Long experts come in several parts, so that those
of a layer arrive one after another, and a read of something expected soon gives way to what is needed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from runtime.stream.slots import Entry, State, Table


@dataclass(frozen=True)
class Part:
    """One read.

    Attributes:
        entry: whose it is; it has a slot.
        number: of the part in its expert, from 0.
        early: it is read because its expert is expected.
        first: it is the first one of its expert.
    """

    entry: Entry
    number: int
    early: bool
    first: bool


@dataclass
class Pending:
    """The parts that nobody reads yet.

    An expert of which a part was handed out comes before those that have not begun, for it holds a slot. A queue may
    also hold what was dropped, given up or handed out, or stands in the other queue by now.

    Attributes:
        table: where slots come from.
        early_reads: parts of what is only expected that are read at a time, at the most.
    """

    table: Table
    early_reads: int
    _needed: deque[Entry] = field(default_factory=deque)
    _expected: deque[Entry] = field(default_factory=deque)
    _early: int = 0
    _no_room: bool = False  # the last look found something to read and no slot for it

    @property
    def at_hand(self) -> bool:
        """Whether another reader would probably find something; one that looks in vain costs a change of threads."""
        early = bool(self._expected) and self._early < self.early_reads
        return early or (bool(self._needed) and not self._no_room)

    def room(self) -> bool:
        """A slot may be had now; whether that is what the last look for something to read found missing."""
        missed, self._no_room = self._no_room, False
        return missed

    def clear(self) -> None:
        """Nothing is to be read any more."""
        self._needed.clear()
        self._expected.clear()

    def need(self, entry: Entry) -> None:
        """Read what is left of a pinned entry, after what is needed already."""
        _queue(self._needed, entry)

    def expect(self, entry: Entry) -> None:
        """Read what is left of an entry that is not pinned when nothing else is to be read."""
        _queue(self._expected, entry)

    def give_up(self, entry: Entry) -> None:
        """Nobody wants an entry that is not whole: what is left of it is not read; it goes when nobody reads of it."""
        if not entry.under_way:
            self.table.drop(entry)
        elif entry.handed < entry.parts:
            entry.given_up = True

    def next(self) -> Part | None:
        """The next part, for a reader that says ``ended`` afterwards; None if there is none, or no room for it."""
        self._no_room = False
        for queue in (self._needed, self._expected):
            early = queue is self._expected
            while queue and not self._is_left(queue[0], early):
                queue.popleft()
            if not queue or (early and self._early == self.early_reads):
                continue
            entry = queue[0]
            first = entry.state is State.WAITING
            if first and not self.table.take_slot(entry):
                self._no_room = True
                continue  # what is expected and has begun may be in the way: it goes on
            number, entry.handed, entry.under_way = entry.handed, entry.handed + 1, entry.under_way + 1
            self._early += early
            return Part(entry, number, early, first)
        return None

    def ended(self, part: Part) -> bool:
        """A read has ended, one way or the other; whether nothing of its entry is to be read any more."""
        entry = part.entry
        entry.under_way -= 1
        self._early -= part.early
        return not entry.under_way and (entry.given_up or entry.handed == entry.parts)

    def _is_left(self, entry: Entry, early: bool) -> bool:
        """Whether there is something to read in the queue for what is expected, or needed."""
        left = entry.handed < entry.parts and not entry.given_up
        return left and self.table.holds(entry) and (entry.pins == 0) == early


def _queue(queue: deque[Entry], entry: Entry) -> None:
    entry.given_up = False
    if entry.state is State.WAITING:
        queue.append(entry)
    elif entry.handed < entry.parts:
        queue.appendleft(entry)
