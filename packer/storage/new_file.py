"""Where a new file may be written."""

from __future__ import annotations

import os
from pathlib import Path

from formats.errors import EnvironmentProblem, UsageError
from formats.manifest import FILE_NAME, INDEX_NAME


def check_free(path: Path) -> None:
    """Refuse a name that is taken, in a folder that is not there, or in a container, which holds what it says it holds.

    Raises:
        UsageError: saying so.
        EnvironmentProblem: as of :func:`check_writable`.
    """
    if os.path.lexists(path):
        raise UsageError("output is there already", where=path, hint="remove it or choose another name")
    if not path.parent.is_dir():
        raise UsageError("no such folder", where=path.parent)
    if all((path.parent / name).exists() for name in (FILE_NAME, INDEX_NAME)):
        raise UsageError("output would lie in a container", where=path, hint="choose a name outside of it")
    check_writable(path.parent)


def check_writable(folder: Path) -> None:
    """Refuse a folder in which this user may create nothing, before any work is done for it.

    Raises:
        EnvironmentProblem: saying so.
    """
    if not os.access(folder, os.W_OK | os.X_OK):
        why = "file system is read-only" if os.statvfs(folder).f_flag & os.ST_RDONLY else "not permitted"
        raise EnvironmentProblem(f"cannot create files here: {why}", where=folder)
