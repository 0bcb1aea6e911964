"""Scales in float16 with an exponent, and the registry's arithmetic of sections."""

import dataclasses
import math
import struct

import numpy as np
import pytest

from formats import codecs, layout
from formats.codecs import common, group_int, mxfp4, raw, rvq
from formats.errors import FormatError
from formats.layout import SHARED, Codec, SectionKind

K3 = ((3072, 3584), (3072, 3584), (3584, 3072))


def test_dty_10_too_large_for_float16_is_refused():
    with pytest.raises(FormatError, match="too large for float16"):
        common.to_half(np.array([1e5]), 0, where="x")


def test_dty_10_subnormal_scales_are_kept():
    # Half's subnormal step is 2**-24: 3e-5 is 503.3 steps, 6e-8 is 1.007 steps.
    stored = common.to_half(np.array([3e-5, 6e-8]), 0, where="x")
    assert common.to_single(stored, 0).tolist() == [503 * 2.0**-24, 2.0**-24]


def test_scales_round_to_nearest_even():
    # 1 + 2**-11 lies between two neighbours, 1 and 1 + 2**-10; 1 + 3 * 2**-11 between 1 + 2**-10 and 1 + 2**-9.
    stored = common.to_half(np.array([1 + 2.0**-11, 1 + 3 * 2.0**-11]), 0, where="x")
    assert stored.tolist() == [1.0, 1 + 2.0**-9]


@pytest.mark.parametrize(
    ("smallest", "largest", "exponent"),
    [
        (0.0, 0.0, 0),
        (2.0**-14, 65504.0, 0),
        (2.0**-15, 1.0, -14),  # 1 * 2**14 lies in [2**14, 2**15)
        (1.0, 65505.0, 1),  # 65505 / 2 = 32752.5
        (1e-38, 1e-38, -100),
        (1e30, 1e30, 85),  # 2**99 < 1e30 < 2**100
        (1e38, 1e38, 100),
    ],
)
def test_exponent_puts_the_largest_scale_below_the_top(smallest, largest, exponent):
    assert common.choose_exponent(smallest, largest) == exponent


