"""Who is in which slot, and who may be asked to leave: the cache's tables, without threads."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from runtime.store import Expert
from runtime.stream.policy import Policy


class State(Enum):
    """Of an entry: waiting to be read, read in part, or whole in its slot."""

    WAITING = 1
    READING = 2
    READY = 3


@dataclass
class Entry:
    """An expert that is in a slot or on its way there.

    Attributes:
        key: its number over all layers.
        layer, expert: its name.
        parts: how many reads bring it in.
        handed: of them, how many were handed to a reader.
        under_way: of these, how many have not ended.
        given_up: the rest is not to be read, and it is dropped when what is under way has ended.
        value: its matrices, from the first work on it on.
        proved: what is in the slot is what it should be.
        error: that of a read of it, of its proof, or of work on it while it was not proved yet.
        pins: how many need it where it is.
        expected: it was asked for by a look-ahead whose layer has not come yet.
        ahead: it was read because it was expected, and has not been asked for since.
    """

    key: int
    layer: int
    expert: int
    parts: int = 1
    handed: int = 0
    under_way: int = 0
    given_up: bool = False
    state: State = State.WAITING
    slot: int = -1
    value: Expert | None = None
    proved: bool = False
    error: BaseException | None = None
    pins: int = 0
    expected: bool = False
    ahead: bool = False


@dataclass
class Table:
    """The entries of ``count`` slots."""

    count: int
    policy: Policy
    entries: dict[int, Entry] = field(default_factory=dict)
    evictions: int = 0

    def __post_init__(self) -> None:
        self._free = list(range(self.count - 1, -1, -1))
        self._owner = np.full(self.count, -1, np.int64)
        self._loose = np.zeros(self.count, bool)  # ready and not pinned
        self._expected = np.zeros(self.count, bool)

    def holds(self, entry: Entry) -> bool:
        """Whether an entry is in the table, and not one that was dropped."""
        return self.entries.get(entry.key) is entry

    def settle(self, entry: Entry) -> None:
        """Bring the tables in line with an entry's state, pins and expectation."""
        if entry.slot >= 0:
            self._loose[entry.slot] = entry.state is State.READY and entry.pins == 0
            self._expected[entry.slot] = entry.expected

    def take_slot(self, entry: Entry) -> bool:
        """Give a waiting entry a slot, if need be that of another; False if there is none to be had.

        Nobody makes room who is being read or in use. One that is expected makes room only for one that is needed now,
        and only if nobody else can.
        """
        if self._free:
            slot = self._free.pop()
        else:
            places = np.flatnonzero(self._loose & ~self._expected)
            if not places.size and entry.pins:
                places = np.flatnonzero(self._loose)
            if not places.size:
                return False
            slot = int(places[self.policy.least(self._owner[places])])
            leaving = self.entries.pop(int(self._owner[slot]))
            leaving.slot = -1
            self.evictions += 1
        entry.slot, entry.state = slot, State.READING
        self._owner[slot] = entry.key
        self.settle(entry)
        return True

    def drop(self, entry: Entry) -> None:
        """Forget an entry that could not be read, or need not be read any more; its slot is free."""
        del self.entries[entry.key]
        if entry.slot >= 0:
            self._loose[entry.slot] = self._expected[entry.slot] = False
            self._owner[entry.slot] = -1
            self._free.append(entry.slot)
            entry.slot = -1
