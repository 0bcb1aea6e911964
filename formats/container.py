"""Reading a container: one expert with one read, one tensor with one read, nothing loaded early (SPEC section 9).

Opening reads the manifest and compares the lengths of all files; a layer's index rows are read, and proved against
their digest, when the layer is first asked for. Whatever is handed out agrees with the manifest, and on request the
bytes agree with their digests too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from blake3 import blake3

from formats import codecs, layout
from formats.agreement import check_header, check_rows
from formats.errors import FormatError, IntegrityError, UsageError
from formats.files import file_bytes, open_directory, open_inside, read_exactly
from formats.index import INDEX_ROW_BYTES, IndexRow, unpack_index_header, unpack_index_rows
from formats.layout import Matrix, RecordHeader, Section, SectionKind
from formats.manifest import EXPERTS_DIR, FILE_NAME, MAX_BYTES, WORK_DIR, LayerInfo, Manifest, TensorInfo, decode
from formats.trunk import check_tensor_bytes, tensor_codec

STREAM_BYTES = 16 << 20  # how much of a long tensor or file is held at a time


@dataclass(frozen=True)
class Record:
    """One expert, complete: its header and all its bytes."""

    header: RecordHeader
    data: bytes
    where: str

    def section(self, kind: SectionKind, matrix: int) -> memoryview:
        """The bytes of one section, the matrix' own or the shared one."""
        return self.bytes_of(self.header.section(kind, matrix))

    def matrix(self, matrix: Matrix) -> np.ndarray:
        """The decoded weights, float32 [rows, cols]."""
        return codecs.decode_matrix(self.header, self.bytes_of, matrix)

    def bytes_of(self, section: Section) -> memoryview:
        """The bytes of a section of this record."""
        return memoryview(self.data)[section.offset : section.offset + section.bytes]


