"""The one tree of errors, from which the command line takes its message and its exit code.

Every error that a user can cause or meet is a :class:`MoepackError`. It carries *where* (a file, tensor
or record), and where they are known the byte offset, the expected and the found value, and a hint. The
message is one line; whoever prints it escapes it, because every part may come from a file.
"""

from __future__ import annotations


class MoepackError(Exception):
    """Something foreseeable went wrong.

    Args:
        what: what is wrong, in a few words.
        where: file, tensor or record it is wrong in.
        offset: byte offset in ``where``, if one is to blame.
        expected: what should have stood there.
        found: what stands there.
        hint: what to do next.
    """

    exit_code = 4

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        offset: int | None = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.offset = offset
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(self.line())

    def line(self) -> str:
        """The message: place, what, expected, found; one line, not yet escaped."""
        place = "" if self.where is None else f"{self.where}: "
        if self.offset is not None:
            place = f"{self.where or ''} at byte {self.offset}: "
        tail = []
        if self.expected is not None:
            tail.append(f"expected {self.expected}")
        if self.found is not None:
            tail.append(f"found {self.found}")
        return place + self.what + (f" ({', '.join(tail)})" if tail else "")


class UsageError(MoepackError):
    """The caller asked for something that makes no sense: an option, a recipe, an output in the way."""

    exit_code = 2


class FormatError(MoepackError):
    """An input is not what it claims to be: malformed, truncated, contradictory, or of an unknown version."""

    exit_code = 3


class IntegrityError(FormatError):
    """An input is well formed, but its bytes are not those that were recorded (a digest disagrees)."""


class LimitError(MoepackError):
    """A check that the user asked for failed, for example an error limit of the recipe."""

    exit_code = 1


class EnvironmentProblem(MoepackError):
    """The machine is in the way: disk, memory, permission, lock, network."""

    exit_code = 4


class Interrupted(MoepackError):
    """The user asked to stop; what is done is durable and the same command continues."""

    exit_code = 130
