"""The header of one safetensors file, read strictly: eight bytes of length, JSON, then the data without gaps.

Only the header is read here. Every number in it is compared with the length of the open file before anything
is allocated or believed; the tensors must tile the data from the first byte to the last.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from formats import dtypes, strict_json
from formats.errors import FormatError
from formats.files import read_exactly

HEADER_LIMIT = 100_000_000  # the limit that safetensors itself sets
MAX_RANK = 8
MAX_DIMENSION = (1 << 63) - 1
MAX_TENSOR_NAME_BYTES = 1024

_LENGTH_BYTES = 8
_HEAD_BYTES = 1024  # enough to tell what else a file may be
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # NUL, newline, escape: a list of names must stay a list of lines
_MEMBERS = frozenset({"dtype", "shape", "data_offsets"})
_LFS = b"version https://git-lfs.github.com/spec/"
_IMPOSTORS = (
    (b"PK\x03\x04", "a zip archive, probably a PyTorch pickle (never opened)"),
    (b"\x80\x02", "a Python pickle (never opened)"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip file"),
)


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a checkpoint: ``bytes`` bytes at the absolute ``offset`` in the file ``shard``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint: its length, and the BLAKE3 of its header (length field included) in hex."""

    name: str
    bytes: int
    header_blake3: str


def impostor(head: bytes) -> str | None:
    """What ``head`` (the first kilobyte of a file) is instead of a shard or a JSON document, if that is known."""
    if head.startswith(_LFS):
        fields = dict(line.split(" ", 1) for line in head.decode("utf-8", "replace").splitlines() if " " in line)
        return f"a Git LFS pointer to {fields.get('oid', 'an unknown object')}, {fields.get('size', 'unknown')} bytes"
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<body", b"<!--")):
        line = head.strip().splitlines()[0][:80].decode("utf-8", "replace")
        return f"an HTML page beginning {line!r}"
    for magic, name in _IMPOSTORS:
        if head.startswith(magic):
            return name
    return None


def refuse_impostor(head: bytes, *, where: str, expected: str) -> None:
    """Raise if ``head`` shows that quite another file stands in the place of ``where``.

    Raises:
        FormatError: naming what stands there.
    """
    found = impostor(head)
    if found is not None:
        pointer = head.startswith(_LFS)
        raise FormatError(
            "the object that this pointer stands for is absent" if pointer else "another kind of file stands here",
            where=where,
            expected=expected,
            found=found,
            hint="fetch the real file, for example with `git lfs pull` or `moepack fetch`",
        )


def read_header(fd: int, size: int, *, name: str) -> tuple[Shard, list[SourceTensor]]:
    """Read and check the header of the open shard ``name`` of ``size`` bytes.

    Returns:
        The shard, and its tensors ordered by offset.

    Raises:
        FormatError: naming the rule that is broken, with expected and found values.
    """
    head = read_exactly(fd, 0, min(size, _HEAD_BYTES), where=name)
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if size < _LENGTH_BYTES or not 2 <= length <= min(HEADER_LIMIT, size - _LENGTH_BYTES) or head[8:9] != b"{":
        # Only now: a sound length can begin with the magic bytes of some other format.
        refuse_impostor(head, where=name, expected="a safetensors file")
    if size < _LENGTH_BYTES:
        raise FormatError(
            "shard is cut short inside its length field", where=name, offset=0, expected="10 bytes or more", found=size
        )
    if not 2 <= length <= HEADER_LIMIT:
        raise FormatError(
            "header length is out of range", where=name, offset=0, expected=f"2 to {HEADER_LIMIT}", found=length
        )
    if length > size - _LENGTH_BYTES:
        raise FormatError(
            "shard is cut short inside its header",
            where=name,
            offset=0,
            expected=f"{_LENGTH_BYTES + length} bytes or more",
            found=size,
        )
    raw = read_exactly(fd, 0, _LENGTH_BYTES + length, where=name)
    tensors = parse_header(raw[_LENGTH_BYTES:], size - _LENGTH_BYTES - length, name=name)
    return Shard(name, size, blake3(raw).hexdigest()), tensors


