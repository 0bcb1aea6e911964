"""index.bin: headers and rows that lie, each with the verdict of ``moepack verify``."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.alter import exchange, write_field
from tests.support.containers import Forge
from tests.support.verdicts import CLOSED, LISTED, Attack, Case, flip, patch, resize, run_case

NAME = "index.bin"
LAYER_2 = 128 * (1 + 4)  # where the rows of layer 2 start: the header, and four rows of layer 1


def header(at: int, form: str, value: Any) -> Attack:
    """Write a field of the header."""
    return lambda forge: struct.pack_into(form, forge.index, at, value)


def row(at: int, form: str, value: Any) -> Attack:
    """Write a field of the row of layer 2 expert 1; a function gets the old value."""

    return lambda forge: write_field(forge.index, forge.row_at(2, 1) + at, form, value)


def exchanged(first: tuple[int, int], second: tuple[int, int]) -> Attack:
    """Two rows in each other's place."""

    return lambda forge: exchange(forge.index, forge.row_at(*first), forge.row_at(*second), 128)


def closed(message: str, attack: Attack) -> Case:
    return Case(CLOSED, message, attack)


def listed(message: str, attack: Attack, *keep: str) -> Case:
    """A finding about the rows of layer 2; digests of records stay, for rows and records no longer fit."""
    return Case(LISTED, message, attack, keep=("records", *keep))


def damaged(exit_code: int, message: str, afterwards: Callable[[Path], object]) -> Case:
    return Case(exit_code, message, afterwards=afterwards)


def zeroed_row(forge: Forge) -> None:
    place = forge.row_at(2, 1)
    forge.index[place : place + 128] = bytes(128)


def repeated_row(forge: Forge) -> None:
    one, two = forge.row_at(2, 0), forge.row_at(2, 1)
    forge.index[two : two + 128] = forge.index[one : one + 128]


HUGE = (1 << 64) - 4096
AT_ROW = f"index.bin at byte {LAYER_2 + 128}"
NOT_CHECKED = "layer 2: .*4 records not checked"

