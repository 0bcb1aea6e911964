"""The header parser against the safetensors library: what we accept, the library accepts and reads the same."""

from __future__ import annotations

import json
from typing import Any

import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.shard import parse_header

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "U16": 2, "U8": 1, "BOOL": 1}
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), min_size=1, max_size=12)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A sound header, its entries in any order, and the bytes of its data."""
    entries: dict[str, Any] = {}
    offset = 0
    for name in draw(st.lists(NAMES.filter(lambda n: n != "__metadata__"), max_size=5, unique=True)):
        dtype = draw(st.sampled_from(sorted(SIZES)))
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        size = SIZES[dtype]
        for side in shape:
            size *= side
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    keys = draw(st.permutations(list(entries)))
    header: dict[str, Any] = {key: entries[key] for key in keys}
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "pt"}
    return header, offset


@st.composite
def spoiled(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """The same with one value replaced."""
    header, size = draw(headers())
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return header, size + draw(st.integers(0, 1))
    entry = header[draw(st.sampled_from(names))]
    member = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    if member == "dtype":
        entry["dtype"] = draw(st.sampled_from([*SIZES, "Q9", "", 3]))
    else:
        numbers = st.integers(-2, 70) | st.sampled_from([1.0, True, "1", None, 1 << 63, (1 << 64) - 1])
        entry[member] = draw(st.lists(numbers, max_size=4))
    return header, size


def encode(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def library(text: bytes, data: bytes) -> dict[str, Any] | None:
    try:
        found = safetensors.deserialize(len(text).to_bytes(8, "little") + text + data)
    except Exception:
        return None
    return {name: (entry["dtype"], entry["shape"], bytes(entry["data"])) for name, entry in found}


def ours(text: bytes, data: bytes) -> dict[str, Any] | None:
    try:
        tensors = parse_header(text, len(data), name="shard")
    except FormatError:
        return None
    base = 8 + len(text)
    return {t.name: (t.dtype, list(t.shape), data[t.offset - base : t.offset - base + t.bytes]) for t in tensors}


@given(headers(), st.randoms(use_true_random=False))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_sound_headers_are_read_as_the_library_reads_them(case: tuple[dict[str, Any], int], random: Any) -> None:
    header, size = case
    data = random.randbytes(size)
    found = ours(encode(header), data)
    assert found is not None
    assert found == library(encode(header), data)


@given(spoiled())
@settings(derandomize=True, deadline=None, max_examples=400)
def test_what_is_accepted_the_library_accepts_too(case: tuple[dict[str, Any], int]) -> None:
    header, size = case
    found = ours(encode(header), bytes(size))
    if found is not None:
        assert found == library(encode(header), bytes(size))
