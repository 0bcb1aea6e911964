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
