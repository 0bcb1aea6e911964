"""What ``eval`` saves: a safetensors file of known size, written chunk by chunk and published when it is complete."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packer.storage import durable
from packer.storage.new_file import check_free
from packer.storage.system import SYSTEM, problem

_ITEMS = {"F32": ("<f4", 4), "I64": ("<i8", 8)}


@dataclass(frozen=True)
class Table:
    """A tensor of two sides, or one, whose rows come in any order: its name, dtype (``F32`` or ``I64``) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return _ITEMS[self.dtype][1] * int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def bytes(self) -> int:
        """Bytes of all rows."""
        return self.shape[0] * self.row_bytes


class LogitsFile:
    """An unfinished file. Rows may be written in any order; whoever opened it publishes or removes it."""

    def __init__(self, output: durable.Output, offsets: Mapping[str, int], tables: Mapping[str, Table]) -> None:
        self._output = output
        self._offsets = offsets
        self._tables = tables

    def write(self, name: str, first: int, rows: NDArray[np.float32] | NDArray[np.int64]) -> None:
        """Write rows of a tensor, from row ``first`` on."""
        table = self._tables[name]
        data = np.ascontiguousarray(rows, dtype=_ITEMS[table.dtype][0])
        if data.shape[1:] != table.shape[1:] or not 0 <= first <= first + len(data) <= table.shape[0]:
            raise ValueError(f"rows of {name} have shape {data.shape} at {first}, the tensor has {table.shape}")
        durable.write_at(self._output, self._offsets[name] + first * table.row_bytes, data.data.cast("B"))


@contextmanager
def new_logits_file(path: Path, tables: Sequence[Table]) -> Iterator[LogitsFile]:
    """Write a safetensors file: published under ``path`` when the ``with`` block ends well, else nothing stays.

    The layout is that of the safetensors format: length of the header, header as JSON, the tensors one after the other.

    Raises:
        UsageError: something has that name already, or its folder is not there.
        EnvironmentProblem: it cannot be written, lack of space included, which shows at the beginning.
    """
    check_free(path)
    header, offsets, total = _layout(tables)
    output = _create(path)
    try:
        durable.set_length(output, total)
        durable.write_at(output, 0, header)
        yield LogitsFile(output, offsets, {table.name: table for table in tables})
    except BaseException:
        durable.abandon(output)
        raise
    durable.flush(output)
    durable.close(output)
    try:
        check_free(path)  # nothing came there meanwhile
        durable.publish(path, temporary=output.temporary)
    except BaseException:
        with suppress(OSError):
            output.temporary.unlink()
        raise


def _create(path: Path) -> durable.Output:
    """A temporary of this process's own beside ``path``; one that a killed process with our number left is replaced."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}{durable.SUFFIX}")
    with suppress(FileNotFoundError, OSError):
        temporary.unlink()
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise problem(error, "create", temporary, system=SYSTEM) from None
    return durable.Output(path, temporary, fd)


def _layout(tables: Sequence[Table]) -> tuple[bytes, dict[str, int], int]:
    """Header with its length, where each tensor begins in the file, and the file's length."""
    entries: dict[str, object] = {}
    starts: dict[str, int] = {}
    end = 0
    for table in tables:
        starts[table.name] = end
        entries[table.name] = {
            "dtype": table.dtype,
            "shape": list(table.shape),
            "data_offsets": [end, end + table.bytes],
        }
        end += table.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in starts.items()}, begin + end
