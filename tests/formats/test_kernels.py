"""Every kernel against its numpy twin, on every path that the machine has: the same indices, the same float bits."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from formats import kernels
from formats.kernels import twins

COMPILED = [name for name in kernels.available_paths() if name != "numpy"]
pytestmark = pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")


def _codebooks(stages: int, entries: int, seed: int = 0) -> np.ndarray:
    """Float32 [stages, entries, 8], half the size from stage to stage, as they are stored."""
    rng = np.random.default_rng(seed)
    sizes = (1.0, 0.45, 0.2, 0.1)[:stages]
    return np.stack([rng.standard_normal((entries, 8)) * s for s in sizes]).astype(np.float16).astype(np.float32)


def _vectors(count: int, seed: int = 1) -> np.ndarray:
    """Normal float32 [count, 8], and among them zeros and vectors up to 1000 times as long."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 8)).astype(np.float32)
    vectors[::97] = 0.0
    for factor, start in ((2.5, 5), (6.0, 11), (1000.0, 40)):
        vectors[start::50] *= np.float32(factor)
    return vectors


def _same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize(("stages", "entries"), [(1, 256), (2, 1), (2, 65), (3, 256), (3, 7), (4, 256), (4, 130)])
@pytest.mark.parametrize("width", [1, 2, 8, 64])
def test_indices_differ_between_paths(path: str, stages: int, entries: int, width: int) -> None:
    vectors, codebooks = _vectors(203), _codebooks(stages, entries)
    expected = kernels.encode(vectors, codebooks, width=width, path="numpy")
    _same_bits(kernels.encode(vectors, codebooks, width=width, path=path), expected)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda books: np.zeros_like(books), id="all-zero"),
        pytest.param(lambda books: np.rint(books), id="many-ties"),
        pytest.param(lambda books: np.repeat(books[:, :4], 64, axis=1), id="copies"),
        pytest.param(lambda books: books * np.float32(6), id="entries-beyond-the-grid"),
        pytest.param(lambda books: books * np.float32(3000), id="nothing-on-the-grid"),
        pytest.param(lambda books: books * np.float32(2.0**-12), id="below-the-grid"),
    ],
)
def test_indices_of_odd_codebooks_differ(path: str, width: int, change) -> None:
    vectors, codebooks = _vectors(131), np.ascontiguousarray(change(_codebooks(3, 256)))
    expected = kernels.encode(vectors, codebooks, width=width, path="numpy")
    _same_bits(kernels.encode(vectors, codebooks, width=width, path=path), expected)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 63, 64, 65])
@pytest.mark.parametrize("path", COMPILED)
def test_indices_at_the_end_of_a_batch_differ(path: str, count: int) -> None:
    vectors, codebooks = _vectors(count), _codebooks(3, 256)
    for width in (1, [4, 9, 1]):
        expected = kernels.encode(vectors, codebooks, width=width, path="numpy")
        _same_bits(kernels.encode(vectors, codebooks, width=width, path=path), expected)


@pytest.mark.parametrize("path", kernels.available_paths())
def test_greedy_index_is_not_the_nearest(path: str) -> None:
    """Against distances in float64: the chosen entry is as near as the nearest, up to the grid."""
    vectors, codebooks = _vectors(500), _codebooks(2, 256)
    codes = kernels.encode(vectors, codebooks, path=path)
    left = vectors.astype(np.float64)
    for stage in range(2):
        distances = np.square(left[:, None] - codebooks[stage].astype(np.float64)).sum(axis=2)
        chosen = distances[np.arange(500), codes[:, stage]]
        assert (chosen <= distances.min(axis=1) + 0.01).all()
        left -= codebooks[stage][codes[:, stage]]


