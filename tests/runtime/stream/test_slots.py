"""The cache's tables, without threads: who gets a slot, and whose."""

from __future__ import annotations

from runtime.stream.policy import Recency
from runtime.stream.slots import Entry, State, Table


def table(count: int) -> Table:
    return Table(count, Recency(100))


def put(where: Table, key: int, **marks: object) -> Entry:
    """An entry that is ready in a slot."""
    entry = Entry(key, 0, key)
    where.entries[key] = entry
    assert where.take_slot(entry)
    assert entry.state is State.READING
    entry.state = State.READY
    for name, value in marks.items():
        setattr(entry, name, value)
    where.settle(entry)
    return entry


def ask(where: Table, key: int, **marks: object) -> bool:
    """Whether a new entry gets a slot."""
    entry = Entry(key, 0, key, **marks)  # type: ignore[arg-type]
    where.entries[key] = entry
    return where.take_slot(entry)


def test_each_slot_is_given_once() -> None:
    cache = table(3)
    slots = [put(cache, key).slot for key in range(3)]
    assert sorted(slots) == [0, 1, 2]
    assert cache.evictions == 0


def test_the_policy_chooses_who_leaves() -> None:
    import numpy as np

    cache = table(2)
    put(cache, 1), put(cache, 2)
    cache.policy.use(np.array([1, 2, 1]))
    assert ask(cache, 3)
    assert sorted(cache.entries) == [1, 3]
    assert cache.evictions == 1


def test_who_is_pinned_or_being_read_stays() -> None:
    cache = table(2)
    put(cache, 1, pins=1)
    entry = put(cache, 2)
    entry.state = State.READING
    cache.settle(entry)
    assert not ask(cache, 3)
    assert cache.entries[3].slot == -1
    assert {1, 2} <= cache.entries.keys()
    cache.entries[1].pins = 0
    cache.settle(cache.entries[1])
    assert cache.take_slot(cache.entries[3])
    assert 1 not in cache.entries


def test_who_is_expected_leaves_only_for_need() -> None:
    cache = table(2)
    put(cache, 1, expected=True), put(cache, 2, expected=True)
    assert not ask(cache, 3, expected=True)
    assert ask(cache, 4, pins=1, expected=True)
    assert cache.entries.keys() == {2, 3, 4}
    cache.entries[4].state, cache.entries[4].pins, cache.entries[4].expected = State.READY, 0, False
    cache.settle(cache.entries[4])
    assert ask(cache, 5, pins=1)  # the one that nobody expects leaves, although it was used last
    assert cache.entries.keys() == {2, 3, 5}


def test_a_dropped_entry_leaves_its_slot_free() -> None:
    cache = table(1)
    entry = put(cache, 1)
    cache.drop(entry)
    assert not cache.holds(entry)
    assert entry.slot == -1
    assert ask(cache, 2)
    assert cache.evictions == 0


def test_an_entry_that_was_replaced_is_not_held() -> None:
    cache = table(1)
    first = put(cache, 1)
    cache.drop(first)
    second = put(cache, 1)
    assert cache.holds(second)
    assert not cache.holds(first)
