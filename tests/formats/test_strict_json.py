"""What the strict parser refuses that the standard one accepts, and that it stays quick on hostile documents."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.strict_json import MAX_DEPTH, MAX_VALUES, parse, parse_object


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\xff"}', r"at byte 7: JSON is not valid UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not valid UTF-8"),
        (b"\xff\xfe{\x00}\x00", "not valid UTF-8"),
        (b'{"a": "\\ud800"}', "unpaired surrogate"),
        (b'{"\\udc00x": 1}', "unpaired surrogate"),
        (b'[["\\udfff"]]', "unpaired surrogate"),
        (b'{"a": "\\u0000"}', "NUL"),
        (b'{"a\\u0000": 1}', "NUL"),
        (b'{"a": "\x00"}', "control character"),
        (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
        (b'{"x": [{"b": {"c": 1, "c": 2}}]}', "duplicate key 'c'"),
        (b'{"a": 1, "\\u0061": 2}', "duplicate key 'a'"),
        (b'{"a": NaN}', "found NaN"),
        (b"[Infinity]", "found Infinity"),
        (b"[-Infinity]", "found -Infinity"),
        (b"[1e999]", "out of range"),
        (b"[" + b"9" * 100_000 + b"]", "number is too long"),
        (b"", "not JSON"),
        (b"{} x", "at byte 3: not JSON"),
        ("{'é': 1}".encode(), "at byte 1: not JSON"),
        ('{"é": x}'.encode(), "at byte 7: not JSON"),
        (b'{"a": 1,}', "not JSON"),
        (b"[01]", "not JSON"),
        (b"{}\x00\x00", "not JSON"),
    ],
)
def test_src_05_documents_that_are_refused(document: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        parse(document, where="file")
    assert caught.value.where == "file"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("depth", [100_000, 1_000_000])
def test_src_06_bottomless_nesting_is_refused(opening: bytes, closed: bool, depth: int) -> None:
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    with pytest.raises(FormatError, match="nested too deeply"):
        parse(opening * depth + (b"1" + closing * depth if closed else b""), where="file")


def test_src_06_depth_limit_is_exact() -> None:
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, where="file")
    assert parse(b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH, where="file")
    for depth in (MAX_DEPTH + 1, MAX_DEPTH + 2, 500):
        for inner in (b"", b"1", b"{}"):
            with pytest.raises(FormatError, match="nested too deeply"):
                parse(b"[" * depth + inner + b"]" * depth, where="file")


@pytest.mark.parametrize("unit", [b"[]", b"{}", b"0", b'""', b'"a":0', b'{"a":0}'])
def test_number_of_values_is_bounded_before_they_are_made(unit: bytes) -> None:
    opening, closing = (b"{", b"}") if unit == b'"a":0' else (b"[", b"]")
    document = opening + b",".join([unit] * (12_000_000 // len(unit))) + closing
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=f"too many values .*expected at most {MAX_VALUES}, found "):
            parse(document, where="file")
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_limit_of_values_is_exact() -> None:
    """An opening bracket, a comma behind each value but the last."""
    assert parse(b"[" + b"0," * (MAX_VALUES - 1) + b"0]", where="file") == [0] * MAX_VALUES
    with pytest.raises(FormatError, match=f"expected at most {MAX_VALUES}, found {MAX_VALUES + 1}"):
        parse(b"[" + b"0," * MAX_VALUES + b"0]", where="file")


def test_brackets_inside_strings_are_no_nesting() -> None:
    text = "[{" * 1000 + '"\\'
    assert parse(json.dumps({text: [text] * 100}).encode(), where="file") == {text: [text] * 100}


def test_wide_documents_are_no_nesting() -> None:
    assert len(parse(b"[" + b"[{}]," * 10_000 + b"[]]", where="file")) == 10_001


def test_types_are_not_coerced() -> None:
    value = parse(b'{"f": 1.0, "e": 1e3, "b": true, "s": "1", "n": null, "i": -3}', where="file")
    assert [type(item) for item in value.values()] == [float, float, bool, str, type(None), int]


def test_largest_integers() -> None:
    assert parse(b"[18446744073709551615, -9223372036854775808]", where="f") == [(1 << 64) - 1, -(1 << 63)]


def test_paired_surrogates_are_one_character() -> None:
    assert parse(b'["\\ud83d\\ude42"]', where="file") == ["🙂"]


@pytest.mark.parametrize("document", [b"[]", b'"x"', b"1", b"null"])
def test_top_must_be_an_object(document: bytes) -> None:
    with pytest.raises(FormatError, match="not an object"):
        parse_object(document, where="file")


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | TEXT
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


@given(TREES, st.booleans())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_agrees_with_the_standard_parser_on_sound_documents(tree: object, ascii_only: bool) -> None:
    assert parse(json.dumps(tree, ensure_ascii=ascii_only).encode(), where="file") == tree


@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_any_bytes_parse_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(FormatError):
        parse(data, where="file")
