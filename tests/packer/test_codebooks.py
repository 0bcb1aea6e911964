"""Fitting codebooks: degenerate inputs, determinism, and the error that theory expects."""

import itertools

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from formats.codecs import rvq
from formats.errors import FormatError
from packer import codebooks
from packer.codebooks import fit_codebooks, sample_indices


@pytest.fixture(autouse=True)
def _one_blas_thread():
    with threadpool_limits(1, user_api="blas"):
        yield


def _decoded(vectors, fitted):
    books = fitted.astype(np.float32)
    codes = rvq.encode_greedy(vectors, books)
    return sum(books[stage][codes[:, stage]] for stage in range(len(books)))


def _error(vectors, fitted):
    return np.linalg.norm(vectors - _decoded(vectors, fitted)) / np.linalg.norm(vectors)


def _gaussian(count, seed=0):
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


def test_qnt_01_one_vector_and_256_entries():
    vectors = np.array([[1, -2, 0.5, 0, 3, -0.25, 7, 1]], np.float32)
    fitted = fit_codebooks(vectors, rvq.Parameters(3, 256), seed=0)
    assert (fitted.dtype, fitted.shape) == (np.float16, (3, 256, 8))
    assert (fitted[0] == vectors[0].astype(np.float16)).all()
    assert not fitted[1:].any()


def test_qnt_01_distinct_vectors_first_then_the_last_repeated():
    vectors = np.repeat(np.eye(8, dtype=np.float32)[:5], 7, axis=0)
    fitted = fit_codebooks(vectors, rvq.Parameters(1, 9), seed=3)[0]
    assert {tuple(entry) for entry in fitted[:5]} == {tuple(vector) for vector in vectors}
    assert (fitted[5:] == fitted[4]).all()


@pytest.mark.parametrize("entries", [3, 8, 256])
def test_qnt_02_three_distinct_vectors_are_coded_without_error(entries):
    vectors = np.repeat(np.array([[1.0] * 8, [-2.0] * 8, [0.5, 0.25] * 4], np.float32), 50, axis=0)
    assert len(vectors) == 150
    fitted = fit_codebooks(vectors, rvq.Parameters(1, entries), seed=0)
    assert np.array_equal(_decoded(vectors, fitted), vectors)


def test_qnt_02_distinct_vectors_that_float16_cannot_hold_are_finished_by_the_next_stages():
    vectors = np.repeat(_gaussian(20), 5, axis=0)
    fitted = fit_codebooks(vectors, rvq.Parameters(3, 32), seed=0)
    assert _error(vectors, fitted) < 1e-6


def test_qnt_02_more_distinct_vectors_than_entries_but_heavy_duplicates():
    vectors = np.concatenate([np.zeros((5000, 8), np.float32), _gaussian(40)])
    fitted = fit_codebooks(vectors, rvq.Parameters(1, 32), seed=0)
    assert np.isfinite(fitted).all()
    # 40 vectors beside zero, 32 entries: most have one of their own.
    assert _error(vectors, fitted) < 0.6


@pytest.mark.parametrize("seed", range(5))
def test_qnt_02_a_start_that_leaves_centres_empty_ends_without_nan(seed):
    # Two far clumps; a start inside one of them leaves centres without points.
    points = np.concatenate([_gaussian(300, seed) * np.float32(1e-3), 100 + _gaussian(3, seed)])
    centres = np.tile(np.float32(1e4) + np.arange(16, dtype=np.float32)[:, None], (1, 8))
    centres[0] = 0
    fitted = codebooks._lloyd(points, centres, 12)
    assert np.isfinite(fitted).all()
    near = np.square(points[:, None] - fitted).sum(axis=2)
    assert len(np.unique(near.argmin(axis=1))) > 3
    assert near.min(axis=1)[-3:] == pytest.approx(0.0, abs=1e-6)  # the far points got centres of their own


def test_negative_zero_is_the_same_vector_as_zero():
    vectors = np.zeros((20, 8), np.float32)
    vectors[::2] = -0.0
    vectors[0, 0] = 1
    fitted = fit_codebooks(vectors, rvq.Parameters(1, 2), seed=0)
    assert np.array_equal(_decoded(vectors, fitted), vectors)


@pytest.mark.parametrize("value", [0.0, 1.0, -1e-7, 6e4])
def test_constant_vectors_are_coded_without_a_visible_error(value):
    vectors = np.full((5000, 8), value, np.float32)
    fitted = fit_codebooks(vectors, rvq.Parameters(3, 256), seed=0)
    assert _decoded(vectors, fitted) == pytest.approx(vectors, rel=1e-6, abs=2.0**-24)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38, 7e4])
