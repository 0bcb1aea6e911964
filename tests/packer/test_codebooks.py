"""Fitted codebooks: the same bytes everywhere, errors that fall, and sense for matrices that have none."""

import hashlib

import numpy as np
import pytest

from formats import kernels
from formats.codecs import rvq
from packer.encoding import codebooks as fitting
from packer.encoding.codebooks import Effort

SMALL = Effort(4, 2048, 3, ((2048, 1.7), (2048, 1.5), (4096, 1.2)))
PARAMETERS = rvq.Parameters(stages=3, entries=64)


def _matrices(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.standard_normal((rows, cols // 8, 8)).astype(np.float32) for rows, cols in ((96, 256), (96, 256), (256, 96))
    ]


def _decoded(codebooks: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return sum(codebooks[s].astype(np.float64)[codes[..., s]] for s in range(len(codebooks)))


def _error(vectors: list, codebooks: np.ndarray, codes: list, weights: list | None = None) -> float:
    weights = [1.0] * len(vectors) if weights is None else weights
    lost = sum((w * (v - _decoded(codebooks, c)) ** 2).sum() for v, c, w in zip(vectors, codes, weights, strict=True))
    return float(np.sqrt(lost / sum((w * v.astype(float) ** 2).sum() for v, w in zip(vectors, weights, strict=True))))


def _fit(vectors: list, **more) -> np.ndarray:
    return fitting.fit_codebooks(
        vectors, more.pop("parameters", PARAMETERS), seed=7, effort=more.pop("effort", SMALL), **more
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_codebook_bytes_depend_on_the_path(weighted: bool) -> None:
    vectors = _matrices()
    weights = (
        [np.exp(np.random.default_rng(3).standard_normal(v.shape[1:])).astype(np.float32) for v in vectors]
        if weighted
        else None
    )
    digests = {
        path: hashlib.sha256(_fit(vectors, weights=weights, path=path).tobytes()).hexdigest()
        for path in kernels.available_paths()
    }
    assert len(set(digests.values())) == 1, digests


def test_seed_does_not_decide() -> None:
    vectors = _matrices()
    first, again = _fit(vectors), _fit(vectors)
    other = fitting.fit_codebooks(vectors, PARAMETERS, seed=8, effort=SMALL)
    assert first.tobytes() == again.tobytes()
    assert first.tobytes() != other.tobytes()


def test_joint_fit_is_not_better_than_stage_by_stage() -> None:
    vectors = _matrices()
    start = _fit(vectors, effort=Effort(4, 2048, 3, ()))
    fitted = _fit(vectors)

    def error(books: np.ndarray) -> float:
        return _error(vectors, books, [fitting.choose_indices(v, books, width=4) for v in vectors])

    assert error(fitted) < 0.97 * error(start)


def test_start_is_not_used() -> None:
    vectors = _matrices()
    warm = _fit(_matrices(seed=9))
    without_rounds = Effort(4, 2048, 3, ())
    assert _fit(vectors, start=warm, effort=without_rounds).tobytes() == warm.tobytes()
    assert _fit(vectors, start=warm).tobytes() != warm.tobytes()


@pytest.mark.parametrize("weighted", [False, True])
def test_refit_raises_the_error(weighted: bool) -> None:
    vectors = _matrices()
    weights = (
        [np.exp(np.random.default_rng(3).standard_normal(v.shape[1:])).astype(np.float32) for v in vectors]
        if weighted
        else None
    )
    books = _fit(vectors, effort=Effort(4, 1024, 2, ((1024, 1.0),)))
    codes = [fitting.choose_indices(v, books, width=4) for v in vectors]
    moved = fitting.refit(books, vectors, codes, weights=weights)
    assert _error(vectors, moved, codes, weights) < _error(vectors, books, codes, weights)


def test_weighted_error_does_not_fall() -> None:
    vectors = _matrices()
    rng = np.random.default_rng(5)
    weights = [np.exp(1.5 * rng.standard_normal(v.shape[1:])).astype(np.float32) for v in vectors]
    plain = _fit(vectors)
    weighted = _fit(vectors, weights=weights)
    plain_codes = [fitting.choose_indices(v, plain, width=4) for v in vectors]
    codes = [fitting.choose_indices(v, weighted, width=4, weights=w) for v, w in zip(vectors, weights, strict=True)]
    assert _error(vectors, weighted, codes, weights) < 0.9 * _error(vectors, plain, plain_codes, weights)


@pytest.mark.parametrize("effort", ["fast", "default", "max"])
@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.zeros((3, 2, 8)), id="zero"),
        pytest.param(np.ones((3, 2, 8)), id="constant"),
        pytest.param(np.arange(8.0).reshape(1, 1, 8) / 4, id="one-vector"),
        pytest.param(np.repeat(np.eye(8)[None] * 2.8, 40, axis=0), id="few-distinct"),
        pytest.param(np.ldexp(np.ones((40, 5, 8)), np.arange(-20, 20)[:, None, None]), id="huge-range"),
    ],
)
def test_degenerate_matrices_give_nonsense(values: np.ndarray, effort: str) -> None:
    """Finite codebooks; and an exact answer where there are fewer distinct vectors than entries within their range."""
    vectors = [values.astype(np.float32)]
    books = _fit(vectors, effort=fitting.EFFORTS[effort], parameters=rvq.Parameters())
    assert np.isfinite(books).all()
    codes = [fitting.choose_indices(vectors[0], books, width=4)]
    moved = fitting.refit(books, vectors, codes)
    assert np.isfinite(moved).all()
    if np.abs(values).max() < 100:
        assert np.abs(values - _decoded(moved, codes[0])).max() < 0.01


def test_scales_are_not_least_squares() -> None:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((4, 24)).astype(np.float32)
    values = (plain * np.array([[2.0], [0.25], [1.0], [3.0]]) + 0.1 * rng.standard_normal((4, 24))).astype(np.float32)
    plain[2] = 0.0
    values[3] = -plain[3]
    rough = np.full(4, 9.0, np.float16)
    found, exponent = fitting.fitted_scales(values, plain, rough, 0)
    assert exponent == 0
    for row in (0, 1):
        best = np.linalg.lstsq(plain[row].astype(float)[:, None], values[row].astype(float), rcond=None)[0][0]
        assert float(found[row]) == pytest.approx(best, rel=2.0**-11)
    assert found[2] == found[3] == 9.0


def test_a_scale_that_rounding_made_worse_is_kept() -> None:
    """The rough scale fits exactly; the least-squares one is the same before rounding, and never replaces it."""
    plain = np.full((1, 8), 1.0003, np.float32)
    rough = np.full(1, 0.3, np.float16)
    values = plain * np.float32(rough[0])
    found, exponent = fitting.fitted_scales(values, plain, rough, 0)
    assert (found.tolist(), exponent) == (rough.tolist(), 0)


def test_the_normal_equations_of_one_stage_are_solved() -> None:
    """Against numpy's least squares over one-hot columns of that stage, the others fixed."""
    rng = np.random.default_rng(4)
    vectors = rng.standard_normal((300, 8)).astype(np.float32)
    codes = rng.integers(0, 5, (300, 3), dtype=np.uint8)
    books = rng.standard_normal((3, 5, 8))
    sums = fitting.kernels.fit_sums(vectors, codes, 5)
    for stage in range(3):
        left = vectors - sum(books[other][codes[:, other]] for other in range(3) if other != stage)
        one_hot = np.eye(5)[codes[:, stage]]
        expected = np.linalg.lstsq(one_hot, left, rcond=None)[0]
        np.testing.assert_allclose(fitting._optimum(books, sums, stage), expected, atol=1e-9)
