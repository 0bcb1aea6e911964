"""A reader of containers written from SPEC.md alone: standard library, numpy and blake3, nothing of the project.

It is slow and obvious on purpose. Where it and the project differ, one of them, or the specification, is wrong.
"""

import json
import struct
from pathlib import Path

import numpy as np
from blake3 import blake3

GATE, UP, DOWN, SHARED = 0, 1, 2, 255
CODEBOOKS, SCALES, CODES = 1, 2, 3
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def read_manifest(container: Path) -> dict:
    data = (container / "manifest.json").read_bytes()
    body, seal = data[:-83], data[-83:]
    assert seal.startswith(b'"container_id":"')
    assert seal.endswith(b'"}\n')
    assert seal[16:80].decode() == blake3(body).hexdigest()
    manifest = json.loads(data)
    assert manifest["format"] == "moepack"
    assert manifest["format_version"] == 1
    return manifest


def read_record(container: Path, manifest: dict, layer: int, expert: int) -> bytes:
    (entry,) = [item for item in manifest["layers"] if item["layer"] == layer]
    with (container / "index.bin").open("rb") as file:
        file.seek(128 * (1 + entry["first_row"]))
        rows = file.read(128 * entry["records"])
    assert blake3(rows).hexdigest() == entry["index_blake3"]
    for at in range(0, len(rows), 128):
        row = rows[at : at + 128]
        if struct.unpack_from("<II", row) == (layer, expert):
            offset, length = struct.unpack_from("<QQ", row, 16)
            with (container / entry["file"]).open("rb") as file:
                file.seek(offset)
                record = file.read(length)
            assert blake3(record).digest() == row[32:64]
            return record
    raise KeyError((layer, expert))


def decode_record(record: bytes) -> list[np.ndarray]:
    """Float32 gate, up and down."""
    assert record[:8] == b"MOEPACKR"
    codec = struct.unpack_from("<H", record, 28)[0]
    parameters = record[48:64]
    (count,) = struct.unpack_from("<H", record, 64)
    sections = {}
    for number in range(count):
        at = 320 + 64 * number
        kind, matrix = record[at], record[at + 1]
        offset, length = struct.unpack_from("<QQ", record, at + 8)
        sections[kind, matrix] = record[offset : offset + length]
        assert blake3(sections[kind, matrix]).digest() == record[at + 32 : at + 64]
    decode = {1: _rvq, 2: _mxfp4, 3: _group_int, 4: _raw}[codec]
    matrices = []
    for matrix in (GATE, UP, DOWN):
        rows, cols, exponent = struct.unpack_from("<IIi", record, 128 + 64 * matrix)
        own = {kind: data for (kind, owner), data in sections.items() if owner in (matrix, SHARED)}
        matrices.append(decode(own, rows, cols, exponent, parameters))
    return matrices


def _rvq(own: dict, rows: int, cols: int, exponent: int, parameters: bytes) -> np.ndarray:
    dimension, stages, _, _, entries = struct.unpack_from("<BBBBH", parameters)
    vectors = -(-cols // dimension)
    books = np.frombuffer(own[CODEBOOKS], "<f2").reshape(stages, entries, dimension).astype(np.float32)
    scales = np.frombuffer(own[SCALES], "<f2").astype(np.float32) * np.float32(2.0**exponent)
    codes = np.frombuffer(own[CODES], np.uint8).reshape(-(-rows // 64), vectors, stages, 64)
    values = np.zeros((rows, vectors * dimension), np.float32)
    for row in range(rows):
        for vector in range(vectors):
            total = books[0, codes[row // 64, vector, 0, row % 64]]
            for stage in range(1, stages):
                total = total + books[stage, codes[row // 64, vector, stage, row % 64]]
            values[row, vector * dimension : (vector + 1) * dimension] = total * scales[row]
    return values[:, :cols]


def _mxfp4(own: dict, rows: int, cols: int, exponent: int, parameters: bytes) -> np.ndarray:
    bias, _, group = struct.unpack_from("<BBH", parameters)
    assert exponent == 0
    codes = np.frombuffer(own[CODES], np.uint8).reshape(rows, -(-cols // 2))
    scales = np.frombuffer(own[SCALES], np.uint8).reshape(rows, -(-cols // group))
    values = np.zeros((rows, cols), np.float32)
    for row in range(rows):
        for col in range(cols):
            nibble = int(codes[row, col // 2]) >> (4 * (col % 2)) & 15
            magnitude = E2M1[nibble & 7] * 2.0 ** (int(scales[row, col // group]) - bias)
            values[row, col] = np.float32(-magnitude if nibble & 8 else magnitude)
    return values


def decode_group_int(
    codes: bytes, scales: bytes, rows: int, cols: int, exponent: int, bits: int, group: int
) -> np.ndarray:
    groups = -(-cols // group)
    widths = [min(group, cols - at) for at in range(0, cols, group)]
    stride = cols if bits == 8 else sum(-(-width // 2) for width in widths)
    units = np.frombuffer(scales, "<f2").astype(np.float32).reshape(rows, groups) * np.float32(2.0**exponent)
    values = np.zeros((rows, cols), np.float32)
    for row in range(rows):
        at = row * stride
        for number, width in enumerate(widths):
            half = -(-width // 2)
            for column in range(width):
                if bits == 8:
                    code = struct.unpack_from("<b", codes, at + column)[0]
                else:
                    byte = codes[at + column % half]
                    code = (byte & 15 if column < half else byte >> 4) - 8
                values[row, number * group + column] = np.float32(code) * units[row, number]
            at += width if bits == 8 else half
    return values


def _group_int(own: dict, rows: int, cols: int, exponent: int, parameters: bytes) -> np.ndarray:
    bits, _, group = struct.unpack_from("<BBH", parameters)
    return decode_group_int(own[CODES], own[SCALES], rows, cols, exponent, bits, group)


def _raw(own: dict, rows: int, cols: int, exponent: int, parameters: bytes) -> np.ndarray:
    assert exponent == 0
    return decode_raw(own[CODES], parameters[0]).reshape(rows, cols)


def decode_raw(data: bytes, dtype_number: int) -> np.ndarray:
    if dtype_number == 3:  # BF16: the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, {1: "<f4", 2: "<f2"}[dtype_number]).astype(np.float32)


def decode_tensor(container: Path, manifest: dict, name: str) -> np.ndarray:
    """Float32 values of a trunk tensor."""
    (entry,) = [item for item in manifest["tensors"] if item["name"] == name]
    with (container / "trunk.bin").open("rb") as file:
        file.seek(entry["offset"])
        data = file.read(entry["bytes"])
    assert blake3(data).hexdigest() == entry["blake3"]
    if entry["codec"] == "raw":
        return decode_raw(data, {"F32": 1, "F16": 2, "BF16": 3}[entry["dtype"]]).reshape(entry["shape"])
    rows, cols = entry["shape"]
    bits, group = entry["parameters"]["bits"], entry["parameters"]["group"]
    widths = [min(group, cols - at) for at in range(0, cols, group)]
    length = rows * (cols if bits == 8 else sum(-(-width // 2) for width in widths))
    scales_at = -(-length // 64) * 64
    return decode_group_int(data[:length], data[scales_at:], rows, cols, entry["scale_exponent"], bits, group)
