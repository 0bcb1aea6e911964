"""Codec group_int against scalar arithmetic and the page's refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.codecs import common, group_int
from formats.errors import FormatError
from formats.layout import SectionKind

SCALES, CODES = SectionKind.SCALES, SectionKind.CODES


def _decode(rows, cols, parameters, scales, codes, exponent=0):
    sections = {SCALES: scales.astype("<f2").tobytes(), CODES: bytes(codes)}
    return group_int.decode(rows, cols, parameters, sections, scale_exponent=exponent, where="x")


def _encode(values, parameters):
    exponent = common.choose_exponent(*group_int.scale_span(values, parameters))
    codes, scales = group_int.encode(values, parameters, exponent)
    return codes, scales, exponent


def _half_of(row, cols, group, column):
    """The 4-bit half that the page assigns to a column of a row's bytes."""
    start = column // group * group
    width = min(group, cols - start)
    half = -(-width // 2)
    place = column - start
    byte = int(row[start // 2 + place % half])
    return byte & 15 if place < half else byte >> 4


SIDES = [(rows, cols) for cols in range(1, 66) for rows in (1, 3)]
SIDES += [(rows, cols) for rows in (63, 64, 65, 97, 600) for cols in (31, 32, 48, 100)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "cols"), SIDES)
def test_qnt_09_shp_01_02_03_random_codes_survive(rows, cols, bits):
    parameters = group_int.Parameters(bits, 32)
    rng = np.random.default_rng(rows * 1000 + cols)
    whole = rng.integers(-(1 << (bits - 1)), 1 << (bits - 1), (rows, cols)).astype(np.int8)
    scales = np.exp2(rng.uniform(-9, 3, (rows, -(-cols // 32)))).astype(np.float16)
    codes = group_int.pack_codes(whole, parameters)
    assert [scales.nbytes, codes.nbytes] == [n for _, n in group_int.matrix_sections(rows, cols, parameters)]
    assert np.array_equal(group_int.unpack_codes(codes, cols, parameters, where="x"), whole)
    values = _decode(rows, cols, parameters, scales, codes.tobytes())
    expected = whole.astype(np.float32) * scales.astype(np.float32)[:, np.arange(cols) // 32]
    assert np.array_equal(values, expected)
    if bits == 4:
        for row, column in ((0, 0), (rows - 1, cols - 1), (rows // 2, cols // 2), (0, cols - 1)):
            assert _half_of(codes[row], cols, 32, column) - 8 == whole[row, column]


def test_qnt_09_offset_of_eight_is_not_twos_complement():
    whole = np.array([[-8, -1, 0, 7]], np.int8)
    assert group_int.pack_codes(whole, group_int.Parameters(4, 32)).tobytes() == bytes([0x80, 0xF7])


def test_worked_row_of_the_page():
    whole = np.array([[-7, 0, 3, 7, -8]], np.int8)
    assert group_int.pack_codes(whole, group_int.Parameters(4, 32)).tobytes() == bytes.fromhex("F1088B")


@pytest.mark.parametrize(("bits", "stride"), [(4, 3), (8, 5)])
def test_shp_08_each_row_starts_at_a_fresh_byte(bits, stride):
    parameters = group_int.Parameters(bits, 32)
    whole = np.array([[1, 2, 3, 4, 5], [-1, -2, -3, -4, -5]], np.int8)
    codes = group_int.pack_codes(whole, parameters)
    assert codes.shape == (2, stride)
    assert dict(group_int.row_sections(5, parameters))[CODES] == stride
    assert np.array_equal(group_int.unpack_codes(codes[1:], 5, parameters, where="x"), whole[1:])


def test_rows_of_several_full_groups_and_a_short_one():
    parameters = group_int.Parameters(4, 32)
    whole = (np.arange(2 * 71) % 16 - 8).astype(np.int8).reshape(2, 71)
    codes = group_int.pack_codes(whole, parameters)
    assert codes.shape == (2, 36)
    for row in range(2):
        for column in range(71):
            assert _half_of(codes[row], 71, 32, column) - 8 == whole[row, column]
        assert codes[row, 35] >> 4 == 8


def test_qnt_07_codes_are_chosen_with_the_stored_scale():
    """Each code is the nearest to its value under the scale as it is stored, not as it was wanted."""
    values = np.random.default_rng(1).standard_normal((4, 96)).astype(np.float32)
    for bits in (4, 8):
        parameters = group_int.Parameters(bits, 32)
        codes, scales, exponent = _encode(values, parameters)
        meant = np.repeat(scales.astype(np.float32) * np.float32(2.0**exponent), 32, axis=1)
        low, high = -parameters.largest_code - 1, parameters.largest_code
        expected = np.clip(np.rint(values / meant), low, high)
        found = group_int.unpack_codes(codes, 96, parameters, where="x")
        assert np.array_equal(found, expected)


def test_codes_round_half_to_even():
    """So many sevens that no smaller scale pays; the halves balance, so that least squares has the scale 1 too."""
    values = np.array([[7.0] * 12 + [0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], np.float32)
    codes, scales, _ = _encode(values, group_int.Parameters(4, 32))
    assert scales.tolist() == [[1.0]]
    found = group_int.unpack_codes(codes, 18, group_int.Parameters(4, 32), where="x")
    assert found[0].tolist() == [7] * 12 + [0, 2, 2, 0, -2, -2]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 80), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
def test_no_group_is_worse_than_under_the_largest_magnitude(rows, cols, bits, seed):
    """Against the plain rule, scale = largest magnitude over the largest code, computed here by hand."""
    parameters = group_int.Parameters(bits, 32)
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, cols)) * np.exp2(rng.uniform(-8, 8, (rows, 1)))).astype(np.float32)
    codes, scales, exponent = _encode(values, parameters)
    decoded = _decode(rows, cols, parameters, scales, codes.tobytes(), exponent).astype(np.float64)
    for left in range(0, cols, 32):
        part = values[:, left : left + 32].astype(np.float64)
        plain = np.ldexp(np.abs(part).max(axis=1, keepdims=True) / parameters.largest_code, -exponent)
        step = plain.astype(np.float32).astype(np.float16).astype(np.float64) * 2.0**exponent
        ratio = np.divide(part, step, out=np.zeros_like(part), where=step > 0)
        rounded = np.clip(np.rint(ratio), -parameters.largest_code - 1, parameters.largest_code) * step
        ours = np.square(decoded[:, left : left + 32] - part).sum(axis=1)
        theirs = np.square(rounded - part).sum(axis=1)
        assert (ours <= theirs * (1 + 1e-5) + 1e-12 * np.square(part).sum(axis=1)).all()


def test_four_bits_lose_clearly_less_than_under_the_largest_magnitude():
    """A Gaussian matrix: about 11.5 % by the plain rule (steps of 2.8 / 7, over the root of 12), below 10.5 % here."""
    values = np.random.default_rng(2).standard_normal((256, 1024)).astype(np.float32)
    parameters = group_int.Parameters(4, 128)
    codes, scales, exponent = _encode(values, parameters)
    decoded = _decode(256, 1024, parameters, scales, codes.tobytes(), exponent)
    assert np.linalg.norm(decoded - values) / np.linalg.norm(values) < 0.105


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5e-6, 1e-38, 1e30, -3e35])
def test_constant_matrices_of_any_size_are_finite(bits, value):
    parameters = group_int.Parameters(bits, 128)
    values = np.full((3, 200), value, np.float32)
    codes, scales, exponent = _encode(values, parameters)
    decoded = _decode(3, 200, parameters, scales, codes.tobytes(), exponent)
    if value in (0.0, 1e-38):
        assert not decoded.any()
    else:
        assert decoded == pytest.approx(value, rel=2.0**-11)


def test_scale_beyond_the_largest_exponent_is_refused():
    for bits in (4, 8):  # 3e38 / 127 = 2**120.8, and the largest scale is below 2**116
        with pytest.raises(FormatError, match="too large for float16"):
            _encode(np.full((1, 4), 3e38, np.float32), group_int.Parameters(bits, 32))


def test_one_zero_group_among_others():
    values = np.ones((2, 96), np.float32)
    values[0, 32:64] = 0
    codes, scales, exponent = _encode(values, group_int.Parameters(4, 32))
    assert scales[0, 1] == 0
    decoded = _decode(2, 96, group_int.Parameters(4, 32), scales, codes.tobytes(), exponent)
    assert decoded == pytest.approx(values, rel=2.0**-11)
    assert not decoded[0, 32:64].any()


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_in_blocks_give_the_bytes_of_the_whole(bits):
    parameters = group_int.Parameters(bits, 64)
    values = np.random.default_rng(5).standard_normal((50, 150)).astype(np.float32) * 1e-6
    codes, scales, exponent = _encode(values, parameters)
    span = (0.0, 0.0)
    for start in range(0, 50, 7):
        span = common.merge_spans(span, group_int.scale_span(values[start : start + 7], parameters))
    assert common.choose_exponent(*span) == exponent != 0
    parts = [group_int.encode(values[start : start + 7], parameters, exponent) for start in range(0, 50, 7)]
    assert b"".join(part.tobytes() for part, _ in parts) == codes.tobytes()
    assert b"".join(part.tobytes() for _, part in parts) == scales.tobytes()


def test_pieces_of_memory_do_not_show(monkeypatch):
    values = np.random.default_rng(5).standard_normal((50, 150)).astype(np.float32)
    parameters = group_int.Parameters(4, 64)
    codes, scales, exponent = _encode(values, parameters)
    decoded = _decode(50, 150, parameters, scales, codes.tobytes(), exponent)
    monkeypatch.setattr(group_int, "_CHUNK_VALUES", 1000)
    again, _, _ = _encode(values, parameters)
    assert np.array_equal(again, codes)
    assert np.array_equal(_decode(50, 150, parameters, scales, codes.tobytes(), exponent), decoded)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_tensors_without_elements(shape):
    parameters = group_int.Parameters(4, 32)
    codes, scales, exponent = _encode(np.zeros(shape, np.float32), parameters)
    assert (codes.nbytes, scales.nbytes, exponent) == (0, 0, 0)
    assert _decode(*shape, parameters, scales, b"").shape == shape


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    values = np.ones((2, 40), np.float32)
    values[1, 39] = bad
    with pytest.raises(FormatError, match="not finite"):
        group_int.scale_span(values, group_int.Parameters())
    with pytest.raises(FormatError, match="not finite"):
        group_int.encode(values, group_int.Parameters(), 0)


# Refusals: one test a tag of the page.


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 0), (0, 3), (0, 16), (1, 1), (2, 0), (2, 129), (3, 8), (4, 1), (15, 1)]
)
def test_group_int_parameters_wrong(offset, value):
    block = bytearray(group_int.Parameters().pack())
    assert bytes(block) == bytes([4, 0, 128, *[0] * 13])
    block[offset] = value
    with pytest.raises(FormatError):
        group_int.Parameters.unpack(bytes(block), where="x")


def test_group_int_parameters_wrong_cannot_be_made():
    for arguments in ({"bits": 3}, {"group": 0}, {"group": 48}, {"group": 2048}):
        with pytest.raises(FormatError):
            group_int.Parameters(**arguments)


@pytest.mark.parametrize(("scales", "codes"), [(2, 39), (2, 41), (1, 40), (3, 40)])
def test_group_int_section_length_wrong(scales, codes):
    with pytest.raises(FormatError, match="wrong length"):
        _decode(1, 80, group_int.Parameters(4, 64), np.ones(scales, np.float16), bytes(codes))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_group_int_scale_not_finite(bad):
    scales = np.ones((2, 2), np.float16)
    scales[1, 0] = bad
    with pytest.raises(FormatError, match="NaN or infinity") as caught:
        _decode(2, 64, group_int.Parameters(8, 32), scales, bytes(128))
    assert caught.value.offset == 4


@pytest.mark.parametrize("half", [0, 7, 9, 15])
def test_group_int_filling_half_wrong(half):
    parameters = group_int.Parameters(4, 32)
    codes = bytearray(group_int.pack_codes(np.ones((2, 35), np.int8), parameters).tobytes())
    _decode(2, 35, parameters, np.ones((2, 2), np.float16), codes)
    codes[35] = codes[35] & 15 | half << 4
    with pytest.raises(FormatError, match="filling nibble"):
        _decode(2, 35, parameters, np.ones((2, 2), np.float16), codes)


def test_scale_exponent_out_of_range():
    with pytest.raises(FormatError, match="scale exponent"):
        _decode(1, 32, group_int.Parameters(8, 32), np.ones((1, 1), np.float16), bytes(32), exponent=-101)
