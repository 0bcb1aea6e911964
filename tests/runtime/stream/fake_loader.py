"""A loader of made-up experts: delays, errors and noted reads; what a slot holds says whose it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from formats.encoded import RawMatrix
from runtime.store import Expert

WIDTH = 16
SLOT = 4096


def values_of(layer: int, expert: int) -> np.ndarray:
    """What an expert's gate holds."""
    return np.full((4, WIDTH), 1000 * layer + expert, np.float32)


@dataclass
class FakeLoader:
    """
    Attributes:
        layer_experts: of the model.
        delay: seconds that a read of (layer, expert) takes.
        errors: what a read of (layer, expert) raises, every time or as long as the list lasts.
        gate: waited for before any read ends, if there is one.
        reads: (layer, expert) in the order in which they began.
        under_way, most: reads at the same time, now and at the most.
    """

    layer_experts: tuple[int, ...] = (0, 8, 8)
    delay: Callable[[int, int], float] = lambda layer, expert: 0.0
    errors: Mapping[tuple[int, int], BaseException] = field(default_factory=dict)
    gate: threading.Event | None = None
    reads: list[tuple[int, int]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    slot_bytes: int = SLOT

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.slots: set[int] = set()

    def read_bytes(self, layer: int, expert: int) -> int:
        return 100 + expert

    def load(self, layer: int, expert: int, slot: memoryview) -> Expert:
        with self._lock:
            self.reads.append((layer, expert))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            array = np.frombuffer(slot, np.float32)
            self.slots.add(array.__array_interface__["data"][0])
            array[:] = np.nan  # whoever still uses what was here before gets nonsense
            if self.gate is not None:
                assert self.gate.wait(20)
            time.sleep(self.delay(layer, expert))
            error = self.errors.get((layer, expert))
            if error is not None:
                raise error
            gate = array[: 4 * WIDTH].reshape(4, WIDTH)
            gate[:] = values_of(layer, expert)
            matrix = RawMatrix(4, WIDTH, "F32", gate)
            return Expert(layer, expert, matrix, matrix, matrix)
        finally:
            with self._lock:
                self.under_way -= 1