CASES: dict[str, Case] = {
    # the file
    "ctr-03 empty": damaged(CLOSED, "index.bin: .*another length.*found 0", resize(NAME, lambda n: 0)),
    "ctr-03 cut in its header": damaged(CLOSED, "index.bin: .*another length.*found 60", resize(NAME, lambda n: 60)),
    "ctr-03 cut in a row": damaged(
        CLOSED, r"index.bin: .*another length.*expected 1536", resize(NAME, lambda n: n - 1)
    ),
    "ctr-04 one row less": damaged(CLOSED, "index.bin: .*another length.*found 1408", resize(NAME, lambda n: n - 128)),
    "ctr-04 one row more": damaged(CLOSED, "index.bin: .*another length.*found 1664", resize(NAME, lambda n: n + 128)),
    "ctr-05 bit flipped in a digest": damaged(LISTED, "index rows of layer 2 were changed", flip(NAME, LAYER_2 + 40)),
    "ctr-05 bit flipped in the last row": damaged(LISTED, "index rows of layer 3 were changed", flip(NAME, -1)),
    "ctr-05 bit flipped in an error": damaged(LISTED, "index rows of layer 1 were changed", flip(NAME, 128 + 64)),
    "ctr-05 zeros": damaged(CLOSED, "index.bin at byte 0: wrong magic", patch(NAME, 0, bytes(1536))),
    # the header
    "ctr-01 magic of a trunk": closed(
        "index.bin at byte 0: wrong magic .expected MOEPACKI", header(0, "8s", b"MOEPACKT")
    ),
    "ctr-01 magic reversed": closed("index.bin at byte 0: .*other byte order", header(0, "8s", b"IKCAPEOM")),
    "ctr-02 version 0": closed("index.bin at byte 8: unknown format version .expected 1, found 0", header(8, "<H", 0)),
    "ctr-02 version 999": closed("at byte 8: unknown format version .expected 1, found 999", header(8, "<H", 999)),
    "ctr-02 version in the other byte order": closed("expected 1, found 256", header(8, ">H", 1)),
    "reserved in the preamble": closed("index.bin at byte 10: reserved bytes are not zero", header(10, "B", 1)),
    "reserved in the header": closed("index.bin at byte 24: reserved bytes are not zero", header(127, "B", 128)),
    "ctr-08 rows of 0 bytes": closed("at byte 12: .*unknown width .expected 128, found 0", header(12, "<I", 0)),
    "ctr-08 rows of 2^32 - 1 bytes": closed("unknown width .*found 4294967295", header(12, "<I", (1 << 32) - 1)),
    "ctr-08 no rows": closed("at byte 16: .*another number of rows .expected 11, found 0", header(16, "<Q", 0)),
    "ctr-08 2^64 - 1 rows": closed(
        "another number of rows .*found 18446744073709551615", header(16, "<Q", (1 << 64) - 1)
    ),
    "ctr-08 rows that wrap": closed("another number of rows", header(16, "<Q", (1 << 57) + 11)),
    # rows, with every digest right
    "row of another layer": listed(f"{AT_ROW}: index row of another layer .expected 2, found 3", row(0, "<I", 3)),
    "row of layer 2^32 - 1": listed("index row of another layer .*found 4294967295", row(0, "<I", (1 << 32) - 1)),
    "expert twice": listed(f"{AT_ROW}: experts are not in ascending order .expected 1 to 3, found 0", row(4, "<I", 0)),
    "expert past the last": listed("not in ascending order .expected 1 to 3, found 4", row(4, "<I", 4)),
    "expert of 2^32 - 1": listed("not in ascending order .*found 4294967295", row(4, "<I", (1 << 32) - 1)),
    "source expert twice": listed("source expert stands twice or was dropped", row(8, "<I", 0)),
    "source expert past the last": listed("source expert out of range .expected below 4, found 4", row(8, "<I", 4)),
    "ctr-08 codec 0": listed(
        f"index.bin at byte {LAYER_2 + 128 + 12}: unknown codec .expected 1 to 4, found 0", row(12, "<H", 0)
    ),
    "ctr-08 codec 65535": listed("unknown codec .*found 65535", row(12, "<H", 65_535)),
    "ctr-10 another codec": listed("layer 2 expert 1: .*disagrees about its codec", row(12, "<H", lambda old: 5 - old)),
    "ctr-02 critical flag": listed("unknown critical flags .expected 0, found 1", row(14, "<H", 1)),
    "ctr-07 offset not of a page": listed("not page aligned or out of range", row(16, "<Q", lambda old: old + 512)),
    "ctr-07 gap before a record": listed(
        f"{AT_ROW}: record does not follow the one before", row(16, "<Q", lambda old: old + 4096)
    ),
    "ctr-07 records that share a page": listed(
        "record does not follow the one before", row(16, "<Q", lambda old: old - 4096)
    ),
    "ctr-07 record at the start again": listed("record does not follow the one before .*found 0", row(16, "<Q", 0)),
    "ctr-07 offset near 2^64": listed("page aligned or out of range .*18446744073709547520", row(16, "<Q", HUGE)),
    "ctr-07 offset and length wrap": listed("page aligned or out of range", row(24, "<Q", HUGE)),
    "ctr-07 length of 0": listed("page aligned or out of range", row(24, "<Q", 0)),
    "ctr-07 length not of a page": listed("page aligned or out of range", row(24, "<Q", lambda old: old - 1)),
    "ctr-07 length one page more": listed("does not follow the one before", row(24, "<Q", lambda old: old + 4096)),
    "ctr-08 length of 2^62": listed("page aligned or out of range", row(24, "<Q", 1 << 62)),
    "error is no number": listed(
        f"at byte {LAYER_2 + 128 + 64}: relative error is not a finite", row(64, "<f", float("nan"))
    ),
    "error is infinite": listed("relative error is not a finite number", row(76, "<f", float("inf"))),
    "error below zero": listed("relative error is not a finite number", row(72, "<f", -0.5)),
    "error embellished": listed("layer 2 expert 1: .*disagrees about its errors", row(64, "<f", lambda old: old / 2)),
    "error above the limit": listed(
        "layer 2 expert 1 gate: relative error is above the recipe's limit .expected at most 0.5, found 0.75",
        row(64, "<f", 0.75),
    ),
    "parameters of another codebook": listed("disagrees about its codec parameters", row(84, "<H", 17)),
    "reserved in a row": listed(f"at byte {LAYER_2 + 128 + 96}: reserved bytes are not zero", row(127, "B", 1)),
    "ctr-06 digest of another record": listed(
        "layer 2 expert 1: record differs from its digest in the index", row(32, "32s", bytes(32))
    ),
    "ctr-06 rows exchanged": listed(NOT_CHECKED, exchanged((2, 0), (2, 1))),
    "ctr-06 rows of two layers exchanged": listed("index row of another layer", exchanged((1, 0), (2, 0))),
    "row of zeros": listed(NOT_CHECKED, zeroed_row),
    "row twice": listed("not in ascending order .expected 1 to 3, found 0", repeated_row),
    # rows, with the digests above them left as they were
    "rows of a layer against its digest": listed("index rows of layer 2 were changed", row(64, "<f", 0.125), "layers"),
    "the file against its digest": listed("index.bin: .*differ", row(64, "<f", 0.125), "index"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_index(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_case(CASES[case], tmp_path, capsys)
