"""A local checkpoint directory: configuration, tensor index, shard headers, and reads of byte ranges.

Opening reads names, lengths and headers, never tensor data. The index decides which files are weights; it is
compared in full with the headers of all shards, so that a later read cannot meet a surprise. A shard is opened
anew for every read: no descriptor keeps a released file's space occupied, and any thread may read at any time.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from formats import names, strict_json
from formats.assets import INDEX_NAME, survey
from formats.errors import EnvironmentProblem, FormatError, UsageError
from formats.files import read_exactly, read_into
from formats.headers import check_arrived, header_path, read_kept_header
from formats.shard import Shard, SourceTensor, check_tensor_name, read_header, refuse_impostor
from formats.spelling import counted, spelled

__all__ = ["Checkpoint", "Shard", "SourceTensor", "open_checkpoint", "read_shard_names"]

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
MAX_CONFIG_BYTES = 16 << 20
MAX_INDEX_BYTES = 512 << 20  # the index of K3 has 60 MB
MAX_SHARDS = 100_000

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_SHOWN = 10  # differences listed in a message
_SHOWN_ABSENT = 2  # shards
_SHOWN_REACH = 80  # characters of a list of layers
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")  # for messages alone; what names mean is the families' business


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. Immutable and safe to share between threads; leaving its context releases nothing.

    Attributes:
        directory: where it lies.
        config: ``config.json``, parsed strictly.
        config_bytes: the same, as stored.
        index_name: the file that names the tensors, for messages.
        shards: the weight files, sorted by name; empty without headers.
        tensors: every tensor by name, in the order of shards and offsets; empty without headers.
        weight_map: name of every tensor -> name of its shard.
        total_size: what the index says all tensors have in bytes; other tools count differently, so never believed.
        has_headers: False if only metadata were there to read.
        ignored: files that are neither weights nor assets, by name.
        assets: small files that go along, as relative POSIX paths.
    """

    directory: Path
    config: dict[str, Any]
    config_bytes: bytes
    index_name: str
    shards: tuple[Shard, ...]
    tensors: Mapping[str, SourceTensor]
    weight_map: Mapping[str, str]
    total_size: int | None
    has_headers: bool
    ignored: tuple[str, ...]
    assets: tuple[str, ...]
    _stamps: Mapping[str, tuple[int, int]] = field(repr=False)
    _arrived: dict[str, tuple[int, int]] = field(default_factory=dict, repr=False, compare=False)  # a cache, no state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes ``start`` to ``stop`` (default: its end) of the tensor ``name``.

        Raises:
            UsageError: no such tensor, or a range outside of it.
            FormatError: the shard was removed or changed since it was opened.
            EnvironmentProblem: the device fails.
        """
        tensor, start, stop = self._range(name, start, stop)
        if start == stop:
            return b""
        with self._shard(tensor.shard) as fd:
            return read_exactly(fd, tensor.offset + start, stop - start, where=tensor.shard)

    def read_into(self, name: str, target: memoryview, start: int = 0) -> None:
        """Fill ``target`` with the bytes from ``start`` on of the tensor ``name``; errors are those of :meth:`read`."""
        tensor, start, _ = self._range(name, start, start + len(target))
        if target:
            with self._shard(tensor.shard) as fd:
                read_into(fd, tensor.offset + start, target, where=tensor.shard)

    def _range(self, name: str, start: int, stop: int | None) -> tuple[SourceTensor, int, int]:
        """A tensor and a range inside of it; its end by default."""
        tensor = self.tensors.get(name)
        if tensor is None:
            why = "no such tensor" if self.has_headers else "only metadata are open: the shards are absent"
            raise UsageError(why, where=f"{self.directory}: {name}")
        stop = tensor.bytes if stop is None else stop
        if not 0 <= start <= stop <= tensor.bytes:
            raise UsageError(
                "range outside of the tensor", where=name, expected=f"0 to {tensor.bytes}", found=f"{start} to {stop}"
            )
        return tensor, start, stop

    @contextmanager
    def _shard(self, shard: str) -> Iterator[int]:
        """A descriptor of a shard that is what it was when it was opened first."""
        fd, stamp = _open_regular(self.directory / shard, shard)
        try:
            self._check_stamp(fd, shard, stamp)
            yield fd
        finally:
            os.close(fd)

    def _check_stamp(self, fd: int, name: str, stamp: tuple[int, int]) -> None:
        """A shard must be what it was; one that was not here when its header was read must begin with that header."""
        planned = self._stamps.get(name)
        if planned is not None:
            if stamp != planned:
                raise FormatError("shard changed while it was in use", where=name, hint="start again")
        elif self._arrived.get(name) != stamp:
            check_arrived(fd, stamp[0], next(shard for shard in self.shards if shard.name == name))
            self._arrived[name] = stamp


def open_checkpoint(directory: Path | str, *, need_headers: bool = True, headers: Path | None = None) -> Checkpoint:
    """Open the checkpoint in ``directory``: read its configuration and index, and the headers of all shards.

    Args:
        directory: holds ``config.json``, and ``model.safetensors.index.json`` with its shards or one
            ``model.safetensors``.
        need_headers: if False and not one shard of the index is present, metadata alone will do.
        headers: a folder that keeps headers of shards (``formats.headers``). A shard whose header is there need not be
            here to open the checkpoint, only to be read, and may come and go.

    Raises:
        UsageError: ``directory`` is none.
        FormatError: anything malformed, absent or contradictory, with file, expected and found.
        EnvironmentProblem: a file that cannot be read.
    """
    directory = Path(directory)
    if not os.path.isdir(directory):  # noqa: PTH112 - unlike the method of Path it never raises
        raise UsageError("no such checkpoint directory", where=directory)
    if not os.path.lexists(directory / CONFIG_NAME):
        raise FormatError("not a checkpoint: the directory has no configuration", where=directory, expected=CONFIG_NAME)
    config_bytes = _read_document(directory, CONFIG_NAME, MAX_CONFIG_BYTES)
    config = strict_json.parse_object(config_bytes, where=CONFIG_NAME)
    index_name, weight_map, total_size = _weight_map(directory, headers)
    wanted = sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]
    kept = frozenset(name for name in wanted if headers is not None and _exists(header_path(headers, name)))
    absent = [name for name in wanted if name not in kept and not _exists(directory / name)]
    files = survey(directory, frozenset(wanted))
    has_headers = need_headers or len(absent) < len(wanted)
    if has_headers and absent:
        raise _absent_shards(directory, absent, weight_map, len(wanted))
    shards, tensors, stamps = _read_headers(directory, wanted, headers) if has_headers else ((), {}, {})
    if not weight_map:
        weight_map = dict.fromkeys(tensors, SINGLE_NAME)
    elif has_headers:
        _compare(weight_map, tensors, index_name)
    return Checkpoint(
        directory,
        config,
        config_bytes,
        index_name,
        tuple(shards),
        MappingProxyType(tensors),
        MappingProxyType(weight_map),
        total_size,
        has_headers,
        files.ignored,
        files.assets,
        MappingProxyType(stamps),
    )


def read_shard_names(directory: Path) -> list[str]:
    """Names of the shards by the index in ``directory``, sorted; nothing else needs to be there.

    Raises:
        FormatError: the index is absent or malformed.
        EnvironmentProblem: it cannot be read.
    """
    return sorted(set(_read_index(directory)[0].values()))


def _exists(path: Path) -> bool:
    """Whether there is a file, links followed; trouble on the way shows when it is opened."""
    return os.path.exists(path)  # noqa: PTH110 - unlike the method of Path it never raises


def _open_regular(path: Path, name: str) -> tuple[int, tuple[int, int]]:
    """Open a regular file without ever waiting (a pipe would block); with its length and modification time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise FormatError("file is absent", where=name) from None
    except OSError as error:
        raise EnvironmentProblem(f"cannot open: {error.strerror}", where=name) from error
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise FormatError("not a regular file", where=name)
    return fd, (status.st_size, status.st_mtime_ns)


