"""Expert matrices as float32, against ml_dtypes, values worked out by hand, and the generator's own weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import blake3
import ml_dtypes
import numpy as np
import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import FormatError, UsageError
from formats.families import bind
from formats.source import SourceMatrix, read_matrix, scale_bias_doubt
from tests.support.checkpoints import K3, LINEAR, SPECS, make_tensors, write_checkpoint
from tests.support.shards import Tensor, mxfp4, store, write_shards

DATA = Path(__file__).parents[1] / "data"
ROW = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def packed_matrix(packed: bytes, scale: bytes, rows: int, cols: int) -> SourceMatrix:
    tensors = (("e.weight_packed", packed), ("e.weight_scale", scale))
    return SourceMatrix(rows, cols, tensors, "mxfp4", bytes(32), "layer 1 expert 2 gate")


def oracle(packed: np.ndarray, scale: np.ndarray, rows: int, cols: int) -> np.ndarray:
    """Element by element with the types of ml_dtypes, in float64."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1)[:, :cols]
    elements = nibbles.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    factors = scale.reshape(rows, -1).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return elements * np.repeat(factors, 32, axis=1)[:, :cols]


def test_dty_01_all_sixteen_codes_by_position() -> None:
    codes = list(range(16)) * 2
    packed = bytes(codes[n] | codes[n + 1] << 4 for n in range(0, 32, 2))
    found = packed_matrix(packed, b"\x7f", 1, 32).to_float32()
    assert found.dtype == np.float32
    assert found.tolist() == [ROW * 2]
    assert np.signbit(found[0, [8, 24]]).all()  # -0 is kept
    exchanged = bytes(byte >> 4 | (byte & 15) << 4 for byte in packed)
    other = packed_matrix(exchanged, b"\x7f", 1, 32).to_float32()
    assert other.tolist() == [[ROW[n ^ 1] for n in range(16)] * 2]


def test_dty_03_scale_byte_zero_is_a_tiny_number() -> None:
    found = packed_matrix(bytes([0x21] * 16 + [0x72] * 16), b"\x00\xfc", 1, 64).to_float32()
    assert found[0, 0] == np.float32(2.0**-128)  # 0.5 x 2**-127, a subnormal
    assert found[0, 1] == np.float32(2.0**-127)
    assert found[0, 32] == np.float32(2.0**125)
    assert found[0, 33] == np.float32(6 * 2.0**125)


def test_dty_03_scale_byte_255_is_refused() -> None:
    scale = np.full((5, 2), 127, np.uint8)
    scale[2, 1] = scale[4, 0] = 255
    matrix = packed_matrix(bytes(5 * 32), scale.tobytes(), 5, 64)
    message = r"e.weight_scale scales at byte 5: scale byte 255 \(NaN\) in row 2, group 1 \(found 2 of them\)"
    with pytest.raises(FormatError, match=message):
        matrix.to_float32()


def test_weights_beyond_float32_are_refused() -> None:
    packed = bytes(16) + bytes([0x70] * 16)  # 6 x 2**127 in row 1
    with pytest.raises(FormatError, match="value in row 1, column 1 exceeds float32"):
        packed_matrix(packed, b"\xfe\xfe", 2, 32).to_float32()
    assert not packed_matrix(bytes(16), b"\xfe", 1, 32).to_float32().any()  # zeros under a huge scale are zeros
    one_and_a_half = packed_matrix(bytes([0x33] * 16), b"\xfe", 1, 32).to_float32()
    assert (one_and_a_half == np.float32(1.5 * 2.0**127)).all()


