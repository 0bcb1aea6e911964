"""Products of encoded weights with inputs, and the KDA step, on the path in use; ``products.md`` has their arithmetic.

Weights stay as they are stored. Results go into columns ``at`` and following of ``out`` float32 [n, width], so that
several threads, each with a range of rows, can fill one array. The rows' results do not depend on the range, nor on
how many inputs are multiplied at once, nor on the path.

Shapes and dtypes are checked here, with ValueError for what only a programming error brings about. Contents are not:
who reads them from a file checks them first (``formats.encoded``), though no code, however wrong, makes a kernel leave
its arrays. The compiled kernels let go of the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.kernels import product_twins as twins
from formats.kernels.checks import check_array
from formats.kernels.paths import resolve
from formats.kernels.product_twins import BLOCK_ROWS, DIMENSION, MAX_ENTRIES, MXFP4_GROUP

Single = NDArray[np.float32]
Half = NDArray[np.float16]
Octets = NDArray[np.uint8]

MAX_STAGES = 4
_RAW_KINDS = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1, np.dtype(np.float16): 2}  # as kernels.h counts them
_EXPONENT = 100  # what is added to an exponent on its way to C, where numbers have no sign


def _check_ends(inputs: Single, cols: int, out: Single, rows: range, limit: int, at: int) -> None:
    """Inputs of ``cols`` columns, a range within ``limit`` rows, and an ``out`` with room for its results."""
    check_array(inputs, np.float32, (None, cols), "inputs")
    check_array(out, np.float32, (len(inputs), None), "out")
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= limit:
        raise ValueError(f"{rows} is no range of {limit} rows")
    if not 0 <= at <= at + len(rows) <= out.shape[1] or not out.flags.writeable:
        raise ValueError(f"out: {len(rows)} results from column {at} on do not fit {out.shape}, or it is read-only")


def _check_exponent(exponent: int) -> None:
    if not -_EXPONENT <= exponent <= _EXPONENT:
        raise ValueError(f"exponent {exponent} is not within -100 to 100")


def multiply_raw(
    values: NDArray[Any], inputs: Single, out: Single, *, rows: range, at: int, path: str | None = None
) -> None:
    """Inputs times the transpose of some rows of plain weights.

    Args:
        values: [rows, cols] of float32, float16, or uint16 for the bits of bfloat16.
        inputs: float32 [n, cols].
        out: float32 [n, width], written from column ``at`` on.
        rows: which rows.
    """
    kind = _raw_kind(values)
    _check_ends(inputs, values.shape[1], out, rows, values.shape[0], at)
    native, number = resolve(path)
    if native is None:
        twins.multiply_raw(values, inputs, out, rows, at)
        return
    native.multiply_raw(
        number, values, inputs, out, len(values), kind, *inputs.shape, rows.start, rows.stop, out.shape[1], at
    )


def _raw_kind(values: NDArray[Any]) -> int:
    """The number under which C knows the dtype of plain weights."""
    if values.dtype not in _RAW_KINDS:
        raise ValueError(f"values: float32, float16 or uint16 wanted, got {values.dtype}")
    check_array(values, values.dtype.type, (None, None), "values")
    return _RAW_KINDS[values.dtype]


def multiply_mxfp4(
    codes: Octets,
    scales: Octets,
    inputs: Single,
    out: Single,
    *,
    bias: int,
    rows: range,
    at: int,
    path: str | None = None,
) -> None:
    """Inputs times the transpose of some rows of MXFP4 weights.

    Args:
        codes: uint8 [rows, ceil(cols / 2)].
        scales: uint8 [rows, ceil(cols / 32)].
        inputs, out, rows, at: as in :func:`multiply_raw`.
        bias: of the scales, 1 to 148.
    """
    check_array(inputs, np.float32, (None, None), "inputs")
    cols = inputs.shape[1]
    check_array(codes, np.uint8, (None, -(-cols // 2)), "codes")
    check_array(scales, np.uint8, (codes.shape[0], -(-cols // MXFP4_GROUP)), "scales")
    _check_ends(inputs, cols, out, rows, codes.shape[0], at)
    if not 1 <= bias <= 148:
        raise ValueError(f"bias {bias} is not within 1 to 148")
    native, number = resolve(path)
    if native is None:
        twins.multiply_mxfp4(codes, scales, bias, inputs, out, rows, at)
        return
    ends = (*inputs.shape, rows.start, rows.stop, out.shape[1], at)
    native.multiply_mxfp4(number, codes, scales, inputs, out, len(codes), bias, *ends)


def _check_group_int(codes: Octets, scales: Half, cols: int, bits: int, group: int, exponent: int) -> None:
    if bits not in (4, 8) or group % 32 or not 32 <= group <= 1024:
        raise ValueError(f"group_int: {bits} bits in groups of {group} are out of range")
    _check_exponent(exponent)
    check_array(codes, np.uint8, (None, cols if bits == 8 else -(-cols // 2)), "codes")
    check_array(scales, np.float16, (codes.shape[0], -(-cols // group)), "scales")


def multiply_group_int(
    codes: Octets,
    scales: Half,
    inputs: Single,
    out: Single,
    *,
    bits: int,
    group: int,
    exponent: int,
    rows: range,
    at: int,
    path: str | None = None,
) -> None:
    """Inputs times the transpose of some rows of ``group_int`` weights.

    Args:
        codes: uint8 [rows, bytes a row].
        scales: float16 [rows, ceil(cols / group)], which mean scale * 2**exponent.
        inputs, out, rows, at: as in :func:`multiply_raw`.
        bits: 4 or 8.
        group: columns a group, a multiple of 32 up to 1024.
    """
    check_array(inputs, np.float32, (None, None), "inputs")
    cols = inputs.shape[1]
    _check_group_int(codes, scales, cols, bits, group, exponent)
    _check_ends(inputs, cols, out, rows, codes.shape[0], at)
    native, number = resolve(path)
    if native is None:
        twins.multiply_group_int(codes, scales, bits, group, exponent, inputs, out, rows, at)
        return
    ends = (*inputs.shape, rows.start, rows.stop, out.shape[1], at)
    native.multiply_group_int(number, codes, scales, inputs, out, len(codes), bits, group, exponent + _EXPONENT, *ends)


def multiply_rvq(
    codes: tuple[Octets, ...],
    codebooks: Half,
    scales: tuple[Half, ...],
    exponents: tuple[int, ...],
    inputs: Single,
    outs: tuple[Single, ...],
    *,
    rows: range,
    at: int,
    path: str | None = None,
) -> None:
    """Inputs times the transposes of some rows of one or two matrices that share extents and codebooks.

    Two matrices together share the tables of products of inputs and codebook entries; results are the same.

    Args:
        codes: of each matrix, uint8 [blocks, vectors, stages, 64].
        codebooks: float16 [stages, entries, 8].
        scales: of each, float16 [rows], which mean scale * 2**exponent with its one of ``exponents``.
        inputs, rows, at: as in :func:`multiply_raw`.
        outs: of each, float32 [n, width], written from column ``at`` on.
    """
    check_array(codebooks, np.float16, (None, None, DIMENSION), "codebooks")
    stages, entries, _ = codebooks.shape
    if not (1 <= stages <= MAX_STAGES and 1 <= entries <= MAX_ENTRIES):
        raise ValueError(f"codebooks: {stages} stages of {entries} entries are out of range")
    if not len(codes) == len(scales) == len(exponents) == len(outs) or len(codes) not in (1, 2):
        raise ValueError("one matrix or two wanted")
    check_array(inputs, np.float32, (None, None), "inputs")
    cols = inputs.shape[1]
    for code, scale, exponent, out in zip(codes, scales, exponents, outs, strict=True):
        check_array(scale, np.float16, (scales[0].size,), "scales")
        check_array(code, np.uint8, (-(-scale.size // BLOCK_ROWS), -(-cols // DIMENSION), stages, BLOCK_ROWS), "codes")
        _check_exponent(exponent)
        _check_ends(inputs, cols, out, rows, scale.size, at)
        check_array(out, np.float32, outs[0].shape, "outs")
    native, number = resolve(path)
    if native is None:
        for code, scale, exponent, out in zip(codes, scales, exponents, outs, strict=True):
            twins.multiply_rvq(code, codebooks, scale, exponent, inputs, out, rows, at)
        return
    call = native.multiply_rvq if len(codes) == 1 else native.multiply_rvq_pair
    each = [array for three in zip(codes, scales, outs, strict=True) for array in three]
    powers = [exponent + _EXPONENT for exponent in exponents]
    ends = (*inputs.shape, rows.start, rows.stop, outs[0].shape[1], at)
    call(number, codebooks, inputs, *each, scales[0].size, stages, entries, *powers, *ends)


def multiply_transposed_raw(
    values: NDArray[Any],
    inputs: Single,
    out: Single,
    *,
    rows: range,
    cols: range,
    at: int,
    path: str | None = None,
) -> None:
    """Inputs times some rows and columns of plain weights, summed over the rows.

    Args:
        values: as in :func:`multiply_raw`.
        inputs: float32 [n, len(rows)].
        out: float32 [n, width], written from column ``at`` on.
        rows: which rows the sum runs over.
        cols: which columns.
    """
    kind = _raw_kind(values)
    _check_rows(rows, values.shape[0])
    _check_ends(inputs, len(rows), out, cols, values.shape[1], at)
    native, number = resolve(path)
    if native is None:
        weights = twins.widen(values[rows.start : rows.stop, cols.start : cols.stop])
        twins.multiply_transposed(weights, inputs, out, at)
        return
    ends = (len(inputs), values.shape[1], rows.start, rows.stop, cols.start, cols.stop, out.shape[1], at)
    native.transposed_raw(number, values, inputs, out, len(values), kind, *ends)


def _check_rows(rows: range, limit: int) -> None:
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= limit:
        raise ValueError(f"{rows} is no range of {limit} rows")


def multiply_transposed_group_int(
    codes: Octets,
    scales: Half,
    width: int,
    inputs: Single,
    out: Single,
    *,
    bits: int,
    group: int,
    exponent: int,
    rows: range,
    cols: range,
    at: int,
    path: str | None = None,
) -> None:
    """Inputs times some rows and columns of ``group_int`` weights, summed over the rows.

    Args:
        codes, scales, bits, group, exponent: as in :func:`multiply_group_int`.
        width: columns of the matrix.
        inputs, out, rows, cols, at: as in :func:`multiply_transposed_raw`.
    """
    _check_group_int(codes, scales, width, bits, group, exponent)
    _check_rows(rows, codes.shape[0])
    _check_ends(inputs, len(rows), out, cols, width, at)
    native, number = resolve(path)
    if native is not None:
        ends = (len(inputs), width, rows.start, rows.stop, cols.start, cols.stop, out.shape[1], at)
        native.transposed_group_int(
            number, codes, scales, inputs, out, len(codes), bits, group, exponent + _EXPONENT, *ends
        )
        return
    part = slice(rows.start, rows.stop)
    factors = np.repeat(twins.half_factors(scales[part], exponent), group, axis=1)[:, :width]
    weights = twins.integers(codes[part], width, bits, group) * factors
    twins.multiply_transposed(weights[:, cols.start : cols.stop], inputs, out, at)


def kda_steps(
    state: Single,
    q: Single,
    k: Single,
    v: Single,
    decay: Single,
    beta: Single,
    out: Single,
    *,
    first: int = 0,
    stop: int | None = None,
    path: str | None = None,
) -> None:
    """Steps of Kimi delta attention for tokens in order: what the state becomes, and what each token reads of it.

    For each head S <- decay S; S <- S + k (beta (v - k S)); o = q S, with S [dk, dv].

    Args:
        state: float32 [heads, dk, dv], changed in place.
        q, k: float32 [tokens, heads, dk].
        v: float32 [tokens, heads, dv].
        decay: float32 [tokens, heads, dk], the factors themselves, not their logarithms.
        beta: float32 [tokens, heads].
        out: float32 [tokens, heads, dv], written.
        first, stop: range of heads; the others are neither read nor written.
    """
    check_array(state, np.float32, (None, None, None), "state")
    heads, dk, dv = state.shape
    check_array(q, np.float32, (None, heads, dk), "q")
    tokens = q.shape[0]
    for name, array, shape in (
        ("k", k, (tokens, heads, dk)),
        ("v", v, (tokens, heads, dv)),
        ("decay", decay, (tokens, heads, dk)),
        ("beta", beta, (tokens, heads)),
        ("out", out, (tokens, heads, dv)),
    ):
        check_array(array, np.float32, shape, name)
    stop = heads if stop is None else stop
    if not 0 <= first <= stop <= heads or not (state.flags.writeable and out.flags.writeable):
        raise ValueError(f"heads {first} to {stop} of {heads}, or arrays that are read-only")
    native, number = resolve(path)
    if native is None:
        twins.kda_steps(state, q, k, v, decay, beta, out, slice(first, stop))
        return
    native.kda_steps(number, state, q, k, v, decay, beta, out, tokens, heads, dk, dv, first, stop)
