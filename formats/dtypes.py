"""Element types of tensors: names, numbers and widths, and their values in float32 (SPEC section 8, codec raw).

The names are those of safetensors, the numbers those of the parameter block of the ``raw`` codec. numpy has
no bfloat16 and no float8, so both are read through their bits. All data are little-endian, whatever the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError

Buffer = bytes | bytearray | memoryview | NDArray[Any]

_CHUNK = 1 << 20  # elements looked at together when a whole tensor is scanned


@dataclass(frozen=True)
class Dtype:
    """One element type.

    Attributes:
        name: as safetensors spells it.
        number: in the parameter block of the ``raw`` codec.
        itemsize: bytes an element.
        is_float: whether its values are real numbers with an exponent (so NaN may occur).
    """

    name: str
    number: int
    itemsize: int
    is_float: bool


DTYPES = (
    Dtype("F32", 1, 4, True),
    Dtype("F16", 2, 2, True),
    Dtype("BF16", 3, 2, True),
    Dtype("F8_E4M3", 4, 1, True),
    Dtype("F8_E5M2", 5, 1, True),
    Dtype("U8", 6, 1, False),
    Dtype("I8", 7, 1, False),
    Dtype("F64", 8, 8, True),
    Dtype("I16", 9, 2, False),
    Dtype("I32", 10, 4, False),
    Dtype("I64", 11, 8, False),
    Dtype("U16", 12, 2, False),
    Dtype("U32", 13, 4, False),
    Dtype("U64", 14, 8, False),
    Dtype("BOOL", 15, 1, False),
    Dtype("F8_E8M0", 16, 1, True),
)

_BY_NAME = MappingProxyType({dtype.name: dtype for dtype in DTYPES})
_BY_NUMBER = MappingProxyType({dtype.number: dtype for dtype in DTYPES})

_NUMPY = MappingProxyType(
    {
        "F32": "<f4",
        "F16": "<f2",
        "F64": "<f8",
        "I8": "<i1",
        "I16": "<i2",
        "I32": "<i4",
        "I64": "<i8",
        "U8": "<u1",
        "U16": "<u2",
        "U32": "<u4",
        "U64": "<u8",
    }
)

# Bits of the exponent field; NaN and infinity are the values with all of them set.
_EXPONENT = MappingProxyType(
    {
        "F32": ("<u4", 0x7F80_0000),
        "F16": ("<u2", 0x7C00),
        "BF16": ("<u2", 0x7F80),
        "F64": ("<u8", 0x7FF0_0000_0000_0000),
        "F8_E5M2": ("<u1", 0x7C),
        "F8_E4M3": ("<u1", 0x7F),  # no infinity; NaN has the mantissa set as well
        "F8_E8M0": ("<u1", 0xFF),
    }
)


def by_name(name: object, *, where: object = None) -> Dtype:
    """The type that safetensors calls ``name``.

    Raises:
        FormatError: for every name that is not in the table, whoever uses it.
    """
    found = _BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise FormatError("unknown dtype", where=where, expected="one of " + " ".join(_BY_NAME), found=repr(name)[:80])
    return found


def by_number(number: int, *, where: object = None) -> Dtype:
    """The type with ``number`` in a ``raw`` parameter block.

    Raises:
        FormatError: for every number that is not in the table.
    """
    found = _BY_NUMBER.get(number)
    if found is None:
        raise FormatError("unknown dtype number", where=where, expected=f"1 to {len(DTYPES)}", found=number)
    return found


def _small_float_table(exponent_bits: int, mantissa_bits: int, bias: int, nan: frozenset[int]) -> NDArray[np.float32]:
    """The float32 value of each byte of an 8-bit float with sign; ``nan`` lists magnitudes that are NaN."""
    values = np.empty(256, np.float32)
    for byte in range(256):
        exponent = (byte & 0x7F) >> mantissa_bits
        mantissa = byte & ((1 << mantissa_bits) - 1)
        if (byte & 0x7F) in nan:
            magnitude = np.nan
        elif exponent_bits == 5 and exponent == 31:
            magnitude = np.inf
        elif exponent == 0:
            magnitude = float(mantissa) * 2.0 ** (1 - bias - mantissa_bits)
        else:
            magnitude = float((1 << mantissa_bits) + mantissa) * 2.0 ** (exponent - bias - mantissa_bits)
        values[byte] = -magnitude if byte & 0x80 else magnitude
    values.setflags(write=False)
    return values


def _exponent_table() -> NDArray[np.float32]:
    """E8M0: byte b is 2**(b - 127), 255 is NaN. 2**-127 is a float32 subnormal and exact."""
    values = np.full(256, np.nan, np.float32)
    values[:255] = np.ldexp(np.float32(1.0), np.arange(255, dtype=np.int32) - 127)
    values.setflags(write=False)
    return values


_TABLES = MappingProxyType(
    {
        "F8_E4M3": _small_float_table(4, 3, 7, frozenset({0x7F})),
        "F8_E5M2": _small_float_table(5, 2, 15, frozenset({0x7D, 0x7E, 0x7F})),
        "F8_E8M0": _exponent_table(),
    }
)


def _as_bytes(data: Buffer, dtype: Dtype) -> NDArray[np.uint8]:
    """``data`` as a flat uint8 view whose length is a multiple of the item size."""
    if isinstance(data, np.ndarray):
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    else:
        flat = np.frombuffer(data, np.uint8)
    if flat.size % dtype.itemsize:
        raise FormatError(f"data are no whole number of {dtype.name} elements", found=f"{flat.size} bytes")
    return flat


def to_float32(data: Buffer, dtype: Dtype) -> NDArray[np.float32]:
    """The elements of ``data`` as a new flat float32 array [count].

    Exact for F32, F16, BF16, the 8-bit floats, BOOL and integers up to 2**24; F64 and larger integers are
    rounded to nearest even, F64 beyond float32's range becomes infinity.

    Raises:
        FormatError: if ``data`` is no whole number of elements.
    """
    raw = _as_bytes(data, dtype)
    if dtype.name == "BF16":
        return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    table = _TABLES.get(dtype.name)
    if table is not None:
        values: NDArray[np.float32] = np.take(table, raw)
        return values
    if dtype.name == "BOOL":
        return np.not_equal(raw, 0).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array(raw.view(_NUMPY[dtype.name]), np.float32)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to bfloat16 bits, ties to even; NaN stays a (quiet) NaN with its sign. Keeps the shape."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    is_nan = (bits & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


def count_nonfinite(data: Buffer, dtype: Dtype) -> tuple[int, int | None]:
    """How many elements are NaN or infinite, and the flat index of the first.

    Looks at raw bits, a bounded number of elements at a time; integers have none.

    Raises:
        FormatError: if ``data`` is no whole number of elements.
    """
    raw = _as_bytes(data, dtype)
    if dtype.name not in _EXPONENT:
        return 0, None
    word, mask = _EXPONENT[dtype.name]
    elements = raw.view(word)
    limit = elements.dtype.type(mask)
    count, first = 0, None
    for start in range(0, elements.size, _CHUNK):
        bad = (elements[start : start + _CHUNK] & limit) == limit
        here = int(np.count_nonzero(bad))
        if here and first is None:
            first = start + int(np.argmax(bad))
        count += here
    return count, first
