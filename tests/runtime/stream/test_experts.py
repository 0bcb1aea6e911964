"""The stream of experts: right weights for every expert, whoever reads, works or waits; errors end a layer cleanly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from formats.encoded import RawMatrix
from formats.errors import FormatError, UsageError
from runtime.store import Expert
from runtime.stream.direct import readers_for
from runtime.stream.experts import ExpertStream
from runtime.stream.policy import Recency
from runtime.threads import Workers
from tests.runtime.stream.fake_loader import SLOT, FakeLoader, values_of


@contextmanager
def streaming(loader: FakeLoader, *, slots: int = 8, threads: int = 2, readers: int = 2) -> Iterator[ExpertStream]:
    before = threading.active_count()
    with Workers(threads) as workers:
        stream = ExpertStream(
            loader, slots=slots, workers=workers, readers=readers, policy=Recency(sum(loader.layer_experts))
        )
        try:
            yield stream
        finally:
            stream.close()
    assert threading.active_count() == before


class Sum:
    """Work that keeps what it saw, and insists that it saw the right weights."""

    def __init__(self, pause: float = 0.0) -> None:
        self.seen: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self._pause = pause

    def __call__(self, expert: Expert) -> None:
        time.sleep(self._pause)
        assert isinstance(expert.gate, RawMatrix)
        assert np.array_equal(expert.gate.values, values_of(expert.layer, expert.expert))
        self.threads.add(threading.get_ident())
        self.seen.append((expert.layer, expert.expert))


def until(condition: object, seconds: float = 20.0) -> None:
    """Wait until a function returns something true."""
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.001)


def compute(stream: ExpertStream, layer: int, chosen: Sequence[int]) -> Sum:
    work = Sum()
    stream.compute(layer, chosen, work)
    assert sorted(work.seen) == [(layer, expert) for expert in sorted(chosen)]
    return work


ROUTES = [
    (1, [0, 3, 5]),
    (2, [1, 2, 7]),
    (1, [3, 4, 5]),
    (2, [0, 1, 2]),
    (1, list(range(8))),
    (2, [7]),
    (1, []),
    (2, [3, 6]),
]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("readers", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("split", [1, 3])
def test_every_combination_gives_every_expert_once(
    slots: int, readers: int, threads: int, ahead: bool, split: int
) -> None:
    """Expectations are partly wrong on purpose, and one layer asks for more experts than there are slots."""
    loader = FakeLoader(delay=lambda layer, expert: 0.0005 * ((layer + 3 * expert) % 4), split=split)
    with streaming(loader, slots=slots, threads=threads, readers=readers) as stream:
        for number, (layer, chosen) in enumerate(ROUTES):
            work = Sum(0.0005)

            def meanwhile(number: int = number) -> None:
                if ahead and number + 1 < len(ROUTES):
                    following, coming = ROUTES[number + 1]
                    stream.expect(following, [*coming[::-1], 6, 5][:4] if 6 not in coming else coming)

            stream.compute(layer, chosen, work, meanwhile)
            assert sorted(work.seen) == [(layer, expert) for expert in chosen]
        done = stream.statistics()
    assert done.asked == sum(len(chosen) for _, chosen in ROUTES)
    assert len(loader.reads) == done.misses + done.ahead_reads
    assert done.reads == len(loader.reads) if split == 1 else done.misses <= done.reads <= len(loader.reads)
    assert done.bytes_read == sum((100 + expert) // split for _, expert, _ in loader.begun)
    assert len(loader.slots) <= slots
    assert loader.most <= min(readers, slots * split)
    assert done.ahead_used <= done.ahead_reads


def test_what_is_kept_is_not_read_again() -> None:
    loader = FakeLoader()
    with streaming(loader, slots=4) as stream:
        compute(stream, 1, [0, 1, 2])
        compute(stream, 1, [2, 1])
        assert sorted(loader.reads) == [(1, 0), (1, 1), (1, 2)]
        compute(stream, 2, [5, 6])  # 0 is the one used longest ago
        compute(stream, 1, [1, 2])
        done = stream.statistics()
    assert sorted(loader.reads) == [(1, 0), (1, 1), (1, 2), (2, 5), (2, 6)]
    assert (done.hits, done.misses, done.evictions, done.reads) == (4, 5, 1, 5)
    assert done.hit_rate == 4 / 9
    assert done.bytes_read == 100 + 101 + 102 + 105 + 106


def test_slots_are_the_ceiling() -> None:
    """Twelve experts flow through three slots; no other memory is written to."""
    loader = FakeLoader(layer_experts=(12,), delay=lambda layer, expert: 0.001)
    with streaming(loader, slots=3, readers=5, threads=3) as stream:
        compute(stream, 0, range(12))
        compute(stream, 0, range(12))
    assert len(loader.slots) == 3
    assert max(loader.slots) - min(loader.slots) == 2 * SLOT
    assert loader.most <= 3


def test_reads_go_on_while_the_caller_is_busy() -> None:
    """All reads are asked for before ``meanwhile``, which sees them end; it runs once, on the calling thread."""
    loader, calls = FakeLoader(), []
    with streaming(loader, threads=1) as stream:

        def meanwhile() -> None:
            until(lambda: len(loader.reads) == 3)
            calls.append(threading.get_ident())

        work = Sum()
        stream.compute(1, [0, 1, 2], work, meanwhile)
    assert calls == [threading.get_ident()]
    assert work.threads == {threading.get_ident()}


def test_helpers_begin_while_the_caller_is_busy() -> None:
    loader = FakeLoader()
    with streaming(loader, threads=2) as stream:
        work = Sum()
        stream.compute(1, [0, 1, 2], work, lambda: until(lambda: len(work.seen) == 3))
    assert threading.get_ident() not in work.threads


def test_what_is_here_comes_first() -> None:
    """Two experts are in their slots; work on them does not wait for the third."""
    loader = FakeLoader()
    with streaming(loader, threads=1) as stream:
        compute(stream, 1, [4, 5])
        loader.gate = threading.Event()
        work = Sum()

        def release(expert: Expert) -> None:
            work(expert)
            if len(work.seen) == 2:
                assert loader.gate is not None
                loader.gate.set()

        stream.compute(1, [0, 4, 5], release)
    assert work.seen == [(1, 4), (1, 5), (1, 0)]


def test_need_goes_before_expectation() -> None:
    """One reader: what is needed is read before what was expected earlier, but for a read that had begun."""
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1, threads=1) as stream:
        stream.expect(2, [6, 5, 4])
        until(lambda: loader.reads == [(2, 6)])

        def release() -> None:
            assert loader.gate is not None
            loader.gate.set()

        work = Sum()
        stream.compute(1, [1, 0], work, release)
        assert loader.reads[:3] == [(2, 6), (1, 1), (1, 0)]
        until(lambda: len(loader.reads) == 5)
        compute(stream, 2, [4, 5, 6, 7])
        done = stream.statistics()
    assert loader.reads == [(2, 6), (1, 1), (1, 0), (2, 5), (2, 4), (2, 7)]
    assert (done.ahead_reads, done.ahead_used, done.misses) == (3, 3, 3)


@pytest.mark.parametrize(("readers", "early"), [(3, 1), (6, 2), (8, 2)])
def test_few_reads_for_what_is_only_expected(readers: int, early: int) -> None:
    """Of many readers a third at a time read ahead, so that the others are there for what is needed."""
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=readers, slots=16) as stream:
        stream.expect(2, range(8))
        until(lambda: len(loader.reads) == early)
        work = Sum()
        needed = min(readers - early, 6)

        def release() -> None:
            until(lambda: len(loader.reads) == early + needed)
            assert sorted(loader.reads[:early]) == [(2, expert) for expert in range(early)]
            assert sorted(loader.reads[early:]) == [(1, expert) for expert in range(needed)]
            assert loader.gate is not None
            loader.gate.set()

        stream.compute(1, list(range(6)), work, release)
        until(lambda: stream.statistics().reads == 14)
        compute(stream, 2, range(8))
    assert len(loader.reads) == 14
    assert loader.most == readers


def test_short_reads_are_more_at_a_time() -> None:
    """About 32 MiB, but at least 3 reads and at most 8."""
    assert [readers_for(length) for length in (1, 4 << 20, 6 << 20, 8 << 20, 11 << 20, 1 << 40)] == [8, 8, 6, 4, 3, 3]


def test_experts_come_one_after_another() -> None:
    """Several readers share an expert, instead of bringing in several that are all late."""
    loader = FakeLoader(split=3, delay=lambda layer, expert: 0.003)
    with streaming(loader, readers=3) as stream:
        compute(stream, 1, [4, 0, 2])
    assert [expert for _, expert, _ in loader.begun] == [4, 4, 4, 0, 0, 0, 2, 2, 2]
    assert loader.most > 1


class Paused:
    """One reader, which has begun with an expected expert of three parts when something else is needed."""

    def __init__(self) -> None:
        self.loader = FakeLoader(gate=threading.Event(), split=3)

    def need(self, stream: ExpertStream) -> None:
        stream.expect(2, [6, 7])
        until(lambda: self.loader.begun == [(2, 6, 0)])
        assert self.loader.gate is not None
        stream.compute(1, [1], Sum(), self.loader.gate.set)


def test_what_is_expected_gives_way_between_its_parts() -> None:
    """What was needed comes first, then the rest of what was expected: no part is read twice."""
    paused = Paused()
    with streaming(paused.loader, readers=1) as stream:
        paused.need(stream)
        until(lambda: stream.statistics().reads == 3)
        compute(stream, 2, [6])
        done = stream.statistics()
    order = [(2, 6, 0), (1, 1, 0), (1, 1, 1), (1, 1, 2), (2, 6, 1), (2, 6, 2), (2, 7, 0), (2, 7, 1), (2, 7, 2)]
    assert paused.loader.begun == order
    assert (done.hits, done.misses, done.ahead_reads, done.ahead_used) == (1, 1, 2, 1)


def test_what_was_expected_in_vain_is_not_read_on() -> None:
    """Its layer needs other experts: what was read of it is forgotten, and its slot is free."""
    paused = Paused()
    with streaming(paused.loader, readers=1, slots=2) as stream:
        stream.expect(2, [6, 7])
        until(lambda: paused.loader.begun == [(2, 6, 0)])
        assert paused.loader.gate is not None
        stream.compute(2, [1, 2], Sum(), paused.loader.gate.set)
        compute(stream, 2, [1, 2])
        assert stream.statistics().bytes_read == 3 * (101 // 3) + 3 * (102 // 3) + 106 // 3
        compute(stream, 2, [6])
        done = stream.statistics()
    read_of_6 = [part for _, expert, part in paused.loader.begun if expert == 6]
    assert read_of_6 == [0, 0, 1, 2]
    assert (done.hits, done.misses, done.ahead_reads, done.ahead_used, done.reads) == (2, 3, 1, 0, 3)


def test_a_paused_expectation_in_the_only_slot_goes_on() -> None:
    paused = Paused()
    with streaming(paused.loader, readers=1, slots=1) as stream:
        paused.need(stream)
        compute(stream, 2, [6, 7])


# Proofs.


def test_an_expert_is_proved_once_while_it_stays() -> None:
    loader = FakeLoader()
    with streaming(loader, slots=2) as stream:
        for _ in range(3):
            compute(stream, 1, [0, 1])
        compute(stream, 2, [0, 1])
        compute(stream, 1, [0])
        assert stream.statistics().proofs == len(loader.proofs)
    assert sorted(loader.proofs) == [(1, 0), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_what_counts_as_proved_once_it_is_read_is_not_proved() -> None:
    loader = FakeLoader(proved=lambda layer, expert: (layer, expert, 0) in loader.begun and expert != 1)
    with streaming(loader) as stream:
        compute(stream, 1, [0, 1, 2])
    assert loader.proofs == [(1, 1)]


def test_an_expert_is_proved_while_it_is_worked_on() -> None:
    """Each of the two waits for the other."""
    meeting = threading.Barrier(2, timeout=20)
    loader = FakeLoader(proof=lambda layer, expert: meeting.wait() and None)
    with streaming(loader, threads=2) as stream:
        stream.compute(1, [3], lambda expert: meeting.wait() and None)
    assert loader.proofs == [(1, 3)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("work_fails", [False, True])
def test_a_failed_proof_ends_the_layer(threads: int, work_fails: bool) -> None:
    """Its error comes out even if the work on the unproved bytes failed before; what was read is not kept."""
    damaged = FormatError("record was changed", where="layer 1 expert 2")
    working = threading.Event()

    def proof(layer: int, expert: int) -> None:
        assert threads == 1 or expert != 2 or working.wait(20)

    def work(expert: Expert) -> None:
        if expert.expert == 2:
            working.set()
            if work_fails:
                raise ZeroDivisionError

    loader = FakeLoader(unsound={(1, 2): damaged}, proof=proof)
    with streaming(loader, threads=threads) as stream:
        for count in (1, 2):
            with pytest.raises(FormatError, match="layer 1 expert 2"):
                stream.compute(1, [2], work)
            assert loader.reads == [(1, 2)] * count
        compute(stream, 1, [0, 1])


def test_the_error_of_work_waits_for_the_proof() -> None:
    """The bytes were sound, so the error is the work's own, and the expert stays."""
    failed = threading.Event()
    loader = FakeLoader(proof=lambda layer, expert: failed.wait(20) and None)

    def work(expert: Expert) -> None:
        failed.set()
        raise ZeroDivisionError

    with streaming(loader, threads=2) as stream:
        with pytest.raises(ZeroDivisionError):
            stream.compute(1, [2], work)
        compute(stream, 1, [2])
    assert (loader.reads, loader.proofs) == ([(1, 2)], [(1, 2)])


