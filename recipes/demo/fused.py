"""Elementwise arithmetic of the model, compiled into fused loops: memory traffic, not multiplication, limits a CPU.

Training compiles these functions, which needs a C++ compiler; evaluation and tests run them as they stand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile ``function`` when it is first called while gradients are recorded; without them run it as it stands."""

    @cache
    def compiled() -> Callable[Arguments, Result]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        return (compiled() if torch.is_grad_enabled() else function)(*arguments, **named)

    return call


@fused
def situ(gate_up: Tensor, beta: float, linear: float | None) -> Tensor:
    """SiTU of stacked gate and up: [..., 2 n] -> [..., n] in the same dtype."""
    gate, up = gate_up.float().chunk(2, -1)
    if linear is not None:
        up = linear * torch.tanh(up / linear)
    return (beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up).to(gate_up.dtype)


@fused
def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm over the last axis in float32; the result has the dtype of the weight."""
    x = x.float()
    return (x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.float()).to(weight.dtype)


@fused
def convolve(x: Tensor, weight: Tensor) -> Tensor:
    """Causal depthwise convolution over time, then SiLU: [B, T, c] and [c, 1, width] -> float32 [B, T, c]."""
    width, length = weight.shape[2], x.shape[1]
    padded = functional.pad(x.float(), (0, 0, width - 1, 0))
    total = padded[:, :length] * weight[:, 0, 0]
    for i in range(1, width):
        total = total + padded[:, i : i + length] * weight[:, 0, i]
    return functional.silu(total)


@fused
def unit(x: Tensor, epsilon: float, scale: float) -> Tensor:
    """L2-normalised over the last axis, times ``scale``."""
    return x * ((x.square().sum(-1, keepdim=True) + epsilon).rsqrt() * scale)


@fused
def mix(parts: list[Tensor], direction: Tensor, epsilon: float) -> Tensor:
    """Attention residual: float32 parts weighted by a softmax over the scores of their RMS norms.

    Args:
        parts: blocks and the running sum, each [B, T, hidden].
        direction: norm weight times projection, [hidden].
        epsilon: of the norm.
    """
    scores = torch.stack([(p * direction).sum(-1) * (p.square().mean(-1) + epsilon).rsqrt() for p in parts])
    weights = scores.softmax(0)
    total = weights[0].unsqueeze(-1) * parts[0]
    for weight, part in zip(weights[1:].unbind(), parts[1:], strict=True):
        total = total + weight.unsqueeze(-1) * part
    return total


@fused
def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, epsilon: float) -> Tensor:
    """RMSNorm of every head of ``x``, times the sigmoid of ``gate``; in the dtype of ``gate``."""
    normed = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight
    return (normed * torch.sigmoid(gate.float())).to(gate.dtype)


@fused
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats; [n, vocabulary] and [n]."""
    return functional.cross_entropy(logits.float(), targets)
