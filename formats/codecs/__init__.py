"""The codecs, by number: one way to ask what sections a matrix takes and to decode it (SPEC section 8).

Each codec is a module with a page of the same name. They share seven names: ``Parameters`` (frozen, with
``pack`` and ``unpack``), ``shared_sections``, ``matrix_sections``, ``row_sections``, ``Stored`` (a matrix as its
sections hold it), ``check`` and ``decode``. Everyone else goes through the functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from formats.codecs import group_int, mxfp4, raw, rvq
from formats.codecs.common import Buffer, SectionBytes, Single
from formats.errors import FormatError
from formats.layout import (
    LINE,
    PAGE,
    RECORD_HEADER_BYTES,
    SHARED,
    Codec,
    Matrix,
    RecordHeader,
    Section,
    SectionKind,
    align,
    record_name,
)

Parameters = rvq.Parameters | mxfp4.Parameters | group_int.Parameters | raw.Parameters
Stored = rvq.Stored | mxfp4.Stored | group_int.Stored | raw.Stored
Shapes = Sequence[tuple[int, int]]  # (rows, cols) of gate, up and down


class _CodecModule(Protocol):
    """What a codec's module offers; its own ``Parameters`` stand where ``Any`` stands here."""

    Parameters: Any

    def shared_sections(self, parameters: Any) -> tuple[tuple[SectionKind, int], ...]: ...

    def matrix_sections(self, rows: int, cols: int, parameters: Any) -> tuple[tuple[SectionKind, int], ...]: ...

    def row_sections(self, cols: int, parameters: Any) -> tuple[tuple[SectionKind, int], ...]: ...

    def check(
        self, rows: int, cols: int, parameters: Any, sections: SectionBytes, *, scale_exponent: int, where: str
    ) -> Any: ...

    def decode(
        self, rows: int, cols: int, parameters: Any, sections: SectionBytes, *, scale_exponent: int, where: str
    ) -> Single: ...


_CODECS: Mapping[Codec, _CodecModule] = MappingProxyType(
    {Codec.RVQ: rvq, Codec.MXFP4: mxfp4, Codec.GROUP_INT: group_int, Codec.RAW: raw}
)
_TRUNK_CODECS = (Codec.GROUP_INT, Codec.RAW)
_MAX_RANK = 8


@dataclass(frozen=True)
class TrunkSection:
    """One section of a trunk tensor: ``bytes`` bytes at ``offset`` from the tensor's start, ``row_bytes`` a row."""

    kind: SectionKind
    offset: int
    bytes: int
    row_bytes: int


def unpack_parameters(codec: Codec, data: Buffer, where: str) -> Parameters:
    """Read a 16-byte parameter block, strictly.

    Raises:
        FormatError: a value out of range, an unknown dtype, reserved bytes that are not zero.
    """
    parameters: Parameters = _CODECS[codec].Parameters.unpack(data, where=where)
    return parameters


def record_sections(codec: Codec, parameters: Parameters, shapes: Shapes) -> tuple[tuple[SectionKind, int, int], ...]:
    """(kind, matrix number or SHARED, bytes) of every section of an expert record, in record order.

    Args:
        shapes: (rows, cols) of gate, up and down.
    """
    module = _CODECS[codec]
    sections = [(kind, SHARED, length) for kind, length in module.shared_sections(parameters)]
    for matrix, (rows, cols) in zip(Matrix, shapes, strict=True):
        sections += [(kind, int(matrix), length) for kind, length in module.matrix_sections(rows, cols, parameters)]
    return tuple(sections)


