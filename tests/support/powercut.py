"""A disk whose power fails: what was not flushed is gone, and the folder that would be found is put together elsewhere.

POSIX promises that the bytes of a file are on the device after ``fsync`` of the file, and its name after ``fsync`` of
the folder; nothing else. The disk keeps for each file the bytes of its last flush and for each folder the names of its
last flush. A cut rebuilds the tree of those, in one of three ways that real file systems have been seen in:

``strict``: nothing but what was flushed. A file that was never flushed is empty if its name survived.
``names``: all names as they are, renames and deletions included, but of the bytes only what was flushed; files have
their full length, with zeros where nothing was flushed.
``random``: each folder as it was flushed or as it is, each sector of 512 bytes as it was flushed or as it is.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from packer.storage.system import System
from tests.support.faults import Call, wrapped

SECTOR = 512
Way: TypeAlias = Literal["strict", "names", "random"]
WAYS: tuple[Way, ...] = ("strict", "names", "random")


class PowerCut(BaseException):
    """The machine is off: no call of this run does anything any more, and nothing may catch this."""


@dataclass(eq=False)
class Node:
    """A file or folder of the disk: what of it is flushed."""

    folder: bool
    data: bytes | None = None
    names: dict[str, Node] = field(default_factory=dict)


class Disk:
    """Watches every system call below ``root`` and cuts the power at call number ``at``.

    ``root`` is the folder that the output lies in; it is flushed as it is at the beginning. ``flushing`` says for a
    path whether ``fsync`` of it does anything: a negative control switches it off. After the cut ``found`` is filled.
    """

    def __init__(
        self,
        root: Path,
        found: Path,
        at: int,
        way: Way,
        *,
        seed: int = 0,
        flushing: Any = lambda path: True,
        **replaced: Any,
    ) -> None:
        self.count = 0
        self.cut = False
        self.system: System = wrapped(self._around, **replaced)
        self._root, self._found, self._at, self._way = root, found, at, way
        self._dice = random.Random(f"{seed} {at} {way}")
        self._flushing = flushing
        self._nodes: dict[tuple[int, int], Node] = {}
        self._paths: dict[int, Path] = {}
        self._guard = threading.RLock()
        self._top = self._node(root)
        self._flush_everything(root, self._top)

    def _around(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        with self._guard:
            self.count += 1
            if self.cut or self.count == self._at:
                if not self.cut:
                    self.cut = True
                    self._rebuild(self._top, self._root, self._found)
                if name == "close":  # a descriptor of this process, which lives on
                    call(*arguments)
                raise PowerCut
            if name in ("open", "mkdir") and not os.path.lexists(arguments[0]):
                result = call(*arguments)
                self._nodes[_identity(arguments[0])] = Node(name == "mkdir")  # a number that was used before is reused
            else:
                result = call(*arguments)
            if name == "open":
                self._paths[result] = Path(arguments[0])
            if name == "fsync":
                self._flush(arguments[0])
            return result

    def _node(self, path: Path) -> Node:
        found = path.lstat()
        return self._nodes.setdefault((found.st_dev, found.st_ino), Node(stat.S_ISDIR(found.st_mode)))

    def _flush(self, fd: int) -> None:
        if not self._flushing(self._paths[fd]):
            return
        found = os.fstat(fd)
        node = self._nodes.setdefault((found.st_dev, found.st_ino), Node(stat.S_ISDIR(found.st_mode)))
        if node.folder:
            node.names = self._listing(self._paths[fd])
        else:
            node.data = os.pread(fd, found.st_size, 0)

    def _flush_everything(self, path: Path, node: Node) -> None:
        if not node.folder:
            node.data = path.read_bytes()
            return
        node.names = self._listing(path)
        for name, inner in node.names.items():
            self._flush_everything(path / name, inner)

    def _listing(self, path: Path) -> dict[str, Node]:
        return {entry.name: self._node(entry) for entry in path.iterdir()}

    def _rebuild(self, node: Node, live: Path | None, target: Path) -> None:
        """Write ``node`` as it would be found; ``live`` is where it is now, None if it was deleted or replaced."""
        if not node.folder:
            target.write_bytes(self._contents(node, live))
            return
        target.mkdir()
        present = {} if live is None else self._listing(live)
        as_it_is = live is not None and (self._way == "names" or (self._way == "random" and self._dice.random() < 0.5))
        for name, inner in sorted((present if as_it_is else node.names).items()):
            where = None
            if live is not None:
                # A file that was renamed since still has its bytes, under its new name.
                where = next((live / now for now, other in present.items() if other is inner), None)
            self._rebuild(inner, where, target / name)

    def _contents(self, node: Node, live: Path | None) -> bytes:
        flushed = node.data or b""
        if self._way == "strict" or live is None:
            return flushed
        current = live.read_bytes()
        old = flushed[: len(current)].ljust(len(current), b"\0")
        if self._way == "names":
            return old
        pieces = [
            (old if self._dice.random() < 0.5 else current)[start : start + SECTOR]
            for start in range(0, len(current), SECTOR)
        ]
        whole = b"".join(pieces)
        # What was appended may be missing; what was there at the last flush is.
        return whole[: self._dice.choice((len(current), max(len(flushed), self._dice.randint(0, len(current)))))]


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
