"""The headers and the padding of many records at once, for a verification that reads no weights.

A container of K3 has 82,432 records, and nearly all of them are as they must be. Such a record is recognised by
comparing its header with the one that its index row calls for, byte by byte but for digests; every other one, and every
one that cannot be read, is left to ``packer.verify.record_bytes``, which says what is wrong with it, if anything is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from formats import codecs, layout
from formats.codecs import Shapes
from formats.container import Container
from formats.errors import MoepackError
from formats.files import read_exactly
from formats.index import IndexRow
from formats.layout import MatrixEntry, RecordHeader, Section
from packer.verify.findings import Problem
from packer.verify.record_bytes import check_record, first_not_zero, record_spans

BATCH = 1024  # headers held at a time, a megabyte


@dataclass(frozen=True)
class _Form:
    """What the records of one codec, parameters and shapes have in common, scale exponents of 0 provided.

    Attributes:
        shapes: (rows, columns) of gate, up and down.
        sections: as in the header, with a digest of zeros.
        payload_bytes, record_bytes: lengths.
        gaps: (start, stop) of the runs of a record that must be zero.
        digests: bool [header bytes], where the header holds digests.
    """

    shapes: Shapes
    sections: tuple[Section, ...]
    payload_bytes: int
    record_bytes: int
    gaps: tuple[tuple[int, int], ...]
    digests: NDArray[np.bool_]


def batches(rows: Sequence[IndexRow]) -> Iterator[tuple[IndexRow, ...]]:
    """``rows`` in their order, in runs of one layer and at most ``BATCH`` records."""
    for _, run in groupby(rows, key=lambda row: row.layer):
        part = tuple(run)
        yield from (part[first : first + BATCH] for first in range(0, len(part), BATCH))


def check_headers(
    container: Container, rows: Sequence[IndexRow], *, step: Callable[[int], None]
) -> list[list[Problem]]:
    """What is wrong with records, as far as headers and padding show it.

    Args:
        rows: of one layer, at least one.
        step: told after each record how many bytes it has; may raise to stop.

    Returns:
        The findings for each row, in order; none for a sound record.
    """
    findings: list[list[Problem]] = []
    for row, sound in zip(rows, sound_records(container, rows), strict=True):
        findings.append([] if sound else check_record(container, row, deep=False, step=lambda _: None))
        step(row.bytes)
    return findings


def sound_records(container: Container, rows: Sequence[IndexRow]) -> list[bool]:
    """Which records have the header that their row calls for, and zeros as padding.

    False says nothing: the header may have a scale exponent, which is rare, or be unreadable. Two small reads a record.
    """
    file = container.layer(rows[0].layer).file
    forms: dict[tuple[int, bytes], _Form | None] = {}
    result = []
    for row in rows:
        kind = row.codec, row.parameters
        if kind not in forms:
            forms[kind] = _form(row, container.manifest.experts.shapes)
        form = forms[kind]
        result.append(form is not None and form.record_bytes == row.bytes and _is_sound(container, file, row, form))
    return result


def _is_sound(container: Container, file: str, row: IndexRow, form: _Form) -> bool:
    blank = bytes(layout.DIGEST_BYTES)
    usual = layout.pack_record_header(_header(row, form.shapes, form.payload_bytes, form.sections, blank))
    try:
        found = read_exactly(container.file(file), row.offset, layout.RECORD_HEADER_BYTES, where=file)
        gaps = [
            read_exactly(container.file(file), row.offset + start, stop - start, where=file)
            for start, stop in form.gaps
        ]
    except MoepackError:
        return False
    differs = np.frombuffer(found, np.uint8) != np.frombuffer(usual, np.uint8)
    return not (differs & ~form.digests).any() and all(first_not_zero(gap, 0) is None for gap in gaps)


def _form(row: IndexRow, shapes: Shapes) -> _Form | None:
    """The form of records like that of ``row``; None if its codec does not allow its parameters."""
    try:
        parameters = codecs.unpack_parameters(row.codec, row.parameters, "")
        expected = codecs.record_sections(row.codec, parameters, shapes)
    except MoepackError:
        return None
    offsets = codecs.section_offsets([length for _, _, length in expected])
    payload = offsets[-1] + expected[-1][2]

    def sections(digest: bytes) -> tuple[Section, ...]:
        return tuple(
            Section(kind, matrix, offset, length, digest)
            for (kind, matrix, length), offset in zip(expected, offsets, strict=True)
        )

    zeros, ones = (
        _header(row, shapes, payload, sections(digest), digest)
        for digest in (bytes(layout.DIGEST_BYTES), b"\xff" * layout.DIGEST_BYTES)
    )
    packed = [np.frombuffer(layout.pack_record_header(header), np.uint8) for header in (zeros, ones)]
    record_bytes = layout.align(payload, layout.PAGE)
    gaps = tuple((span.start, span.stop) for span in record_spans(zeros) if span.zero and span.stop <= record_bytes)
    return _Form(shapes, zeros.sections, payload, record_bytes, gaps, packed[0] != packed[1])


def _header(
    row: IndexRow, shapes: Shapes, payload_bytes: int, sections: tuple[Section, ...], digest: bytes
) -> RecordHeader:
    """The header that ``row`` calls for, with scale exponents of 0 and the same digest for all matrices."""
    gate, up, down = (
        MatrixEntry(height, width, 0, error, digest)
        for (height, width), error in zip(shapes, row.matrix_errors, strict=True)
    )
    return RecordHeader(
        row.layer,
        row.expert,
        row.source_expert,
        row.codec,
        row.parameters,
        row.bytes,
        payload_bytes,
        row.rel_error,
        (gate, up, down),
        sections,
    )
