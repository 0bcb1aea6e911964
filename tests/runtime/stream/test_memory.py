"""Slots: aligned, apart from each other, as many and as large as said, and free until they are filled."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime.stream.memory import Area, Slots


def address(view: memoryview) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found


def test_slots_are_aligned_and_apart() -> None:
    slots = Slots(3, 5000)
    assert (slots.slot_bytes, slots.bytes) == (8192, 3 * 8192)
    starts = [address(slots[number]) for number in range(3)]
    assert all(start % 4096 == 0 for start in starts)
    assert starts == [starts[0], starts[0] + 8192, starts[0] + 16384]
    for number in range(3):
        assert len(slots[number]) == 8192
        slots[number][:] = bytes([number]) * 8192
    assert [slots[number][0] for number in range(3)] == [0, 1, 2]
    assert [slots[number][8191] for number in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("number", [-1, 3])
def test_there_are_no_other_slots(number: int) -> None:
    with pytest.raises(IndexError):
        Slots(3, 1)[number]


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0)])
def test_slots_without_number_or_size(count: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Slots(count, size)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_not_filled_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    area = Area(512 << 20)
    assert resident() - before < 64 << 20
    area.view[: 128 << 20] = bytes(128 << 20)
    assert 120 << 20 < resident() - before < 300 << 20  # 128 MiB here, and perhaps as much that was just let go
