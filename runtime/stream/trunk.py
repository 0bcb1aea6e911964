"""The trunk, in memory or streamed: the same tensors, so the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats.encoded import EncodedMatrix, decode_rows
from formats.layout import LINE, PAGE, align
from runtime.store import Tensors
from runtime.stream.memory import Area
from runtime.stream.segments import Placed, Segment, Segments
from runtime.stream.statistics import TrunkStatistics
from runtime.stream.tensors import (
    READ_SLACK,
    RowReader,
    TrunkSource,
    prove,
    row_reader_bytes,
    segment_tensors,
    vector,
    vector_bytes,
)
from runtime.threads import Coming, Workers, multiply_rows

__all__ = ["ResidentTrunk", "StreamedTrunk", "TrunkSource", "resident_bytes", "streamed_bytes"]

Single = NDArray[np.float32]
Result = TypeVar("Result")

PIECE_BYTES = 32 << 20  # of the head that are held at a time, twice
PROOF_BYTES = 16 << 20  # of what is proved in pieces, at a time


class ResidentTrunk:
    """All segments in memory, read when it is opened, each with one read. Not for several threads at once."""

    def __init__(self, source: TrunkSource, workers: Workers) -> None:
        """Read everything; the next segment is read while one is checked.

        Raises:
            MoepackError: the trunk cannot be read, a digest disagrees, or bytes break the rules of a codec.
        """
        self._workers = workers
        segments = source.segments
        loaded = _load_all(source)
        self._embedding = loaded[0].matrices[segments.embedding_tensor.name]
        self._layers, self._output = loaded[1:-1], loaded[-1]
        _, head = segments.head
        self._head = self._output.matrices.get(head.name, self._embedding)
        self._has_router = tuple(segment.of_kind("router") is not None for segment in segments.layers)
        self._bytes = sum(segment.bytes for segment in segments)

    def close(self) -> None:
        """Nothing is open."""

    def statistics(self) -> TrunkStatistics:
        """What was read, at the opening."""
        return TrunkStatistics(bytes_read=self._bytes)

    def embed(self, ids: NDArray[np.int64]) -> Single:
        """Rows of the embedding: float32 [len(ids), hidden]."""
        return decode_rows(self._embedding, ids)

    def layer(self, layer: int) -> Tensors:
        """The tensors of a decoder layer."""
        return self._layers[layer]

    def router(self, layer: int) -> Tensors | None:
        """The tensors of a layer with a router."""
        return self._layers[layer] if self._has_router[layer] else None

    def output(self) -> Tensors:
        """Final norm, output mix and head."""
        return self._output

    def head(self, inputs: Single) -> Single:
        """Logits float32 [n, vocab] of normed states float32 [n, hidden]."""
        return multiply_rows(self._workers, self._head, inputs)


def _load_all(source: TrunkSource) -> list[Tensors]:
    """Every segment in an area of its own."""

    def read(segment: Segment, area: Area) -> None:
        source.read(segment, 0, segment.bytes, area.view)

    segments = list(source.segments)
    areas = [Area(segment.bytes) for segment in segments]
    reads = [Coming(partial(read, segment, area)) for segment, area in zip(segments, areas, strict=True)]
    loaded = []
    with closing(Workers(2)) as reader:
        reader.submit(reads[0].run)
        for number, segment in enumerate(segments):
            reads[number].result()
            if number + 1 < len(segments):
                reader.submit(reads[number + 1].run)
            loaded.append(segment_tensors(source, segment, areas[number].view, check=source.check))
    return loaded


@dataclass(frozen=True)
class _Held:
    """What a buffer holds, or is about to."""

    layer: int
    tensors: Coming[Tensors]


class StreamedTrunk:
    """Two buffers of the largest layer and two pieces of the head: one is used while the next one is read.

    Of the embedding only the rows that are needed are read. Not for several threads at once; close it.
    """

    def __init__(self, source: TrunkSource, workers: Workers, *, read_ahead: bool = True) -> None:
        """Where digests are to be proved, prove embedding and head, which later are never whole in memory.

        Args:
            source: of the bytes; stays open as long as this is used.
            workers: for the product with the head.
            read_ahead: read what will be needed next on a thread of its own, not when it is needed.

        Raises:
            MoepackError: the trunk cannot be read, a digest disagrees, or bytes break the rules of a codec.
        """
        segments = source.segments
        self._source, self._workers = source, workers
        self._layers = segments.layers
        self._has_router = tuple(segment.of_kind("router") is not None for segment in self._layers)
        self._proved: set[int] = set()
        self._bytes, self._stalled = 0, 0.0
        if source.check:
            for segment, placed in _never_whole(segments):
                _prove_in_pieces(source, segment, placed)
                self._bytes += placed.info.bytes
        self._output = _output_vectors(source)
        self._embedding = RowReader(source, segments.embedding, segments.embedding_tensor, 1)
        segment, self._head = segments.head
        rows = piece_rows(self._head)
        self._pieces = tuple(RowReader(source, segment, self._head, rows) for _ in range(2))
        self._buffers = tuple(Area(_largest(segments)) for _ in range(2))
        self._held: list[_Held | None] = [None, None]
        self._now = 0  # the buffer whose tensors were handed out last
        self._reader = Workers(2 if read_ahead else 1)

    def close(self) -> None:
        """End the reading thread, after what it is at. A second call does nothing."""
        self._reader.close()

    def statistics(self) -> TrunkStatistics:
        """What was read for use so far, and waited for."""
        return TrunkStatistics(self._bytes, self._stalled)

    def embed(self, ids: NDArray[np.int64]) -> Single:
        """Rows of the embedding: float32 [len(ids), hidden]."""
        needed, places = np.unique(ids, return_inverse=True)
        first = np.zeros(1, np.int64)
        rows = np.empty((needed.size, self._embedding.cols), np.float32)
        for place, row in enumerate(needed):
            rows[place] = decode_rows(self._embedding.read(int(row), 1), first)[0]
        self._bytes += needed.size * self._embedding.row_bytes
        return rows[places]

    def layer(self, layer: int) -> Tensors:
        """The tensors of a decoder layer; valid until the next call."""
        place = self._place_of(layer)
        if place is None:
            place = 1 - self._now
            self._begin(place, layer)
        held = self._held[place]
        assert held is not None
        self._now = place
        try:
            tensors = self._result(held.tensors)
        except BaseException:
            self._held[place] = None  # what is in the buffer is of no use
            raise
        following = (layer + 1) % len(self._layers)
        if self._reads_ahead and self._place_of(following) is None:
            self._begin(1 - place, following)
        return tensors

    def router(self, layer: int) -> Tensors | None:
        """The tensors of a layer with a router, if they have been read."""
        place = self._place_of(layer)
        held = None if place is None else self._held[place]
        if held is None or not self._has_router[layer] or not held.tensors.done or held.tensors.failed:
            return None
        return held.tensors.result()

    def output(self) -> Tensors:
        """Final norm and output mix."""
        return self._output

    def head(self, inputs: Single) -> Single:
        """Logits float32 [n, vocab] of normed states float32 [n, hidden], piece by piece."""
        rows, total = piece_rows(self._head), self._head.info.shape[0]
        starts = list(range(0, total, rows))
        out = np.empty((inputs.shape[0], total), np.float32)

        def begin(number: int) -> Coming[EncodedMatrix]:
            first = starts[number]
            return self._soon(lambda: self._pieces[number % 2].read(first, min(rows, total - first)))

        coming = begin(0)
        for number, first in enumerate(starts):
            piece = self._result(coming)
            more = number + 1 < len(starts)
            if more and self._reads_ahead:
                coming = begin(number + 1)
            out[:, first : first + piece.rows] = multiply_rows(self._workers, piece, inputs)
            if more and not self._reads_ahead:
                coming = begin(number + 1)
        self._bytes += self._head.info.bytes
        return out

    def _place_of(self, layer: int) -> int | None:
        """The buffer that holds a layer, or is about to."""
        return next((place for place, held in enumerate(self._held) if held and held.layer == layer), None)

    def _begin(self, place: int, layer: int) -> None:
        """Read a layer into a buffer, once whatever was to be read into it has been."""
        former = self._held[place]
        if former is not None:
            former.tensors.wait()
        self._held[place] = _Held(layer, self._soon(lambda: self._load(layer, self._buffers[place])))
        self._bytes += self._layers[layer].bytes

    def _load(self, layer: int, buffer: Area) -> Tensors:
        """Read a layer; its digests are proved when it is read for the first time."""
        segment = self._layers[layer]
        self._source.read(segment, 0, segment.bytes, buffer.view)
        check = self._source.check and layer not in self._proved
        tensors = segment_tensors(self._source, segment, buffer.view, check=check)
        self._proved.add(layer)
        return tensors

    @property
    def _reads_ahead(self) -> bool:
        return self._reader.threads > 1

    def _soon(self, job: Callable[[], Result]) -> Coming[Result]:
        """The result of a job on the reading thread, or of doing it at once if there is none."""
        coming = Coming(job)
        if not self._reader.submit(coming.run):
            coming.run()
        return coming

    def _result(self, coming: Coming[Result]) -> Result:
        began = time.perf_counter()
        try:
            return coming.result()
        finally:
            self._stalled += time.perf_counter() - began


def piece_rows(head: Placed) -> int:
    """Rows of a piece of the head; where there are many, a number that lets every piece start on a line."""
    rows = head.info.shape[0]
    fitting = PIECE_BYTES * rows // max(1, head.info.bytes)
    return min(rows, fitting // LINE * LINE or max(1, fitting))


def _largest(segments: Segments) -> int:
    return max(segment.bytes for segment in segments.layers)


def _never_whole(segments: Segments) -> list[tuple[Segment, Placed]]:
    """Embedding and head, which may be one."""
    embedding = (segments.embedding, segments.embedding_tensor)
    return [embedding] if segments.head == embedding else [embedding, segments.head]


def _prove_in_pieces(source: TrunkSource, segment: Segment, placed: Placed) -> None:
    """Prove a tensor that is never whole in memory, by reading it once."""
    area, hasher = Area(PROOF_BYTES + READ_SLACK), blake3()
    for start in range(placed.offset, placed.end, PROOF_BYTES):
        stop = min(start + PROOF_BYTES, placed.end)
        at = source.read(segment, start, stop, area.view)
        hasher.update(area.view[at : at + stop - start])
    prove(source, placed, hasher.hexdigest())


def _output_vectors(source: TrunkSource) -> Tensors:
    """What there is after the last layer but the head, each read by itself."""
    segment = source.segments.output
    vectors = {}
    for name, placed in segment.tensors.items():
        if placed.kind == "head":
            continue
        area = Area(placed.info.bytes + READ_SLACK)
        at = source.read(segment, placed.offset, placed.end, area.view)
        data = area.view[at : at + placed.info.bytes].toreadonly()
        if source.check:
            prove(source, placed, blake3(data).hexdigest())
        vectors[name] = vector(placed, data).copy()
    return Tensors({}, vectors)


def resident_bytes(segments: Segments) -> int:
    """What :class:`ResidentTrunk` takes."""
    return sum(align(segment.bytes, PAGE) + vector_bytes(segment) for segment in segments)


def streamed_bytes(segments: Segments) -> int:
    """What :class:`StreamedTrunk` takes: two layers, two pieces of the head, a row of the embedding, the last norms."""
    vectors = max(vector_bytes(segment) for segment in segments.layers)
    _, head = segments.head
    pieces = row_reader_bytes(head, piece_rows(head))
    last = sum(4 * math.prod(placed.info.shape) for placed in segments.output.tensors.values() if placed.kind != "head")
    row = row_reader_bytes(segments.embedding_tensor, 1)
    return 2 * (align(_largest(segments), PAGE) + vectors + pieces) + row + last
