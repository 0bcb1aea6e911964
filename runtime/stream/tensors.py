"""From the bytes of a segment, or of a run of rows of it, to tensors that a model computes with."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats import codecs
from formats.encoded import EncodedMatrix, trunk_matrix
from formats.errors import IntegrityError
from formats.families.kimi import check_decay
from formats.layout import LINE, PAGE, Codec, align
from formats.trunk import tensor_codec
from runtime.store import Tensors
from runtime.stream.memory import Area
from runtime.stream.segments import Placed, Segment, Segments

Single = NDArray[np.float32]

READ_SLACK = 2 * PAGE  # what a read may take beyond its range, to begin and end with a page


class TrunkSource(Protocol):
    """Where a trunk's bytes come from. Safe to use from several threads."""

    @property
    def segments(self) -> Segments:
        """What there is."""

    @property
    def check(self) -> bool:
        """Whether tensors are to be proved against their digests."""

    @property
    def where(self) -> str:
        """The file, for messages."""

    def read(self, segment: Segment, start: int, stop: int, target: memoryview) -> int:
        """Read bytes ``start`` to ``stop`` of a segment.

        Args:
            target: begins with a page and is ``READ_SLACK`` longer than the range; a whole segment needs no slack.

        Returns:
            Where in ``target`` these bytes begin.

        Raises:
            MoepackError: they cannot be read.
        """


def segment_tensors(source: TrunkSource, segment: Segment, data: memoryview, *, check: bool) -> Tensors:
    """The tensors of a segment, matrices as views of ``data``, its bytes.

    Raises:
        FormatError: bytes that break the rules of a codec, or an A_log that is not padded with zeros.
        IntegrityError: a digest disagrees.
    """
    matrices, vectors = {}, {}
    for name, placed in segment.tensors.items():
        part = data[placed.offset : placed.end].toreadonly()
        if check:
            prove(source, placed, blake3(part).hexdigest())
        if placed.is_matrix:
            matrices[name] = trunk_matrix(placed.info, part)
        else:
            vectors[name] = vector(placed, part)
    return Tensors(matrices, vectors)


def prove(source: TrunkSource, placed: Placed, found: str) -> None:
    """Insist that the digest of a tensor's bytes is the one that was recorded.

    Raises:
        IntegrityError: naming the tensor.
    """
    if found != placed.info.blake3:
        raise IntegrityError(
            f"tensor {placed.info.name} was changed",
            where=source.where,
            offset=placed.info.offset,
            expected=placed.info.blake3,
            found=found,
        )


def vector(placed: Placed, data: memoryview) -> Single:
    """A tensor that is no matrix, float32 in its shape; plain float32 is not copied. Of A_log the heads that count."""
    info = placed.info
    codec, parameters = tensor_codec(info, where=info.name)
    if codec == Codec.RAW and info.dtype == "F32":
        values: Single = np.frombuffer(data, "<f4").astype(np.float32, copy=False).reshape(info.shape)
    else:
        rows, cols = codecs.tensor_extents(info.shape)
        sections = {
            part.kind: data[part.offset : part.offset + part.bytes]
            for part in codecs.trunk_sections(codec, parameters, info.shape, where=info.name)
        }
        values = codecs.decode_rows(
            codec, parameters, rows, cols, sections, scale_exponent=info.scale_exponent, where=info.name
        ).reshape(info.shape)
    return values if placed.heads is None else check_decay(info.name, values, placed.heads, "trunk")


def vector_bytes(segment: Segment) -> int:
    """Bytes of the segment's vectors that are decoded beside it."""
    return sum(
        4 * math.prod(placed.info.shape)
        for placed in segment.tensors.values()
        if not placed.is_matrix and not (placed.info.codec == Codec.RAW.label and placed.info.dtype == "F32")
    )


class RowReader:
    """Reads runs of rows of one matrix of the trunk into a buffer of its own, which the next read reuses.

    Attributes:
        cols: of the matrix.
        row_bytes: of one row, in all sections.
    """

    def __init__(self, source: TrunkSource, segment: Segment, placed: Placed, most: int) -> None:
        """``most`` rows at a time."""
        self._source, self._segment, self._placed = source, segment, placed
        self._sections = row_layout(placed, placed.info.shape[0])
        first, *others = (_room(placed, part, most) for part in self._sections)
        self._area, self._side = Area(first + sum(others)), [Area(room) for room in others]
        self.cols = placed.info.shape[1]
        self.row_bytes = sum(part.row_bytes for part in self._sections)

    def read(self, first: int, count: int) -> EncodedMatrix:
        """Rows ``first`` to ``first + count``, valid until the next call.

        Raises:
            MoepackError: they cannot be read, or break the codec's rules.
        """
        layout = row_layout(self._placed, count)
        (codes, *others), (_, *places) = self._sections, layout
        at = self._read(codes.offset + first * codes.row_bytes, count * codes.row_bytes, self._area)
        if at % LINE:  # a row may start anywhere, but numbers must stand where a processor can load them
            start, at = at, at // LINE * LINE
            self._area.view[at : at + layout[0].bytes] = bytes(self._area.view[start : start + layout[0].bytes])
        for part, place, area in zip(others, places, self._side, strict=True):
            start = self._read(part.offset + first * part.row_bytes, place.bytes, area)
            target = at + place.offset
            self._area.view[target : target + place.bytes] = area.view[start : start + place.bytes]
        info, length = self._placed.info, layout[-1].offset + layout[-1].bytes
        run = msgspec.structs.replace(info, shape=(count, info.shape[1]), bytes=length)
        return trunk_matrix(run, self._area.view[at : at + length].toreadonly())

    def _read(self, offset: int, length: int, area: Area) -> int:
        start = self._placed.offset + offset
        return self._source.read(self._segment, start, start + length, area.view)


def row_layout(placed: Placed, count: int) -> tuple[codecs.TrunkSection, ...]:
    """The sections that ``count`` rows of a matrix would have if they were a tensor."""
    info = placed.info
    codec, parameters = tensor_codec(info, where=info.name)
    return codecs.trunk_sections(codec, parameters, (count, info.shape[1]), where=info.name)


def row_reader_bytes(placed: Placed, most: int) -> int:
    """What a :class:`RowReader` takes."""
    first, *others = (_room(placed, part, most) for part in row_layout(placed, placed.info.shape[0]))
    return first + 2 * sum(others)


def _room(placed: Placed, part: codecs.TrunkSection, most: int) -> int:
    """Bytes that a run of ``most`` rows of one section may take, read in whole pages."""
    return align(min(most, placed.info.shape[0]) * part.row_bytes + READ_SLACK, PAGE)
