"""Plain numpy twins of the kernels: what each of them means, and what runs where nothing was compiled.

Arguments come checked, from ``formats.kernels``. Integers are exact in any order; sums of floats follow the order
that the C sources state, with functions of numpy whose order is defined (``bincount``, ``accumulate``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Octets = NDArray[np.uint8]
Whole = NDArray[np.int64]

DIMENSION: Final = 8
BLOCK_ROWS: Final = 64
MAX_STAGES: Final = 4
MAX_ENTRIES: Final = 256
MAX_WIDTH: Final = 64
MXFP4_GROUP: Final = 32

# The grid of rvq_grid.h.
GRID_BITS: Final = 11
SCORE_BITS: Final = 9
SCORE_SHIFT: Final = 2 * GRID_BITS - SCORE_BITS
INDEX_BITS: Final = 8
FIRST_NORM: Final = 64 << (2 * GRID_BITS)
LATER_NORM: Final = 32 << (2 * GRID_BITS)
HIGHEST_SCORE: Final = 31 << (SCORE_BITS - 1)
_LOW, _HIGH = -(1 << 15), (1 << 15) - 1  # of int16
_NO_KEY = 1 << 40  # above all keys

_CHUNK_SCORES = 1 << 21  # scores held at once while encoding
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class FitSums:
    """Normal equations of least squares for chosen indices; stages a < b have table b (b - 1) / 2 + a.

    pairs: vectors with entry i in stage a and j in stage b: uint32 [tables, entries, entries]; if weighted the sums of
        their weights, float64 [tables, entries, entries, 8].
    totals: vectors an entry, uint32 [stages, entries]; if weighted float64 [stages, entries, 8].
    sums: of the (weighted) vectors an entry, float64 [stages, entries, 8].
    """

    pairs: NDArray[Any]
    totals: NDArray[Any]
    sums: Double


def empty_sums(stages: int, entries: int, *, weighted: bool) -> FitSums:
    """Zeros, to be added to."""
    tail, dtype = ((DIMENSION,), np.dtype(np.float64)) if weighted else ((), np.dtype(np.uint32))
    return FitSums(
        np.zeros((stages * (stages - 1) // 2, entries, entries, *tail), dtype=dtype),
        np.zeros((stages, entries, *tail), dtype=dtype),
        np.zeros((stages, entries, DIMENSION), dtype=np.float64),
    )


def to_grid(values: Single) -> Whole:
    """Nearest multiples of 2**-11, half to even, within +-32767 of them."""
    with np.errstate(over="ignore"):  # what becomes infinite is cut off next
        scaled = values * np.float32(1 << GRID_BITS)
    grid: Whole = np.rint(np.clip(scaled, np.float32(-32767), np.float32(32767))).astype(np.int64)
    return grid


@dataclass(frozen=True)
class _Stage:
    """A codebook on the grid: entries int64 [entries, 8], bias int64 [entries], and which entries may win."""

    entries: Whole
    bias: Whole
    trusted: NDArray[np.bool_]


def _stage(codebook: Single, bound: int) -> _Stage:
    entries = to_grid(codebook)
    norms = np.square(entries).sum(axis=1)
    first = np.zeros(len(entries), dtype=np.bool_)
    first[np.unique(entries, axis=0, return_index=True)[1]] = True
    return _Stage(entries, (norms >> 1) + (1 << (SCORE_SHIFT - 1)), (norms <= bound) & first)


def encode(vectors: Single, codebooks: Single, widths: NDArray[np.int32]) -> Octets:
    """The kernel ``encode``: on the grid where a vector is short enough for it, else in float64."""
    stages, entries, _ = codebooks.shape
    tables = [_stage(codebook, LATER_NORM if stage else FIRST_NORM) for stage, codebook in enumerate(codebooks)]
    codes = np.empty((vectors.shape[0], stages), dtype=np.uint8)
    widest = int(widths[:-1].max(initial=1))
    usable = all(table.trusted.any() for table in tables)
    chunk = max(1, _CHUNK_SCORES // (widest * entries))
    for start in range(0, vectors.shape[0], chunk):
        part = vectors[start : start + chunk]
        grid = to_grid(part)
        found = codes[start : start + chunk]
        near = (np.square(grid).sum(axis=1) <= FIRST_NORM) & usable
        if widest == 1 and near.any():
            found[near] = _greedy(grid[near], tables)
        elif near.any():
            found[near], lost = _beam(grid[near], tables, widths)
            near[np.flatnonzero(near)[lost]] = False
        if not near.all():
            found[~near] = _exact(part[~near], codebooks, widths)
    return codes


def _dots(left: Whole, right: Whole) -> Whole:
    """Products of rows, exact: they stay below 2**53, so float64 and its fast product lose nothing."""
    return (left.astype(np.float64) @ right.T.astype(np.float64)).astype(np.int64)


def _greedy(left: Whole, tables: list[_Stage]) -> Octets:
    codes = np.empty((len(left), len(tables)), dtype=np.uint8)
    for stage, table in enumerate(tables):
        scores = (table.bias - _dots(left, table.entries)) >> INDEX_BITS  # the low bits make room for the index
        scores[:, ~table.trusted] = np.iinfo(np.int64).max
        nearest = scores.argmin(axis=1)
        codes[:, stage] = nearest
        left = np.clip(left - table.entries[nearest], _LOW, _HIGH)
    return codes


def _beam(grid: Whole, tables: list[_Stage], widths: NDArray[np.int32]) -> tuple[Octets, NDArray[np.bool_]]:
    """Indices, and which vectors have no candidate within the bounds of the grid."""
    count = len(grid)
    scores = (np.square(grid).sum(axis=1) >> 1 >> SCORE_SHIFT)[:, None]  # [count, candidates]
    codes = np.zeros((count, 1, len(tables)), dtype=np.int64)  # [count, candidates, stages]
    rows = np.arange(count)[:, None]
    for stage, table in enumerate(tables):
        total = ((table.bias - _dots(grid, table.entries)) >> SCORE_SHIFT)[:, None, :]
        for earlier in range(stage):
            gram = _dots(tables[earlier].entries, table.entries) + (1 << (SCORE_SHIFT - 1))
            total = total + (gram >> SCORE_SHIFT)[codes[:, :, earlier]]
        total = total + scores[:, :, None]
        flat = np.arange(codes.shape[1])[:, None] << 8 | np.arange(len(table.bias))
        keys = np.where((total <= HIGHEST_SCORE) & table.trusted, (total - _LOW) << 16 | flat, _NO_KEY | flat)
        keys = keys.reshape(count, -1)
        kept = min(int(widths[stage]) if stage + 1 < len(tables) else 1, keys.shape[1])
        keys = np.partition(keys, kept - 1, axis=1)[:, :kept]
        keys = np.take_along_axis(keys, np.argsort(keys & 0xFFFF, axis=1), axis=1)  # they go on by flat index
        flat = keys & 0xFFFF
        scores = np.maximum((keys >> 16) + _LOW, 0)  # that of no key is far above all bounds, and stays there
        codes = codes[rows, flat >> 8]
        codes[:, :, stage] = flat & 0xFF
    return codes[:, 0].astype(np.uint8), keys[:, 0] >= _NO_KEY


def _exact(vectors: Single, codebooks: Single, widths: NDArray[np.int32]) -> Octets:
    """The search without a grid (``rvq_exact.h``): candidates sorted by score, the earlier first among equals."""
    count, stages = len(vectors), len(codebooks)
    left = vectors.astype(np.float64)[:, None, :]  # [count, candidates, 8]
    codes = np.zeros((count, 1, stages), dtype=np.int64)
    rows = np.arange(count)[:, None]
    for stage, codebook in enumerate(codebooks.astype(np.float64)):
        total = np.zeros((count, left.shape[1], len(codebook)))
        for d in range(DIMENSION):
            total += np.square(left[:, :, d, None] - codebook[:, d])
        flat = total.reshape(count, -1)
        kept = int(widths[stage]) if stage + 1 < stages else 1
        order = np.argsort(flat, axis=1, kind="stable")[:, :kept]
        parent, entry = order // len(codebook), order % len(codebook)
        codes = codes[rows, parent]
        codes[:, :, stage] = entry
        left = left[rows, parent] - codebook[entry]
    return codes[:, 0].astype(np.uint8)


def fit_sums(vectors: Single, codes: Octets, entries: int, weights: Single | None) -> FitSums:
    """The kernels ``fit_counts`` and ``fit_moments``."""
    stages = codes.shape[1]
    result = empty_sums(stages, entries, weighted=weights is not None)
    index = codes.astype(np.int64)
    exact = vectors.astype(np.float64)
    weight = None if weights is None else weights.astype(np.float64)
    for later in range(stages):
        for d in range(DIMENSION):
            value = exact[:, d] if weight is None else weight[:, d] * exact[:, d]
            result.sums[later, :, d] = np.bincount(index[:, later], value, entries)
        _count(result.totals[later], index[:, later], weight)
        for earlier in range(later):
            table = result.pairs[later * (later - 1) // 2 + earlier]
            cells = table.reshape(entries * entries, *table.shape[2:])
            _count(cells, index[:, earlier] * entries + index[:, later], weight)
    return result


def _count(cells: NDArray[Any], index: Whole, weight: Double | None) -> None:
    """Occurrences of each index, or for each component the sums of their weights."""
    if weight is None:
        cells[:] = np.bincount(index, minlength=len(cells))
    else:
        for d in range(DIMENSION):
            cells[:, d] = np.bincount(index, weight[:, d], len(cells))


def sweep(codebooks: Double, sums: FitSums, sweeps: int) -> Double:
    """The kernels ``sweep_counts`` and ``sweep_moments``."""
    moved = codebooks.copy()
    stages, entries, _ = moved.shape
    pairs = sums.pairs.astype(np.float64).reshape(
        -1, entries, entries, sums.pairs.shape[3] if sums.pairs.ndim == 4 else 1
    )
    totals = sums.totals.astype(np.float64).reshape(stages, entries, -1)
    for _ in range(sweeps):
        for stage in range(stages):
            rest = sums.sums[stage].copy()
            for other in range(stages):
                if other == stage:
                    continue
                later, earlier = max(stage, other), min(stage, other)
                table = pairs[later * (later - 1) // 2 + earlier]
                for entry in range(entries):  # by rising entry of the other stage
                    numbers = table[:, entry] if earlier == stage else table[entry]
                    rest -= numbers * moved[other, entry]
            np.divide(rest, totals[stage], out=moved[stage], where=np.broadcast_to(totals[stage] > 0, rest.shape))
    return moved


def decode_rvq(codes: Octets, codebooks: Single, scales: Single, cols: int) -> Single:
    """The kernel ``decode_rvq``; temporary memory is bounded."""
    rows, (blocks, vectors, stages, _) = len(scales), codes.shape
    whole = np.zeros((stages, MAX_ENTRIES, DIMENSION), dtype=np.float32)
    whole[:, : codebooks.shape[1]] = codebooks
    values = np.empty((rows, cols), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // (BLOCK_ROWS * DIMENSION))  # vectors of a block decoded at once
    for block in range(blocks):
        top = block * BLOCK_ROWS
        used = min(BLOCK_ROWS, rows - top)
        for start in range(0, vectors, step):
            part = codes[block, start : start + step, :, :used].transpose(1, 2, 0)  # [stages, rows, vectors]
            total = whole[0].take(part[0], axis=0)
            for stage in range(1, stages):
                total += whole[stage].take(part[stage], axis=0)
            left = start * DIMENSION
            wide = total.reshape(used, -1)[:, : cols - left]
            np.multiply(wide, scales[top : top + used, None], out=values[top : top + used, left : left + wide.shape[1]])
    return values


def pack_rvq(codes: Octets) -> Octets:
    """The kernel ``pack_rvq``."""
    rows, vectors, stages = codes.shape
    blocks, whole = -(-rows // BLOCK_ROWS), rows // BLOCK_ROWS
    packed = np.zeros((blocks, vectors, stages, BLOCK_ROWS), dtype=np.uint8)
    packed[:whole] = codes[: whole * BLOCK_ROWS].reshape(whole, BLOCK_ROWS, vectors, stages).transpose(0, 2, 3, 1)
    if whole < blocks:
        packed[whole, :, :, : rows - whole * BLOCK_ROWS] = codes[whole * BLOCK_ROWS :].transpose(1, 2, 0)
    return packed


def unpack_rvq(packed: Octets, rows: int) -> Octets:
    """The kernel ``unpack_rvq``."""
    blocks, vectors, stages, _ = packed.shape
    wide = packed.transpose(0, 3, 1, 2).reshape(blocks * BLOCK_ROWS, vectors, stages)
    return np.ascontiguousarray(wide[:rows])


def decode_mxfp4(codes: Octets, scales: Octets, pairs: Single, factors: Single, cols: int) -> Single:
    """The kernel ``decode_mxfp4``; temporary memory is bounded."""
    both = np.ascontiguousarray(pairs).reshape(-1).view(np.float64)  # one 8-byte item, so that one look-up fetches both
    values = np.empty((len(codes), cols), dtype=np.float32)
    step = max(1, _CHUNK_VALUES // max(cols, 1))
    with np.errstate(over="ignore"):
        for top in range(0, len(codes), step):
            part = both.take(codes[top : top + step]).view(np.float32)[:, :cols]
            wide = np.repeat(factors.take(scales[top : top + step]), MXFP4_GROUP, axis=1)[:, :cols]
            np.multiply(part, wide, out=values[top : top + step])
    return values


def decode_group_int(codes: Octets, factors: Single, cols: int, bits: int, group: int) -> Single:
    """The kernel ``decode_group_int``."""
    values = np.empty((len(codes), cols), dtype=np.float32)
    for number, left in enumerate(range(0, cols, group)):
        width = min(group, cols - left)
        factor = factors[:, number, None]
        out = values[:, left : left + width]
        if bits == 8:
            np.multiply(codes[:, left : left + width].view(np.int8).astype(np.float32), factor, out=out)
            continue
        half = -(-width // 2)
        part = codes[:, left // 2 : left // 2 + half]
        np.multiply((part & 15).astype(np.float32) - np.float32(8), factor, out=out[:, :half])
        np.multiply((part[:, : width - half] >> 4).astype(np.float32) - np.float32(8), factor, out=out[:, half:])
    return values


def row_sums(a: Single, b: Single, weights: Single | None) -> Double:
    """The kernel ``row_sums``; temporary memory is bounded."""
    rows, cols = a.shape
    lanes = -(-cols // DIMENSION)
    sums = np.zeros((rows, 4), dtype=np.float64)
    weight = np.zeros(lanes * DIMENSION)
    weight[:cols] = 1.0 if weights is None else weights
    step = max(1, _CHUNK_VALUES // max(cols, 1))
    for top in range(0, rows if cols else 0, step):
        x, y = (_padded(values[top : top + step], lanes) for values in (a, b))
        terms = (x * x, x * y, y * y, np.square(x - y))
        for kind, term in enumerate(terms):
            wide = (weight * term).reshape(len(x), lanes, DIMENSION)
            lane = np.add.accumulate(wide, axis=1)[:, -1] + 0.0  # one after the other; -0 becomes 0
            lane = lane[:, 0::2] + lane[:, 1::2]
            sums[top : top + step, kind] = (lane[:, 0] + lane[:, 1]) + (lane[:, 2] + lane[:, 3])
    return sums


def _padded(values: Single, lanes: int) -> Double:
    wide = np.zeros((len(values), lanes * DIMENSION))
    wide[:, : values.shape[1]] = values
    return wide


FIT_LANES: Final = 16
FIT_CANDIDATES: Final = 16


def fit_group_int(values: Single, bits: int, group: int, exponent: int) -> NDArray[np.float16]:
    """The search of ``group_fit.h``, for all groups of some rows at a time."""
    rows, cols = values.shape
    groups = -(-cols // group)
    scales = np.empty((rows, groups), dtype=np.float16)
    step = max(1, _CHUNK_VALUES // max(groups * group, 1))
    for top in range(0, rows, step):
        part = values[top : top + step]
        filled = np.zeros((len(part), groups, -(-group // FIT_LANES) * FIT_LANES), dtype=np.float32)
        for number in range(groups):
            run = part[:, number * group : (number + 1) * group]
            filled[:, number, : run.shape[1]] = run
        scales[top : top + step] = _fit_groups(filled, bits, exponent)
    return scales


def _fit_groups(x: Single, bits: int, exponent: int) -> NDArray[np.float16]:
    highest = np.float32(127 if bits == 8 else 7)
    steps = 128 if bits == 8 else 32
    largest = np.abs(x).max(axis=2, initial=0.0).astype(np.float64)
    best = np.zeros(largest.shape, dtype=np.float16)
    least = np.full(largest.shape, np.inf)
    chosen, both, codes = (np.zeros(largest.shape, dtype=np.float32) for _ in range(3))
    with np.errstate(all="ignore"):
        for k in range(FIT_CANDIDATES + 1):
            if k < FIT_CANDIDATES:
                wanted = np.ldexp(largest, -exponent) / highest.astype(np.float64) * (1.0 - k / steps)
            else:
                wanted = np.ldexp(chosen.astype(np.float64), -exponent) * both / codes
                wanted[~(codes > 0)] = 0.0
            half = wanted.astype(np.float32).astype(np.float16)
            if k == 0:
                best[...] = half
            usable = (half > 0) & np.isfinite(half)
            scale = half.astype(np.float32) * np.float32(2.0**exponent)
            error, new_both, new_codes = _try_scales(x, np.where(usable, scale, np.float32(1)), highest)
            total = error.astype(np.float64) * scale * scale
            better = usable & (total < least)
            least[better], best[better] = total[better], half[better]
            if k < FIT_CANDIDATES:
                chosen[better], both[better], codes[better] = scale[better], new_both[better], new_codes[better]
    return best


def _try_scales(x: Single, scale: Single, highest: np.float32) -> tuple[Single, Single, Single]:
    """Sums of (r - q)**2, r q and q q over each group, with r = x / scale and q its code."""
    ratio = x / scale[:, :, None]
    code = np.clip(np.rint(ratio), -highest - np.float32(1), highest)
    gap = ratio - code
    return _lane_sums(gap * gap), _lane_sums(ratio * code), _lane_sums(code * code)


def _lane_sums(terms: Single) -> Single:
    """Over the last axis: lane by lane in order, then the lanes in halves."""
    lanes = np.zeros((*terms.shape[:2], FIT_LANES), dtype=np.float32)
    for left in range(0, terms.shape[2], FIT_LANES):
        lanes += terms[:, :, left : left + FIT_LANES]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[:, :, :half] + lanes[:, :, half:]
    total: Single = lanes[:, :, 0]
    return total
