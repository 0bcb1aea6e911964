"""Sizes and shares as people type them: ``200GiB`` made into bytes exactly, ``1%`` into 0.01."""

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


def parse_share(text: str, *, where: str) -> float:
    """A share of a whole, as a number or in percent; whether it makes sense is for whoever uses it.

    Raises:
        UsageError: neither.

    >>> parse_share("1%", where="--sample"), parse_share("0.01", where="--sample")
    (0.01, 0.01)
    """
    number = text.strip().removesuffix("%")
    try:
        value = float(number)
    except ValueError:
        raise UsageError("not a share", where=where, expected="0.01 or 1%", found=repr(text)[:40]) from None
    return value if number == text.strip() else value / 100
