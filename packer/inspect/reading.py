"""Looking into a container, one step at a time: the whole, a layer, an expert, a matrix.

Each step reads what it shows and no more: the summary reads the manifest and the index, a layer its rows, an expert and
a matrix their record, which is proved. An unfinished pack is shown from its journal.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from formats import codecs
from formats.codecs import mxfp4, rvq
from formats.container import Container, Record, expected_files, open_container
from formats.errors import IntegrityError, UsageError
from formats.index import IndexRow
from formats.layout import Matrix, SectionKind, record_name
from formats.manifest import FILE_NAME, WORK_DIR, Manifest, expert_tensor_names
from formats.spelling import spelled
from packer.inspect.trunk import stored_tensors
from packer.inspect.views import (
    ExpertView,
    FileSize,
    LayerView,
    MatrixLine,
    MatrixView,
    Pruned,
    RecordLine,
    SectionView,
    Spread,
    Summary,
    Unfinished,
)
from packer.preflight import JOURNAL_NAME
from packer.storage import durable
from packer.storage.journal import FileDone, ShardSeen, UnitDone, read_journal
from packer.verify.record_bytes import check_record

_CORNER_ROWS, _CORNER_COLS = 4, 8  # of the decoded values that are shown
_SHOWN_SCALES = 8


def inspect_summary(path: Path | str) -> Summary | Unfinished:
    """The whole container at a glance. Reads the manifest and the index, no weights.

    Raises:
        FormatError: neither a container nor an unfinished pack, or damaged.
    """
    path = Path(path)
    journal = path / WORK_DIR / JOURNAL_NAME
    if path.is_dir() and not (path / FILE_NAME).exists() and journal.is_file():
        return _unfinished(path, journal)
    with open_container(path) as container:
        return _summary(container)


def inspect_layer(path: Path | str, layer: int) -> LayerView:
    """The records of one layer, and its tensors in the trunk. Reads its index rows.

    Raises:
        UsageError: the model has no such layer.
        FormatError: damaged.
    """
    with open_container(path) as container:
        manifest = container.manifest
        last = manifest.architecture.hidden_layers - 1
        if layer > last:
            raise UsageError("no such layer", where=container.path, expected=f"0 to {last}", found=layer)
        tensors = stored_tensors(manifest, layer)
        if layer not in [info.layer for info in manifest.layers]:
            return LayerView(layer, None, 0, 0, 0, (), (), tensors)
        info = container.layer(layer)
        return LayerView(
            layer,
            info.file,
            info.bytes,
            info.experts,
            info.source_experts,
            info.dropped_experts,
            tuple(_line(row) for row in container.rows(layer)),
            tensors,
        )


def inspect_expert(path: Path | str, layer: int, expert: int) -> ExpertView:
    """The header of one record. Reads the layer's index rows and the record, and proves it, piece by piece.

    Raises:
        UsageError: the container does not hold that expert.
        FormatError: damaged; the sections are named.
    """
    with open_container(path) as container:
        _check_known(container, layer, expert)
        row = container.row(layer, expert)
        _prove(container, row)
        header = container.header(layer, expert)
        matrices = tuple(
            MatrixLine(
                matrix.label,
                entry.rows,
                entry.cols,
                entry.scale_exponent,
                entry.rel_error,
                entry.source_digest.hex(),
                _source_tensors(container, row, matrix),
            )
            for matrix, entry in zip(Matrix, header.matrices, strict=True)
        )
        sections = tuple(
            SectionView(section.label, section.offset, section.bytes, section.digest.hex())
            for section in header.sections
        )
        return ExpertView(
            layer,
            expert,
            row.source_expert,
            row.codec.label,
            _parameters(row),
            container.layer(layer).file,
            row.offset,
            row.bytes,
            header.payload_bytes,
            row.rel_error,
            row.digest.hex(),
            matrices,
            sections,
        )


def inspect_matrix(path: Path | str, layer: int, expert: int, matrix: str) -> MatrixView:
    """One matrix, decoded. Reads and checks its record.

    Args:
        matrix: ``gate``, ``up`` or ``down``.

    Raises:
        UsageError: the container does not hold that expert, or there is no such matrix.
        FormatError: damaged.
    """
    if matrix not in [item.label for item in Matrix]:
        raise UsageError("no such matrix", expected="gate, up or down", found=repr(matrix))
    which = Matrix[matrix.upper()]
    with open_container(path) as container:
        _check_known(container, layer, expert)
        row = container.row(layer, expert)
        _prove(container, row)
        record = container.record(layer, expert)
        entry = record.header.matrices[which]
        values = record.matrix(which)
        wide = values.astype(np.float64)
        return MatrixView(
            layer,
            expert,
            matrix,
            row.codec.label,
            _parameters(row),
            entry.rows,
            entry.cols,
            entry.scale_exponent,
            entry.rel_error,
            _source_tensors(container, row, which),
            tuple(tuple(float(value) for value in line) for line in values[:_CORNER_ROWS, :_CORNER_COLS]),
            _scales(record, which),
            float(wide.mean()),
            float(wide.std()),
            float(wide.min()),
            float(wide.max()),
            int(np.count_nonzero(values == 0)),
            _codebooks(record, which),
        )


def _check_known(container: Container, layer: int, expert: int | None = None) -> None:
    """Refuse a layer or an expert that the container does not hold, and say which it does."""
    layers = [info.layer for info in container.manifest.layers]
    if layer not in layers:
        raise UsageError(
            "container holds no experts of this layer",
            where=container.path,
            expected=f"one of the layers {spelled(layers)}" if layers else "none, it holds no experts at all",
            found=layer,
        )
    experts = [row.expert for row in container.rows(layer)]
    if expert is not None and expert not in experts:
        raise UsageError(
            "container does not hold this expert",
            where=container.path,
            expected=f"one of the experts {spelled(experts)} in layer {layer}",
            found=expert,
        )


def _prove(container: Container, row: IndexRow) -> None:
    """Compare a record with its digest and refuse it, by section, if it differs."""
    problems = check_record(container, row, deep=True, step=_uncounted)
    if problems:
        raise IntegrityError("; ".join(problem.what for problem in problems), where=problems[0].where)


def _uncounted(count: int) -> None:
    """Nobody asked how far it is."""


def spread(errors: Sequence[float]) -> Spread:
    """Distribution of errors; the 99th percentile is the smallest value that 99 % do not exceed."""
    if not errors:
        return Spread(0, None, None, None, None)
    ordered = sorted(errors)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return Spread(len(ordered), ordered[0], middle, ordered[math.ceil(0.99 * len(ordered)) - 1], ordered[-1])


def _summary(container: Container) -> Summary:
    manifest = container.manifest
    rows = [row for info in manifest.layers for row in container.rows(info.layer)]
    files = [FileSize(FILE_NAME, _manifest_bytes(container.path))]
    files += [FileSize(name, length) for name, length in expected_files(manifest).items()]
    total = sum(file.bytes for file in files)
    roles: Counter[str] = Counter()
    for tensor in manifest.tensors:
        roles[tensor.role] += tensor.bytes
    weights = manifest.experts.weights
    document = msgspec.to_builtins(manifest)
    return Summary(
        format_version=manifest.format_version,
        format_revision=manifest.format_revision,
        container_id=container.container_id,
        tool=document["tool"],
        architecture=document["architecture"],
        source=document["source"],
        recipe=document["recipe"],
        fitting=document["fitting"],
        coverage=document["coverage"],
        partial=document["partial"],
        unfinished=False,
        files=tuple(files),
        container_bytes=total,
        expert_bytes=manifest.experts.bytes,
        trunk_bytes=manifest.trunk.bytes,
        other_bytes=total - manifest.experts.bytes - manifest.trunk.bytes,
        layers=len(manifest.layers),
        experts=manifest.experts.count,
        weights=weights,
        record_bytes=max((row.bytes for row in rows), default=0),
        bits_per_weight=8 * manifest.experts.bytes / weights if weights else None,
        codecs=dict(sorted(Counter(row.codec.label for row in rows).items())),
        pruned=_pruned(manifest, rows),
        roles=dict(roles),
        matrix_errors=spread([error for row in rows for error in row.matrix_errors]),
        tensor_errors=spread([tensor.rel_error for tensor in manifest.tensors]),
    )


def _pruned(manifest: Manifest, rows: Sequence[IndexRow]) -> Pruned | None:
    rule = manifest.recipe.get("prune")
    dropped = sum(len(info.dropped_experts) for info in manifest.layers)
    if not manifest.layers or (not dropped and not isinstance(rule, dict)):
        return None
    kept = [info.experts for info in manifest.layers]
    codec = rule.get("lossless_codec") if isinstance(rule, dict) else None
    return Pruned(
        sum(info.source_experts for info in manifest.layers),
        dropped,
        min(kept),
        max(kept),
        sum(row.codec.label == codec for row in rows),
    )


def _manifest_bytes(path: Path) -> int:
    return (path / FILE_NAME).stat().st_size


def _unfinished(path: Path, journal: Path) -> Unfinished:
    contents = read_journal(journal)
    units = {entry.unit: entry for entry in contents.entries if isinstance(entry, UnitDone)}
    done = {entry.name: entry.bytes for entry in contents.entries if isinstance(entry, FileDone)}
    records = [record for unit in units.values() for record in unit.records]
    present = [item for item in sorted(path.rglob("*")) if item.is_file() and not item.is_symlink()]
    in_work = [item for item in present if item.name.endswith(durable.SUFFIX)]
    identity = contents.identity
    digests = {entry.name: entry.sha256 for entry in contents.entries if isinstance(entry, ShardSeen)}
    planned = identity.get("records")
    return Unfinished(
        identity=identity,
        architecture=_table(identity, "architecture"),
        source=_begun_source(identity, digests),
        recipe=_table(identity, "recipe"),
        records_planned=planned if type(planned) is int and planned >= 0 else None,
        units_done=len(units),
        records_done=len(records),
        files_done=tuple(FileSize(name, length) for name, length in done.items()),
        files=tuple(
            FileSize(item.relative_to(path).as_posix(), item.stat().st_size) for item in present if item not in in_work
        ),
        files_in_work=tuple(item.relative_to(path).as_posix() for item in in_work),
        matrix_errors=spread([error for record in records for error in record.matrix_errors]),
    )


def _table(document: dict[str, Any], key: str) -> dict[str, Any] | None:
    """A member of a journal's identity; whoever wrote the journal may have left it out."""
    value = document.get(key)
    return value if isinstance(value, dict) else None


