"""An interruption may hit the asking thread anywhere; afterwards every slot is as good as before, and nothing hangs."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
import pytest

from formats.encoded import RawMatrix
from runtime.store import Expert
from runtime.stream.experts import ExpertStream
from runtime.threads import Coming, Workers
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
@pytest.mark.parametrize(("slots", "readers", "threads"), [(1, 1, 1), (3, 2, 3), (9, 4, 2), (30, 2, 1)])
def test_interrupted_layers(slots: int, readers: int, threads: int, split: int) -> None:
    rng = random.Random(slots)
    loader = FakeLoader(
        layer_experts=(0, 10, 10, 10), delay=lambda layer, expert: 0.0003 * ((layer * 7 + expert) % 5), split=split
    )
    interrupted = 0
    with interruptions() as interrupter, Workers(threads) as workers:
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
