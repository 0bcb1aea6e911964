"""formats.dtypes against ml_dtypes, numpy and values worked out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from formats import dtypes
from formats.errors import FormatError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_numbers_of_the_raw_parameter_block() -> None:
    expected = {
        "F32": 1, "F16": 2, "BF16": 3, "F8_E4M3": 4, "F8_E5M2": 5, "U8": 6, "I8": 7, "F64": 8,
        "I16": 9, "I32": 10, "I64": 11, "U16": 12, "U32": 13, "U64": 14, "BOOL": 15, "F8_E8M0": 16,
    }  # fmt: skip
    assert {dtype.name: dtype.number for dtype in dtypes.DTYPES} == expected
    for name, number in expected.items():
        assert dtypes.by_name(name) is dtypes.by_number(number)


@pytest.mark.parametrize("name", ["Q9", "F4", "f32", "", None, 3, ["F32"]])
def test_src_08_unknown_dtype_is_refused(name: object) -> None:
    with pytest.raises(FormatError, match=r"t: unknown dtype .*expected one of F32"):
        dtypes.by_name(name, where="t")


@pytest.mark.parametrize("number", [0, 17, -1, 255])
def test_unknown_dtype_number_is_refused(number: int) -> None:
    with pytest.raises(FormatError, match="unknown dtype number"):
        dtypes.by_number(number)


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", ml_dtypes.float8_e5m2),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_every_8_bit_float(name: str, oracle: type) -> None:
    every = np.arange(256, dtype=np.uint8)
    expected = every.view(oracle).astype(np.float32)
    found = dtypes.to_float32(every.tobytes(), dtypes.by_name(name))
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected)) or name == "F8_E8M0"


@pytest.mark.parametrize(("name", "oracle"), [("BF16", BFLOAT16), ("F16", np.dtype(np.float16))])
def test_every_16_bit_float(name: str, oracle: np.dtype) -> None:
    every = np.arange(65536, dtype="<u2")
    with np.errstate(invalid="ignore"):
        expected = every.view(oracle).astype(np.float32)
    found = dtypes.to_float32(every, dtypes.by_name(name))
    assert np.array_equal(found, expected, equal_nan=True)  # subnormals included (DTY-10)


@pytest.mark.parametrize("name", ["I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F64", "F32"])
def test_numbers_that_float32_holds_are_exact(name: str) -> None:
    kind = name[0].lower() + str(dtypes.by_name(name).itemsize)
    values = np.array([0, 1, 2, 100, 127], dtype=f"<{kind}")
    assert dtypes.to_float32(values.tobytes(), dtypes.by_name(name)).tolist() == [0.0, 1.0, 2.0, 100.0, 127.0]


def test_float64_beyond_float32_is_infinite_without_a_warning() -> None:
    assert np.isposinf(dtypes.to_float32(np.array([1e300]).tobytes(), dtypes.by_name("F64")))[0]


def test_bool() -> None:
    assert dtypes.to_float32(b"\0\1", dtypes.by_name("BOOL")).tolist() == [0.0, 1.0]


def test_partial_element_is_refused() -> None:
    for call in (dtypes.to_float32, dtypes.count_nonfinite):
        with pytest.raises(FormatError, match="no whole number of F32 elements"):
            call(b"\0" * 7, dtypes.by_name("F32"))


def test_result_does_not_share_memory_with_its_input() -> None:
    values = np.ones(4, np.float32)
    dtypes.to_float32(values, dtypes.by_name("F32"))[0] = 7
    assert values[0] == 1


def test_num_08_bfloat16_ties_to_even_and_nan() -> None:
    bits = np.array([0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x7F80_0001, 0xFFC0_0000, 0x7F7F_FFFF], np.uint32)
    found = dtypes.float32_to_bfloat16(bits.view(np.float32))
    assert found[:3].tolist() == [0x3F80, 0x3F82, 0x3F81]  # halfway down to even, halfway up to even, above halfway
    assert np.isnan(found[3:5].view(ml_dtypes.bfloat16).astype(np.float32)).all()
    assert found[4] >> 15 == 1
    assert found[5] == 0x7F80  # rounds up to infinity, as IEEE does


def test_num_08_bfloat16_agrees_with_ml_dtypes_on_random_bits() -> None:
    rng = np.random.default_rng(1)
    values = rng.integers(0, 1 << 32, (300, 1000), dtype=np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    found = dtypes.float32_to_bfloat16(values)
    assert found.shape == values.shape
    numbers = ~np.isnan(values)
    assert np.array_equal(found[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(found[~numbers].view(ml_dtypes.bfloat16).astype(np.float32)).all()


@pytest.mark.parametrize("name", [dtype.name for dtype in dtypes.DTYPES])
def test_nonfinite_counts_agree_with_the_values(name: str) -> None:
    dtype = dtypes.by_name(name)
    data = np.random.default_rng(2).integers(0, 256, 4096 * dtype.itemsize, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        values = data.view("<f8") if name == "F64" else dtypes.to_float32(data, dtype)
    bad = np.flatnonzero(~np.isfinite(values)) if dtype.is_float else np.array([], int)
    assert dtypes.count_nonfinite(data, dtype) == (bad.size, int(bad[0]) if bad.size else None)


def test_dty_07_nonfinite_is_found_past_the_first_chunk() -> None:
    values = np.zeros((1 << 20) + 10, np.float32)
    values[[-3, -1]] = np.nan, -np.inf
    assert dtypes.count_nonfinite(values, dtypes.by_name("F32")) == (2, values.size - 3)
    assert dtypes.count_nonfinite(b"", dtypes.by_name("F32")) == (0, None)