def test_qnt_04_06_vectors_beyond_float16_are_refused(bad):
    vectors = _gaussian(2000)
    vectors[1234, 5] = bad
    with pytest.raises(FormatError, match="beyond float16"):
        fit_codebooks(vectors, rvq.Parameters(), seed=0)


def test_qnt_06_a_common_part_does_not_hide_the_rest():
    vectors = np.float32(100.0) + _gaussian(4000) * np.float32(0.01)
    fitted = fit_codebooks(vectors, rvq.Parameters(3, 64), seed=0)
    left = np.linalg.norm(vectors - _decoded(vectors, fitted)) / np.linalg.norm(vectors - 100)
    assert left < 0.6


def test_no_vectors_give_zeros():
    assert not fit_codebooks(np.zeros((0, 8), np.float32), rvq.Parameters(2, 4), seed=0).any()


def test_same_input_and_seed_give_the_same_bytes():
    vectors = _gaussian(3000)
    before = vectors.copy()
    first = fit_codebooks(vectors, rvq.Parameters(2, 64), seed=7)
    assert np.array_equal(vectors, before)
    assert fit_codebooks(vectors, rvq.Parameters(2, 64), seed=7).tobytes() == first.tobytes()
    assert fit_codebooks(vectors, rvq.Parameters(2, 64), seed=8).tobytes() != first.tobytes()


def test_num_05_global_random_state_is_untouched():
    np.random.seed(5)
    expected = np.random.get_state()[1].copy()
    fit_codebooks(_gaussian(600), rvq.Parameters(1, 16), seed=2**64 - 1)
    assert np.array_equal(np.random.get_state()[1], expected)


def test_error_on_gaussian_vectors_is_that_of_a_good_residual_quantiser():
    # The rate-distortion bound at 3 bits is 2**-3 = 12.5 %; with independent stages of 8 dimensions about 19 %.
    fitted = fit_codebooks(_gaussian(40_000), rvq.Parameters(3, 256), seed=0)
    assert 0.125 < _error(_gaussian(40_000, seed=1), fitted) < 0.200


def test_each_stage_takes_its_share_of_the_error():
    vectors = _gaussian(8000)
    fitted = fit_codebooks(vectors, rvq.Parameters(4, 64), seed=0)
    errors = [_error(vectors, fitted[:stages]) for stages in range(1, 5)]
    assert all(after < 0.75 * before for before, after in itertools.pairwise(errors))


def test_codebooks_of_later_stages_follow_the_rounded_ones():
    # One entry a stage: the mean, then the mean of what float16 left of it.
    vectors = np.full((2000, 8), 1.0003, np.float32)
    vectors[:1000] += np.float32(0.0004)
    fitted = fit_codebooks(vectors, rvq.Parameters(2, 1), seed=0).astype(np.float64)
    mean = vectors[:, 0].astype(np.float64).mean()
    stored = np.float64(np.float16(mean))
    assert stored != mean
    assert fitted[0] == pytest.approx(stored, abs=0)
    assert fitted[1] == pytest.approx(mean - stored, rel=1e-3)


@pytest.mark.parametrize(("count", "limit"), [(10, 10), (11, 10), (1000, 7), (4_128_768, 1000)])
def test_sample_is_even_and_without_repetition(count, limit):
    chosen = sample_indices(count, 5, limit)
    assert len(chosen) == min(count, limit)
    assert (np.diff(chosen) > 0).all()
    stretch = np.arange(len(chosen)) * count // len(chosen)
    assert ((chosen >= stretch) & (chosen < [*stretch[1:], count])).all()
    assert np.array_equal(sample_indices(count, 5, limit), chosen)


def test_sample_does_not_see_the_same_columns_only():
    # 4,128,768 vectors in rows of 448 and a stride of 63 would meet 64 of the 448 columns.
    assert len(np.unique(sample_indices(4_128_768, 0, 65_536) % 448)) == 448


def test_vectors_beyond_the_sample_limit_are_sampled(monkeypatch):
    monkeypatch.setattr(codebooks, "sample_indices", lambda count, seed: sample_indices(count, seed, 2000))
    vectors = _gaussian(9000)
    fitted = fit_codebooks(vectors, rvq.Parameters(1, 32), seed=0)
    assert np.array_equal(fitted, fit_codebooks(vectors[sample_indices(9000, 0, 2000)], rvq.Parameters(1, 32), seed=0))
