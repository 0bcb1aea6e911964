"""What is read next, without threads: needed before expected, what has begun before what has not."""

from __future__ import annotations

from runtime.stream.pending import Part, Pending
from runtime.stream.policy import Recency
from runtime.stream.slots import Entry, State, Table


def pending(slots: int, early_reads: int = 2) -> Pending:
    return Pending(Table(slots, Recency(100)), early_reads)


def entry(where: Pending, key: int, *, parts: int = 2, pins: int = 0) -> Entry:
    """An entry in the table that is needed if it is pinned, and else expected."""
    made = where.table.entries[key] = Entry(key, 0, key, parts=parts, pins=pins)
    (where.need if pins else where.expect)(made)
    return made


def handed(where: Pending) -> list[tuple[int, int]]:
    """All parts that can be handed out, none of them ending."""
    found = []
    while (part := where.next()) is not None:
        found.append((part.entry.key, part.number))
    return found


def test_parts_come_in_order_and_each_once() -> None:
    where = pending(4)
    entry(where, 1, pins=1), entry(where, 2, parts=1, pins=1)
    assert handed(where) == [(1, 0), (1, 1), (2, 0)]
    assert not where.at_hand


def test_needed_before_expected_and_few_of_those() -> None:
    where = pending(4, early_reads=3)
    entry(where, 1), entry(where, 2), entry(where, 3, pins=1)
    assert handed(where) == [(3, 0), (3, 1), (1, 0), (1, 1), (2, 0)]


def test_what_has_begun_comes_first() -> None:
    where = pending(4, early_reads=1)
    begun = entry(where, 1)
    first = where.next()
    assert first == Part(begun, 0, early=True, first=True)
    entry(where, 2, pins=1)
    begun.pins = 1
    where.need(begun)
    assert where.next() == Part(begun, 1, early=False, first=False)
    assert handed(where) == [(2, 0), (2, 1)]


def test_no_slot_no_part() -> None:
    where = pending(1)
    one = entry(where, 1, parts=1, pins=1)
    entry(where, 2, parts=1, pins=1)
    part = where.next()
    assert part is not None
    assert where.next() is None
    assert where.ended(part)
    one.state, one.pins = State.READY, 0
    where.table.settle(one)
    assert handed(where) == [(2, 0)]


def test_what_is_expected_goes_on_if_it_is_in_the_way() -> None:
    where = pending(1)
    entry(where, 1, parts=3)
    part = where.next()
    assert part is not None
    entry(where, 2, pins=1)
    assert handed(where) == [(1, 1)]
    assert not where.ended(part)
    assert handed(where) == [(1, 2)]


def test_giving_up() -> None:
    """What waits goes at once; what is being read goes when it has ended; what is whole soon stays."""
    where = pending(4)
    waiting, paused, reading = entry(where, 1), entry(where, 2, pins=1), entry(where, 3, pins=1)
    parts = [where.next(), where.next()]
    third = where.next()
    assert [part.entry for part in (*parts, third) if part is not None] == [paused, paused, reading]
    for given in (waiting, paused, reading):
        given.pins = 0
        where.give_up(given)
    assert where.table.entries.keys() == {2, 3}
    assert handed(where) == []
    assert third is not None
    assert reading.given_up
    assert not paused.given_up
    assert where.ended(third)
    assert [where.ended(part) for part in parts if part is not None] == [False, True]


def test_wanted_again_before_it_has_gone() -> None:
    where = pending(4)
    again = entry(where, 1, pins=1)
    part = where.next()
    again.pins = 0
    where.give_up(again)
    again.pins = 1
    where.need(again)
    assert handed(where) == [(1, 1)]
    assert part is not None
    assert not where.ended(part)


def test_what_is_at_hand_for_another_reader() -> None:
    where = pending(2, early_reads=1)
    assert not where.at_hand
    entry(where, 1)
    assert where.at_hand
    early = where.next()
    assert early is not None
    assert not where.at_hand  # as many early reads as may be
    entry(where, 2, pins=1, parts=1)
    assert where.at_hand
    assert where.next() is not None
    entry(where, 3, pins=1)
    assert where.at_hand
    assert where.next() is None
    assert not where.at_hand  # both slots are being read into
    assert where.room()  # and whoever makes room should say so
    assert where.at_hand
    assert not where.room()  # once
    where.ended(early)
    assert where.at_hand