def test_a_read_under_way_is_joined() -> None:
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1) as stream:
        stream.expect(1, [3])
        until(lambda: loader.reads == [(1, 3)])
        work = Sum()

        def release() -> None:
            assert loader.gate is not None
            loader.gate.set()

        stream.compute(1, [3], work, release)
        done = stream.statistics()
    assert loader.reads == [(1, 3)]
    assert (done.joined, done.hits, done.misses, done.ahead_used) == (1, 0, 0, 1)
    assert done.hit_rate == 1.0


def test_expected_and_waiting_becomes_needed() -> None:
    """An expectation that was not begun is read at once, and once, when it is needed; others of its layer are left."""
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1) as stream:
        stream.expect(1, [0, 1, 2, 3])
        until(lambda: loader.reads == [(1, 0)])

        def release() -> None:
            assert loader.gate is not None
            loader.gate.set()

        work = Sum()
        stream.compute(1, [3], work, release)
        compute(stream, 2, [0])
        done = stream.statistics()
    assert loader.reads == [(1, 0), (1, 3), (2, 0)]
    assert (done.misses, done.ahead_reads, done.ahead_used) == (2, 1, 0)


def test_a_new_expectation_replaces_the_old_one() -> None:
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1) as stream:
        stream.expect(1, [0, 1])
        until(lambda: loader.reads == [(1, 0)])
        stream.expect(1, [2])
        assert loader.gate is not None
        loader.gate.set()
        until(lambda: len(loader.reads) == 2)
        compute(stream, 1, [2])
    assert loader.reads == [(1, 0), (1, 2)]


