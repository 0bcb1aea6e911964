"""The fixed binary structures of records and of the trunk, and what all structures share (SPEC sections 2, 6, 7).

Every function here is pure: bytes to a frozen dataclass and back. Reading checks all that can be checked
without looking elsewhere: magic, versions, reserved bytes, extents inside the record. Whether a header
agrees with its index row or with the manifest is the business of ``container``.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from formats.errors import FormatError

FORMAT_VERSION = 1
PAGE = 4096  # alignment of records and trunk segments, in offset and length
LINE = 64  # alignment of sections inside a record and of tensors inside the trunk
DIGEST_BYTES = 32

Digest = bytes  # 32 bytes of BLAKE3; an alias, since some structures here have a field called bytes

RECORD_MAGIC = b"MOEPACKR"
TRUNK_MAGIC = b"MOEPACKT"

RECORD_HEADER_BYTES = 1024
TRUNK_HEADER_BYTES = PAGE
MAX_SECTIONS = 11
MAX_SCALE_EXPONENT = 100
MAX_SIDE = 1 << 24  # rows or columns of one expert matrix
MAX_RECORD_BYTES = 1 << 40

_RECORD_HEAD = struct.Struct("<8sH2xIIIIHHQQ16sHHIf52x")
_MATRIX = struct.Struct("<IIif32s16x")
_SECTION = struct.Struct("<BBHIQQ8x32s")
_TRUNK_HEAD = struct.Struct("<8sH2xIQ")

_MATRIX_TABLE = _RECORD_HEAD.size
_SECTION_TABLE = _MATRIX_TABLE + 3 * _MATRIX.size


class Codec(enum.IntEnum):
    """Codec numbers of SPEC section 8."""

    RVQ = 1
    MXFP4 = 2
    GROUP_INT = 3
    RAW = 4

    @property
    def label(self) -> str:
        """The name used in recipes, manifests and messages."""
        return self.name.lower()


class Matrix(enum.IntEnum):
    """The three matrices of a gated expert, in the order in which a record holds them."""

    GATE = 0
    UP = 1
    DOWN = 2

    @property
    def label(self) -> str:
        return self.name.lower()


class SectionKind(enum.IntEnum):
    """What a section of a record holds (SPEC section 6.4)."""

    CODEBOOKS = 1
    SCALES = 2
    CODES = 3


SHARED = 255  # the matrix number of a section that serves all three matrices


def align(value: int, unit: int) -> int:
    """The smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class Section:
    """One sub-block of a record: ``bytes`` bytes at ``offset`` from the record's start, with their BLAKE3."""

    kind: SectionKind
    matrix: int
    offset: int
    bytes: int
    digest: Digest

    @property
    def label(self) -> str:
        """For messages, for example ``gate.codes``."""
        name = "shared" if self.matrix == SHARED else Matrix(self.matrix).label
        return f"{name}.{self.kind.name.lower()}"


@dataclass(frozen=True)
class MatrixEntry:
    """One expert matrix: its true extents, its scale exponent, its error and the digest of its source bytes."""

    rows: int
    cols: int
    scale_exponent: int
    rel_error: float
    source_digest: Digest


@dataclass(frozen=True)
class RecordHeader:
    """The first 1,024 bytes of an expert record (SPEC section 6)."""

    layer: int
    expert: int
    source_expert: int
    codec: Codec
    parameters: bytes
    record_bytes: int
    payload_bytes: int
    rel_error: float
    matrices: tuple[MatrixEntry, MatrixEntry, MatrixEntry]
    sections: tuple[Section, ...]

    def section(self, kind: SectionKind, matrix: int) -> Section:
        """The section of that kind which serves ``matrix``, its own or the shared one."""
        for owner in (matrix, SHARED):
            for section in self.sections:
                if section.kind == kind and section.matrix == owner:
                    return section
        raise FormatError(
            f"record has no section {kind.name.lower()} for matrix {matrix}", where=record_name(self.layer, self.expert)
        )


def record_name(layer: int, expert: int) -> str:
    """How messages name a record."""
    return f"layer {layer} expert {expert}"


def relative_error(sums: Sequence[tuple[float, float]]) -> float:
    """||W - W'|| / ||W|| from pairs of squared sums (difference, source), as a finite number.

    A source that is zero everywhere has error 0 if it is reproduced, else 1 (SPEC section 6.5).
    """
    difference = math.fsum(pair[0] for pair in sums)
    source = math.fsum(pair[1] for pair in sums)
    if source > 0.0:
        return math.sqrt(difference / source)
    return 0.0 if difference == 0.0 else 1.0


