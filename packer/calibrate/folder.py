"""The folder for work in progress: it is entered only if nothing in it can be somebody else's.

It lies beside the result. What it is work on stands in ``identity.json``, which is written first and removed last; a
folder without it is used if it is empty, or holds only what a run that was killed before that leaves there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from formats import strict_json
from formats.errors import FormatError, UsageError
from formats.files import file_bytes, open_directory, open_inside, read_exactly
from packer.storage.durable import make_directory, temporary_path, write_file
from packer.storage.identity import differences
from packer.storage.lock import exclusive
from packer.storage.new_file import check_free
from packer.storage.system import SYSTEM, System, translated

WORK_SUFFIX = ".work"
IDENTITY = "identity.json"
MAX_IDENTITY_BYTES = 64 << 20  # it names every file of sample text
_LOCK = "lock"
_LOCK_BYTES = 32  # of a process number and a line break, with room


def work_folder(out: Path) -> Path:
    """Where work in progress on a statistics file lies."""
    return out.with_name(out.name + WORK_SUFFIX)


def check_output(out: Path) -> None:
    """Refuse a name where no statistics file can be made.

    A run that was killed between its result and its tidying up leaves the folder; nobody but the user can say whether
    the file of that name is that result, so the folder is named, not removed.

    Raises:
        UsageError, EnvironmentProblem: as ``check_free`` does.
    """
    folder = work_folder(out)
    if os.path.lexists(out) and (folder / IDENTITY).is_file():
        raise UsageError(
            "output is there already",
            where=out,
            hint=f"remove it or choose another name; if it is complete, {folder} is left over: remove that too",
        )
    check_free(out)


@contextmanager
def working_in(folder: Path, identity: Mapping[str, Any], *, system: System = SYSTEM) -> Iterator[None]:
    """Hold the folder for work on what ``identity`` says; it is made if it is not there.

    Args:
        folder: its parent must be there.
        identity: JSON values.
        system: the system calls.

    Raises:
        UsageError: the folder holds something else, or work on something else; nothing in it was touched.
        FormatError: its identity cannot be read.
        EnvironmentProblem: another process works there, or it cannot be written.
    """
    wanted = json.dumps(dict(identity), indent=1, sort_keys=True).encode()
    make_directory(folder, system=system)
    _check(folder, wanted, system)  # before the lock, which replaces what has its name
    with exclusive(folder / _LOCK, system=system):
        if not _check(folder, wanted, system):  # again: another process may have been at work until now
            write_file(folder / IDENTITY, [wanted], system=system)
        yield


def read_note(path: Path, *, at_most: int) -> dict[str, Any]:
    """The JSON object in a file of the work folder.

    Raises:
        FormatError: it is missing, too long, no regular file, or no JSON object.
        EnvironmentProblem: it cannot be read.
    """
    data = _start_of(path, at_most + 1)
    if len(data) > at_most:
        raise FormatError("file is too long", where=path, expected=f"at most {at_most} bytes")
    return strict_json.parse_object(data, where=str(path))


def _check(folder: Path, wanted: bytes, system: System) -> bool:
    """Whether work on what is wanted was begun in the folder; if not, the folder is free for it."""
    path = folder / IDENTITY
    with translated("list", folder, system=system):
        names = sorted(item.name for item in folder.iterdir())
    begun = IDENTITY in names
    others = [] if begun else [name for name in names if name not in (_LOCK, temporary_path(path).name)]
    if _LOCK in names and not _is_lock(folder / _LOCK):
        others.append(_LOCK)
    if not begun and not _is_begun(temporary_path(path), wanted):
        others.append(temporary_path(path).name)
    if others:
        raise UsageError(
            "the folder for work in progress holds something else",
            where=folder,
            found=", ".join(others[:3]),
            hint="name another result, or move that folder away",
        )
    if not begun:
        return False
    try:
        found = read_note(path, at_most=MAX_IDENTITY_BYTES)
    except FormatError as error:
        error.hint = "name another result, or remove the folder"
        raise
    differing = differences(found, json.loads(wanted))
    if differing:
        raise UsageError(
            f"an unfinished calibration of something else lies here: {differing}",
            where=folder,
            hint="give the same command again, name another result, or remove the folder",
        )
    return True


def _is_lock(path: Path) -> bool:
    """Whether a file is what a process leaves, or holds, as its lock: nothing, or its number."""
    try:
        return re.fullmatch(rb"[0-9]{0,20}\n?", _start_of(path, _LOCK_BYTES)) is not None
    except FormatError:
        return not os.path.lexists(path)  # gone meanwhile: its holder has ended


def _is_begun(temporary: Path, wanted: bytes) -> bool:
    """Whether a temporary, if it is there, is the beginning of what this run would write too."""
    try:
        return wanted.startswith(_start_of(temporary, len(wanted) + 1))
    except FormatError:
        return not os.path.lexists(temporary)


def _start_of(path: Path, at_most: int) -> bytes:
    """A regular file's first bytes, reached without a link."""
    directory = open_directory(path.parent, where=str(path.parent))
    try:
        fd = open_inside(directory, path.name, where=str(path))
    finally:
        os.close(directory)
    try:
        return read_exactly(fd, 0, min(file_bytes(fd), at_most), where=str(path))
    finally:
        os.close(fd)
