"""Hostile and damaged shards: each malformation, the verdict it must get, and what the message must name.

Every case is refused with FormatError (exit code 3) before any tensor data are read.
"""

from __future__ import annotations

import itertools
import json
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import MoepackError
from formats.families import bind
from tests.attacks.alter import check_refused
from tests.support.checkpoints import K3, write_checkpoint
from tests.support.shards import Tensor, write_raw_shard, write_safetensors
from tests.support.spoil import PAGE, POINTER, SHARD, Attack, split, verdict


def replaced(content: bytes | str) -> Attack:
    return lambda d: (d / SHARD).write_bytes(content.encode() if isinstance(content, str) else content)


def cut(keep: Callable[[int, int], int]) -> Attack:
    """Keep so many bytes, given the lengths of header and file."""

    def attack(directory: Path) -> None:
        raw = (directory / SHARD).read_bytes()
        (directory / SHARD).write_bytes(raw[: keep(int.from_bytes(raw[:8], "little"), len(raw))])

    return attack


def announced(length: Callable[[int], int]) -> Attack:
    """Announce another header length, given the file's."""

    def attack(directory: Path) -> None:
        raw = (directory / SHARD).read_bytes()
        (directory / SHARD).write_bytes((length(len(raw)) % (1 << 64)).to_bytes(8, "little") + raw[8:])

    return attack


def header_text(edit: Callable[[bytes], bytes]) -> Attack:
    """Change the header's text, keeping the data."""

    def attack(directory: Path) -> None:
        header, data = split(directory / SHARD)
        write_raw_shard(directory / SHARD, edit(json.dumps(header).encode()), data)

    return attack


def entry(change: Callable[[dict[str, Any], list[str]], Any]) -> Attack:
    """Change the parsed header; the names are ordered by offset."""

    def attack(directory: Path) -> None:
        header, data = split(directory / SHARD)
        names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        change(header, names)
        write_raw_shard(directory / SHARD, json.dumps(header).encode(), data)

    return attack


def member(key: str, value: Any) -> Attack:
    return entry(lambda header, names: header[names[1]].__setitem__(key, value))


def offsets(change: Callable[[list[int]], list[int]]) -> Attack:
    return entry(lambda h, n: h[n[1]].__setitem__("data_offsets", change(h[n[1]]["data_offsets"])))


def coincide(header: dict[str, Any], names: list[str]) -> None:
    """Two tensors of one size over one span, the second's own span unused."""
    first, second = next((a, b) for a, b in itertools.pairwise(names) if header[a]["shape"] == header[b]["shape"])
    header[second]["data_offsets"] = header[first]["data_offsets"]


