"""Headers of shards that are not here: kept in small files, so that a checkpoint opens while its shards come and go.

``NAME.header`` holds the first bytes of the shard ``NAME`` up to the end of its header, unchanged, and then the
length of the whole shard as eight bytes, little-endian. What it says is checked as strictly as the shard would be; when
the shard arrives, its own header must be the same (``formats.checkpoint`` sees to that).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from blake3 import blake3

from formats.errors import EnvironmentProblem, FormatError
from formats.files import read_exactly
from formats.shard import HEADER_LIMIT, Shard, SourceTensor, parse_header

LENGTH_BYTES = 8
MAX_SHARD_BYTES = 1 << 50


def header_path(folder: Path, shard: str) -> Path:
    """Where the header of ``shard`` (a checked relative path) is kept."""
    return folder / f"{shard}.header"


def header_length(head: bytes, shard_bytes: int, *, name: str) -> int:
    """How long a header is by the first eight bytes of its shard, these bytes left out.

    Raises:
        FormatError: longer than the shard, or than 100,000,000 bytes, or too short to be one.
    """
    length = int.from_bytes(head[:LENGTH_BYTES], "little")
    limit = min(HEADER_LIMIT, shard_bytes - LENGTH_BYTES)
    if limit < 2:
        raise FormatError("file is too short for a header", where=name, expected="10 bytes or more", found=shard_bytes)
    if len(head) < LENGTH_BYTES or not 2 <= length <= limit:
        raise FormatError("header length is out of range", where=name, offset=0, expected=f"2 to {limit}", found=length)
    return length


def pack_header(start: bytes, shard_bytes: int) -> bytes:
    """The file for a shard of ``shard_bytes`` bytes that begins with ``start``: length field and header."""
    return start + shard_bytes.to_bytes(LENGTH_BYTES, "little")


def read_kept_header(folder: Path, name: str) -> tuple[Shard, list[SourceTensor]] | None:
    """The header of the shard ``name`` as it is kept in ``folder``; None if it is not there.

    Raises:
        FormatError: malformed.
        EnvironmentProblem: it cannot be read.
    """
    path = header_path(folder, name)
    where = path.name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=path) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("not a regular file", where=where)
        if not 2 * LENGTH_BYTES + 2 <= status.st_size <= HEADER_LIMIT + 2 * LENGTH_BYTES:
            raise FormatError("kept header has an impossible length", where=where, found=status.st_size)
        data = read_exactly(fd, 0, status.st_size, where=where)
    finally:
        os.close(fd)
    start, size = data[:-LENGTH_BYTES], int.from_bytes(data[-LENGTH_BYTES:], "little")
    if size > MAX_SHARD_BYTES or len(start) != LENGTH_BYTES + header_length(start, size, name=where):
        raise FormatError("kept header is cut short or contradicts itself", where=where)
    tensors = parse_header(start[LENGTH_BYTES:], size - len(start), name=name)
    return Shard(name, size, blake3(start).hexdigest()), tensors


def check_arrived(fd: int, size: int, shard: Shard) -> None:
    """Insist that the open file of ``size`` bytes begins with the header that ``shard`` was planned from.

    Raises:
        FormatError: another length or another header.
    """
    if size != shard.bytes:
        raise FormatError("shard has another length than planned", where=shard.name, expected=shard.bytes, found=size)
    head = read_exactly(fd, 0, LENGTH_BYTES, where=shard.name)
    start = read_exactly(fd, 0, LENGTH_BYTES + header_length(head, size, name=shard.name), where=shard.name)
    found = blake3(start).hexdigest()
    if found != shard.header_blake3:
        raise FormatError(
            "shard has another header than planned",
            where=shard.name,
            expected=f"BLAKE3 {shard.header_blake3}",
            found=found,
            hint="the server sent another header than the shard has; plan and fetch again",
        )
