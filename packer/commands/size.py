"""Sizes as people type them: a number and a unit, made into bytes exactly."""

from __future__ import annotations

import re
from decimal import Decimal

from formats.errors import UsageError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000 ** (power + 1) for power, prefix in enumerate("KMGT")}
_UNITS |= {f"{prefix}IB": 1024 ** (power + 1) for power, prefix in enumerate("KMGT")}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]{0,3})")
_MAX_BYTES = (1 << 63) - 1


def parse_size(text: str, *, where: str) -> int:
    """Bytes of ``text``: a number, and B, kB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (of 1024).

    Args:
        text: as it was typed; case does not matter, and without a unit it means bytes.
        where: the option, for messages.

    Raises:
        UsageError: no size, not a whole number of bytes, zero, or beyond 2^63.

    >>> parse_size("1.5KiB", where="--limit")
    1536
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].upper()) if match is not None else None
    if match is None or factor is None:
        raise UsageError("not a size", where=where, expected="a number and a unit, as in 200GiB", found=repr(text)[:40])
    size = Decimal(match[1]) * factor
    if size != int(size) or not 1 <= size <= _MAX_BYTES:
        raise UsageError(
            "size is out of range, or no whole number of bytes", where=where, expected=f"1 to {_MAX_BYTES}", found=text
        )
    return int(size)
