"""Encoded matrices from the bytes of records, of the trunk and of checkpoints: views, the right values, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from formats.checkpoint import open_checkpoint
from formats.codecs import mxfp4, record_sections, rvq, section_offsets, unpack_parameters
from formats.container import Container, Record, open_container
from formats.encoded import (
    EncodedMatrix,
    GroupIntMatrix,
    Mxfp4Matrix,
    RawMatrix,
    RvqMatrix,
    decode_rows,
    multiply,
    placement,
    record_matrices,
    source_matrix,
    trunk_matrix,
)
from formats.errors import FormatError
from formats.families import bind
from formats.layout import Codec, Matrix, MatrixEntry, RecordHeader, Section, SectionKind
from formats.source import SourceMatrix, read_matrix

TESTS = Path(__file__).parents[1]
GOLDEN = ("v1-codecs", "v1-mixed")


def records(container: Container) -> Iterator[Record]:
    """Every record."""
    for info in container.manifest.layers:
        for row in container.rows(info.layer):
            yield container.record(info.layer, row.expert)


def parts(matrix: EncodedMatrix) -> dict[str, np.ndarray]:
    return {name: part for name, part in vars(matrix).items() if isinstance(part, np.ndarray)}


def decoded(matrix: EncodedMatrix) -> np.ndarray:
    return decode_rows(matrix, np.arange(matrix.rows))


@pytest.mark.parametrize("name", GOLDEN)
def test_matrices_of_a_record_decode_to_other_bits(name: str) -> None:
    kinds = set()
    with open_container(TESTS / "golden" / name) as container:
        for record in records(container):
            for number, matrix in zip(Matrix, record_matrices(record.header, record.data), strict=True):
                expected = record.matrix(number)
                assert (matrix.rows, matrix.cols) == expected.shape
                assert decoded(matrix).tobytes() == expected.tobytes()
                kinds.add(type(matrix))
    if name == "v1-codecs":
        assert kinds == {RvqMatrix, Mxfp4Matrix, GroupIntMatrix, RawMatrix}


def test_a_record_is_copied() -> None:
    with open_container(TESTS / "golden" / "v1-codecs") as container:
        for record in records(container):
            data = np.frombuffer(record.data, np.uint8)
            for matrix in record_matrices(record.header, record.data):
                for part in parts(matrix).values():
                    assert np.shares_memory(part, data)
                    assert not part.flags.writeable


@pytest.mark.parametrize("name", GOLDEN)
def test_tensors_of_the_trunk_decode_to_other_bits(name: str) -> None:
    found = set()
    with open_container(TESTS / "golden" / name) as container:
        for info in container.manifest.tensors:
            data = container.tensor_bytes(info)
            if len(info.shape) != 2:
                with pytest.raises(FormatError, match="no matrix"):
                    trunk_matrix(info, data)
                continue
            matrix = trunk_matrix(info, data)
            assert decoded(matrix).tobytes() == container.tensor_values(info).tobytes()
            assert all(
                np.shares_memory(part, np.frombuffer(data, np.uint8)) for part in parts(matrix).values() if part.size
            )
            found.add(type(matrix))
    assert found == {GroupIntMatrix, RawMatrix}


def test_tensor_of_another_length_or_dtype_is_taken() -> None:
    with open_container(TESTS / "golden" / "v1-mixed") as container:
        info = next(info for info in container.manifest.tensors if info.codec == "raw" and len(info.shape) == 2)
        data = container.tensor_bytes(info)
    for wrong in (data[:-1], data + b"\0"):
        with pytest.raises(FormatError, match="another length"):
            trunk_matrix(info, wrong)
    rows, cols = info.shape
    whole = type(info)(**{name: getattr(info, name) for name in info.__struct_fields__} | {"dtype": "I16"})
    assert rows * cols * 2 == info.bytes
    with pytest.raises(FormatError, match="no product") as caught:
        trunk_matrix(whole, data)
    assert (caught.value.where, caught.value.found) == (info.name, "I16")


@pytest.mark.parametrize("name", ["k3-tiny", "k3-small", "kimi-linear-tiny"])
def test_matrices_of_a_checkpoint_decode_to_other_bits(name: str) -> None:
    checkpoint = open_checkpoint(TESTS / "data" / name)
    model = bind(checkpoint)
    layer = model.architecture.moe_layers[0]
    for label in ("gate", "up", "down"):
        source = read_matrix(checkpoint, model, layer, 1, label)
        matrix = source_matrix(source)
        assert isinstance(matrix, RawMatrix if name.startswith("kimi") else Mxfp4Matrix)
        assert decoded(matrix).tobytes() == source.to_float32().tobytes()
        stored = [np.frombuffer(data, np.uint8) for _, data in source.tensors]
        assert all(any(np.shares_memory(part, data) for data in stored) for part in parts(matrix).values())


def test_bias_of_a_source_is_another() -> None:
    source = SourceMatrix(1, 2, (("w", b"\x21"), ("s", b"\x7d")), "mxfp4", bytes(32), "layer 1 expert 2 gate")
    assert decoded(source_matrix(source, 125)).tolist() == [[0.5, 1.0]]
    assert decoded(source_matrix(source)).tolist() == [[0.125, 0.25]]


@pytest.mark.parametrize(
    ("format_name", "data", "message"),
    [
        ("F32", np.array([1, np.nan, 1, np.inf], "<f4").tobytes(), "2 weights are NaN or infinite, the first in row 0"),
        ("BF16", np.array([0, 0, 0, 0x7F80], "<u2").tobytes(), "1 weights are NaN or infinite, the first in row 1"),
        ("F8_E4M3", bytes(4), "no product"),
        ("F64", bytes(32), "no product"),
        ("F16", bytes(6), "wrong length"),
    ],
)
def test_source_that_has_no_product_is_taken(format_name: str, data: bytes, message: str) -> None:
    source = SourceMatrix(2, 2, (("w.weight", data),), format_name, bytes(32), "layer 1 expert 2 gate")
    with pytest.raises(FormatError, match=message) as caught:
        source_matrix(source)
    assert "layer 1 expert 2 gate: w.weight" in str(caught.value)


# What a record's bytes may not be; the codecs' own tests have every rule.

SHAPES = ((70, 40), (70, 40), (40, 70))


def forged(codec: Codec, parameters: rvq.Parameters | mxfp4.Parameters) -> tuple[RecordHeader, bytearray]:
    """A header and a record of ones, all of whose numbers are legal."""
    wanted = record_sections(codec, parameters, SHAPES)
    offsets = section_offsets([length for _, _, length in wanted])
    sections = tuple(
        Section(kind, matrix, offset, length, bytes(32))
        for (kind, matrix, length), offset in zip(wanted, offsets, strict=True)
    )
    end = sections[-1].offset + sections[-1].bytes
    data = bytearray(-(-end // 4096) * 4096)
    for section in sections:
        if section.kind != SectionKind.CODES:
            data[section.offset : section.offset + section.bytes] = b"\x01" * section.bytes
    entries = tuple(MatrixEntry(rows, cols, 0, 0.0, bytes(32)) for rows, cols in SHAPES)
    header = RecordHeader(3, 7, 7, codec, parameters.pack(), len(data), end, 0.0, entries, sections)  # type: ignore[arg-type]
    assert unpack_parameters(codec, header.parameters, "x") == parameters
    return header, data


@pytest.mark.parametrize(
    ("kind", "owner", "at", "value", "message"),
    [
        (SectionKind.CODES, Matrix.UP, 5, 100, "layer 3 expert 7 up codes.*beyond the codebook"),
        (SectionKind.CODES, Matrix.DOWN, 41, 1, "layer 3 expert 7 down.*past the end"),
        (SectionKind.CODEBOOKS, Matrix.GATE, 3, 0x7C, "layer 3 expert 7 gate codebooks.*NaN or infinity"),
        (SectionKind.SCALES, Matrix.DOWN, 11, 0xFC, "layer 3 expert 7 down scales.*NaN or infinity"),
    ],
)
def test_record_that_breaks_its_codec_is_taken(
    kind: SectionKind, owner: Matrix, at: int, value: int, message: str
) -> None:
    header, data = forged(Codec.RVQ, rvq.Parameters(2, 100))
    assert len(record_matrices(header, data)) == 3
    data[header.section(kind, owner).offset + at] = value
    with pytest.raises(FormatError, match=message):
        record_matrices(header, data)


def test_mxfp4_record_beyond_float32_is_taken() -> None:
    header, data = forged(Codec.MXFP4, mxfp4.Parameters())
    scales, codes = (header.section(kind, Matrix.UP).offset for kind in (SectionKind.SCALES, SectionKind.CODES))
    data[scales + 3] = 253  # 2**126, row 1, columns 32 to 39
    data[codes + 20 + 18] = 0x50  # 3, column 37
    record_matrices(header, data)
    data[codes + 20 + 18] = 0x60  # 4
    with pytest.raises(FormatError, match=r"layer 3 expert 7 up.*row 1, column 37 exceeds float32"):
        record_matrices(header, data)
    data[codes + 20 + 18], data[scales + 3] = 0, 255
    with pytest.raises(FormatError, match=r"scale byte 255 \(NaN\) in row 1, group 1"):
        record_matrices(header, data)


def test_short_record_is_taken() -> None:
    header, data = forged(Codec.RVQ, rvq.Parameters(2, 100))
    record_matrices(header, data[: header.payload_bytes])
    with pytest.raises(FormatError, match="cut short"):
        record_matrices(header, data[: header.payload_bytes - 1])


def test_codebooks_of_a_record_are_apart() -> None:
    """Scope expert: gate, up and down have the very same array, so that a pair can share its tables."""
    header, data = forged(Codec.RVQ, rvq.Parameters(2, 100))
    gate, up, down = record_matrices(header, data)
    assert isinstance(gate, RvqMatrix)
    assert isinstance(up, RvqMatrix)
    assert isinstance(down, RvqMatrix)
    assert gate.codebooks.ctypes.data == up.codebooks.ctypes.data == down.codebooks.ctypes.data
    header, data = forged(Codec.RVQ, rvq.Parameters(2, 100, "matrix"))
    gate, up, _ = record_matrices(header, data)
    assert isinstance(gate, RvqMatrix)
    assert isinstance(up, RvqMatrix)
    assert gate.codebooks.ctypes.data != up.codebooks.ctypes.data


def test_matrices_of_a_copy_have_no_place() -> None:
    """As on a machine with the other byte order, where wider numbers are no views."""
    header, data = forged(Codec.RVQ, rvq.Parameters(2, 100))
    gate, up, down = record_matrices(header, data)
    assert isinstance(up, RvqMatrix)
    place = placement((gate, up, down), memoryview(data))
    assert place is not None
    assert all(vars(place.matrices(memoryview(data))[1])[name] is not None for name in vars(up))
    assert placement((gate, replace(up, scales=up.scales.copy()), down), memoryview(data)) is None


def test_multiplying_needs_more_than_views() -> None:
    """A record in a larger buffer, as a cache slot is one, not at its start."""
    header, data = forged(Codec.MXFP4, mxfp4.Parameters())
    slot = np.zeros(len(data) + 8192, np.uint8)
    slot[4096 : 4096 + len(data)] = np.frombuffer(data, np.uint8)
    inputs = np.ones((2, 40), np.float32)
    there, here = record_matrices(header, memoryview(slot)[4096:])[0], record_matrices(header, data)[0]
    assert multiply(there, inputs).tobytes() == multiply(here, inputs).tobytes()
    assert all(np.shares_memory(part, slot) for part in parts(replace(there)).values())
