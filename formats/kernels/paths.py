"""Which path the kernels take: what was compiled, what runs on this machine, what the environment asks for."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from formats.errors import EnvironmentProblem

VARIABLE: Final = "MOEPACK_KERNEL"
NUMPY: Final = "numpy"


@dataclass(frozen=True)
class Selection:
    """The path in use: its name, and why it is this one (``best``, ``forced``, or ``not compiled``)."""

    name: str
    reason: str


@functools.cache
def _compiled() -> ModuleType | None:
    try:
        return importlib.import_module("formats.kernels._native")
    except ImportError:
        return None


@functools.cache
def _numbers() -> dict[str, int]:
    """Compiled paths that run on this machine, best first, and their numbers in the module."""
    native = _compiled()
    numbers: dict[str, int] = {}
    for name, number in native.available() if native else ():
        numbers.setdefault(name, number)  # one name may have variants; the first is the best
    return numbers


def available_paths() -> tuple[str, ...]:
    """Names of the paths that run on this machine, best first; ``numpy`` is always the last."""
    return (*_numbers(), NUMPY)


@functools.cache
def selection() -> Selection:
    """The path that is used where none is named; commands print it when it is ``numpy``.

    Raises:
        EnvironmentProblem: ``MOEPACK_KERNEL`` names a path that does not run here.
    """
    forced = os.environ.get(VARIABLE, "")
    names = available_paths()
    if forced and forced not in names:
        raise EnvironmentProblem(
            f"kernel path {forced!r} does not run here", where=VARIABLE, expected=" or ".join(names), found=forced
        )
    if forced:
        return Selection(forced, "forced")
    return Selection(names[0], "best" if len(names) > 1 else "not compiled")


def resolve(name: str | None) -> tuple[Any, int]:
    """(module, number) of a compiled path, or (None, 0) for the twins."""
    name = selection().name if name is None else name
    if name == NUMPY:
        return None, 0
    if name not in _numbers():
        raise ValueError(f"no kernel path {name!r} on this machine")
    return _compiled(), _numbers()[name]
