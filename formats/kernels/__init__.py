"""The kernels: compiled where a compiler was at hand, else plain numpy, with the same results either way.

A *path* is one way to run them: ``avx512``, ``avx2``, ``portable`` (the same C source, compiled for each) or
``numpy`` (the twins in ``twins.py``, which say what the kernels mean). The best one that the machine has is taken;
the environment variable ``MOEPACK_KERNEL`` forces another. Indices and floats are the same bits on every path, so a
container does not depend on it.

Functions check dtypes, shapes and lengths before they cross to C, and raise ValueError for what only a programming
error brings about. Arrays from files are checked by their codecs first. No function writes to its arguments unless
it says so, and the compiled ones let go of the interpreter lock. Products on encoded weights are in ``products.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.kernels import twins
from formats.kernels.checks import check_array
from formats.kernels.paths import NUMPY, Selection, available_paths, resolve, selection
from formats.kernels.twins import BLOCK_ROWS, DIMENSION, MAX_ENTRIES, MAX_STAGES, MAX_WIDTH, FitSums

__all__ = [
    "NUMPY",
    "FitSums",
    "Selection",
    "available_paths",
    "bfloat16_to_single",
    "decode_group_int",
    "decode_mxfp4",
    "decode_rvq",
    "encode",
    "encode_weighted",
    "fit_group_int",
    "fit_sums",
    "half_to_single",
    "multiply_adds",
    "pack_rvq",
    "row_sums",
    "selection",
    "single_to_half",
    "sweep",
    "unpack_rvq",
]

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Octets = NDArray[np.uint8]


def _check_codebooks(codebooks: NDArray[Any], dtype: type[np.generic]) -> tuple[int, int]:
    check_array(codebooks, dtype, (None, None, DIMENSION), "codebooks")
    stages, entries, _ = codebooks.shape
    if not (1 <= stages <= MAX_STAGES and 1 <= entries <= MAX_ENTRIES):
        raise ValueError(f"codebooks: {stages} stages of {entries} entries are out of range")
    return stages, entries


# Residual vector quantisation.


def encode(vectors: Single, codebooks: Single, *, width: int | Sequence[int] = 1, path: str | None = None) -> Octets:
    """Choose indices: the entries, one a stage, whose sum is near each vector.

    Scores are integers (``rvq_grid.h``), made for vectors of about unit mean square; vectors longer than 8 are
    searched in float64. Among equal scores the lowest index wins.

    Args:
        vectors: float32 [n, 8], finite.
        codebooks: float32 [stages, entries, 8], finite, the values as stored in float16.
        width: candidates that go on after each stage, 1 to 64; one number for all, or one a stage (that of the last
            stage counts for nothing). With 1 each stage takes the nearest entry to what is left.

    Returns:
        uint8 [n, stages].
    """
    stages, entries = _check_codebooks(codebooks, np.float32)
    check_array(vectors, np.float32, (None, DIMENSION), "vectors")
    widths = np.full(stages, width, dtype=np.int32) if isinstance(width, int) else np.array(width, dtype=np.int32)
    check_array(widths, np.int32, (stages,), "width")
    if widths.min() < 1 or widths.max() > MAX_WIDTH:
        raise ValueError(f"width: 1 to {MAX_WIDTH} wanted, got {width}")
    native, number = resolve(path)
    if native is None:
        return twins.encode(vectors, codebooks, widths)
    codes = np.empty((vectors.shape[0], stages), dtype=np.uint8)
    native.encode(number, vectors, codebooks, widths, codes, vectors.shape[0], stages, entries)
    return codes


def encode_weighted(
    vectors: Single, codebooks: Single, weights: Single, *, width: int | Sequence[int] = 1, path: str | None = None
) -> Octets:
    """Choose indices for the least weighted squared error, the weight of a component depending on its column.

    Vectors at one position of their rows share their weights w; with vectors and entries times sqrt(w) the weighted
    error is a plain one. Weights of a position count relative to their mean; those of mean zero count as equal.

    Args:
        vectors: float32 [rows, positions, 8].
        codebooks: float32 [stages, entries, 8].
        weights: float32 [positions, 8], not negative.
        width: as in :func:`encode`.

    Returns:
        uint8 [rows, positions, stages].
    """
    check_array(vectors, np.float32, (None, None, DIMENSION), "vectors")
    rows, positions, _ = vectors.shape
    check_array(weights, np.float32, (positions, DIMENSION), "weights")
    stages, _ = _check_codebooks(codebooks, np.float32)
    codes = np.empty((rows, positions, stages), dtype=np.uint8)
    for position, factors in enumerate(weight_roots(weights)):
        codes[:, position] = encode(vectors[:, position] * factors, codebooks * factors, width=width, path=path)
    return codes


def weight_roots(weights: Single) -> Single:
    """Square roots of weights float32 [positions, 8] over the mean of their position; ones where that is zero."""
    exact = weights.astype(np.float64)
    if not np.isfinite(exact).all() or (exact < 0).any():
        raise ValueError("weights: finite numbers from 0 up wanted")
    means = exact.mean(axis=1, keepdims=True)
    relative = np.divide(exact, means, out=np.ones_like(exact), where=means > 0)
    roots: Single = np.sqrt(relative).astype(np.float32)
    return roots


def fit_sums(
    vectors: Single, codes: Octets, entries: int, *, weights: Single | None = None, path: str | None = None
) -> FitSums:
    """The normal equations of least squares over the entries of all stages, for chosen indices.

    Args:
        vectors: float32 [n, 8].
        codes: uint8 [n, stages], below ``entries``.
        entries: entries a stage.
        weights: float32 [n, 8] of each component, or none.

    Returns:
        See :class:`FitSums`. Sums are in float64, in the order of the vectors.
    """
    check_array(vectors, np.float32, (None, DIMENSION), "vectors")
    count = vectors.shape[0]
    check_array(codes, np.uint8, (count, None), "codes")
    stages = codes.shape[1]
    if not (1 <= stages <= MAX_STAGES and 1 <= entries <= MAX_ENTRIES) or int(codes.max(initial=0)) >= entries:
        raise ValueError(f"codes: {stages} stages of indices below {entries} are out of range")
    if weights is not None:
        check_array(weights, np.float32, (count, DIMENSION), "weights")
    native, number = resolve(path)
    if native is None:
        return twins.fit_sums(vectors, codes, entries, weights)
    sums = twins.empty_sums(stages, entries, weighted=weights is not None)
    if weights is None:
        native.fit_counts(number, vectors, codes, sums.pairs, sums.totals, sums.sums, count, stages, entries)
    else:
        native.fit_moments(number, vectors, weights, codes, sums.pairs, sums.totals, sums.sums, count, stages, entries)
    return sums


def sweep(codebooks: Double, sums: FitSums, *, sweeps: int = 1, path: str | None = None) -> Double:
    """Gauss-Seidel sweeps over the normal equations: each stage in turn at its optimum given the others.

    Args:
        codebooks: float64 [stages, entries, 8], where to start.
        sums: of :func:`fit_sums`.

    Returns:
        float64 [stages, entries, 8]; entries that no vector uses are as they were.
    """
    stages, entries = _check_codebooks(codebooks, np.float64)
    weighted = sums.pairs.ndim == 4
    tail = (DIMENSION,) if weighted else ()
    dtype = np.float64 if weighted else np.uint32
    check_array(sums.pairs, dtype, (stages * (stages - 1) // 2, entries, entries, *tail), "pairs")
    check_array(sums.totals, dtype, (stages, entries, *tail), "totals")
    check_array(sums.sums, np.float64, (stages, entries, DIMENSION), "sums")
    native, number = resolve(path)
    if native is None:
        return twins.sweep(codebooks, sums, sweeps)
    moved = codebooks.copy()
    call = native.sweep_moments if weighted else native.sweep_counts
    call(number, moved, sums.pairs, sums.totals, sums.sums, stages, entries, sweeps)
    return moved


def decode_rvq(codes: Octets, codebooks: Single, scales: Single, cols: int, *, path: str | None = None) -> Single:
    """(((c0 + c1) + c2) + c3) * scale, each operation rounded to float32 (``codecs/rvq.md``).

    Args:
        codes: uint8 [blocks, vectors, stages, 64], as stored.
        codebooks: float32 [stages, entries, 8]. A code beyond them must have been refused; here it decodes to zero.
        scales: float32 [rows], the products scale * 2**e.
        cols: columns; the last vector of a row may be short.

    Returns:
        float32 [rows, cols].
    """
    stages, entries = _check_codebooks(codebooks, np.float32)
    check_array(scales, np.float32, (None,), "scales")
    rows = scales.shape[0]
    shape = (-(-rows // BLOCK_ROWS), -(-cols // DIMENSION), stages, BLOCK_ROWS)
    check_array(codes, np.uint8, shape, "codes")
    native, number = resolve(path)
    if native is None:
        return twins.decode_rvq(codes, codebooks, scales, cols)
    values = np.empty((rows, cols), dtype=np.float32)
    native.decode_rvq(number, codes, codebooks, scales, values, rows, cols, stages, entries)
    return values


def pack_rvq(codes: Octets, *, path: str | None = None) -> Octets:
    """Indices uint8 [rows, vectors, stages] as stored: uint8 [blocks, vectors, stages, 64], rows past the end 0."""
    check_array(codes, np.uint8, (None, None, None), "codes")
    rows, vectors, stages = codes.shape
    native, number = resolve(path)
    if native is None or not 1 <= stages <= MAX_STAGES:
        return twins.pack_rvq(codes)
    packed = np.empty((-(-rows // BLOCK_ROWS), vectors, stages, BLOCK_ROWS), dtype=np.uint8)
    native.pack_rvq(number, codes, packed, rows, vectors, stages)
    return packed


def unpack_rvq(packed: Octets, rows: int, *, path: str | None = None) -> Octets:
    """The inverse of :func:`pack_rvq`: uint8 [rows, vectors, stages]."""
    check_array(packed, np.uint8, (-(-rows // BLOCK_ROWS), None, None, BLOCK_ROWS), "packed")
    _, vectors, stages, _ = packed.shape
    native, number = resolve(path)
    if native is None or not 1 <= stages <= MAX_STAGES:
        return twins.unpack_rvq(packed, rows)
    codes = np.empty((rows, vectors, stages), dtype=np.uint8)
    native.unpack_rvq(number, packed, codes, rows, vectors, stages)
    return codes


# Other codecs.


def decode_mxfp4(
    codes: Octets, scales: Octets, pairs: Single, factors: Single, cols: int, *, path: str | None = None
) -> Single:
    """A code's number times the factor of its group of 32 columns.

    Args:
        codes: uint8 [rows, ceil(cols / 2)], low half first.
        scales: uint8 [rows, ceil(cols / 32)].
        pairs: float32 [256, 2], the two numbers of a byte of codes.
        factors: float32 [256], what a byte of scales means.

    Returns:
        float32 [rows, cols].
    """
    rows = codes.shape[0]
    check_array(codes, np.uint8, (rows, -(-cols // 2)), "codes")
    check_array(scales, np.uint8, (rows, -(-cols // twins.MXFP4_GROUP)), "scales")
    check_array(pairs, np.float32, (256, 2), "pairs")
    check_array(factors, np.float32, (256,), "factors")
    native, number = resolve(path)
    if native is None:
        return twins.decode_mxfp4(codes, scales, pairs, factors, cols)
    values = np.empty((rows, cols), dtype=np.float32)
    native.decode_mxfp4(number, codes, scales, pairs, factors, values, rows, cols)
    return values


def decode_group_int(
    codes: Octets, factors: Single, cols: int, *, bits: int, group: int, path: str | None = None
) -> Single:
    """Integers times the factor of their group (``codecs/group_int.md``); filling nibbles are not looked at.

    Args:
        codes: uint8 [rows, bytes a row].
        factors: float32 [rows, ceil(cols / group)], the products scale * 2**e.
        bits: 4 or 8.
        group: columns a group, even.

    Returns:
        float32 [rows, cols].
    """
    rows = codes.shape[0]
    if bits not in (4, 8) or group % 2 or not 2 <= group <= 1024:
        raise ValueError(f"group_int: {bits} bits in groups of {group} are out of range")
    check_array(codes, np.uint8, (rows, cols if bits == 8 else -(-cols // 2)), "codes")
    check_array(factors, np.float32, (rows, -(-cols // group)), "factors")
    native, number = resolve(path)
    if native is None:
        return twins.decode_group_int(codes, factors, cols, bits, group)
    values = np.empty((rows, cols), dtype=np.float32)
    native.decode_group_int(number, codes, factors, values, rows, cols, bits, group)
    return values


def fit_group_int(
    values: Single, *, bits: int, group: int, exponent: int, path: str | None = None
) -> NDArray[np.float16]:
    """Scales of least squared error for the groups of each row (``group_fit.h`` says among which).

    Args:
        values: float32 [rows, cols], finite.
        bits: 4 or 8.
        group: columns a group, even.
        exponent: of the scales, -100 to 100: a scale s means s * 2**exponent.

    Returns:
        float16 [rows, ceil(cols / group)]; infinite where the largest scale is beyond float16.
    """
    check_array(values, np.float32, (None, None), "values")
    if bits not in (4, 8) or group % 2 or not 2 <= group <= 1024 or not -100 <= exponent <= 100:
        raise ValueError(f"group_int: {bits} bits, groups of {group}, exponent {exponent} are out of range")
    rows, cols = values.shape
    native, number = resolve(path)
    if native is None:
        return twins.fit_group_int(values, bits, group, exponent)
    scales = np.empty((rows, -(-cols // group)), dtype=np.uint16)
    native.fit_group_int(number, values, scales, rows, cols, bits, group, exponent + 128)
    return scales.view(np.float16)


# Measures and conversions.


def row_sums(a: Single, b: Single, *, weights: Single | None = None, path: str | None = None) -> Double:
    """Sums over each row of w a a, w a b, w b b and w (a - b)**2, in float64.

    Of source rows and decoded rows these give the row scale of least squares, ab / bb, and the error.

    Args:
        a, b: float32 [rows, cols].
        weights: float32 [cols], or none for ones.

    Returns:
        float64 [rows, 4]. Column c adds to the partial sum c % 8, and these join in pairs.
    """
    check_array(a, np.float32, (None, None), "a")
    check_array(b, np.float32, a.shape, "b")
    rows, cols = a.shape
    if weights is not None:
        check_array(weights, np.float32, (cols,), "weights")
    native, number = resolve(path)
    if native is None:
        return twins.row_sums(a, b, weights)
    sums = np.empty((rows, 4), dtype=np.float64)
    native.row_sums(number, a, b, b"" if weights is None else weights, sums, rows, cols)
    return sums


def half_to_single(halves: NDArray[np.float16], *, path: str | None = None) -> Single:
    """float16, any shape, to float32; exact."""
    native, number = resolve(path)
    if native is None or not halves.flags.c_contiguous:
        return halves.astype(np.float32)
    values = np.empty(halves.shape, dtype=np.float32)
    native.half_to_single(number, halves.view(np.uint16), values, halves.size)
    return values


def single_to_half(values: Single, *, path: str | None = None) -> NDArray[np.float16]:
    """float32, any shape, to float16: nearest, half to even; infinite beyond its range."""
    native, number = resolve(path)
    if native is None or not values.flags.c_contiguous:
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(np.float16)
    halves = np.empty(values.shape, dtype=np.uint16)
    native.single_to_half(number, values, halves, values.size)
    return halves.view(np.float16)


def bfloat16_to_single(bits: NDArray[np.uint16], *, path: str | None = None) -> Single:
    """bfloat16 by its bits, any shape, to float32; exact."""
    native, number = resolve(path)
    if native is None or not bits.flags.c_contiguous:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    values = np.empty(bits.shape, dtype=np.float32)
    native.bfloat16_to_single(number, bits, values, bits.size)
    return values


def multiply_adds(rounds: int, *, path: str | None = None) -> int:
    """Spend ``rounds`` on multiply-adds of float32 in registers and say how many they were; 0 without kernels.

    What benchmarks take as the peak of a core.
    """
    native, number = resolve(path)
    return 0 if native is None else int(native.peak(number, np.empty(1, dtype=np.float32), rounds))
