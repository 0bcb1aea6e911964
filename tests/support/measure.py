"""Running the tool in a process of its own and measuring it from there: peak memory, time, bytes read."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# VmHWM and not ru_maxrss: the latter counts the memory of the process that started this one.
_CHILD = """
import re, sys
from pathlib import Path
from packer.cli import main
code = main(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
read = re.search(r"rchar: (\\d+)", Path("/proc/self/io").read_text())
print("PEAK", int(peak[1]) * 1024, int(read[1]), file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Measured:
    """A command that ended: its exit code, its output, and what it took.

    ``read_bytes`` counts all system calls that read, those for the interpreter and its libraries included.
    """

    code: int
    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int
    read_bytes: int

    @property
    def document(self) -> dict[str, Any]:
        """What ``--json`` printed."""
        value: dict[str, Any] = json.loads(self.stdout)
        return value


def measured(*arguments: str | Path) -> Measured:
    """Run ``moepack`` with these arguments. Linux only."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - start
    assert "PEAK" in done.stderr, done.stderr
    lines, _, figures = done.stderr.rpartition("PEAK ")
    peak, read = map(int, figures.split())
    return Measured(done.returncode, done.stdout, lines, seconds, peak, read)
