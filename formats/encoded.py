"""Products of matrices as they are stored with inputs, and decoding of single rows. Everyone imports from here.

``formats/kernels/products.md`` fixes the arithmetic. The result of a row and an input has the same bits whatever
range of rows is asked for, however many inputs are multiplied at once, and whichever path the kernels take.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from formats import kernels
from formats.codecs import mxfp4, rvq
from formats.codecs.common import Single, to_single
from formats.encoded_bytes import (
    EncodedMatrix,
    GroupIntMatrix,
    Mxfp4Matrix,
    Placement,
    RawMatrix,
    RvqMatrix,
    placement,
    record_matrices,
    source_matrix,
    trunk_matrix,
)
from formats.kernels import products

__all__ = [
    "EncodedMatrix",
    "GroupIntMatrix",
    "Mxfp4Matrix",
    "Placement",
    "RawMatrix",
    "RvqMatrix",
    "decode_rows",
    "multiply",
    "multiply_pair",
    "multiply_transposed",
    "placement",
    "record_matrices",
    "source_matrix",
    "trunk_matrix",
]


def multiply(
    matrix: EncodedMatrix,
    inputs: Single,
    *,
    first: int = 0,
    stop: int | None = None,
    out: Single | None = None,
    path: str | None = None,
) -> Single:
    """Inputs times the transpose of the matrix, or of its rows ``first`` to ``stop``.

    Args:
        inputs: float32 [n, cols], contiguous.
        first, stop: range of rows; the whole matrix by default.
        out: float32 [n, rows] of which the columns ``first`` to ``stop`` are written, so that threads can share it.
        path: of the kernels; the best by default.

    Returns:
        ``out``; without one, float32 [n, stop - first].
    """
    rows, out, at = _place(matrix.rows, len(inputs), first, stop, out)
    match matrix:
        case RvqMatrix():
            products.multiply_rvq(
                (matrix.codes,),
                matrix.codebooks,
                (matrix.scales,),
                (matrix.scale_exponent,),
                inputs,
                (out,),
                rows=rows,
                at=at,
                path=path,
            )
        case Mxfp4Matrix():
            products.multiply_mxfp4(
                matrix.codes, matrix.scales, inputs, out, bias=matrix.bias, rows=rows, at=at, path=path
            )
        case GroupIntMatrix():
            products.multiply_group_int(
                matrix.codes,
                matrix.scales,
                inputs,
                out,
                bits=matrix.bits,
                group=matrix.group,
                exponent=matrix.scale_exponent,
                rows=rows,
                at=at,
                path=path,
            )
        case RawMatrix():
            products.multiply_raw(matrix.values, inputs, out, rows=rows, at=at, path=path)
    return out


def multiply_pair(
    gate: EncodedMatrix,
    up: EncodedMatrix,
    inputs: Single,
    *,
    first: int = 0,
    stop: int | None = None,
    outs: tuple[Single, Single] | None = None,
    path: str | None = None,
) -> tuple[Single, Single]:
    """Two products with the same inputs: :func:`multiply` of each, with the same bits.

    Where both are RVQ with the same codebooks, the tables of products of inputs and entries are made only once.

    Args:
        gate, up: of the same number of rows.
        inputs, first, stop, path: as in :func:`multiply`.
        outs: of each, as ``out`` in :func:`multiply`.
    """
    one, other = outs or (None, None)
    if isinstance(gate, RvqMatrix) and isinstance(up, RvqMatrix) and gate.rows == up.rows and _share(gate, up):
        rows, one, at = _place(gate.rows, len(inputs), first, stop, one)
        _, other, _ = _place(up.rows, len(inputs), first, stop, other)
        products.multiply_rvq(
            (gate.codes, up.codes),
            gate.codebooks,
            (gate.scales, up.scales),
            (gate.scale_exponent, up.scale_exponent),
            inputs,
            (one, other),
            rows=rows,
            at=at,
            path=path,
        )
        return one, other
    return (
        multiply(gate, inputs, first=first, stop=stop, out=one, path=path),
        multiply(up, inputs, first=first, stop=stop, out=other, path=path),
    )


def multiply_transposed(
    matrix: EncodedMatrix,
    inputs: Single,
    *,
    row_first: int = 0,
    row_stop: int | None = None,
    first: int = 0,
    stop: int | None = None,
    out: Single | None = None,
    path: str | None = None,
) -> Single:
    """Inputs times the matrix itself, or a part of it: sums over rows.

    Args:
        matrix: plain or ``group_int``, as the trunk has them.
        inputs: float32 [n, row_stop - row_first], contiguous.
        row_first, row_stop: the rows that the sums run over; all by default.
        first, stop: range of columns; all by default.
        out: float32 [n, cols] of which the columns ``first`` to ``stop`` are written.
        path: of the kernels; the best by default.

    Returns:
        ``out``; without one, float32 [n, stop - first].

    Raises:
        ValueError: a matrix of another codec.
    """
    cols, out, at = _place(matrix.cols, len(inputs), first, stop, out)
    rows = range(row_first, matrix.rows if row_stop is None else row_stop)
    match matrix:
        case GroupIntMatrix():
            products.multiply_transposed_group_int(
                matrix.codes,
                matrix.scales,
                matrix.cols,
                inputs,
                out,
                bits=matrix.bits,
                group=matrix.group,
                exponent=matrix.scale_exponent,
                rows=rows,
                cols=cols,
                at=at,
                path=path,
            )
        case RawMatrix():
            products.multiply_transposed_raw(matrix.values, inputs, out, rows=rows, cols=cols, at=at, path=path)
        case _:
            raise ValueError(f"{type(matrix).__name__} has no transposed product")
    return out


def decode_rows(matrix: EncodedMatrix, rows: NDArray[np.int64]) -> Single:
    """Some rows as float32 [k, cols], as the codec decodes them: embeddings of tokens.

    Args:
        rows: int64 [k], each from 0 up and below the number of rows; they may repeat.

    Raises:
        ValueError: a number out of range.
    """
    if rows.ndim != 1 or (rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < matrix.rows):
        raise ValueError(f"rows: one dimension of numbers from 0 to {matrix.rows - 1} wanted")
    match matrix:
        case RvqMatrix():
            codes = kernels.pack_rvq(matrix.codes[rows // rvq.BLOCK_ROWS, :, :, rows % rvq.BLOCK_ROWS])
            scales = to_single(matrix.scales[rows], matrix.scale_exponent)
            return kernels.decode_rvq(codes, matrix.codebooks.astype(np.float32), scales, matrix.cols)
        case Mxfp4Matrix():
            return mxfp4.decode_stored(matrix.codes[rows], matrix.scales[rows], matrix.cols, matrix.bias)
        case GroupIntMatrix():
            factors = to_single(matrix.scales[rows], matrix.scale_exponent)
            return kernels.decode_group_int(
                matrix.codes[rows], factors, matrix.cols, bits=matrix.bits, group=matrix.group
            )
        case RawMatrix():
            found = matrix.values[rows]
            return kernels.bfloat16_to_single(found) if matrix.dtype == "BF16" else found.astype(np.float32)


def _place(limit: int, count: int, first: int, stop: int | None, out: Single | None) -> tuple[range, Single, int]:
    """The range, the array to write to and the column at which its results start."""
    stop = limit if stop is None else stop
    if not 0 <= first <= stop <= limit:
        raise ValueError(f"range {first} to {stop} is not within {limit}")
    if out is None:
        return range(first, stop), np.empty((count, stop - first), dtype=np.float32), 0
    if out.ndim != 2 or out.shape != (count, limit):
        raise ValueError(f"out: {(count, limit)} wanted, got {out.shape}")
    return range(first, stop), out, first


def _share(one: RvqMatrix, other: RvqMatrix) -> bool:
    """Whether both have the very same codebooks and as many columns."""
    address, _ = one.codebooks.__array_interface__["data"]
    same = other.codebooks.__array_interface__["data"][0] == address
    return same and one.codebooks.shape == other.codebooks.shape and one.cols == other.cols
