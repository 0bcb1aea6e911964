"""Ways to spoil a checkpoint, and the verdict that a spoiled one must get."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import FormatError
from formats.families import bind

SHARD = "model-00002-of-000003.safetensors"
TEXT = "language_model.model."
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + "\nsize 16777216\n"
PAGE = "\n<!DOCTYPE html>\n<html><head><title>Log in</title></head>" + "x" * 16000 + "</html>"

Attack = Callable[[Path], object]


def verdict(directory: Path, *, need_headers: bool = True) -> str:
    """Open and bind, insist on a refusal, and return its message."""
    with pytest.raises(FormatError) as caught:
        bind(open_checkpoint(directory, need_headers=need_headers))
    assert caught.value.exit_code == 3
    return str(caught.value)


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def file(name: str, content: str | bytes) -> Attack:
    return lambda d: (d / name).write_bytes(content.encode() if isinstance(content, str) else content)
