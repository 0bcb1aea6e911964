"""Numbers in messages: lists of them, and how many there are of something."""

from __future__ import annotations

from collections.abc import Sequence


def spelled(numbers: Sequence[int]) -> str:
    """Ascending numbers as one would type them: ``0-5,9``."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges(numbers))


def ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as runs, first and last of each."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return runs


def counted(count: int, noun: str) -> str:
    """A number of things: ``1 layer``, ``2 layers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
