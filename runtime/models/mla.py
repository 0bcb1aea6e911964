"""Multi-head latent attention without positions: keys and values are read out of one cached latent a token.

The key rows of kv_b_proj are applied to the query instead of to every cached latent, and the value rows to the weighted
latent, which is the same sum in another order; so the cache holds kv_lora_rank + qk_rope_head_dim numbers a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from formats.encoded import RawMatrix, multiply, multiply_transposed
from formats.families.kimi_config import TextConfig
from runtime.models.arithmetic import rms_norm, sigmoid
from runtime.store import Tensors
from runtime.threads import Workers, multiply_rows

Single = NDArray[np.float32]

LOW_RANK_EPSILON = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever the configuration says
SCORES_AT_ONCE = 1 << 19  # attention scores that one worker holds at a time


@dataclass(frozen=True)
class MlaState:
    """What an mla layer remembers of each token; the arrays change in place.

    Attributes:
        latents: float32 [context, kv_lora_rank], normed.
        keys: float32 [context, rope_dim], the key part that all heads share.
    """

    latents: Single
    keys: Single


def state_shapes(config: TextConfig, context: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the two arrays of a :class:`MlaState`."""
    return (context, config.kv_lora_rank), (context, config.rope_dim)


def new_state(config: TextConfig, context: int) -> MlaState:
    """The state before the first token, for so many tokens."""
    latents, keys = state_shapes(config, context)
    return MlaState(np.zeros(latents, np.float32), np.zeros(keys, np.float32))


def attend(config: TextConfig, tensors: Tensors, x: Single, state: MlaState, position: int, workers: Workers) -> Single:
    """The mla block on normed inputs; ``state`` takes in these tokens.

    Args:
        x: float32 [n, hidden], the tokens at ``position`` and after.
        position: how many tokens the state holds.

    Returns:
        float32 [n, hidden].
    """
    count, heads, rank = x.shape[0], config.heads, config.kv_lora_rank

    def product(name: str, inputs: Single) -> Single:
        return multiply_rows(workers, tensors.matrices[f"self_attn.{name}.weight"], inputs)

    if config.q_lora_rank is None:
        query = product("q_proj", x)
    else:
        low = rms_norm(product("q_a_proj", x), tensors.vectors["self_attn.q_a_layernorm.weight"], LOW_RANK_EPSILON)
        query = product("q_b_proj", low)
    queries = query.reshape(count, heads, config.nope_dim + config.rope_dim)
    both = product("kv_a_proj_with_mqa", x)
    stop = position + count
    norm = tensors.vectors["self_attn.kv_a_layernorm.weight"]
    state.latents[position:stop] = rms_norm(both[:, :rank], norm, LOW_RANK_EPSILON)
    state.keys[position:stop] = both[:, rank:]
    out = np.empty((count, heads, config.value_dim), np.float32)
    attention = _Attention(config, tensors, state, position, queries, out)
    together = max(1, SCORES_AT_ONCE // (count * stop))
    together = min(together, -(-heads // workers.threads))
    workers.run([partial(attention.heads, first, min(first + together, heads)) for first in range(0, heads, together)])
    values = out.reshape(count, -1)
    if config.mla_gate:
        values = values * sigmoid(product("g_proj", x))
    return product("o_proj", values)


@dataclass(frozen=True)
class _Attention:
    """One call's inputs and where its result goes; heads are independent."""

    config: TextConfig
    tensors: Tensors
    state: MlaState
    position: int
    queries: Single
    out: Single

    def heads(self, first: int, stop: int) -> None:
        """Fill ``out`` for the heads from ``first`` to before ``stop``."""
        config, count = self.config, self.queries.shape[0]
        known, nope, rank = self.position + count, config.nope_dim, config.kv_lora_rank
        width = nope + config.value_dim  # rows of kv_b_proj a head, those of the key first
        expand = self.tensors.matrices["self_attn.kv_b_proj.weight"]
        latents = RawMatrix(known, rank, "F32", self.state.latents[:known])
        turned = np.empty((stop - first, count, rank), np.float32)
        for head in range(first, stop):
            query = np.ascontiguousarray(self.queries[:, head, :nope])
            rows = head * width
            turned[head - first] = multiply_transposed(expand, query, row_first=rows, row_stop=rows + nope)
        scores = multiply(latents, turned.reshape(-1, rank))
        if config.rope_dim:
            keys = RawMatrix(known, config.rope_dim, "F32", self.state.keys[:known])
            shared = np.ascontiguousarray(self.queries[:, first:stop, nope:].transpose(1, 0, 2))
            scores = scores + multiply(keys, shared.reshape(-1, config.rope_dim))
        powers, sums = _causal_powers(scores, count, self.position, (nope + config.rope_dim) ** -0.5)
        mixed = (multiply_transposed(latents, powers) / sums).reshape(stop - first, count, rank)
        for head in range(first, stop):
            rows = head * width + nope
            self.out[:, head] = multiply(expand, mixed[head - first], first=rows, stop=rows + config.value_dim)


def _causal_powers(scores: Single, count: int, position: int, scale: float) -> tuple[Single, Single]:
    """exp(scale * score - largest) of the tokens that a token may see, 0 for later ones; and their sums.

    Zeros at the end change neither this sum nor the weighted ones after it, so a token's result does not depend on
    how many later tokens are computed with it.

    Args:
        scores: float32 [heads * count, known].

    Returns:
        float32 [heads * count, known] and float32 [heads * count, 1].
    """
    known = scores.shape[1]
    seen = np.arange(known) <= position + np.arange(count)[:, None]
    scaled = (scores * np.float32(scale)).reshape(-1, count, known)
    scaled = np.where(seen, scaled, np.float32(-np.inf))
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True)).reshape(-1, known)
    ones = np.ones((1, known), np.float32)
    sums = multiply(RawMatrix(powers.shape[0], known, "F32", powers), ones)
    return powers, sums.reshape(-1, 1)
