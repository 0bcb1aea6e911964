"""The file of activation statistics: what each expert did with sample text, and what its columns carried.

One safetensors file. Its metadata are ``format``, ``version``, and ``provenance`` as JSON; for every layer with experts
it has, in this order and with its own digest at the end of the file,

    layer.L.tokens             I64 [labels, experts]     tokens routed to each expert
    layer.L.gate               F64 [labels, experts]     sums of their gate weights
    layer.L.saliency           F64 [labels, experts]     sums of gate weight times the norm of the expert's output
    layer.L.halves             F64 [2, labels, experts]  the same of even and of odd windows
    layer.L.input              F64 [inputs]              sums of squares of the experts' input, over all tokens
    layer.L.activation         F64 [width]               sums of squares of the input of down, over all routed tokens
    layer.L.expert_input       F32 [experts, inputs]     the same sums over the tokens of each expert
    layer.L.expert_activation  F32 [experts, width]

    blake3                     U8  [32]                  of all bytes before these

A file of K3 has 2.2 GB, nearly all of it in the last two, so tensors are read when they are asked for. It is input like
any other: everything is bounded and compared before it is believed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats import dtypes, strict_json
from formats.errors import FormatError, UsageError
from formats.families import Architecture
from formats.files import named_file, read_exactly
from formats.shard import SourceTensor, parse_header
from formats.spelling import spelled
from packer.documents import converted
from packer.statistics.proof import DIGEST_BYTES, SUMS, proven_digest
from packer.statistics.recognise import FORMAT, HINT, LENGTH_BYTES, begins_as_header
from packer.statistics.types import (
    LayerStatistics,
    Provenance,
    Single,
    Whole,
    check_layer,
    check_sums,
    check_tokens,
    checked,
    layer_tables,
)
from packer.storage.durable import write_file
from packer.storage.new_file import write_new
from packer.storage.system import SYSTEM, Buffer, System

__all__ = [
    "LayerStatistics",
    "Provenance",
    "Statistics",
    "open_statistics",
    "write_layer",
    "write_statistics",
]

VERSION = "2"
MAX_HEADER_BYTES = 16 << 20  # K3 has 110 KB
_DIGEST_NAME = "blake3"
_NUMPY = {"I64": "<i8", **SUMS}
_NAME = re.compile(r"layer\.(0|[1-9][0-9]{0,4})\.tokens")


@dataclass(frozen=True)
class Statistics:
    """An open file of statistics. Immutable, and safe to share between threads: each read opens the file anew.

    Attributes:
        path: the file.
        blake3: of all its bytes, in hex.
        provenance: what it is of.
        layers: with experts, ascending.
        inputs: columns of gate and up.
        width: columns of down.
    """

    path: Path
    blake3: str
    provenance: Provenance
    layers: tuple[int, ...]
    inputs: int
    width: int
    _tensors: Mapping[str, SourceTensor] = field(repr=False)
    _stamp: tuple[int, ...] = field(repr=False)

    def check_shapes(self, architecture: Architecture) -> None:
        """Insist that layers and widths are those of a model.

        Raises:
            UsageError: they are not.
        """
        (_, inputs), _, (_, width) = architecture.expert_shapes
        here = {"layers": architecture.moe_layers, "inputs": (inputs,), "width": (width,)}
        for name, expected in here.items():
            found = self.layers if name == "layers" else (getattr(self, name),)
            if found != expected:
                raise UsageError(
                    f"statistics of another model: {name} differ",
                    where=self.path,
                    expected=spelled(expected),
                    found=spelled(found)[:80],
                )

    def layer(self, layer: int) -> LayerStatistics:
        """All sums of a layer, checked. For K3 these are 24 MB.

        Raises:
            UsageError: the layer has no experts.
            FormatError: they contradict each other, or the file changed.
        """
        tables = layer_tables(len(self.provenance.labels), self.provenance.model.experts, self.inputs, self.width)
        found = LayerStatistics(**{name: self._array(layer, name) for name in tables})
        check_layer(found, self.provenance, where=self._where(layer))
        return found

    def tokens(self, layer: int) -> Whole:
        """int64 [labels, experts], tokens routed to each expert; errors as for :meth:`layer`."""
        tokens: Whole = self._array(layer, "tokens")
        check_tokens(tokens, self.provenance, where=self._where(layer))
        return tokens

    def expert_squares(self, layer: int, expert: int, matrix: str) -> Single:
        """Sums of squares of the columns of one expert's matrix over its tokens: float32 [cols].

        Args:
            matrix: ``gate``, ``up`` or ``down``.
        """
        return self._squares(layer, f"expert_{_member(matrix)}", expert)

    def layer_squares(self, layer: int, matrix: str) -> NDArray[np.float64]:
        """The same of all experts of a layer together, float64 [cols]: over its tokens, for down over all choices."""
        return self._squares(layer, _member(matrix), None)

    def _squares(self, layer: int, name: str, row: int | None) -> NDArray[Any]:
        values = self._array(layer, name, row)
        check_sums(values, where=f"{self._where(layer)}{name}{'' if row is None else [row]}")
        return values

    def _where(self, layer: int) -> str:
        return f"{self.path}: layer.{layer}."

    def _array(self, layer: int, name: str, row: int | None = None) -> NDArray[Any]:
        tensor = self._tensors.get(f"layer.{layer}.{name}")
        if tensor is None:
            raise UsageError(
                "statistics have no such layer", where=self.path, expected=spelled(self.layers), found=layer
            )
        shape, offset, length = tensor.shape, tensor.offset, tensor.bytes
        if row is not None:
            if not 0 <= row < shape[0]:
                raise UsageError("no such expert", where=self.path, expected=f"0 to {shape[0] - 1}", found=row)
            length //= shape[0]
            shape, offset = shape[1:], offset + row * length
        with named_file(self.path, hint=HINT) as fd:
            if _stamp(fd) != self._stamp:
                raise FormatError("statistics changed while they were in use", where=self.path, hint="start again")
            data = read_exactly(fd, offset, length, where=str(self.path))
        return np.frombuffer(data, _NUMPY[tensor.dtype]).reshape(shape)


def _member(matrix: str) -> str:
    return "activation" if matrix == "down" else "input"


def open_statistics(path: Path) -> Statistics:
    """Open a file of statistics: read its header, take its digest, and see that sums are numbers.

    Whether the sums of a layer agree with each other is checked when they are read.

    Raises:
        UsageError: there is no such file.
        FormatError: it is no such file, not the bytes that were written, or of an unknown version.
        EnvironmentProblem: it cannot be read.
    """
    where = str(path)
    with named_file(path, hint=HINT) as fd:
        stamp = _stamp(fd)
        size = os.fstat(fd).st_size
        tensors, metadata = _header(fd, size, where)
        provenance = _provenance(metadata, where)
        layers, inputs, width = _check_tables(tensors, provenance, where)
        digest = proven_digest(fd, size, tensors.values(), where)
        if _stamp(fd) != stamp:
            raise FormatError("statistics changed while they were read", where=where, hint="start again")
    return Statistics(path, digest, provenance, layers, inputs, width, MappingProxyType(tensors), stamp)


def _stamp(fd: int) -> tuple[int, ...]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _header(fd: int, size: int, where: str) -> tuple[dict[str, SourceTensor], dict[str, str]]:
    """The tensors by name, in the order of the file, and the metadata."""
    start = read_exactly(fd, 0, LENGTH_BYTES + 1, where=where) if size > LENGTH_BYTES else b""
    if not begins_as_header(start):  # a text, say: what its first bytes would be as a length helps nobody
        raise FormatError("not a statistics file of moepack calibrate", where=where, hint=HINT)
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise FormatError(
            "not a file of statistics: its header has an impossible length",
            where=where,
            offset=0,
            expected=f"2 to {MAX_HEADER_BYTES}",
            found=length,
        )
    if length > size - LENGTH_BYTES:
        raise FormatError(
            "file of statistics is cut short inside its header",
            where=where,
            expected=f"{LENGTH_BYTES + length} bytes or more",
            found=size,
        )
    raw = read_exactly(fd, LENGTH_BYTES, length, where=where)
    tensors = parse_header(raw, size - LENGTH_BYTES - length, name=where)
    metadata = strict_json.parse_object(raw, where=where).get("__metadata__", {})
    return {tensor.name: tensor for tensor in tensors}, metadata


def _provenance(metadata: Mapping[str, str], where: str) -> Provenance:
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        if metadata.get(key) != expected:
            raise FormatError(
                "not a file of statistics that this version reads",
                where=f"{where}: {key}",
                expected=expected,
                found=repr(metadata.get(key))[:80],
            )
    if set(metadata) != {"format", "version", "provenance"}:
        raise FormatError("metadata have other members", where=where, expected="format, version, provenance")
    place = f"{where}: provenance"
    document = strict_json.parse_object(metadata["provenance"].encode(), where=place)
    return checked(converted(document, Provenance, where=place, error=FormatError), place, FormatError)


def _check_tables(
    tensors: Mapping[str, SourceTensor], provenance: Provenance, where: str
) -> tuple[tuple[int, ...], int, int]:
    """Layers, columns of gate and of down, once every tensor is seen to be what these call for."""
    matches = [_NAME.fullmatch(name) for name in tensors]
    layers = tuple(int(match[1]) for match in matches if match is not None)
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= provenance.model.hidden_layers:
        raise FormatError("layers are not ascending layers of the model", where=where, found=spelled(layers)[:80])
    widths = []
    for name in ("input", "activation"):
        tensor = tensors.get(f"layer.{layers[0]}.{name}")
        if tensor is None or len(tensor.shape) != 1 or not tensor.shape[0]:
            raise FormatError("not a row of sums", where=f"{where}: layer.{layers[0]}.{name}")
        widths.append(tensor.shape[0])
    expected = _all_tables(layers, layer_tables(len(provenance.labels), provenance.model.experts, *widths))
    for name, (tensor, wanted) in zip(expected, zip(tensors.values(), expected.values(), strict=False), strict=False):
        if (tensor.name, tensor.dtype, tensor.shape) != (name, *wanted):
            raise FormatError(
                "tensors are not those of statistics",
                where=where,
                offset=tensor.offset,
                expected=f"{name} {wanted[0]} {list(wanted[1])}",
                found=f"{tensor.name[:80]} {tensor.dtype} {list(tensor.shape)}",
            )
    if len(tensors) != len(expected):
        raise FormatError("tensors are missing or too many", where=where, expected=len(expected), found=len(tensors))
    return layers, widths[0], widths[1]


def _all_tables(
    layers: Sequence[int], tables: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor by its name, in the order of the file."""
    found = {f"layer.{layer}.{name}": table for layer in layers for name, table in tables.items()}
    return found | {_DIGEST_NAME: ("U8", (DIGEST_BYTES,))}


