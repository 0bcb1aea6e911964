"""Documents of JSON and TOML made into structs: strict about types and ranges, and an error names the key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from formats.errors import MoepackError, UsageError
from packer.toml_bounds import check_bounds

_Kind = TypeVar("_Kind")
_NO_WORDS: Mapping[str, str] = MappingProxyType({})


def parsed_toml(data: bytes, *, what: str, where: str) -> dict[str, Any]:
    """The values of a TOML document, of a length that was bounded before.

    A byte order mark at the start, as editors on Windows write one, means nothing and is passed over.

    Args:
        data: the file.
        what: it is, for messages.
        where: for messages.

    Raises:
        UsageError: not UTF-8, not TOML, or beyond what is read of it here.
    """
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UsageError(f"{what} is not TOML: not UTF-8", where=where, offset=error.start) from None
    check_bounds(text, what=what, where=where)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{what} has lists or tables that are nested too deeply", where=where) from None
    except ValueError as error:
        raise UsageError(f"{what} is not TOML: {one_line(str(error))}", where=where) from None


def converted(
    document: Any,
    kind: type[_Kind],
    *,
    where: str,
    error: type[MoepackError] = UsageError,
    words: Mapping[str, str] = _NO_WORDS,
) -> _Kind:
    """Make a struct of plain values, checking types and ranges; ``error`` names the key and what stands there.

    Args:
        document: dictionaries, lists, strings, numbers.
        kind: a struct that is strict about its members.
        where: for messages.
        error: what to raise.
        words: what may stand at a key, by the last part of its name, where a list of alternatives says it best.

    Raises:
        MoepackError: of the kind ``error``.
    """
    try:
        return msgspec.convert(document, kind, strict=True)
    except msgspec.ValidationError as problem:
        what, _, path = str(problem).partition(" - at ")
        raise _in_our_words(what, _key(path), document, where, error, words) from None


def _in_our_words(
    what: str, key: str, document: Any, where: str, error: type[MoepackError], words: Mapping[str, str]
) -> MoepackError:
    """A message of msgspec (checked by tests against the real ones) as place, what, expected and found."""
    expected = words.get(key.rpartition(".")[2])
    found = _found(document, key)
    if match := re.fullmatch(r"Object missing required field `(.*)`", what, re.DOTALL):
        key, what, found = f"{key}.{match[1]}", "key is absent", None
    elif match := re.fullmatch(r"Object contains unknown field `(.*)`", what, re.DOTALL):
        key, what, found = f"{key}.{match[1]}", "unknown key", None
    elif match := re.fullmatch(r"Expected `(.*)`, got `(.*)`", what, re.DOTALL):
        what, expected = "value has the wrong type", expected or _type_word(match[1])
    elif match := re.fullmatch(r"Expected `(.*?)` (.*)", what, re.DOTALL):
        what, expected = "value is not allowed", expected or f"{_type_word(match[1])} {match[2]}"
    elif re.match(r"Invalid (enum )?value ", what):
        what = "unknown value"
    key = one_line(key.removeprefix("."))
    return error(one_line(what), where=f"{where}: {key}" if key else where, expected=expected, found=found)


def _type_word(name: str) -> str:
    """What TOML calls a type of msgspec."""
    return " or ".join({"object": "table", "array": "list"}.get(word, word) for word in name.split(" | "))


def _found(document: Any, key: str) -> str | None:
    """The value that stands at a dotted key, as a message shows it."""
    node = document
    for part in key.split(".") if key else ():
        try:
            node = node[int(part)] if isinstance(node, list | tuple) else node[part]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    try:
        return repr(node)[:80]
    except RecursionError:
        return "a table nested without end"


def _key(path: str) -> str:
    """``$.trunk[0].bits`` as messages write it: ``trunk.0.bits``."""
    return re.sub(r"\[([0-9]+)\]", r".\1", path.strip("`")).removeprefix("$").removeprefix(".")


def one_line(text: str) -> str:
    """A library's message without line breaks."""
    return " ".join(text.split())[:500]
