"""Codec raw against ml_dtypes, and the page's refusals."""

import ml_dtypes
import numpy as np
import pytest

from formats.codecs import raw
from formats.errors import FormatError
from formats.layout import SectionKind

CODES = SectionKind.CODES

ORACLE = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "U8": np.uint8,
    "I8": np.int8,
    "F64": np.float64,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
NUMBERS = {
    "F32": 1, "F16": 2, "BF16": 3, "F8_E4M3": 4, "F8_E5M2": 5, "U8": 6, "I8": 7, "F64": 8, "I16": 9, "I32": 10,
    "I64": 11, "U16": 12, "U32": 13, "U64": 14, "BOOL": 15, "F8_E8M0": 16,
}  # fmt: skip


def _decode(rows, cols, dtype, data, exponent=0):
    return raw.decode(rows, cols, raw.Parameters(dtype), {CODES: data}, scale_exponent=exponent, where="x")


@pytest.mark.parametrize("dtype", ORACLE)
def test_values_agree_with_another_library(dtype):
    rng = np.random.default_rng(7)
    values = rng.integers(-100, 100, (3, 7)).astype(np.float64)
    values = np.abs(values) if dtype.startswith(("U", "F8_E8M0")) else values
    stored = values.astype(ORACLE[dtype])
    with np.errstate(over="ignore"):
        assert np.array_equal(_decode(3, 7, dtype, stored.tobytes()), stored.astype(np.float32))
    assert raw.matrix_sections(3, 7, raw.Parameters(dtype)) == ((CODES, 21 * stored.itemsize),)
    assert raw.row_sections(7, raw.Parameters(dtype)) == ((CODES, 7 * stored.itemsize),)


def test_not_a_number_comes_out_as_it_went_in():
    values = _decode(1, 4, "BF16", bytes.fromhex("C07F 807F 80FF 803F"))
    assert np.isnan(values[0, 0])
    assert values[0, 1:].tolist() == [np.inf, -np.inf, 1.0]


@pytest.mark.parametrize("cols", [1, 5, 65])
@pytest.mark.parametrize("rows", [1, 63, 97, 600])
def test_shp_02_03_bytes_by_position(rows, cols):
    values = np.arange(rows * cols, dtype=np.float32).reshape(rows, cols)
    assert np.array_equal(_decode(rows, cols, "F32", values.tobytes()), values)


@pytest.mark.parametrize("shape", [(0, 4), (1, 0)])
def test_tensors_without_elements(shape):
    assert _decode(*shape, "F16", b"").shape == shape


@pytest.mark.parametrize(("dtype", "number"), NUMBERS.items())
def test_numbers_of_the_page(dtype, number):
    assert raw.Parameters(dtype).pack() == bytes([number, *[0] * 15])
    assert raw.Parameters.unpack(bytes([number, *[0] * 15]), where="x") == raw.Parameters(dtype)


@pytest.mark.parametrize("number", [0, 17, 255])
def test_raw_dtype_unknown(number):
    with pytest.raises(FormatError, match="unknown dtype"):
        raw.Parameters.unpack(bytes([number, *[0] * 15]), where="x")


def test_raw_dtype_unknown_cannot_be_made():
    with pytest.raises(FormatError, match="unknown dtype"):
        raw.Parameters("F4")


@pytest.mark.parametrize("offset", [1, 8, 15])
def test_raw_parameters_wrong(offset):
    block = bytearray(raw.Parameters("F32").pack())
    block[offset] = 1
    with pytest.raises(FormatError, match="reserved"):
        raw.Parameters.unpack(bytes(block), where="x")


@pytest.mark.parametrize("length", [0, 11, 13, 24])
def test_raw_section_length_wrong(length):
    with pytest.raises(FormatError, match="wrong length"):
        _decode(2, 3, "F16", bytes(length))


def test_raw_scale_exponent_not_zero():
    with pytest.raises(FormatError, match="no scale exponent"):
        _decode(1, 1, "F32", bytes(4), exponent=-1)
