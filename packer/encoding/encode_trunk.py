"""From a trunk tensor of the checkpoint to its stored bytes, in blocks of rows, so that memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from formats import codecs, dtypes, kernels
from formats.codecs import group_int, raw
from formats.codecs.common import choose_exponent, merge_spans
from formats.errors import FormatError
from formats.layout import Codec, SectionKind, relative_error

BLOCK_BYTES = 8 << 20  # of source held at a time; float32 copies of it are at most four times as large

Read = Callable[[int, int], bytes]  # start and stop inside the source tensor
Write = Callable[[int, bytes], None]  # offset inside the stored tensor, bytes


@dataclass(frozen=True)
class EncodedTensor:
    """What the manifest says of a stored tensor that only its bytes could tell."""

    blake3: str
    source_blake3: str
    rel_error: float
    scale_exponent: int


def encode_tensor(
    name: str,
    dtype: dtypes.Dtype,
    shape: tuple[int, ...],
    codec: Codec,
    parameters: group_int.Parameters | raw.Parameters,
    *,
    read: Read,
    write: Write,
) -> EncodedTensor:
    """Encode one tensor.

    Args:
        name: for messages.
        dtype, shape: of the source.
        codec, parameters: what the plan decided.
        read: gives ranges of the source's bytes; for ``group_int`` each is asked for twice.
        write: takes the stored bytes, each once, not in order.

    Raises:
        FormatError: a NaN or an infinity in the source, naming tensor, row and count; a dtype that cannot be
            quantised.
    """
    if codec == Codec.RAW:
        return _copy(name, dtype, shape, read, write)
    if not isinstance(parameters, group_int.Parameters):
        raise TypeError(f"{name}: parameters of {codec.label} expected")
    return _quantise(name, dtype, shape, parameters, read, write)


def _copy(name: str, dtype: dtypes.Dtype, shape: tuple[int, ...], read: Read, write: Write) -> EncodedTensor:
    hasher = blake3()
    _, cols = codecs.tensor_extents(shape)
    total = math.prod(shape) * dtype.itemsize
    for start in range(0, total, BLOCK_BYTES):
        block = read(start, min(start + BLOCK_BYTES, total))
        _check_finite(name, block, dtype, start // dtype.itemsize, cols)
        hasher.update(block)
        write(start, block)
    digest = hasher.hexdigest()
    return EncodedTensor(digest, digest, 0.0, 0)


def _quantise(
    name: str, dtype: dtypes.Dtype, shape: tuple[int, ...], parameters: group_int.Parameters, read: Read, write: Write
) -> EncodedTensor:
    if dtype.name not in ("F32", "F16", "BF16"):
        raise FormatError(
            "dtype cannot be quantised without its scale", where=name, expected="F32, F16 or BF16", found=dtype.name
        )
    rows, cols = codecs.tensor_extents(shape)
    source = blake3()
    span = (0.0, 0.0)
    for first, block in _row_blocks(rows, cols, dtype, read):
        source.update(block)
        _check_finite(name, block, dtype, first * cols, cols)
        values = dtypes.to_float32(block, dtype).reshape(-1, cols)
        span = merge_spans(span, group_int.scale_span(values, parameters))
    exponent = choose_exponent(*span)

    stored = blake3()
    places = {part.kind: part for part in codecs.trunk_sections(Codec.GROUP_INT, parameters, shape, where=name)}
    codes_at, scales_at = places[SectionKind.CODES], places[SectionKind.SCALES]
    all_scales: list[bytes] = []
    sums: list[tuple[float, float]] = []
    for first, block in _row_blocks(rows, cols, dtype, read):
        values = dtypes.to_float32(block, dtype).reshape(-1, cols)
        codes, scales = group_int.encode(values, parameters, exponent, where=name)
        parts = {SectionKind.CODES: codes.tobytes(), SectionKind.SCALES: scales.astype("<f2").tobytes()}
        decoded = codecs.decode_rows(
            Codec.GROUP_INT, parameters, len(values), cols, parts, scale_exponent=exponent, where=name
        )
        sums.append(squared_sums(values, decoded))
        stored.update(parts[SectionKind.CODES])
        write(first * codes_at.row_bytes, parts[SectionKind.CODES])
        all_scales.append(parts[SectionKind.SCALES])
    stored.update(bytes(scales_at.offset - codes_at.bytes))
    scale_bytes = b"".join(all_scales)
    stored.update(scale_bytes)
    write(scales_at.offset, scale_bytes)
    return EncodedTensor(stored.hexdigest(), source.hexdigest(), relative_error(sums), exponent)


def squared_sums(values: np.ndarray, decoded: np.ndarray, weights: np.ndarray | None = None) -> tuple[float, float]:
    """(||W - W'||^2, ||W||^2) in float64, of float32 [rows, cols]; the same bits everywhere.

    With ``weights`` float32 [cols] the squares of each column count as often.
    """
    sums = kernels.row_sums(values, decoded, weights=weights)
    return math.fsum(sums[:, 3]), math.fsum(sums[:, 0])


def _row_blocks(rows: int, cols: int, dtype: dtypes.Dtype, read: Read) -> Iterator[tuple[int, bytes]]:
    """(first row, bytes) of runs of whole rows of bounded size."""
    row_bytes = cols * dtype.itemsize
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, rows, step):
        yield first, read(first * row_bytes, min(first + step, rows) * row_bytes)


def _check_finite(name: str, block: bytes, dtype: dtypes.Dtype, first: int, cols: int) -> None:
    count, index = dtypes.count_nonfinite(block, dtype)
    if count and index is not None:
        row, column = divmod(first + index, max(1, cols))
        raise FormatError(
            "tensor has values that are not finite",
            where=name,
            expected="finite numbers",
            found=f"{count} from row {row}, column {column} on",
            hint="the source is damaged or was not meant to be quantised; moepack never packs NaN or infinity",
        )
