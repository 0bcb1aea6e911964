"""Plain numpy twins of the products (``products.md`` has the orders of sums): what they mean, and the slow way to them.

Arguments come checked, from ``formats.kernels.products``. numpy has no fused multiply-add, so :func:`fma` makes one of
float64: the product of two float32 numbers is exact there, and the sum is rounded to odd, after which rounding it to
float32 gives what one rounding of the exact result gives.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Half = NDArray[np.float16]
Octets = NDArray[np.uint8]

LANES: Final = 16
MXFP4_GROUP: Final = 32
DIMENSION: Final = 8
BLOCK_ROWS: Final = 64
MAX_ENTRIES: Final = 256
E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

_CHUNK_SUMS = 1 << 15  # partial sums held at once


def fma(a: Single, b: Single, c: Single) -> Single:
    """a x b + c in float32 with one rounding, to nearest even; shapes as numpy joins them.

    The sum s of the exact product p and c comes with its error e (Knuth's two-sum). If e is not zero and the last bit
    of s is 0, the neighbour of s towards e is the result rounded to odd. That it has at least two bits more than
    float32 has makes the second rounding right (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums",
    2008).
    """
    with np.errstate(all="ignore"):
        p: Double = np.multiply(a, b, dtype=np.float64)
        d = c.astype(np.float64)
        s = p + d
        back = s - p
        error = (p - (s - back)) + (d - back)
        bits = s.view(np.int64)
        odd = np.where((error > 0) == (s > 0), bits + 1, bits - 1)
        inexact = (np.abs(error) > 0) & (bits & 1 == 0)  # the error of what is infinite or no number is NaN
        result: Single = np.where(inexact, odd, bits).view(np.float64).astype(np.float32)
    return result


def tree(lanes: Single) -> Single:
    """The sum over the last axis, 16 lanes, joined in halves."""
    with np.errstate(all="ignore"):
        while lanes.shape[-1] > 1:
            half = lanes.shape[-1] // 2
            lanes = lanes[..., :half] + lanes[..., half:]
    total: Single = lanes[..., 0]
    return total


def _filled(values: Single, unit: int) -> Single:
    """Columns filled up with zeros to a multiple of ``unit``."""
    missing = -values.shape[-1] % unit
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, missing)]) if missing else values


def _row_chunks(rows: range, count: int) -> list[range]:
    """Runs of rows whose lanes for ``count`` inputs are few enough to be held."""
    step = max(1, _CHUNK_SUMS // (LANES * max(1, count)))
    return [rows[at : at + step] for at in range(0, len(rows), step)]


def half_factors(scales: Half, exponent: int) -> Single:
    """float32(scale) x 2**exponent, exact."""
    return scales.astype(np.float32) * np.float32(2.0**exponent)


def widen(values: NDArray[np.generic]) -> Single:
    """Raw weights, float32, float16 or bfloat16 by its bits (uint16), as float32; exact."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def integers(codes: Octets, cols: int, bits: int, group: int) -> Single:
    """The integers of ``group_int`` rows as float32 [rows, cols]."""
    if bits == 8:
        return codes.view(np.int8).astype(np.float32)
    column = np.arange(cols)
    start = column // group * group
    half = (np.minimum(start + group, cols) - start + 1) // 2
    inside = column - start
    high = inside >= half
    byte = codes[:, start // 2 + np.where(high, inside - half, inside)]
    return np.where(high, byte >> 4, byte & 15).astype(np.float32) - np.float32(8)


def multiply_raw(values: NDArray[np.generic], inputs: Single, out: Single, rows: range, at: int) -> None:
    """Column c adds to lane c % 16."""
    x = _filled(inputs, LANES)[:, None]
    for run in _row_chunks(rows, len(inputs)):
        w = _filled(widen(values[run.start : run.stop]), LANES)
        acc = np.zeros((len(inputs), len(run), LANES), dtype=np.float32)
        for left in range(0, w.shape[1], LANES):
            acc = fma(w[:, left : left + LANES], x[..., left : left + LANES], acc)
        out[:, at + run.start - rows.start : at + run.stop - rows.start] = tree(acc)


def multiply_mxfp4(codes: Octets, scales: Octets, bias: int, inputs: Single, out: Single, rows: range, at: int) -> None:
    """Lane i of a group has its columns 2 i and 2 i + 1."""
    cols = inputs.shape[1]
    x = _filled(inputs, MXFP4_GROUP)
    numbers = np.array(E2M1, dtype=np.float32)
    with np.errstate(all="ignore"):
        factors = np.ldexp(np.float64(1.0), np.arange(256) - bias).astype(np.float32)
    for run in _row_chunks(rows, len(inputs)):
        part = codes[run.start : run.stop]
        even = _filled(numbers[part & 15], LANES)
        odd = numbers[part >> 4]
        if cols % 2:
            odd[:, -1] = 0.0  # of no column
        odd = _filled(odd, LANES)
        acc = np.zeros((len(inputs), len(run), LANES), dtype=np.float32)
        for g in range(scales.shape[1]):
            left, lanes = g * MXFP4_GROUP, slice(g * LANES, (g + 1) * LANES)
            columns = x[:, None, left : left + MXFP4_GROUP]
            with np.errstate(all="ignore"):
                p = even[:, lanes] * columns[..., 0::2]
            p = fma(odd[:, lanes], columns[..., 1::2], p)
            acc = fma(p, factors[scales[run.start : run.stop, g]][:, None], acc)
        out[:, at + run.start - rows.start : at + run.stop - rows.start] = tree(acc)


def multiply_group_int(
    codes: Octets, scales: Half, bits: int, group: int, exponent: int, inputs: Single, out: Single, rows: range, at: int
) -> None:
    """Column j of a group adds to lane j % 16 of the group's sum, which goes to the row's with one factor."""
    cols = inputs.shape[1]
    x = _filled(inputs, LANES)[:, None]
    for run in _row_chunks(rows, len(inputs)):
        q = _filled(integers(codes[run.start : run.stop], cols, bits, group), LANES)
        factors = half_factors(scales[run.start : run.stop], exponent)
        acc = np.zeros((len(inputs), len(run), LANES), dtype=np.float32)
        for g in range(scales.shape[1]):
            p = np.zeros_like(acc)
            for left in range(g * group, min((g + 1) * group, q.shape[1]), LANES):
                p = fma(q[:, left : left + LANES], x[..., left : left + LANES], p)
            acc = fma(p, factors[:, g, None], acc)
        out[:, at + run.start - rows.start : at + run.stop - rows.start] = tree(acc)


def multiply_rvq(
    codes: Octets, codebooks: Half, scales: Half, exponent: int, inputs: Single, out: Single, rows: range, at: int
) -> None:
    """Sums of table entries, vectors ascending, then the scale of the row."""
    stages, entries, _ = codebooks.shape
    books = codebooks.astype(np.float32)
    x = _filled(inputs, DIMENSION)
    block, place = np.divmod(np.arange(rows.start, rows.stop), BLOCK_ROWS)
    acc = np.zeros((len(inputs), len(rows)), dtype=np.float32)
    tables = np.zeros((len(inputs), stages, MAX_ENTRIES), dtype=np.float32)  # whole, so that no code leaves it
    with np.errstate(all="ignore"):
        for v in range(codes.shape[1]):
            one = x[:, None, None, v * DIMENSION : (v + 1) * DIMENSION]
            t = books[..., 0] * one[..., 0]
            for d in range(1, DIMENSION):
                t = fma(books[..., d], one[..., d], t)
            tables[..., :entries] = t
            total = tables[:, 0, codes[block, v, 0, place]]
            for stage in range(1, stages):
                total = total + tables[:, stage, codes[block, v, stage, place]]
            acc = acc + total
        out[:, at : at + len(rows)] = acc * half_factors(scales[rows.start : rows.stop], exponent)


def multiply_transposed(weights: Single, inputs: Single, out: Single, at: int) -> None:
    """Each column's chain over the rows; weights float32 [rows, columns], inputs float32 [n, rows]."""
    acc = np.zeros((len(inputs), weights.shape[1]), dtype=np.float32)
    for r, row in enumerate(weights):
        acc = fma(inputs[:, r, None], row, acc)
    out[:, at : at + weights.shape[1]] = acc


def kda_steps(
    state: Single, q: Single, k: Single, v: Single, decay: Single, beta: Single, out: Single, heads: slice
) -> None:
    """Token after token, all heads at once."""
    s = state[heads]
    with np.errstate(all="ignore"):
        for t in range(len(q)):
            s *= decay[t, heads, :, None]
            u = np.zeros_like(s[:, 0])
            for i in range(s.shape[1]):
                u = fma(k[t, heads, i, None], s[:, i], u)
            d = beta[t, heads, None] * (v[t, heads] - u)
            s[...] = fma(k[t, heads, :, None], d[:, None], s)
            o = np.zeros_like(u)
            for i in range(s.shape[1]):
                o = fma(q[t, heads, i, None], s[:, i], o)
            out[t, heads] = o