class Container:
    """An open container. Safe to use from several threads; close it, or use it in a ``with`` statement."""

    def __init__(self, path: Path, directory_fd: int, manifest: Manifest, container_id: str) -> None:
        self.path = path
        self.manifest = manifest
        self.container_id = container_id
        self._directory_fd = directory_fd
        self._files: dict[str, int] = {}
        self._rows: dict[int, bytes] = {}  # as stored: K3 has 82,432 rows, and objects would take four times as much
        self._layers = {info.layer: info for info in manifest.layers}
        self._tensors = {info.name: info for info in manifest.tensors}
        self._lock = threading.Lock()

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files. A second call does nothing."""
        with self._lock:
            for fd in self._files.values():
                os.close(fd)
            self._files.clear()
            if self._directory_fd >= 0:
                os.close(self._directory_fd)
                self._directory_fd = -1

    def layer(self, layer: int) -> LayerInfo:
        """The manifest's entry of a packed layer."""
        if layer not in self._layers:
            raise UsageError("container holds no experts of this layer", where=self.path, found=layer)
        return self._layers[layer]

    def rows(self, layer: int) -> tuple[IndexRow, ...]:
        """The index rows of a layer, proved against the manifest.

        Raises:
            IntegrityError: the rows are not those that were recorded.
            FormatError: they contradict the manifest or each other.
        """
        return self._unpack_rows(self.layer(layer), 0, self._proved_rows(layer))

    def row(self, layer: int, expert: int) -> IndexRow:
        """The index row of one expert; searched for, since a partial container may have gaps."""
        data = self._proved_rows(layer)
        experts = np.frombuffer(data, "<u4")[1 :: INDEX_ROW_BYTES // 4]  # the second field of each row
        number = int(np.searchsorted(experts, expert))
        if number == experts.size or experts[number] != expert:
            raise UsageError(
                "container does not hold this expert", where=self.path, found=layout.record_name(layer, expert)
            )
        start = INDEX_ROW_BYTES * number
        return self._unpack_rows(self.layer(layer), number, data[start : start + INDEX_ROW_BYTES])[0]

    def largest_record(self, layer: int) -> int:
        """Bytes of the layer's longest record."""
        return int(np.frombuffer(self._proved_rows(layer), "<u8")[3 :: INDEX_ROW_BYTES // 8].max())

    def _proved_rows(self, layer: int) -> bytes:
        with self._lock:
            known = self._rows.get(layer)
        if known is not None:
            return known
        info = self.layer(layer)
        where = self.manifest.index.file
        start = INDEX_ROW_BYTES * (1 + info.first_row)
        data = read_exactly(self.file(where), start, INDEX_ROW_BYTES * info.records, where=where)
        found = blake3(data).hexdigest()
        if found != info.index_blake3:
            raise IntegrityError(
                f"index rows of layer {layer} were changed",
                where=where,
                offset=start,
                expected=info.index_blake3,
                found=found,
            )
        check_rows(self._unpack_rows(info, 0, data), info, where=where)
        with self._lock:
            self._rows[layer] = data
        return data

    def _unpack_rows(self, info: LayerInfo, first: int, data: bytes) -> tuple[IndexRow, ...]:
        where, offset = self.manifest.index.file, INDEX_ROW_BYTES * (1 + info.first_row + first)
        return tuple(unpack_index_rows(data, where=where, offset=offset))

    def header(self, layer: int, expert: int) -> RecordHeader:
        """The header of a record, checked against its index row, without reading the rest."""
        row = self.row(layer, expert)
        info = self.layer(layer)
        data = read_exactly(self.file(info.file), row.offset, layout.RECORD_HEADER_BYTES, where=info.file)
        return self.checked_header(data, row)

    def record(self, layer: int, expert: int, *, check: bool = True) -> Record:
        """One expert, with one read.

        Args:
            layer: layer number, from 0.
            expert: expert number in this container, from 0.
            check: prove the bytes against the digest in the index.
        """
        row = self.row(layer, expert)
        info = self.layer(layer)
        data = read_exactly(self.file(info.file), row.offset, row.bytes, where=info.file)
        if check:
            found = blake3(data).digest()
            if found != row.digest:
                raise IntegrityError(
                    f"record of {layout.record_name(layer, expert)} was changed",
                    where=info.file,
                    offset=row.offset,
                    expected=row.digest.hex(),
                    found=found.hex(),
                )
        header = self.checked_header(data, row)
        return Record(header, data, layout.record_name(layer, expert))

    def checked_header(self, data: bytes, row: IndexRow) -> RecordHeader:
        """The header at the start of ``data``, which must agree with its index row and the manifest."""
        file = self.layer(row.layer).file
        where = f"{file}: {layout.record_name(row.layer, row.expert)}"
        header = layout.unpack_record_header(data, where=where, offset=row.offset)
        check_header(header, row, self.manifest, where=where)
        return header

    def tensor(self, name: str) -> TensorInfo:
        """The manifest's entry of a trunk tensor."""
        if name not in self._tensors:
            raise UsageError("container holds no such tensor", where=self.path, found=name)
        return self._tensors[name]

    def tensor_bytes(self, info: TensorInfo, start: int = 0, stop: int | None = None) -> bytes:
        """A range of a trunk tensor's stored bytes."""
        stop = info.bytes if stop is None else stop
        if not 0 <= start <= stop <= info.bytes:
            raise UsageError(
                "range lies outside the tensor",
                where=info.name,
                expected=f"0 to {info.bytes}",
                found=f"{start} to {stop}",
            )
        return read_exactly(
            self.file(self.manifest.trunk.file), info.offset + start, stop - start, where=self.manifest.trunk.file
        )

    def tensor_digest(self, info: TensorInfo) -> str:
        """The digest of a trunk tensor's bytes as they are now, read in bounded pieces."""
        hasher = blake3()
        for start in range(0, info.bytes, STREAM_BYTES):
            hasher.update(self.tensor_bytes(info, start, min(start + STREAM_BYTES, info.bytes)))
        return hasher.hexdigest()

    def tensor_values(self, info: TensorInfo) -> np.ndarray:
        """A whole trunk tensor, decoded to float32 and in its shape."""
        blocks = [block for _, block in self.tensor_blocks(info)]
        values = np.concatenate([block.reshape(-1) for block in blocks]) if blocks else np.empty(0, np.float32)
        return values.reshape(info.shape)

    def tensor_blocks(self, info: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
        """A trunk tensor, decoded in blocks of rows of bounded size.

        Yields:
            The first row of the block, and float32 [rows, cols]; all sides but the last count as rows.
        """
        codec, parameters = tensor_codec(info, where=info.name)
        rows, cols = codecs.tensor_extents(info.shape)
        sections = codecs.trunk_sections(codec, parameters, info.shape, where=info.name)
        step = max(1, STREAM_BYTES // max(1, 4 * cols))
        for first in range(0, rows, step):
            count = min(step, rows - first)
            parts = {
                part.kind: self.tensor_bytes(
                    info, part.offset + first * part.row_bytes, part.offset + (first + count) * part.row_bytes
                )
                for part in sections
            }
            yield (
                first,
                codecs.decode_rows(
                    codec, parameters, count, cols, parts, scale_exponent=info.scale_exponent, where=info.name
                ),
            )

    def file(self, name: str) -> int:
        """The descriptor of one of the container's files, opened when first asked for."""
        with self._lock:
            if name not in self._files:
                if self._directory_fd < 0:
                    raise UsageError("container is closed", where=self.path)
                self._files[name] = open_inside(self._directory_fd, name, where=name)
            return self._files[name]

    def open_again(self, name: str) -> int:
        """Another descriptor of one of the container's files, for the caller to change and to close."""
        with self._lock:
            if self._directory_fd < 0:
                raise UsageError("container is closed", where=self.path)
            return open_inside(self._directory_fd, name, where=name)


def open_container(path: str | Path) -> Container:
    """Open a container for reading.

    Reads the manifest alone, and compares the length of each file with it.

    Raises:
        FormatError: not a container, unfinished, of an unknown version, or with a file absent or of another length.
        IntegrityError: the manifest does not match its seal.
    """
    path = Path(path)
    directory_fd = open_directory(path, where=str(path))
    try:
        manifest, container_id = decode(read_manifest(directory_fd, path))
        container = Container(path, directory_fd, manifest, container_id)
    except BaseException:
        os.close(directory_fd)
        raise
    try:
        for info in manifest.tensors:
            check_tensor_bytes(info, where=f"{FILE_NAME}: tensors[{info.name}]")
        for name, length in expected_files(manifest).items():
            found = file_bytes(container.file(name))
            if found != length:
                raise FormatError(
                    "file has another length than the manifest says", where=name, expected=length, found=found
                )
        where = manifest.index.file
        announced = unpack_index_header(
            read_exactly(container.file(where), 0, INDEX_ROW_BYTES, where=where), where=where
        )
        if announced != manifest.index.rows:
            raise FormatError(
                "index has another number of rows",
                where=where,
                offset=16,
                expected=manifest.index.rows,
                found=announced,
            )
        where = manifest.trunk.file
        head = read_exactly(container.file(where), 0, layout.TRUNK_HEADER_BYTES, where=where)
        layout.check_trunk_header(head, manifest.trunk.bytes, where=where)
    except BaseException:
        container.close()
        raise
    return container


def missing_manifest_hint(path: Path) -> str | None:
    """What to do about a directory without a manifest; None if there is nothing of a container either."""
    if os.path.lexists(path / WORK_DIR):
        return "an interrupted pack continues when the same pack command is given again"
    if os.path.lexists(path / EXPERTS_DIR):
        return f"get {FILE_NAME} from where the container comes from"
    return None


def read_manifest(directory_fd: int, path: Path) -> bytes:
    """The bytes of the manifest, bounded before they are read."""
    try:
        fd = open_inside(directory_fd, FILE_NAME, where=f"{path}/{FILE_NAME}")
    except FormatError as error:
        if error.what != "file is missing":
            raise
        kind = "finished container" if os.path.lexists(path / WORK_DIR) else "container"
        hint = missing_manifest_hint(path) or "make one with moepack pack"
        raise FormatError(f"not a {kind}: it has no manifest", where=path, hint=hint) from None
    try:
        length = file_bytes(fd)
        if length > MAX_BYTES:
            raise FormatError("manifest is too long", where=FILE_NAME, expected=f"at most {MAX_BYTES}", found=length)
        return read_exactly(fd, 0, length, where=FILE_NAME)
    finally:
        os.close(fd)


def expected_files(manifest: Manifest) -> dict[str, int]:
    """Every file of a container but the manifest, with its length."""
    files = {manifest.index.file: manifest.index.bytes, manifest.trunk.file: manifest.trunk.bytes}
    files |= {info.file: info.bytes for info in manifest.layers}
    files |= {asset.path: asset.bytes for asset in manifest.assets}
    return files
