"""Writing shards, sound ones and any others, and rounding to the dtypes that numpy does not have."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 32
BIAS = 127
INDEX_NAME = "model.safetensors.index.json"

_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_SIZES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I32": 4, "F64": 8}


@dataclass(frozen=True)
class Tensor:
    """A tensor as it is stored: dtype as safetensors spells it, raw little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def write_shards(directory: Path, tensors: dict[str, Tensor], shards: int) -> None:
    """Spread ``tensors`` over so many shards in order, whole layers together where there are enough, and index them."""
    names = list(tensors)
    units = list(dict.fromkeys(_unit(name) for name in names))
    if shards <= len(units):
        places = [units.index(_unit(name)) * shards // len(units) for name in names]
    else:
        places = [number * shards // len(names) for number in range(len(names))]
    weight_map = {}
    for number in range(shards):
        shard = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
        part = {name: tensors[name] for name, place in zip(names, places, strict=True) if place == number}
        write_safetensors(directory / shard, part)
        weight_map.update(dict.fromkeys(part, shard))
    total = sum(len(tensor.data) for tensor in tensors.values())
    write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _unit(name: str) -> str:
    head, found, tail = name.partition("layers.")
    return tail.split(".")[0] if found else head.split(".")[0]


def write_json(path: Path, value: Any) -> None:
    """The document as the release indents it."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A shard: header in the order given, padded with blanks to a multiple of eight."""
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        assert len(tensor.data) == math.prod(tensor.shape) * _SIZES[tensor.dtype], name
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    write_raw_shard(path, text + b" " * (-len(text) % 8), b"".join(tensor.data for tensor in tensors.values()))


def write_raw_shard(path: Path, header: bytes, data: bytes, length: int | None = None) -> None:
    """Any header before any data; ``length`` is the announced one if it is to be wrong."""
    announced = len(header) if length is None else length
    path.write_bytes(announced.to_bytes(8, "little") + header + data)


def bfloat16_bytes(values: np.ndarray) -> bytes:
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def store(values: np.ndarray, dtype: str) -> Tensor:
    """``values`` as a tensor of a float dtype."""
    if dtype == "BF16":
        return Tensor(dtype, values.shape, bfloat16_bytes(values))
    return Tensor(dtype, values.shape, values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype]).tobytes())


def mxfp4(values: np.ndarray) -> tuple[Tensor, Tensor]:
    """Packed codes [rows, ceil(cols / 2)] and scale bytes [rows, ceil(cols / 32)] of a float32 matrix."""
    rows, cols = values.shape
    groups = -(-cols // GROUP)
    padded = np.zeros((rows, groups * GROUP), np.float32)
    padded[:, :cols] = values
    blocks = padded.reshape(rows, groups, GROUP)
    largest = np.abs(blocks).max(axis=2)
    exponent = np.where(largest > 0, np.frexp(largest)[1] - 1 - 2, 0)  # floor(log2(amax)) - 2
    scaled = np.abs(blocks) / np.ldexp(np.float32(1), exponent)[:, :, None]
    codes = np.searchsorted(_MIDPOINTS, scaled.reshape(-1)).astype(np.uint8).reshape(rows, -1)
    codes |= (np.signbit(padded) << 3).astype(np.uint8)
    codes = np.pad(codes[:, :cols], ((0, 0), (0, cols % 2)))
    packed = codes[:, 0::2] | (codes[:, 1::2] << 4)
    scale = (exponent + BIAS).astype(np.uint8)
    return Tensor("U8", packed.shape, packed.tobytes()), Tensor("U8", scale.shape, scale.tobytes())