def test_what_is_expected_is_kept_until_its_layer_comes() -> None:
    """Slots 3: two expected experts stay while others come and go in the third slot."""
    loader = FakeLoader()
    with streaming(loader, slots=3, readers=1) as stream:
        stream.expect(2, [0, 1])
        until(lambda: stream.statistics().reads == 2)
        for expert in range(3):
            compute(stream, 1, [expert])
        compute(stream, 2, [0, 1])
    assert loader.reads == [(2, 0), (2, 1), (1, 0), (1, 1), (1, 2)]


def test_what_is_needed_may_be_expected_too() -> None:
    """All slots hold what is expected, and what is needed is named as expected again while it waits."""
    loader = FakeLoader()
    with streaming(loader, slots=2, readers=1) as stream:
        stream.expect(2, [0, 1])
        until(lambda: stream.statistics().reads == 2)
        loader.gate = threading.Event()
        work = Sum()

        def meanwhile() -> None:
            stream.expect(1, [2, 3])
            assert loader.gate is not None
            loader.gate.set()

        stream.compute(1, [1, 2, 3], work, meanwhile)
        assert sorted(work.seen) == [(1, 1), (1, 2), (1, 3)]
        compute(stream, 2, range(8))


def test_what_is_needed_and_expected_stays_needed_when_the_expectation_changes() -> None:
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1) as stream:

        def meanwhile() -> None:
            stream.expect(1, [0, 1, 2])
            stream.expect(1, [3])
            assert loader.gate is not None
            loader.gate.set()

        work = Sum()
        stream.compute(1, [0, 1, 2], work, meanwhile)
    assert sorted(work.seen) == [(1, 0), (1, 1), (1, 2)]


