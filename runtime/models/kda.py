"""Kimi delta attention: a gated linear recurrence over a matrix of state for each head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formats.families.kimi_config import TextConfig
from formats.kernels.products import kda_steps
from runtime.models.arithmetic import l2_normalised, rms_norm, sigmoid, silu, softplus
from runtime.store import Tensors
from runtime.threads import Workers, multiply_rows

Single = NDArray[np.float32]


@dataclass(frozen=True)
class KdaState:
    """What a kda layer remembers; the arrays change in place.

    Attributes:
        conv: float32 [3, conv_width - 1, heads * dim], the last inputs of the convolutions of q, k and v.
        matrix: float32 [heads, dim, dim], keys by values.
    """

    conv: Single
    matrix: Single


def state_shapes(config: TextConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two arrays of a :class:`KdaState`."""
    heads, dim = config.kda_heads, config.kda_dim
    return (3, config.conv_width - 1, heads * dim), (heads, dim, dim)


def new_state(config: TextConfig) -> KdaState:
    """The state before the first token."""
    conv, matrix = state_shapes(config)
    return KdaState(np.zeros(conv, np.float32), np.zeros(matrix, np.float32))


def attend(config: TextConfig, tensors: Tensors, x: Single, state: KdaState, workers: Workers) -> Single:
    """The kda block on normed inputs; ``state`` moves on by these tokens.

    Args:
        x: float32 [n, hidden], the next n tokens.

    Returns:
        float32 [n, hidden].
    """
    count, heads, dim = x.shape[0], config.kda_heads, config.kda_dim

    def product(name: str, inputs: Single) -> Single:
        return multiply_rows(workers, tensors.matrices[f"self_attn.{name}_proj.weight"], inputs)

    mixed = [
        _convolve(product(name, x), tensors.vectors[f"self_attn.{name}_conv1d.weight"], state.conv[number])
        for number, name in enumerate("qkv")
    ]
    q, k, v = (values.reshape(count, heads, dim) for values in mixed)
    q = l2_normalised(q) * np.float32(dim**-0.5)
    k = l2_normalised(k)
    decay = np.exp(_log_decay(config, tensors, product("f_b", product("f_a", x)).reshape(count, heads, dim)))
    beta = sigmoid(product("b", x))
    out = np.empty((count, heads, dim), np.float32)
    workers.split(
        heads,
        lambda first, stop: kda_steps(state.matrix, q, k, v, decay, beta, out, first=first, stop=stop),
        worth=count * heads * dim * dim,
    )
    gate = product("g", x) if config.full_rank_gate else product("g_b", product("g_a", x))
    normed = rms_norm(out, tensors.vectors["self_attn.o_norm.weight"], config.arithmetic.norm_epsilon)
    return product("o", normed.reshape(count, -1) * sigmoid(gate))


def _convolve(x: Single, weights: Single, last: Single) -> Single:
    """silu of the causal depthwise convolution; ``last`` becomes the last inputs.

    Args:
        x: float32 [n, channels].
        weights: float32 [channels, 1, width], the newest input last.
        last: float32 [width - 1, channels].
    """
    width = last.shape[0] + 1
    taps = weights.reshape(-1, width)
    inputs = np.concatenate((last, x))
    total = inputs[: x.shape[0]] * taps[:, 0]
    for tap in range(1, width):
        total = total + inputs[tap : tap + x.shape[0]] * taps[:, tap]
    last[:] = inputs[x.shape[0] :]
    return silu(total)


def _log_decay(config: TextConfig, tensors: Tensors, z: Single) -> Single:
    """Logarithm of the decay of each key component, below zero: float32 [n, heads, dim].

    Without a bound g = -exp(A_log) softplus(z + dt_bias), with a bound L it is L sigmoid(exp(A_log) (z + dt_bias)).
    """
    heads, dim = config.kda_heads, config.kda_dim
    rate = np.exp(tensors.vectors["self_attn.A_log"].reshape(heads, 1))
    z = z + tensors.vectors["self_attn.dt_bias"].reshape(heads, dim)
    bound = config.arithmetic.decay_bound
    return -rate * softplus(z) if bound is None else np.float32(bound) * sigmoid(rate * z)
