"""The worked example of SPEC.md section 14: each of its numbers is computed again, by the project's own functions."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from formats import codecs, index, layout
from formats.codecs import rvq
from formats.index import IndexRow, pack_index_row
from formats.layout import Codec, Matrix, MatrixEntry, RecordHeader, Section, SectionKind
from tests.support.independent_reader import decode_record

SPEC = Path(layout.__file__).with_name("SPEC.md").read_text(encoding="utf-8")
EXAMPLE = SPEC[SPEC.index("## 14. A worked example") :]
SHAPES = ((2, 10), (2, 10), (10, 2))
SCALES = ([1.0, 0.5], [2.0, 0.0], list(range(1, 11)))
EXPONENTS = (0, 3, -2)
ERRORS = (0.125, 0.25, 0.5)
PARAMETERS = rvq.Parameters(stages=2, entries=2, scope="expert")


def codebooks() -> np.ndarray:
    books = np.empty((2, 2, 8), np.float16)
    books[0, 0], books[0, 1] = 0.5, -1.0
    books[1, 0], books[1, 1] = [0.25, -0.25] * 4, range(1, 9)
    return books


def codes(matrix: int, rows: int, cols: int) -> np.ndarray:
    row, vector, stage = np.indices((rows, -(-cols // 8), 2))
    return ((row + vector + stage + matrix) % 2).astype(np.uint8)


@pytest.fixture(scope="module")
def record() -> bytes:
    """The example's record, made with the project's functions."""
    parts = [rvq.pack_codebooks(codebooks())]
    for matrix, (rows, cols) in enumerate(SHAPES):
        parts += [np.array(SCALES[matrix], "<f2").tobytes(), rvq.pack_codes(codes(matrix, rows, cols))]
    table = codecs.record_sections(Codec.RVQ, PARAMETERS, SHAPES)
    assert [length for _, _, length in table] == [len(part) for part in parts]
    offsets = codecs.section_offsets([len(part) for part in parts])
    sections = tuple(
        Section(kind, matrix, offset, len(part), blake3(part).digest())
        for (kind, matrix, _), offset, part in zip(table, offsets, parts, strict=True)
    )
    entries = [
        MatrixEntry(
            rows, cols, EXPONENTS[matrix], ERRORS[matrix], blake3(f"source of {Matrix(matrix).label}".encode()).digest()
        )
        for matrix, (rows, cols) in enumerate(SHAPES)
    ]
    payload = offsets[-1] + len(parts[-1])
    total = layout.align(payload, layout.PAGE)
    header = RecordHeader(
        1, 5, 5, Codec.RVQ, PARAMETERS.pack(), total, payload, 0.25, (entries[0], entries[1], entries[2]), sections
    )
    data = bytearray(total)
    data[: layout.RECORD_HEADER_BYTES] = layout.pack_record_header(header)
    for offset, part in zip(offsets, parts, strict=True):
        data[offset : offset + len(part)] = part
    assert layout.unpack_record_header(bytes(data), where="example") == header
    return bytes(data)


def stated(name: str) -> str:
    found = re.search(rf"^\| {re.escape(name)} \| (\S+) \|$", EXAMPLE, re.MULTILINE)
    assert found, f"section 14 has no row {name!r}"
    return found.group(1)


def test_sections_of_the_example(record: bytes) -> None:
    header = layout.unpack_record_header(record, where="example")
    rows = re.findall(
        r"^\| ((?:shared|gate|up|down)\.\w+) \| (\d+) \| (\d+) \| ([0-9a-f]{64}) \|$", EXAMPLE, re.MULTILINE
    )
    assert [
        (section.label, str(section.offset), str(section.bytes), section.digest.hex()) for section in header.sections
    ] == rows
    assert len(rows) == 7


def test_lengths_and_digests_of_the_example(record: bytes) -> None:
    header = layout.unpack_record_header(record, where="example")
    digest = blake3(record).digest()
    row = IndexRow(1, 5, 5, Codec.RVQ, 0, len(record), digest, ERRORS, 0.25, PARAMETERS.pack())
    assert stated("payload bytes") == str(header.payload_bytes)
    assert stated("record bytes") == str(header.record_bytes) == str(len(record))
    assert stated("digest of the record") == digest.hex()
    assert stated("digest of its index row, alone in a bank") == blake3(pack_index_row(row)).hexdigest()


def test_head_of_the_example(record: bytes) -> None:
    lines = re.findall(r"^    (00[0-4]0)  ([0-9a-f ]+)$", EXAMPLE, re.MULTILINE)
    assert [int(place, 16) for place, _ in lines] == [0, 16, 32, 48, 64]
    assert bytes.fromhex("".join(text for _, text in lines)) == record[:80]


def test_decoded_values_of_the_example(record: bytes) -> None:
    found = re.search(r"row 0 of gate is ([-0-9., ]+?): for", EXAMPLE)
    assert found
    expected = [float(text) for text in found.group(1).split(",")]
    header = layout.unpack_record_header(record, where="example")

    def read(section: Section) -> bytes:
        return record[section.offset : section.offset + section.bytes]

    gate, _, down = (codecs.decode_matrix(header, read, matrix) for matrix in Matrix)
    assert gate[0].tolist() == expected
    assert down[1].tolist() == [-0.375, -0.625]


def test_the_independent_reader_agrees_with_the_example(record: bytes) -> None:
    header = layout.unpack_record_header(record, where="example")
    own = [
        codecs.decode_matrix(header, lambda section: record[section.offset : section.offset + section.bytes], matrix)
        for matrix in Matrix
    ]
    for ours, theirs in zip(own, decode_record(record), strict=True):
        np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("name", ["PAGE", "LINE", "RECORD_HEADER_BYTES", "INDEX_ROW_BYTES", "MAX_SECTIONS"])
def test_constants_of_the_code_stand_in_the_specification(name: str) -> None:
    """The specification is the source: each constant is read out of its text."""
    patterns = {
        "PAGE": r"A \*page\* is ([\d,]+) bytes",
        "LINE": r"a \*line\* ([\d,]+) bytes",
        "RECORD_HEADER_BYTES": r"bytes of the header, (\d+)",
        "INDEX_ROW_BYTES": r"bytes of a row, (\d+)",
        "MAX_SECTIONS": r"number of sections, 1 to (\d+)",
    }
    found = re.search(patterns[name], SPEC)
    assert found
    assert int(found.group(1).replace(",", "")) == getattr(index if name == "INDEX_ROW_BYTES" else layout, name)


def test_tables_of_the_specification_match_the_structs(record: bytes) -> None:
    """Field offsets as the tables of 6.2 state them, read with struct, give the header that the code reads."""
    header = layout.unpack_record_header(record, where="example")
    table = SPEC[SPEC.index("### 6.2") : SPEC.index("### 6.3")]
    rows = dict(re.findall(r"^\| (\d+) \| \w+(?: bytes)? \| ([a-z ]+)", table, re.MULTILINE))
    fields = {
        "layer": header.layer,
        "expert": header.expert,
        "source expert": header.source_expert,
        "codec": int(header.codec),
        "record bytes": header.record_bytes,
        "payload bytes": header.payload_bytes,
    }
    places = {meaning.strip(): int(offset) for offset, meaning in rows.items()}
    for meaning, value in fields.items():
        form = "<Q" if meaning.endswith("bytes") else "<H" if meaning == "codec" else "<I"
        assert struct.unpack_from(form, record, places[meaning])[0] == value, meaning
    assert SectionKind(1).name == "CODEBOOKS"