def test_more_is_expected_than_fits() -> None:
    loader = FakeLoader()
    with streaming(loader, slots=2) as stream:
        stream.expect(1, range(8))
        until(lambda: stream.statistics().reads == 2)
        compute(stream, 1, range(8))
    assert sorted(loader.reads[:2]) == [(1, 0), (1, 1)]


@pytest.mark.parametrize("slots", [15, 16])
def test_it_is_complete_when_nothing_is_left_to_be_read(slots: int) -> None:
    with streaming(FakeLoader(), slots=slots) as stream:
        assert not stream.complete
        compute(stream, 1, range(8))
        assert not stream.complete
        compute(stream, 2, range(8))
        assert stream.complete == (slots == 16)


# Errors.


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("slots", [2, 8])
def test_the_error_of_a_read_ends_the_layer(threads: int, slots: int) -> None:
    """No work runs any more when the error comes out, no other weights take the expert's place; then it goes on."""
    damaged = FormatError("record was changed", where="layer 1 expert 2")
    loader = FakeLoader(errors={(1, 2): damaged}, delay=lambda layer, expert: 0.001 * expert)
    running = []

    def work(expert: Expert) -> None:
        running.append(expert)
        time.sleep(0.002)
        assert expert.expert != 2
        running.pop()

    with streaming(loader, threads=threads, slots=slots) as stream:
        for _ in range(3):
            with pytest.raises(FormatError, match="layer 1 expert 2") as caught:
                stream.compute(1, range(8), work)
            assert caught.value is damaged
            assert not running
            compute(stream, 1, [0, 1, 3])
            compute(stream, 2, [0, 5])
        assert loader.reads.count((1, 2)) == 3  # it was not kept


