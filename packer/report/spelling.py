"""Numbers as pages show them."""

from __future__ import annotations

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def percent(share: float) -> str:
    """A share in percent, to one decimal, without the sign.

    >>> percent(0.27)
    '27.0'
    """
    return f"{100 * share:.1f}"


def unit_of(most: int) -> tuple[int, str]:
    """The unit for an axis that goes up to ``most`` bytes: its bytes, and its name.

    >>> unit_of(5 << 30)
    (1073741824, 'GiB')
    """
    return next(((size, name) for size, name in _UNITS if most >= 2 * size), (1, "bytes"))


def figure(value: float | None, digits: int = 4) -> str:
    """An error with so many significant digits, zeros too: columns of them line up. A dash where there is none.

    >>> figure(0.2), figure(0.0), figure(None)
    ('0.2000', '0', '-')
    """
    if value is None:
        return "-"
    return f"{value:#.{digits}g}" if value else "0"
