"""System calls that fail on purpose: the k-th one, or all that a test names."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from packer.system import System

READS = ("pread", "drop_cache", "available", "close")


class Faults:
    """Counts the calls made through :attr:`system` and fails call number ``at`` with ``code``.

    ``watch`` names the calls that count; by default all that can run out of space or be refused. ``log`` has the
    names of all calls in order.
    """

    def __init__(self, at: int = -1, code: int = 0, watch: Sequence[str] | None = None, **replaced: Any) -> None:
        self.at = at
        self.code = code
        self.count = 0
        self.log: list[str] = []
        names = [field.name for field in fields(System)]
        self.watch = [name for name in names if name not in READS] if watch is None else list(watch)
        defaults = System()
        calls = {name: self._wrap(name, replaced.get(name, getattr(defaults, name))) for name in names}
        self.system = System(**calls)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            self.log.append(name)
            if name in self.watch:
                self.count += 1
                if self.count == self.at:
                    raise OSError(self.code, os.strerror(self.code))
            return call(*arguments)

        return wrapped
