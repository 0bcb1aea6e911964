"""Expert records: headers, sections and padding that lie, each with the verdict of ``moepack verify``.

All digests are right unless a case is about them, so that only the broken rule can give it away.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats.container import open_container
from formats.errors import FormatError
from formats.layout import Matrix, SectionKind
from tests.attacks.alter import exchange, write_field
from tests.support.containers import MXFP4, Forge, Layer, Spec, all_codecs, build_container
from tests.support.verdicts import CLOSED, LISTED, Attack, Case, FileAttack, flip, resize, run_case

BANK = "experts/layer-00002.bank"
PLACE = "layer 2 expert 1: "
RECIPE = Spec().recipe
MXFP4_SPEC = dataclasses.replace(
    Spec(),
    hidden_layers=2,
    layers={1: Layer((MXFP4, MXFP4))},
    tensors=Spec().tensors[:5],
    recipe=RECIPE | {"experts": {"codec": "mxfp4"}},
)


def field(at: int, form: str, value: Any) -> Attack:
    """Write a field of layer 2 expert 1, which is rvq; a function gets the old value."""

    return lambda forge: write_field(forge.banks[2], forge.row(2, 1).offset + at, form, value)


def listed(message: str, attack: Attack, **options: Any) -> Case:
    return Case(LISTED, message, attack, **options)


def damaged(exit_code: int, message: str, afterwards: FileAttack) -> Case:
    return Case(exit_code, message, afterwards=afterwards)


def exchanged(forge: Forge) -> None:
    """Records 1 and 3 of layer 2, of one codec and length, in each other's place, digests and all."""
    one, two = forge.row(2, 1), forge.row(2, 3)
    assert one.bytes == two.bytes
    exchange(forge.banks[2], one.offset, two.offset, one.bytes)


def of_another_layer(forge: Forge) -> None:
    one, two = forge.row(2, 1), forge.row(1, 1)
    assert one.bytes == two.bytes
    forge.banks[2][one.offset : one.offset + one.bytes] = forge.banks[1][two.offset : two.offset + two.bytes]


def restored(path: Path) -> None:
    """A record of an older pack: sound in itself, of the same place, with other weights."""
    content = bytearray((path / BANK).read_bytes())
    forge = Forge(path)
    row = forge.row(2, 1)
    content[row.offset + 2000] ^= 1
    (path / BANK).write_bytes(content)


def sections(change: Callable[[bytearray, Forge], None]) -> Attack:
    """Change the section table of the record, given as its bytes from 320 on."""

    def attack(forge: Forge) -> None:
        start = forge.row(2, 1).offset + 320
        table = bytearray(forge.banks[2][start : start + 11 * 64])
        change(table, forge)
        forge.banks[2][start : start + 11 * 64] = table

    return attack


def swap_entries(table: bytearray, forge: Forge) -> None:
    """The entries of gate.scales and gate.codes exchanged."""
    exchange(table, 64, 128, 64)


def overlap(table: bytearray, forge: Forge) -> None:
    """The second section starts where the first does."""
    table[64 + 8 : 64 + 16] = table[8:16]


def two_of_one_kind(table: bytearray, forge: Forge) -> None:
    table[64] = SectionKind.CODEBOOKS
    table[65] = 255


def section_bytes(layer: int, expert: int, kind: SectionKind, data: bytes) -> Attack:
    """The first bytes of the first section of a kind, with its digest in the header made right."""

    def attack(forge: Forge) -> None:
        row = forge.row(layer, expert)
        number, section = next(
            (number, item) for number, item in enumerate(forge.header(layer, expert).sections) if item.kind == kind
        )
        start = row.offset + section.offset
        forge.banks[layer][start : start + len(data)] = data
        digest = blake3(bytes(forge.banks[layer][start : start + section.bytes])).digest()
        place = row.offset + 320 + 64 * number + 32
        forge.banks[layer][place : place + 32] = digest

    return attack


