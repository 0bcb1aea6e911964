"""Codec rvq: residual vector quantisation of 8-dimensional vectors, one float16 scale a row (``rvq.md``).

A row divided by its scale is cut into vectors of 8 columns, each the sum of one codebook entry a stage.
Fitting codebooks is the packer's business; here are the arithmetic that the specification fixes, the
choice of indices for given codebooks, and the blocked order in which indices are stored.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from formats import kernels
from formats.codecs.common import (
    Buffer,
    Half,
    Octets,
    SectionBytes,
    Single,
    check_scale_exponent,
    choose_exponent,
    half_view,
    parameter_bytes,
    section_view,
    span,
    to_half,
    to_single,
)
from formats.errors import FormatError
from formats.layout import SectionKind

DIMENSION: Final = 8  # columns a vector, the only value of format version 1
BLOCK_ROWS: Final = 64  # rows whose indices lie side by side
MAX_STAGES: Final = 4
MAX_ENTRIES: Final = 256
SCOPES: Final = ("expert", "matrix")

_BLOCK = struct.Struct("<BBBBH10x")
_LIMIT = 2.0**127  # bound of decoded values, half of float32's range so that no rounding crosses it


@dataclass(frozen=True)
class Parameters:
    """How a record is coded: ``stages`` codebooks of ``entries`` vectors, fitted for an expert or for each matrix."""

    stages: int = 3
    entries: int = 256
    scope: Literal["expert", "matrix"] = "expert"
    dimension: int = DIMENSION

    def __post_init__(self) -> None:
        _check(self.dimension, DIMENSION, DIMENSION, "dimension", 0, "parameters of rvq")
        _check(self.stages, 1, MAX_STAGES, "stages", 1, "parameters of rvq")
        _check(self.entries, 1, MAX_ENTRIES, "entries", 4, "parameters of rvq")
        if self.scope not in SCOPES:
            raise FormatError(
                "unknown scope", where="parameters of rvq", expected=" or ".join(SCOPES), found=repr(self.scope)
            )

    def pack(self) -> bytes:
        """The 16-byte parameter block."""
        return _BLOCK.pack(self.dimension, self.stages, SCOPES.index(self.scope), 0, self.entries)

    @classmethod
    def unpack(cls, data: Buffer, *, where: str) -> Parameters:
        """Read a parameter block; :class:`FormatError` for values out of range and reserved bytes that are not zero."""
        block = parameter_bytes(data, where=where)
        dimension, stages, scope, reserved, entries = _BLOCK.unpack(block)
        _check(dimension, DIMENSION, DIMENSION, "dimension", 0, where)
        _check(stages, 1, MAX_STAGES, "stages", 1, where)
        _check(scope, 0, len(SCOPES) - 1, "scope", 2, where)
        _check(entries, 1, MAX_ENTRIES, "entries", 4, where)
        if reserved or any(block[6:]):
            raise FormatError("reserved bytes of the codec parameters are not zero", where=where, offset=3)
        return cls(stages, entries, "matrix" if scope else "expert")


def _check(value: int, low: int, high: int, name: str, offset: int, where: str) -> None:
    if not low <= value <= high:
        expected = str(low) if low == high else f"{low} to {high}"
        raise FormatError(f"rvq {name} out of range", where=where, offset=offset, expected=expected, found=value)


def vectors_per_row(cols: int) -> int:
    """Vectors that a row of ``cols`` columns is cut into; the last one may be short."""
    return -(-cols // DIMENSION)


def codebook_bytes(parameters: Parameters) -> int:
    """Length of one codebooks section."""
    return parameters.stages * parameters.entries * DIMENSION * 2


def shared_sections(parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """Sections that serve all three matrices: the codebooks, if their scope is the expert."""
    return ((SectionKind.CODEBOOKS, codebook_bytes(parameters)),) if parameters.scope == "expert" else ()


def matrix_sections(rows: int, cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes) of a matrix' own sections, in record order."""
    own = ((SectionKind.CODEBOOKS, codebook_bytes(parameters)),) if parameters.scope == "matrix" else ()
    blocks = -(-rows // BLOCK_ROWS)
    codes = blocks * vectors_per_row(cols) * parameters.stages * BLOCK_ROWS
    return (*own, (SectionKind.SCALES, 2 * rows), (SectionKind.CODES, codes))


def row_sections(cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """Refused: rows of this codec are not contiguous, so it is for experts only."""
    raise FormatError("codec rvq does not store rows one after another", where="rvq")


# Encoding: float32 rows -> row scales -> 8-vectors -> (codebooks) -> indices -> section bytes.


def row_scales(values: Single, *, where: str = "matrix") -> tuple[Half, int]:
    """The root mean square of each row, as it is stored.

    Args:
        values: float32 [rows, cols].
        where: for messages.

    Returns:
        float16 [rows] and the scale exponent. What is stored is what every later step uses.

    Raises:
        FormatError: values that are not finite, or a scale beyond float16 under the largest exponent.
    """
    exact = np.sqrt(kernels.row_sums(values, values)[:, 0] / values.shape[1])
    exponent = choose_exponent(*span(exact))
    return to_half(exact, exponent, where=where), exponent


def to_vectors(values: Single, scales: Half, exponent: int) -> Single:
    """Rows divided by their stored scales and cut into vectors.

    Args:
        values: float32 [rows, cols].
        scales: float16 [rows], as stored, with their ``exponent``.

    Returns:
        float32 [rows, ceil(cols / 8), 8]; past the last column, and in rows of scale zero, all zero.
    """
    rows, cols = values.shape
    vectors = np.zeros((rows, vectors_per_row(cols), DIMENSION), dtype=np.float32)
    meant = to_single(scales, exponent)[:, None]
    flat = vectors.reshape(rows, -1)[:, :cols]
    np.divide(values, meant, out=flat, where=meant != 0)
    return vectors


def pack_codes(codes: Octets) -> bytes:
    """The codes section of a matrix: uint8 [rows, vectors, stages] -> [blocks][vector][stage][64 rows]."""
    return kernels.pack_rvq(codes).tobytes()


def unpack_codes(data: Buffer, rows: int, cols: int, parameters: Parameters, *, where: str) -> Octets:
    """The inverse of :func:`pack_codes`: uint8 [rows, vectors, stages], after checking every byte."""
    packed = _blocks({SectionKind.CODES: data}, rows, cols, parameters, where)
    _check_codes(packed, rows, parameters, where)
    return kernels.unpack_rvq(packed, rows)


def pack_codebooks(codebooks: Half) -> bytes:
    """A codebooks section: float16 [stages, entries, 8], little-endian."""
    return codebooks.astype("<f2").tobytes()


def unpack_codebooks(data: Buffer, parameters: Parameters, *, where: str) -> Half:
    """float16 [stages, entries, 8], refused if an entry is NaN or infinite."""
    view = section_view({SectionKind.CODEBOOKS: data}, SectionKind.CODEBOOKS, codebook_bytes(parameters), where=where)
    halves = half_view(view, where=f"{where} codebooks")
    return halves.reshape(parameters.stages, parameters.entries, DIMENSION)


@dataclass(frozen=True)
class Stored:
    """A matrix as its sections hold it, without a copy.

    Attributes:
        codebooks: float16 [stages, entries, 8].
        scales: float16 [rows].
        codes: uint8 [blocks, vectors, stages, 64].
    """

    codebooks: Half
    scales: Half
    codes: Octets


def check(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Stored:
    """Refuse what ``rvq.md`` refuses, without decoding; arguments and errors are those of :func:`decode`.

    Full codebooks need no look at the indices but for those that fill up the last block.
    """
    check_scale_exponent(scale_exponent, where=where)
    if SectionKind.CODEBOOKS not in sections:
        raise FormatError("section codebooks is absent", where=where)
    codebooks = unpack_codebooks(sections[SectionKind.CODEBOOKS], parameters, where=where)
    scales = half_view(section_view(sections, SectionKind.SCALES, 2 * rows, where=where), where=f"{where} scales")
    codes = _blocks(sections, rows, cols, parameters, where)
    _check_codes(codes, rows, parameters, where)
    reach = np.abs(codebooks).max(axis=(1, 2)).astype(np.float64).sum()
    largest = float(reach) * float(np.abs(scales).max()) * 2.0**scale_exponent
    if largest >= _LIMIT:
        raise FormatError(
            "codebooks times scales exceed float32", where=where, expected="below 2**127", found=f"{largest:g}"
        )
    return Stored(codebooks, scales, codes)


def decode(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Single:
    """Decode a matrix: (((c0 + c1) + c2) + c3) * (float32(scale) * 2**e), each operation rounded to float32.

    Args:
        rows, cols: true extents.
        parameters: of the record.
        sections: bytes of CODEBOOKS (the shared ones or the matrix' own), SCALES and CODES.
        scale_exponent: of the matrix entry.
        where: for messages.

    Returns:
        float32 [rows, cols]. Memory beyond it is bounded.

    Raises:
        FormatError: for each of the refusals in ``rvq.md``.
    """
    stored = check(rows, cols, parameters, sections, scale_exponent=scale_exponent, where=where)
    scales = to_single(stored.scales, scale_exponent)
    return kernels.decode_rvq(stored.codes, stored.codebooks.astype(np.float32), scales, cols)


def _blocks(sections: SectionBytes, rows: int, cols: int, parameters: Parameters, where: str) -> Octets:
    """The codes section as uint8 [blocks, vectors, stages, 64], its length checked."""
    vectors = vectors_per_row(cols)
    blocks = -(-rows // BLOCK_ROWS)
    length = blocks * vectors * parameters.stages * BLOCK_ROWS
    view = section_view(sections, SectionKind.CODES, length, where=where)
    return view.reshape(blocks, vectors, parameters.stages, BLOCK_ROWS)


def _check_codes(packed: Octets, rows: int, parameters: Parameters, where: str) -> None:
    """Every index names an entry, and the rows that fill up the last block have index 0."""
    if parameters.entries < MAX_ENTRIES and int(packed.max()) >= parameters.entries:
        offset = int((packed.reshape(-1) >= parameters.entries).argmax())
        raise FormatError(
            "index beyond the codebook",
            where=f"{where} codes",
            offset=offset,
            expected=f"below {parameters.entries}",
            found=int(packed.reshape(-1)[offset]),
        )
    used = rows - (packed.shape[0] - 1) * BLOCK_ROWS
    if packed[-1, :, :, used:].any():
        raise FormatError("rows past the end of the matrix have an index that is not 0", where=f"{where} codes")
