"""An interruption may hit the asking thread anywhere; afterwards every slot is as good as before, and nothing hangs."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import pytest

from formats.encoded import RawMatrix
from runtime import threads
from runtime.store import Expert
from runtime.stream.experts import ExpertStream
from runtime.threads import WORTH_SHARING, Coming, Workers
from tests.runtime.stream.fake_loader import FakeLoader, values_of

pytestmark = [
    pytest.mark.skipif(
        not hasattr(signal, "pthread_kill") or threading.current_thread() is not threading.main_thread(),
        reason="sends signals to the main thread",
    ),
    # An interruption that hits a callback of the garbage collector ends there, and Python warns of it: it was no use.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Stopped(BaseException):
    """What the handler raises."""


@contextmanager
def interruptions() -> Iterator[Interrupter]:
    """Raises ``Stopped`` in the main thread, once each time it is asked to, after a while."""

    def handler(number: int, frame: object) -> None:
        if interrupter.armed:
            interrupter.armed = False
            raise Stopped

    before = signal.signal(signal.SIGUSR1, handler)
    interrupter = Interrupter()
    try:
        yield interrupter
    finally:
        interrupter.close()
        signal.signal(signal.SIGUSR1, before)


class Interrupter:
    """Sends a signal after a delay, unless it is disarmed before."""

    def __init__(self) -> None:
        self.armed = False
        self._delays: SimpleQueue[float | None] = SimpleQueue()  # unlike an event, whole wherever a late signal hits it
        self._thread = threading.Thread(target=self._send_on)
        self._thread.start()

    def arm(self, delay: float) -> None:
        self.armed = True
        self._delays.put(delay)

    def close(self) -> None:
        self.armed = False
        self._delays.put(None)
        self._thread.join()

    def _send_on(self) -> None:
        while (delay := self._delays.get()) is not None:
            time.sleep(delay)
            if self.armed:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


class Checked:
    """Work that looks at the weights, waits and looks again."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.wrong: list[int] = []

    def __call__(self, expert: Expert) -> None:
        for pause in (0.0002, 0.0):
            assert isinstance(expert.gate, RawMatrix)
            if not np.array_equal(expert.gate.values, values_of(expert.layer, expert.expert)):
                self.wrong.append(expert.expert)
            time.sleep(pause)
        self.seen.append(expert.expert)


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("slots", "readers", "count"), [(1, 1, 1), (3, 2, 3), (9, 4, 2), (30, 2, 1)])
def test_interrupted_layers(slots: int, readers: int, count: int, split: int) -> None:
    rng = random.Random(slots)
    loader = FakeLoader(
        layer_experts=(0, 10, 10, 10), delay=lambda layer, expert: 0.0003 * ((layer * 7 + expert) % 5), split=split
    )
    interrupted = 0
    with interruptions() as interrupter, Workers(count) as workers:
        stream = ExpertStream(loader, slots=slots, workers=workers, readers=readers)
        for _ in range(60):
            layer, coming = rng.randrange(1, 4), rng.randrange(1, 4)
            chosen, likely = rng.sample(range(10), rng.randrange(8)), rng.sample(range(10), 4)
            work = Checked()
            try:
                if rng.random() < 0.5:
                    interrupter.arm(rng.random() * 0.004)
                stream.compute(layer, chosen, work, lambda likely=likely, coming=coming: stream.expect(coming, likely))  # type: ignore[misc]
                interrupter.armed = False
                assert sorted(work.seen) == sorted(chosen)
            except Stopped:
                interrupted += 1
            assert not work.wrong
        final = Checked()
        stream.compute(1, range(10), final)
        assert sorted(final.seen) == list(range(10))
        stream.close()
    assert interrupted
    assert len(loader.slots) <= slots


def test_interrupted_waiting_for_workers() -> None:
    """Tasks that had begun end, others do not begin, and the next ones run as ever."""
    with interruptions() as interrupter, Workers(3) as workers:
        for round_ in range(40):
            running: list[int] = []

            def task(running: list[int] = running) -> None:
                helping = threading.current_thread() is not threading.main_thread()  # no signal comes there
                running.extend([1] * helping)
                time.sleep(0.001)
                del running[: int(helping)]

            try:
                interrupter.arm(0.0001 * round_)
                workers.run([task] * 6)
                interrupter.armed = False
            except Stopped:
                pass
            end = time.monotonic() + 20
            while running:
                assert time.monotonic() < end  # whoever ran has ended, but for the last steps of a helper
        done: list[int] = []
        workers.run([lambda number=number: done.append(number) for number in range(20)])  # type: ignore[misc]
        assert sorted(done) == list(range(20))


@pytest.mark.parametrize("before", [True, False])
def test_interrupted_between_taking_a_shared_range_and_doing_it(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper is not left waiting for a range that nobody does any more, and hears of it."""
    do = threads._Batch._do

    def interrupted(batch: threads._Batch, task: Callable[[], None]) -> None:
        if threading.current_thread() is not threading.main_thread():
            do(batch, task)
            return
        if not before:
            do(batch, task)
        reached.set()
        raise Stopped

    monkeypatch.setattr(threads._Batch, "_do", interrupted)
    reached = threading.Event()  # until then the helper is at the range that it took itself
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()

    def work(first: int, stop: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert reached.wait(20)

    def shares() -> None:
        while workers._waiting is None:
            time.sleep(0)
        try:
            workers.share(2, work, worth=2 * WORTH_SHARING)
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    with Workers(2) as workers:
        assert workers.submit(shares)
        with pytest.raises(Stopped):
            workers.wait(SimpleQueue())
        assert isinstance(outcomes.get(timeout=20), InterruptedError)


def test_interrupted_taking_part_in_what_a_helper_shares() -> None:
    """Wherever it is hit: a helper that shares ends, with all ranges done or an error."""
    outcomes: list[BaseException | None] = []

    def shares() -> None:
        while workers._waiting is None:
            time.sleep(0)
        began = [0, 0]

        def work(first: int, stop: int) -> None:
            began[first] += 1
            time.sleep(0.0005)
            began[first] += 1

        try:
            workers.share(2, work, worth=2 * WORTH_SHARING)
            outcomes.append(None if began == [2, 2] else AssertionError(began))
        except BaseException as error:
            outcomes.append(error)

    news: SimpleQueue[None] = SimpleQueue()
    interrupted = 0
    with interruptions() as interrupter, Workers(2) as workers:
        for round_ in range(400):
            outcomes.clear()
            assert workers.submit(lambda: (shares(), news.put(None)))  # type: ignore[func-returns-value, arg-type, return-value]
            try:
                interrupter.arm(0.000005 * round_)
                workers.wait(news)
                workers.wait(news)
            except Stopped:
                interrupted += 1
            interrupter.armed = False
            end = time.monotonic() + 20
            while not outcomes:
                assert time.monotonic() < end
                workers._waiting = workers._waiting or news  # so that one who was late does not wait for ever
            assert not isinstance(outcomes[0], AssertionError)
            while not news.empty():
                news.get()
    assert interrupted


def test_interrupted_waiting_for_what_is_coming() -> None:
    gate = threading.Event()

    def job() -> int:
        assert gate.wait(20)
        return 7

    with interruptions() as interrupter, Workers(2) as workers:
        coming = Coming(job)
        assert workers.submit(coming.run)
        with pytest.raises(Stopped):  # noqa: PT012 - the interruption may come at once
            interrupter.arm(0.01)
            coming.result()
        assert not coming.done
        gate.set()
        assert coming.result() == 7
