"""Fitting the codebooks of codec rvq: residual k-means, one codebook a stage.

The interface is one function from vectors to codebooks, so that a better or a native fit can take its
place. What it promises: the result depends on the vectors, the parameters and the seed alone; memory and
rounds are bounded; and no input that is finite leads to a NaN, an error or an endless loop. Sums of BLAS may
depend on its number of threads: callers hold it at one.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from formats.codecs import rvq
from formats.codecs.common import LARGEST_HALF, Half, Single
from formats.errors import FormatError

# On Gaussian vectors three stages of 256 entries leave an error of 19.17 %. Half the sample costs 0.12 points, twice
# as large a one saves 0.05 and eight more rounds 0.07, each for about twice the time.
SAMPLE_VECTORS: Final = 1 << 17  # vectors that a codebook is fitted to: 512 for each of 256 entries
SEEDING_VECTORS: Final = 1 << 13  # vectors among which the start is chosen
ROUNDS: Final = 12  # of Lloyd's algorithm a stage

_SAMPLING, _SEEDING = 1, 2  # what a stream of random numbers is for, so that no two are the same


def fit_codebooks(vectors: Single, parameters: rvq.Parameters, *, seed: int, rounds: int = ROUNDS) -> Half:
    """Fit ``parameters.stages`` codebooks to vectors, each to what the ones before have left over.

    Where a stage has no more distinct vectors than entries, the codebook is these vectors and then the last
    of them repeated, so that the stage adds no error but that of float16.

    Args:
        vectors: float32 [n, 8] of any magnitude that float16 holds, as ``rvq.to_vectors`` gives them. Of more
            than ``SAMPLE_VECTORS`` an even sample is used.
        parameters: stages and entries.
        seed: 0 to 2**64 - 1.
        rounds: upper limit of k-means rounds a stage.

    Returns:
        float16 [stages, entries, 8], as stored.

    Raises:
        FormatError: vectors that are not finite, or beyond float16.
    """
    sample = vectors[sample_indices(len(vectors), seed)]
    residual = sample + np.float32(0.0)  # a copy, with -0 as 0: equal vectors then have equal bytes
    largest = float(np.abs(residual).max(initial=0.0))
    if not largest <= LARGEST_HALF:  # false for NaN too
        raise FormatError("vectors to fit are beyond float16", expected=f"at most {LARGEST_HALF:g}", found=largest)
    codebooks = np.zeros((parameters.stages, parameters.entries, rvq.DIMENSION), dtype=np.float16)
    if not len(residual):
        return codebooks
    random = _random(seed, _SEEDING)
    for stage in range(parameters.stages):
        codebooks[stage] = _fit_stage(residual, parameters.entries, rounds, random).astype(np.float16)
        stored = codebooks[stage].astype(np.float32)
        residual -= stored[_nearest(residual, stored)]
    return codebooks


def sample_indices(count: int, seed: int, limit: int = SAMPLE_VECTORS) -> NDArray[np.int64]:
    """Which of ``count`` vectors to fit to: all, or ``limit`` of them, one from each of as many equal stretches.

    The place inside a stretch is random: a fixed stride shares factors with the vectors of a row, and would
    see the same columns again and again.

    Returns:
        int64, ascending, without repetition.
    """
    if count <= limit:
        return np.arange(count)
    edges = np.arange(limit + 1) * count // limit
    places = _uniform(_random(seed, _SAMPLING), limit) * np.diff(edges)
    return edges[:-1] + places.astype(np.int64)


def _random(seed: int, purpose: int) -> np.random.PCG64:
    """A stream of random bits. Only raw bits are drawn: they are the same in every numpy, distributions are not."""
    return np.random.PCG64(np.random.SeedSequence([seed, purpose]))


def _uniform(random: np.random.PCG64, count: int) -> NDArray[np.float64]:
    """``count`` numbers from [0, 1)."""
    bits = np.atleast_1d(np.asarray(random.random_raw(count), dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _nearest(points: Single, centres: Single) -> NDArray[np.uint8]:
    """The index of the nearest centre of each point, the lowest among equals."""
    return rvq.encode_greedy(points, centres[None])[:, 0]


def _fit_stage(points: Single, entries: int, rounds: int, random: np.random.PCG64) -> Single:
    """One codebook: float32 [entries, 8]."""
    distinct = _few_distinct(points, entries)
    if distinct is not None:
        fill = np.repeat(distinct[-1:], entries - len(distinct), axis=0)
        return np.concatenate((distinct, fill))
    return _lloyd(points, _start(points, entries, random), rounds)


def _few_distinct(points: Single, entries: int) -> Single | None:
    """The distinct points, if there are no more of them than entries."""
    if any(np.unique(column).size > entries for column in points.T):
        return None
    distinct = np.unique(points, axis=0)
    return distinct if len(distinct) <= entries else None


def _start(points: Single, entries: int, random: np.random.PCG64) -> Single:
    """Centres to start from, by k-means++: each is drawn with the weight of its squared distance to those before."""
    count = min(len(points), SEEDING_VECTORS)
    seeds = points[np.arange(count) * len(points) // count]
    draws = _uniform(random, entries)
    centres = np.empty((entries, rvq.DIMENSION), dtype=np.float32)
    distance = np.ones(len(seeds))  # the first draw is uniform
    for entry, draw in enumerate(draws):
        running = np.cumsum(distance)
        # Where all points of the sample are centres already the last one is drawn again; Lloyd will move it.
        chosen = min(int(np.searchsorted(running, draw * running[-1], side="right")), len(seeds) - 1)
        centres[entry] = seeds[chosen]
        away = np.square(seeds - centres[entry]).sum(axis=1, dtype=np.float64)
        distance = away if entry == 0 else np.minimum(distance, away)
    return centres


def _lloyd(points: Single, centres: Single, rounds: int) -> Single:
    """Lloyd's algorithm, until nothing moves or for ``rounds`` rounds."""
    before = None
    for _ in range(rounds):
        nearest = _nearest(points, centres)
        if before is not None and np.array_equal(nearest, before):
            break
        before = nearest
        counts = np.bincount(nearest, minlength=len(centres))
        sums = [np.bincount(nearest, weights=column, minlength=len(centres)) for column in points.T]
        used = counts > 0
        fresh = centres.copy()
        fresh[used] = (np.stack(sums, axis=1)[used] / counts[used, None]).astype(np.float32)
        if not used.all():
            _reseed(points, centres, nearest, np.flatnonzero(~used), fresh)
        centres = fresh
    return centres


def _reseed(
    points: Single, centres: Single, nearest: NDArray[np.uint8], empty: NDArray[np.intp], fresh: Single
) -> None:
    """Move centres without points, in ``fresh``, to the distinct points farthest from their own; first ones first.

    With fewer such points than empty centres, the rest stay where they are.
    """
    away = np.square(points - centres[nearest]).sum(axis=1, dtype=np.float64)
    order = np.argsort(-away, kind="stable")
    taken: set[bytes] = set()
    free = iter(empty)
    for index in order[: 4 * len(empty) + 64]:
        point = points[index]
        if away[index] == 0.0 or point.tobytes() in taken:
            continue
        taken.add(point.tobytes())
        slot = next(free, None)
        if slot is None:
            return
        fresh[slot] = point
