"""From source matrices to a record, read back by the reader that was written from the specification alone."""

import dataclasses
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3
from threadpoolctl import threadpool_limits

from formats import codecs, layout
from formats.codecs import group_int, mxfp4, raw, rvq
from formats.errors import FormatError, UsageError
from formats.layout import Codec
from formats.source import SourceMatrix
from packer.encoding.encode import build_record, encode_expert, expert_seed, peak_bytes, record_digest
from tests.support import independent_reader, shards

SHAPES = ((40, 24), (40, 24), (24, 40))
CODECS = [
    (Codec.RVQ, rvq.Parameters(2, 16)),
    (Codec.RVQ, rvq.Parameters(3, 16, "matrix")),
    (Codec.GROUP_INT, group_int.Parameters(4, 32)),
    (Codec.GROUP_INT, group_int.Parameters(8, 32)),
    (Codec.MXFP4, mxfp4.Parameters()),
    (Codec.RAW, raw.Parameters("BF16")),
]


@pytest.fixture(autouse=True)
def _one_blas_thread():
    with threadpool_limits(1, user_api="blas"):
        yield


def _source(values, kind, where="x"):
    tensors = shards.mxfp4(values) if kind == "mxfp4" else (shards.store(values, kind),)
    named = tuple((f"t{number}", tensor.data) for number, tensor in enumerate(tensors))
    digest = blake3(b"".join(data for _, data in named)).digest()
    return SourceMatrix(*values.shape, named, kind, digest, where)


def _sources(kind, shapes=SHAPES, seed=0, size=1.0):
    rng = np.random.default_rng(seed)
    spread = np.float32(size)
    return [
        _source((rng.standard_normal(shape) * spread * rng.uniform(0.1, 2, (shape[0], 1))).astype(np.float32), kind)
        for shape in shapes
    ]


def _kind(codec):
    return "BF16" if codec == Codec.RAW else "mxfp4"


def _encode(sources, codec, parameters, **changes):
    arguments = {"layer": 3, "expert": 7, "source_expert": 9, "seed": 11, **changes}
    return encode_expert(sources, codec=codec, parameters=parameters, **arguments)


@pytest.mark.parametrize(("codec", "parameters"), CODECS)
def test_record_says_what_an_independent_reader_finds(codec, parameters):
    sources = _sources(_kind(codec))
    encoded = _encode(sources, codec, parameters)
    assert encoded.digest == blake3(encoded.record).digest()
    assert len(encoded.record) == codecs.record_bytes(codec, parameters, SHAPES) == encoded.header.record_bytes
    assert layout.unpack_record_header(encoded.record, where="x") == encoded.header
    codecs.check_sections(encoded.header)
    assert (encoded.header.layer, encoded.header.expert, encoded.header.source_expert) == (3, 7, 9)
    total, wrong = 0.0, 0.0
    decoded = independent_reader.decode_record(encoded.record)
    for number, (source, matrix) in enumerate(zip(sources, decoded, strict=True)):
        truth = source.to_float32().astype(np.float64)
        difference = float(np.square(truth - matrix).sum())
        assert encoded.matrix_errors[number] == np.float32(np.sqrt(difference / np.square(truth).sum()))
        entry = encoded.header.matrices[number]
        assert entry.rel_error == encoded.matrix_errors[number]
        assert entry.source_digest == source.digest
        assert (entry.rows, entry.cols) == truth.shape
        total, wrong = total + float(np.square(truth).sum()), wrong + difference
    assert encoded.rel_error == encoded.header.rel_error == pytest.approx(np.sqrt(wrong / total), rel=1e-6)
    lossless = codec in (Codec.MXFP4, Codec.RAW)
    assert encoded.rel_error == 0.0 if lossless else 0.001 < encoded.rel_error < 0.8


@pytest.mark.parametrize(("codec", "parameters"), CODECS)
def test_project_and_independent_reader_decode_the_same_bits(codec, parameters):
    encoded = _encode(_sources(_kind(codec)), codec, parameters)

    def read(section):
        return encoded.record[section.offset : section.offset + section.bytes]

    for number, expected in enumerate(independent_reader.decode_record(encoded.record)):
        decoded = codecs.decode_matrix(encoded.header, read, number)
        assert np.array_equal(decoded.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "shapes", [((1, 1), (1, 1), (1, 1)), ((2, 33), (2, 33), (33, 2)), ((97, 48), (97, 48), (48, 97))]
)
@pytest.mark.parametrize(("codec", "parameters"), CODECS)
def test_shp_01_02_03_awkward_shapes(codec, parameters, shapes):
    encoded = _encode(_sources(_kind(codec), shapes), codec, parameters)
    assert [matrix.shape for matrix in independent_reader.decode_record(encoded.record)] == list(shapes)
    end = encoded.header.payload_bytes
    assert not any(encoded.record[end:])
    covered = bytearray(encoded.record[:end])
    covered[: layout.RECORD_HEADER_BYTES] = bytes(layout.RECORD_HEADER_BYTES)
    for section in encoded.header.sections:
        covered[section.offset : section.offset + section.bytes] = bytes(section.bytes)
    assert not any(covered)


