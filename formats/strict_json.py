"""JSON from untrusted files: one reader for manifests, configurations, indices and shard headers.

The standard parser is lenient where a format must not be. Here duplicate keys, byte order marks, invalid
UTF-8, unpaired surrogates, NUL characters, NaN, endless digits, bottomless nesting and more values than any honest
document has are all refused with a :class:`~formats.errors.FormatError` that names the file. Types are not coerced:
``1.0`` stays a float and ``true`` a bool, so that whoever converts the result can insist on an integer.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from formats.errors import FormatError

MAX_DIGITS = 20  # 2**64 has 20; nothing that we read is larger
MAX_DEPTH = 64
MAX_VALUES = 1 << 20  # the index of K3, the longest document that we read, has 497,220 entries


def parse(data: bytes, *, where: str) -> Any:
    """Parse ``data`` strictly.

    Args:
        data: the whole document.
        where: the file's name, for messages.

    Raises:
        FormatError: whatever is wrong, with the place as far as it is known.
    """
    values = data.count(b",") + data.count(b"[") + data.count(b"{")  # no fewer than it has, for each follows one
    if values > MAX_VALUES:
        raise FormatError("JSON holds too many values", where=where, expected=f"at most {MAX_VALUES}", found=values)
    if data.startswith(b"\xef\xbb\xbf"):
        raise FormatError("JSON starts with a byte order mark", where=where, offset=0)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError("JSON is not valid UTF-8", where=where, offset=error.start) from None

    def whole(digits: str) -> int:
        if len(digits) <= MAX_DIGITS:
            return int(digits)
        raise FormatError("number is too long", where=where, expected=f"at most {MAX_DIGITS} digits", found=len(digits))

    def real(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise FormatError("number is out of range", where=where, found=digits[:80])
        return value

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
        value = json.loads(text, object_pairs_hook=pairs, parse_int=whole, parse_float=real, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise FormatError(f"not JSON: {error.msg}", where=where, offset=_byte_offset(text, error.pos)) from None
    except RecursionError:
        raise FormatError("JSON is nested too deeply", where=where) from None
    _check_tree(value, "\\u" in text, where)
    return value


def parse_object(data: bytes, *, where: str) -> dict[str, Any]:
    """Like :func:`parse`, and insist on an object at the top."""
    value = parse(data, where=where)
    if not isinstance(value, dict):
        raise FormatError("JSON document is not an object", where=where, found=type(value).__name__)
    return value


def _byte_offset(text: str, position: int) -> int:
    """Where in the encoded document the character at ``position`` starts."""
    return len(text[:position].encode("utf-8", "replace"))


def _check_tree(value: Any, has_escapes: bool, where: str) -> None:
    """Refuse what the parser lets through: moderately deep nesting, and strings that only escapes can spell.

    The parser itself stops at the interpreter's recursion limit, so ``value`` is of bounded depth here; UTF-8 cannot
    hold an unpaired surrogate and JSON no bare NUL, so strings need a look only if there are escapes.
    """
    level: list[Any] = [value]  # what is inside of `depth` objects or lists; without escapes only objects and lists
    depth = 0
    while level:
        if has_escapes:
            _check_strings(level, where)
        nests = [item for item in level if type(item) is dict or type(item) is list]
        if nests and depth == MAX_DEPTH:
            raise FormatError("JSON is nested too deeply", where=where, expected=f"at most {MAX_DEPTH} levels")
        level = [
            value
            for item in nests
            for value in (item.values() if type(item) is dict else item)
            if has_escapes or type(value) is dict or type(value) is list
        ]
        depth += 1


def _check_strings(items: list[Any], where: str) -> None:
    for item in items:
        for text in (item,) if isinstance(item, str) else item if isinstance(item, dict) else ():
            if "\0" in text:
                raise FormatError("JSON string has a NUL", where=where, found=repr(text[:40]))
            if not text.isascii() and any(0xD800 <= ord(char) <= 0xDFFF for char in text):
                raise FormatError("JSON string has an unpaired surrogate", where=where, found=repr(text[:40]))