def _begun_source(identity: dict[str, Any], digests: Mapping[str, str]) -> dict[str, Any] | None:
    """The source as the manifest will state it, as far as the journal knows it."""
    source = _table(identity, "source")
    if source is None:
        return None
    shards = [
        {"name": name, "bytes": shard.get("bytes"), "sha256": digests.get(name)}
        for name, shard in (_table(source, "shards") or {}).items()
        if isinstance(shard, dict)
    ]
    return {key: source.get(key) for key in ("repository", "commit", "tensors", "bytes")} | {"shards": shards}


def _line(row: IndexRow) -> RecordLine:
    return RecordLine(
        row.expert,
        row.source_expert,
        row.codec.label,
        _parameters(row),
        row.offset,
        row.bytes,
        row.rel_error,
        row.matrix_errors,
        row.digest.hex(),
    )


def _parameters(row: IndexRow) -> dict[str, Any]:
    parameters = codecs.unpack_parameters(row.codec, row.parameters, record_name(row.layer, row.expert))
    return dataclasses.asdict(parameters)


def _source_tensors(container: Container, row: IndexRow, matrix: Matrix) -> tuple[str, ...]:
    """The source names of one matrix."""
    experts = container.manifest.experts
    only = msgspec.structs.replace(
        experts, tensors={item.label: experts.tensors[item.label] if item == matrix else () for item in Matrix}
    )
    return tuple(expert_tensor_names(only, row.layer, row.source_expert))