@pytest.mark.parametrize(("codec", "parameters"), CODECS[:4])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-9, 1e9, 1e30])
def test_experts_of_any_size_are_finite(codec, parameters, size):
    encoded = _encode(_sources("F32", size=size), codec, parameters)
    for matrix in independent_reader.decode_record(encoded.record):
        assert np.isfinite(matrix).all()
    if size == 0.0:
        assert encoded.matrix_errors == (0.0, 0.0, 0.0)
    elif size == 1e-38:  # below the smallest scale of float16 under the smallest exponent: zero, and reported as such
        assert encoded.rel_error == 1.0
    else:
        assert encoded.rel_error < 0.8
        assert [entry.scale_exponent for entry in encoded.header.matrices] != [0, 0, 0]


def test_qnt_03_zero_expert_and_zero_row():
    values = np.random.default_rng(0).standard_normal((40, 24)).astype(np.float32)
    changed = values.copy()
    changed[5] = 0
    others = [_source(changed, "F32"), _source(values, "F32"), _source(values.T.copy(), "F32")]
    for codec, parameters in CODECS[:4]:
        gate = independent_reader.decode_record(_encode(others, codec, parameters).record)[0]
        assert not gate[5].any()
        assert gate[4].any()


def test_qnt_01_constant_expert_is_coded_without_a_visible_error():
    sources = [_source(np.full(shape, 0.3, np.float32), "F32") for shape in SHAPES]
    assert _encode(sources, Codec.RVQ, rvq.Parameters()).rel_error < 1e-6


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("codec", "parameters"), [*CODECS[:4], (Codec.RAW, raw.Parameters("F32"))])
def test_qnt_04_values_that_are_not_finite_stop_before_encoding(codec, parameters, value):
    sources = _sources("F32")
    values = np.ones(SHAPES[1], np.float32)
    values[3, 4] = value
    with pytest.raises(FormatError, match="row 3"):
        _encode([sources[0], _source(values, "F32"), sources[2]], codec, parameters)


def test_dty_03_scale_byte_255_stops_a_lossless_record_too():
    sources = _sources("mxfp4")
    (packed, codes), (scale, scales) = sources[2].tensors
    broken = dataclasses.replace(sources[2], tensors=((packed, codes), (scale, b"\xff" + scales[1:])))
    with pytest.raises(FormatError, match="255"):
        _encode([*sources[:2], broken], Codec.MXFP4, mxfp4.Parameters())


def test_lossless_records_hold_the_source_bytes():
    for codec, parameters, kind in (
        (Codec.MXFP4, mxfp4.Parameters(), "mxfp4"),
        (Codec.RAW, raw.Parameters("BF16"), "BF16"),
    ):
        sources = _sources(kind)
        encoded = _encode(sources, codec, parameters)
        for number, source in enumerate(sources):
            for kind_, (_, data) in zip(
                (layout.SectionKind.CODES, layout.SectionKind.SCALES), source.tensors, strict=False
            ):
                section = encoded.header.section(kind_, number)
                assert encoded.record[section.offset : section.offset + section.bytes] == data


def test_lossless_codec_of_another_format_is_refused():
    for codec, parameters, kind in (
        (Codec.MXFP4, mxfp4.Parameters(), "BF16"),
        (Codec.RAW, raw.Parameters("BF16"), "F32"),
        (Codec.RAW, raw.Parameters("BF16"), "mxfp4"),
    ):
        with pytest.raises(UsageError, match="another format"):
            _encode(_sources(kind), codec, parameters)


def test_dty_02_bias_of_source_and_codec_must_agree():
    sources = _sources("mxfp4")
    with pytest.raises(UsageError, match="scale bias"):
        _encode(sources, Codec.MXFP4, mxfp4.Parameters(127), bias=125)
    large = _encode(sources, Codec.MXFP4, mxfp4.Parameters(125), bias=125)
    usual = _encode(sources, Codec.MXFP4, mxfp4.Parameters(127))
    assert np.array_equal(
        independent_reader.decode_record(large.record)[0], 4 * independent_reader.decode_record(usual.record)[0]
    )


