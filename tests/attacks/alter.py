"""Changes that several modules of attacks make: of members, fields and spans of bytes, of files, of checkpoints."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.checkpoints import K3, write_checkpoint
from tests.support.shards import write_json
from tests.support.spoil import Attack, verdict

_LARGE = 1 << 24

# Members and bytes


def set_members(target: dict[str, Any], members: Mapping[str, Any]) -> None:
    """Set members of an object; ``...`` removes one, a function gets the old value."""
    for name, value in members.items():
        if value is ...:
            del target[name]
        else:
            target[name] = value(target[name]) if callable(value) else value


def write_field(data: bytearray, at: int, form: str, value: Any) -> None:
    """Write a field in the form of ``struct``; a function gets the old value, and the value is always another one."""
    (old,) = struct.unpack_from(form, data, at)
    new = value(old) if callable(value) else value
    assert new != old
    struct.pack_into(form, data, at, new)


def exchange(data: bytearray, one: int, two: int, length: int) -> None:
    """Two spans of one length in each other's place."""
    first, second = bytes(data[one : one + length]), bytes(data[two : two + length])
    assert first != second
    data[one : one + length], data[two : two + length] = second, first


# Files


def gone(name: str) -> Attack:
    return lambda directory: (directory / name).unlink()


def pipe(name: str) -> Attack:
    """A named pipe in the file's place."""

    def attack(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return attack


def folder(name: str) -> Attack:
    """A folder in the file's place."""

    def attack(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return attack


def link(name: str, target: str) -> Attack:
    """A link in the place of a file or folder, which moves out of the directory to ``../aside``."""

    def attack(directory: Path) -> None:
        (directory / name).rename(directory.parent / "aside")
        (directory / name).symlink_to(target)

    return attack


# Checkpoints


def document(name: str, change: Callable[[dict[str, Any]], object]) -> Attack:
    """Change a JSON file."""

    def attack(directory: Path) -> None:
        found = json.loads((directory / name).read_text())
        change(found)
        write_json(directory / name, found)

    return attack


def configured(place: str, **members: Any) -> Attack:
    """Set members of one object of the configuration; ``...`` removes one. ``place`` is that of K3."""

    def change(config: dict[str, Any]) -> None:
        for step in place.split("."):
            config = config[step] if step != "text_config" else config.get(step, config)
        set_members(config, members)

    return document("config.json", change)


def check_refused(directory: Path, attack: Attack, message: str) -> str:
    """A checkpoint of K3's form is attacked and refused with ``message``; what was said comes back."""
    write_checkpoint(directory, K3)
    before = _contents(directory)
    attack(directory)
    assert _contents(directory) != before
    found = verdict(directory)
    assert re.search(message, found), found
    return found


def _contents(directory: Path) -> dict[str, bytes]:
    """Every file but those that an attack made large."""
    files = [path for path in directory.iterdir() if path.is_file() and path.stat().st_size < _LARGE]
    return {path.name: path.read_bytes() for path in files}
