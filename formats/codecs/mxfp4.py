"""Codec mxfp4: the bytes of an MXFP4 checkpoint, unchanged (``mxfp4.md``).

Two 4-bit E2M1 numbers a byte and one E8M0 exponent for 32 columns. Nothing is quantised here: a record is
the source's own tensors, regrouped expert by expert. Decoding is exact in float32.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from formats import kernels
from formats.codecs.common import (
    Buffer,
    Octets,
    SectionBytes,
    Single,
    check_no_scale_exponent,
    parameter_bytes,
    section_view,
)
from formats.errors import FormatError
from formats.layout import SectionKind

GROUP: Final = 32  # columns that share an exponent, the only value of format version 1
DEFAULT_BIAS: Final = 127
MAX_BIAS: Final = 148  # half of 2**-148 is the smallest number of float32: every value stays exact
NAN_SCALE: Final = 255
MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_ALWAYS_FINITE: Final = 125  # the largest b - bias under which 6, the largest magnitude, stays within float32
_BLOCK = struct.Struct("<BBH12x")
_CHUNK_VALUES = 1 << 20


@dataclass(frozen=True)
class Parameters:
    """How a record is coded: the exponent bias and the columns a group."""

    bias: int = DEFAULT_BIAS
    group: int = GROUP

    def __post_init__(self) -> None:
        _check(self.bias, 1, MAX_BIAS, "bias", 0, "parameters of mxfp4")
        _check(self.group, GROUP, GROUP, "group", 2, "parameters of mxfp4")

    def pack(self) -> bytes:
        """The 16-byte parameter block."""
        return _BLOCK.pack(self.bias, 0, self.group)

    @classmethod
    def unpack(cls, data: Buffer, *, where: str) -> Parameters:
        """Read a parameter block; :class:`FormatError` for values out of range and reserved bytes that are not zero."""
        block = parameter_bytes(data, where=where)
        bias, reserved, group = _BLOCK.unpack(block)
        _check(bias, 1, MAX_BIAS, "bias", 0, where)
        _check(group, GROUP, GROUP, "group", 2, where)
        if reserved or any(block[4:]):
            raise FormatError("reserved bytes of the codec parameters are not zero", where=where, offset=1)
        return cls(bias, group)


def _check(value: int, low: int, high: int, name: str, offset: int, where: str) -> None:
    if not low <= value <= high:
        expected = str(low) if low == high else f"{low} to {high}"
        raise FormatError(f"mxfp4 {name} out of range", where=where, offset=offset, expected=expected, found=value)


def shared_sections(parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """None: every section belongs to one matrix."""
    return ()


def row_sections(cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes a row), in record order."""
    return ((SectionKind.SCALES, -(-cols // parameters.group)), (SectionKind.CODES, -(-cols // 2)))


def matrix_sections(rows: int, cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes) of a matrix' sections, in record order."""
    return tuple((kind, rows * stride) for kind, stride in row_sections(cols, parameters))


@dataclass(frozen=True)
class Stored:
    """A matrix as its sections hold it, without a copy.

    Attributes:
        scales: uint8 [rows, ceil(cols / 32)].
        codes: uint8 [rows, ceil(cols / 2)].
    """

    scales: Octets
    codes: Octets


def check(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Stored:
    """Refuse what ``mxfp4.md`` refuses, without decoding; arguments and errors are those of :func:`decode`."""
    check_no_scale_exponent(scale_exponent, "mxfp4", where=where)
    strides = dict(row_sections(cols, parameters))
    groups, pairs = strides[SectionKind.SCALES], strides[SectionKind.CODES]
    scales = section_view(sections, SectionKind.SCALES, rows * groups, where=where).reshape(rows, groups)
    codes = section_view(sections, SectionKind.CODES, rows * pairs, where=where).reshape(rows, pairs)
    if scales.size:
        largest = int(scales.max())
        if largest == NAN_SCALE:
            _refuse_nan(scales, where)
        if largest - parameters.bias > _ALWAYS_FINITE:
            _check_range(codes, scales, cols, parameters, where)
    return Stored(scales, codes)


def decode(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Single:
    """Decode a matrix: magnitude and sign of a code times 2**(scale - bias), exact in float32.

    Args:
        rows, cols: true extents; any run of whole rows decodes alike.
        parameters: of the record.
        sections: bytes of SCALES and CODES.
        scale_exponent: must be 0.
        where: for messages.

    Returns:
        float32 [rows, cols]; -0 is kept. Memory beyond it is bounded.

    Raises:
        FormatError: for each of the refusals in ``mxfp4.md``.
    """
    stored = check(rows, cols, parameters, sections, scale_exponent=scale_exponent, where=where)
    return decode_stored(stored.codes, stored.scales, cols, parameters.bias)


def decode_stored(codes: Octets, scales: Octets, cols: int, bias: int) -> Single:
    """Decode rows that have been checked: float32 [rows, cols]."""
    return kernels.decode_mxfp4(codes, scales, _pair_table(), _factors(bias), cols)


def _pair_table() -> Single:
    """float32 [256, 2]: the two numbers of each byte, low half first."""
    numbers = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=np.float32)
    byte = np.arange(256)
    return np.stack((numbers[byte & 15], numbers[byte >> 4]), axis=1)


def _factors(bias: int) -> Single:
    """2**(scale - bias) for each scale byte; exact, infinite where it exceeds float32."""
    with np.errstate(over="ignore"):
        return np.ldexp(np.float64(1.0), np.arange(256) - bias).astype(np.float32)


def _refuse_nan(scales: Octets, where: str) -> None:
    """A scale byte 255 is the NaN of E8M0."""
    row, group = (int(at) for at in np.argwhere(scales == NAN_SCALE)[0])
    raise FormatError(
        f"scale byte 255 (NaN) in row {row}, group {group}",
        where=f"{where} scales",
        offset=row * scales.shape[1] + group,
        found=f"{int((scales == NAN_SCALE).sum())} of them",
    )


def _check_range(codes: Octets, scales: Octets, cols: int, parameters: Parameters, where: str) -> None:
    """No value exceeds float32: looks at the codes of rows with a group that could bring it about, a few at a time."""
    numbers = np.abs(_pair_table())
    factors = _factors(parameters.bias)
    suspects = np.flatnonzero(scales.max(axis=1).astype(np.int64) - parameters.bias > _ALWAYS_FINITE)
    step = max(1, _CHUNK_VALUES // max(cols, 1))
    for start in range(0, suspects.size, step):
        chosen = suspects[start : start + step]
        sizes = numbers[codes[chosen]].reshape(chosen.size, -1)[:, :cols]
        with np.errstate(over="ignore", invalid="ignore"):
            sizes *= np.repeat(factors[scales[chosen]], GROUP, axis=1)[:, :cols]
        if not np.isfinite(sizes).all():
            row, col = (int(at) for at in np.argwhere(~np.isfinite(sizes))[0])
            raise FormatError(f"value in row {chosen[row]}, column {col} exceeds float32", where=where)
