"""The small files beside a model's weights (tokenizer, configuration), from a container or a checkpoint directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from formats import strict_json
from formats.assets import MAX_ASSET_BYTES
from formats.checkpoint import CONFIG_NAME
from formats.container import Container, missing_manifest_hint, open_container
from formats.errors import EnvironmentProblem, FormatError, IntegrityError, UsageError
from formats.families import TextConfig, read_text_model
from formats.files import read_exactly
from formats.manifest import ASSETS_DIR, FILE_NAME, AssetInfo


def is_container(path: Path) -> bool:
    """Whether ``path`` is to be opened as a container: its root says so, whatever else lies there."""
    return os.path.lexists(path / FILE_NAME)


def read_assets(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The bytes of those files among ``names`` that the model has.

    Args:
        path: a container or a checkpoint directory.
        names: relative to the checkpoint's own folder.

    Raises:
        FormatError: a file is too long or no regular file; the container cannot be opened.
        IntegrityError: a container's file is not what was packed.
        EnvironmentProblem: a file cannot be read.
    """
    if not is_container(path):
        found = {name: _from_directory(path, name) for name in names}
        return {name: data for name, data in found.items() if data is not None}
    with open_container(path) as container:
        wanted = {f"{ASSETS_DIR}/{name}": name for name in names}
        return {
            wanted[info.path]: read_asset(container, info) for info in container.manifest.assets if info.path in wanted
        }


def read_config(path: Path) -> TextConfig:
    """The text tower's configuration of a container or checkpoint directory; nothing else is opened.

    Raises:
        UsageError: no such directory.
        FormatError: it has no configuration, or a malformed one.
    """
    return read_text_model(strict_json.parse_object(read_config_bytes(path), where=CONFIG_NAME), CONFIG_NAME)[1]


def read_config_bytes(path: Path) -> bytes:
    """The configuration as it stands there.

    Raises:
        UsageError: no such directory.
        FormatError: it has no configuration.
    """
    if not path.is_dir():
        raise UsageError("no such directory", where=path, expected="a container or a checkpoint directory")
    data = read_assets(path, (CONFIG_NAME,)).get(CONFIG_NAME)
    if data is None:
        raise FormatError(
            "neither a container nor a checkpoint",
            where=path,
            expected=f"{FILE_NAME} or {CONFIG_NAME}",
            hint=missing_manifest_hint(path),
        )
    return data


def read_asset(container: Container, info: AssetInfo) -> bytes:
    """The bytes of one of a container's small files, proved by their digest.

    Raises:
        FormatError: it is too long.
        IntegrityError: it is not what was packed.
    """
    _check_length(info.bytes, info.path)
    data = read_exactly(container.file(info.path), 0, info.bytes, where=info.path) if info.bytes else b""
    found = blake3(data).hexdigest()
    if found != info.blake3:
        raise IntegrityError("file was changed", where=info.path, expected=info.blake3, found=found)
    return data


def _from_directory(directory: Path, name: str) -> bytes | None:
    try:
        fd = os.open(directory / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=name) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError("not a regular file", where=name)
        _check_length(status.st_size, name)
        return read_exactly(fd, 0, status.st_size, where=name) if status.st_size else b""
    finally:
        os.close(fd)


def _check_length(length: int, name: str) -> None:
    if length > MAX_ASSET_BYTES:
        raise FormatError("file is too long", where=name, expected=f"at most {MAX_ASSET_BYTES} bytes", found=length)