@pytest.mark.parametrize("path", kernels.available_paths())
def test_wider_beam_is_not_better(path: str) -> None:
    vectors = np.random.default_rng(3).standard_normal((400, 8)).astype(np.float32)
    codebooks = _codebooks(3, 64)

    def error(width: int) -> float:
        codes = kernels.encode(vectors, codebooks, width=width, path=path)
        decoded = sum(codebooks[s][codes[:, s]].astype(np.float64) for s in range(3))
        return float(np.square(vectors - decoded).sum())

    errors = [error(width) for width in (1, 4, 16, 64)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("path", kernels.available_paths())
def test_widest_beam_misses_the_best_pair(path: str) -> None:
    """With 64 entries a beam of 64 over two stages looks at every pair, so nothing is nearer than what it finds."""
    vectors, codebooks = _vectors(60, seed=4), _codebooks(2, 64)
    codes = kernels.encode(vectors, codebooks, width=64, path=path)
    pairs = codebooks[0].astype(np.float64)[:, None] + codebooks[1]
    distances = np.square(vectors[:, None, None] - pairs).sum(axis=3)
    chosen = distances[np.arange(60), codes[:, 0], codes[:, 1]]
    assert (chosen <= distances.min(axis=(1, 2)) * (1 + 1e-9) + 0.02).all()


@pytest.mark.parametrize("path", kernels.available_paths())
def test_weighted_error_does_not_fall(path: str) -> None:
    rng = np.random.default_rng(7)
    vectors = rng.standard_normal((64, 5, 8)).astype(np.float32)
    codebooks = _codebooks(3, 128)
    weights = np.exp2(3 * rng.standard_normal((5, 8))).astype(np.float32)

    def error(codes: np.ndarray) -> float:
        decoded = sum(codebooks[s][codes[..., s]].astype(np.float64) for s in range(3))
        return float((weights * np.square(vectors - decoded)).sum())

    plain = kernels.encode(vectors.reshape(-1, 8), codebooks, width=4, path=path).reshape(64, 5, 3)
    weighted = kernels.encode_weighted(vectors, codebooks, weights, width=4, path=path)
    assert error(weighted) < 0.9 * error(plain)
    level = kernels.encode_weighted(vectors, codebooks, np.full((5, 8), 4, np.float32), width=4, path=path)
    _same_bits(level, plain)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize(("stages", "entries"), [(1, 9), (2, 256), (3, 64), (4, 33)])
@pytest.mark.parametrize("weighted", [False, True])
def test_fitting_sums_differ(path: str, stages: int, entries: int, weighted: bool) -> None:
    rng = np.random.default_rng(2)
    vectors = _vectors(700)
    codes = rng.integers(0, entries, (700, stages), dtype=np.uint8)
    codes[:, 0] = np.minimum(codes[:, 0], entries // 2)  # so that some entries are unused
    weights = rng.random((700, 8), dtype=np.float32) if weighted else None
    expected = kernels.fit_sums(vectors, codes, entries, weights=weights, path="numpy")
    found = kernels.fit_sums(vectors, codes, entries, weights=weights, path=path)
    for name in ("pairs", "totals", "sums"):
        _same_bits(getattr(found, name), getattr(expected, name))
    start = _codebooks(stages, entries).astype(np.float64)
    _same_bits(
        kernels.sweep(start, expected, sweeps=3, path=path), kernels.sweep(start, expected, sweeps=3, path="numpy")
    )


@pytest.mark.parametrize("path", kernels.available_paths())
@pytest.mark.parametrize("weighted", [False, True])
def test_sweeps_do_not_reach_least_squares(path: str, weighted: bool) -> None:
    """Against numpy's least squares on the design matrix of the indices."""
    rng = np.random.default_rng(5)
    vectors = rng.standard_normal((300, 8)).astype(np.float32)
    codes = rng.integers(0, 6, (300, 2), dtype=np.uint8)
    weights = rng.random((300, 8), dtype=np.float32) + np.float32(0.1)
    design = np.zeros((300, 12))
    design[np.arange(300), codes[:, 0]] = 1
    design[np.arange(300), 6 + codes[:, 1]] = 1
    sums = kernels.fit_sums(vectors, codes, 6, weights=weights if weighted else None, path=path)
    fitted = kernels.sweep(np.zeros((2, 6, 8)), sums, sweeps=200, path=path)
    for d in range(8):
        root = np.sqrt(weights[:, d].astype(np.float64)) if weighted else np.ones(300)
        best = np.linalg.lstsq(design * root[:, None], vectors[:, d] * root, rcond=None)[0]
        found = fitted[0, codes[:, 0], d] + fitted[1, codes[:, 1], d]
        np.testing.assert_allclose(found, design @ best, atol=1e-9)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize(
    ("rows", "cols", "stages", "entries"), [(1, 1, 1, 1), (64, 64, 3, 256), (77, 61, 4, 200), (130, 8, 2, 16)]
)
def test_decoded_rvq_differs(path: str, rows: int, cols: int, stages: int, entries: int) -> None:
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, entries, (rows, -(-cols // 8), stages), dtype=np.uint8)
    packed = kernels.pack_rvq(codes, path="numpy")
    _same_bits(kernels.pack_rvq(codes, path=path), packed)
    _same_bits(kernels.unpack_rvq(packed, rows, path=path), codes)
    scales = (rng.standard_normal(rows) * 2.0 ** rng.integers(-20, 20, rows)).astype(np.float32)
    codebooks = _codebooks(stages, entries)
    expected = kernels.decode_rvq(packed, codebooks, scales, cols, path="numpy")
    _same_bits(kernels.decode_rvq(packed, codebooks, scales, cols, path=path), expected)
    by_hand = codebooks[0][codes[0, 0, 0]].copy()
    for stage in range(1, stages):
        by_hand += codebooks[stage][codes[0, 0, stage]]
    _same_bits(expected[0, :8], (by_hand * scales[0])[: min(cols, 8)])


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 31), (5, 64), (2, 97)])
def test_decoded_mxfp4_differs(path: str, rows: int, cols: int) -> None:
    rng = np.random.default_rng(cols)
    codes = rng.integers(0, 256, (rows, -(-cols // 2)), dtype=np.uint8)
    scales = rng.integers(0, 252, (rows, -(-cols // 32)), dtype=np.uint8)
    numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    pairs = np.stack((numbers[np.arange(256) & 15], numbers[np.arange(256) >> 4]), axis=1)
    factors = np.ldexp(1.0, np.minimum(np.arange(256), 254) - 127).astype(np.float32)
    expected = kernels.decode_mxfp4(codes, scales, pairs, factors, cols, path="numpy")
    _same_bits(kernels.decode_mxfp4(codes, scales, pairs, factors, cols, path=path), expected)
    assert expected[0, 0] == numbers[codes[0, 0] & 15] * 2.0 ** (int(scales[0, 0]) - 127)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "cols", "group"), [(1, 1, 32), (3, 64, 32), (4, 333, 128)])
def test_decoded_group_int_differs(path: str, bits: int, rows: int, cols: int, group: int) -> None:
    rng = np.random.default_rng(cols)
    codes = rng.integers(0, 256, (rows, cols if bits == 8 else -(-cols // 2)), dtype=np.uint8)
    factors = rng.standard_normal((rows, -(-cols // group))).astype(np.float32)
    expected = kernels.decode_group_int(codes, factors, cols, bits=bits, group=group, path="numpy")
    _same_bits(kernels.decode_group_int(codes, factors, cols, bits=bits, group=group, path=path), expected)


@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 8), (5, 77), (2, 0)])
@pytest.mark.parametrize("weighted", [False, True])
def test_row_sums_differ(path: str, rows: int, cols: int, weighted: bool) -> None:
    rng = np.random.default_rng(cols)
    a, b = rng.standard_normal((2, rows, cols)).astype(np.float32)
    b[0] = -0.0
    weights = rng.random(cols, dtype=np.float32) if weighted else None
    expected = kernels.row_sums(a, b, weights=weights, path="numpy")
    _same_bits(kernels.row_sums(a, b, weights=weights, path=path), expected)
    w = 1.0 if weights is None else weights.astype(np.float64)
    np.testing.assert_allclose(expected[:, 3], (w * (a.astype(float) - b) ** 2).sum(axis=1), rtol=1e-12)


@pytest.mark.parametrize("path", COMPILED)
def test_every_half_precision_number_converts_otherwise(path: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    _same_bits(kernels.half_to_single(bits.view(np.float16), path=path), bits.view(np.float16).astype(np.float32))
    found = kernels.bfloat16_to_single(bits, path=path)
    _same_bits(found, (bits.astype(np.uint32) << 16).view(np.float32))
    finite = np.isfinite(found)
    assert (found[finite] == bits.view(ml_dtypes.bfloat16).astype(np.float32)[finite]).all()


@pytest.mark.parametrize("path", COMPILED)
def test_rounding_to_half_precision_differs(path: str) -> None:
    """Every float16, its neighbours in float32, all midpoints and theirs, and numbers of every exponent."""
    halves = np.arange(0x7C01, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-2] + halves[1:-1]) / np.float32(2)
    rng = np.random.default_rng(0)
    others = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32)
    edges = np.array([65519.99, 65520, 65536, 3e38, np.inf, 1e-45], dtype=np.float32)
    values = np.concatenate((halves, middles, edges, others[~np.isnan(others)]))
    values = np.concatenate((values, np.nextafter(values, np.float32(0)), np.nextafter(values, np.float32(np.inf))))
    values = np.concatenate((values, -values))
    with np.errstate(over="ignore", under="ignore"):
        _same_bits(kernels.single_to_half(values, path=path), values.astype(np.float16))
    assert np.isnan(kernels.single_to_half(np.array([np.nan], np.float32), path=path)).all()


def test_wrong_arrays_pass() -> None:
    vectors, codebooks = _vectors(4), _codebooks(3, 16)
    for bad in (vectors.astype(np.float64), vectors[:, :7], np.asfortranarray(vectors), vectors[0]):
        with pytest.raises(ValueError, match="vectors"):
            kernels.encode(bad, codebooks)
    for width in (0, 65, [1, 2]):
        with pytest.raises(ValueError, match="width"):
            kernels.encode(vectors, codebooks, width=width)
    with pytest.raises(ValueError, match="out of range"):
        kernels.encode(vectors, np.zeros((5, 1, 8), np.float32))
    with pytest.raises(ValueError, match="out of range"):
        kernels.fit_sums(vectors, np.full((4, 3), 16, np.uint8), 16)
    with pytest.raises(ValueError, match="weights"):
        kernels.encode_weighted(vectors[None], codebooks, np.full((4, 8), np.nan, np.float32))
    with pytest.raises(ValueError, match="no kernel path"):
        kernels.encode(vectors, codebooks, path="abacus")


def test_short_buffer_reaches_a_kernel() -> None:
    """The module itself refuses lengths that do not fit the shapes, whatever its caller did."""
    from formats.kernels import _native

    (_, number), *_ = _native.available()
    for n in (5, 1 << 39, -1):
        with pytest.raises(ValueError, match=r"length|range"):
            _native.half_to_single(number, np.zeros(4, np.uint16), np.zeros(4, np.float32), n)
    with pytest.raises(ValueError, match="no such path"):
        _native.half_to_single(99, np.zeros(4, np.uint16), np.zeros(4, np.float32), 4)


@pytest.mark.parametrize("forced", [*kernels.available_paths(), "abacus"])
def test_environment_does_not_force_a_path(forced: str) -> None:
    program = "from formats import kernels; print(kernels.selection())"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={"MOEPACK_KERNEL": forced, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
    )
    if forced == "abacus":
        assert "EnvironmentProblem" in run.stderr
    else:
        assert run.stdout.strip() == f"Selection(name='{forced}', reason='forced')"


def test_grid_of_the_twins_differs_from_the_header() -> None:
    """The constants of rvq_grid.h, read from its text."""
    import re
    from pathlib import Path

    text = (Path(twins.__file__).parent / "rvq_grid.h").read_text()
    for name in ("GRID_BITS", "SCORE_BITS", "INDEX_BITS", "MAX_STAGES", "MAX_ENTRIES", "MAX_WIDTH", "DIMENSION"):
        found = re.search(rf"#define {name} (\d+)", text)
        assert found is not None
        assert int(found[1]) == getattr(twins, name)