def parse_header(data: bytes, data_bytes: int, *, name: str) -> list[SourceTensor]:
    """Check the JSON of a header against the ``data_bytes`` bytes that follow it.

    Returns:
        The tensors ordered by offset, offsets counted from the start of the file.

    Raises:
        FormatError: naming shard and tensor.
    """
    if data[:1] != b"{":
        raise FormatError(
            "header does not start with a brace", where=name, offset=_LENGTH_BYTES, expected="'{'", found=repr(data[:1])
        )
    header = strict_json.parse_object(data, where=name)
    _check_metadata(header.pop("__metadata__", {}), name)
    base = _LENGTH_BYTES + len(data)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # a shard repeats few shapes: keep one tuple of each
    tensors = [_entry(key, value, name, base, data_bytes, shapes) for key, value in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.bytes))
    _check_tiling(tensors, base, data_bytes, name)
    return tensors


def check_tensor_name(name: str, *, where: str) -> None:
    """Refuse names that cannot be stored, listed or shown: empty, above 1,024 bytes, or with a control character.

    Raises:
        FormatError: naming ``where``.
    """
    if name.isascii() and name.isprintable() and 0 < len(name) <= MAX_TENSOR_NAME_BYTES:
        return  # almost always, and quickly
    if not 0 < len(name) <= MAX_TENSOR_NAME_BYTES or (
        not name.isascii() and len(name.encode("utf-8", "replace")) > MAX_TENSOR_NAME_BYTES
    ):
        raise FormatError("tensor name is empty or too long", where=where, found=repr(name[:80]))
    if _CONTROL.search(name):
        raise FormatError("tensor name has a control character", where=where, found=repr(name[:80]))


def _check_metadata(metadata: Any, shard: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError("__metadata__ is not an object of strings", where=shard)


def _entry(
    name: str, value: Any, shard: str, base: int, data_bytes: int, shapes: dict[tuple[int, ...], tuple[int, ...]]
) -> SourceTensor:
    check_tensor_name(name, where=shard)
    where = f"{shard}: {name}"
    if type(value) is not dict or value.keys() != _MEMBERS:
        found = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise FormatError(
            "tensor entry has other members", where=where, expected=", ".join(sorted(_MEMBERS)), found=found[:200]
        )
    dtype = dtypes.by_name(value["dtype"], where=where)
    shape = _shape(value["shape"], where)
    start, end = _offsets(value["data_offsets"], data_bytes, where)
    expected = math.prod(shape) * dtype.itemsize
    if end - start != expected:
        raise FormatError(
            f"shape {list(shape)} and dtype {dtype.name} do not fill the span",
            where=where,
            expected=f"{expected} bytes",
            found=f"{end - start} bytes",
        )
    return SourceTensor(name, dtype.name, shapes.setdefault(shape, shape), shard, base + start, expected)


def _shape(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FormatError("shape is not a list", where=where, found=type(value).__name__)
    if len(value) > MAX_RANK:
        raise FormatError(
            "shape has too many dimensions", where=where, expected=f"at most {MAX_RANK}", found=len(value)
        )
    for size in value:
        if type(size) is not int or not 0 <= size <= MAX_DIMENSION:
            raise FormatError(
                "dimension is not an integer in range",
                where=where,
                expected=f"0 to {MAX_DIMENSION}",
                found=repr(size)[:80],
            )
    return tuple(value)


def _offsets(value: Any, data_bytes: int, where: str) -> tuple[int, int]:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not int or type(value[1]) is not int:
        raise FormatError("data_offsets are not two integers", where=where, found=repr(value)[:80])
    start, end = value
    if not 0 <= start <= end:
        raise FormatError("data_offsets run backwards or start below zero", where=where, found=f"{start} to {end}")
    if end > data_bytes:
        raise FormatError(
            "tensor ends past the data: the shard is cut short or its header is wrong",
            where=where,
            expected=f"at most {data_bytes}",
            found=end,
        )
    return start, end


def _check_tiling(tensors: list[SourceTensor], base: int, data_bytes: int, shard: str) -> None:
    """From the first data byte to the last, each tensor begins where the one before it ends."""
    at, before = base, "the start of the data"
    for tensor in tensors:
        if tensor.offset != at:
            verb = "overlaps" if tensor.offset < at else "leaves unused bytes after"
            raise FormatError(
                f"tensor {tensor.name} {verb} {before}",
                where=shard,
                offset=tensor.offset,
                expected=f"start at byte {at}",
                found=tensor.offset,
            )
        at, before = tensor.offset + tensor.bytes, tensor.name
    if at != base + data_bytes:
        raise FormatError(
            f"unused bytes after {before}",
            where=shard,
            offset=at,
            expected=f"end of file at byte {at}",
            found=f"{base + data_bytes} bytes",
        )
