"""The tokens' states between layers, on disk: what makes a pass resumable, and its memory independent of the text.

The states before layer N are one file. Those that began a block of layers are needed to the end (attention residuals);
the others go as soon as the states after them are durable.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from formats.errors import EnvironmentProblem
from formats.files import read_exactly
from packer.storage.system import SYSTEM, System, translated, write_all

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

    def create(self, layer: int) -> StatesFile:
        """Begin the states before ``layer``; whatever an earlier run left of them is replaced."""
        path = self.path(layer)
        with translated("create", path, system=self.system, needed=self.file_bytes):
            fd = self.system.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        return StatesFile(self, path, fd)

    def is_whole(self, layer: int) -> bool:
        """Whether the states before ``layer`` have their length; only asked for what was recorded as done."""
        return self.path(layer).is_file() and self.path(layer).stat().st_size == self.file_bytes

    def drop(self, layer: int) -> None:
        """Delete the states before ``layer``, unless they are a block state."""
        if self.block is None or layer % self.block:
            with suppress(FileNotFoundError):
                self.path(layer).unlink()


@dataclass(frozen=True)
class StatesFile:
    """States being written."""

    scratch: Scratch
    path: Path
    fd: int

    def write(self, first: int, states: Single) -> None:
        """Write the states of the tokens from ``first`` on."""
        row = _FLOAT * self.scratch.hidden
        data = np.ascontiguousarray(states, np.float32)
        write_all(self.fd, self.path, first * row, data.reshape(-1).view(np.uint8).data, system=self.scratch.system)

    def finish(self) -> None:
        """Bring them to the device and close the file."""
        with translated("flush", self.path, system=self.scratch.system):
            self.scratch.system.fsync(self.fd)
        self.close()

    def close(self) -> None:
        """Close the file as it is."""
        with suppress(OSError):
            self.scratch.system.close(self.fd)