CASES: dict[str, Case] = {
    # the bank
    "ctr-04 bank shorter by a page": damaged(CLOSED, f"{BANK}: .*another length", resize(BANK, lambda n: n - 4096)),
    "ctr-04 bank shorter by a byte": damaged(CLOSED, f"{BANK}: .*another length", resize(BANK, lambda n: n - 1)),
    "ctr-04 bank longer by a page": damaged(CLOSED, f"{BANK}: .*another length", resize(BANK, lambda n: n + 4096)),
    "ctr-03 bank empty": damaged(CLOSED, f"{BANK}: .*another length.*found 0", resize(BANK, lambda n: 0)),
    "ctr-04 bank of another layer": damaged(
        CLOSED,
        f"{BANK}: .*another length",
        lambda path: (path / BANK).write_bytes((path / "experts/layer-00001.bank").read_bytes()),
    ),
    "bank of holes": damaged(
        LISTED,
        "layer 2 expert 0: .*wrong magic",
        lambda path: (path / BANK).write_bytes(bytes((path / BANK).stat().st_size)),
    ),
    # plain damage
    "ctr-05 bit flipped in a header": damaged(LISTED, "layer 2 expert 0: ", flip(BANK, 20)),
    "ctr-05 bit flipped in a source digest": damaged(
        LISTED, "layer 2 expert 0: record differs.*damaged: header", flip(BANK, 144)
    ),
    "ctr-05 bit flipped in codes": damaged(
        LISTED, "layer 2 expert 0: record differs from its digest .*damaged: ", flip(BANK, 3000)
    ),
    "ctr-05 bit flipped in the last byte": damaged(LISTED, "layer 2 expert 3: ", flip(BANK, -1)),
    "ctr-06 record of an older pack": damaged(LISTED, f"{PLACE}record differs from its digest in the index", restored),
    "ctr-06 records exchanged": listed(f"{PLACE}.*disagrees about its expert", exchanged),
    "ctr-06 record of another layer": listed(
        f"{PLACE}.*disagrees about its layer .expected 2, found 1", of_another_layer
    ),
    # the head
    "ctr-01 magic of an index": listed(f"{PLACE}.*wrong magic", field(0, "8s", b"MOEPACKI")),
    "ctr-01 magic reversed": listed(f"{PLACE}.*other byte order", field(0, "8s", b"RKCAPEOM")),
    "ctr-01 safetensors in its place": listed(f"{PLACE}.*wrong magic", field(0, "16s", b'\x20\0\0\0\0\0\0\0{"a":{"b"')),
    "ctr-02 version 2": listed("unknown format version .expected 1, found 2", field(8, "<H", 2)),
    "ctr-02 critical flag": listed("unknown critical flags .expected 0, found 32768", field(30, "<H", 1 << 15)),
    "ctr-08 header of 0 bytes": listed(
        "record header has an unknown length .expected 1024, found 0", field(12, "<I", 0)
    ),
    "ctr-08 header of 2^32 - 1 bytes": listed("unknown length .*found 4294967295", field(12, "<I", (1 << 32) - 1)),
    "layer": listed(f"{PLACE}.*disagrees about its layer", field(16, "<I", 1)),
    "expert": listed(f"{PLACE}.*disagrees about its expert", field(20, "<I", 3)),
    "source expert": listed(f"{PLACE}.*disagrees about its source expert", field(24, "<I", 2)),
    "ctr-10 another codec": listed(f"{PLACE}.*disagrees about its codec", field(28, "<H", 3)),
    "ctr-08 codec 9": listed("unknown codec .expected 1 to 4, found 9", field(28, "<H", 9)),
    "record longer than its row": listed(PLACE, field(32, "<Q", lambda old: old + 4096)),
    "record of 2^64 - 4096 bytes": listed("payload does not fit its record", field(32, "<Q", (1 << 64) - 4096)),
    "payload past the record": listed("payload does not fit its record", field(40, "<Q", 1 << 40)),
    "payload inside the header": listed("payload does not fit its record .*found 1023", field(40, "<Q", 1023)),
    "payload one byte less": listed(
        "payload does not end with its last section|does not fit the record", field(40, "<Q", lambda old: old - 1)
    ),
    "ctr-08 no sections": listed("section count out of range .expected 1 to 11, found 0", field(64, "<H", 0)),
    "ctr-08 65535 sections": listed("section count out of range .*found 65535", field(64, "<H", 65_535)),
    "ctr-08 no matrices": listed("matrix count out of range .expected 3, found 0", field(66, "<H", 0)),
    "reserved in the head": listed("reserved bytes are not zero", field(127, "B", 1)),
    "error is no number": listed("relative error is not a finite number", field(72, "<f", float("nan"))),
    "error embellished": listed(f"{PLACE}.*disagrees about its errors", field(72, "<f", 0.0)),
    # codec parameters
    "ctr-08 vectors of 0": listed(f"{PLACE}.*disagrees about its codec parameters", field(48, "B", 0)),
    "ctr-08 entries of 0": listed(f"{PLACE}.*disagrees about its codec parameters", field(52, "<H", 0)),
    # the matrices
    "matrix without rows": listed(
        "gate has no sensible number of rows .expected 1 to 16777216, found 0", field(128, "<I", 0)
    ),
    "matrix without columns": listed("up has no sensible number of columns", field(192 + 4, "<I", 0)),
    "matrix of 2^32 - 1 rows": listed(
        "down has no sensible number of rows .*found 4294967295", field(256, "<I", (1 << 32) - 1)
    ),
    "matrix of another shape": listed(f"{PLACE}.*disagrees about its shapes", field(128, "<I", 65)),
    "matrix transposed": listed(f"{PLACE}.*disagrees about its shapes", field(128, "8s", struct.pack("<II", 40, 66))),
    "scale exponent of 101": listed(
        "scale exponent out of range .expected -100 to 100, found 101", field(136, "<i", 101)
    ),
    "scale exponent of -2^31": listed("scale exponent out of range", field(136, "<i", -(1 << 31))),
    "error of a matrix": listed("relative error is not a finite number", field(140, "<f", float("-inf"))),
    "reserved behind a matrix": listed("reserved bytes are not zero", field(128 + 63, "B", 1)),
    # the sections
    "section of kind 0": listed("unknown kind of section .found 0", field(320, "B", 0)),
    "section of matrix 3": listed("section of an unknown matrix .found 3", field(321, "B", 3)),
    "section in the header": listed("shared.codebooks is out of place .expected 1024, found 0", field(328, "<Q", 0)),
    "section near 2^64": listed("is out of place .*found 18446744073709551552", field(328, "<Q", (1 << 64) - 64)),
    "section of no bytes": listed("does not fit the record .*found 0", field(336, "<Q", 0)),
    "section of 2^63 bytes": listed("does not fit the record .*found 9223372036854775808", field(336, "<Q", 1 << 63)),
    "section one byte longer": listed(PLACE, field(336, "<Q", lambda old: old + 1)),
    "sections exchanged": listed("out of place", sections(swap_entries)),
    "sections that overlap": listed("gate.scales is out of place", sections(overlap)),
    "two sections of one kind": listed(f"{PLACE}.*sections are out of order", sections(two_of_one_kind)),
    "reserved in a section": listed("reserved bytes are not zero", field(320 + 31, "B", 1)),
    "reserved behind the sections": listed("reserved bytes are not zero", field(1023, "B", 1)),
    "digest of a section": listed(
        f"{PLACE}section shared.codebooks differs from its digest in the header", field(320 + 32, "32s", bytes(32))
    ),
    "padding behind the payload": listed(
        f"{PLACE}padding is not zero", lambda forge: field(forge.header(2, 1).record_bytes - 1, "B", 7)(forge)
    ),
    # digests kept: the record against the index
    "record against its digest": listed(
        f"{PLACE}record differs from its digest in the index", field(1024, "<H", 0), keep=("records",)
    ),
    # other codecs
    "mxfp4 bias": listed(
        "layer 1 expert 1: bias is not source.scale_bias|disagrees",
        lambda forge: forge.patch_record(1, 1, 48, "B", 126),
        spec=MXFP4_SPEC,
    ),
}

