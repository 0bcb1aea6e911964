"""``index.bin``: a header and one fixed-width row an expert record (SPEC section 5).

Pure functions between bytes and frozen dataclasses. Whether rows agree with the manifest is the business of
``container``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from formats.errors import FormatError
from formats.layout import FORMAT_VERSION, MAX_RECORD_BYTES, PAGE, Codec, Digest, check_preamble

INDEX_MAGIC = b"MOEPACKI"
INDEX_ROW_BYTES = 128

ParameterBlock = bytes  # 16 bytes

_INDEX_HEAD = struct.Struct("<8sH2xIQ104x")
_INDEX_ROW = struct.Struct("<IIIHHQQ32s4f16s32x")


@dataclass(frozen=True, slots=True)
class IndexRow:
    """One row of ``index.bin`` (SPEC section 5): where a record lies, and what it must say and hash to."""

    layer: int
    expert: int
    source_expert: int
    codec: Codec
    offset: int
    bytes: int
    digest: Digest
    matrix_errors: tuple[float, float, float]
    rel_error: float
    parameters: ParameterBlock


def pack_index(rows: Sequence[IndexRow]) -> bytes:
    """The whole of ``index.bin``: its header and one row a record, in the order given."""
    head = _INDEX_HEAD.pack(INDEX_MAGIC, FORMAT_VERSION, INDEX_ROW_BYTES, len(rows))
    return head + b"".join(pack_index_row(row) for row in rows)


def pack_index_row(row: IndexRow) -> bytes:
    """The 128 bytes of ``row``."""
    return _INDEX_ROW.pack(
        row.layer,
        row.expert,
        row.source_expert,
        row.codec,
        0,
        row.offset,
        row.bytes,
        row.digest,
        *row.matrix_errors,
        row.rel_error,
        row.parameters,
    )


def unpack_index_header(data: bytes, *, where: str) -> int:
    """Check the header of ``index.bin`` and return the number of rows that it announces."""
    if len(data) < INDEX_ROW_BYTES:
        raise FormatError("index header is cut short", where=where, offset=0, expected=INDEX_ROW_BYTES, found=len(data))
    magic, version, row_bytes, rows = _INDEX_HEAD.unpack_from(data)
    check_preamble(data, magic, INDEX_MAGIC, version, where, 0)
    if row_bytes != INDEX_ROW_BYTES:
        raise FormatError(
            "index rows have an unknown width", where=where, offset=12, expected=INDEX_ROW_BYTES, found=row_bytes
        )
    if any(data[24:INDEX_ROW_BYTES]):
        raise FormatError("reserved bytes are not zero", where=where, offset=24)
    return int(rows)


def unpack_index_rows(data: bytes, *, where: str, offset: int = INDEX_ROW_BYTES) -> list[IndexRow]:
    """Read rows; ``offset`` is where in the file ``data`` begins, for messages."""
    if len(data) % INDEX_ROW_BYTES:
        raise FormatError("index rows are cut short", where=where, offset=offset + len(data))
    return [
        _unpack_index_row(data[at : at + INDEX_ROW_BYTES], where, offset + at)
        for at in range(0, len(data), INDEX_ROW_BYTES)
    ]


def _unpack_index_row(data: bytes, where: str, at: int) -> IndexRow:
    layer, expert, source_expert, codec, flags, start, length, digest, gate, up, down, rel_error, parameters = (
        _INDEX_ROW.unpack(data)
    )
    if codec not in Codec.__members__.values():
        raise FormatError("unknown codec", where=where, offset=at + 12, expected="1 to 4", found=codec)
    if flags:
        raise FormatError("unknown critical flags", where=where, offset=at + 14, expected=0, found=flags)
    if start % PAGE or length % PAGE or not PAGE <= length <= MAX_RECORD_BYTES or start + length > 1 << 62:
        raise FormatError(
            "record extent is not page aligned or out of range",
            where=where,
            offset=at + 16,
            found=f"{start} + {length}",
        )
    if not all(0.0 <= error < math.inf for error in (gate, up, down, rel_error)):
        raise FormatError("relative error is not a finite number", where=where, offset=at + 64)
    if any(data[96:]):
        raise FormatError("reserved bytes are not zero", where=where, offset=at + 96)
    return IndexRow(
        layer, expert, source_expert, Codec(codec), start, length, digest, (gate, up, down), rel_error, parameters
    )