def pack_record_header(header: RecordHeader) -> bytes:
    """The 1,024 bytes of ``header``."""
    parts = [
        _RECORD_HEAD.pack(
            RECORD_MAGIC,
            FORMAT_VERSION,
            RECORD_HEADER_BYTES,
            header.layer,
            header.expert,
            header.source_expert,
            header.codec,
            0,
            header.record_bytes,
            header.payload_bytes,
            header.parameters,
            len(header.sections),
            len(header.matrices),
            0,
            header.rel_error,
        )
    ]
    parts += [
        _MATRIX.pack(entry.rows, entry.cols, entry.scale_exponent, entry.rel_error, entry.source_digest)
        for entry in header.matrices
    ]
    parts += [
        _SECTION.pack(section.kind, section.matrix, 0, 0, section.offset, section.bytes, section.digest)
        for section in header.sections
    ]
    return b"".join(parts).ljust(RECORD_HEADER_BYTES, b"\0")


def unpack_record_header(data: bytes, *, where: str, offset: int = 0) -> RecordHeader:
    """Read a record header, checking all that the header alone can show.

    Args:
        data: at least the 1,024 bytes of the header.
        where: file or record, for messages.
        offset: where in ``where`` the record starts, for messages.

    Raises:
        FormatError: naming the field's byte offset.
    """
    if len(data) < RECORD_HEADER_BYTES:
        raise FormatError(
            "record header is cut short", where=where, offset=offset, expected=RECORD_HEADER_BYTES, found=len(data)
        )
    data = data[:RECORD_HEADER_BYTES]
    (
        magic,
        version,
        header_bytes,
        layer,
        expert,
        source_expert,
        codec,
        flags,
        record_bytes,
        payload_bytes,
        parameters,
        section_count,
        matrix_count,
        reserved,
        rel_error,
    ) = _RECORD_HEAD.unpack_from(data)
    check_preamble(data, magic, RECORD_MAGIC, version, where, offset)

    def fail(what: str, at: int, expected: object, found: object) -> FormatError:
        return FormatError(what, where=where, offset=offset + at, expected=expected, found=found)

    if header_bytes != RECORD_HEADER_BYTES:
        raise fail("record header has an unknown length", 12, RECORD_HEADER_BYTES, header_bytes)
    if codec not in Codec.__members__.values():
        raise fail("unknown codec", 28, "1 to 4", codec)
    if flags:
        raise fail("unknown critical flags", 30, 0, flags)
    if not RECORD_HEADER_BYTES <= payload_bytes <= record_bytes <= MAX_RECORD_BYTES:
        raise fail("payload does not fit its record", 40, f"{RECORD_HEADER_BYTES} to {record_bytes}", payload_bytes)
    if record_bytes != align(payload_bytes, PAGE):
        raise fail(
            "record length is not its payload rounded up to a page", 32, align(payload_bytes, PAGE), record_bytes
        )
    if not 1 <= section_count <= MAX_SECTIONS:
        raise fail("section count out of range", 64, f"1 to {MAX_SECTIONS}", section_count)
    if matrix_count != 3:
        raise fail("matrix count out of range", 66, 3, matrix_count)
    if not 0.0 <= rel_error < math.inf:
        raise fail("relative error is not a finite number", 72, "at least 0", rel_error)
    used = _SECTION_TABLE + section_count * _SECTION.size
    if reserved or any(data[76:_MATRIX_TABLE]) or any(data[used:]):
        raise fail("reserved bytes are not zero", 76, 0, "other bytes")

    matrices = tuple(_unpack_matrix(data, number, where, offset) for number in range(3))
    sections = tuple(_unpack_section(data, number, where, offset) for number in range(section_count))
    _check_sections(sections, payload_bytes, where, offset)
    return RecordHeader(
        layer,
        expert,
        source_expert,
        Codec(codec),
        parameters,
        record_bytes,
        payload_bytes,
        rel_error,
        (matrices[0], matrices[1], matrices[2]),
        sections,
    )


def scale_exponents(data: bytes | memoryview) -> tuple[int, int, int]:
    """Those of gate, up and down, from a record's first 1,024 bytes that :func:`unpack_record_header` has accepted."""
    first, second, third = (_MATRIX.unpack_from(data, _MATRIX_TABLE + number * _MATRIX.size)[2] for number in range(3))
    return first, second, third


