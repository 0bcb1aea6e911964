"""What ``eval`` saves: a safetensors file of known size, written chunk by chunk and published when it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from packer.storage import durable
from packer.storage.durable import Extent
from packer.storage.new_file import new_output, publish, writing
from packer.storage.system import SYSTEM, Buffer, System

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
    """An unfinished file. Rows may be written in any order, each once; whoever opened it publishes or removes it.

    ``written`` has what must be read back: each piece's place and digest.
    """

    def __init__(
        self, output: durable.Output, offsets: Mapping[str, int], tables: Mapping[str, Table], system: System
    ) -> None:
        self.written: list[Extent] = []
        self._output = output
        self._offsets = offsets
        self._tables = tables
        self._system = system

    def write(self, name: str, first: int, rows: NDArray[np.float32] | NDArray[np.int64]) -> None:
        """Write rows of a tensor, from row ``first`` on."""
        table = self._tables[name]
        data = np.ascontiguousarray(rows, dtype=_ITEMS[table.dtype][0])
        if data.shape[1:] != table.shape[1:] or not 0 <= first <= first + len(data) <= table.shape[0]:
            raise ValueError(f"rows of {name} have shape {data.shape} at {first}, the tensor has {table.shape}")
        self.write_at(self._offsets[name] + first * table.row_bytes, data.data.cast("B"))

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write bytes at a place in the file."""
        output = self._output
        self.written.append(durable.write_extent(output.fd, output.temporary, offset, data, system=self._system))


@contextmanager
def new_logits_file(path: Path, tables: Sequence[Table], *, system: System = SYSTEM) -> Iterator[LogitsFile]:
    """Write a safetensors file: published under ``path`` when the ``with`` block ends well, else nothing stays.

    The layout is that of the safetensors format: length of the header, header as JSON, the tensors one after the other.

    Raises:
        UsageError: something has that name already or gets it meanwhile, or its folder is not there.
        EnvironmentProblem: it cannot be written, lack of space included, which shows at the beginning.
    """
    header, offsets, total = _layout(tables)
    with new_output(path, system=system) as output:
        file = LogitsFile(output, offsets, {table.name: table for table in tables}, system)
        with writing(output, system=system):
            durable.set_length(output, total, system=system)
            file.write_at(0, header)
            yield file
        durable.read_back(output.temporary, file.written, system=system)
        publish([output], system=system)


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
