"""Bounds of a TOML document, kept before it is parsed: the parser's time must grow with the length of the file alone.

``tomllib`` copies the parts of a key for each of its parts, and those of a table's name for each key of the table: a
key of 32,000 parts costs 27 s, a table of 4,000 parts with 150,000 keys 165 s. So the parts of a key are counted
first, and the characters of a number: those of 5,000 digits Python neither reads nor, of hexadecimal ones, shows.

Outside of strings and comments, and between two of the characters ``= , [ ] { }`` or line breaks, TOML has either one
value, with one point at most, or one key. So dots that follow each other there are those of one key, and none is
missed: where strings and comments end is told here as the parser tells it, up to the first thing that is no TOML, and
there the parser ends.
"""

from __future__ import annotations

import re

from formats.errors import UsageError

MAX_KEY_PARTS = 8  # the deepest key of a recipe has three
MAX_DOTS = 4096  # in all: each part of a key takes the parser up to 1 KB; a recipe of 1,000 rules has as many numbers
MAX_WORD = 256  # characters of a number or of a key without quotes; a double at full length needs 24

_QUOTED = re.compile(
    r'"""(?:[^"\\]++|\\.|""?(?!"))*+"{0,5}'  # the end of three may follow one or two quotes that belong to the string
    r"|'''(?:[^']++|''?(?!'))*+'{0,5}"
    r'|"(?:[^"\\\n]++|\\.)*+"?'  # what has no end is taken to the end: the parser goes no further
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?:\.[^.=,\[\]{{}}\n]*+){{{MAX_KEY_PARTS}}}")  # as many dots
_LONG_WORD = re.compile(rf"(?<![A-Za-z0-9_+-])[A-Za-z0-9_+-]{{{MAX_WORD + 1}}}")


def check_bounds(text: str, *, what: str, where: str) -> None:
    """Refuse a document that would take long to parse for its length.

    Args:
        text: the document, of a length that was bounded before.
        what: it is, for messages.
        where: for messages.

    Raises:
        UsageError: a key has too many parts, or a number too many digits (the line is named), or there are too many
            keys of several parts.
    """
    bare = _QUOTED.sub(lambda match: "\n" * match[0].count("\n"), text)
    for pattern, problem, limit in (
        (_LONG_KEY, "a key of too many parts", f"{MAX_KEY_PARTS} parts"),
        (_LONG_WORD, "a number or a key that is too long", f"{MAX_WORD} characters"),
    ):
        if match := pattern.search(bare):
            line = bare.count("\n", 0, match.start()) + 1
            raise UsageError(f"{what} has {problem}", where=f"{where}: line {line}", expected=f"at most {limit}")
    if (dots := bare.count(".")) > MAX_DOTS:
        raise UsageError(
            f"{what} has too many dots outside of strings", where=where, expected=f"at most {MAX_DOTS}", found=dots
        )
