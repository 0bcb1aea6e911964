"""What several codecs share: the view of a section's bytes, and float16 scales with one exponent a matrix.

Stored scales are float16, whose normal range is narrow. A matrix whose scales fall outside it carries an
exponent e in its header, and every stored scale s then means float32(s) * 2**e (SPEC section 6.3). Zeros,
subnormals and both signs are legal; NaN and infinity never are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError
from formats.layout import MAX_SCALE_EXPONENT, SectionKind

PARAMETER_BYTES = 16  # length of a codec's parameter block

SMALLEST_NORMAL_HALF = 2.0**-14
LARGEST_HALF = 65504.0

Buffer = bytes | bytearray | memoryview
SectionBytes = Mapping[SectionKind, Buffer]
Half = NDArray[np.float16]
Single = NDArray[np.float32]
Octets = NDArray[np.uint8]


def parameter_bytes(data: Buffer, *, where: str) -> bytes:
    """The 16 bytes of a parameter block, refused if there are more or fewer."""
    block = bytes(data)
    if len(block) != PARAMETER_BYTES:
        raise FormatError(
            "codec parameters have the wrong length", where=where, expected=PARAMETER_BYTES, found=len(block)
        )
    return block


def section_view(sections: SectionBytes, kind: SectionKind, length: int, *, where: str) -> Octets:
    """The bytes of one section as a uint8 array without a copy, refused unless they are exactly ``length``."""
    if kind not in sections:
        raise FormatError(f"section {kind.name.lower()} is absent", where=where)
    data = sections[kind]
    found = memoryview(data).nbytes
    if found != length:
        raise FormatError(
            f"section {kind.name.lower()} has the wrong length", where=where, expected=length, found=found
        )
    return np.frombuffer(data, dtype=np.uint8)


def choose_exponent(smallest: float, largest: float) -> int:
    """The scale exponent for scales whose magnitudes span ``smallest`` (not counting zeros) to ``largest``.

    0 where float16 holds the whole span as normal numbers, otherwise the exponent that puts the largest
    scale into [2**14, 2**15), clamped to +-100. ``largest`` 0 means that every scale is zero.
    """
    if largest == 0.0 or (smallest >= SMALLEST_NORMAL_HALF and largest <= LARGEST_HALF):
        return 0
    _, power = math.frexp(largest)  # largest lies in [2**(power - 1), 2**power)
    return max(-MAX_SCALE_EXPONENT, min(MAX_SCALE_EXPONENT, power - 15))


def span(magnitudes: NDArray[np.floating], *, where: str | None = None) -> tuple[float, float]:
    """(smallest magnitude that is not zero, largest magnitude); (0, 0) where there is none.

    Raises:
        FormatError: if one of them is NaN or infinite.
    """
    largest = float(magnitudes.max(initial=0.0))
    if not math.isfinite(largest):  # a NaN anywhere makes the maximum NaN
        raise FormatError("values to encode are not finite", where=where)
    smallest = float(magnitudes.min(initial=math.inf, where=magnitudes > 0))
    return (smallest, largest) if largest > 0.0 else (0.0, 0.0)


def merge_spans(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """The span of two sets of magnitudes together, from the spans of each."""
    if first[1] == 0.0 or second[1] == 0.0:
        return second if first[1] == 0.0 else first
    return min(first[0], second[0]), max(first[1], second[1])


def to_half(scales: NDArray[np.floating], exponent: int, *, where: str) -> Half:
    """Round scales to the float16 that is stored under ``exponent``; nearest, ties to even.

    Raises:
        FormatError: if a scale is too large for float16 even so. Too small becomes subnormal or zero.
    """
    with np.errstate(over="ignore", under="ignore"):
        stored = np.ldexp(scales.astype(np.float64), -exponent).astype(np.float16)
    if not np.isfinite(stored).all():
        raise FormatError(
            "scale is too large for float16",
            where=where,
            expected=f"at most {LARGEST_HALF:g} * 2**{exponent}",
            found=f"{float(np.abs(scales).max()):g}",
        )
    return stored


def to_single(scales: Half, exponent: int) -> Single:
    """What stored scales mean: float32(s) * 2**exponent, which is exact."""
    return scales.astype(np.float32) * np.float32(2.0**exponent)


def half_view(data: Octets, *, where: str) -> Half:
    """Little-endian float16 numbers of a section, refused if one is NaN or infinite."""
    values = data.view("<f2").astype(np.float16, copy=False)
    exponents_full = (data.view("<u2") & 0x7C00) == 0x7C00
    if exponents_full.any():
        raise FormatError("NaN or infinity among float16 numbers", where=where, offset=2 * int(exponents_full.argmax()))
    return values


def check_scale_exponent(exponent: int, *, where: str) -> None:
    """Insist on the range that a matrix entry may hold."""
    if not -MAX_SCALE_EXPONENT <= exponent <= MAX_SCALE_EXPONENT:
        raise FormatError("scale exponent out of range", where=where, expected="-100 to 100", found=exponent)


def check_no_scale_exponent(exponent: int, codec: str, *, where: str) -> None:
    """Insist on exponent 0, for codecs without float16 scales."""
    if exponent != 0:
        raise FormatError(f"codec {codec} has no scale exponent", where=where, expected=0, found=exponent)