HEADER_ATTACKS: dict[str, tuple[Attack, str]] = {
    "src-01 empty": (replaced(b""), r"cut short inside its length field .*found 0"),
    "src-01 seven bytes": (replaced(b"\x20" + bytes(6)), r"cut short inside its length field .*found 7"),
    "src-01 eight bytes": (
        replaced(b"\x20" + bytes(7)),
        r"cut short inside its header .*expected 40 bytes or more, found 8",
    ),
    "src-01 cut inside the header": (cut(lambda header, size: header // 2), "cut short inside its header"),
    "src-01 cut inside the data": (cut(lambda header, size: 8 + header + (size - header) // 2), "ends past the data"),
    "src-01 no data": (cut(lambda header, size: 8 + header), "ends past the data"),
    "src-01 one byte short": (
        cut(lambda header, size: size - 1),
        r"ends past the data.*expected at most \d+, found \d+",
    ),
    "src-01 one byte more": (
        lambda d: (d / SHARD).write_bytes((d / SHARD).read_bytes() + b"\0"),
        "unused bytes after",
    ),
    "src-02 zero": (announced(lambda size: 0), r"header length is out of range .*expected 2 to 100000000, found 0"),
    "src-02 one": (announced(lambda size: 1), r"header length is out of range .*found 1"),
    "src-02 file length": (announced(lambda size: size), "cut short inside its header"),
    "src-02 one too many": (announced(lambda size: size - 8 + 1), "cut short inside its header"),
    "src-02 file length plus one": (announced(lambda size: size + 1), "cut short inside its header"),
    "src-02 above the limit": (announced(lambda size: 100_000_001), "header length is out of range .*found 100000001"),
    "src-02 sign bit": (announced(lambda size: 1 << 63), "header length is out of range .*found 9223372036854775808"),
    "src-02 minus one": (announced(lambda size: -1), "header length is out of range .*found 18446744073709551615"),
    "src-02 wraps": (announced(lambda size: -8), "header length is out of range .*found 18446744073709551608"),
    "src-03 overlap by one byte": (
        entry(
            lambda h, n: [h[n[k]].__setitem__("data_offsets", [x - 1 for x in h[n[k]]["data_offsets"]]) for k in [1]]
        ),
        r"tensor .* overlaps .*expected start at byte",
    ),
    "src-03 coincide": (entry(coincide), "overlaps"),
    "src-03 gap of one byte": (
        entry(lambda h, n: [h[k].__setitem__("data_offsets", [x + 1 for x in h[k]["data_offsets"]]) for k in n[1:]]),
        "ends past the data",
    ),
    "src-03 hidden tensor": (entry(lambda h, n: h.pop(n[1])), "leaves unused bytes after"),
    "src-03 hidden bytes at the start": (
        entry(lambda h, n: h.pop(n[0])),
        "leaves unused bytes after the start of the data",
    ),
    "src-03 hidden bytes at the end": (entry(lambda h, n: h.pop(n[-1])), "unused bytes after .*expected end of file"),
    "src-03 backwards": (offsets(lambda o: [o[1], o[0]]), "run backwards or start below zero"),
    "src-03 below zero": (offsets(lambda o: [-1, o[1]]), "run backwards or start below zero .*found -1 to"),
    "src-03 past the data": (offsets(lambda o: [o[0], 1 << 40]), "ends past the data"),
    "src-03 beyond 64 bits": (offsets(lambda o: [0, 18446744073709551615]), "ends past the data"),
    "src-03 three offsets": (offsets(lambda o: [*o, o[1]]), "data_offsets are not two integers"),
    "src-03 real offset": (offsets(lambda o: [float(o[0]), o[1]]), "data_offsets are not two integers"),
    "src-03 true offset": (offsets(lambda o: [False, o[1]]), "data_offsets are not two integers"),
    "src-04 one key twice": (
        header_text(
            lambda t: re.sub(rb'("[^"]+": )(\{"dtype": "U8"[^}]*\})', rb"\1\2, \1\2", t, count=1).replace(
                b'"U8"', b'"I8"', 1
            )
        ),
        "duplicate key",
    ),
    "src-04 one member twice": (
        header_text(lambda t: t.replace(b'"shape"', b'"dtype": "I8", "shape"', 1)),
        "duplicate key 'dtype'",
    ),
    "src-05 byte order mark": (header_text(lambda t: b"\xef\xbb\xbf" + t), "does not start with a brace"),
    "src-05 blanks before the brace": (header_text(lambda t: b"   " + t), "does not start with a brace"),
    "src-05 invalid UTF-8": (header_text(lambda t: t.replace(b"self_attn", b"self\xffattn", 1)), "not valid UTF-8"),
    "src-05 surrogate": (header_text(lambda t: t.replace(b"self_attn", b"self\\ud800attn", 1)), "unpaired surrogate"),
    "src-05 NUL": (header_text(lambda t: t.replace(b"self_attn", b"self\\u0000attn", 1)), "NUL"),
    "src-05 escape code": (header_text(lambda t: t.replace(b"self_attn", b"\\u001b[31m", 1)), "control character"),
    "src-05 newline": (header_text(lambda t: t.replace(b"self_attn", b"self\\nattn", 1)), "control character"),
    "src-05 name without end": (header_text(lambda t: t.replace(b"self_attn", b"x" * 5000, 1)), "empty or too long"),
    "src-05 NUL padding": (header_text(lambda t: t + bytes(8)), "not JSON"),
    "src-05 list": (header_text(lambda t: b"[" + t + b"]"), "does not start with a brace"),
    "src-06 real dimension": (member("shape", [1.0]), r"dimension is not an integer in range .*found 1.0"),
    "src-06 text dimension": (member("shape", ["1"]), "dimension is not an integer in range"),
    "src-06 true dimension": (member("shape", [True]), "dimension is not an integer in range .*found True"),
    "src-06 2^63": (member("shape", [1 << 63]), "dimension is not an integer in range .*found 9223372036854775808"),
    "src-06 2^64 - 1": (member("shape", [0, (1 << 64) - 1]), "dimension is not an integer in range"),
    "src-06 endless digits": (
        header_text(lambda t: t.replace(b'"shape": [', b'"shape": [' + b"9" * 100_000 + b", ", 1)),
        "number is too long",
    ),
    "src-06 bottomless": (
        header_text(lambda t: b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "nested too deeply",
    ),
    "src-06 shape is no list": (member("shape", 5), "shape is not a list"),
    "src-07 span too small": (
        member("shape", [1000, 1000]),
        r"do not fill the span .*expected \d+ bytes, found \d+ bytes",
    ),
    "src-07 span too large": (member("shape", []), "do not fill the span"),
    "src-08 unknown dtype": (member("dtype", "Q9"), r"unknown dtype .*found 'Q9'"),
    "src-08 unknown dtype of an unused tensor": (
        entry(lambda h, n: h.__setitem__("unused", {"dtype": "Q9", "shape": [0], "data_offsets": [0, 0]})),
        "unused: unknown dtype",
    ),
    "src-08 dtype is no text": (member("dtype", None), "unknown dtype"),
    "shp-07 wrapped product": (
        member("shape", [1 << 20, 1 << 20]),
        "do not fill the span .*expected 1099511627776 bytes|do not fill the span",
    ),
    "shp-07 wraps to eight": (member("shape", [(1 << 42) + 1, 1 << 22]), "do not fill the span"),
    "shp-07 negative": (member("shape", [-4, 4]), "dimension is not an integer in range .*found -4"),
    "shp-07 two negatives": (member("shape", [-4, -4]), "dimension is not an integer in range"),
    "shp-07 rank nine": (member("shape", [1] * 9), "too many dimensions .*expected at most 8, found 9"),
    "member absent": (entry(lambda h, n: h[n[1]].pop("dtype")), "tensor entry has other members"),
    "member unknown": (member("compression", "zstd"), "tensor entry has other members .*found compression"),
    "entry is a list": (entry(lambda h, n: h.__setitem__(n[1], [])), "tensor entry has other members .*found list"),
    "metadata of numbers": (
        entry(lambda h, n: h.__setitem__("__metadata__", {"a": 1})),
        "__metadata__ is not an object of strings",
    ),
    "metadata is a list": (
        entry(lambda h, n: h.__setitem__("__metadata__", [])),
        "__metadata__ is not an object of strings",
    ),
    "fet-06 pointer": (replaced(POINTER), "a Git LFS pointer to sha256:abab.*, 16777216 bytes"),
    "fet-05 page": (replaced(PAGE), "an HTML page beginning '<!DOCTYPE html>'"),
    "src-16 pickle under a shard's name": (replaced(b"PK\x03\x04" + bytes(100)), "never opened"),
}


@pytest.mark.parametrize("case", list(HEADER_ATTACKS))
def test_malformed_shard(case: str, tmp_path: Path) -> None:
    assert SHARD in check_refused(tmp_path, *HEADER_ATTACKS[case])


@pytest.mark.parametrize("length", [100_000_000, 100_000_001, 1 << 40, 1 << 63, (1 << 64) - 1])
def test_src_02_nothing_is_allocated_for_a_length(length: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    announced(lambda size: length)(tmp_path)
    tracemalloc.start()
    try:
        verdict(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_src_01_every_cut_of_a_small_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    write_safetensors(tmp_path / SHARD, {"t": Tensor("U8", (3, 5), bytes(15)), "u": Tensor("F32", (2,), bytes(8))})
    whole = (tmp_path / SHARD).read_bytes()
    for length in range(len(whole)):
        (tmp_path / SHARD).write_bytes(whole[:length])
        assert SHARD in verdict(tmp_path)


def test_flipping_any_byte_of_a_header_never_escapes(tmp_path: Path) -> None:
    """Whatever a header says, the answer is a refusal or a sound checkpoint."""
    write_checkpoint(tmp_path, K3)
    raw = (tmp_path / SHARD).read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    for at in [*range(8), *range(8, length, 37)]:
        changed = bytearray(raw)
        changed[at] ^= 0x80 if at % 2 else 0x01
        (tmp_path / SHARD).write_bytes(changed)
        try:
            bind(open_checkpoint(tmp_path))
        except MoepackError as error:
            assert error.exit_code == 3  # noqa: PT017 - either outcome is allowed, no other error is
