"""The fused multiply-add of the twins against exact fractions, and its sum of lanes."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from formats.kernels.product_twins import fma, tree
from tests.support import exact

Single = NDArray[np.float32]
SMALLEST = 2.0**-149
LARGEST = float(np.finfo(np.float32).max)


def wrong(a: Single, b: Single, c: Single) -> list[tuple[float, float, float]]:
    """Triples whose result is not the exact one rounded once."""
    found = fma(a, b, c)
    triples = zip(a.tolist(), b.tolist(), c.tolist(), found.tolist(), strict=True)
    return [
        (x, y, z) for x, y, z, result in triples if exact.fma(Fraction(x), Fraction(y), Fraction(z)) != Fraction(result)
    ]


def bits(rng: np.random.Generator, count: int, low: int, high: int) -> Single:
    """Float32 numbers of both signs with exponents ``low`` to ``high`` and often many zeros or ones in a row."""
    mantissas = rng.integers(0, 1 << 23, count)
    shift = rng.integers(0, 24, count)
    mantissas = np.where(rng.random(count) < 0.5, mantissas >> shift << shift, mantissas | (1 << shift) - 1)
    sizes = np.ldexp(1.0 + (mantissas & ((1 << 23) - 1)) / (1 << 23), rng.integers(low, high + 1, count))
    return (sizes * rng.choice([-1.0, 1.0], count)).astype(np.float32)


@pytest.mark.parametrize("gap", [-60, -49, -30, -25, -24, -23, -12, -1, 0, 1, 12, 23, 24, 25, 49, 60])
def test_random_triples_are_rounded_twice(gap: int) -> None:
    """``gap``: how much larger the product is than the term that is added, as a power of two."""
    rng = np.random.default_rng(gap + 100)
    a, b = bits(rng, 3000, -3, 3), bits(rng, 3000, -3, 3)
    c = (bits(rng, 3000, -2, 2) * np.float64(2.0) ** -gap).astype(np.float32)
    assert wrong(a, b, c) == []


def test_near_ties_are_rounded_twice() -> None:
    """Terms half a step from c, but for a last bit far below float64: from one side, from the other, and exactly."""
    ones = np.arange(1, 200, dtype=np.float64)
    near = np.concatenate([1 + ones * 2.0**-23, 1 - ones * 2.0**-24]).astype(np.float32)
    mirror = np.concatenate([1 - ones * 2.0**-23, 1 + ones * 2.0**-23]).astype(np.float32)
    for low in (1.0, 1 + 2.0**-23, 1.5, 2 - 2.0**-23):
        for half in (2.0**-24, -(2.0**-24), 2.0**-25):
            c = np.full(near.size, low, np.float32)
            assert wrong(near, (mirror * np.float32(half)).astype(np.float32), c) == []
            assert wrong(np.ones_like(c), np.full_like(c, half), c) == []


def test_subnormals_are_rounded_twice() -> None:
    rng = np.random.default_rng(5)
    a, b = bits(rng, 5000, -75, -60), bits(rng, 5000, -90, -70)
    whole = rng.integers(-40, 40, 5000)
    assert wrong(a, b, (whole * SMALLEST).astype(np.float32)) == []
    halves = np.full(41, 2.0**-75, np.float32)  # times odd multiples of 2**-75 these are halves of the smallest number
    steps = np.arange(41, dtype=np.float32) * np.float32(2.0**-75)
    assert wrong(halves, steps, np.full(41, SMALLEST, np.float32)) == []
    assert wrong(halves, -steps, np.full(41, 2 * SMALLEST, np.float32)) == []


def test_cancellation_keeps_what_is_left() -> None:
    rng = np.random.default_rng(6)
    a, b = bits(rng, 3000, -10, 10), bits(rng, 3000, -10, 10)
    c = -(a.astype(np.float64) * b).astype(np.float32)
    assert wrong(a, b, c) == []
    assert np.count_nonzero(fma(a, b, c)) > 2000


def test_large_numbers_and_what_is_none() -> None:
    def one(a: float, b: float, c: float) -> float:
        return fma(np.float32(a)[None], np.float32(b)[None], np.float32(c)[None]).item()

    assert one(LARGEST, 1, 0) == LARGEST
    assert one(LARGEST, 2, -LARGEST) == LARGEST  # the product alone is beyond float32
    assert one(LARGEST, 1, 2.0**103) == np.inf  # a tie with 2**128, whose mantissa is even
    assert one(LARGEST, 1, 2.0**102) == LARGEST
    assert one(-LARGEST, LARGEST, 1) == -np.inf
    assert one(np.inf, 1, 5) == np.inf
    assert one(2, 3, -np.inf) == -np.inf
    assert np.isnan(one(np.inf, 1, -np.inf))
    assert np.isnan(one(np.inf, 0, 1))
    assert np.isnan(one(np.nan, 1, 1))


def test_zeros_have_the_sign_of_the_standard() -> None:
    zero, minus = np.zeros(1, np.float32), -np.zeros(1, np.float32)
    assert not np.signbit(fma(zero, minus, zero))[0]  # -0 + 0
    assert np.signbit(fma(zero, minus, minus))[0]
    one = np.ones(1, np.float32)
    assert not np.signbit(fma(one, one, -one))[0]  # 1 - 1
    tiny = np.full(1, SMALLEST, np.float32)
    assert np.signbit(fma(-tiny, tiny, zero))[0]  # below half of the smallest number


def test_tree_joins_halves() -> None:
    lanes = bits(np.random.default_rng(7), 160, -20, 20).reshape(10, 16)
    expected = [exact.tree(exact.exact_row(row)) for row in lanes]
    assert exact.exact_row(tree(lanes)) == expected
