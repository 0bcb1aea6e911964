"""Random encoded matrices of every kind, for tests of products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.encoded import EncodedMatrix, GroupIntMatrix, Mxfp4Matrix, RawMatrix, RvqMatrix

Make = Callable[[np.random.Generator, int, int], EncodedMatrix]


@dataclass(frozen=True)
class Kind:
    """A way to make a matrix of rows and columns, and whether its codec has a transposed product."""

    make: Make
    transposed: bool = False


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper halves of float32 numbers."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def spread(rng: np.random.Generator, shape: tuple[int, ...], low: float = -6, high: float = 6) -> NDArray[np.float32]:
    """Float32 numbers of both signs whose logarithms to base 2 are spread evenly."""
    sizes = np.exp2(rng.uniform(low, high, shape)) * rng.choice([-1.0, 1.0], shape)
    return sizes.astype(np.float32)


def raw(dtype: str) -> Make:
    def make(rng: np.random.Generator, rows: int, cols: int) -> EncodedMatrix:
        values = spread(rng, (rows, cols))
        stored = {"F32": values, "F16": values.astype(np.float16), "BF16": bfloat16(values)}[dtype]
        return RawMatrix(rows, cols, dtype, stored)  # type: ignore[arg-type]

    return make


def mxfp4(bias: int = 127, low: int = 117, high: int = 137) -> Make:
    def make(rng: np.random.Generator, rows: int, cols: int) -> EncodedMatrix:
        codes = rng.integers(0, 256, (rows, -(-cols // 2)), dtype=np.uint8)
        scales = rng.integers(low, high, (rows, -(-cols // 32)), dtype=np.uint8)
        return Mxfp4Matrix(rows, cols, codes, scales, bias)

    return make


def group_int(bits: int, group: int, exponent: int = 0) -> Make:
    def make(rng: np.random.Generator, rows: int, cols: int) -> EncodedMatrix:
        codes = rng.integers(0, 256, (rows, cols if bits == 8 else -(-cols // 2)), dtype=np.uint8)
        if bits == 4 and cols % 2:
            codes[:, -1] = codes[:, -1] & 15 | 0x80
        scales = spread(rng, (rows, -(-cols // group))).astype(np.float16)
        return GroupIntMatrix(rows, cols, bits, group, codes, scales, exponent)

    return make


def rvq(stages: int, entries: int, exponent: int = 0) -> Make:
    def make(rng: np.random.Generator, rows: int, cols: int) -> EncodedMatrix:
        shape = (-(-rows // 64), -(-cols // 8), stages, 64)
        codes = rng.integers(0, entries, shape, dtype=np.uint8)
        codes[-1, ..., rows - 64 * (shape[0] - 1) :] = 0
        codebooks = spread(rng, (stages, entries, 8), -4, 2).astype(np.float16)
        return RvqMatrix(rows, cols, codes, codebooks, spread(rng, (rows,)).astype(np.float16), exponent)

    return make


KINDS: dict[str, Kind] = {
    "raw F32": Kind(raw("F32"), transposed=True),
    "raw F16": Kind(raw("F16"), transposed=True),
    "raw BF16": Kind(raw("BF16"), transposed=True),
    "mxfp4": Kind(mxfp4()),
    "mxfp4, subnormal factors": Kind(mxfp4(148, 0, 40)),
    "group_int 4, 32": Kind(group_int(4, 32), transposed=True),
    "group_int 4, 128": Kind(group_int(4, 128, -90), transposed=True),
    "group_int 8, 32": Kind(group_int(8, 32, 60), transposed=True),
    "group_int 8, 64": Kind(group_int(8, 64), transposed=True),
    "rvq 1 x 256": Kind(rvq(1, 256)),
    "rvq 2 x 3": Kind(rvq(2, 3, 40)),
    "rvq 3 x 256": Kind(rvq(3, 256)),
    "rvq 4 x 200": Kind(rvq(4, 200, -100)),
}


def made(kind: str, rows: int, cols: int, seed: int = 0) -> EncodedMatrix:
    """The matrix of a kind, always the same for the same arguments."""
    return KINDS[kind].make(np.random.default_rng([seed, rows, cols]), rows, cols)


def inputs_for(count: int, cols: int, seed: int = 1) -> NDArray[np.float32]:
    """Float32 [count, cols] of very different sizes."""
    return spread(np.random.default_rng([seed, count, cols]), (count, cols), -9, 9)
