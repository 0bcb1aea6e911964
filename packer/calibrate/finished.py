"""The note of finished layers, and proof that the files which it speaks of are those that were written.

``done.json`` is written last, after each layer. It names every file that a later run goes on from, with its length and
its BLAKE3: the tokens' states before the next layer and at the beginning of each block, and the sums of all layers
that are done. A later run reads all of them before it computes anything, for that may take days.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from formats.errors import FormatError, IntegrityError
from packer.calibrate.folder import read_note
from packer.documents import converted
from packer.model_stamp import Digest
from packer.statistics.file import Statistics, open_statistics
from packer.statistics.types import Provenance
from packer.storage.durable import file_digest, write_file
from packer.storage.system import SYSTEM, System, translated

DONE = "done.json"
MAX_NOTE_BYTES = 2 << 20  # a model of 4096 layers, the most there can be, has 1.1 MB
_HINT = "remove the folder and start again"


class FileProof(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Length and BLAKE3 of a file."""

    bytes: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    blake3: Digest


class Finished(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many layers are done, and the files in the folder that the rest needs, by name."""

    layers: Annotated[int, Meta(ge=0)]
    files: dict[str, FileProof]


NOTHING = Finished(layers=0, files={})


def read_finished(folder: Path, layers: int) -> Finished:
    """What earlier runs have done; the files are not looked at.

    Args:
        folder: for work in progress.
        layers: that there are to do.

    Raises:
        FormatError: the note is no regular file or malformed.
        EnvironmentProblem: it cannot be read.
    """
    path = folder / DONE
    if not os.path.lexists(path):
        return NOTHING
    with ending_the_work():
        note = read_note(path, at_most=MAX_NOTE_BYTES)
        found = converted(note, Finished, where=f"{path}: note of finished layers", error=FormatError)
        if not 1 <= found.layers <= layers:
            raise FormatError(
                "note of finished layers is malformed", where=path, expected=f"1 to {layers}", found=found.layers
            )
        return found


def write_finished(folder: Path, finished: Finished, *, system: System = SYSTEM) -> None:
    """Make the note durable, in place of the one before.

    Raises:
        EnvironmentProblem: it cannot be written; the one before stays.
    """
    write_file(folder / DONE, [msgspec.json.encode(finished)], system=system)


def check_names(folder: Path, finished: Finished, needed: Collection[str]) -> None:
    """Insist that a note speaks of the files that are needed, and of no others.

    Raises:
        FormatError: saying which.
    """
    with ending_the_work():
        absent, more = sorted(set(needed) - set(finished.files)), sorted(set(finished.files) - set(needed))
        if absent or more:
            raise FormatError(
                "note of finished layers names other files than are needed",
                where=folder / DONE,
                expected=", ".join(absent)[:80] or None,
                found=", ".join(more)[:80] or None,
            )


def check_file(path: Path, recorded: FileProof, *, system: System = SYSTEM) -> None:
    """Insist that a file has the bytes that it had when it was recorded, past the page cache.

    Raises:
        FormatError: it is gone, something else than a regular file, or has another length.
        IntegrityError: it has another digest.
        EnvironmentProblem: it cannot be read.
    """
    with ending_the_work(), translated("read", path, system=system):
        found = _found(path)
        if found != f"{recorded.bytes} bytes":
            raise FormatError(
                "work in progress is damaged", where=path, expected=f"{recorded.bytes} bytes", found=found
            )
        digest = file_digest(path, system=system)[1].hex()
        if digest != recorded.blake3:
            raise IntegrityError(
                "work in progress is damaged: other bytes than were written",
                where=path,
                expected=recorded.blake3,
                found=digest,
            )


def proven_sums(
    path: Path, layer: int, provenance: Provenance, recorded: FileProof, *, system: System = SYSTEM
) -> Statistics:
    """The file of a layer's sums, once its bytes are those recorded and it says that it is of this model and text.

    Raises:
        FormatError: it is not.
        EnvironmentProblem: it cannot be read.
    """
    check_file(path, recorded, system=system)
    with ending_the_work():
        found = open_statistics(path)
        if (found.provenance, found.layers) != (provenance, (layer,)):
            raise FormatError("sums of another calibration or layer", where=path, expected=f"layer {layer} of this one")
        return found


@contextmanager
def ending_the_work() -> Iterator[None]:
    """Whatever is wrong with what an earlier run left, nothing brings it back: errors are told with that hint."""
    try:
        yield
    except FormatError as error:
        error.hint = _HINT
        raise


def _found(path: Path) -> str:
    """What has this name, in words; of a regular file its length."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return "no file"
    if stat.S_ISREG(found.st_mode):
        return f"{found.st_size} bytes"
    kinds = ((stat.S_ISLNK, "a link"), (stat.S_ISDIR, "a folder"))
    return next((word for is_kind, word in kinds if is_kind(found.st_mode)), "no regular file")
