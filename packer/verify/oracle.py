"""A second decoder, written from the codec pages alone: the witness of ``verify --level parity``.

If the packer and the reader exchanged the halves of a byte in the same way, a round trip through both would look
perfect. So parity calls neither ``formats.codecs`` nor ``formats.source`` for values. What is here is plain and shares
no code with them: bits are taken apart by arithmetic, columns are looked up by position.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError
from formats.layout import Codec

BLOCK_VALUES = 1 << 20  # weights decoded at a time
_BLOCK_ROWS = 64  # of the codes of rvq

Single = NDArray[np.float32]
Octets = NDArray[np.uint8]
Read = Callable[[int, int], bytes]  # a byte range of a section or tensor


def _e2m1(code: int) -> float:
    """Sign, two bits of exponent (0: subnormal), one of mantissa."""
    exponent, mantissa = code % 8 // 2, code % 2
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -magnitude if code >= 8 else magnitude


_E2M1 = np.array([_e2m1(code) for code in range(16)], np.float32)
_E2M1.setflags(write=False)


@dataclass(frozen=True)
class Stored:
    """One encoded matrix: how to read its sections, and all that decoding depends on.

    ``codebooks`` is empty unless the codec is rvq; ``dtype`` is set for raw alone.
    """

    codec: Codec
    rows: int
    cols: int
    scale_exponent: int
    parameters: bytes
    codes: Read
    scales: Read | None = None
    codebooks: bytes = b""
    dtype: str = ""


def block_rows(cols: int) -> int:
    """How many rows to compare at a time: bounded memory, and whole blocks of every codec."""
    return max(1, BLOCK_VALUES // max(1, cols) // _BLOCK_ROWS) * _BLOCK_ROWS


def stored_rows(stored: Stored, first: int, last: int) -> Single:
    """Rows ``first`` (a multiple of 64) to ``last`` of an encoded matrix: float32 [last - first, cols].

    Raises:
        FormatError: a codec or dtype that only byte comparison can prove.
    """
    if stored.codec == Codec.RVQ:
        return _rvq(stored, first, last)
    if stored.codec == Codec.GROUP_INT:
        return _group_int(stored, first, last)
    if stored.codec == Codec.MXFP4:
        (bias,) = struct.unpack_from("<B", stored.parameters)
        return mxfp4_rows(stored.codes, _present(stored.scales), stored.cols, bias, first, last)
    return plain_rows(stored.codes, stored.dtype, stored.cols, first, last)


def plain_rows(read: Read, dtype: str, cols: int, first: int, last: int) -> Single:
    """Rows of an unquantised tensor as float32.

    Raises:
        FormatError: a dtype other than F32, F16 and BF16.
    """
    size = {"F32": 4, "F16": 2, "BF16": 2}.get(dtype)
    if size is None:
        raise FormatError(
            "values of this dtype are compared byte for byte only", expected="F32, F16 or BF16", found=dtype
        )
    data = read(first * cols * size, last * cols * size)
    if dtype == "F32":
        values = np.frombuffer(data, "<f4").astype(np.float32)
    elif dtype == "F16":
        values = np.frombuffer(data, "<f2").astype(np.float32)
    else:  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float32)
    return values.reshape(last - first, cols)


def mxfp4_rows(codes: Read, scales: Read, cols: int, bias: int, first: int, last: int) -> Single:
    """Rows of an MXFP4 matrix as float32: even columns in the low half of a byte, one scale byte for 32 columns."""
    count = last - first
    pairs, groups = -(-cols // 2), -(-cols // 32)
    halves = np.frombuffer(codes(first * pairs, last * pairs), np.uint8).reshape(count, pairs)
    exponents = np.frombuffer(scales(first * groups, last * groups), np.uint8).reshape(count, groups)
    if exponents.size and int(exponents.max()) == 255:
        raise FormatError("scale byte 255 (NaN)", expected="at most 254", found=255)
    values = np.empty((count, 2 * pairs), np.float32)
    values[:, 0::2] = _E2M1[halves % 16]
    values[:, 1::2] = _E2M1[halves // 16]
    powers = exponents.astype(np.int32) - bias
    column = np.arange(cols)
    with np.errstate(over="ignore"):  # beyond float32 becomes infinite, and then so does the error
        if powers.size and int(powers.min()) >= -148 and int(powers.max()) <= 127:  # a power of two is a float32 itself
            return values[:, :cols] * np.ldexp(np.float32(1), powers)[:, column // 32]
        return (values[:, :cols] * np.ldexp(1.0, powers)[:, column // 32]).astype(np.float32)


def _group_int(stored: Stored, first: int, last: int) -> Single:
    bits, group = struct.unpack_from("<BxH", stored.parameters)
    count, cols = last - first, stored.cols
    column = np.arange(cols)
    groups = -(-cols // group)
    width = cols if bits == 8 else -(-cols // 2)
    data = np.frombuffer(stored.codes(first * width, last * width), np.uint8).reshape(count, width)
    if bits == 8:
        integers = data.astype(np.int32)
        integers = np.where(integers >= 128, integers - 256, integers)
    else:
        start = column // group * group
        half = (np.minimum(group, cols - start) + 1) // 2
        place = column - start
        byte = start // 2 + np.where(place < half, place, place - half)
        integers = (data[:, byte].astype(np.int32) >> np.where(place < half, 0, 4)) % 16 - 8
    scales = _halves(_present(stored.scales)(2 * first * groups, 2 * last * groups)).reshape(count, groups)
    factors = scales * np.float32(2.0**stored.scale_exponent)
    return integers.astype(np.float32) * factors[:, column // group]


def _rvq(stored: Stored, first: int, last: int) -> Single:
    _, stages, _, entries = struct.unpack_from("<BBBxH", stored.parameters)
    books = _halves(stored.codebooks).reshape(stages, entries, 8)
    vectors = -(-stored.cols // 8)
    block_bytes = vectors * stages * _BLOCK_ROWS
    blocks = range(first // _BLOCK_ROWS, -(-last // _BLOCK_ROWS))
    codes = np.frombuffer(stored.codes(blocks.start * block_bytes, blocks.stop * block_bytes), np.uint8)
    codes = codes.reshape(len(blocks), vectors, stages, _BLOCK_ROWS)
    if codes.size and int(codes.max()) >= entries:
        raise FormatError("index beyond the codebook", expected=f"below {entries}", found=int(codes.max()))
    row = np.arange(last - first)
    total: Single | None = None
    for stage in range(stages):
        entry = books[stage][codes[row // _BLOCK_ROWS, :, stage, row % _BLOCK_ROWS]]  # [rows, vectors, 8]
        total = entry if total is None else total + entry
    if total is None:
        raise FormatError("codec parameters have no stage")
    scales = _halves(_present(stored.scales)(2 * first, 2 * last)) * np.float32(2.0**stored.scale_exponent)
    return total.reshape(len(row), vectors * 8)[:, : stored.cols] * scales[:, None]


def _halves(data: bytes) -> Single:
    return np.frombuffer(data, "<f2").astype(np.float32)


def _present(read: Read | None) -> Read:
    if read is None:
        raise FormatError("matrix has no scales")
    return read


@dataclass(frozen=True)
class Sums:
    """Squared sums of a comparison: of the difference, and of the source."""

    difference: float = 0.0
    source: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(self.difference + other.difference, self.source + other.source)

    @property
    def error(self) -> float:
        """The relative error of SPEC section 6.5; infinite if one side has values that are not finite."""
        if not (math.isfinite(self.difference) and math.isfinite(self.source)):
            return math.inf
        if self.source > 0:
            return math.sqrt(self.difference / self.source)
        return 1.0 if self.difference > 0 else 0.0


def _squared(values: NDArray[np.float64]) -> float:
    """The sum of squares; not by BLAS, whose sums depend on the number of its threads."""
    return float(np.einsum("ij,ij->", values, values))


def compare(rows: int, cols: int, source: Callable[[int, int], Single], stored: Callable[[int, int], Single]) -> Sums:
    """Compare two matrices block by block, sums in float64."""
    step = block_rows(cols)
    total = Sums()
    with np.errstate(invalid="ignore", over="ignore"):  # a source that is not finite gives an error that is not
        for first in range(0, rows, step):
            last = min(first + step, rows)
            wide = source(first, last).astype(np.float64)
            difference = wide - stored(first, last)
            total += Sums(_squared(difference), _squared(wide))
    return total
