"""A folder in memory where there is some: tests that write thousands of small files need no disk for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_SHM = Path("/dev/shm")


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, to be used in a ``with`` block or cleaned up by its method."""
    return tempfile.TemporaryDirectory(prefix="moepack-", dir=_SHM if os.access(_SHM, os.W_OK) else None)
