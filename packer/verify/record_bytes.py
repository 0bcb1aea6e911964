"""Records, trunk tensors and assets one by one: headers, zero padding and, at level ``hashes``, every digest.

Memory does not depend on how large a record, tensor or file is. A damaged one gives findings and stops nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from formats import codecs, layout
from formats.container import Container
from formats.errors import EnvironmentProblem, FormatError, MoepackError
from formats.files import read_exactly
from formats.index import IndexRow
from formats.layout import LINE, RecordHeader, Section, align, record_name
from formats.manifest import TensorInfo
from formats.trunk import tensor_codec
from packer.verify.findings import CHUNK_BYTES, Problem, problem_of

Step = Callable[[int], None]  # told after each piece how many bytes were read; may raise to stop


@dataclass(frozen=True)
class Span:
    """A run of bytes of a record: the header, a section, or padding that must be zero."""

    label: str
    start: int
    stop: int
    section: Section | None = None
    zero: bool = False


def record_spans(header: RecordHeader) -> Iterator[Span]:
    """The whole record, span by span."""
    yield Span("header", 0, layout.RECORD_HEADER_BYTES)
    end = layout.RECORD_HEADER_BYTES
    for section in header.sections:
        if section.offset > end:
            yield Span("padding", end, section.offset, zero=True)
        end = section.offset + section.bytes
        yield Span(section.label, section.offset, end, section)
    if header.record_bytes > end:
        yield Span("padding", end, header.record_bytes, zero=True)


def check_record(container: Container, row: IndexRow, *, deep: bool, step: Step) -> list[Problem]:
    """One record: its header, its padding and, if ``deep``, its digest and those of its sections.

    Where the digest differs, the section digests tell which matrix is damaged.
    """
    where = record_name(row.layer, row.expert)
    problems: list[Problem] = []
    try:
        header: RecordHeader | None = container.header(row.layer, row.expert)
    except MoepackError as error:
        problems.append(problem_of(error, where))
        header = None
    if header is None:
        spans = [Span("record", 0, row.bytes)] if deep else []
    else:
        spans = [span for span in record_spans(header) if deep or span.zero]
    try:
        problems += _check_spans(container, row, spans, where, deep=deep, step=step)
    except (FormatError, EnvironmentProblem) as error:  # cut short meanwhile, or a bad sector: the others count
        problems.append(problem_of(error, where))
    return problems


def _check_spans(
    container: Container, row: IndexRow, spans: list[Span], where: str, *, deep: bool, step: Step
) -> list[Problem]:
    file = container.layer(row.layer).file
    fd = container.file(file)
    whole = blake3()
    damaged: list[str] = []
    problems: list[Problem] = []
    for span in spans:
        own = blake3()
        dirty: int | None = None
        for start in range(span.start, span.stop, CHUNK_BYTES):
            length = min(CHUNK_BYTES, span.stop - start)
            piece = read_exactly(fd, row.offset + start, length, where=file)
            if deep:
                whole.update(piece)
                if span.section is not None:
                    own.update(piece)
            if span.zero and dirty is None:
                dirty = first_not_zero(piece, start)
            step(length)
        if dirty is not None:
            problems.append(Problem(where, f"padding is not zero at byte {dirty} of the record"))
            damaged.append("padding")
        if deep and span.section is not None and own.digest() != span.section.digest:
            damaged.append(span.label)
    if not deep:
        return problems
    found = whole.digest()
    if found != row.digest:
        what = f"record differs from its digest in the index (expected {row.digest.hex()}, found {found.hex()})"
        if len(spans) > 1:
            what += f"; damaged: {', '.join(dict.fromkeys(damaged)) or 'header'}"
        problems.insert(0, Problem(where, what))
    else:
        problems += [
            Problem(where, f"section {label} differs from its digest in the header")
            for label in damaged
            if label != "padding"
        ]
    return problems


def first_not_zero(data: bytes, offset: int) -> int | None:
    """Where the first byte that is not zero stands, ``offset`` being the place of ``data``; None if all are zero."""
    rest = data.lstrip(b"\0")
    return offset + len(data) - len(rest) if rest else None


def check_trunk_padding(container: Container) -> list[Problem]:
    """The bytes between tensors, inside them before their scales, and behind them: all zero (SPEC section 7)."""
    file = container.manifest.trunk.file
    problems = []
    for start, stop in _trunk_gaps(container):
        try:
            dirty = first_not_zero(read_exactly(container.file(file), start, stop - start, where=file), start)
        except MoepackError as error:
            problems.append(problem_of(error))
            break
        if dirty is not None:
            problems.append(Problem(file, f"padding is not zero at byte {dirty}"))
    return problems


def _trunk_gaps(container: Container) -> Iterator[tuple[int, int]]:
    """Each is shorter than a page, because tensors are contiguous but for their alignment."""
    manifest = container.manifest
    tensors = iter([*manifest.tensors, None])
    tensor = next(tensors)
    for segment in manifest.trunk.segments:
        end = segment.offset
        limit = segment.offset + segment.bytes
        while tensor is not None and tensor.offset + tensor.bytes <= limit:
            yield from ((start, stop) for start, stop in ((end, tensor.offset), *_inner_gaps(tensor)) if start < stop)
            end = tensor.offset + tensor.bytes
            tensor = next(tensors)
        if end < limit:
            yield end, limit


def _inner_gaps(tensor: TensorInfo) -> list[tuple[int, int]]:
    """Between the sections of one tensor, whose entry was checked when the container was opened."""
    codec, parameters = tensor_codec(tensor, where=tensor.name)
    sections = codecs.trunk_sections(codec, parameters, tensor.shape, where=tensor.name)
    ends = [tensor.offset + section.offset + section.bytes for section in sections[:-1]]
    return [(end, align(end, LINE)) for end in ends]


def check_range(
    container: Container, file: str, start: int, length: int, digest: str, where: str, step: Step
) -> list[Problem]:
    """A range of a file against its digest, read in bounded pieces."""
    hasher = blake3()
    try:
        for offset in range(start, start + length, CHUNK_BYTES):
            piece = read_exactly(container.file(file), offset, min(CHUNK_BYTES, start + length - offset), where=file)
            hasher.update(piece)
            step(len(piece))
    except (FormatError, EnvironmentProblem) as error:
        return [problem_of(error, where)]
    found = hasher.hexdigest()
    if found == digest:
        return []
    return [Problem(where, f"bytes differ from their digest in the manifest (expected {digest}, found {found})")]
