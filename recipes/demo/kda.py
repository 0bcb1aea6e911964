"""The recurrence of Kimi Delta Attention, token by token and in chunks.

With decays a_t = exp(g_t) for each key channel, a write strength beta_t and a state S [keys, values]:

    S_t = diag(a_t) S_(t-1) + k_t u_t^T,   u_t = beta_t (v_t - k_t^T diag(a_t) S_(t-1)),   o_t = q_t^T S_t

Inside a chunk, with G_t the sum of its g up to t, and S the state before it, this unrolls to

    u_t + beta_t sum_(s<t) <k_t e^(G_t), k_s e^(-G_s)> u_s = beta_t (v_t - (k_t e^(G_t))^T S)
    o_t = (q_t e^(G_t))^T S + sum_(s<=t) <q_t e^(G_t), k_s e^(-G_s)> u_s

which is a unit lower triangular system for a chunk's u and then matrix products (Kimi Linear technical report,
section on chunkwise parallelism; Yang et al. 2024 for the delta rule).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.demo.fused import fused

# e^(G - G_middle) stays inside e^(+-40) in a chunk of 16, since no log-decay is below -5.
CHUNK = 16


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The definition, a token at a time: the oracle of :func:`chunked`.

    Args:
        q, k, g: float32 [sequences, T, keys]; g is the log-decay, at most 0.
        v: float32 [sequences, T, values].
        beta: float32 [sequences, T].

    Returns:
        float32 [sequences, T, values].
    """
    state = q.new_zeros(q.shape[0], q.shape[2], v.shape[2])
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        read = torch.einsum("nk,nkv->nv", k[:, t], state)
        state = state + torch.einsum("nk,nv->nkv", k[:, t], beta[:, t, None] * (v[:, t] - read))
        outputs.append(torch.einsum("nk,nkv->nv", q[:, t], state))
    return torch.stack(outputs, 1)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same in chunks: arguments and result as of :func:`recurrence`; log-decays at least -5."""
    length = q.shape[1]
    short = -length % CHUNK
    if short:  # a padded token neither decays nor writes
        q, k, v, g = (torch.nn.functional.pad(x, (0, 0, 0, short)) for x in (q, k, v, g))
        beta = torch.nn.functional.pad(beta, (0, short))
    q, k, v, g, beta = (x.unflatten(1, (-1, CHUNK)) for x in (q, k, v, g, beta.unsqueeze(-1)))
    rising, falling, query, read, kept, decayed_query, write = _scale(q, k, g, beta)
    keys = falling.mT
    lower = torch.tril(rising @ keys, -1)
    within = torch.tril(query @ keys)
    solved = _inverse(lower) @ torch.cat((v * beta, read), -1)
    values, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    return _across(decayed_query, within, values, reads, write.mT, kept.mT).flatten(1, 2)[:, :length]


@fused
def _scale(q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys of chunks times the decays that each product needs; see :func:`chunked` for their order."""
    total = g.cumsum(2)
    middle, last = total[:, :, CHUNK // 2 - 1 : CHUNK // 2], total[:, :, -1:]
    rise, decay = (total - middle).exp(), total.exp()
    written = k * beta
    falling, write = k * (middle - total).exp(), k * (last - total).exp()
    return written * rise, falling, q * rise, written * decay, last.exp(), q * decay, write


def _across(queries: Tensor, within: Tensor, values: Tensor, reads: Tensor, writes: Tensor, kept: Tensor) -> Tensor:
    """Carry the state from chunk to chunk; the only loop over time."""
    chunks = [x.unbind(1) for x in (queries, within, values, reads, writes, kept)]
    state = queries.new_zeros(queries.shape[0], queries.shape[-1], values.shape[-1])
    outputs = []
    for query, inner, value, read, write, keep in zip(*chunks, strict=True):
        update = torch.baddbmm(value, read, state, alpha=-1)
        outputs.append(torch.baddbmm(inner @ update, query, state))
        state = torch.baddbmm(state * keep, write, update)
    return torch.stack(outputs, 1)


class _Inverse(torch.autograd.Function):
    """(1 + A)^-1 of strictly lower triangular A [..., CHUNK, CHUNK]: A^CHUNK is 0, so the Neumann series ends, and is

    (1 - A) (1 + A^2) (1 + A^4) (1 + A^8).
    """

    @staticmethod
    def forward(context: Any, lower: Tensor) -> Tensor:
        one = torch.eye(CHUNK)
        inverse, power = one - lower, lower
        for _ in range(CHUNK.bit_length() - 2):
            power = power @ power
            inverse = inverse + inverse @ power
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        (inverse,) = context.saved_tensors
        return -(inverse.mT @ gradient @ inverse.mT)


def _inverse(lower: Tensor) -> Tensor:
    inverse: Tensor = _Inverse.apply(lower)
    return inverse