def _scales(record: Record, matrix: Matrix) -> tuple[float, ...]:
    """The first stored scales: float16 numbers, or the scale bytes of mxfp4."""
    kinds = {section.kind for section in record.header.sections}
    if SectionKind.SCALES not in kinds:
        return ()
    data = record.section(SectionKind.SCALES, matrix)
    parameters = codecs.unpack_parameters(record.header.codec, record.header.parameters, record.where)
    stored: NDArray[Any] = np.frombuffer(data, np.uint8 if isinstance(parameters, mxfp4.Parameters) else "<f2")
    return tuple(float(value) for value in stored[:_SHOWN_SCALES])


def _codebooks(record: Record, matrix: Matrix) -> tuple[dict[str, Any], ...]:
    """For rvq, stage by stage: how long the entries are, and how this matrix' codes use them."""
    parameters = codecs.unpack_parameters(record.header.codec, record.header.parameters, record.where)
    if not isinstance(parameters, rvq.Parameters):
        return ()
    entry = record.header.matrices[matrix]
    books = rvq.unpack_codebooks(record.section(SectionKind.CODEBOOKS, matrix), parameters, where=record.where)
    data = record.section(SectionKind.CODES, matrix)
    codes = rvq.unpack_codes(data, entry.rows, entry.cols, parameters, where=record.where)
    views = []
    for stage in range(parameters.stages):
        norms = np.linalg.norm(books[stage].astype(np.float64), axis=1)
        uses = np.bincount(codes[:, :, stage].reshape(-1), minlength=parameters.entries)
        shares = uses[uses > 0] / uses.sum()
        views.append(
            {
                "stage": stage,
                "entries": parameters.entries,
                "norm_min": float(norms.min()),
                "norm_mean": float(norms.mean()),
                "norm_max": float(norms.max()),
                "unused": int(np.count_nonzero(uses == 0)),
                "largest_share": float(shares.max()),
                "entropy_bits": float(-(shares * np.log2(shares)).sum()) + 0.0,
                "histogram": [int(count) for count in uses],
            }
        )
    return tuple(views)
