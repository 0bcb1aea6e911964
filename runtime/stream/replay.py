"""What a cache would have hit: recorded requests, played to any policy and number of slots without reading anything.

The tables are those of the stream; what is left out is time. Every read is taken to end before the next request, so the
look-ahead is as good as its guesses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from runtime.store import Expert, Experts
from runtime.stream.numbering import Numbering
from runtime.stream.policy import Frequency, Policy, Recency
from runtime.stream.slots import Entry, State, Table


@dataclass(frozen=True)
class Request:
    """One request of a model.

    Attributes:
        layer: which asks.
        chosen: the experts that it uses.
        expected: (layer, experts) that were named as likely next while it was served; None for none.
    """

    layer: int
    chosen: tuple[int, ...]
    expected: tuple[int, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a trace: experts asked for, found in a slot, and read early; all reads."""

    asked: int
    hits: int
    ahead_reads: int
    ahead_used: int
    reads: int

    @property
    def hit_rate(self) -> float:
        """The part of what was asked for that was in a slot."""
        return self.hits / self.asked if self.asked else 0.0


class Recorder:
    """Experts that note what is asked of them."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self._expected: list[tuple[int, tuple[int, ...]]] = []
        self.requests: list[Request] = []

    @property
    def complete(self) -> bool:
        """What is expected is to be noted, whether or not it makes a difference."""
        return False

    def compute(
        self,
        layer: int,
        chosen: Sequence[int],
        work: Callable[[Expert], None],
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Pass on, and note."""
        self._expected.clear()
        self._experts.compute(layer, chosen, work, meanwhile)
        self.requests.append(Request(layer, tuple(chosen), self._expected[-1] if self._expected else None))

    def expect(self, layer: int, likely: Sequence[int]) -> None:
        """Pass on, and note."""
        self._expected.append((layer, tuple(likely)))
        self._experts.expect(layer, likely)


class Cache:
    """The tables of a cache without its bytes, played one request at a time.

    Attributes:
        asked, hits, ahead_reads, ahead_used, misses: so far.
    """

    def __init__(self, layer_experts: Sequence[int], slots: int, policy: Policy, *, ahead: int = 0) -> None:
        """
        Args:
            layer_experts: how many each layer has.
            slots: of the cache.
            policy: fresh; it is used up.
            ahead: how many of the expected experts are read early, at the most.
        """
        self._numbering = Numbering(layer_experts)
        self._table, self._policy, self._ahead = Table(slots, policy), policy, min(ahead, slots)
        self._expected: list[Entry] = []
        self.asked = self.hits = self.ahead_reads = self.ahead_used = self.misses = 0

    def play(self, request: Request) -> list[int]:
        """Serve a request; the experts of its layer that had to be read for it."""
        table = self._table
        named = {self._numbering.key(request.layer, expert): expert for expert in request.chosen}
        keys = list(named)
        self._policy.use(np.array(keys, np.int64))
        here = [table.entries[key] for key in keys if key in table.entries]
        self.asked += len(keys)
        self.hits += len(here)
        self.ahead_used += sum(entry.ahead for entry in here)
        for entry in here:
            entry.pins, entry.ahead = 1, False
        _settle(table, [*self._expected, *here], expected=False)
        missing = [key for key in keys if key not in table.entries]
        for key in missing:
            entry = Entry(key, request.layer, named[key], pins=1)
            if not _place(table, entry):
                for done in here:  # a layer that asks for more than fits: what was worked on makes room
                    done.pins = 0
                _settle(table, here)
                here = []
                _place(table, entry)
            here.append(entry)
        self.misses += len(missing)
        for entry in here:
            entry.pins = 0
        _settle(table, here)
        self._expected = self._look_ahead(*request.expected) if request.expected else []
        return [named[key] for key in missing]

    def _look_ahead(self, layer: int, likely: Sequence[int]) -> list[Entry]:
        """Read what is likely early, as far as there is room; what is there now."""
        expected = []
        for expert in likely[: self._ahead]:
            key = self._numbering.key(layer, expert)
            found = self._table.entries.get(key)
            if found is None:
                found = Entry(key, layer, expert, expected=True, ahead=True)
                if not _place(self._table, found):
                    break
                self.ahead_reads += 1
            found.expected = True
            expected.append(found)
        _settle(self._table, expected)
        return expected


def replay(
    requests: Sequence[Request], layer_experts: Sequence[int], slots: int, policy: Policy, *, ahead: int = 0
) -> Outcome:
    """Play a trace; arguments as in :class:`Cache`."""
    cache = Cache(layer_experts, slots, policy, ahead=ahead)
    for request in requests:
        cache.play(request)
    return Outcome(cache.asked, cache.hits, cache.ahead_reads, cache.ahead_used, cache.misses + cache.ahead_reads)


def _place(table: Table, entry: Entry) -> bool:
    """Give an entry a slot if there is one to be had, as if it had been read at once."""
    table.entries[entry.key] = entry
    if not table.take_slot(entry):
        table.drop(entry)
        return False
    entry.state = State.READY
    table.settle(entry)
    return True


def _settle(table: Table, entries: Sequence[Entry], *, expected: bool | None = None) -> None:
    for entry in entries:
        entry.expected = entry.expected if expected is None else expected
        table.settle(entry)


@dataclass(frozen=True)
class Contender:
    """A policy, by name, as it is made for the experts of each layer, and how far it looks ahead."""

    name: str
    make: Callable[[Sequence[int]], Policy]
    ahead: int = 0


def contenders(ahead: int, half_lives: Sequence[float]) -> tuple[Contender, ...]:
    """Recency and frequency, each with and without look-ahead; and frequency that does not mind whose turn it is.

    Args:
        ahead: experts that are read early.
        half_lives: of uses, in passes over all layers.
    """
    policies: dict[str, Callable[[Sequence[int]], Policy]] = {
        "least recently used": lambda layer_experts: Recency(sum(layer_experts)),
        "least used, whosever turn it is": lambda layer_experts: Frequency(layer_experts, waiting=0.0),
    }
    for half_life in half_lives:
        label = "for ever" if math.isinf(half_life) else f"half life {half_life:g}"
        policies[f"least used, {label}"] = partial(Frequency, half_life=half_life)
    return tuple(
        Contender(f"{name}{suffix}", make, count)
        for suffix, count in (("", 0), (f", {ahead} ahead", ahead))
        for name, make in policies.items()
    )


def compare(
    requests: Sequence[Request], layer_experts: Sequence[int], slots: Sequence[int], among: Sequence[Contender]
) -> list[tuple[Contender, list[Outcome]]]:
    """For each contender the outcome with each number of slots."""
    return [
        (
            contender,
            [
                replay(requests, layer_experts, count, contender.make(layer_experts), ahead=contender.ahead)
                for count in slots
            ],
        )
        for contender in among
    ]
