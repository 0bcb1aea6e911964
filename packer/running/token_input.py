"""Token ids from the command line: a list, a file with a list, or a text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.errors import UsageError
from formats.files import named_bytes

MAX_BYTES = 64 << 20
_LIST = re.compile(r"(?:[\s,]*-?[0-9][^./]*)?")  # or meant as one: its bad entry is named, not a file


@dataclass(frozen=True)
class TokenInput:
    """Where tokens come from, as it was typed: exactly one of the first three is given.

    Attributes:
        ids: a list of ids, or the name of a file with one.
        ids_file: the name of a file with a list of ids.
        text: the name of a file with a text.
        window: tokens a piece, or None for one piece.
    """

    ids: str | None = None
    ids_file: Path | None = None
    text: Path | None = None
    window: int | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Those that were given, as they are typed."""
        return tuple(f"--{name.replace('_', '-')}" for name, value in vars(self).items() if value is not None)


def read_tokens(tokens: TokenInput, vocabulary: int, encode: Callable[[str], Sequence[int]] | None) -> list[int]:
    """The ids that were asked for.

    Args:
        tokens: as it was typed.
        vocabulary: ids lie below it.
        encode: makes ids of a text; needed if ``tokens.text`` is given.

    Raises:
        UsageError: none or several inputs, not a list of ids, an id out of range, no token at all, no such file.
        EnvironmentProblem: a file that cannot be read.
    """
    given = [option for option in tokens.options if option != "--window"]
    if len(given) != 1:
        raise UsageError(
            "give tokens in one way",
            expected="one of --ids, --ids-file, --text",
            found=", ".join(given) or "none of them",
        )
    if tokens.text is not None:
        if encode is None:
            raise UsageError("a text needs a tokenizer", where="--text")
        ids = list(encode(decoded(read_file(tokens.text), where=tokens.text)))
        if not ids:
            raise UsageError("text is empty", where=tokens.text)
        return ids
    if tokens.ids is not None and _LIST.fullmatch(tokens.ids) and not os.path.lexists(tokens.ids):
        return parse_ids(tokens.ids, vocabulary, where="--ids")
    path = Path(tokens.ids) if tokens.ids is not None else tokens.ids_file
    assert path is not None  # one of the two is given
    hint = "give a list, as in 1,2,3, or the name of a file with one" if tokens.ids is not None else None
    return parse_ids(decoded(read_file(path, hint=hint), where=path), vocabulary, where=str(path))


def parse_ids(text: str, vocabulary: int, *, where: str) -> list[int]:
    """Ids of a list with commas or blanks between them.

    Raises:
        UsageError: with the first entry that is no id.

    >>> parse_ids("1, 2 3", 10, where="--ids")
    [1, 2, 3]
    """
    ids = []
    for number, match in enumerate(re.finditer(r"[^\s,]+", text), 1):
        entry = match[0]
        if not (entry.isascii() and entry.isdigit() and len(entry) <= 9 and int(entry) < vocabulary):
            raise UsageError(
                f"entry {number} is no token id", where=where, expected=f"0 to {vocabulary - 1}", found=repr(entry)[:40]
            )
        ids.append(int(entry))
    if not ids:
        raise UsageError("no token ids", where=where, expected="at least one")
    return ids


def read_file(path: Path, *, hint: str | None = None) -> bytes:
    """A whole file of text or of ids that the user names; errors are those of ``formats.files.named_bytes``."""
    return named_bytes(path, at_most=MAX_BYTES, hint=hint)


def decoded(data: bytes, *, where: object) -> str:
    """The text of a file that the user names.

    Raises:
        UsageError: it is no UTF-8, with the place.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("not UTF-8", where=where, offset=error.start) from None
