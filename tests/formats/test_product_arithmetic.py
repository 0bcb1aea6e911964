"""The arithmetic of products: exact fractions, vectors by hand, and bounds against float64.

The fractions are the page's rules written a second time, one number after the other; every path is compared with them.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from formats import kernels
from formats.encoded import (
    EncodedMatrix,
    GroupIntMatrix,
    Mxfp4Matrix,
    RawMatrix,
    RvqMatrix,
    decode_rows,
    multiply,
    multiply_transposed,
)
from formats.kernels.product_twins import integers
from tests.support import exact
from tests.support.encoded import KINDS, inputs_for, made

PATHS = kernels.available_paths()
TRANSPOSED = [name for name, kind in KINDS.items() if kind.transposed]
Single = NDArray[np.float32]


def decoded(matrix: EncodedMatrix) -> NDArray[np.float64]:
    return decode_rows(matrix, np.arange(matrix.rows)).astype(np.float64)


def exact_products(matrix: EncodedMatrix, inputs: Single) -> list[list[Fraction]]:
    """[input][row], one number after the other."""
    found = []
    for x in map(exact.exact_row, inputs):
        results = []
        for row in range(matrix.rows):
            match matrix:
                case RawMatrix():
                    result = exact.raw(exact.exact_row(decode_rows(matrix, np.array([row]))[0]), x)
                case Mxfp4Matrix():
                    halves = [half for byte in matrix.codes[row].tolist() for half in (byte & 15, byte >> 4)]
                    result = exact.mxfp4(halves, matrix.scales[row].tolist(), matrix.bias, x)
                case GroupIntMatrix():
                    codes = group_codes(matrix, row)
                    scales = exact.exact_row(matrix.scales[row])
                    result = exact.group_int(codes, scales, matrix.group, matrix.scale_exponent, x)
                case RvqMatrix():
                    result = exact_rvq(matrix, row, x)
            results.append(result)
        found.append(results)
    return found


def group_codes(matrix: GroupIntMatrix, row: int) -> list[int]:
    """The integers of a row, by the rule of ``group_int.md``."""
    data, found = matrix.codes[row].tolist(), []
    for start in range(0, matrix.cols, matrix.group):
        width = min(matrix.group, matrix.cols - start)
        if matrix.bits == 8:
            found += [byte - 256 if byte > 127 else byte for byte in data[start : start + width]]
        else:
            half = -(-width // 2)
            part = data[start // 2 : start // 2 + half]
            found += [(byte & 15) - 8 for byte in part] + [(byte >> 4) - 8 for byte in part[: width - half]]
    return found


def exact_rvq(matrix: RvqMatrix, row: int, x: list[Fraction]) -> Fraction:
    _, vectors, stages, _ = matrix.codes.shape

    def entry(v: int, stage: int) -> list[Fraction]:
        return exact.exact_row(matrix.codebooks[stage, matrix.codes[row // 64, v, stage, row % 64]])

    factor = Fraction(float(matrix.scales[row])) * Fraction(2) ** matrix.scale_exponent
    return exact.rvq(entry, vectors, stages, factor, x)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
def test_product_differs_from_exact_fractions(kind: str, path: str) -> None:
    for cols in (1, 7, 16, 31, 47, 130):
        matrix, inputs = made(kind, 3, cols), inputs_for(2, cols)
        found = multiply(matrix, inputs, path=path)
        assert [exact.exact_row(row) for row in found] == exact_products(matrix, inputs), cols


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_product_differs_from_exact_fractions(kind: str, path: str) -> None:
    matrix, inputs = made(kind, 9, 37), inputs_for(2, 9)
    rows = [exact.exact_row(row) for row in decode_rows(matrix, np.arange(9))]
    found = multiply_transposed(matrix, inputs, path=path)
    assert [exact.exact_row(row) for row in found] == [exact.transposed(rows, exact.exact_row(x)) for x in inputs]


def test_twin_integers_are_not_those_of_the_page() -> None:
    for kind in ("group_int 4, 32", "group_int 4, 128", "group_int 8, 64"):
        for cols in range(1, 70):
            matrix = made(kind, 2, cols)
            assert isinstance(matrix, GroupIntMatrix)
            found = integers(matrix.codes, cols, matrix.bits, matrix.group)
            assert found.tolist() == [group_codes(matrix, row) for row in range(2)]


# Vectors that a build with another order, or with other roundings, would fail. Values by hand.


@pytest.mark.parametrize("path", PATHS)
def test_fused_multiply_add_rounds_twice(path: str) -> None:
    """1 + 2**-23 plus (1 + 2**-23)(1 - 2**-23) 2**-24: just below a tie, which two roundings would take for one."""
    c, a, b = np.float32(1 + 2.0**-23), np.float32(1 + 2.0**-23), np.float32((1 - 2.0**-23) * 2.0**-24)
    assert np.float32(np.float64(a) * np.float64(b) + np.float64(c)) == np.float32(1 + 2.0**-22)
    weights, inputs = np.zeros((1, 32), np.float32), np.zeros((1, 32), np.float32)
    weights[0, [0, 16]], inputs[0, [0, 16]] = (c, a), (1, b)
    assert multiply(RawMatrix(1, 32, "F32", weights), inputs, path=path).item() == c
    column = RawMatrix(2, 1, "F32", np.array([[c], [a]], np.float32))
    assert multiply_transposed(column, np.array([[1, b]], np.float32), path=path).item() == c


@pytest.mark.parametrize("path", PATHS)
def test_lanes_do_not_join_in_halves(path: str) -> None:
    """Lane 0 has 1, lanes 8 and 4 have 2**-24: one by one they vanish; 4 and 12, or 8 and 4 together, would not."""
    weights = np.zeros((1, 16), np.float32)
    weights[0, [0, 8, 4]] = 1.0, 2.0**-24, 2.0**-24
    assert multiply(RawMatrix(1, 16, "F32", weights), np.ones((1, 16), np.float32), path=path).item() == 1.0
    weights[0, [8, 12]] = 0.0, 2.0**-24  # 4 + 12 first: then 1 + 2**-23
    found = multiply(RawMatrix(1, 16, "F32", weights), np.ones((1, 16), np.float32), path=path).item()
    assert found == 1 + 2.0**-23


@pytest.mark.parametrize("path", PATHS)
def test_stages_are_not_added_from_left_to_right(path: str) -> None:
    """(1 + 2**-24) + 2**-24 is 1; 1 + (2**-24 + 2**-24) is not."""
    codebooks = np.zeros((3, 1, 8), np.float16)
    codebooks[:, 0, 0] = 1.0, 2.0**-24, 2.0**-24
    matrix = RvqMatrix(1, 8, np.zeros((1, 1, 3, 64), np.uint8), codebooks, np.ones(1, np.float16), 0)
    inputs = np.zeros((1, 8), np.float32)
    inputs[0, 0] = 1.0
    assert multiply(matrix, inputs, path=path).item() == 1.0


@pytest.mark.parametrize("path", PATHS)
def test_first_product_of_an_mxfp4_pair_is_not_rounded(path: str) -> None:
    """3 x (1 + 2**-23) rounds to 3 + 2**-21; then minus 3 leaves 2**-21, and not the 3 x 2**-23 of a fused one."""
    matrix = Mxfp4Matrix(1, 2, np.array([[0x25]], np.uint8), np.array([[127]], np.uint8), 127)  # 3 and 1
    inputs = np.array([[1 + 2.0**-23, -3.0]], np.float32)
    assert multiply(matrix, inputs, path=path).item() == 2.0**-21


@pytest.mark.parametrize("path", PATHS)
def test_a_group_is_scaled_integer_by_integer(path: str) -> None:
    """Integers 1 and 1 on 2**-24 and 1: the small term is lost before the scale of 3, with which it would not be."""
    codes = np.zeros((1, 32), np.uint8)
    codes[0, [0, 16]] = 1
    inputs = np.zeros((1, 32), np.float32)
    inputs[0, [0, 16]] = 2.0**-24, 1.0
    matrix = GroupIntMatrix(1, 32, 8, 32, codes, np.full((1, 1), 3, np.float16), 0)
    assert multiply(matrix, inputs, path=path).item() == 3.0


# Against float64: the bounds of products.md.

UNIT = 2.0**-24


def bound(matrix: EncodedMatrix) -> float:
    """How many roundings a term goes through at most, times the unit."""
    groups = 0
    match matrix:
        case RawMatrix():
            roundings = -(-matrix.cols // 16) + 4
        case Mxfp4Matrix():
            roundings = 2 + -(-matrix.cols // 32) + 4
        case GroupIntMatrix():
            groups = -(-matrix.cols // matrix.group)
            roundings = matrix.group // 16 + groups + 4 + 1  # one for the decoded weight
        case RvqMatrix():
            stages = matrix.codebooks.shape[0]
            roundings = -(-matrix.cols // 8) + stages + 8 + stages  # likewise, a rounding a stage
    return roundings * UNIT / (1 - roundings * UNIT)


def sizes(matrix: EncodedMatrix) -> NDArray[np.float64]:
    """|weights|; of rvq the sums of |entries|, which may cancel."""
    if not isinstance(matrix, RvqMatrix):
        return np.abs(decoded(matrix))
    positive = replace(matrix, codebooks=np.abs(matrix.codebooks), scales=np.abs(matrix.scales))
    return decoded(positive)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "subnormal" not in kind])
def test_product_is_further_from_float64_than_its_bound(kind: str, path: str) -> None:
    matrix, inputs = made(kind, 70, 500), inputs_for(5, 500)
    error = np.abs(multiply(matrix, inputs, path=path) - inputs.astype(np.float64) @ decoded(matrix).T)
    assert (error <= bound(matrix) * (np.abs(inputs).astype(np.float64) @ sizes(matrix).T) * (1 + 1e-9)).all()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_product_is_further_from_float64_than_its_bound(kind: str, path: str) -> None:
    matrix, inputs = made(kind, 300, 60), inputs_for(5, 300)
    error = np.abs(multiply_transposed(matrix, inputs, path=path) - inputs.astype(np.float64) @ decoded(matrix))
    limit = 300 * UNIT / (1 - 300 * UNIT) * (np.abs(inputs).astype(np.float64) @ sizes(matrix))
    assert (error <= limit * (1 + 1e-9)).all()