def _read_document(directory: Path, name: str, limit: int) -> bytes:
    """A whole JSON file of at most ``limit`` bytes."""
    fd, (size, _) = _open_regular(directory / name, name)
    try:
        if size > limit:
            raise FormatError("file is too large", where=name, expected=f"at most {limit} bytes", found=size)
        data = read_exactly(fd, 0, size, where=name) if size else b""
    finally:
        os.close(fd)
    refuse_impostor(data[:1024], where=name, expected="a JSON document")
    return data


def _weight_map(directory: Path, headers: Path | None) -> tuple[str, dict[str, str], int | None]:
    """The index's name, its map and its total size; one ``model.safetensors`` without an index gives an empty map."""
    if os.path.lexists(directory / INDEX_NAME):
        return INDEX_NAME, *_read_index(directory)
    if _exists(directory / SINGLE_NAME) or (headers is not None and _exists(header_path(headers, SINGLE_NAME))):
        return SINGLE_NAME, {}, None
    try:
        found = sorted(name for name in os.listdir(directory) if not name.startswith("."))  # noqa: PTH208
    except OSError as error:
        raise EnvironmentProblem(f"cannot list the folder: {error.strerror}", where=directory) from error
    if any(name.endswith(".safetensors") for name in found):
        raise FormatError("shards without an index", where=directory, expected=INDEX_NAME)
    pickles = [name for name in found if name.lower().endswith(_PICKLES)]
    if pickles:
        raise FormatError(
            "weights are Python pickles, which can run code and are never opened",
            where=directory,
            expected="safetensors",
            found=", ".join(pickles[:_SHOWN]),
            hint="convert them to safetensors in an environment that you trust",
        )
    raise FormatError("no weights", where=directory, expected=f"{INDEX_NAME} or {SINGLE_NAME}")


