"""A container against its source: every source tensor is found, and every stored one is measured again.

Nothing that the packer or the reader computes is believed. What was copied is compared byte for byte; what was encoded
is decoded by :mod:`packer.verify.oracle` and its error compared with the recorded one and with the recipe's limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from blake3 import blake3

from formats import dtypes
from formats.checkpoint import Checkpoint, SourceTensor
from formats.container import Container
from formats.errors import EnvironmentProblem, FormatError
from formats.index import IndexRow
from formats.layout import LINE, SHARED, Codec, Matrix, RecordHeader, SectionKind, align, record_name
from formats.manifest import TensorInfo
from packer.limits import above, expert_limit, tensor_limit
from packer.planning.layout_plan import BY_EXPERT
from packer.prune.row_selection import reader_of_rows
from packer.recipe.types import Recipe
from packer.verify import oracle
from packer.verify.findings import CHUNK_BYTES, Problem, problem_of
from packer.verify.oracle import Stored, compare
from packer.verify.pruning import kept_sources

# Recorded errors were rounded (to float32 in records, to six digits in the manifest) and summed in another order.
_RECORD_TOLERANCE = 1e-6
_TENSOR_TOLERANCE = 1e-5
_SMALLEST = 1e-12  # below this an error is rounding noise

Step = Callable[[int], None]


@dataclass(frozen=True)
class Compared:
    """What the comparison of one record or tensor gave: findings, measured errors, source tensors equal bit for bit."""

    problems: tuple[Problem, ...] = ()
    errors: tuple[float, ...] = ()
    exact: int = 0


@dataclass(frozen=True)
class Source:
    """What records and tensors are compared with. ``recipe`` is None if the manifest's cannot be read."""

    checkpoint: Checkpoint
    recipe: Recipe | None


def compare_record(container: Container, source: Source, row: IndexRow, step: Step) -> Compared:
    """All three matrices of a record with the source tensors that its layer and source expert name."""
    where = record_name(row.layer, row.expert)
    try:
        record = container.record(row.layer, row.expert, check=False)
        parts = [_compare_matrix(container, source, record.header, record.data, matrix, step) for matrix in Matrix]
    except (FormatError, EnvironmentProblem) as error:
        return Compared((problem_of(error, where),))
    return Compared(
        tuple(problem for part in parts for problem in part.problems),
        tuple(error for part in parts for error in part.errors),
        sum(part.exact for part in parts),
    )


def _compare_matrix(
    container: Container, source: Source, header: RecordHeader, data: bytes, matrix: Matrix, step: Step
) -> Compared:
    where = f"{record_name(header.layer, header.expert)} {matrix.label}"
    entry = header.matrices[matrix]
    templates = container.manifest.experts.tensors[matrix.label]
    names = [
        text.replace("{layer}", str(header.layer)).replace("{expert}", str(header.source_expert)) for text in templates
    ]
    tensors = [source.checkpoint.tensors.get(name) for name in names]
    absent = [name for name, tensor in zip(names, tensors, strict=True) if tensor is None]
    if absent:
        return Compared((Problem(where, f"the source has no tensor {absent[0]}"),))
    found = [tensor for tensor in tensors if tensor is not None]
    what = _layout_problem(found, entry.rows, entry.cols)
    if what is not None:
        return Compared((Problem(where, what),))
    contents = []
    for tensor in found:
        contents.append(source.checkpoint.read(tensor.name))
        step(tensor.bytes)
    problems = []
    digest = blake3(b"".join(contents)).digest()
    if digest != entry.source_digest:
        problems.append(
            Problem(where, f"source bytes differ (recorded {entry.source_digest.hex()}, found {digest.hex()})")
        )
    bias = container.manifest.source.scale_bias
    if header.codec == Codec.MXFP4 and header.parameters[0] != bias:
        problems.append(Problem(where, f"scale bias differs (expected {bias}, found {header.parameters[0]})"))
    copied = _copied_sections(header, data, matrix)
    if copied is not None:
        problems += _dtype_problems(header, found, where)
        if copied == contents:
            return Compared((*problems, *_error_problems(source, header, matrix, 0.0, where)), (0.0,), len(contents))
        problems.append(Problem(where, "stored bytes differ from the source's"))
    stored = _stored_matrix(header, data, matrix, found[0].dtype)
    sums = compare(
        entry.rows,
        entry.cols,
        lambda first, last: _source_rows(contents, found[0].dtype, entry.cols, bias, first, last),
        lambda first, last: oracle.stored_rows(stored, first, last),
    )
    problems += _error_problems(source, header, matrix, sums.error, where)
    return Compared(tuple(problems), (sums.error,))


