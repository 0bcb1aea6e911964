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
        delay: seconds that reading (layer, expert) takes, all parts together.
        errors: what a read of (layer, expert) raises, every time; of its last part, if there are several.
        unsound: what a proof of (layer, expert) raises, every time.
        proof: called with (layer, expert) by each proof.
        gate: waited for before any read ends, if there is one.
        split: parts of each expert.
        proved: whether (layer, expert) needs no proof once it is read.
        reads: (layer, expert) in the order in which they began.
        begun: (layer, expert, part) in the order in which they began.
        proofs: (layer, expert) in the order in which they ended.
        under_way, most: reads at the same time, now and at the most.
    """

    layer_experts: tuple[int, ...] = (0, 8, 8)
    delay: Callable[[int, int], float] = lambda layer, expert: 0.0
    errors: Mapping[tuple[int, int], BaseException] = field(default_factory=dict)
    unsound: Mapping[tuple[int, int], BaseException] = field(default_factory=dict)
    proof: Callable[[int, int], None] = lambda layer, expert: None
    gate: threading.Event | None = None
    split: int = 1
    proved: Callable[[int, int], bool] = lambda layer, expert: False
    begun: list[tuple[int, int, int]] = field(default_factory=list)
    proofs: list[tuple[int, int]] = field(default_factory=list)
    reads: list[tuple[int, int]] = field(default_factory=list)
    under_way: int = 0
    most: int = 0
    slot_bytes: int = SLOT
    part_bytes: int = SLOT

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.slots: set[int] = set()

    def parts(self, layer: int, expert: int) -> int:
        return self.split

    def read(self, layer: int, expert: int, part: int, slot: memoryview) -> int:
        with self._lock:
            self.begun.append((layer, expert, part))
            if part == 0:
                self.reads.append((layer, expert))
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            array = np.frombuffer(slot, np.float32)
            self.slots.add(array.__array_interface__["data"][0])
            mine = array[part :: self.split]
            mine[:] = np.nan  # whoever still uses what was here before gets nonsense
            if self.gate is not None:
                assert self.gate.wait(20)
            time.sleep(self.delay(layer, expert) / self.split)
            error = self.errors.get((layer, expert))
            if error is not None and part == self.split - 1:
                raise error
            mine[:] = values_of(layer, expert)[0, 0]
            return (100 + expert) // self.split
        finally:
            with self._lock:
                self.under_way -= 1

    def is_proved(self, layer: int, expert: int) -> bool:
        return self.proved(layer, expert)

    def prove(self, layer: int, expert: int, slot: memoryview) -> None:
        self.proof(layer, expert)
        error = self.unsound.get((layer, expert))
        self.proofs.append((layer, expert))
        if error is not None:
            raise error

    def view(self, layer: int, expert: int, slot: memoryview) -> Expert:
        gate = np.frombuffer(slot, np.float32)[: 4 * WIDTH].reshape(4, WIDTH)
        matrix = RawMatrix(4, WIDTH, "F32", gate)
        return Expert(layer, expert, matrix, matrix, matrix)
