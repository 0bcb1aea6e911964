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
from formats.codecs import mxfp4
from formats.codecs.common import Buffer
from formats.errors import FormatError
from formats.families import MATRICES, Model
from formats.layout import SectionKind

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
    tensors: tuple[tuple[str, Buffer], ...]
    format: str
    digest: bytes
    where: str

    def to_float32(self, bias: int = mxfp4.DEFAULT_BIAS) -> NDArray[np.float32]:
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


def scale_bias_doubt(matrix: SourceMatrix, bias: int = mxfp4.DEFAULT_BIAS) -> str | None:
    """What speaks against ``bias``: weights of an MXFP4 matrix whose size is unusual under it, or None.

    Scales written with another bias make all weights larger or smaller by a power of two, which no digest and no
    statistic of the codes shows. This is a judgement, not a proof: models may be scaled as they like. Looks at up to
    64 rows.
    """
    if matrix.format != "mxfp4":
        return None
    rows = np.unique(np.linspace(0, matrix.rows - 1, min(matrix.rows, _SAMPLED_ROWS)).astype(np.int64))
    packed, scale = (
        np.frombuffer(data, np.uint8).reshape(matrix.rows, -1)[rows].tobytes() for _, data in matrix.tensors
    )
    sizes = np.abs(_mxfp4(packed, scale, rows.size, matrix.cols, bias, matrix.where))
    median = float(np.median(sizes)) * float(np.sqrt(matrix.cols))
    low, high = _PLAUSIBLE
    if not sizes.any() or low <= median <= high:
        return None
    return (
        f"{matrix.where} has weights of unusual size under MXFP4 scale bias {bias} (median times root of columns is "
        f"{median:.3g}, usually {low} to {high}); some old files mean bias 125: --set source.mxfp4_bias=125"
    )


def _dense(data: Buffer, dtype_name: str, rows: int, cols: int, where: str) -> NDArray[np.float32]:
    dtype = dtypes.by_name(dtype_name)
    count, first = dtypes.count_nonfinite(data, dtype)
    if first is not None:
        raise FormatError(
            f"{count} weights are NaN or infinite, the first in row {first // cols}", where=where, expected="numbers"
        )
    return dtypes.to_float32(data, dtype).reshape(rows, cols)


def _mxfp4(packed: Buffer, scale: Buffer, rows: int, cols: int, bias: int, where: str) -> NDArray[np.float32]:
    sections = {SectionKind.CODES: packed, SectionKind.SCALES: scale}
    return mxfp4.decode(rows, cols, mxfp4.Parameters(bias=bias), sections, scale_exponent=0, where=where)
