"""Which files beside the weights go along with a checkpoint: tokenizer, configuration, templates, pictures.

A survey of names and lengths only. What is not taken is listed, because nothing is left out silently.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from formats import names
from formats.errors import EnvironmentProblem, FormatError
from formats.shard import refuse_impostor

MAX_ASSET_BYTES = 64 << 20
MAX_FILES = 10_000
INDEX_NAME = "model.safetensors.index.json"

WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    ".pkl",
    ".pickle",
)
_INDEX_SUFFIXES = (".safetensors.index.json", ".bin.index.json")
_POINTER_BYTES = 1024  # a Git LFS pointer is never longer


@dataclass(frozen=True)
class Survey:
    """The files of a checkpoint directory, as relative POSIX paths in sorted order.

    Attributes:
        assets: small files that go along unchanged.
        ignored: everything else, except the shards and the index themselves.
    """

    assets: tuple[str, ...]
    ignored: tuple[str, ...]


def survey(directory: Path, shards: Set[str]) -> Survey:
    """Walk ``directory`` without following links to directories; hidden files and folders are skipped.

    Raises:
        FormatError: more than 10,000 files, or a Git LFS pointer in the place of an asset.
        EnvironmentProblem: a folder that cannot be listed.
    """
    assets: list[str] = []
    ignored: list[str] = []
    taken: set[str] = set()
    for count, (name, path) in enumerate(_walk(directory, "", 1)):
        if count >= MAX_FILES:
            raise FormatError(
                "too many files beside the weights",
                where=directory,
                expected=f"at most {MAX_FILES}",
                hint="is this the checkpoint's own folder?",
            )
        if name in shards or name == INDEX_NAME:
            continue
        if _is_asset(name, path) and names.folded(name) not in taken:
            taken.add(names.folded(name))
            assets.append(name)
        else:
            ignored.append(name)
    return Survey(tuple(assets), tuple(ignored))


def _walk(directory: Path, prefix: str, depth: int) -> Iterator[tuple[str, Path]]:
    """Every visible entry that is not a folder, sorted; a link to a folder counts as an entry."""
    try:
        with os.scandir(directory) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise EnvironmentProblem(f"cannot list the folder: {error.strerror}", where=directory) from error
    for entry in found:
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False) and depth < names.MAX_COMPONENTS:
            yield from _walk(directory / entry.name, f"{prefix}{entry.name}/", depth + 1)
        else:
            yield prefix + entry.name, directory / entry.name


def _is_asset(name: str, path: Path) -> bool:
    lower = name.lower()
    if lower.endswith(WEIGHT_SUFFIXES) or lower.endswith(_INDEX_SUFFIXES):
        return False
    try:
        names.check_relative_name(name)
        status = path.stat()
    except (FormatError, OSError):  # an unsafe name, or a link to nothing
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_ASSET_BYTES:
        return False
    if status.st_size <= _POINTER_BYTES:
        try:
            head = path.read_bytes()
        except OSError as error:
            raise EnvironmentProblem(f"cannot read: {error.strerror}", where=name) from error
        if head.startswith(b"version https://git-lfs"):
            refuse_impostor(head, where=name, expected="the file itself")
    return True
