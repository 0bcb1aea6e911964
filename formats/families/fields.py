"""Typed access to one object of a configuration: exact types, stated ranges, aliases that may not contradict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from formats.errors import FormatError

MAX_WIDTH = 1 << 24  # rows or columns of any matrix


@dataclass(frozen=True)
class Fields:
    """The members of one JSON object; ``where`` names it in messages.

    A member that is ``null`` counts as absent. All readers raise FormatError naming member, expected and found.
    """

    values: Mapping[str, Any]
    where: str

    def present(self, *names: str) -> tuple[str, Any] | None:
        """The first of ``names`` (one member and its aliases) that is there, if the others do not contradict it."""
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1] or type(value) is not type(found[0][1]):
                raise FormatError(
                    f"{found[0][0]} and its alias {name} disagree", where=self.where, expected=found[0][1], found=value
                )
        return found[0] if found else None

    def whole_or_none(self, *names: str, low: int = 1, high: int = MAX_WIDTH) -> int | None:
        """An integer in range, or None if absent."""
        found = self.present(*names)
        if found is None:
            return None
        name, value = found
        if type(value) is not int or not low <= value <= high:
            raise FormatError(
                f"{name} is not an integer in range",
                where=self.where,
                expected=f"{low} to {high}",
                found=repr(value)[:80],
            )
        return value

    def whole(self, *names: str, low: int = 1, high: int = MAX_WIDTH, default: int | None = None) -> int:
        """An integer in range; absent means ``default``, or is an error if there is none."""
        value = self.whole_or_none(*names, low=low, high=high)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"{names[0]} is absent", where=self.where, expected=f"an integer from {low} to {high}")
        return value

    def number_or_none(self, name: str, *, above: float | None = None) -> float | None:
        """A number, with or without a fraction, that is above a limit if there is one; or None if absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or (above is not None and not value > above):
            expected = "a number" if above is None else f"a number above {above:g}"
            raise FormatError(
                f"{name} is not a number in range", where=self.where, expected=expected, found=repr(value)[:80]
            )
        return float(value)

    def number(self, name: str, *, above: float | None = None, default: float) -> float:
        """A number as in :meth:`number_or_none`; absent means ``default``."""
        value = self.number_or_none(name, above=above)
        return default if value is None else value

    def choice(self, name: str, *choices: str) -> str:
        """One of several words; absent means the first."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise FormatError(
                f"{name} is not known", where=self.where, expected=" or ".join(choices), found=repr(value)[:80]
            )
        return choices[0] if value is None else value

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean; absent means ``default``."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise FormatError(
                f"{name} is not a boolean", where=self.where, expected="true or false", found=repr(value)[:80]
            )
        return value

    def text(self, *names: str) -> str | None:
        """A string, or None if absent."""
        found = self.present(*names)
        if found is None:
            return None
        if type(found[1]) is not str:
            raise FormatError(f"{found[0]} is not a string", where=self.where, found=repr(found[1])[:80])
        return found[1]

    def wholes(self, name: str, *, low: int, high: int, most: int) -> tuple[int, ...]:
        """A list of integers in range, at most ``most``; absent means empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most:
            raise FormatError(f"{name} is not a list of at most {most}", where=self.where, found=repr(value)[:80])
        for item in value:
            if type(item) is not int or not low <= item <= high:
                raise FormatError(
                    f"{name} has an entry out of range",
                    where=self.where,
                    expected=f"integers from {low} to {high}",
                    found=repr(item)[:80],
                )
        return tuple(value)

    def strings(self, name: str, *, most: int) -> tuple[str, ...]:
        """A list of strings, at most ``most``; absent means empty."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most or not all(type(item) is str for item in value):
            raise FormatError(
                f"{name} is not a list of at most {most} strings", where=self.where, found=repr(value)[:80]
            )
        return tuple(value)

    def inner(self, name: str) -> Fields | None:
        """A nested object, or None if absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise FormatError(f"{name} is not an object", where=self.where, found=type(value).__name__)
        return Fields(value, f"{self.where}: {name}")
