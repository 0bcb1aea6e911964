"""The command in a process of its own, with limits that it finds in place when it begins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from tests.support.victim import ROOT


def command(*arguments: object, before: Callable[[], object]) -> subprocess.CompletedProcess[str]:
    """Run ``moepack`` to its end; ``before`` runs in its process first."""
    return subprocess.run(
        [sys.executable, "-m", "packer", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=before,
        capture_output=True,
        text=True,
    )
