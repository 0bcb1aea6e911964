"""Plain parallel direct reads, into a few buffers that are used again and again: what a device gives to anyone."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from formats.layout import PAGE, align
from runtime.stream.direct import StreamFile
from runtime.stream.memory import Area


@dataclass(frozen=True)
class Piece:
    """A range of whole pages of a file."""

    file: StreamFile
    offset: int
    bytes: int


def pieces_around(file: StreamFile, length: int, count: int, longest: int) -> list[Piece]:
    """Pieces of a file of ``length`` bytes that are ``count`` bytes together, from its start again and again."""
    pieces = []
    offset = 0
    while count > 0:
        step = align(min(longest, count, length - offset), PAGE)
        pieces.append(Piece(file, offset, step))
        count -= step
        offset = 0 if offset + step >= length else offset + step
    return pieces


class PlainReader:
    """A few threads that read and do nothing else. One thread at a time asks; close it."""

    def __init__(self, readers: int, longest: int) -> None:
        """``readers`` reads under way at a time, of ``longest`` bytes at the most."""
        self._buffers = [Area(longest) for _ in range(readers)]
        for buffer in self._buffers:
            buffer.view[:] = bytes(buffer.bytes)  # so that no page is taken for the first time while it is measured
        self._pool = ThreadPoolExecutor(readers, "moepack-plain-reader")

    def close(self) -> None:
        """End the threads, after the reads that they are at. A second call does nothing."""
        self._pool.shutdown()

    def begin(self, pieces: Sequence[Piece]) -> list[Future[None]]:
        """Read all pieces; results to wait for, one a thread."""
        waiting = iter(pieces)
        lock = threading.Lock()

        def work(buffer: Area) -> None:
            while True:
                with lock:
                    piece = next(waiting, None)
                if piece is None:
                    return
                piece.file.read(piece.offset, buffer.view[: piece.bytes], where=piece.file.where)

        return [self._pool.submit(work, buffer) for buffer in self._buffers[: len(pieces)]]

    def read(self, pieces: Sequence[Piece]) -> float:
        """Read all pieces; returns the seconds that it took.

        Raises:
            MoepackError: one cannot be read.
        """
        began = time.perf_counter()
        for done in self.begin(pieces):
            done.result()
        return time.perf_counter() - began
