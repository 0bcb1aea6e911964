"""The proxy expert: three seeded MXFP4 matrices with the shapes and statistics of an expert of Kimi K3.

Weights are N(0, 1) / sqrt(columns), each row times exp(0.2 N(0, 1)), rounded to E2M1 with the scale
2**(floor(log2(largest magnitude of 32)) - 2). A packer with known error on the real experts has the same on these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SHAPES: Final = {"gate": (3072, 3584), "up": (3072, 3584), "down": (3584, 3072)}
GROUP: Final = 32
BIAS: Final = 127
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


@dataclass(frozen=True)
class ProxyMatrix:
    """A matrix as a checkpoint stores it.

    packed: uint8 [rows, cols / 2], two E2M1 codes a byte, the even column in the low half.
    scale: uint8 [rows, cols / 32], E8M0 exponents with bias 127.
    """

    packed: NDArray[np.uint8]
    scale: NDArray[np.uint8]


def proxy_expert(seed: int, divisor: int = 1) -> dict[str, ProxyMatrix]:
    """The expert of a seed: gate, up, down. ``divisor`` makes both sides of each matrix that much shorter."""
    rng = np.random.default_rng(seed)
    expert = {}
    for name, (rows, cols) in SHAPES.items():
        rows, cols = rows // divisor, cols // divisor // GROUP * GROUP
        values = rng.standard_normal((rows, cols), dtype=np.float32)
        values *= np.exp(0.2 * rng.standard_normal((rows, 1), dtype=np.float32)) / np.float32(np.sqrt(cols))
        expert[name] = to_mxfp4(values)
    return expert


def to_mxfp4(values: NDArray[np.float32]) -> ProxyMatrix:
    """Round float32 [rows, cols], cols a multiple of 32 and no group all zero; ties go to the even code."""
    rows, cols = values.shape
    groups = values.reshape(rows, cols // GROUP, GROUP)
    exponents = np.frexp(np.abs(groups).max(axis=2))[1] - 1 - 2  # floor(log2) - 2
    magnitudes = np.ldexp(np.abs(groups), -exponents[..., None])
    middles = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    upper = np.searchsorted(middles, magnitudes.reshape(-1), side="right")  # on a tie the higher code
    lower = np.searchsorted(middles, magnitudes.reshape(-1), side="left")
    codes = np.where(upper % 2 == 0, upper, lower).astype(np.uint8) | (values.reshape(-1) < 0).astype(np.uint8) << 3
    pairs = codes.reshape(rows, cols // 2, 2)
    return ProxyMatrix(pairs[..., 0] | pairs[..., 1] << 4, (exponents + BIAS).astype(np.uint8))
