"""Lists of numbers as files hold them, ``0-3,7``: read strictly, and never spelled out beyond what can be in range."""

from __future__ import annotations

import re

from formats.errors import MoepackError, UsageError

MAX_LENGTH = 400_000  # characters: 65,536 numbers of five digits with commas between

_PIECE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-(0|[1-9][0-9]{0,8}))?")


def parse_numbers(text: str, *, count: int, where: str, error: type[MoepackError] = UsageError) -> tuple[int, ...]:
    """The numbers that ``text`` spells, as ``formats.spelling.spelled`` does: ascending, each once.

    Args:
        text: numbers and ranges with commas between them, both ends of a range included; empty for none.
        count: numbers lie below it.
        where: for messages.
        error: what to raise.

    Raises:
        MoepackError: malformed, out of range, backwards, or a number that stands twice.

    >>> parse_numbers("0-3,7", count=8, where="keep")
    (0, 1, 2, 3, 7)
    """
    if len(text) > MAX_LENGTH:
        raise error("list is too long", where=where, expected=f"at most {MAX_LENGTH} characters", found=len(text))
    numbers: list[int] = []
    for piece in text.split(",") if text else ():
        match = _PIECE.fullmatch(piece)
        if match is None:
            raise error(
                "not a list of numbers and ranges", where=where, expected="for example 0-3,7", found=repr(piece[:40])
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise error("range runs backwards", where=where, expected=f"{last}-{first}", found=piece)
        if last >= count:  # before the range is spelled out
            raise error("number is out of range", where=where, expected=f"0 to {count - 1}", found=last)
        if numbers and first <= numbers[-1]:
            raise error(
                "numbers do not ascend, or one stands twice",
                where=where,
                expected=f"above {numbers[-1]}",
                found=first,
            )
        numbers.extend(range(first, last + 1))
    return tuple(numbers)
