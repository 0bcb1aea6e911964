"""Codec rvq against scalar arithmetic, brute force and the page's refusals."""

import numpy as np
import pytest

from formats.codecs import rvq
from formats.errors import FormatError
from formats.layout import SectionKind

CODEBOOKS, SCALES, CODES = SectionKind.CODEBOOKS, SectionKind.SCALES, SectionKind.CODES


def _random(rows, cols, parameters, seed=0):
    """Codebooks, scales of varied size, and indices: what a record would hold."""
    rng = np.random.default_rng(seed)
    shape = (parameters.stages, parameters.entries, 8)
    codebooks = (rng.standard_normal(shape) * 0.6 ** np.arange(parameters.stages)[:, None, None]).astype(np.float16)
    scales = np.exp2(rng.uniform(-9, 3, rows)).astype(np.float16)
    codes = rng.integers(0, parameters.entries, (rows, -(-cols // 8), parameters.stages), dtype=np.uint8)
    return codebooks, scales, codes


def _sections(codebooks, scales, codes):
    return {
        CODEBOOKS: codebooks.astype("<f2").tobytes(),
        SCALES: scales.astype("<f2").tobytes(),
        CODES: rvq.pack_codes(codes),
    }


def _scalar_decode(rows, cols, codebooks, scales, codes, exponent):
    """The page's arithmetic, one number at a time."""
    out = np.empty((rows, cols), np.float32)
    for row in range(rows):
        scale = np.float32(scales[row]) * np.float32(2.0**exponent)
        for col in range(cols):
            total = np.float32(codebooks[0, codes[row, col // 8, 0], col % 8])
            for stage in range(1, codebooks.shape[0]):
                total = np.float32(total + np.float32(codebooks[stage, codes[row, col // 8, stage], col % 8]))
            out[row, col] = np.float32(total * scale)
    return out


SIDES = [(rows, cols) for cols in range(1, 66) for rows in (1, 65)]
SIDES += [(rows, cols) for rows in (63, 64, 97, 600) for cols in (1, 7, 8, 9, 48, 100)]


@pytest.mark.parametrize(("rows", "cols"), SIDES)
def test_shp_01_02_03_indices_and_shape_survive(rows, cols):
    parameters = rvq.Parameters(3, 251)
    codebooks, scales, codes = _random(rows, cols, parameters)
    sections = _sections(codebooks, scales, codes)
    assert len(sections[CODES]) == dict(rvq.matrix_sections(rows, cols, parameters))[CODES]
    assert np.array_equal(rvq.unpack_codes(sections[CODES], rows, cols, parameters, where="x"), codes)
    values = rvq.decode(rows, cols, parameters, sections, scale_exponent=0, where="x")
    assert values.shape == (rows, cols)
    total = sum(codebooks.astype(np.float32)[stage][codes[..., stage]] for stage in range(3))
    expected = total.reshape(rows, -1)[:, :cols] * scales.astype(np.float32)[:, None]
    assert np.array_equal(values, expected)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_num_03_order_and_rounding_of_the_sum(stages):
    parameters = rvq.Parameters(stages, 256)
    codebooks, scales, codes = _random(5, 21, parameters, seed=stages)
    values = rvq.decode(5, 21, parameters, _sections(codebooks, scales, codes), scale_exponent=-3, where="x")
    assert np.array_equal(values, _scalar_decode(5, 21, codebooks, scales, codes, -3))


def test_num_03_a_reordered_sum_would_be_noticed():
    # (1 + 2**-24) + 2**-24 is 1 in float32, and 1 + (2**-24 + 2**-24) is not.
    parameters = rvq.Parameters(3, 1)
    codebooks = np.zeros((3, 1, 8), np.float16)
    codebooks[0, 0], codebooks[1, 0], codebooks[2, 0] = 1.0, 2.0**-24, 2.0**-24
    sections = _sections(codebooks, np.ones(1, np.float16), np.zeros((1, 1, 3), np.uint8))
    assert rvq.decode(1, 8, parameters, sections, scale_exponent=0, where="x").tolist() == [[1.0] * 8]


def test_byte_positions_of_the_blocked_order():
    # 65 rows, 2 vectors, 2 stages: blocks of 64 rows, in them vectors, in them stages, in them rows
    codes = np.random.default_rng(1).integers(0, 256, (65, 2, 2), dtype=np.uint8)
    packed = rvq.pack_codes(codes)
    assert len(packed) == 2 * 2 * 2 * 64
    for row, vector, stage in ((0, 0, 0), (63, 1, 0), (17, 0, 1), (64, 0, 0), (64, 1, 1)):
        assert packed[((row // 64 * 2 + vector) * 2 + stage) * 64 + row % 64] == codes[row, vector, stage]
    assert not any(packed[4 * 64 + 1 : 5 * 64])


def test_row_scale_is_the_root_mean_square():
    scales, exponent = rvq.row_scales(np.array([[3, 4, 0, 0], [-2, 2, -2, 2], [0, 0, 0, 0]], np.float32))
    assert (scales.tolist(), exponent) == ([2.5, 2.0, 0.0], 0)


def test_qnt_07_vectors_use_the_scale_as_stored():
    # Half's step near 0.3 is 2**-12: 0.30001 is stored as 1229 / 4096.
    values = np.full((1, 8), 0.30001, np.float32)
    scales, exponent = rvq.row_scales(values)
    assert (float(scales[0]), exponent) == (1229 / 4096, 0)
    vectors = rvq.to_vectors(values, scales, exponent)
    assert np.array_equal(vectors[0, 0], values[0] / np.float32(1229 / 4096))
    assert (vectors != 1).all()


def test_vectors_are_filled_up_with_zeros_and_never_cross_a_row():
    values = np.arange(1, 21, dtype=np.float32).reshape(2, 10)
    vectors = rvq.to_vectors(values, np.array([1, 2], np.float16), 0)
    assert vectors.shape == (2, 2, 8)
    assert vectors[0].reshape(-1).tolist() == [*range(1, 11), *[0] * 6]
    assert vectors[1].reshape(-1).tolist() == [*(value / 2 for value in range(11, 21)), *[0] * 6]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5e-7, 1e-38, 1e30, -1e30])
def test_constant_matrices_of_any_size_are_finite(value):
    values = np.full((3, 20), value, np.float32)
    scales, exponent = rvq.row_scales(values)
    vectors = rvq.to_vectors(values, scales, exponent)
    assert np.isfinite(scales).all()
    assert np.isfinite(vectors).all()
    meaning = scales.astype(np.float64) * 2.0**exponent
    if value in (0.0, 1e-38):  # 2**-126.2 is below half of the smallest scale, 2**-24 * 2**-100
        assert not meaning.any()
        assert not vectors.any()
    else:
        assert meaning == pytest.approx(abs(value), rel=2.0**-11)
        assert np.abs(vectors[:, :2]) == pytest.approx(1.0, rel=2.0**-10)


def test_qnt_03_zero_row_among_others_decodes_to_zero():
    values = np.ones((3, 8), np.float32)
    values[1] = 0
    scales, exponent = rvq.row_scales(values)
    assert scales.tolist() == [1.0, 0.0, 1.0]
    sections = _sections(np.ones((1, 1, 8), np.float16), scales, np.zeros((3, 1, 1), np.uint8))
    decoded = rvq.decode(3, 8, rvq.Parameters(1, 1), sections, scale_exponent=exponent, where="x")
    assert np.array_equal(decoded, values)


def test_scale_beyond_the_largest_exponent_is_refused():
    with pytest.raises(FormatError, match="too large for float16"):
        rvq.row_scales(np.full((1, 8), 3e38, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_have_no_scale(bad):
    values = np.ones((2, 8), np.float32)
    values[1, 3] = bad
    with pytest.raises(FormatError, match="not finite"):
        rvq.row_scales(values)


# Refusals: one test a tag of the page.

ROWS, COLS = 65, 12
PARAMETERS = rvq.Parameters(2, 200)


def _good():
    return _sections(*_random(ROWS, COLS, PARAMETERS))


def _decode(sections, parameters=PARAMETERS, exponent=0):
    return rvq.decode(ROWS, COLS, parameters, sections, scale_exponent=exponent, where="layer 1 expert 2 gate")


def _patched(kind, offset, data):
    sections = _good()
    changed = bytearray(sections[kind])
    changed[offset : offset + len(data)] = data
    return {**sections, kind: bytes(changed)}


@pytest.mark.parametrize(
    ("offset", "value"), [(0, 7), (0, 16), (1, 0), (1, 5), (2, 2), (3, 1), (4, 1), (5, 0), (6, 1), (15, 1)]
)
def test_rvq_parameters_wrong(offset, value):
    block = bytearray(rvq.Parameters().pack())
    assert bytes(block) == bytes([8, 3, 0, 0, 0, 1, *[0] * 10])
    block[offset] = value
    with pytest.raises(FormatError) as caught:
        rvq.Parameters.unpack(bytes(block), where="x")
    assert caught.value.where == "x"


@pytest.mark.parametrize(
    "arguments", [{"stages": 0}, {"stages": 5}, {"entries": 0}, {"entries": 257}, {"scope": "layer"}, {"dimension": 4}]
)
def test_rvq_parameters_wrong_cannot_be_made(arguments):
    with pytest.raises(FormatError):
        rvq.Parameters(**arguments)


@pytest.mark.parametrize("kind", [CODEBOOKS, SCALES, CODES])
@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b""])
def test_rvq_section_length_wrong(kind, change):
    sections = _good()
    with pytest.raises(FormatError, match="wrong length"):
        _decode({**sections, kind: change(sections[kind])})
    with pytest.raises(FormatError, match="absent"):
        _decode({other: data for other, data in sections.items() if other != kind})


def test_rvq_index_beyond_codebook():
    _decode(_patched(CODES, 70, b"\xc7"))  # 199, the last entry
    with pytest.raises(FormatError, match="beyond the codebook") as caught:
        _decode(_patched(CODES, 70, b"\xc8"))
    assert (caught.value.offset, caught.value.found) == (70, 200)


def test_rvq_filling_index_not_zero():
    second_block = 2 * 2 * 64
    _decode(_patched(CODES, second_block, b"\x01"))
    with pytest.raises(FormatError, match="past the end"):
        _decode(_patched(CODES, second_block + 1, b"\x01"))
    with pytest.raises(FormatError, match="past the end"):
        rvq.unpack_codes(_patched(CODES, second_block + 255, b"\x01")[CODES], ROWS, COLS, PARAMETERS, where="x")


@pytest.mark.parametrize("bits", [b"\x00\x7c", b"\x00\xfc", b"\x01\x7c", b"\x00\x7e"])
def test_rvq_codebook_not_finite(bits):
    with pytest.raises(FormatError, match="NaN or infinity") as caught:
        _decode(_patched(CODEBOOKS, 34, bits))
    assert caught.value.offset == 34


@pytest.mark.parametrize("bits", [b"\x00\x7c", b"\x00\xfc", b"\xff\x7f"])
def test_rvq_scale_not_finite(bits):
    with pytest.raises(FormatError, match="NaN or infinity") as caught:
        _decode(_patched(SCALES, 128, bits))
    assert caught.value.offset == 128


def test_rvq_value_beyond_float32():
    codebooks, scales, codes = _random(ROWS, COLS, PARAMETERS)
    codebooks[:] = 1
    scales[:] = 1
    scales[3] = 2.0**15
    _decode(_sections(codebooks, scales, codes), exponent=100)  # (1 + 1) * 2**15 * 2**100 = 2**116
    codebooks[0, 9, 2] = 2.0**12 - 2  # with the other stage 2**12 - 1: below 2**127
    _decode(_sections(codebooks, scales, codes), exponent=100)
    codebooks[0, 9, 2] = -(2.0**12)
    with pytest.raises(FormatError, match="exceed float32"):
        _decode(_sections(codebooks, scales, codes), exponent=100)


def test_scale_exponent_out_of_range():
    with pytest.raises(FormatError, match="scale exponent"):
        _decode(_good(), exponent=101)


def test_rvq_in_the_trunk():
    with pytest.raises(FormatError):
        rvq.row_sections(64, PARAMETERS)
