"""Rounding to MXFP4 while training: against ml_dtypes, and by hand."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed; only the demo recipe needs it")

from recipes.demo import mxfp4  # noqa: E402


def test_rounding_is_that_of_the_element_type() -> None:
    weights = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.randint(-9, 9, (64, 1))
    groups = weights.numpy().reshape(64, 3, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1, keepdims=True).astype(np.float64))) - 2
    elements = (groups / 2.0**exponents).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert np.array_equal(mxfp4.fake_quantize(weights).numpy(), (elements * 2.0**exponents).reshape(64, 96))


def test_ties_go_to_even_and_large_elements_saturate() -> None:
    row = torch.zeros(1, 32)
    row[0, :9] = torch.tensor([4.0, 0.25, 0.75, 1.25, -1.75, 2.5, 3.5, 5.0, -7.9])
    expected = [4.0, 0.0, 1.0, 1.0, -2.0, 2.0, 4.0, 4.0, -6.0]
    assert mxfp4.fake_quantize(row)[0, :9].tolist() == expected


def test_packing_loses_nothing_and_puts_the_even_column_low() -> None:
    row = torch.zeros(1, 32)
    row[0, :4] = torch.tensor([6.0, -0.5, 1.5, 0.0])
    packed, exponents = mxfp4.pack(row)
    assert packed[0, :2].tolist() == [0x97, 0x03]  # -0.5 is code 9, 6 is code 7; 0 and 1.5, code 3
    assert exponents.tolist() == [[127]]
    weights = mxfp4.fake_quantize(torch.randn(7, 64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(weights)), weights)


def test_weights_that_were_not_rounded_are_refused() -> None:
    with pytest.raises(ValueError, match="not rounded"):
        mxfp4.pack(torch.full((1, 32), 0.7) + torch.arange(32) / 100)


def test_a_group_of_zeros_stays_zero() -> None:
    weights = torch.zeros(1, 32)
    assert torch.equal(mxfp4.unpack(*mxfp4.pack(mxfp4.fake_quantize(weights))), weights)
