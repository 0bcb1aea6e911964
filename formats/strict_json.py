"""JSON from untrusted files: one reader for manifests, configurations, indices and shard headers.

The standard parser is lenient where a format must not be. Here duplicate keys, byte order marks, invalid
UTF-8, unpaired surrogates, NUL characters, NaN, endless digits and bottomless nesting are all refused with
a :class:`~formats.errors.FormatError` that names the file. Types are not coerced: ``1.0`` stays a float and
``true`` a bool, so that whoever converts the result can insist on an integer.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from formats.errors import FormatError

MAX_DIGITS = 20  # 2**64 has 20; nothing that we read is larger
MAX_DEPTH = 64


def parse(data: bytes, *, where: str) -> Any:
    """Parse ``data`` strictly.

    Args:
        data: the whole document.
        where: the file's name, for messages.

    Raises:
        FormatError: whatever is wrong, with the place as far as it is known.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise FormatError("JSON starts with a byte order mark", where=where, offset=0)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("JSON is not valid UTF-8", where=where, offset=error.start) from None
    _check_depth(data, where)

    def whole(digits: str) -> int:
        if len(digits) > MAX_DIGITS:
            raise FormatError(
                "number is too long", where=where, expected=f"at most {MAX_DIGITS} digits", found=len(digits)
            )
        return int(digits)

    def constant(name: str) -> NoReturn:
        raise FormatError("JSON has a constant that is no number", where=where, found=name)

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: set[str] = set()
            for key, _ in items:
                if key in seen:
                    raise FormatError(f"duplicate key {key!r}", where=where)
                seen.add(key)
        return result

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_int=whole, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg}", where=where, offset=error.pos) from None
    except RecursionError:
        raise FormatError("JSON is nested too deeply", where=where) from None
    if "\\u" in text:
        _check_strings(value, where)
    return value


def parse_object(data: bytes, *, where: str) -> dict[str, Any]:
    """Like :func:`parse`, and insist on an object at the top."""
    value = parse(data, where=where)
    if not isinstance(value, dict):
        raise FormatError("JSON document is not an object", where=where, found=type(value).__name__)
    return value


def _check_depth(data: bytes, where: str) -> None:
    """Refuse deep nesting before the parser recurses; brackets inside strings are not counted."""
    opening = data.count(b"[") + data.count(b"{")
    if opening <= MAX_DEPTH:
        return
    # An exact walk is slow in Python, and real documents are shallow but long: take the strings out first.
    depth = deepest = 0
    for piece in _outside_strings(data):
        for byte in piece:
            if byte in b"[{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise FormatError("JSON is nested too deeply", where=where, expected=f"at most {MAX_DEPTH}")
            elif byte in b"]}":
                depth -= 1
        deepest = max(deepest, depth)


def _outside_strings(data: bytes) -> list[bytes]:
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return [piece.translate(None, b" \t\r\n0123456789.,:-+eE") for piece in data.split(b'"')[::2]]


def _check_strings(value: Any, where: str) -> None:
    """Escapes can spell what UTF-8 cannot: unpaired surrogates. Look for them in every string."""
    if isinstance(value, str):
        if any(0xD800 <= ord(char) <= 0xDFFF for char in value):
            raise FormatError("JSON string has an unpaired surrogate", where=where, found=repr(value[:40]))
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_strings(key, where)
            _check_strings(item, where)
    elif isinstance(value, list):
        for item in value:
            _check_strings(item, where)