# What no digest and no length gives away; decoding alone refuses it. All of all_codecs(), layer 1: (expert, attack,
# message).
UNDECODABLE: dict[str, tuple[int, Attack, str]] = {
    "rvq codebook is infinite": (
        0,
        section_bytes(1, 0, SectionKind.CODEBOOKS, b"\x00\x7c"),
        "codebooks.*NaN or infinity",
    ),
    "rvq scale is no number": (0, section_bytes(1, 0, SectionKind.SCALES, b"\x00\x7e"), "scales.*NaN or infinity"),
    "rvq index past the codebook": (0, section_bytes(1, 0, SectionKind.CODES, b"\x10"), "expected below 16|16"),
    "rvq index of 255": (0, section_bytes(1, 0, SectionKind.CODES, b"\xff"), "found 255"),
    "dty-03 mxfp4 scale byte 255": (2, section_bytes(1, 2, SectionKind.SCALES, b"\xff"), "255"),
    "mxfp4 with a scale exponent": (2, lambda forge: forge.patch_record(1, 2, 136, "<i", 1), "scale exponent.*found 1"),
    "group_int scale is infinite": (3, section_bytes(1, 3, SectionKind.SCALES, b"\x00\xfc"), "scales.*NaN or infinity"),
    "group_int scale is no number": (
        4,
        section_bytes(1, 4, SectionKind.SCALES, b"\x01\x7c"),
        "scales.*NaN or infinity",
    ),
    "raw with a scale exponent": (5, lambda forge: forge.patch_record(1, 5, 136, "<i", -1), "scale exponent.*found -1"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_record(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_case(CASES[case], tmp_path, capsys)


@pytest.mark.parametrize("case", list(UNDECODABLE))
def test_undecodable(case: str, tmp_path: Path) -> None:
    """Sealed nonsense: every digest agrees, and a reader that decodes the record refuses it, naming it."""
    expert, attack, message = UNDECODABLE[case]
    forge = Forge(build_container(tmp_path / "model.moepack", all_codecs()))
    attack(forge)
    with open_container(forge.save()) as container:
        record = container.record(1, expert)
        with pytest.raises(FormatError) as refused:
            record.matrix(Matrix.GATE)
    assert f"layer 1 expert {expert}" in str(refused.value)
    assert re.search(message, str(refused.value)), str(refused.value)
    assert refused.value.exit_code == 3
