"""Matrices as they are stored: views of bytes that someone else holds, so a cached record of N bytes costs N bytes.

Nothing is decoded, copied or converted. The functions here refuse what the codec's page refuses; after that no
product (``formats.encoded``) can fail, and none needs to look.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from formats import codecs, dtypes
from formats.codecs import group_int, mxfp4, raw, rvq
from formats.codecs.common import Buffer, Half, Octets
from formats.errors import FormatError
from formats.layout import SHARED, Codec, Matrix, RecordHeader, SectionKind, record_name, scale_exponents
from formats.manifest_types import TensorInfo
from formats.source import SourceMatrix
from formats.trunk import tensor_codec

RawDtype = Literal["F32", "BF16", "F16"]

_VIEWS: dict[str, tuple[RawDtype, str, type[np.generic]]] = {
    "F32": ("F32", "<f4", np.float32),
    "BF16": ("BF16", "<u2", np.uint16),
    "F16": ("F16", "<f2", np.float16),
}


@dataclass(frozen=True)
class RvqMatrix:
    """Residual vector quantisation (``codecs/rvq.md``).

    Attributes:
        rows, cols: true extents.
        codes: uint8 [blocks, vectors, stages, 64].
        codebooks: float16 [stages, entries, 8]; matrices of one record may have the same ones.
        scales: float16 [rows], which mean scale * 2**scale_exponent.
    """

    rows: int
    cols: int
    codes: Octets
    codebooks: Half
    scales: Half
    scale_exponent: int


@dataclass(frozen=True)
class Mxfp4Matrix:
    """MXFP4 (``codecs/mxfp4.md``).

    Attributes:
        rows, cols: true extents.
        codes: uint8 [rows, ceil(cols / 2)].
        scales: uint8 [rows, ceil(cols / 32)], which mean 2**(scale - bias).
    """

    rows: int
    cols: int
    codes: Octets
    scales: Octets
    bias: int


@dataclass(frozen=True)
class GroupIntMatrix:
    """Integers with a scale a group (``codecs/group_int.md``).

    Attributes:
        rows, cols: true extents.
        bits: 4 or 8.
        group: columns a group.
        codes: uint8 [rows, bytes a row].
        scales: float16 [rows, ceil(cols / group)], which mean scale * 2**scale_exponent.
    """

    rows: int
    cols: int
    bits: int
    group: int
    codes: Octets
    scales: Half
    scale_exponent: int


@dataclass(frozen=True)
class RawMatrix:
    """Plain floats (``codecs/raw.md``).

    Attributes:
        rows, cols: extents.
        dtype: of the values.
        values: [rows, cols] of float32, float16, or uint16 for the bits of bfloat16.
    """

    rows: int
    cols: int
    dtype: RawDtype
    values: NDArray[Any]


EncodedMatrix = RvqMatrix | Mxfp4Matrix | GroupIntMatrix | RawMatrix
Matrices = tuple[EncodedMatrix, EncodedMatrix, EncodedMatrix]  # gate, up, down


# From the bytes of files.


def record_matrices(header: RecordHeader, data: Buffer) -> Matrices:
    """Gate, up and down of an expert record, as views of its bytes.

    Args:
        header: of the record.
        data: the record from its start; digests are the caller's to check.

    Raises:
        FormatError: bytes that break the rules of the codec, or a dtype that has no product.
    """
    where = record_name(header.layer, header.expert)
    parameters = codecs.check_sections(header)
    view = memoryview(data)
    if view.nbytes < header.payload_bytes:
        raise FormatError("record is cut short", where=where, expected=header.payload_bytes, found=view.nbytes)

    def matrix(number: Matrix) -> EncodedMatrix:
        entry = header.matrices[number]
        sections = {
            section.kind: view[section.offset : section.offset + section.bytes]
            for section in header.sections
            if section.matrix in (number, SHARED)
        }
        return _encoded(
            header.codec,
            parameters,
            entry.rows,
            entry.cols,
            sections,
            scale_exponent=entry.scale_exponent,
            where=f"{where} {number.label}",
        )

    return matrix(Matrix.GATE), matrix(Matrix.UP), matrix(Matrix.DOWN)


_EXPONENT = object()  # stands for the one value that is each record's own


@dataclass(frozen=True)
class _Array:
    """Where an array stands in a record."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


@dataclass(frozen=True)
class Placement:
    """Where matrices stand in their record: the same in all records with one codec, parameters and shapes.

    For records whose very bytes :func:`record_matrices` has accepted before: looking at them again takes a tenth of a
    product's time.
    """

    _matrices: tuple[tuple[type[EncodedMatrix], dict[str, Any]], ...]

    def matrices(self, data: memoryview) -> Matrices:
        """Gate, up and down of an accepted record, as views of its bytes; nothing is checked."""
        gate, up, down = (
            kind(**{name: _at(value, data, exponent) for name, value in values.items()})
            for (kind, values), exponent in zip(self._matrices, scale_exponents(data), strict=True)
        )
        return gate, up, down