def _read_index(directory: Path) -> tuple[dict[str, str], int | None]:
    index = strict_json.parse_object(_read_document(directory, INDEX_NAME, MAX_INDEX_BYTES), where=INDEX_NAME)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("index has no weight_map, or an empty one", where=INDEX_NAME)
    shared: dict[str, str] = {}  # one string a shard, not one a tensor
    for name, shard in weight_map.items():
        if type(shard) is not str:
            raise FormatError(
                "weight_map names no file", where=f"{INDEX_NAME}: {name}", expected="a string", found=repr(shard)[:80]
            )
        check_tensor_name(name, where=INDEX_NAME)
        known = shared.get(shard)
        if known is None:
            known = shared[shard] = _check_shard_name(shard, len(shared))
        weight_map[name] = known
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _check_shard_name(shard: str, already: int) -> str:
    names.check_relative_name(shard, where=INDEX_NAME)
    if not shard.endswith(".safetensors"):
        raise FormatError(
            "index names a file of another kind, which is never opened",
            where=INDEX_NAME,
            expected="*.safetensors",
            found=repr(shard),
        )
    if already >= MAX_SHARDS:
        raise FormatError("index names too many shards", where=INDEX_NAME, expected=f"at most {MAX_SHARDS}")
    return shard


def _read_headers(
    directory: Path, wanted: Iterable[str], headers: Path | None
) -> tuple[list[Shard], dict[str, SourceTensor], dict[str, tuple[int, int]]]:
    shards: list[Shard] = []
    tensors: dict[str, SourceTensor] = {}
    stamps: dict[str, tuple[int, int]] = {}
    for name in wanted:
        kept = None if headers is None else read_kept_header(headers, name)
        if kept is not None:
            shard, entries = kept
        else:
            fd, stamps[name] = _open_regular(directory / name, name)
            try:
                shard, entries = read_header(fd, stamps[name][0], name=name)
            finally:
                os.close(fd)
        shards.append(shard)
        for tensor in entries:
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise FormatError(f"duplicate tensor {tensor.name}", where=name, expected=f"only in {other.shard}")
    return shards, tensors, stamps


def _compare(weight_map: Mapping[str, str], tensors: Mapping[str, SourceTensor], index_name: str) -> None:
    """The index and the headers must name the same tensors in the same shards."""
    differences = []
    for name, shard in weight_map.items():
        tensor = tensors.get(name)
        if tensor is None:
            differences.append(f"{name}: index says {shard}, no shard has it")
        elif tensor.shard != shard:
            differences.append(f"{name}: index says {shard}, it is in {tensor.shard}")
    differences += [
        f"{name}: in {tensor.shard}, not in the index" for name, tensor in tensors.items() if name not in weight_map
    ]
    if differences:
        differences.sort()
        raise FormatError(
            f"index and shards disagree about {len(differences)} tensors",
            where=index_name,
            expected="the same tensors in the same shards",
            found="; ".join(differences[:_SHOWN]),
        )


def _absent_shards(directory: Path, absent: list[str], weight_map: Mapping[str, str], total: int) -> FormatError:
    gone = frozenset(absent)
    lost = sorted(name for name, shard in weight_map.items() if shard in gone)
    layers = sorted({int(match[1]) for match in map(_LAYER.search, lost) if match is not None})
    reach = spelled(layers)
    if len(reach) > _SHOWN_REACH:
        reach = reach[:_SHOWN_REACH].rpartition(",")[0] + ",..."
    hint = "fetch them"
    if len(absent) == total:
        hint += f", or plan from metadata alone: moepack plan {shlex.quote(str(directory))}"
    return FormatError(
        f"{len(absent)} of {total} shards are absent: {', '.join(absent[:_SHOWN_ABSENT])}"
        + (", ..." if len(absent) > _SHOWN_ABSENT else ""),
        where=INDEX_NAME,
        expected="every shard of the index",
        found=f"{counted(len(lost), 'tensor')} out of reach" + (f" in layers {reach}" if layers else ""),
        hint=hint,
    )
