"""From the checkpoint's bytes of one expert matrix to float32 rows: the first arrow of an expert's way.

What is read here is the truth that errors are measured against: no value is changed, and values that are no
numbers are refused rather than passed on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from formats import dtypes
from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.families import MATRICES, Model

DEFAULT_BIAS = 127  # of MXFP4 scales; some old writers used 125
GROUP = 32


def _pair_table() -> NDArray[np.float32]:
    """[256, 2]: the two elements of a byte, even column (low half) first; code 8 is -0."""
    magnitudes = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
    codes = np.concatenate([magnitudes, -magnitudes])
    table = np.stack([np.tile(codes, 16), np.repeat(codes, 16)], axis=1)
    table.setflags(write=False)
    return table


_PAIRS = _pair_table()
_SAMPLED_ROWS = 64
# Median weight times the root of the columns. Freshly drawn weights of variance 1/columns have 0.67; read with a bias
# that is two too large they would have 0.17. Trained weights are often larger, hence the generous upper end.
_PLAUSIBLE = (0.3, 30.0)


@dataclass(frozen=True)
class SourceMatrix:
    """One expert matrix as the checkpoint holds it.

    Attributes:
        rows: outputs.
        cols: inputs.
        tensors: (source name, bytes) in the order of the family's templates.
        format: ``mxfp4`` or the dtype's name.
        digest: BLAKE3 of the tensors' bytes one after the other.
        where: for messages.
    """

    rows: int
    cols: int
    tensors: tuple[tuple[str, bytes], ...]
    format: str
    digest: bytes
    where: str

    def to_float32(self, bias: int = DEFAULT_BIAS) -> NDArray[np.float32]:
        """The weights, float32 [rows, cols]; exact for every source format with bias 127.

        Args:
            bias: of MXFP4 scales; other formats have none.

        Raises:
            FormatError: NaN, infinity or a scale byte of 255, with tensor, row and count.
        """
        if self.format != "mxfp4":
            name, data = self.tensors[0]
            return _dense(data, self.format, self.rows, self.cols, f"{self.where}: {name}")
        (_, packed), (name, scale) = self.tensors
        return _mxfp4(packed, scale, self.rows, self.cols, bias, f"{self.where}: {name}")


def read_matrix(checkpoint: Checkpoint, model: Model, layer: int, expert: int, matrix: str) -> SourceMatrix:
    """Read one expert matrix.

    Args:
        matrix: ``gate``, ``up`` or ``down``.

    Raises:
        UsageError: no such expert.
        FormatError: the shard changed or ends early.
    """
    names = model.expert_names(layer, expert)[matrix]
    architecture = model.architecture
    rows, cols = architecture.expert_shapes[MATRICES.index(matrix)]
    tensors = tuple((name, checkpoint.read(name)) for name in names)
    hasher = blake3()
    for _, data in tensors:
        hasher.update(data)
    kind = "mxfp4" if architecture.expert_format == "mxfp4" else architecture.expert_dtype
    where = f"layer {layer} expert {expert} {matrix}"
    return SourceMatrix(rows, cols, tensors, kind, hasher.digest(), where)


def check_scale_bias(matrix: SourceMatrix, bias: int = DEFAULT_BIAS) -> None:
    """Refuse an MXFP4 matrix whose weights have an implausible size: its scales were written with another bias.

    A judgement, not a proof, so callers skip it where the user states the bias. Looks at up to 64 rows.

    Raises:
        FormatError: naming the matrix and the median size found.
    """
    if matrix.format != "mxfp4":
        return
    rows = np.unique(np.linspace(0, matrix.rows - 1, min(matrix.rows, _SAMPLED_ROWS)).astype(np.int64))
    packed, scale = (
        np.frombuffer(data, np.uint8).reshape(matrix.rows, -1)[rows].tobytes() for _, data in matrix.tensors
    )
    where = f"{matrix.where}: {matrix.tensors[1][0]}"
    sizes = np.abs(_mxfp4(packed, scale, rows.size, matrix.cols, bias, where))
    median = float(np.median(sizes)) * float(np.sqrt(matrix.cols))
    low, high = _PLAUSIBLE
    if sizes.any() and not low <= median <= high:
        raise FormatError(
            f"weights have an implausible size under scale bias {bias}",
            where=where,
            expected=f"median times root of columns from {low} to {high}",
            found=f"{median:.3g}",
            hint="state the bias that the checkpoint was written with: 127, or 125 for some old writers",
        )


def _dense(data: bytes, dtype_name: str, rows: int, cols: int, where: str) -> NDArray[np.float32]:
    dtype = dtypes.by_name(dtype_name)
    count, first = dtypes.count_nonfinite(data, dtype)
    if first is not None:
        raise FormatError(
            f"{count} weights are NaN or infinite, the first in row {first // cols}", where=where, expected="numbers"
        )
    return dtypes.to_float32(data, dtype).reshape(rows, cols)


def _mxfp4(packed: bytes, scale: bytes, rows: int, cols: int, bias: int, where: str) -> NDArray[np.float32]:
    """Value = element x 2**(scale byte - bias) for each run of 32 columns; rows never share bytes."""
    scales = np.frombuffer(scale, np.uint8).reshape(rows, -1)
    bad = scales == 255
    if bad.any():
        row = int(np.argmax(bad.any(axis=1)))
        raise FormatError(
            f"{np.count_nonzero(bad)} scale bytes are 255, which is NaN, the first in row {row}",
            where=where,
            expected="0 to 254",
        )
    elements = _PAIRS[np.frombuffer(packed, np.uint8).reshape(rows, -1)].reshape(rows, -1)
    exponents = scales.astype(np.int32) - bias
    groups = scales.shape[1]
    if elements.shape[1] != groups * GROUP:
        padded = np.zeros((rows, groups * GROUP), np.float32)
        padded[:, :cols] = elements[:, :cols]
        elements = padded
    blocks = elements.reshape(rows, groups, GROUP)
    if exponents.min() >= -149 and exponents.max() <= 125:
        # Both factors and the product are float32 numbers: exact, subnormals included.
        blocks *= np.ldexp(np.float32(1.0), exponents)[:, :, None]
    else:
        with np.errstate(over="ignore"):
            blocks = (blocks * np.ldexp(1.0, exponents)[:, :, None]).astype(np.float32)
        finite = np.isfinite(blocks)
        if not finite.all():
            row = int(np.argmin(finite.all(axis=(1, 2))))
            raise FormatError(
                f"{finite.size - np.count_nonzero(finite)} weights are beyond float32, the first in row {row}",
                where=where,
                expected="numbers",
            )
    values: NDArray[np.float32] = blocks.reshape(rows, groups * GROUP)
    return values if values.shape[1] == cols else np.ascontiguousarray(values[:, :cols])