def section_offsets(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where the sections of a record start: one after another behind the header, each on a line of 64 bytes."""
    offsets = []
    end = RECORD_HEADER_BYTES
    for length in lengths:
        offsets.append(align(end, LINE))
        end = offsets[-1] + length
    return tuple(offsets)


def payload_bytes(codec: Codec, parameters: Parameters, shapes: Shapes) -> int:
    """Length of a record up to the end of its last section, the header included."""
    lengths = [length for _, _, length in record_sections(codec, parameters, shapes)]
    return section_offsets(lengths)[-1] + lengths[-1]


def record_bytes(codec: Codec, parameters: Parameters, shapes: Shapes) -> int:
    """Length of an expert record, padded to whole pages: known before anything is read."""
    return align(payload_bytes(codec, parameters, shapes), PAGE)


def check_sections(header: RecordHeader) -> Parameters:
    """Insist that the section table is the one that codec, parameters and extents call for; returns the parameters.

    Raises:
        FormatError: naming the first section that differs.
    """
    where = record_name(header.layer, header.expert)
    parameters = unpack_parameters(header.codec, header.parameters, where)
    shapes = [(entry.rows, entry.cols) for entry in header.matrices]
    expected = record_sections(header.codec, parameters, shapes)
    if len(expected) != len(header.sections):
        raise FormatError("wrong number of sections", where=where, expected=len(expected), found=len(header.sections))
    for (kind, matrix, length), section in zip(expected, header.sections, strict=True):
        wanted = Section(kind, matrix, section.offset, length, section.digest)
        if (kind, matrix) != (section.kind, section.matrix):
            raise FormatError("sections are out of order", where=where, expected=wanted.label, found=section.label)
        if length != section.bytes:
            raise FormatError(
                f"section {section.label} has the wrong length", where=where, expected=length, found=section.bytes
            )
    return parameters


def stored_matrix(
    codec: Codec,
    parameters: Parameters,
    rows: int,
    cols: int,
    sections: SectionBytes,
    *,
    scale_exponent: int = 0,
    where: str,
) -> Stored:
    """A matrix as its sections hold it, checked but not decoded; shared sections included.

    Raises:
        FormatError: bytes that break the codec's rules.
    """
    stored: Stored = _CODECS[codec].check(rows, cols, parameters, sections, scale_exponent=scale_exponent, where=where)
    return stored


def decode_sections(
    codec: Codec,
    parameters: Parameters,
    rows: int,
    cols: int,
    sections: SectionBytes,
    *,
    scale_exponent: int = 0,
    where: str,
) -> Single:
    """Decode a matrix from the bytes of its sections, shared ones included: float32 [rows, cols].

    Raises:
        FormatError: bytes that break the codec's rules.
    """
    return _CODECS[codec].decode(rows, cols, parameters, sections, scale_exponent=scale_exponent, where=where)


def decode_matrix(header: RecordHeader, read: Callable[[Section], Buffer], matrix: int) -> Single:
    """Decode one matrix of an expert record.

    Args:
        header: of the record.
        read: returns the bytes of a section, whose digest is the caller's to check.
        matrix: 0 gate, 1 up, 2 down.

    Returns:
        float32 [rows, cols].

    Raises:
        FormatError: the section table or a section's contents break the codec's rules.
    """
    parameters = check_sections(header)
    entry = header.matrices[matrix]
    return decode_sections(
        header.codec,
        parameters,
        entry.rows,
        entry.cols,
        {section.kind: read(section) for section in header.sections if section.matrix in (matrix, SHARED)},
        scale_exponent=entry.scale_exponent,
        where=f"{record_name(header.layer, header.expert)} {Matrix(matrix).label}",
    )


def tensor_extents(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, cols) as which a trunk tensor of any rank is stored: the last dimension is a row, a scalar is 1 by 1."""
    rows = 1
    for side in shape[:-1]:
        rows *= side
    return rows, shape[-1] if shape else 1


def trunk_sections(
    codec: Codec, parameters: Parameters, shape: Sequence[int], *, where: str
) -> tuple[TrunkSection, ...]:
    """The sections of a trunk tensor, codes before scales, each on a line of 64 bytes.

    Row r of a tensor has ``row_bytes`` bytes at ``offset + r * row_bytes`` of each section, so callers may
    stream runs of rows and hand them to :func:`decode_rows`.

    Raises:
        FormatError: a codec that the trunk does not use, or a rank that the codec does not take.
    """
    if codec not in _TRUNK_CODECS:
        raise FormatError(f"codec {codec.label} is for experts only", where=where)
    if len(shape) > _MAX_RANK or (codec == Codec.GROUP_INT and len(shape) != 2):
        raise FormatError(
            f"codec {codec.label} does not take this rank",
            where=where,
            expected=2 if codec == Codec.GROUP_INT else f"at most {_MAX_RANK}",
            found=len(shape),
        )
    rows, cols = tensor_extents(shape)
    strides = dict(_CODECS[codec].row_sections(cols, parameters))
    sections: list[TrunkSection] = []
    end = 0
    for kind in (SectionKind.CODES, SectionKind.SCALES):
        if kind in strides:
            sections.append(TrunkSection(kind, align(end, LINE), rows * strides[kind], strides[kind]))
            end = sections[-1].offset + sections[-1].bytes
    return tuple(sections)


def trunk_bytes(codec: Codec, parameters: Parameters, shape: Sequence[int], *, where: str) -> int:
    """Length of a stored trunk tensor, from the start of its codes to the end of its last section."""
    last = trunk_sections(codec, parameters, shape, where=where)[-1]
    return last.offset + last.bytes


def decode_rows(
    codec: Codec,
    parameters: Parameters,
    rows: int,
    cols: int,
    sections: SectionBytes,
    *,
    scale_exponent: int = 0,
    where: str,
) -> Single:
    """Decode a run of ``rows`` whole rows from the bytes that they take in each section: float32 [rows, cols].

    Raises:
        FormatError: a codec that the trunk does not use, or bytes that break its rules.
    """
    if codec not in _TRUNK_CODECS:
        raise FormatError(f"codec {codec.label} is for experts only", where=where)
    return decode_sections(codec, parameters, rows, cols, sections, scale_exponent=scale_exponent, where=where)
