"""The second decoder: against the first one bit for bit, and against libraries and hand arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from formats import layout
from formats.container import open_container
from formats.errors import FormatError
from formats.layout import Codec, SectionKind
from packer.verify import oracle
from packer.verify.oracle import Stored, Sums
from packer.verify.parity import _stored_matrix
from tests.support.containers import Spec, all_codecs, build_container


def reader(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, stop: data[start:stop]


@pytest.mark.parametrize("spec", [Spec(), all_codecs()])
def test_both_decoders_agree_bit_for_bit(tmp_path: Path, spec: Spec) -> None:
    with open_container(build_container(tmp_path / "model.moepack", spec)) as container:
        for layer in spec.layers:
            for row in container.rows(layer):
                record = container.record(layer, row.expert)
                for matrix in layout.Matrix:
                    stored = _stored_matrix(record.header, record.data, matrix, "BF16")
                    entry = record.header.matrices[matrix]
                    parts = [
                        oracle.stored_rows(stored, first, min(first + 64, entry.rows))
                        for first in range(0, entry.rows, 64)
                    ]
                    first_decoder = record.matrix(matrix)
                    assert np.concatenate(parts).tobytes() == first_decoder.tobytes(), (row.codec, matrix)


def test_mxfp4_against_ml_dtypes() -> None:
    """DTY-01, DTY-03: every code under every scale byte but NaN; positions, not statistics; -0 and subnormals kept."""
    codes = np.tile(np.arange(16, dtype=np.uint8), (255, 2))
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).tobytes()
    scales = np.arange(255, dtype=np.uint8)
    found = oracle.mxfp4_rows(reader(packed), reader(scales.tobytes()), 32, 127, 0, 255)
    elements = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore"):
        expected = (elements * factors[:, None]).astype(np.float32)
    assert np.isfinite(expected[:253]).all()
    assert found.tobytes() == expected.tobytes()


def test_mxfp4_bias_and_short_group() -> None:
    packed = bytes([0x21, 0x43] + [0] * 14 + [0x07, 0xF0])  # 33 columns: 1, 2, 3, 4 ... and one more; a spare half
    found = oracle.mxfp4_rows(reader(packed), reader(bytes([125, 126])), 33, 125, 0, 1)
    assert list(found[0, :4]) == [0.5, 1.0, 1.5, 2.0]
    assert found[0, 32] == 12.0


def test_mxfp4_refuses_nan() -> None:
    with pytest.raises(FormatError, match="NaN"):
        oracle.mxfp4_rows(reader(bytes(16)), reader(bytes([255])), 32, 127, 0, 1)


def test_group_int_worked_row() -> None:
    """The row of codecs/group_int.md: integers -7, 0, 3, 7, -8 are the bytes F1 08 8B."""
    stored = Stored(
        Codec.GROUP_INT,
        1,
        5,
        1,
        bytes([4, 0, 128, 0]).ljust(16, b"\0"),
        reader(bytes.fromhex("F1088B")),
        reader(np.array([0.5], "<f2").tobytes()),
    )
    assert list(oracle.stored_rows(stored, 0, 1)[0]) == [-7, 0, 3, 7, -8]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_plain_values(dtype: str) -> None:
    values = np.array([[1.5, -2.0, 0.0078125], [65504.0, -0.0, 2.0**-14]], np.float32)
    library = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[dtype]
    data = values.astype(library).tobytes()
    found = oracle.plain_rows(reader(data), dtype, 3, 0, 2)
    assert found.tobytes() == values.astype(library).astype(np.float32).tobytes()


def test_plain_values_of_other_dtypes_are_not_guessed() -> None:
    with pytest.raises(FormatError, match="byte for byte"):
        oracle.plain_rows(reader(bytes(4)), "I32", 1, 0, 1)


def test_compare_in_blocks() -> None:
    """3-4-5: a difference of 3 against a source of 5, whatever the number of blocks."""
    rows, cols = 70_000, 32
    assert oracle.block_rows(cols) < rows
    source = np.zeros((rows, cols), np.float32)
    source[0, 0], source[-1, -1] = 4.0, 3.0
    stored = source.copy()
    stored[-1, -1] = 0.0
    sums = oracle.compare(rows, cols, lambda a, b: source[a:b], lambda a, b: stored[a:b])
    assert sums == Sums(9.0, 25.0)
    assert sums.error == 0.6


def test_error_of_nothing_and_of_no_number() -> None:
    assert (Sums(0.0, 0.0).error, Sums(1.0, 0.0).error) == (0.0, 1.0)
    assert Sums(float("nan"), 1.0).error == Sums(1.0, float("inf")).error == float("inf")


def test_index_beyond_the_codebook() -> None:
    stored = Stored(
        Codec.RVQ,
        1,
        8,
        0,
        bytes([8, 1, 0, 0, 2, 0]).ljust(16, b"\0"),
        reader(bytes([2]) + bytes(63)),
        reader(np.ones(1, "<f2").tobytes()),
        bytes(2 * 8 * 2),
    )
    with pytest.raises(FormatError, match="beyond the codebook"):
        oracle.stored_rows(stored, 0, 1)
    assert SectionKind.CODEBOOKS == 1
