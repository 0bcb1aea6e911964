"""What all wrappers of kernels insist on before they cross to C."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def check_array(array: NDArray[Any], dtype: type[np.generic], shape: tuple[int | None, ...], name: str) -> None:
    """Refuse an array of another dtype, shape (None: any side) or layout than the kernels take.

    Raises:
        ValueError: always a programming error.
    """
    fits = array.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, array.shape, strict=True))
    if array.dtype != dtype or not fits or not (array.flags.c_contiguous and array.flags.aligned):
        wanted = tuple("n" if side is None else side for side in shape)
        raise ValueError(f"{name}: contiguous {np.dtype(dtype)} {wanted} wanted, got {array.dtype} {array.shape}")
