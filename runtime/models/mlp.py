"""Gated MLPs: dense layers, shared experts and routed experts are all down(act(gate(x), up(x)))."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from formats.encoded import EncodedMatrix, multiply, multiply_pair
from formats.families.kimi_config import Arithmetic
from runtime.models.arithmetic import sigmoid, silu
from runtime.store import Expert, Tensors
from runtime.threads import ROWS_TOGETHER, Workers, multiply_rows

Single = NDArray[np.float32]
Activation = Callable[[Single, Single], Single]


def activation(arithmetic: Arithmetic) -> Activation:
    """act(gate, up) as the configuration names it.

    ``silu``: silu(g) * u. ``situ``: beta * tanh(g / beta) * sigmoid(g) * (lbeta * tanh(u / lbeta)), with u itself where
    there is no lbeta (the released modelling code of Kimi K3).
    """
    if arithmetic.activation == "silu":
        return lambda gate, up: silu(gate) * up
    assert arithmetic.situ_beta is not None  # the configuration's reader insists on it
    beta = np.float32(arithmetic.situ_beta)
    linear = None if arithmetic.situ_linear_beta is None else np.float32(arithmetic.situ_linear_beta)

    def situ(gate: Single, up: Single) -> Single:
        soft: Single = beta * np.tanh(gate / beta) * sigmoid(gate)
        return soft * (up if linear is None else linear * np.tanh(up / linear))

    return situ


def apply_expert(expert: Expert, inputs: Single, act: Activation, workers: Workers) -> tuple[Single, Single]:
    """One routed expert, on the calling thread, which may be any; those that have nothing to do take part.

    Args:
        inputs: float32 [n, width].

    Returns:
        What goes into the down matrix, float32 [n, expert width], and what comes out of it, float32 [n, width].
    """
    count, gate, up, down = len(inputs), expert.gate, expert.up, expert.down
    gates, ups = (np.empty((count, matrix.rows), np.float32) for matrix in (gate, up))
    outputs = np.empty((count, down.rows), np.float32)

    def enter(first: int, stop: int) -> None:
        multiply_pair(gate, up, inputs, first=first, stop=stop, outs=(gates, ups))

    def leave(first: int, stop: int) -> None:
        multiply(down, activated, first=first, stop=stop, out=outputs)

    workers.share(gate.rows, enter, worth=2 * count * gate.rows * gate.cols, unit=ROWS_TOGETHER)
    activated = act(gates, ups)
    workers.share(down.rows, leave, worth=count * down.rows * down.cols, unit=ROWS_TOGETHER)
    return activated, outputs


def apply_mlp(tensors: Tensors, name: str, inputs: Single, act: Activation, workers: Workers) -> Single:
    """The MLP ``name`` of a layer, by all workers.

    Args:
        tensors: of the layer.
        name: before ``.gate_proj.weight`` and its like.
        inputs: float32 [n, hidden].
    """

    def product(part: str, x: Single) -> Single:
        matrix: EncodedMatrix = tensors.matrices[f"{name}.{part}_proj.weight"]
        return multiply_rows(workers, matrix, x)

    return product("down", act(product("gate", inputs), product("up", inputs)))