@pytest.mark.parametrize("cols", [1, 2, 31, 32, 33, 50, 64, 65, 97, 100])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_width_against_ml_dtypes(rows: int, cols: int) -> None:
    rng = np.random.default_rng(rows * 1000 + cols)
    packed = rng.integers(0, 256, (rows, (cols + 1) // 2), dtype=np.uint8)
    scale = rng.integers(0, 253, (rows, (cols + 31) // 32), dtype=np.uint8)
    found = packed_matrix(packed.tobytes(), scale.tobytes(), rows, cols).to_float32()
    expected = oracle(packed, scale, rows, cols)
    assert found.shape == (rows, cols)
    assert found.flags.c_contiguous
    assert np.array_equal(found.astype(np.float64), expected)
    assert np.array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("bias", [125, 127, 130, 1, 148])
def test_dty_02_bias_is_explicit(bias: int) -> None:
    packed, scale = bytes([0x32] * 16), bytes([bias])
    assert packed_matrix(packed, scale, 1, 32).to_float32(bias).tolist() == [[1.0, 1.5] * 16]


def test_dty_02_another_bias_is_implausible() -> None:
    values = np.random.default_rng(5).standard_normal((64, 256)).astype(np.float32) / 16
    packed, scale = mxfp4(values)
    shifted = bytes(byte - 2 for byte in scale.data)  # as if written with bias 125
    assert scale_bias_doubt(packed_matrix(packed.data, scale.data, 64, 256)) is None
    assert scale_bias_doubt(packed_matrix(packed.data, shifted, 64, 256), bias=125) is None
    doubt = scale_bias_doubt(packed_matrix(packed.data, shifted, 64, 256))
    assert doubt is not None
    assert "unusual size under MXFP4 scale bias 127" in doubt
    assert scale_bias_doubt(packed_matrix(bytes(64 * 128), scale.data, 64, 256)) is None  # zeros say nothing


@pytest.mark.parametrize("name", ["k3-tiny", "k3-small", "kimi-linear-tiny"])
def test_released_experts_are_plausible_and_finite(name: str) -> None:
    checkpoint = open_checkpoint(DATA / name)
    model = bind(checkpoint)
    for layer in model.architecture.moe_layers:
        for matrix, shape in zip(("gate", "up", "down"), model.architecture.expert_shapes, strict=True):
            source = read_matrix(checkpoint, model, layer, 1, matrix)
            assert scale_bias_doubt(source) is None
            assert source.to_float32().shape == shape == (source.rows, source.cols)


@pytest.mark.parametrize("name", list(SPECS))
def test_experts_of_generated_checkpoints(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, spec))
    model = bind(checkpoint)
    tensors = make_tensors(spec)
    layer, expert = spec.moe_layers[-1], spec.experts - 1
    for matrix, module in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        base = f"{spec.prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}.{module}.weight"
        source = read_matrix(checkpoint, model, layer, expert, matrix)
        rows, cols = spec.expert_shapes[matrix]
        if spec.expert_dtype == "MXFP4":
            packed, scale = tensors[base + "_packed"], tensors[base + "_scale"]
            expected = oracle(*(np.frombuffer(t.data, np.uint8).reshape(rows, -1) for t in (packed, scale)), rows, cols)
            data = packed.data + scale.data
        else:
            kind = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[spec.expert_dtype]
            data = tensors[base].data
            expected = np.frombuffer(data, kind).reshape(rows, cols).astype(np.float64)
        assert np.array_equal(source.to_float32().astype(np.float64), expected)
        assert source.digest == blake3.blake3(data).digest()
        assert b"".join(piece for _, piece in source.tensors) == data


def test_qnt_04_nan_in_a_dense_expert_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LINEAR)
    tensors = make_tensors(LINEAR)
    name = "model.layers.2.block_sparse_moe.experts.1.w3.weight"
    values = np.ones((48, 64), np.float32)
    values[7, 3], values[40, 0] = np.nan, np.inf
    write_shards(tmp_path, tensors | {name: store(values, "BF16")}, 2)
    checkpoint = open_checkpoint(tmp_path)
    source = read_matrix(checkpoint, bind(checkpoint), 2, 1, "up")
    with pytest.raises(FormatError, match=rf"{name}: 2 weights are NaN or infinite, the first in row 7"):
        source.to_float32()


def test_no_such_expert(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, K3))
    with pytest.raises(UsageError, match="layer 0 expert 0: no such expert"):
        read_matrix(checkpoint, bind(checkpoint), 0, 0, "gate")


def test_experts_of_another_float_dtype_than_the_configuration(tmp_path: Path) -> None:
    """The configuration says bfloat16; the headers say F32, uniformly, and are right."""
    spec = replace(LINEAR, expert_dtype="F32")
    model = bind(open_checkpoint(write_checkpoint(tmp_path, spec)))
    assert model.architecture.expert_dtype == "F32"
    name = "model.layers.3.block_sparse_moe.experts.2.w1.weight"
    write_shards(tmp_path, make_tensors(spec) | {name: Tensor("BF16", (48, 64), bytes(48 * 64 * 2))}, 2)
    with pytest.raises(FormatError, match=rf"{name}: .*expected F32 \[48, 64\], found BF16 \[48, 64\]"):
        bind(open_checkpoint(tmp_path))
