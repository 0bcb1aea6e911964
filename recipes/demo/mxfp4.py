"""MXFP4 in torch: the rounding that training sees, and the bytes that are stored.

A group of 32 columns shares the scale 2^(floor(log2(amax)) - 2), which puts its largest magnitude into [4, 8) of an
E2M1 element; elements round to nearest, ties to even, and saturate at 6 (OCP Microscaling Formats 1.0, section 6.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
BIAS = 127
_EXPONENT = 0x7F800000  # of a float32
_LARGEST = 6.0
_LARGEST_EXPONENT = 2  # of an element
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ROUNDER = 1.5 * 2.0**23  # adding and taking away this many steps rounds to a whole number of steps


def scales(weights: Tensor) -> Tensor:
    """The scale of every group: float32 [..., cols] -> float32 [..., cols / 32, 1], powers of two."""
    amax = weights.unflatten(-1, (-1, GROUP)).abs().amax(-1, keepdim=True)
    power = (amax.view(torch.int32) & _EXPONENT).view(torch.float32)  # 2^floor(log2(amax))
    return (power * 2.0**-_LARGEST_EXPONENT).clamp_(min=2.0 ** (1 - BIAS))


def fake_quantize(weights: Tensor) -> Tensor:
    """Round float32 ``weights`` [..., cols] to values that MXFP4 holds exactly; float32 of the same shape."""
    scale = scales(weights)
    elements = weights.unflatten(-1, (-1, GROUP)) / scale
    # The step between neighbours is 0.5 below 2, and half the element's power of two above.
    step = (elements.view(torch.int32) & _EXPONENT).view(torch.float32).clamp_(min=1.0).mul_(0.5 * _ROUNDER)
    rounded = elements.add_(step).sub_(step).clamp_(-_LARGEST, _LARGEST)
    return rounded.mul_(scale).flatten(-2)


def pack(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of weights that :func:`fake_quantize` made.

    Args:
        weights: float32 [rows, cols].

    Returns:
        uint8 [rows, cols / 2] with the even column in the low nibble, and uint8 [rows, cols / 32] of biased exponents.

    Raises:
        ValueError: a weight is not a value of MXFP4 under its group's scale.
    """
    scale = scales(weights)
    elements = weights.unflatten(-1, (-1, GROUP)) / scale
    codes = torch.bucketize(elements.abs(), torch.tensor(_MAGNITUDES))
    if not torch.equal(torch.tensor(_MAGNITUDES)[codes.clamp(max=7)], elements.abs()):
        raise ValueError("weights were not rounded to MXFP4")
    codes = (codes | (elements.signbit().to(codes.dtype) << 3)).flatten(-2).to(torch.uint8)
    exponents = (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), exponents


def unpack(packed: Tensor, exponents: Tensor) -> Tensor:
    """The inverse of :func:`pack`: float32 [rows, cols]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    magnitudes = torch.tensor(_MAGNITUDES)[codes & 7]
    values = torch.where(codes > 7, -magnitudes, magnitudes).unflatten(-1, (-1, GROUP))
    return torch.ldexp(values, exponents.to(torch.int32).unsqueeze(-1) - BIAS).flatten(-2)