def test_num_01_records_do_not_depend_on_order_or_threads():
    experts = [_sources("mxfp4", seed=number) for number in range(6)]
    parameters = rvq.Parameters(2, 16)

    def encode(number):
        return _encode(experts[number], Codec.RVQ, parameters, expert=number, source_expert=number).digest

    alone = [encode(number) for number in range(6)]
    order = list(range(6))
    random.Random(1).shuffle(order)
    with ThreadPoolExecutor(3) as pool:
        together = dict(zip(order, pool.map(encode, order), strict=True))
    assert [together[number] for number in range(6)] == alone


def test_expert_seed_follows_its_rule():
    words = (5).to_bytes(8, "little") + (92).to_bytes(4, "little") + (895).to_bytes(4, "little")
    assert expert_seed(5, 92, 895) == int.from_bytes(blake3(b"moepack expert seed 1" + words).digest()[:8], "little")
    assert len({expert_seed(seed, layer, expert) for seed in (0, 1) for layer in (1, 2) for expert in (1, 2)}) == 8


def test_codebooks_follow_the_source_expert_and_not_its_new_number():
    sources = _sources("mxfp4")
    first = _encode(sources, Codec.RVQ, rvq.Parameters(2, 16), expert=1)
    second = _encode(sources, Codec.RVQ, rvq.Parameters(2, 16), expert=2)
    assert first.record[layout.RECORD_HEADER_BYTES :] == second.record[layout.RECORD_HEADER_BYTES :]
    assert first.digest != second.digest


def _parts(codec, parameters):
    sections = {
        (kind, matrix): bytes([number + 1]) * length
        for number, (kind, matrix, length) in enumerate(codecs.record_sections(codec, parameters, SHAPES))
    }
    entries = tuple(layout.MatrixEntry(rows, cols, 0, 0.5, bytes(32)) for rows, cols in SHAPES)
    return {
        "layer": 1,
        "expert": 2,
        "source_expert": 3,
        "codec": codec,
        "parameters": parameters,
        "matrices": entries,
        "rel_error": 0.25,
        "sections": sections,
    }


@pytest.mark.parametrize(("codec", "parameters"), CODECS)
def test_build_record_lays_out_sections_in_order(codec, parameters):
    arguments = _parts(codec, parameters)
    record, header = build_record(**arguments)
    assert layout.unpack_record_header(record, where="x") == header
    assert record_digest(record) == blake3(record).digest()
    for section in header.sections:
        data = record[section.offset : section.offset + section.bytes]
        assert data == arguments["sections"][section.kind, section.matrix]
        assert section.digest == blake3(data).digest()


def test_build_record_refuses_sections_that_are_not_the_codec_s():
    arguments = _parts(Codec.MXFP4, mxfp4.Parameters())
    name = next(iter(arguments["sections"]))
    absent = {key: data for key, data in arguments["sections"].items() if key != name}
    with pytest.raises(FormatError, match="not those of the codec"):
        build_record(**{**arguments, "sections": absent})
    with pytest.raises(FormatError, match="wrong length"):
        build_record(**{**arguments, "sections": {**arguments["sections"], name: b""}})


@pytest.mark.parametrize(("codec", "parameters"), CODECS)
def test_qnt_10_memory_stays_below_the_stated_peak(codec, parameters):
    shapes = ((768, 512), (768, 512), (512, 768))
    sources = _sources(_kind(codec), shapes)
    held = sum(len(data) for source in sources for _, data in source.tensors)
    tracemalloc.start()
    try:
        _encode(sources, codec, parameters)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak + held < peak_bytes(codec, parameters, shapes, held)


def test_column_weights_lower_the_weighted_error():
    """A made-up second moment: few columns matter much. The weighted error falls, at the same bytes."""
    shapes = [(96, 61), (96, 61), (61, 96)]
    sources = _sources("mxfp4", shapes, seed=6)
    rng = np.random.default_rng(7)
    weights = [np.exp(2 * rng.standard_normal(cols)).astype(np.float32) for _, cols in shapes]
    parameters = rvq.Parameters(3, 32)

    def weighted_error(record) -> float:
        lost = total = 0.0
        for source, weight, decoded in zip(sources, weights, independent_reader.decode_record(record), strict=True):
            values = source.to_float32().astype(np.float64)
            lost += (weight * np.square(values - decoded)).sum()
            total += (weight * np.square(values)).sum()
        return float(np.sqrt(lost / total))

    plain = _encode(sources, Codec.RVQ, parameters)
    aware = _encode(sources, Codec.RVQ, parameters, weights=weights)
    assert len(plain.record) == len(aware.record)
    assert weighted_error(aware.record) < 0.93 * weighted_error(plain.record)
    assert _encode(sources, Codec.RVQ, parameters, weights=weights).record == aware.record
