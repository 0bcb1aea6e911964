"""Codebooks of an expert: fitted to its vectors, then its indices chosen, then both brought to fit each other.

An expert goes through three steps. :func:`fit_codebooks` alternates between choosing indices for a fresh sample of
vectors and moving the entries of all stages towards the least-squares optimum for these indices. :func:`choose_indices`
encodes all vectors. :func:`refit` moves the entries once more, now for all vectors with their final indices, which
never raises the error; and :func:`fitted_scales` gives the row scales of least squares under the final entries.

What a sample is depends on the seed alone, sums have one order (``formats.kernels``), and no library's linear algebra
takes part: the same vectors give the same bytes on every machine and path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from formats import kernels
from formats.codecs.common import choose_exponent, span, to_half, to_single
from formats.codecs.rvq import Parameters
from formats.kernels import FitSums
from formats.kernels.twins import DIMENSION

Single = NDArray[np.float32]
Double = NDArray[np.float64]
Half = NDArray[np.float16]
Octets = NDArray[np.uint8]

EffortName = Literal["fast", "default", "max"]
METHOD: Final = "joint least squares"
ARITHMETIC: Final = "grid 2^-11, 1"  # of the search: every path of the kernels gives the same bytes

_SWEEPS = 2  # Gauss-Seidel sweeps a round: more change nothing that the next round's indices do not change again
_PROBE = 4096  # vectors that show whether there are more distinct ones than entries
_GROUPS = 64  # positions that a weighted sample is taken from
_CHUNK = 1 << 18  # vectors whose sums are made at once; fixed, as sums of floats depend on it
_APART = np.float64(1.03125)  # factor between an entry and the one split off from it
_K = 1024


@dataclass(frozen=True)
class Effort:
    """How much work goes into an expert.

    width: candidates of the beam search, 1 for greedy, in fitting and for the final indices.
    start_vectors, start_rounds: sample and rounds of k-means, stage by stage, that the fit starts from.
    rounds: (vectors of the fresh sample, step) of each round; a step above 1 goes beyond the optimum for the round's
        indices, which the next round's then follow.
    """

    width: int
    start_vectors: int
    start_rounds: int
    rounds: tuple[tuple[int, float], ...]


EFFORTS: Final[dict[EffortName, Effort]] = {
    "fast": Effort(1, 32 * _K, 4, ((16 * _K, 1.5),) * 4 + ((32 * _K, 1.5),) * 2),
    "default": Effort(
        8, 64 * _K, 6, ((16 * _K, 1.7),) * 6 + ((32 * _K, 1.5),) * 6 + ((64 * _K, 1.5),) * 3 + ((128 * _K, 1.2),)
    ),
    "max": Effort(32, 128 * _K, 10, ((64 * _K, 1.8),) * 8 + ((128 * _K, 1.5),) * 6 + ((256 * _K, 1.2),) * 2),
}


@dataclass(frozen=True)
class _Sample:
    """Vectors float32 [rows, positions, 8], and weights float32 [positions, 8] or None."""

    vectors: Single
    weights: Single | None

    def encode(self, codebooks: Single, width: int, path: str | None) -> Octets:
        """Indices uint8 [rows * positions, stages]."""
        if self.weights is None:
            return kernels.encode(self.vectors.reshape(-1, DIMENSION), codebooks, width=width, path=path)
        found = kernels.encode_weighted(self.vectors, codebooks, self.weights, width=width, path=path)
        return found.reshape(-1, codebooks.shape[0])

    def sums(self, codes: Octets, entries: int, path: str | None) -> FitSums:
        flat = self.vectors.reshape(-1, DIMENSION)
        weights = None
        if self.weights is not None:
            weights = np.ascontiguousarray(np.broadcast_to(self.weights, self.vectors.shape)).reshape(-1, DIMENSION)
        return kernels.fit_sums(flat, codes, entries, weights=weights, path=path)


def fit_codebooks(
    vectors: Sequence[Single],
    parameters: Parameters,
    *,
    seed: int,
    effort: Effort,
    weights: Sequence[Single] | None = None,
    start: Half | None = None,
    path: str | None = None,
) -> Half:
    """Codebooks for matrices that share them.

    Args:
        vectors: for each matrix float32 [rows, positions, 8], rows divided by their scales (``rvq.to_vectors``).
        parameters: stages and entries.
        seed: all that chance depends on, 0 to 2**64 - 1; take another for each expert.
        effort: see :class:`Effort`.
        weights: for each matrix float32 [positions, 8], what a squared error in each column counts; or none.
        start: codebooks of a similar expert, or of its layer, as float16 [stages, entries, 8]. The k-means start and
            half of the rounds are then left out.
        path: kernel path, for tests.

    Returns:
        float16 [stages, entries, 8], finite.
    """
    few = _few_distinct(vectors, parameters.entries)
    if few is not None:
        return _listed(few, parameters)
    draw = _Draw(vectors, weights, seed)
    rounds = effort.rounds
    if start is None:
        codebooks = _start(draw, parameters, effort, path)
    else:
        codebooks = start.astype(np.float64)
        rounds = rounds[len(rounds) // 2 :]
    for count, step in rounds:
        sample = draw.take(count)
        single = codebooks.astype(np.float32)
        sums = sample.sums(sample.encode(single, effort.width, path), parameters.entries, path)
        moved = kernels.sweep(codebooks, sums, sweeps=_SWEEPS, path=path)
        codebooks = _revived(codebooks + step * (moved - codebooks), sums)
    return _rounded(codebooks)


def _few_distinct(vectors: Sequence[Single], entries: int) -> Single | None:
    """All distinct vectors, float32 [n, 8] in ascending order, if there are no more of them than entries."""
    total = sum(part.shape[0] * part.shape[1] for part in vectors)
    stride = max(1, total // _PROBE)
    for every in (stride, 1):  # most experts have many, which a few thousand vectors show
        taken = np.concatenate([part.reshape(-1, DIMENSION)[::every] for part in vectors]) + np.float32(0.0)
        distinct = np.unique(taken, axis=0)
        if len(distinct) > entries:
            return None
    return distinct


def _listed(distinct: Single, parameters: Parameters) -> Half:
    """Every distinct vector as an entry, the last repeated; each further stage has what rounding left over."""
    books = np.zeros((parameters.stages, parameters.entries, DIMENSION), dtype=np.float16)
    left = distinct.astype(np.float64)
    for book in books:
        rows = np.minimum(np.arange(parameters.entries), max(len(left) - 1, 0))
        if len(left):
            book[...] = _rounded(left)[rows]
            left = left - book[: len(left)].astype(np.float64)
    return books


def _start(draw: _Draw, parameters: Parameters, effort: Effort, path: str | None) -> Double:
    """k-means stage by stage, each on what the one before leaves: float64 [stages, entries, 8]."""
    sample = draw.take(effort.start_vectors)
    books = []
    for _ in range(parameters.stages):
        flat = sample.vectors.reshape(-1, DIMENSION)
        book = flat[draw.indices(parameters.entries, len(flat))].astype(np.float64)[None]
        for _ in range(effort.start_rounds):
            sums = sample.sums(sample.encode(book.astype(np.float32), 1, path), parameters.entries, path)
            book = _revived(kernels.sweep(book, sums, path=path), sums)
        single = book.astype(np.float32)
        nearest = sample.encode(single, 1, path)[:, 0]
        sample = _Sample((flat - single[0][nearest]).reshape(sample.vectors.shape), sample.weights)
        books.append(book[0])
    return np.stack(books)


def _revived(codebooks: Double, sums: FitSums) -> Double:
    """Entries that no vector uses, set beside those that most use: the first of them beside the heaviest, and so on."""
    totals = sums.totals.reshape(*codebooks.shape[:2], -1).sum(axis=2, dtype=np.float64)
    for book, total in zip(codebooks, totals, strict=True):
        unused = np.flatnonzero(total == 0)
        heaviest = np.argsort(-total, kind="stable")[: min(len(unused), len(total) - len(unused))]
        book[unused[: len(heaviest)]] = book[heaviest] * _APART
    return codebooks


def _rounded(codebooks: Double) -> Half:
    """As stored: float16, within its range."""
    largest = float(np.finfo(np.float16).max)
    return np.clip(codebooks, -largest, largest).astype(np.float16)


def choose_indices(
    vectors: Single, codebooks: Half, *, width: int, weights: Single | None = None, path: str | None = None
) -> Octets:
    """Indices uint8 [rows, positions, stages] of a matrix' vectors float32 [rows, positions, 8]."""
    sample = _Sample(vectors, weights)
    return sample.encode(codebooks.astype(np.float32), width, path).reshape(*vectors.shape[:2], len(codebooks))


