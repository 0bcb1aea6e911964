"""The released Kimi K3 checkpoint without its weights: real names, shapes, shards and lengths, and holes for data.

The 96 shards have correct headers and their full apparent length, 1.56 TB together, and take a few hundred megabytes
of disk: headers, and whatever contents are asked for. What is not written reads as zeros. The metadata are the
released ones; the order of tensors inside a shard is the order of the index.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from formats.checkpoint import CONFIG_NAME, open_checkpoint
from formats.families import Model, bind
from tests.support.shards import INDEX_NAME, bfloat16_bytes

METADATA = Path(__file__).parents[1] / "data" / "k3-metadata"
SHARDS = 96
TENSORS = 497_220
TENSOR_BYTES = 1_560_860_324_864  # what the released index says all tensors have


@dataclass(frozen=True)
class SparseCheckpoint:
    """What was made: where, the model that its metadata describe, and where each tensor with contents lies."""

    directory: Path
    model: Model
    contents: dict[str, bytes]
    places: dict[str, tuple[str, int]]


def unpack_metadata(directory: Path) -> Path:
    """Configuration and tensor index of the release in ``directory``, without any shard."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_NAME).write_bytes((METADATA / CONFIG_NAME).read_bytes())
    (directory / INDEX_NAME).write_bytes(gzip.decompress((METADATA / f"{INDEX_NAME}.gz").read_bytes()))
    return directory


def make_checkpoint(
    directory: Path, *, experts: Iterable[tuple[int, int]] = (), trunk: Iterable[str] = (), seed: int = 0
) -> SparseCheckpoint:
    """Make the checkpoint.

    Args:
        directory: made if need be.
        experts: (layer, expert) of those whose six tensors get contents, 17.5 MB each.
        trunk: names of other tensors that get contents.
        seed: decides the contents.
    """
    unpack_metadata(directory)
    with open_checkpoint(directory, need_headers=False) as checkpoint:
        model, weight_map = bind(checkpoint), checkpoint.weight_map
    kinds = _kinds(model)
    wanted = [
        name for layer, expert in experts for names in model.expert_names(layer, expert).values() for name in names
    ]
    contents = {name: make_contents(name, *kinds[name][:2], seed) for name in (*wanted, *trunk)}
    by_shard: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        by_shard.setdefault(shard, []).append(name)
    places: dict[str, tuple[str, int]] = {}
    for shard, names in by_shard.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            dtype, shape, length = kinds[name]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + length]}
            end += length
        held = {name: contents[name] for name in names if name in contents}
        base = write_sparse_shard(directory / shard, header, end, held)
        places |= {name: (shard, base + header[name]["data_offsets"][0]) for name in held}
    return SparseCheckpoint(directory, model, contents, places)


def write_sparse_shard(path: Path, header: dict[str, Any], data_bytes: int, contents: dict[str, bytes]) -> int:
    """A shard of ``data_bytes`` bytes of data, of which only ``contents`` are written; returns where its data begin."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data_bytes)
        for name, data in contents.items():
            start, end = header[name]["data_offsets"]
            assert end - start == len(data), name
            os.pwrite(file.fileno(), data, 8 + len(text) + start)
    return 8 + len(text)


def sparse_sha256(path: Path) -> str:
    """SHA-256 of a whole file. Holes are hashed without being read, which halves the time for 16 GB of zeros."""
    hasher = hashlib.sha256()
    zeros = bytes(8 << 20)
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        position = 0
        while position < length:
            try:
                data = os.lseek(file.fileno(), position, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                data = length
            for start in range(position, data, len(zeros)):
                hasher.update(zeros[: min(len(zeros), data - start)])
            if data == length:
                break
            position = os.lseek(file.fileno(), data, os.SEEK_HOLE)
            for start in range(data, position, len(zeros)):
                hasher.update(os.pread(file.fileno(), min(len(zeros), position - start), start))
    return hasher.hexdigest()


def holes_are_free(directory: Path) -> bool:
    """Whether the file system of ``directory`` stores a hole of a gigabyte without taking space for it."""
    path = directory / "hole"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    taken = path.stat().st_blocks * 512
    path.unlink()
    return taken < 1 << 20


def allocated_bytes(directory: Path) -> int:
    """What the files of a directory really take on the disk."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def apparent_bytes(directory: Path) -> int:
    """The lengths of all files of a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def make_contents(name: str, dtype: str, shape: tuple[int, ...], seed: int) -> bytes:
    """Bytes of a tensor, decided by its name and ``seed`` alone: codes, scales of usual size, or normal weights."""
    rng = np.random.default_rng([seed, *name.encode()])
    if name.endswith(".weight_scale"):
        return rng.integers(118, 123, shape, np.uint8).tobytes()
    if dtype == "U8":
        return rng.bytes(int(np.prod(shape)))
    values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
    return bfloat16_bytes(values) if dtype == "BF16" else values.astype("<f4").tobytes()


def _kinds(model: Model) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Dtype, shape and bytes of every tensor that the configuration promises."""
    kinds = {tensor.name: (tensor.dtype, tensor.shape, tensor.bytes) for tensor in model.trunk}
    for layer in model.architecture.moe_layers:
        for tensors in model.expert_tensors.values():
            for tensor in tensors:
                head, _, tail = tensor.template.replace("{layer}", str(layer)).partition("{expert}")
                kind = tensor.dtype, tensor.shape, tensor.bytes
                kinds |= {f"{head}{expert}{tail}": kind for expert in range(model.architecture.experts)}
    return kinds
