"""System calls that fail on purpose: the k-th one, the k-th and all that follow, or all that a test names."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from formats.errors import EnvironmentProblem
from packer.storage.system import System

READS = ("pread", "drop_cache", "available", "close")

Call: TypeAlias = Callable[..., Any]


def wrapped(around: Callable[[str, Call, tuple[Any, ...]], Any], **replaced: Call) -> System:
    """A system each of whose calls goes through ``around(name, call, arguments)``, which may make the call, or not."""
    defaults = System()
    calls = {field.name: replaced.get(field.name, getattr(defaults, field.name)) for field in fields(System)}

    def wrap(name: str, call: Call) -> Call:
        return lambda *arguments: around(name, call, arguments)

    return System(**{name: wrap(name, call) for name, call in calls.items()})


class Faults:
    """Counts the calls made through :attr:`system` and fails call number ``at``.

    ``watch`` names the calls that count; by default all that can run out of space or be refused. ``log`` has the
    names of all calls in order.

    How it fails: with the error ``code``; with ``short`` it does half of what was asked instead (reads and writes
    only); with ``late`` it does everything and then reports the error, as closing always does, because a descriptor
    is gone whatever ``close`` returns; with ``sticky`` every watched call from that one on fails.
    """

    def __init__(
        self,
        at: int = -1,
        code: int = 0,
        watch: Sequence[str] | None = None,
        *,
        short: bool = False,
        late: bool = False,
        sticky: bool = False,
        **replaced: Any,
    ) -> None:
        self.at = at
        self.code = code
        self.count = 0
        self.log: list[str] = []
        self.system = wrapped(self._around, **replaced)
        self.watch = [field.name for field in fields(System) if field.name not in READS] if watch is None else watch
        self._short, self._late, self._sticky = short, late, sticky
        self._guard = threading.Lock()

    def _around(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        with self._guard:
            self.log.append(name)
            self.count += name in self.watch
            due = name in self.watch and (self.count == self.at or (self._sticky and self.count > self.at > 0))
        if not due:
            return call(*arguments)
        if self._short:
            return call(*_half(name, arguments))
        if self._late or name == "close":
            call(*arguments)
        raise OSError(self.code, os.strerror(self.code))


def _half(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for half of the bytes, at least one."""
    fd, data, offset = arguments
    return (fd, data[: -(-len(data) // 2)], offset) if name == "pwrite" else (fd, -(-data // 2), offset)


def failure(call: Callable[[], None]) -> EnvironmentProblem | None:
    """The trouble with the environment in which a call ends, or None if it ends well."""
    try:
        call()
    except EnvironmentProblem as error:
        return error
    return None
