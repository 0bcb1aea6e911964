"""Telling a file of statistics from others at its beginning."""

from __future__ import annotations

from pathlib import Path

from formats.errors import MoepackError
from formats.files import file_bytes, named_file, read_exactly

FORMAT = "moepack-statistics"
HINT = "make statistics with moepack calibrate"
LENGTH_BYTES = 8  # of a safetensors file, before its header
_START_BYTES = 256  # the format stands within these


def begins_as_header(start: bytes) -> bool:
    """Whether these bytes begin a safetensors file: a length that no text begins with, and a JSON object."""
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    return start[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and length < 1 << 48


def is_statistics(path: Path) -> bool:
    """Whether a file begins as one of statistics does, for a message where something else is wanted."""
    try:
        with named_file(path) as fd:
            size = min(file_bytes(fd), _START_BYTES)
            start = read_exactly(fd, 0, size, where=str(path)) if size else b""
    except MoepackError:  # whoever reads it next says what is the matter
        return False
    return begins_as_header(start) and FORMAT.encode() in start
