"""The one sink of the command line: results to stdout, everything else to stderr, nothing from a file unescaped.

A result is either text for people or, with ``--json``, exactly one JSON document: sizes in bytes, undefined numbers
null. Names, messages and values may come from a hostile file, so every string is escaped before it is written, and no
string is ever read as markup. The functions that compute results know nothing of this module.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from formats.errors import EnvironmentProblem, MoepackError

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
# Categories that a terminal acts on instead of showing: controls, format marks (bidirectional ones among them),
# lone surrogates, private use, unassigned, line and paragraph separators.
_UNSHOWABLE = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
# What a text may have of these all the same: the ends of lines, tabs, and the joiners that scripts and emoji need.
_TEXTUAL = frozenset("\n\t\u200c\u200d")
_WIDE = 100_000  # columns: a terminal folds long lines by itself, and a log must not be folded


@dataclass(frozen=True)
class Output:
    """Where a command writes, and how.

    ``json`` asks for one JSON document on stdout; ``quiet`` drops notes, hints and progress, never errors;
    ``verbose`` adds details and tracebacks; ``color`` is off for ``--no-color`` and where NO_COLOR is set.
    """

    stdout: TextIO
    stderr: TextIO
    json: bool = False
    quiet: bool = False
    verbose: bool = False
    color: bool = True

    def result(self, document: dict[str, Any]) -> None:
        """Write the one JSON document."""
        self._to_stdout(json_text(document) + "\n")

    def line(self, text: str = "") -> None:
        """A line of the result, for people."""
        self._to_stdout(escape(text) + "\n")

    def text(self, piece: str) -> None:
        """A piece of running text that a model wrote, without a line end of its own, shown at once."""
        self._to_stdout("".join(char if char in _TEXTUAL else escape(char) for char in piece))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """A table of the result; a column whose heading begins with ``>`` is aligned to the right."""
        table = Table(title=Text(escape(title)) if title else None, title_justify="left", box=None, pad_edge=False)
        for column in columns:
            right = column.startswith(">")
            table.add_column(Text(column.removeprefix(">")), justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(escape(str(cell))) for cell in row))
        lines = self._rendered(self.stdout, table).splitlines()
        self._to_stdout("".join(line.rstrip() + "\n" for line in lines))

    def note(self, text: str) -> None:
        """Something the user should know (a choice made, a fallback, a skipped check), on stderr."""
        if not self.quiet:
            self._error_line(text)

    def detail(self, text: str) -> None:
        """A note for ``--verbose`` alone."""
        if self.verbose and not self.quiet:
            self._error_line(text)

    def hint(self, text: str) -> None:
        """What to do next, on stderr."""
        if not self.quiet:
            self._error_line(f"hint: {text}")

    def ask(self, text: str) -> None:
        """What stands before the cursor while somebody is to type."""
        self._to_stderr(escape(text))

    def error(self, error: MoepackError) -> None:
        """One line that says what is wrong and where, and one that says what to do next."""
        self.failure(error.line())
        if error.hint:
            self._error_line(f"hint: {error.hint}")

    def failure(self, text: str) -> None:
        """An error line; ``--quiet`` does not drop it."""
        self._to_stderr(self._rendered(self.stderr, Text.assemble(("error:", "bold red"), " " + escape(text))))

    def _error_line(self, text: str) -> None:
        self._to_stderr(escape(text) + "\n")

    def _to_stdout(self, text: str) -> None:
        with writing_results():
            self.stdout.write(text)
            self.stdout.flush()

    def _to_stderr(self, text: str) -> None:
        """Write what is no result; where it cannot be written, there is nobody to tell, and the work goes on."""
        with suppress(OSError):
            self.stderr.write(text)
            self.stderr.flush()

    def _rendered(self, stream: TextIO, what: Table | Text) -> str:
        """``what`` as it is to be written to ``stream``. Nothing is folded: a name in two pieces cannot be copied.

        The stream itself is not handed over: where it is a closed pipe, the console would end the process.
        """
        console = Console(
            file=io.StringIO(),
            force_terminal=is_terminal(stream),
            no_color=not self.color,
            width=_WIDE,
            markup=False,
            emoji=False,
            highlight=False,
        )
        with console.capture() as capture:
            console.print(what, soft_wrap=isinstance(what, Text))
        return capture.get()


def make_output(*, json: bool = False, quiet: bool = False, verbose: bool = False, color: bool = True) -> Output:
    """The sink of this process, on the present stdout and stderr."""
    return Output(sys.stdout, sys.stderr, json, quiet, verbose, color and not os.environ.get("NO_COLOR"))


@contextmanager
def writing_results() -> Iterator[None]:
    """Says what it is where stdout takes nothing more.

    Raises:
        EnvironmentProblem: a full device and the like.
        BrokenPipeError: nobody reads on.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise EnvironmentProblem(f"cannot write the output: {(error.strerror or str(error)).lower()}") from None


def is_terminal(stream: TextIO) -> bool:
    """Whether somebody watches ``stream``."""
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def escape(text: str) -> str:
    r"""``text`` with everything that a terminal would act on written as an escape: ``\n``, ``\x1b``, ``\u202e``.

    >>> escape("a\x1b[2Jb\n")
    'a\\x1b[2Jb\\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(char) if unicodedata.category(char) in _UNSHOWABLE else char for char in text)


def _escaped(char: str) -> str:
    number = ord(char)
    if 0xDC80 <= number <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{number - 0xDC00:02x}"
    short = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(char)
    if short is not None:
        return short
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def json_text(document: Any) -> str:
    """``document`` as JSON in plain ASCII: nothing in it can drive a terminal, NaN and infinities are null."""
    return json.dumps(_defined(document), indent=2, ensure_ascii=True, allow_nan=False)


def _defined(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _defined(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_defined(item) for item in value]
    return value


def human_bytes(count: int) -> str:
    """A size for people, in binary units that are named.

    >>> human_bytes(17_550_000), human_bytes(12)
    ('16.7 MiB', '12 bytes')
    """
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return (
        f"{count} bytes"
        if unit == 0
        else f"{value:.1f} {_UNITS[unit]}"
        if value < 100
        else f"{value:.0f} {_UNITS[unit]}"
    )


def human_number(value: float | None, digits: int = 3) -> str:
    """A number for people with ``digits`` significant digits, whole ones in full; a dash where there is none.

    >>> human_number(0.00012345), human_number(12.345), human_number(12345.6)
    ('0.000123', '12.3', '12346')
    """
    if value is None or not math.isfinite(value):
        return "-"
    if 10**digits <= abs(value) < 1e12:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


def human_seconds(seconds: float) -> str:
    """A duration for people.

    >>> human_seconds(59.4), human_seconds(3700), human_seconds(200_000)
    ('59 s', '1 h 01 min', '2 d 07 h')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min {whole % 60:02d} s"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02d} min" if hours < 24 else f"{hours // 24} d {hours % 24:02d} h"