def placement(matrices: Matrices, data: memoryview) -> Placement | None:
    """Where ``matrices`` stand in ``data``; None unless all of them are views of it, as on little-endian machines."""
    whole = np.frombuffer(data, np.uint8)

    def place(name: str, value: object) -> object:
        if isinstance(value, np.ndarray):
            return _Array(value.shape, value.dtype, value.ctypes.data - whole.ctypes.data)
        return _EXPONENT if name == "scale_exponent" else value

    arrays = [value for matrix in matrices for value in vars(matrix).values() if isinstance(value, np.ndarray)]
    if not all(np.may_share_memory(array, whole) for array in arrays):
        return None
    return Placement(
        tuple(
            (type(matrix), {field.name: place(field.name, getattr(matrix, field.name)) for field in fields(matrix)})
            for matrix in matrices
        )
    )


def _at(value: Any, data: memoryview, exponent: int) -> Any:
    if isinstance(value, _Array):
        return np.ndarray(value.shape, value.dtype, data, value.offset)
    return exponent if value is _EXPONENT else value


def trunk_matrix(info: TensorInfo, data: Buffer) -> EncodedMatrix:
    """A tensor of the trunk with two dimensions, as views of its bytes.

    Args:
        info: its entry in the manifest.
        data: its ``info.bytes`` bytes; their digest is the caller's to check.

    Raises:
        FormatError: another number of dimensions, a dtype that has no product, or bytes that break the codec's rules.
    """
    codec, parameters = tensor_codec(info, where=info.name)
    if len(info.shape) != 2:
        raise FormatError("tensor is no matrix", where=info.name, expected="2 dimensions", found=len(info.shape))
    view = memoryview(data)
    if view.nbytes != info.bytes:
        raise FormatError(
            "tensor has another length than its entry says", where=info.name, expected=info.bytes, found=view.nbytes
        )
    sections = {
        part.kind: view[part.offset : part.offset + part.bytes]
        for part in codecs.trunk_sections(codec, parameters, info.shape, where=info.name)
    }
    rows, cols = info.shape
    return _encoded(codec, parameters, rows, cols, sections, scale_exponent=info.scale_exponent, where=info.name)


def source_matrix(matrix: SourceMatrix, bias: int = mxfp4.DEFAULT_BIAS) -> EncodedMatrix:
    """An expert matrix of a checkpoint, as views of its bytes.

    Args:
        bias: of MXFP4 scales; other formats have none.

    Raises:
        FormatError: a dtype that has no product, or weights that :meth:`SourceMatrix.to_float32` refuses.
    """
    names = ": ".join((matrix.where, matrix.tensors[-1][0]))
    if matrix.format == "mxfp4":
        (_, packed), (_, scale) = matrix.tensors
        sections: dict[SectionKind, Buffer] = {SectionKind.CODES: packed, SectionKind.SCALES: scale}
        parameters = mxfp4.Parameters(bias=bias)
        return _encoded(Codec.MXFP4, parameters, matrix.rows, matrix.cols, sections, scale_exponent=0, where=names)
    ((_, data),) = matrix.tensors
    count, worst = dtypes.count_nonfinite(data, dtypes.by_name(matrix.format, where=names))
    if worst is not None:
        row = worst // matrix.cols
        raise FormatError(
            f"{count} weights are NaN or infinite, the first in row {row}", where=names, expected="numbers"
        )
    plain = raw.Parameters(matrix.format)
    return _encoded(
        Codec.RAW, plain, matrix.rows, matrix.cols, {SectionKind.CODES: data}, scale_exponent=0, where=names
    )


def _encoded(
    codec: Codec,
    parameters: codecs.Parameters,
    rows: int,
    cols: int,
    sections: dict[SectionKind, Any],
    *,
    scale_exponent: int,
    where: str,
) -> EncodedMatrix:
    """Check the sections of a matrix and wrap them."""
    stored = codecs.stored_matrix(codec, parameters, rows, cols, sections, scale_exponent=scale_exponent, where=where)
    match stored, parameters:
        case rvq.Stored(), _:
            return RvqMatrix(rows, cols, stored.codes, stored.codebooks, stored.scales, scale_exponent)
        case mxfp4.Stored(), mxfp4.Parameters():
            return Mxfp4Matrix(rows, cols, stored.codes, stored.scales, parameters.bias)
        case group_int.Stored(), group_int.Parameters():
            return GroupIntMatrix(
                rows, cols, parameters.bits, parameters.group, stored.codes, stored.scales, scale_exponent
            )
        case raw.Stored(), raw.Parameters() if parameters.dtype in _VIEWS:
            name, order, native = _VIEWS[parameters.dtype]
            values = stored.codes.view(order).astype(native, copy=False).reshape(rows, cols)
            return RawMatrix(rows, cols, name, values)
    found = parameters.dtype if isinstance(parameters, raw.Parameters) else codec.label
    raise FormatError("weights of this dtype have no product", where=where, expected=" or ".join(_VIEWS), found=found)
