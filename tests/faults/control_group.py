"""Control groups with a memory limit, for processes that this one starts; made below its own group, and removed again.

The memory controller is mounted in version 1 or in version 2. Version 2 allows no limits below a group that has
members of its own; there the groups stand beside ours, unless ours has a limit, which would be escaped.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

MEMBERS = "cgroup.procs"
_CHILDREN = "cgroup.subtree_control"
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Files:
    """Names of the files of a group, by version."""

    limit: str
    swap: str
    peak: str
    events: str


VERSION_1 = Files(
    "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control"
)
VERSION_2 = Files("memory.max", "memory.swap.max", "memory.peak", "memory.events")


@dataclass(frozen=True)
class Group:
    """A group of this process's making, or one in which it makes some."""

    path: Path
    files: Files

    def limit(self, size: int) -> None:
        """Members may take so many bytes together, and may not swap."""
        (self.path / self.files.limit).write_text(str(size))
        swap = self.path / self.files.swap
        if swap.exists():
            swap.write_text(str(size) if self.files is VERSION_1 else "0")

    def enter(self) -> None:
        """Move this process in."""
        (self.path / MEMBERS).write_text(str(os.getpid()))

    @property
    def peak(self) -> int | None:
        """The most bytes that its members had together; None where the kernel does not tell."""
        path = self.path / self.files.peak
        return int(path.read_text()) if path.exists() else None

    @property
    def kills(self) -> int:
        """How many members the kernel killed because memory ran out."""
        lines = (self.path / self.files.events).read_text().splitlines()
        return sum(int(number) for name, number in (line.split() for line in lines) if name == "oom_kill")

    @contextmanager
    def inner(self, size: int | None = None) -> Iterator[Group]:
        """A new group in this one, with a limit or without; whoever is still in it at the end is killed.

        Raises:
            OSError: it cannot be made here.
        """
        group = Group(self.path / f"moepack-test-{os.getpid()}-{next(_NUMBERS)}", self.files)
        with self._lends_its_controller():
            group.path.mkdir()
            try:
                if size is not None:
                    group.limit(size)
                yield group
            finally:
                group._remove()

    @contextmanager
    def _lends_its_controller(self) -> Iterator[None]:
        """Version 2 gives a group's controllers to the groups in it only when told to."""
        children = self.path / _CHILDREN
        if self.files is VERSION_1 or "memory" in children.read_text().split():
            yield
            return
        children.write_text("+memory")
        try:
            yield
        finally:
            with suppress(OSError):  # somebody else has come to need it
                children.write_text("-memory")

    def _remove(self) -> None:
        """Members that were killed are gone in a moment."""
        for _ in range(100):
            for member in (self.path / MEMBERS).read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(member), signal.SIGKILL)
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.05)
        return self.path.rmdir()


def find_place(version: Files) -> Group:
    """The group in which this process can make others of a version.

    Raises:
        OSError: there is none, with the reason.
    """
    reason = "no memory controller of this version is mounted"
    for place in _places():
        if place.files is not version:
            continue
        try:
            with place.inner(1 << 30):
                return place
        except OSError as error:
            reason = f"{error.strerror}, in {place.path}"
    raise OSError(reason)


def _places() -> Iterator[Group]:
    membership = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        root, mount = left.split()[3:5]
        kind, _, options = right.split()[:3]
        for _, controllers, path in membership:
            inside = os.path.relpath(path, root)
            own = Path(mount) if inside.startswith("..") else Path(mount, inside)
            if kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                yield Group(own, VERSION_1)
            if kind == "cgroup2" and not controllers and "memory" in (own / "cgroup.controllers").read_text().split():
                yield Group(own, VERSION_2)
                if own != Path(mount) and (own / VERSION_2.limit).read_text().strip() == "max":
                    yield Group(own.parent, VERSION_2)
