"""Codec mxfp4 against ml_dtypes, position by position, and the page's refusals."""

import ml_dtypes
import numpy as np
import pytest

from formats.codecs import mxfp4
from formats.errors import FormatError
from formats.layout import SectionKind

SCALES, CODES = SectionKind.SCALES, SectionKind.CODES


def _decode(rows, cols, scales, codes, parameters=None, exponent=0):
    sections = {SCALES: bytes(scales), CODES: bytes(codes)}
    return mxfp4.decode(rows, cols, parameters or mxfp4.Parameters(), sections, scale_exponent=exponent, where="x gate")


def _oracle(rows, cols, scales, codes):
    """Numbers of another library, placed by hand: even column in the low half."""
    packed = np.frombuffer(codes, np.uint8).reshape(rows, -1)
    halves = np.empty((rows, packed.shape[1] * 2), np.uint8)
    halves[:, 0::2] = packed & 15
    halves[:, 1::2] = packed >> 4
    numbers = halves.view(ml_dtypes.float4_e2m1fn).astype(np.float32)[:, :cols]
    factors = np.frombuffer(scales, np.uint8).reshape(rows, -1).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return numbers * factors[:, np.arange(cols) // 32]


SIXTEEN = bytes([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2)
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0] * 2


def test_dty_01_codes_by_position_and_minus_zero():
    values = _decode(1, 32, [127], SIXTEEN)
    assert values[0].tolist() == VALUES
    assert np.signbit(values[0]).tolist() == [code >= 8 for code in range(16)] * 2


def test_dty_01_exchanged_halves_are_noticed():
    exchanged = bytes((byte >> 4) | (byte & 15) << 4 for byte in SIXTEEN)
    values = _decode(1, 32, [127], exchanged)
    assert sorted(values[0].tolist()) == sorted(VALUES)
    assert values[0].tolist() == [VALUES[column ^ 1] for column in range(32)]


def test_dty_02_another_bias_is_four_times_as_large():
    assert np.array_equal(_decode(1, 32, [120], SIXTEEN, mxfp4.Parameters(125)), 4 * _decode(1, 32, [120], SIXTEEN))


def test_dty_03_scale_byte_0_is_a_power_of_two():
    values = _decode(1, 64, [0, 127], b"\x22" * 16 + b"\x22" * 16)
    assert values[0].tolist() == [2.0**-127] * 32 + [1.0] * 32
    assert _decode(1, 2, [0], b"\x21")[0].tolist() == [2.0**-128, 2.0**-127]


@pytest.mark.parametrize("rows", [1, 2, 65])
@pytest.mark.parametrize("cols", range(1, 66))
def test_shp_01_03_every_width(rows, cols):
    rng = np.random.default_rng(rows * 100 + cols)
    scales = rng.integers(0, 250, (rows, -(-cols // 32)), dtype=np.uint8).tobytes()
    codes = rng.integers(0, 256, (rows, -(-cols // 2)), dtype=np.uint8).tobytes()
    assert [len(scales), len(codes)] == [n for _, n in mxfp4.matrix_sections(rows, cols, mxfp4.Parameters())]
    values = _decode(rows, cols, scales, codes)
    expected = _oracle(rows, cols, scales, codes)
    assert np.array_equal(values.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(("rows", "cols"), [(63, 96), (64, 96), (97, 130), (600, 64), (3, 1 << 15)])
def test_shp_02_larger_matrices(rows, cols, monkeypatch):
    rng = np.random.default_rng(rows)
    scales = rng.integers(100, 140, (rows, -(-cols // 32)), dtype=np.uint8).tobytes()
    codes = rng.integers(0, 256, (rows, -(-cols // 2)), dtype=np.uint8).tobytes()
    expected = _oracle(rows, cols, scales, codes)
    assert np.array_equal(_decode(rows, cols, scales, codes), expected)
    monkeypatch.setattr(mxfp4, "_CHUNK_VALUES", 1000)
    assert np.array_equal(_decode(rows, cols, scales, codes), expected)


def test_shp_08_each_row_starts_at_a_fresh_byte():
    # 5 columns take 3 bytes; the last high half is not decoded, whatever it holds.
    values = _decode(2, 5, [127, 128], [0x21, 0x43, 0xF5, 0x76, 0x10, 0x02])
    assert values.tolist() == [[0.5, 1.0, 1.5, 2.0, 3.0], [8.0, 12.0, 0.0, 1.0, 2.0]]


@pytest.mark.parametrize(("offset", "value"), [(0, 0), (0, 149), (1, 1), (2, 16), (3, 1), (4, 1), (15, 9)])
def test_mxfp4_parameters_wrong(offset, value):
    block = bytearray(mxfp4.Parameters().pack())
    assert bytes(block) == bytes([127, 0, 32, *[0] * 13])
    block[offset] = value
    with pytest.raises(FormatError):
        mxfp4.Parameters.unpack(bytes(block), where="x")


def test_mxfp4_parameters_wrong_cannot_be_made():
    for arguments in ({"bias": 0}, {"bias": 149}, {"group": 16}):
        with pytest.raises(FormatError):
            mxfp4.Parameters(**arguments)


@pytest.mark.parametrize(("scales", "codes"), [(2, 31), (2, 33), (1, 32), (3, 32), (0, 32)])
def test_mxfp4_section_length_wrong(scales, codes):
    with pytest.raises(FormatError, match="wrong length"):
        _decode(1, 64, bytes(scales), bytes(codes))


def test_mxfp4_scale_byte_255():
    with pytest.raises(FormatError, match=r"scale byte 255.*row 1, group 0") as caught:
        _decode(2, 33, [127, 127, 255, 127], bytes(34))
    assert caught.value.offset == 2


def test_mxfp4_value_beyond_float32():
    assert _decode(1, 2, [252], b"\x77")[0].tolist() == [6 * 2.0**125] * 2
    assert _decode(1, 2, [253], b"\x55")[0].tolist() == [3 * 2.0**126] * 2
    with pytest.raises(FormatError, match="row 0, column 1 exceeds float32"):
        _decode(1, 2, [253], b"\x75")
    with pytest.raises(FormatError, match="exceeds float32"):
        _decode(1, 2, [200], b"\x77", mxfp4.Parameters(50))


@pytest.mark.parametrize("code", [b"\x00", b"\x01", b"\x88"])
def test_mxfp4_factor_beyond_float32(code):
    assert np.isfinite(_decode(1, 2, [247], code, mxfp4.Parameters(120))).all()  # 2**127
    with pytest.raises(FormatError, match="row 0, column 0 exceeds float32"):
        _decode(1, 2, [248], code, mxfp4.Parameters(120))


def test_mxfp4_filling_half_counts_for_the_range():
    """The high half of the last byte has no column, and 6 x 2**127 there is no value."""
    assert _decode(1, 1, [254], b"\x73").tolist() == [[1.5 * 2.0**127]]


def test_smallest_values_are_exact_under_the_largest_bias():
    assert _decode(1, 2, [0], b"\x91", mxfp4.Parameters(148))[0].tolist() == [2.0**-149, -(2.0**-149)]


def test_mxfp4_scale_exponent_not_zero():
    with pytest.raises(FormatError, match="no scale exponent"):
        _decode(1, 2, [127], b"\x11", exponent=1)
