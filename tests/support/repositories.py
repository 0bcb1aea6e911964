"""Small repositories for tests: files by name, as a hub would serve them."""

from __future__ import annotations

import json
import random
from pathlib import Path

ROOT = Path(__file__).parent.parent


def shard(seed: int, size: int) -> bytes:
    """A safetensors file of ``size`` bytes with one tensor of random bytes."""
    for padding in range(64):
        name = f"layers.{seed}.weight"
        length = size
        for _ in range(4):
            header = json.dumps({name: {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
            header += b" " * padding
            length = size - 8 - len(header)
        data = len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(length)
        if len(data) == size:
            return data
    raise AssertionError(size)


def small_repository(shards: int = 3, shard_bytes: int = 200_000) -> dict[str, bytes]:
    """An indexed checkpoint with some small files, one of them with a name that nobody foresees."""
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    files = {name: shard(number, shard_bytes) for number, name in enumerate(names)}
    weights = {f"layers.{number}.weight": name for number, name in enumerate(names)}
    index = {"metadata": {"total_size": shards * shard_bytes}, "weight_map": weights}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    files["config.json"] = b'{"model_type": "test"}'
    files[".gitattributes"] = b"*.safetensors filter=lfs\n"
    files["empty.txt"] = b""
    files["tokenizer/tiktoken.model"] = random.Random(99).randbytes(5000)
    files["un expected #1?.txt".replace("?", "")] = b"a name with a blank and a hash"
    return files


def folder_repository(directory: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }
