"""From the three matrices of an expert to its record: a pure function, one call an expert.

The way is that of one expert everywhere in this repository: source bytes -> float32 rows
(``SourceMatrix.to_float32``) -> row scales (``rvq.row_scales``) -> 8-vectors (``rvq.to_vectors``) -> codebooks
(``codebooks.fit_codebooks``) -> indices (``codebooks.choose_indices``) -> record bytes (:func:`build_record`) ->
digest (:func:`record_digest`). One matrix is held in float32 at a time; :func:`peak_bytes` states the memory.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from formats import codecs, kernels, layout
from formats.codecs import Parameters, group_int, mxfp4, raw, rvq
from formats.codecs.common import Buffer, Half, Octets, Single, choose_exponent, to_single
from formats.errors import FormatError, UsageError
from formats.layout import SHARED, Codec, Matrix, MatrixEntry, RecordHeader, Section, SectionKind
from formats.source import SourceMatrix
from packer.encoding.codebooks import EFFORTS, EffortName, choose_indices, fit_codebooks, fitted_scales, refit
from packer.encoding.encode_trunk import squared_sums

_SEED_CONTEXT = b"moepack expert seed 1"
_FIXED_BYTES = 48 << 20  # tables, chunks and k-means, whatever the size of the expert

Sections = Mapping[tuple[SectionKind, int], Buffer]  # by kind and matrix number (or SHARED)


@dataclass(frozen=True)
class EncodedRecord:
    """A record, padded to whole pages, and what the index and the journal say of it.

    Attributes:
        record: all its bytes.
        header: as ``record`` begins with.
        digest: BLAKE3 of all bytes of ``record``.
        matrix_errors: relative errors of gate, up and down as stored, that is rounded to float32.
        rel_error: of the three together, likewise.
        weighted_error: of the three together, with every squared sum weighted by column; None without weights.
    """

    record: bytes
    header: RecordHeader
    digest: bytes
    matrix_errors: tuple[float, float, float]
    rel_error: float
    weighted_error: float | None = None


@dataclass(frozen=True)
class _Coded:
    """Sections of an expert; per matrix the scale exponent and the squared sums of its error, plain and weighted."""

    sections: Sections
    exponents: tuple[int, int, int]
    sums: tuple[tuple[float, float], ...]
    weighted: tuple[tuple[float, float], ...] = ()


def encode_expert(
    sources: Sequence[SourceMatrix],
    *,
    layer: int,
    expert: int,
    source_expert: int,
    codec: Codec,
    parameters: Parameters,
    seed: int,
    effort: EffortName = "default",
    bias: int = mxfp4.DEFAULT_BIAS,
    weights: Sequence[Single] | None = None,
) -> EncodedRecord:
    """Encode an expert. The result depends on the arguments alone, not on what was encoded before.

    Args:
        sources: gate, up, down.
        layer, expert: as numbered in the container.
        source_expert: as numbered in the source.
        codec, parameters: what the plan decided.
        seed: of the recipe, 0 to 2**64 - 1.
        effort: of the recipe: how much work goes into fitting and searching.
        bias: of the source's MXFP4 scales.
        weights: for gate, up and down float32 [cols], what a squared error in each column counts in fitting, or none.
            Recorded errors are plain ones all the same.

    Raises:
        FormatError: weights that are not finite, or beyond what the codec can hold.
        UsageError: a lossless codec that does not match the source's format.
    """
    where = layout.record_name(layer, source_expert)
    if isinstance(parameters, rvq.Parameters):
        coded = _encode_rvq(sources, parameters, expert_seed(seed, layer, source_expert), effort, bias, weights, where)
    elif isinstance(parameters, group_int.Parameters):
        coded = _encode_group_int(sources, parameters, bias, where)
    else:
        coded = _keep(sources, codec, parameters, bias, where)
    errors = [_stored(layout.relative_error([pair])) for pair in coded.sums]
    rel_error = _stored(layout.relative_error(coded.sums))
    gate, up, down = (
        MatrixEntry(source.rows, source.cols, exponent, error, source.digest)
        for source, exponent, error in zip(sources, coded.exponents, errors, strict=True)
    )
    record, header = build_record(
        layer=layer,
        expert=expert,
        source_expert=source_expert,
        codec=codec,
        parameters=parameters,
        matrices=(gate, up, down),
        rel_error=rel_error,
        sections=coded.sections,
    )
    weighted = _stored(layout.relative_error(coded.weighted)) if coded.weighted else None
    return EncodedRecord(record, header, record_digest(record), (errors[0], errors[1], errors[2]), rel_error, weighted)


def expert_seed(seed: int, layer: int, source_expert: int) -> int:
    """The seed of one expert: the first 8 bytes, little-endian, of the BLAKE3 of
    ``moepack expert seed 1`` + u64 seed + u32 layer + u32 source expert.

    So an expert's codebooks depend neither on the order of work nor on which experts are packed.
    """
    digest = blake3(_SEED_CONTEXT + struct.pack("<QII", seed, layer, source_expert)).digest()
    return int.from_bytes(digest[:8], "little")


def build_record(
    *,
    layer: int,
    expert: int,
    source_expert: int,
    codec: Codec,
    parameters: Parameters,
    matrices: tuple[MatrixEntry, MatrixEntry, MatrixEntry],
    rel_error: float,
    sections: Sections,
) -> tuple[bytes, RecordHeader]:
    """Lay out a record: header, sections on lines of 64 bytes, zeros up to a whole page (SPEC section 6).

    Args:
        matrices: gate, up, down, with their errors as they are to be stored.
        sections: bytes by kind and matrix number (or SHARED), exactly those that the codec calls for.

    Returns:
        The record and its header.

    Raises:
        FormatError: sections that are not the codec's, or of the wrong length.
    """
    where = layout.record_name(layer, expert)
    shapes = [(entry.rows, entry.cols) for entry in matrices]
    expected = codecs.record_sections(codec, parameters, shapes)
    if {(kind, matrix) for kind, matrix, _ in expected} != set(sections):
        raise FormatError("sections are not those of the codec", where=where)
    payload = codecs.payload_bytes(codec, parameters, shapes)
    total = codecs.record_bytes(codec, parameters, shapes)
    table = []
    parts: list[Buffer] = []
    end = layout.RECORD_HEADER_BYTES
    for (kind, matrix, length), offset in zip(
        expected, codecs.section_offsets([length for _, _, length in expected]), strict=True
    ):
        data = sections[kind, matrix]
        section = Section(kind, matrix, offset, length, blake3(data).digest())
        if len(data) != length:
            raise FormatError(
                f"section {section.label} has the wrong length", where=where, expected=length, found=len(data)
            )
        table.append(section)
        parts += [bytes(offset - end), data]
        end = offset + length
    header = RecordHeader(
        layer, expert, source_expert, codec, parameters.pack(), total, payload, rel_error, matrices, tuple(table)
    )
    return b"".join([layout.pack_record_header(header), *parts, bytes(total - end)]), header


def record_digest(record: Buffer) -> bytes:
    """BLAKE3 of all bytes of a record, header and padding included."""
    return blake3(record).digest()


def peak_bytes(codec: Codec, parameters: Parameters, shapes: codecs.Shapes, source_bytes: int) -> int:
    """Upper bound of the memory that :func:`encode_expert` takes, the source's bytes and the record included.

    Args:
        shapes: (rows, cols) of gate, up and down.
        source_bytes: of the three matrices as read.
    """
    largest = max(rows * cols for rows, cols in shapes)
    total = source_bytes + 2 * codecs.record_bytes(codec, parameters, shapes) + 3 * 4 * largest + _FIXED_BYTES
    if codec == Codec.RVQ:  # the vectors of all matrices at once, and their indices before they are blocked
        vectors = sum(rows * rvq.vectors_per_row(cols) for rows, cols in shapes)
        total += vectors * (4 * rvq.DIMENSION + rvq.MAX_STAGES)
    return total


def _encode_rvq(
    sources: Sequence[SourceMatrix],
    parameters: rvq.Parameters,
    seed: int,
    effort: EffortName,
    bias: int,
    weights: Sequence[Single] | None,
    where: str,
) -> _Coded:
    """Codebooks of the expert or of each matrix, its indices, and the row scales that fit them."""
    sections: dict[tuple[SectionKind, int], Buffer] = {}
    coded = {}
    if parameters.scope == "expert":
        books, fitted = _fit(sources, parameters, seed, effort, bias, weights, where)
        sections[SectionKind.CODEBOOKS, SHARED] = rvq.pack_codebooks(books)
        coded = {matrix: (books, codes) for matrix, codes in zip(Matrix, fitted, strict=True)}
    exponents = []
    sums = []
    weighted = []
    for matrix, source in zip(Matrix, sources, strict=True):
        place = f"{where} {matrix.label}"
        own = None if weights is None else [weights[matrix]]
        if parameters.scope == "matrix":
            books, (codes,) = _fit([source], parameters, seed, effort, bias, own, place)
            sections[SectionKind.CODEBOOKS, matrix] = rvq.pack_codebooks(books)
            coded[matrix] = (books, codes)
        books, codes = coded.pop(matrix)
        packed = kernels.pack_rvq(codes)
        values = source.to_float32(bias)
        ones = np.ones(source.rows, dtype=np.float32)
        decoded = kernels.decode_rvq(packed, books.astype(np.float32), ones, source.cols)
        stored, exponent = fitted_scales(
            values, decoded, *rvq.row_scales(values, where=place), weights=None if own is None else own[0], where=place
        )
        sections[SectionKind.SCALES, matrix] = stored.astype("<f2").tobytes()
        sections[SectionKind.CODES, matrix] = packed.tobytes()
        decoded *= to_single(stored, exponent)[:, None]  # the decoder's last operation, so this is what it gives
        exponents.append(exponent)
        sums.append(squared_sums(values, decoded))
        if own is not None:
            weighted.append(squared_sums(values, decoded, own[0]))
    return _Coded(sections, (exponents[0], exponents[1], exponents[2]), tuple(sums), tuple(weighted))


def _fit(
    sources: Sequence[SourceMatrix],
    parameters: rvq.Parameters,
    seed: int,
    effort: EffortName,
    bias: int,
    weights: Sequence[Single] | None,
    where: str,
) -> tuple[Half, list[Octets]]:
    """Codebooks for matrices that share them, and the indices of each, uint8 [rows, vectors, stages]."""
    work = EFFORTS[effort]
    vectors = []
    for source in sources:
        values = source.to_float32(bias)
        scales, exponent = rvq.row_scales(values, where=where)
        vectors.append(rvq.to_vectors(values, scales, exponent))
    by_vector = None if weights is None else [_by_vector(part) for part in weights]
    books = fit_codebooks(vectors, parameters, seed=seed, effort=work, weights=by_vector)
    codes = [
        choose_indices(part, books, width=work.width, weights=None if by_vector is None else by_vector[number])
        for number, part in enumerate(vectors)
    ]
    return refit(books, vectors, codes, weights=by_vector), codes


def _by_vector(weights: Single) -> Single:
    """Weights float32 [cols] as float32 [vectors, 8]; columns that fill up the last vector count nothing."""
    filled = np.zeros(rvq.vectors_per_row(len(weights)) * rvq.DIMENSION, dtype=np.float32)
    filled[: len(weights)] = weights
    return filled.reshape(-1, rvq.DIMENSION)


def _encode_group_int(
    sources: Sequence[SourceMatrix], parameters: group_int.Parameters, bias: int, where: str
) -> _Coded:
    sections: dict[tuple[SectionKind, int], Buffer] = {}
    exponents = []
    sums = []
    for matrix, source in zip(Matrix, sources, strict=True):
        place = f"{where} {matrix.label}"
        values = source.to_float32(bias)
        exponent = choose_exponent(*group_int.scale_span(values, parameters))
        codes, scales = group_int.encode(values, parameters, exponent, where=place)
        sections[SectionKind.SCALES, matrix] = scales.astype("<f2").tobytes()
        sections[SectionKind.CODES, matrix] = codes.tobytes()
        exponents.append(exponent)
        sums.append(_measure(values, Codec.GROUP_INT, parameters, sections, matrix, exponent, place))
    return _Coded(sections, (exponents[0], exponents[1], exponents[2]), tuple(sums))


def _keep(
    sources: Sequence[SourceMatrix],
    codec: Codec,
    parameters: mxfp4.Parameters | raw.Parameters,
    bias: int,
    where: str,
) -> _Coded:
    """The source's own bytes, once they have been seen to be weights and to decode to what the source says."""
    wanted = "mxfp4" if isinstance(parameters, mxfp4.Parameters) else parameters.dtype
    if isinstance(parameters, mxfp4.Parameters) and parameters.bias != bias:
        raise UsageError("scale bias of codec and source differ", where=where, expected=bias, found=parameters.bias)
    sections: dict[tuple[SectionKind, int], Buffer] = {}
    sums = []
    for matrix, source in zip(Matrix, sources, strict=True):
        place = f"{where} {matrix.label}"
        if source.format != wanted:
            raise UsageError(
                f"codec {codec.label} keeps the source's bytes, and these are of another format",
                where=place,
                expected=wanted,
                found=source.format,
            )
        kinds = (SectionKind.CODES, SectionKind.SCALES)  # the order of a family's templates
        for kind, (_, data) in zip(kinds, source.tensors, strict=False):
            sections[kind, matrix] = data
        values = source.to_float32(bias)
        sums.append(_measure(values, codec, parameters, sections, matrix, 0, place))
    return _Coded(sections, (0, 0, 0), tuple(sums))


def _measure(
    values: Single,
    codec: Codec,
    parameters: Parameters,
    sections: Sections,
    matrix: Matrix,
    exponent: int,
    where: str,
) -> tuple[float, float]:
    """Squared sums (difference, source) of a matrix, from decoding the sections as a reader would."""
    rows, cols = values.shape
    own = {kind: data for (kind, owner), data in sections.items() if owner in (matrix, SHARED)}
    decoded = codecs.decode_sections(codec, parameters, rows, cols, own, scale_exponent=exponent, where=where)
    return squared_sums(values, decoded)


def _stored(error: float) -> float:
    """An error as a record holds it: rounded to float32."""
    return float(np.float32(error))