def test_span_does_not_count_zeros():
    assert common.span(np.array([0.0, 3.0, 0.5])) == (0.5, 3.0)
    assert common.span(np.zeros(3)) == (0.0, 0.0)
    assert common.span(np.zeros(0)) == (0.0, 0.0)
    assert common.merge_spans((0.0, 0.0), (1.0, 2.0)) == (1.0, 2.0)
    assert common.merge_spans((1.0, 2.0), (0.0, 0.0)) == (1.0, 2.0)
    assert common.merge_spans((1.0, 4.0), (0.5, 2.0)) == (0.5, 4.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_span_refuses_what_is_not_finite(bad):
    with pytest.raises(FormatError, match="not finite"):
        common.span(np.array([1.0, bad]))


def test_half_view_agrees_with_struct_on_every_finite_half():
    bits = np.arange(65536, dtype=np.uint16)
    finite = bits[(bits & 0x7C00) != 0x7C00].astype("<u2")
    seen = common.half_view(finite.view(np.uint8), where="x").astype(np.float64)
    assert np.array_equal(seen, struct.unpack(f"<{finite.size}e", finite.tobytes()))
    for bad in bits[(bits & 0x7C00) == 0x7C00][::97]:
        with pytest.raises(FormatError, match="NaN or infinity"):
            common.half_view(np.array([bad], dtype="<u2").view(np.uint8), where="x")


PARAMETERS = [
    (Codec.RVQ, rvq.Parameters(), 12_419_072, 12_419_072),
    (Codec.RVQ, rvq.Parameters(scope="matrix"), 12_443_648, 12_443_648),
    (Codec.MXFP4, mxfp4.Parameters(), 17_548_288, 17_551_360),
    (Codec.GROUP_INT, group_int.Parameters(4, 128), 17_032_192, 17_035_264),
    (Codec.GROUP_INT, group_int.Parameters(8, 128), 33_547_264, 33_550_336),
    (Codec.RAW, raw.Parameters("BF16"), 66_061_312, 66_064_384),
]


@pytest.mark.parametrize(("codec", "parameters", "payload", "record"), PARAMETERS)
def test_byte_counts_of_the_pages(codec, parameters, payload, record):
    assert codecs.payload_bytes(codec, parameters, K3) == payload
    assert codecs.record_bytes(codec, parameters, K3) == record


@pytest.mark.parametrize(("codec", "parameters", "payload", "record"), PARAMETERS)
def test_parameters_survive_their_block(codec, parameters, payload, record):
    block = parameters.pack()
    assert len(block) == 16
    assert codecs.unpack_parameters(codec, block, "x") == parameters
    with pytest.raises(FormatError, match="wrong length"):
        codecs.unpack_parameters(codec, block + b"\0", "x")


def test_sections_stand_in_the_order_of_the_pages():
    shared = codecs.record_sections(Codec.RVQ, rvq.Parameters(2, 16), ((3, 9), (3, 9), (9, 3)))
    assert shared == (
        (SectionKind.CODEBOOKS, SHARED, 512),
        (SectionKind.SCALES, 0, 6),
        (SectionKind.CODES, 0, 256),
        (SectionKind.SCALES, 1, 6),
        (SectionKind.CODES, 1, 256),
        (SectionKind.SCALES, 2, 18),
        (SectionKind.CODES, 2, 128),
    )
    own = codecs.record_sections(Codec.RVQ, rvq.Parameters(2, 16, "matrix"), ((3, 9), (3, 9), (9, 3)))
    assert [(kind, matrix) for kind, matrix, _ in own] == [
        (kind, matrix)
        for matrix in (0, 1, 2)
        for kind in (SectionKind.CODEBOOKS, SectionKind.SCALES, SectionKind.CODES)
    ]
    # 1024 + 512 = 1536; + 6, the next line is 1600; + 256 = 1856; + 6, 1920; + 256 = 2176; + 18, 2240; + 128 = 2368
    assert codecs.section_offsets([length for _, _, length in shared]) == (1024, 1536, 1600, 1856, 1920, 2176, 2240)
    assert codecs.payload_bytes(Codec.RVQ, rvq.Parameters(2, 16), ((3, 9), (3, 9), (9, 3))) == 2368


def test_trunk_tensor_is_codes_then_scales_on_the_next_line():
    sections = codecs.trunk_sections(Codec.GROUP_INT, group_int.Parameters(4, 32), (3, 33), where="x")
    # 17 bytes of codes and 2 scales of 2 bytes a row: 51 bytes, then the next line.
    assert sections == (
        codecs.TrunkSection(SectionKind.CODES, 0, 51, 17),
        codecs.TrunkSection(SectionKind.SCALES, 64, 12, 4),
    )
    assert codecs.trunk_bytes(Codec.GROUP_INT, group_int.Parameters(4, 32), (3, 33), where="x") == 76


@pytest.mark.parametrize(
    ("shape", "extents"), [((), (1, 1)), ((5,), (1, 5)), ((2, 3), (2, 3)), ((2, 3, 4), (6, 4)), ((0, 7), (0, 7))]
)
def test_a_tensor_of_any_rank_has_rows(shape, extents):
    assert codecs.tensor_extents(shape) == extents
    rows, cols = extents
    assert codecs.trunk_bytes(Codec.RAW, raw.Parameters("F32"), shape, where="x") == rows * cols * 4


@pytest.mark.parametrize(("tag", "codec"), [("rvq-in-the-trunk", Codec.RVQ), ("mxfp4-in-the-trunk", Codec.MXFP4)])
def test_in_the_trunk(tag, codec):
    parameters = rvq.Parameters() if codec == Codec.RVQ else mxfp4.Parameters()
    with pytest.raises(FormatError, match="experts only"):
        codecs.trunk_sections(codec, parameters, (64, 64), where="x")
    with pytest.raises(FormatError, match="experts only"):
        codecs.decode_rows(codec, parameters, 64, 64, {}, where="x")


@pytest.mark.parametrize("shape", [(64,), (2, 64, 64), ()])
def test_group_int_rank_wrong(shape):
    with pytest.raises(FormatError, match="rank"):
        codecs.trunk_sections(Codec.GROUP_INT, group_int.Parameters(), shape, where="x")


def _header(parameters, shapes):
    expected = codecs.record_sections(Codec.MXFP4, parameters, shapes)
    offsets = codecs.section_offsets([length for _, _, length in expected])
    sections = tuple(
        layout.Section(kind, matrix, offset, length, bytes(32))
        for (kind, matrix, length), offset in zip(expected, offsets, strict=True)
    )
    entries = tuple(layout.MatrixEntry(rows, cols, 0, 0.0, bytes(32)) for rows, cols in shapes)
    length = codecs.payload_bytes(Codec.MXFP4, parameters, shapes)
    return layout.RecordHeader(
        1, 2, 2, Codec.MXFP4, parameters.pack(), layout.align(length, 4096), length, 0.0, entries, sections
    )


def test_decode_matrix_hands_each_matrix_its_own_sections():
    shapes = ((1, 2), (1, 2), (2, 1))
    header = _header(mxfp4.Parameters(), shapes)
    data = {
        (SectionKind.SCALES, 0): b"\x7f",
        (SectionKind.CODES, 0): b"\x42",  # 1, 2
        (SectionKind.SCALES, 1): b"\x80",
        (SectionKind.CODES, 1): b"\x42",
        (SectionKind.SCALES, 2): b"\x7f\x7e",
        (SectionKind.CODES, 2): b"\x07\x0f",  # 6, -6
    }

    def read(section):
        return data[section.kind, section.matrix]

    assert codecs.decode_matrix(header, read, 0).tolist() == [[1.0, 2.0]]
    assert codecs.decode_matrix(header, read, 1).tolist() == [[2.0, 4.0]]
    assert codecs.decode_matrix(header, read, 2).tolist() == [[6.0], [-3.0]]


def test_sections_differ_from_codec():
    header = _header(mxfp4.Parameters(), ((3, 64), (3, 64), (64, 3)))
    codecs.check_sections(header)
    first, second, *rest = header.sections
    swapped = (dataclasses.replace(first, kind=second.kind), dataclasses.replace(second, kind=first.kind), *rest)
    longer = (dataclasses.replace(first, bytes=first.bytes + 1), second, *rest)
    for sections, what in ((swapped, "out of order"), (longer, "wrong length"), (header.sections[:-1], "number")):
        with pytest.raises(FormatError, match=what):
            codecs.check_sections(dataclasses.replace(header, sections=sections))
