"""The optimizer: float32 masters behind the weights that the model computes with.

The model holds what will be stored, bfloat16 matrices and experts rounded to MXFP4. Gradients with respect to these
move the masters (the straight-through estimator), and the model's weights are rounded from the masters after
each step. Hidden matrices are moved by Muon (Jordan et al. 2024, with the update scale of Liu et al. 2025, "Muon is
scalable for LLM training"), all else by AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.demo.model import Model
from recipes.demo.mxfp4 import fake_quantize

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # quintic iteration towards the orthogonal factor
_ITERATIONS = 5
_UPDATE_RMS = 0.2  # that of AdamW in practice, so that both share one learning rate
_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_CLIP = 1.0  # norm of the gradient of what AdamW moves
_NOT_HIDDEN = (
    "embed_tokens.weight",
    "lm_head.weight",
    "gate.weight",
    "res_proj.weight",
    "b_proj.weight",
    "conv1d.weight",
)


@dataclass(frozen=True)
class Slot:
    """A weight of the model with its master and moments (updated in place).

    Attributes:
        weight: what the model computes with.
        master: float32.
        first: mean of gradients.
        second: mean of their squares; None where Muon is used.
        expert: rounded to MXFP4.
        matrices: shape as a batch of matrices, for Muon.
        decayed: subject to weight decay.
    """

    weight: nn.Parameter
    master: Tensor
    first: Tensor
    second: Tensor | None
    expert: bool
    matrices: tuple[int, int, int]
    decayed: bool


def prepare(model: Model) -> tuple[Slot, ...]:
    """Masters of all weights; rounds the model's weights for the first step."""
    slots = []
    for name, weight in model.named_parameters():
        master = weight.detach().float().clone()
        expert = ".experts." in name
        muon = weight.ndim > 1 and not name.endswith(_NOT_HIDDEN)
        # Gate and up stand in one tensor and are two matrices.
        rows = weight.shape[-2] // (2 if name.endswith("gate_up") else 1) if weight.ndim > 1 else 1
        slot = Slot(
            weight,
            master,
            torch.zeros_like(master),
            None if muon else torch.zeros_like(master),
            expert,
            (-1, rows, weight.shape[-1]),
            weight.ndim > 1 and not name.endswith(("res_proj.weight", "conv1d.weight")),
        )
        _round(slot)
        slots.append(slot)
    return tuple(slots)


def step(
    slots: tuple[Slot, ...], gradients: Sequence[Tensor | None], number: int, rate: float, decay: float, pool: Executor
) -> float:
    """Move all masters along their gradients and round the weights.

    Args:
        slots: of :func:`prepare`.
        gradients: with respect to the weights of the slots; None where a weight is not used.
        number: of the step, from one.
        rate: learning rate.
        decay: weight decay, in units of ``rate``.
        pool: moves a slot a task.

    Returns:
        Norm of the gradient of what AdamW moves, before clipping.
    """
    plain = [g for slot, g in zip(slots, gradients, strict=True) if slot.second is not None and g is not None]
    norm = float(torch.stack([gradient.float().square().sum() for gradient in plain]).sum().sqrt())
    clip = min(1.0, _CLIP / norm)

    @torch.no_grad()
    def move(slot: Slot, gradient: Tensor | None) -> None:
        if gradient is None:  # the first layer has no blocks, so its attention residual is never used
            return
        update = _adam(slot, gradient.float() * clip, number) if slot.second is not None else _muon(slot, gradient)
        if slot.decayed:
            slot.master.mul_(1 - rate * decay)
        slot.master.sub_(update, alpha=rate)
        _round(slot)

    tuple(pool.map(move, slots, gradients))
    return norm


def _round(slot: Slot) -> None:
    slot.weight.data.copy_(fake_quantize(slot.master) if slot.expert else slot.master)


def _adam(slot: Slot, gradient: Tensor, number: int) -> Tensor:
    assert slot.second is not None  # the caller's choice
    slot.first.lerp_(gradient, 1 - _BETAS[0])
    slot.second.lerp_(gradient.square(), 1 - _BETAS[1])
    scale = (slot.second / (1 - _BETAS[1] ** number)).sqrt_().add_(_EPSILON)
    return slot.first / scale.mul_(1 - _BETAS[0] ** number)


def _muon(slot: Slot, gradient: Tensor) -> Tensor:
    slot.first.mul_(_MOMENTUM).add_(gradient)
    ahead = slot.first.mul(_MOMENTUM).add_(gradient).view(slot.matrices)
    scale = _UPDATE_RMS * max(slot.matrices[1:]) ** 0.5
    return _orthogonal(ahead).float().mul_(scale).reshape(slot.master.shape)


def _orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest (semi-)orthogonal matrix of each of ``matrices`` [n, rows, cols], in bfloat16."""
    x = (matrices / (matrices.norm(dim=(-2, -1), keepdim=True) + 1e-12)).bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if tall else x
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
