"""The elementwise and rowwise arithmetic between the products, float32 in and out.

Rows are independent everywhere, and a row's bits depend on that row alone: neither on how many rows are computed
together nor on the kernel path. Sums of squares run in float64, always over one whole row, in numpy's fixed order for
its length.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Single = NDArray[np.float32]

L2_EPSILON = 1e-6  # under the root of the L2 norm of queries and keys in kda layers


def rms_norm(x: Single, weight: Single, epsilon: float) -> Single:
    """weight * x * rsqrt(mean(x^2) + epsilon), over the last axis.

    Args:
        x: float32 [..., n].
        weight: float32 [n].
        epsilon: added to the mean square.
    """
    return normalised(x, epsilon) * weight


def normalised(x: Single, epsilon: float) -> Single:
    """x * rsqrt(mean(x^2) + epsilon), over the last axis."""
    squares = _sum_of_squares(x) / x.shape[-1]
    factors: Single = (1.0 / np.sqrt(squares + epsilon)).astype(np.float32)
    return x * factors


def l2_normalised(x: Single) -> Single:
    """x * rsqrt(sum(x^2) + 1e-6), over the last axis."""
    factors: Single = (1.0 / np.sqrt(_sum_of_squares(x) + L2_EPSILON)).astype(np.float32)
    return x * factors


def _sum_of_squares(x: Single) -> NDArray[np.float64]:
    wide = np.ascontiguousarray(x, dtype=np.float64)
    sums: NDArray[np.float64] = np.add.reduce(wide * wide, axis=-1, keepdims=True)
    return sums


def sigmoid(x: Single) -> Single:
    """1 / (1 + exp(-x)); 0 where exp(-x) leaves float32."""
    with np.errstate(over="ignore"):
        return np.float32(1) / (np.float32(1) + np.exp(-np.ascontiguousarray(x)))


def silu(x: Single) -> Single:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Single) -> Single:
    """log(1 + exp(x)), without overflow."""
    x = np.ascontiguousarray(x)
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, np.float32(0))


def softmax(x: Single) -> Single:
    """exp(x) / sum(exp(x)) over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    sums = np.add.reduce(powers.astype(np.float64), axis=-1, keepdims=True)
    shares: Single = powers / sums.astype(np.float32)
    return shares