def _unpack_matrix(data: bytes, number: int, where: str, offset: int) -> MatrixEntry:
    at = _MATRIX_TABLE + number * _MATRIX.size
    rows, cols, exponent, rel_error, digest = _MATRIX.unpack_from(data, at)
    for name, value, byte in (("rows", rows, 0), ("columns", cols, 4)):
        if not 1 <= value <= MAX_SIDE:
            raise FormatError(
                f"matrix {Matrix(number).label} has no sensible number of {name}",
                where=where,
                offset=offset + at + byte,
                expected=f"1 to {MAX_SIDE}",
                found=value,
            )
    if not -MAX_SCALE_EXPONENT <= exponent <= MAX_SCALE_EXPONENT:
        raise FormatError(
            "scale exponent out of range", where=where, offset=offset + at + 8, expected="-100 to 100", found=exponent
        )
    if not 0.0 <= rel_error < math.inf:
        raise FormatError(
            "relative error is not a finite number", where=where, offset=offset + at + 12, found=rel_error
        )
    if any(data[at + 48 : at + _MATRIX.size]):
        raise FormatError("reserved bytes are not zero", where=where, offset=offset + at + 48)
    return MatrixEntry(rows, cols, exponent, rel_error, digest)


def _unpack_section(data: bytes, number: int, where: str, offset: int) -> Section:
    at = _SECTION_TABLE + number * _SECTION.size
    kind, matrix, reserved16, reserved32, start, length, digest = _SECTION.unpack_from(data, at)
    if kind not in SectionKind.__members__.values():
        raise FormatError("unknown kind of section", where=where, offset=offset + at, found=kind)
    if matrix not in (0, 1, 2, SHARED):
        raise FormatError("section of an unknown matrix", where=where, offset=offset + at + 1, found=matrix)
    if reserved16 or reserved32 or any(data[at + 24 : at + 32]):
        raise FormatError("reserved bytes are not zero", where=where, offset=offset + at + 2)
    return Section(SectionKind(kind), matrix, start, length, digest)


def _check_sections(sections: Sequence[Section], payload_bytes: int, where: str, offset: int) -> None:
    """Sections stand in order, 64-aligned, without a gap beyond the alignment, and end with the payload."""
    expected = RECORD_HEADER_BYTES
    for number, section in enumerate(sections):
        at = offset + _SECTION_TABLE + number * _SECTION.size
        if section.offset != expected:
            raise FormatError(
                f"section {section.label} is out of place",
                where=where,
                offset=at + 8,
                expected=expected,
                found=section.offset,
            )
        if not 1 <= section.bytes <= payload_bytes - section.offset:
            raise FormatError(
                f"section {section.label} does not fit the record",
                where=where,
                offset=at + 16,
                expected=f"1 to {payload_bytes - section.offset}",
                found=section.bytes,
            )
        expected = align(section.offset + section.bytes, LINE)
    end = sections[-1].offset + sections[-1].bytes
    if end != payload_bytes:
        raise FormatError(
            "payload does not end with its last section",
            where=where,
            offset=offset + 40,
            expected=end,
            found=payload_bytes,
        )


def pack_trunk_header(file_bytes: int) -> bytes:
    """The first page of ``trunk.bin``."""
    head = _TRUNK_HEAD.pack(TRUNK_MAGIC, FORMAT_VERSION, TRUNK_HEADER_BYTES, file_bytes)
    return head.ljust(TRUNK_HEADER_BYTES, b"\0")


def check_trunk_header(data: bytes, file_bytes: int, *, where: str) -> None:
    """Insist that ``data`` is exactly the header page of a trunk of ``file_bytes`` bytes."""
    if len(data) < TRUNK_HEADER_BYTES:
        raise FormatError(
            "trunk header is cut short", where=where, offset=0, expected=TRUNK_HEADER_BYTES, found=len(data)
        )
    magic, version, header_bytes, length = _TRUNK_HEAD.unpack_from(data)
    check_preamble(data, magic, TRUNK_MAGIC, version, where, 0)
    if header_bytes != TRUNK_HEADER_BYTES:
        raise FormatError(
            "trunk header has an unknown length",
            where=where,
            offset=12,
            expected=TRUNK_HEADER_BYTES,
            found=header_bytes,
        )
    if length != file_bytes:
        raise FormatError(
            "trunk has another length than its header says", where=where, offset=16, expected=length, found=file_bytes
        )
    if any(data[_TRUNK_HEAD.size : TRUNK_HEADER_BYTES]):
        raise FormatError("reserved bytes are not zero", where=where, offset=_TRUNK_HEAD.size)


def check_preamble(data: bytes, magic: bytes, expected: bytes, version: int, where: str, offset: int) -> None:
    """The first twelve bytes, alike in all three binary structures."""
    if magic == expected[::-1]:
        raise FormatError("magic is reversed: the file was written in the other byte order", where=where, offset=offset)
    if magic != expected:
        raise FormatError("wrong magic", where=where, offset=offset, expected=expected.decode(), found=repr(magic))
    if version != FORMAT_VERSION:
        raise FormatError(
            "unknown format version", where=where, offset=offset + 8, expected=FORMAT_VERSION, found=version
        )
    if any(data[10:12]):
        raise FormatError("reserved bytes are not zero", where=where, offset=offset + 10)