def _layout_problem(tensors: list[SourceTensor], rows: int, cols: int) -> str | None:
    """What is wrong with the shapes of a matrix' source tensors: one dense tensor, or codes and scales of MXFP4."""
    if len(tensors) == 1:
        expected = [(rows, cols)]
    elif len(tensors) == 2 and all(tensor.dtype == "U8" for tensor in tensors):
        expected = [(rows, -(-cols // 2)), (rows, -(-cols // 32))]
    else:
        return f"source tensors are neither dense nor MXFP4: {', '.join(tensor.dtype for tensor in tensors)}"
    for tensor, shape in zip(tensors, expected, strict=True):
        if tensor.shape != shape:
            return f"source tensor {tensor.name} has another shape (expected {list(shape)}, found {list(tensor.shape)})"
    return None


def _dtype_problems(header: RecordHeader, tensors: list[SourceTensor], where: str) -> list[Problem]:
    """A record of raw bytes must call them what the source calls them."""
    if header.codec != Codec.RAW:
        return []
    named = dtypes.by_number(header.parameters[0], where=where).name
    source = tensors[0].dtype
    return [] if named == source else [Problem(where, f"dtype differs (source {source}, stored {named})")]


def _copied_sections(header: RecordHeader, data: bytes, matrix: Matrix) -> list[bytes] | None:
    """The sections that must equal the source's tensors, in the order of the templates; None for lossy codecs."""
    kinds = {Codec.MXFP4: (SectionKind.CODES, SectionKind.SCALES), Codec.RAW: (SectionKind.CODES,)}.get(header.codec)
    return None if kinds is None else [_section(header, data, kind, matrix) for kind in kinds]


def _section(header: RecordHeader, data: bytes, kind: SectionKind, matrix: int) -> bytes:
    section = header.section(kind, matrix)
    return data[section.offset : section.offset + section.bytes]


def _stored_matrix(header: RecordHeader, data: bytes, matrix: Matrix, dtype: str) -> Stored:
    kinds = {section.kind for section in header.sections if section.matrix in (matrix, SHARED)}

    def reader(kind: SectionKind) -> oracle.Read:
        content = _section(header, data, kind, matrix)
        return lambda start, stop: content[start:stop]

    entry = header.matrices[matrix]
    return Stored(
        header.codec,
        entry.rows,
        entry.cols,
        entry.scale_exponent,
        header.parameters,
        reader(SectionKind.CODES),
        reader(SectionKind.SCALES) if SectionKind.SCALES in kinds else None,
        _section(header, data, SectionKind.CODEBOOKS, matrix) if SectionKind.CODEBOOKS in kinds else b"",
        dtype,
    )


def _source_rows(contents: list[bytes], dtype: str, cols: int, bias: int, first: int, last: int) -> oracle.Single:
    readers = [lambda start, stop, content=content: content[start:stop] for content in contents]
    if len(readers) == 2:
        return oracle.mxfp4_rows(readers[0], readers[1], cols, bias, first, last)
    return oracle.plain_rows(readers[0], dtype, cols, first, last)


def _error_problems(source: Source, header: RecordHeader, matrix: Matrix, error: float, where: str) -> list[Problem]:
    limit = None if source.recipe is None else expert_limit(source.recipe, header.codec.label)
    return error_problems(where, error, header.matrices[matrix].rel_error, limit, _RECORD_TOLERANCE)


def error_problems(
    where: str, measured: float, recorded: float, limit: float | None, tolerance: float
) -> list[Problem]:
    """A measured error against the recorded one and against the limit."""
    if not math.isfinite(measured):
        return [Problem(where, "relative error is not finite: the source or the stored weights are not")]
    problems = []
    if abs(measured - recorded) > max(tolerance * max(measured, recorded), _SMALLEST):
        problems.append(Problem(where, f"recorded error differs (recorded {recorded:.8g}, measured {measured:.8g})"))
    if limit is not None and above(measured, limit) and above(measured, limit * (1 + tolerance)):
        problems.append(
            Problem(where, f"measured error is above the limit (expected at most {limit:g}, found {measured:.6g})")
        )
    return problems


def compare_tensor(container: Container, source: Source, info: TensorInfo, step: Step) -> Compared:
    """A trunk tensor with the source tensor of its name, in bounded memory.

    Routers of layers that lack experts are compared with the rows of the kept ones (SPEC section 4.4).
    """
    tensor = source.checkpoint.tensors.get(info.name)
    if tensor is None:
        return Compared((Problem(info.name, "the source has no such tensor"),))
    rows = _kept_rows(container, info)
    here = info.shape if rows is None else (_source_experts(container, info), *info.shape[1:])
    if (tensor.dtype, tensor.shape) != (info.dtype, here) or (rows is not None and info.shape[:1] != (len(rows),)):
        there = f"{tensor.dtype} {list(tensor.shape)}"
        kept = "" if rows is None else f", of which {len(rows)} rows are kept"
        what = f"dtype or shape differs (source {there}{kept}, container {info.dtype} {list(info.shape)})"
        return Compared((Problem(info.name, what),))

    def read_all(start: int, stop: int) -> bytes:
        return source.checkpoint.read(info.name, start, stop)

    row_bytes = tensor.bytes // tensor.shape[0] if rows is not None else 0
    read = read_all if rows is None else reader_of_rows(read_all, rows, row_bytes)
    total = tensor.bytes if rows is None else row_bytes * len(rows)
    try:
        problems = []
        equal = info.codec == Codec.RAW.label and info.bytes == total
        hasher = blake3()
        for start in range(0, total, CHUNK_BYTES):
            stop = min(start + CHUNK_BYTES, total)
            piece = read(start, stop)
            hasher.update(piece)
            equal = equal and piece == container.tensor_bytes(info, start, stop)
            step(stop - start)
        if hasher.hexdigest() != info.source_blake3:
            problems.append(
                Problem(info.name, f"source bytes differ (recorded {info.source_blake3}, found {hasher.hexdigest()})")
            )
        if info.codec == Codec.RAW.label:
            if not equal:
                problems.append(Problem(info.name, "stored bytes differ from the source's"))
            error = 0.0 if equal else math.inf
        else:
            error = _tensor_error(container, read, info)
    except (FormatError, EnvironmentProblem) as problem:
        return Compared((problem_of(problem, info.name),))
    if info.codec != Codec.RAW.label or equal:
        limit = None if source.recipe is None else tensor_limit(source.recipe, info)
        problems += error_problems(info.name, error, info.rel_error, limit, _TENSOR_TOLERANCE)
    exact = equal and rows is None  # of a router that lacks rows the container does not hold all bytes
    return Compared(tuple(problems), (error,) if math.isfinite(error) else (), int(exact))


def _kept_rows(container: Container, info: TensorInfo) -> tuple[int, ...] | None:
    """The rows of the source's tensor that the container holds, None for all of them."""
    if info.role not in BY_EXPERT or info.layer is None:
        return None
    layers = {layer.layer: layer for layer in container.manifest.layers if layer.dropped_experts}
    return kept_sources(layers[info.layer]) if info.layer in layers else None


def _source_experts(container: Container, info: TensorInfo) -> int:
    assert info.layer is not None  # a router of a layer
    return container.layer(info.layer).source_experts


def _tensor_error(container: Container, read: oracle.Read, info: TensorInfo) -> float:
    """The relative error of a group_int tensor; its scales start on the line behind its codes."""
    if info.codec != Codec.GROUP_INT.label or len(info.shape) != 2:
        raise FormatError("only matrices of group_int can be measured", where=info.name, found=info.codec)
    rows, cols = info.shape
    bits, group = int(info.parameters["bits"]), int(info.parameters["group"])
    scales_at = align(rows * (cols if bits == 8 else -(-cols // 2)), LINE)
    stored = Stored(
        Codec.GROUP_INT,
        rows,
        cols,
        info.scale_exponent,
        bytes([bits, 0]) + group.to_bytes(2, "little"),
        lambda start, stop: container.tensor_bytes(info, start, stop),
        lambda start, stop: container.tensor_bytes(info, scales_at + start, scales_at + stop),
    )
    sums = compare(
        rows,
        cols,
        lambda first, last: oracle.plain_rows(read, info.dtype, cols, first, last),
        lambda first, last: oracle.stored_rows(stored, first, last),
    )
    return sums.error