@pytest.mark.parametrize("threads", [1, 3])
def test_the_error_of_work_ends_the_layer(threads: int) -> None:
    loader = FakeLoader()

    def work(expert: Expert) -> None:
        if expert.expert == 3:
            raise ZeroDivisionError

    with streaming(loader, threads=threads) as stream:
        with pytest.raises(ZeroDivisionError):
            stream.compute(1, range(8), work)
        compute(stream, 1, range(8))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, FormatError])
def test_an_error_meanwhile_ends_the_layer(kind: type[BaseException]) -> None:
    """What was asked for and not begun is not read any more."""
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1) as stream:

        def meanwhile() -> None:
            until(lambda: loader.reads == [(1, 0)])
            raise kind("stop")

        with pytest.raises(kind):
            stream.compute(1, [0, 1, 2], Sum(), meanwhile)
        assert loader.gate is not None
        loader.gate.set()
        compute(stream, 1, [0, 2])
        compute(stream, 2, [0])
    assert loader.reads == [(1, 0), (1, 2), (2, 0)]


def test_an_interruption_of_the_callers_work() -> None:
    loader = FakeLoader()

    def work(expert: Expert) -> None:
        raise KeyboardInterrupt

    with streaming(loader, threads=1, slots=3) as stream:
        with pytest.raises(KeyboardInterrupt):
            stream.compute(1, [0, 1, 2], work)
        compute(stream, 1, [0, 1, 2])


