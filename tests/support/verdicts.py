"""Attacks on containers by name, and the verdict that the command line must give about each.

A :class:`Case` changes a valid container. ``run_case`` gives it to ``moepack verify`` and compares exit code and
message: 3 where it cannot be opened, 1 where damage can be listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from packer.commands import run
from tests.support.containers import Forge, Spec, build_container

Attack: TypeAlias = Callable[[Forge], object]
FileAttack: TypeAlias = Callable[[Path], object]

CLOSED = 3  # refused as a whole
LISTED = 1  # opened; the damage is a finding


@dataclass(frozen=True)
class Case:
    """One malformation.

    Attributes:
        exit_code: of ``moepack verify``.
        message: a regular expression that must be found in what it prints: the place, and expected and found.
        attack: what is changed before everything is sealed again, so that only the broken rule gives it away.
        afterwards: what is changed in the files when all digests are right, for plain damage.
        keep: digests that are not made right again (see :class:`Forge`).
        spec: of the container, the default one if None.
    """

    exit_code: int
    message: str
    attack: Attack | None = None
    afterwards: FileAttack | None = None
    keep: tuple[str, ...] = ()
    spec: Spec | None = None


def put(place: str, value: Any) -> Attack:
    """Set a member of the manifest, ``layers.0.records`` for example; ``...`` removes it."""
    *path, last = [int(key) if key.isdigit() else key for key in place.split(".")]

    def attack(forge: Forge) -> None:
        target: Any = forge.document
        for key in path:
            target = target[key]
        if value is ...:
            del target[last]
        elif callable(value):
            target[last] = value(target[last])
        else:
            target[last] = value

    return attack


def patch(name: str, at: int, data: bytes) -> FileAttack:
    """Overwrite bytes of a file; a negative ``at`` counts from its end."""

    def attack(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        start = at if at >= 0 else len(content) + at
        content[start : start + len(data)] = data
        (path / name).write_bytes(content)

    return attack


def flip(name: str, at: int) -> FileAttack:
    """Change one bit of a file; a negative ``at`` counts from its end."""

    def attack(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[at] ^= 0x10
        (path / name).write_bytes(content)

    return attack


def resize(name: str, change: Callable[[int], int]) -> FileAttack:
    """Cut a file, or lengthen it by zeros."""

    def attack(path: Path) -> None:
        length = (path / name).stat().st_size
        with (path / name).open("r+b") as file:
            file.truncate(change(length))

    return attack


def run_case(case: Case, directory: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Build, attack, verify, compare; what was printed comes back."""
    path = build_container(directory / "model.moepack", case.spec)
    assert verdict(path, capsys)[0] == 0, "the container is sound before"
    forge = Forge(path)
    if case.attack is not None:
        case.attack(forge)
        forge.save(keep=case.keep)
    if case.afterwards is not None:
        case.afterwards(path)
    code, text = verdict(path, capsys)
    assert "internal error" not in text, text
    assert re.search(case.message, text), text
    assert code == case.exit_code, text
    return text


def verdict(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of ``moepack verify`` and all that it printed."""
    capsys.readouterr()
    code = run(["verify", str(path), "--jobs", "1"])
    printed = capsys.readouterr()
    return code, printed.out + printed.err