def write_statistics(
    path: Path,
    provenance: Provenance,
    layers: Sequence[int],
    sums: Iterable[LayerStatistics],
    *,
    system: System = SYSTEM,
) -> str:
    """Write a file of statistics, layer by layer: one layer's sums are held at a time.

    Args:
        path: of the file; nothing may have that name.
        provenance: what they are of.
        layers: with experts, ascending, at least one.
        sums: of each of them, in this order; arrays of other dtypes are converted.
        system: the system calls.

    Returns:
        The file's BLAKE3, in hex.

    Raises:
        UsageError: something has that name already or gets it meanwhile, its folder is not there, or the provenance
            cannot be stored.
        FormatError: sums that are not finite, or that contradict each other.
        EnvironmentProblem: it cannot be written.
    """
    total, pieces = _content(provenance, layers, sums)
    return write_new(path, pieces, needed=total, system=system)[1].hex()


def write_layer(
    path: Path, provenance: Provenance, layer: int, sums: LayerStatistics, *, system: System = SYSTEM
) -> str:
    """Write the sums of one layer as a file of statistics of its own, in a work folder: what has its name is replaced.

    Result and errors are those of :func:`write_statistics`.
    """
    total, pieces = _content(provenance, [layer], [sums])
    return write_file(path, pieces, needed=total, system=system)[1].hex()