def test_an_expectation_that_cannot_be_read_is_no_error_until_it_is_needed() -> None:
    damaged = FormatError("record was changed", where="layer 2 expert 4")
    loader = FakeLoader(errors={(2, 4): damaged})
    with streaming(loader, slots=2) as stream:
        stream.expect(2, [4, 5])
        until(lambda: stream.statistics().reads == 2)
        compute(stream, 1, [0, 1])
        compute(stream, 2, [5])
        with pytest.raises(FormatError, match="layer 2 expert 4"):
            stream.compute(2, [4], Sum())
        compute(stream, 2, [0, 1, 2])


def test_the_error_of_a_joined_read_is_the_layers() -> None:
    damaged = FormatError("record was changed", where="layer 1 expert 3")
    loader = FakeLoader(gate=threading.Event(), errors={(1, 3): damaged})
    with streaming(loader) as stream:
        stream.expect(1, [3])
        until(lambda: loader.reads == [(1, 3)])
        assert loader.gate is not None
        with pytest.raises(FormatError, match="layer 1 expert 3"):
            stream.compute(1, [3], Sum(), loader.gate.set)


@pytest.mark.parametrize(("layer", "expert"), [(0, 0), (1, 8), (1, -1), (3, 0), (-1, 0)])
def test_there_is_no_such_expert(layer: int, expert: int) -> None:
    with streaming(FakeLoader()) as stream:
        with pytest.raises(UsageError, match="no such expert"):
            stream.compute(layer, [expert], Sum())
        with pytest.raises(UsageError, match="no such expert"):
            stream.expect(layer, [expert])


def test_misuse() -> None:
    loader = FakeLoader()
    with streaming(loader) as stream:
        with pytest.raises(ValueError, match="twice"):
            stream.compute(1, [2, 2], Sum())
        stream.close()
        with pytest.raises(ValueError, match="closed"):
            stream.compute(1, [2], Sum())
    with Workers(1) as workers, pytest.raises(ValueError, match="at least one slot"):
        ExpertStream(loader, slots=0, workers=workers)


def test_a_model_without_experts_needs_no_slot() -> None:
    with streaming(FakeLoader(layer_experts=(0, 0), slot_bytes=0), slots=0) as stream:
        stream.compute(1, [], Sum())


def test_closing_leaves_what_waits() -> None:
    """The read under way ends; what was only expected is not begun."""
    loader = FakeLoader(gate=threading.Event())
    with streaming(loader, readers=1) as stream:
        stream.expect(1, range(5))
        until(lambda: loader.reads == [(1, 0)])
        closing = threading.Thread(target=stream.close)
        closing.start()
        assert loader.gate is not None
        loader.gate.set()
        closing.join(20)
        assert not closing.is_alive()
    assert loader.reads == [(1, 0)]


def test_a_reading_thread_that_breaks_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a reading thread dies of comes out where experts are asked for."""

    def broken(entry: object) -> bool:
        raise MemoryError

    with streaming(FakeLoader()) as stream:
        monkeypatch.setattr(stream._table, "take_slot", broken)
        with pytest.raises(MemoryError):
            stream.compute(1, [0], Sum())
        with pytest.raises(ValueError, match="closed"):
            stream.compute(1, [0], Sum())


def test_waiting_is_counted() -> None:
    loader = FakeLoader(delay=lambda layer, expert: 0.001)
    with streaming(loader, threads=1, readers=1) as stream:
        stream.compute(1, [0, 1], Sum(0.001))
        done = stream.statistics()
        compute(stream, 1, [0, 1])
        later = stream.statistics() - done
    assert min(done.stall_seconds, done.read_seconds, done.compute_seconds) > 0.0
    assert (later.hits, later.reads, later.bytes_read) == (2, 0, 0)
    assert (later.stall_seconds, later.read_seconds) == (0.0, 0.0)  # nothing was read, so nothing was waited for
