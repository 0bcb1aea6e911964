"""The tokens' states between layers, on disk: what makes a pass resumable, and its memory independent of the text.

The states before layer N are one file. Those that began a block of layers are needed to the end (attention residuals);
the others go as soon as the states after them are durable. Bytes are taken for written only once they were read back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.errors import EnvironmentProblem
from formats.files import read_exactly
from packer.calibrate.finished import FileProof
from packer.storage.durable import Extent, read_back, write_extent
from packer.storage.system import SYSTEM, System, translated

Single = NDArray[np.float32]
_FLOAT = 4


def states_name(layer: int) -> str:
    """The file of the states before a layer."""
    return f"before-{layer:05d}.f32"


@dataclass(frozen=True)
class Scratch:
    """A folder of states.

    Attributes:
        folder: exists.
        tokens: of the whole sample.
        hidden: width of a state.
        block: layers a block of attention residuals, None without them.
    """

    folder: Path
    tokens: int
    hidden: int
    block: int | None
    system: System = SYSTEM

    @property
    def file_bytes(self) -> int:
        """Length of one file."""
        return _FLOAT * self.tokens * self.hidden

    def path(self, layer: int) -> Path:
        """The states before ``layer``."""
        return self.folder / states_name(layer)

    def blocks(self, layer: int) -> tuple[int, ...]:
        """Layers whose inputs are block states where ``layer`` begins."""
        return () if self.block is None else tuple(range(0, layer, self.block))

    def read(self, layer: int, first: int, stop: int) -> Single:
        """States of a range of tokens before ``layer``: float32 [stop - first, hidden].

        Raises:
            FormatError: the file was cut short.
            EnvironmentProblem: it is gone, or the device fails.
        """
        path = self.path(layer)
        try:
            fd = self.system.open(path, os.O_RDONLY | os.O_CLOEXEC, 0)
        except OSError as error:
            raise EnvironmentProblem(f"cannot open: {error.strerror}", where=path) from None
        try:
            row = _FLOAT * self.hidden
            data = read_exactly(fd, first * row, (stop - first) * row, where=str(path))
        finally:
            os.close(fd)
        return np.frombuffer(data, np.float32).reshape(stop - first, self.hidden)

    @contextmanager
    def writing(self, layer: int) -> Iterator[StatesFile]:
        """Write the states before ``layer``: they are on the device, and the file closed, behind the ``with`` block.

        Whatever an earlier run left of them is replaced.

        Raises:
            EnvironmentProblem: they cannot be written.
        """
        path = self.path(layer)
        with translated("create", path, system=self.system, needed=self.file_bytes):
            fd = self.system.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            yield StatesFile(self, path, fd)
            with translated("flush", path, system=self.system):
                self.system.fsync(fd)
        finally:
            with suppress(OSError):
                self.system.close(fd)

    def drop(self, layer: int) -> None:
        """Delete the states before ``layer``, unless they are a block state."""
        if self.block is None or layer % self.block:
            with suppress(FileNotFoundError):
                self.path(layer).unlink()


@dataclass(frozen=True)
class StatesFile:
    """States being written, in ranges of tokens."""

    scratch: Scratch
    path: Path
    fd: int
    _extents: list[Extent] = field(default_factory=list, repr=False)

    def write(self, first: int, states: Single) -> None:
        """Write the states of the tokens from ``first`` on."""
        row = _FLOAT * self.scratch.hidden
        data = np.ascontiguousarray(states, np.float32).reshape(-1).view(np.uint8).data
        self._extents.append(write_extent(self.fd, self.path, first * row, data, system=self.scratch.system))

    def proof(self) -> FileProof:
        """Length and digest of the file as it is on the device, every range as it was written; behind the block alone.

        Raises:
            WriteLost: other bytes are there.
            EnvironmentProblem: it cannot be read.
        """
        extents = sorted(self._extents, key=lambda extent: extent.offset)
        end = 0
        for extent in extents:
            if extent.offset != end:
                raise ValueError(f"states were written up to byte {end}, and from {extent.offset} on")
            end += extent.length
        if end != self.scratch.file_bytes:
            raise ValueError(f"states of {end} bytes were written, not of {self.scratch.file_bytes}")
        return FileProof(bytes=end, blake3=read_back(self.path, extents, system=self.scratch.system).hex())
