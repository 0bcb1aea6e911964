"""Lists of numbers in messages."""

from __future__ import annotations

from collections.abc import Sequence


def spelled(numbers: Sequence[int]) -> str:
    """Ascending numbers as one would type them: ``0-5,9``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
