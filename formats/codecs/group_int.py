"""Codec group_int: integers of 8 or 4 bits with one float16 scale a group of columns (``group_int.md``).

Rows are independent and of fixed stride, so a large tensor can be encoded and decoded a run of rows at a
time: first the span of all scales, from which its exponent follows, then the rows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from formats import kernels
from formats.codecs.common import (
    Buffer,
    Half,
    Octets,
    SectionBytes,
    Single,
    check_scale_exponent,
    half_view,
    parameter_bytes,
    section_view,
    span,
    to_half,
    to_single,
)
from formats.errors import FormatError
from formats.layout import SectionKind

BITS: Final = (4, 8)
GROUP_UNIT: Final = 32
MAX_GROUP: Final = 1024
PAD_NIBBLE: Final = 8  # stands for 0, in the high half of a byte that has no second column

_BLOCK = struct.Struct("<BBH12x")
_CHUNK_VALUES = 1 << 19


@dataclass(frozen=True)
class Parameters:
    """How a tensor is coded: bits an integer and columns a group."""

    bits: int = 4
    group: int = 128

    def __post_init__(self) -> None:
        _check(self.bits, self.group, "parameters of group_int")

    def pack(self) -> bytes:
        """The 16-byte parameter block."""
        return _BLOCK.pack(self.bits, 0, self.group)

    @classmethod
    def unpack(cls, data: Buffer, *, where: str) -> Parameters:
        """Read a parameter block; :class:`FormatError` for values out of range and reserved bytes that are not zero."""
        block = parameter_bytes(data, where=where)
        bits, reserved, group = _BLOCK.unpack(block)
        _check(bits, group, where)
        if reserved or any(block[4:]):
            raise FormatError("reserved bytes of the codec parameters are not zero", where=where, offset=1)
        return cls(bits, group)

    @property
    def largest_code(self) -> int:
        """The largest magnitude that the encoder uses: 127 or 7."""
        return (1 << (self.bits - 1)) - 1


def _check(bits: int, group: int, where: str) -> None:
    if bits not in BITS:
        raise FormatError("group_int bits out of range", where=where, offset=0, expected="4 or 8", found=bits)
    if group % GROUP_UNIT or not GROUP_UNIT <= group <= MAX_GROUP:
        raise FormatError(
            "group_int group out of range",
            where=where,
            offset=2,
            expected=f"a multiple of {GROUP_UNIT} from {GROUP_UNIT} to {MAX_GROUP}",
            found=group,
        )


def shared_sections(parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """None: every section belongs to one matrix."""
    return ()


def row_sections(cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes a row), in record order. Groups have an even width, so 4-bit rows take ceil(cols / 2) bytes."""
    codes = cols if parameters.bits == 8 else -(-cols // 2)
    return ((SectionKind.SCALES, 2 * -(-cols // parameters.group)), (SectionKind.CODES, codes))


def matrix_sections(rows: int, cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes) of a matrix' sections, in record order."""
    return tuple((kind, rows * stride) for kind, stride in row_sections(cols, parameters))


def scale_span(values: Single, parameters: Parameters) -> tuple[float, float]:
    """(smallest scale that is not zero, largest scale) of some rows, to be merged over a tensor's rows.

    ``common.merge_spans`` joins two, ``common.choose_exponent`` turns the last into the scale exponent.

    Args:
        values: float32 [rows, cols].

    Raises:
        FormatError: values that are not finite.
    """
    return span(_exact_scales(values, parameters))


def _exact_scales(values: Single, parameters: Parameters) -> NDArray[np.float64]:
    """Largest magnitude of each group over the largest code: float64 [rows, groups], not yet rounded."""
    starts = np.arange(0, values.shape[1], parameters.group)
    rows = values.shape[0]
    if rows == 0 or starts.size == 0:
        return np.zeros((rows, starts.size), dtype=np.float64)
    exact = np.empty((rows, starts.size), dtype=np.float64)
    step = max(1, _CHUNK_VALUES // values.shape[1])
    for top in range(0, rows, step):
        magnitudes = np.abs(values[top : top + step])
        np.divide(np.maximum.reduceat(magnitudes, starts, axis=1), parameters.largest_code, out=exact[top : top + step])
    return exact


def encode(values: Single, parameters: Parameters, exponent: int, *, where: str = "tensor") -> tuple[Octets, Half]:
    """Encode rows under a scale exponent that was chosen for the whole tensor.

    The scale of a group is the float16 number, among some from the largest magnitude over 127 or 7 downwards, whose
    codes leave the least squared error (``formats.kernels.fit_group_int``). Codes are chosen with the scale as stored,
    half to even, and clipped to what two's complement holds.

    Args:
        values: float32 [rows, cols].
        exponent: from ``common.choose_exponent``.

    Returns:
        Codes as stored, uint8 [rows, bytes a row], and scales, float16 [rows, groups].

    Raises:
        FormatError: values that are not finite, or a scale too large for float16.
    """
    exact = _exact_scales(values, parameters)
    span(exact)  # refuses NaN and infinity
    to_half(exact, exponent, where=where)  # refuses what no scale can hold
    scales = kernels.fit_group_int(
        np.ascontiguousarray(values), bits=parameters.bits, group=parameters.group, exponent=exponent
    )
    rows, cols = values.shape
    meant = to_single(scales, exponent)
    codes = np.empty((rows, dict(row_sections(cols, parameters))[SectionKind.CODES]), dtype=np.uint8)
    limit = parameters.largest_code
    step = max(1, _CHUNK_VALUES // max(cols, 1))
    for top in range(0, rows, step):
        wide = np.repeat(meant[top : top + step], parameters.group, axis=1)[:, :cols]
        ratio = np.zeros(wide.shape, dtype=np.float32)
        np.divide(values[top : top + step], wide, out=ratio, where=wide != 0)
        whole = np.clip(np.rint(ratio, out=ratio), -limit - 1, limit, out=ratio).astype(np.int8)
        codes[top : top + step] = pack_codes(whole, parameters)
    return codes, scales


def pack_codes(whole: NDArray[np.int8], parameters: Parameters) -> Octets:
    """Integers int8 [rows, cols] in -128..127 or -8..7 as they are stored: uint8 [rows, bytes a row]."""
    if parameters.bits == 8:
        return np.ascontiguousarray(whole).view(np.uint8)
    rows, cols = whole.shape
    nibbles = (whole + np.int8(8)).view(np.uint8)
    packed = np.empty((rows, -(-cols // 2)), dtype=np.uint8)
    for left, right, start in _runs(cols, parameters.group):
        width = right - left  # of each group in this run
        half = -(-width // 2)
        count = (cols - left) // width if width == parameters.group else 1
        source = nibbles[:, left : left + count * width].reshape(rows, count, width)
        target = np.full((rows, count, half), PAD_NIBBLE << 4, dtype=np.uint8)
        target[..., : width - half] = source[..., half:] << 4
        target |= source[..., :half]
        packed[:, start : start + count * half] = target.reshape(rows, -1)
    return packed


def unpack_codes(codes: Octets, cols: int, parameters: Parameters, *, where: str) -> NDArray[np.int8]:
    """The inverse of :func:`pack_codes`: int8 [rows, cols], refusing a filling nibble that is not 8."""
    if parameters.bits == 8:
        return codes.view(np.int8)
    rows = codes.shape[0]
    whole = np.empty((rows, cols), dtype=np.int8)
    for left, right, start in _runs(cols, parameters.group):
        width = right - left
        half = -(-width // 2)
        count = (cols - left) // width if width == parameters.group else 1
        source = codes[:, start : start + count * half].reshape(rows, count, half)
        target = np.empty((rows, count, width), dtype=np.uint8)
        target[..., :half] = source & 15
        target[..., half:] = source[..., : width - half] >> 4
        if width % 2 and (source[..., -1] >> 4 != PAD_NIBBLE).any():
            raise FormatError(
                "filling nibble is not 8", where=f"{where} codes", offset=start + half - 1, expected=PAD_NIBBLE
            )
        target -= PAD_NIBBLE
        whole[:, left : left + count * width] = target.view(np.int8).reshape(rows, -1)
    return whole


def _runs(cols: int, group: int) -> list[tuple[int, int, int]]:
    """(first column, end of its first group, first byte) of the run of full groups and of the short last one."""
    full = cols // group * group
    runs = [(0, group, 0)] if full else []
    return [*runs, (full, cols, full // 2)] if full < cols else runs


@dataclass(frozen=True)
class Stored:
    """Rows as their sections hold them, without a copy.

    Attributes:
        scales: float16 [rows, ceil(cols / group)].
        codes: uint8 [rows, bytes a row].
    """

    scales: Half
    codes: Octets


def check(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Stored:
    """Refuse what ``group_int.md`` refuses, without decoding; arguments and errors are those of :func:`decode`."""
    check_scale_exponent(scale_exponent, where=where)
    strides = dict(row_sections(cols, parameters))
    scales_view = section_view(sections, SectionKind.SCALES, rows * strides[SectionKind.SCALES], where=where)
    codes = section_view(sections, SectionKind.CODES, rows * strides[SectionKind.CODES], where=where)
    scales = half_view(scales_view, where=f"{where} scales").reshape(rows, strides[SectionKind.SCALES] // 2)
    codes = codes.reshape(rows, strides[SectionKind.CODES])
    if parameters.bits == 4:
        _check_filling(codes, cols, where)
    return Stored(scales, codes)


def decode(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Single:
    """Decode rows: float32(q) * (float32(scale) * 2**e), rounded once to float32.

    Args:
        rows, cols: true extents; any run of whole rows decodes alike.
        parameters: of the record or tensor.
        sections: bytes of SCALES and CODES.
        scale_exponent: of the matrix entry or of the tensor.
        where: for messages.

    Returns:
        float32 [rows, cols]. Memory beyond it is bounded.

    Raises:
        FormatError: for each of the refusals in ``group_int.md``.
    """
    stored = check(rows, cols, parameters, sections, scale_exponent=scale_exponent, where=where)
    return kernels.decode_group_int(
        stored.codes,
        to_single(stored.scales, scale_exponent),
        cols,
        bits=parameters.bits,
        group=parameters.group,
    )


def _check_filling(codes: Octets, cols: int, where: str) -> None:
    """The nibble that fills up the last byte of a short group of odd width is 8. Only a row's last group can be one."""
    if cols % 2 and codes.size and (codes[:, -1] >> 4 != PAD_NIBBLE).any():
        raise FormatError(
            "filling nibble is not 8", where=f"{where} codes", offset=codes.shape[1] - 1, expected=PAD_NIBBLE
        )
