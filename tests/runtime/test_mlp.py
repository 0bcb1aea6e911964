"""One expert, shared between threads that have nothing to do: the same bits whoever does what."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from formats.encoded import EncodedMatrix, RawMatrix, RvqMatrix, multiply
from runtime.models import mlp
from runtime.models.arithmetic import silu
from runtime.store import Expert
from runtime.threads import WORTH_SHARING, Workers

WIDTH, INNER = 2056, 2120  # neither a multiple of a block of rows; each product is worth sharing


def raw(rows: int, cols: int, rng: np.random.Generator) -> RawMatrix:
    return RawMatrix(rows, cols, "F32", rng.standard_normal((rows, cols), np.float32))


def rvq(rows: int, cols: int, rng: np.random.Generator, codebooks: np.ndarray) -> RvqMatrix:
    codes = rng.integers(0, 256, (-(-rows // 64), -(-cols // 8), 3, 64), np.uint8)
    return RvqMatrix(rows, cols, codes, codebooks, rng.random(rows).astype(np.float16), -6)


def expert(codec: str) -> Expert:
    rng = np.random.default_rng(0)
    matrices: list[EncodedMatrix] = []
    codebooks = rng.standard_normal((3, 256, 8)).astype(np.float16)
    for rows, cols in ((INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)):
        matrices.append(rvq(rows, cols, rng, codebooks) if codec == "rvq" else raw(rows, cols, rng))
    return Expert(1, 2, *matrices)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("codec", ["raw", "rvq"])
def test_a_shared_expert_has_the_same_bits(codec: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = expert(codec)
    inputs = np.random.default_rng(1).standard_normal((count, WIDTH), np.float32)
    inner = silu(multiply(made.gate, inputs)) * multiply(made.up, inputs)
    expected = multiply(made.down, inner)
    assert np.isfinite(expected).all()
    assert expected.any()
    pair = mlp.multiply_pair
    for threads in (1, 2, 3):
        ranges: list[int] = []

        def noted(*args: Any, ranges: list[int] = ranges, **options: Any) -> tuple[np.ndarray, np.ndarray]:
            ranges.append(options["first"])
            return pair(*args, **options)

        monkeypatch.setattr(mlp, "multiply_pair", noted)
        with Workers(threads) as workers:
            activated, outputs = mlp.apply_expert(made, inputs, lambda gate, up: silu(gate) * up, workers)
        assert len(ranges) == min(threads, 2 * count * WIDTH * INNER // WORTH_SHARING)
        assert np.array_equal(activated, inner)
        assert np.array_equal(outputs, expected)