def _content(
    provenance: Provenance, layers: Sequence[int], sums: Iterable[LayerStatistics]
) -> tuple[int, Iterator[Buffer]]:
    """The length of a file, and its bytes in order."""
    parts = iter(sums)
    first = next(parts)
    (inputs,), (width,) = first.input.shape, first.activation.shape
    tables = layer_tables(len(provenance.labels), provenance.model.experts, inputs, width)
    head, total = _head(provenance, layers, tables)

    def pieces() -> Iterator[Buffer]:
        hasher = blake3(head)
        yield head
        for layer, found in zip(layers, chain([first], parts), strict=True):
            stored: dict[str, NDArray[Any]] = {}
            for name, (dtype, shape) in tables.items():
                with np.errstate(over="ignore"):  # beyond float32: seen as what it is by the check
                    stored[name] = np.ascontiguousarray(getattr(found, name), _NUMPY[dtype])
                if stored[name].shape != shape:
                    raise ValueError(f"layer {layer}: {name} has shape {stored[name].shape}, expected {shape}")
            check_layer(LayerStatistics(**stored), provenance, where=f"layer.{layer}.")
            for array in stored.values():
                hasher.update(array.data.cast("B"))
                yield array.data.cast("B")
        yield hasher.digest()

    return total, pieces()


def _head(
    provenance: Provenance, layers: Sequence[int], tables: Mapping[str, tuple[str, tuple[int, ...]]]
) -> tuple[bytes, int]:
    """Length and header as safetensors has them, filled up to 8 bytes, and the length of the whole file."""
    try:
        text = msgspec.json.encode(provenance).decode()
        document = strict_json.parse_object(text.encode(), where="provenance")
        checked(converted(document, Provenance, where="provenance"), "provenance", UsageError)
    except UnicodeEncodeError as error:
        raise UsageError(f"provenance is not text: {error.reason}", where="provenance") from None
    entries: dict[str, Any] = {"__metadata__": {"format": FORMAT, "version": VERSION, "provenance": text}}
    end = 0
    for name, (dtype, shape) in _all_tables(layers, tables).items():
        length = dtypes.by_name(dtype).itemsize * int(np.prod(shape, dtype=np.int64))
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + length]}
        end += length
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header, LENGTH_BYTES + len(header) + end
