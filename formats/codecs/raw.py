"""Codec raw: the bytes of a tensor, unchanged, in any dtype (``raw.md``).

For what must not be touched (routers, norms, decay vectors) and for dense experts kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats import dtypes
from formats.codecs.common import (
    PARAMETER_BYTES,
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


@dataclass(frozen=True)
class Parameters:
    """What the bytes are: the name of a dtype, as safetensors spells it."""

    dtype: str

    def __post_init__(self) -> None:
        dtypes.by_name(self.dtype, where="parameters of raw")

    def pack(self) -> bytes:
        """The 16-byte parameter block."""
        number = dtypes.by_name(self.dtype, where="parameters of raw").number
        return bytes([number]).ljust(PARAMETER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: Buffer, *, where: str) -> Parameters:
        """Read a parameter block; :class:`FormatError` for unknown dtypes and reserved bytes that are not zero."""
        block = parameter_bytes(data, where=where)
        if any(block[1:]):
            raise FormatError("reserved bytes of the codec parameters are not zero", where=where, offset=1)
        return cls(dtypes.by_number(block[0], where=where).name)

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return dtypes.by_name(self.dtype, where="parameters of raw").itemsize


def shared_sections(parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """None: every section belongs to one matrix."""
    return ()


def row_sections(cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes a row)."""
    return ((SectionKind.CODES, cols * parameters.itemsize),)


def matrix_sections(rows: int, cols: int, parameters: Parameters) -> tuple[tuple[SectionKind, int], ...]:
    """(kind, bytes) of a matrix' one section."""
    return ((SectionKind.CODES, rows * cols * parameters.itemsize),)


@dataclass(frozen=True)
class Stored:
    """The elements as their section holds them: uint8 [bytes], without a copy."""

    codes: Octets


def check(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Stored:
    """Refuse what ``raw.md`` refuses, without decoding; arguments and errors are those of :func:`decode`."""
    check_no_scale_exponent(scale_exponent, "raw", where=where)
    return Stored(section_view(sections, SectionKind.CODES, rows * cols * parameters.itemsize, where=where))


def decode(
    rows: int, cols: int, parameters: Parameters, sections: SectionBytes, *, scale_exponent: int, where: str
) -> Single:
    """The elements as float32, rounded to nearest where the dtype holds more than float32 does.

    Args:
        rows, cols: true extents; any run of whole rows decodes alike.
        parameters: of the record or tensor.
        sections: bytes of CODES.
        scale_exponent: must be 0.
        where: for messages.

    Returns:
        float32 [rows, cols]. NaN and infinity come out as they went in.

    Raises:
        FormatError: for each of the refusals in ``raw.md``.
    """
    stored = check(rows, cols, parameters, sections, scale_exponent=scale_exponent, where=where)
    return dtypes.to_float32(stored.codes, dtypes.by_name(parameters.dtype, where=where)).reshape(rows, cols)