def refit(
    codebooks: Half,
    vectors: Sequence[Single],
    codes: Sequence[Octets],
    *,
    weights: Sequence[Single] | None = None,
    path: str | None = None,
) -> Half:
    """Entries moved to least squares for all vectors with their final indices.

    Args:
        codebooks: float16 [stages, entries, 8] that the indices were chosen with.
        vectors: for each matrix float32 [rows, positions, 8].
        codes: for each matrix uint8 [rows, positions, stages].
        weights: for each matrix float32 [positions, 8], or none.

    Returns:
        float16 [stages, entries, 8]; entries that no vector uses are as they were.
    """
    stages, entries, _ = codebooks.shape
    total: FitSums | None = None
    for number, (part, indices) in enumerate(zip(vectors, codes, strict=True)):
        step = max(1, _CHUNK // max(part.shape[1], 1))
        for top in range(0, len(part), step):
            sample = _Sample(part[top : top + step], None if weights is None else weights[number])
            sums = sample.sums(indices[top : top + step].reshape(-1, stages), entries, path)
            if total is None:
                total = sums
            else:
                for into, add in zip(
                    (total.pairs, total.totals, total.sums), (sums.pairs, sums.totals, sums.sums), strict=True
                ):
                    into += add
    if total is None:
        return codebooks
    books = kernels.sweep(codebooks.astype(np.float64), total, sweeps=4 * _SWEEPS, path=path)
    for stage in range(stages):  # what rounding a stage leaves over, the stages after it take up
        books[stage] = _rounded(_optimum(books, total, stage))
    return _rounded(books)


def _optimum(codebooks: Double, sums: FitSums, stage: int) -> Double:
    """The least-squares entries float64 [entries, 8] of one stage, given the others; sums in the order of entries."""
    stages, entries, _ = codebooks.shape
    left = sums.sums[stage].copy()
    for other in range(stages):
        if other == stage:
            continue
        low, high = min(stage, other), max(stage, other)
        pairs = sums.pairs[high * (high - 1) // 2 + low]
        for entry in range(entries):
            together = pairs[:, entry] if stage == low else pairs[entry]
            left -= together.reshape(entries, -1) * codebooks[other, entry]
    totals = sums.totals[stage].reshape(entries, -1).astype(np.float64)
    best: Double = np.divide(left, totals, out=codebooks[stage].copy(), where=np.broadcast_to(totals > 0, left.shape))
    return best


def fitted_scales(
    values: Single,
    plain: Single,
    rough: Half,
    exponent: int,
    *,
    weights: Single | None = None,
    where: str = "matrix",
    path: str | None = None,
) -> tuple[Half, int]:
    """Row scales under which decoded rows are nearest to the source, as they are stored.

    For a row w and its decoding q with scale 1 that is <w, q> / <q, q>, rounded; the rough scale stays where the
    rounded one is no better, or where there is none (nothing decoded, or <w, q> not positive).

    Args:
        values: float32 [rows, cols], the source.
        plain: float32 [rows, cols], decoded with scale 1.
        rough: float16 [rows] with their ``exponent``, which the indices were chosen with.
        weights: float32 [cols], or none.
        where: for messages.

    Returns:
        float16 [rows], and their exponent.

    Raises:
        FormatError: a scale beyond float16 under the largest exponent.
    """
    sums = kernels.row_sums(values, plain, weights=weights, path=path)
    both, squares = sums[:, 1], sums[:, 2]
    before = to_single(rough, exponent).astype(np.float64)
    wanted = np.divide(both, squares, out=before.copy(), where=(both > 0) & (squares > 0))
    moved = choose_exponent(*span(wanted))
    after = to_half(wanted, moved, where=where)
    if moved != exponent:
        return after, moved
    new = to_single(after, exponent).astype(np.float64)
    # The error of a scale s is s s <q, q> - 2 s <w, q>, up to what does not depend on s.
    better = new * (new * squares - 2 * both) < before * (before * squares - 2 * both)
    return np.where(better, after, rough), exponent


class _Draw:
    """Fresh samples of the vectors of some matrices, from a counter and the seed."""

    def __init__(self, vectors: Sequence[Single], weights: Sequence[Single] | None, seed: int) -> None:
        self._vectors = vectors
        self._weights = weights
        self._seed = np.uint64(seed)
        self._counter = 0
        # Ends of the matrices in the sequence of all vectors, and in that of all positions.
        self._ends = np.cumsum([part.shape[0] * part.shape[1] for part in vectors])
        self._columns = np.cumsum([part.shape[1] for part in vectors])

    def indices(self, count: int, below: int) -> NDArray[np.int64]:
        """int64 [count] in 0 .. below - 1, drawn with replacement (splitmix64 of seed and counter)."""
        state = np.arange(self._counter + 1, self._counter + 1 + count, dtype=np.uint64)
        self._counter += count
        with np.errstate(over="ignore"):
            state = state * np.uint64(0x9E3779B97F4A7C15) + self._seed
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
            # 32 bits times a number below 2**32 fit into 64 bits; its upper half is uniform below that number.
            return ((state >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int64)

    def take(self, count: int) -> _Sample:
        """About ``count`` vectors: all of them, in order, if there are no more."""
        total = int(self._ends[-1])
        if self._weights is not None:
            return self._take_weighted(count)
        if total <= count:
            return _Sample(np.concatenate([part.reshape(-1, DIMENSION) for part in self._vectors])[:, None], None)
        chosen = np.sort(self.indices(count, total))  # sorted: memory is read in one direction
        bounds = np.searchsorted(chosen, self._ends)
        parts, left, start = [], 0, 0
        for part, right, end in zip(self._vectors, bounds, self._ends, strict=True):
            parts.append(part.reshape(-1, DIMENSION)[chosen[left:right] - start])
            left, start = int(right), int(end)
        return _Sample(np.concatenate(parts)[:, None], None)

    def _take_weighted(self, count: int) -> _Sample:
        """Some positions of the rows, each with its weights, and as many random rows at each."""
        assert self._weights is not None
        columns = int(self._columns[-1])
        groups = min(_GROUPS, columns)
        chosen = np.arange(columns) if groups == columns else self.indices(groups, columns)
        rows = -(-count // groups)
        vectors = np.empty((rows, groups, DIMENSION), dtype=np.float32)
        weights = np.empty((groups, DIMENSION), dtype=np.float32)
        for group, column in enumerate(chosen):
            number = int(np.searchsorted(self._columns, column, side="right"))
            position = int(column) - (int(self._columns[number - 1]) if number else 0)
            part = self._vectors[number]
            vectors[:, group] = part[self.indices(rows, len(part)), position]
            weights[group] = self._weights[number][position]
        return _Sample(vectors, weights)
