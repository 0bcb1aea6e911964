"""Products on encoded weights: the same bits on every path, for any range and number of inputs, in their places."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from formats import kernels
from formats.encoded import (
    GroupIntMatrix,
    Mxfp4Matrix,
    RawMatrix,
    RvqMatrix,
    decode_rows,
    multiply,
    multiply_pair,
    multiply_transposed,
)
from tests.support.encoded import KINDS, inputs_for, made, spread

PATHS = kernels.available_paths()
COMPILED = [name for name in PATHS if name != kernels.NUMPY]
TRANSPOSED = [name for name, kind in KINDS.items() if kind.transposed]
Single = NDArray[np.float32]


def same_bits(found: Single, expected: Single) -> bool:
    return found.dtype == np.float32 and found.shape == expected.shape and found.tobytes() == expected.tobytes()


# All paths.


@pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_paths_differ_at_odd_shapes(kind: str) -> None:
    shapes = [(rows, cols) for cols in range(1, 66) for rows in (1 + cols % 5, 17)]
    shapes += [(rows, cols) for rows in (*range(1, 66, 7), 64, 65, 127, 130) for cols in (3, 40, 96, 129)]
    shapes += [(5, 257), (66, 300), (4, 1030)]
    for rows, cols in shapes:
        matrix = made(kind, rows, cols)
        for count in (1, 1 + (rows + cols) % 9):
            inputs = inputs_for(count, cols)
            expected = multiply(matrix, inputs, path="numpy")
            for path in COMPILED:
                assert same_bits(multiply(matrix, inputs, path=path), expected), (rows, cols, count, path)


@pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")
@pytest.mark.parametrize("kind", KINDS)
def test_paths_differ_at_some_number_of_inputs(kind: str) -> None:
    matrix = made(kind, 70, 100)
    for count in (0, *range(1, 10), 15, 16, 17, 18, 21, 33, 70):
        inputs = inputs_for(count, 100)
        expected = multiply(matrix, inputs, path="numpy")
        for path in COMPILED:
            assert same_bits(multiply(matrix, inputs, path=path), expected), (count, path)


@pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_paths_differ(kind: str) -> None:
    for rows, cols in [(cols % 11 + 1, cols) for cols in range(1, 66)] + [(130, 257), (3, 1100), (7, 2049)]:
        matrix = made(kind, rows, cols)
        inputs = inputs_for(1 + cols % 9 if cols % 13 else 19 + cols, rows)
        expected = multiply_transposed(matrix, inputs, path="numpy")
        for path in COMPILED:
            assert same_bits(multiply_transposed(matrix, inputs, path=path), expected), (rows, cols, path)


@pytest.mark.skipif(not COMPILED, reason="kernels are not compiled")
@pytest.mark.parametrize("path", COMPILED)
@pytest.mark.parametrize("size", [2.0**-140, 2.0**-120, 2.0**100], ids=["subnormal", "tiny", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_paths_differ_at_extreme_inputs(kind: str, size: float, path: str) -> None:
    """Sums that are subnormal, that lose all, and that overflow."""
    matrix = made(kind, 20, 75)
    inputs = (inputs_for(5, 75) * size).astype(np.float32)
    inputs[1] = 0.0
    inputs[2, ::2] = 0.0
    found, expected = multiply(matrix, inputs, path=path), multiply(matrix, inputs, path="numpy")
    known = ~np.isnan(expected)  # two infinities may meet; which NaN that gives is the machine's business
    assert np.array_equal(np.isnan(found), ~known)
    assert found[known].tobytes() == expected[known].tobytes()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_result_depends_on_the_other_inputs(kind: str, path: str) -> None:
    matrix, inputs = made(kind, 67, 90), inputs_for(19, 90)
    whole = multiply(matrix, inputs, path=path)
    for first, stop in ((0, 1), (3, 5), (5, 12), (1, 18)):
        assert same_bits(multiply(matrix, inputs[first:stop], path=path), whole[first:stop])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_result_depends_on_the_range_of_rows(kind: str, path: str) -> None:
    matrix = made(kind, 131, 90)
    for count in (1, 3, 6, 11):
        inputs = inputs_for(count, 90)
        whole = multiply(matrix, inputs, path=path)
        for first, stop in ((0, 131), (0, 0), (131, 131), (1, 2), (5, 70), (63, 65), (64, 131), (17, 130)):
            part = multiply(matrix, inputs, first=first, stop=stop, path=path)
            assert same_bits(part, np.ascontiguousarray(whole[:, first:stop])), (count, first, stop)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_result_depends_on_the_range(kind: str, path: str) -> None:
    matrix, inputs = made(kind, 31, 140), inputs_for(5, 31)
    whole = multiply_transposed(matrix, inputs, path=path)
    for first, stop in ((0, 140), (7, 7), (1, 2), (3, 139), (31, 33), (128, 140)):
        part = multiply_transposed(matrix, inputs, first=first, stop=stop, path=path)
        assert same_bits(part, np.ascontiguousarray(whole[:, first:stop])), (first, stop)
    for count in (1, 2, 4):
        assert same_bits(multiply_transposed(matrix, inputs[:count], path=path), whole[:count])


@pytest.mark.parametrize("path", PATHS)
def test_transposed_product_takes_other_rows_than_asked_for(path: str) -> None:
    """Rows 5 to 9 of a matrix give what a matrix of these rows gives."""
    values = spread(np.random.default_rng(3), (20, 33))
    part = RawMatrix(4, 33, "F32", values[5:9].copy())
    inputs = inputs_for(3, 4)
    found = multiply_transposed(RawMatrix(20, 33, "F32", values), inputs, row_first=5, row_stop=9, path=path)
    assert same_bits(found, multiply_transposed(part, inputs, path=path))


@pytest.mark.parametrize("path", PATHS)
def test_codes_beyond_the_codebook_leave_the_tables(path: str) -> None:
    """Such codes are refused before; should they come all the same, they pick zeros."""
    matrix = made("rvq 2 x 3", 66, 40)
    assert isinstance(matrix, RvqMatrix)
    wild = replace(matrix, codes=np.full_like(matrix.codes, 255))
    for count in (1, 3, 8, 16):
        assert not multiply(wild, inputs_for(count, 40), path=path).any()


# Two matrices with the same inputs.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_pair_differs_from_two_products(kind: str, path: str) -> None:
    gate, up = made(kind, 70, 50), made(kind, 70, 50, seed=5)
    if isinstance(gate, RvqMatrix) and isinstance(up, RvqMatrix):
        up = replace(up, codebooks=gate.codebooks, scale_exponent=gate.scale_exponent + 3)
    for count in (1, 4, 9):
        inputs = inputs_for(count, 50)
        for first, stop in ((0, None), (9, 66)):
            found = multiply_pair(gate, up, inputs, first=first, stop=stop, path=path)
            for matrix, product in zip((gate, up), found, strict=True):
                assert same_bits(product, multiply(matrix, inputs, first=first, stop=stop, path=path))


@pytest.mark.parametrize("path", PATHS)
def test_pair_of_different_matrices_shares_tables(path: str) -> None:
    """Own codebooks, other codecs, other rows: nothing is shared, and the products are right all the same."""
    inputs = inputs_for(2, 50)
    one, other, plain = made("rvq 3 x 256", 70, 50), made("rvq 3 x 256", 70, 50, seed=5), made("raw F32", 7, 50)
    for gate, up in ((one, other), (one, plain), (plain, one)):
        found = multiply_pair(gate, up, inputs, path=path)
        assert all(
            same_bits(product, multiply(matrix, inputs, path=path))
            for matrix, product in zip((gate, up), found, strict=True)
        )


# Where results go.


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_with_ranges_of_rows_fill_one_array(kind: str, path: str) -> None:
    matrix = made(kind, 200, 64)
    for count in (1, 6):
        inputs = inputs_for(count, 64)
        out = np.full((count, 200), np.nan, np.float32)
        with ThreadPoolExecutor(4) as pool:
            ranges = [(0, 33), (33, 64), (64, 150), (150, 200)]
            tasks = [
                pool.submit(multiply, matrix, inputs, first=first, stop=stop, out=out, path=path)
                for first, stop in ranges
            ]
        assert all(task.result() is out for task in tasks)
        assert same_bits(out, multiply(matrix, inputs, path=path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_columns_outside_the_range_are_written(kind: str, path: str) -> None:
    matrix, inputs = made(kind, 80, 48), inputs_for(3, 48)
    out = np.full((3, 80), 7.0, np.float32)
    multiply(matrix, inputs, first=20, stop=45, out=out, path=path)
    assert (out[:, :20] == 7.0).all()
    assert (out[:, 45:] == 7.0).all()
    assert (out[:, 20:45] != 7.0).any()
    if KINDS[kind].transposed:
        out = np.full((3, 48), 7.0, np.float32)
        multiply_transposed(matrix, inputs_for(3, 80), first=20, stop=45, out=out, path=path)
        assert (out[:, :20] == 7.0).all()
        assert (out[:, 45:] == 7.0).all()


@pytest.mark.parametrize("path", PATHS)
def test_wrong_arguments_are_taken(path: str) -> None:
    matrix, inputs = made("raw F32", 10, 20), inputs_for(2, 20)
    wrong = [
        lambda: multiply(matrix, inputs[:, :19].copy(), path=path),
        lambda: multiply(matrix, inputs.astype(np.float64), path=path),
        lambda: multiply(matrix, inputs_for(2, 40)[:, ::2], path=path),
        lambda: multiply(matrix, inputs, first=-1, path=path),
        lambda: multiply(matrix, inputs, first=5, stop=4, path=path),
        lambda: multiply(matrix, inputs, stop=11, path=path),
        lambda: multiply(matrix, inputs, out=np.zeros((2, 9), np.float32), path=path),
        lambda: multiply(matrix, inputs, out=np.zeros((2, 10)), path=path),
        lambda: multiply(replace(made("mxfp4", 2, 20), bias=0), inputs, path=path),
        lambda: multiply(replace(made("group_int 8, 32", 2, 20), group=48), inputs, path=path),
        lambda: multiply(replace(made("group_int 8, 32", 2, 20), bits=5), inputs, path=path),
        lambda: multiply(replace(made("rvq 3 x 256", 2, 20), scale_exponent=101), inputs, path=path),
        lambda: multiply(replace(made("rvq 3 x 256", 2, 20), scales=np.ones(65, np.float16)), inputs, path=path),
        lambda: multiply_transposed(matrix, inputs_for(2, 9), path=path),
        lambda: multiply_transposed(matrix, inputs_for(2, 3), row_first=8, row_stop=11, path=path),
        lambda: multiply_transposed(made("mxfp4", 10, 20), inputs_for(2, 10), path=path),
        lambda: decode_rows(matrix, np.array([10])),
        lambda: decode_rows(matrix, np.array([-1])),
    ]
    for call in wrong:
        with pytest.raises(ValueError, match=r"wanted|within|out of range|no range|no transposed"):
            call()
    read_only = np.zeros((2, 10), np.float32)
    read_only.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        multiply(matrix, inputs, out=read_only, path=path)


def test_unaligned_weights_are_multiplied() -> None:
    values = np.frombuffer(bytes(1 + 4 * 6), np.uint8)[1:].view(np.float32).reshape(2, 3)
    with pytest.raises(ValueError, match="values"):
        multiply(RawMatrix(2, 3, "F32", values), np.ones((1, 3), np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_decoded_rows_are_other_rows(kind: str) -> None:
    matrix = made(kind, 130, 45)
    rows = np.array([129, 0, 64, 63, 64])
    assert same_bits(decode_rows(matrix, rows), decode_rows(matrix, np.arange(130))[rows])
    assert decode_rows(matrix, np.empty(0, np.int64)).shape == (0, 45)


def test_kinds_cover_every_codec() -> None:
    found = {type(made(kind, 2, 40)) for kind in KINDS}
    assert found == {RawMatrix, Mxfp4Matrix, GroupIntMatrix, RvqMatrix}
