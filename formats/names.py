"""The grammar of file names that we take from others or write ourselves (SPEC section 3).

A name must mean the same file under POSIX and under Windows rules and must not leave its directory. What is
refused here is refused before any path is built from it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from formats.errors import FormatError

MAX_COMPONENTS = 16
MAX_COMPONENT_BYTES = 255
MAX_NAME_BYTES = 1024

_FORBIDDEN = frozenset('<>:"\\|?*')
_DEVICES = frozenset(
    ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"]
    + [f"{port}{digit}" for port in ("COM", "LPT") for digit in "0123456789¹²³"]
)
# Invisible marks that reorder what a person sees of a name.
_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c")


def check_relative_name(name: str, *, where: object = None) -> str:
    """Return ``name`` if it is a safe relative POSIX path, else refuse it.

    Raises:
        FormatError: saying which rule of the grammar is broken.
    """
    what = _violation(name)
    if what is not None:
        raise FormatError(f"unsafe file name: {what}", where=where, found=repr(name)[:200])
    return name


def check_distinct(names: Iterable[str], *, where: object = None) -> None:
    """Insist that no two names are the same file on a file system that ignores case or Unicode form.

    Raises:
        FormatError: naming both.
    """
    seen: dict[str, str] = {}
    for name in names:
        key = folded(name)
        if key in seen:
            raise FormatError(
                "two names for one file", where=where, expected="distinct names", found=f"{seen[key]!r} and {name!r}"
            )
        seen[key] = name


def folded(name: str) -> str:
    """The form in which two names that could collide are equal: NFC, case folded."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _violation(name: str) -> str | None:
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "not valid Unicode"
    if not 1 <= length <= MAX_NAME_BYTES:
        return f"length is not 1 to {MAX_NAME_BYTES} bytes"
    if unicodedata.normalize("NFC", name) != name:
        return "not in Unicode normal form C"
    components = name.split("/")
    if len(components) > MAX_COMPONENTS:
        return f"more than {MAX_COMPONENTS} components"
    for component in components:
        what = _component_violation(component)
        if what is not None:
            return what
    return None


def _component_violation(component: str) -> str | None:
    if not component:
        return "absolute, or an empty component"
    if component in (".", ".."):
        return "leaves its directory"
    if len(component.encode("utf-8")) > MAX_COMPONENT_BYTES:
        return f"a component above {MAX_COMPONENT_BYTES} bytes"
    for char in component:
        if char in _FORBIDDEN:
            return f"forbidden character {char!r}"
        if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in _BIDI:
            return "control character"
    if component != component.strip():
        return "leading or trailing blank"
    if component.endswith("."):
        return "trailing dot"
    if component.split(".")[0].rstrip().upper() in _DEVICES:
        return "Windows device name"
    return None
