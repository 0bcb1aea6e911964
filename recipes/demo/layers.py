"""The parts of the model: norms, MLPs, both attentions, the mixture of experts, and attention residuals.

Modules and parameters have the names of the released checkpoint, and compute what its configuration says. Matrices
have the dtype of the model (bfloat16 in training, float32 to evaluate) and multiply in it; norms, decays, routing and
recurrences are float32. ``[B, T, width]`` everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from formats.families.kimi_config import TextConfig
from recipes.demo import fused
from recipes.demo.kda import chunked

_LATENT_EPSILON = 1e-6  # of q_a_layernorm and kv_a_layernorm, whatever the configuration says
_UNIT_EPSILON = 1e-6  # of the L2 norm of queries and keys
_ROUTER_EPSILON = 1e-20


class Norm(nn.Module):
    """RMSNorm with a weight, computed in float32."""

    def __init__(self, width: int, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalised ``x`` in the dtype of the weight."""
        return fused.rms_norm(x, self.weight, self.epsilon)


class Linear(nn.Linear):
    """A matrix without bias; its input is cast to the dtype of the matrix."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs] -> [..., outputs] in the dtype of the matrix."""
        return functional.linear(x.to(self.weight.dtype), self.weight)


def activation(config: TextConfig, gate_up: Tensor) -> Tensor:
    """What stands between the matrices of an MLP: [..., 2 n] -> [..., n]."""
    arithmetic = config.arithmetic
    if arithmetic.activation != "situ" or arithmetic.situ_beta is None:
        raise NotImplementedError("the demo model's activation is SiTU")
    return fused.situ(gate_up, arithmetic.situ_beta, arithmetic.situ_linear_beta)


class Mlp(nn.Module):
    """The dense MLP and the shared expert."""

    def __init__(self, config: TextConfig, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = Linear(config.hidden_size, width, dtype)
        self.up_proj = Linear(config.hidden_size, width, dtype)
        self.down_proj = Linear(width, config.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        x = x.to(self.gate_proj.weight.dtype)
        return self.down_proj(activation(self.config, torch.cat((self.gate_proj(x), self.up_proj(x)), -1)))


class Convolution(nn.Module):
    """Causal depthwise convolution over time, then SiLU. The weight is [channels, 1, width], float32."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, channels] -> the same, float32."""
        return fused.convolve(x, self.weight)


class DeltaAttention(nn.Module):
    """Kimi Delta Attention (KDA)."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.dim, self.bound = config.kda_heads, config.kda_dim, config.arithmetic.decay_bound
        hidden, width = config.hidden_size, config.kda_heads * config.kda_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(hidden, width, dtype) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Convolution(width, config.conv_width) for _ in range(3))
        self.f_a_proj, self.f_b_proj = Linear(hidden, self.dim, dtype), Linear(self.dim, width, dtype)
        self.b_proj = Linear(hidden, self.heads, dtype)
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        if not config.full_rank_gate or self.bound is None:
            raise NotImplementedError("the demo model has a full-rank gate and a bounded decay")
        self.g_proj = Linear(hidden, width, dtype)
        self.o_norm = Norm(self.dim, config.arithmetic.norm_epsilon, torch.float32)
        self.o_proj = Linear(width, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x.to(self.q_proj.weight.dtype)
        q, k, v = (
            self._by_head(conv(proj(x)))
            for conv, proj in (
                (self.q_conv1d, self.q_proj),
                (self.k_conv1d, self.k_proj),
                (self.v_conv1d, self.v_proj),
            )
        )
        z = (self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias).unflatten(-1, (self.heads, self.dim))
        assert self.bound is not None  # see __init__
        decay = self.bound * torch.sigmoid(self.A_log.exp().unsqueeze(-1) * z)
        beta = torch.sigmoid(self.b_proj(x).float())
        output = chunked(
            fused.unit(q, _UNIT_EPSILON, self.dim**-0.5),
            fused.unit(k, _UNIT_EPSILON, 1.0),
            v,
            decay.transpose(1, 2).flatten(0, 1),
            beta.transpose(1, 2).flatten(0, 1),
        )
        output = output.unflatten(0, (-1, self.heads)).transpose(1, 2)
        gate = self.g_proj(x).unflatten(-1, (self.heads, self.dim))
        return self.o_proj(fused.gated_norm(output, self.o_norm.weight, gate, self.o_norm.epsilon).flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.dim)).transpose(1, 2).flatten(0, 1)


class LatentAttention(nn.Module):
    """Multi-head latent attention (MLA) without rotary embedding."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        hidden, heads, key = config.hidden_size, config.heads, config.nope_dim + config.rope_dim
        if config.q_lora_rank is None or not config.mla_gate:
            raise NotImplementedError("the demo model has low-rank queries and an output gate")
        self.q_a_proj = Linear(hidden, config.q_lora_rank, dtype)
        self.q_a_layernorm = Norm(config.q_lora_rank, _LATENT_EPSILON, dtype)
        self.q_b_proj = Linear(config.q_lora_rank, heads * key, dtype)
        self.kv_a_proj_with_mqa = Linear(hidden, config.kv_lora_rank + config.rope_dim, dtype)
        self.kv_a_layernorm = Norm(config.kv_lora_rank, _LATENT_EPSILON, dtype)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.nope_dim + config.value_dim), dtype)
        self.g_proj = Linear(hidden, heads * config.value_dim, dtype)
        self.o_proj = Linear(heads * config.value_dim, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        c = self.config
        x = x.to(self.q_a_proj.weight.dtype)
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (c.heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.rope_dim), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.heads, -1))
        k, v = kv.split((c.nope_dim, c.value_dim), -1)
        k = torch.cat((k, shared.unsqueeze(2).expand(-1, -1, c.heads, -1)), -1)
        output = functional.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True, scale=(c.nope_dim + c.rope_dim) ** -0.5
        )
        return self.o_proj(output.transpose(1, 2).flatten(2) * torch.sigmoid(self.g_proj(x)))


class Router(nn.Module):
    """Sigmoid scores; a bias chooses, and does not weigh (DeepSeek-V3, section 2.1.2)."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        arithmetic = config.arithmetic
        if arithmetic.scoring != "sigmoid" or arithmetic.expert_groups > 1 or not arithmetic.renormalize:
            raise NotImplementedError("the demo model's router has sigmoid scores, one group and renormalised weights")
        self.chosen, self.scale = config.experts_per_token, arithmetic.routed_scale
        self.weight = nn.Parameter(torch.zeros(config.experts, config.hidden_size, dtype=dtype))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.loads = list[Tensor]()  # of the forward passes since the last balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [tokens, hidden] -> experts [tokens, chosen] and their weights; counts loads while training."""
        scores = torch.sigmoid(functional.linear(x, self.weight.float()))
        experts = (scores.detach() + self.e_score_correction_bias).topk(self.chosen, sorted=False).indices
        if self.training:
            self.loads.append(torch.bincount(experts.flatten(), minlength=len(self.weight)))
        weights = scores.gather(1, experts)
        return experts, weights / (weights.sum(1, keepdim=True) + _ROUTER_EPSILON) * self.scale

    @torch.no_grad()
    def balance(self, rate: float) -> float:
        """Nudge the bias of every expert by ``rate`` towards equal loads; return the largest load over the mean."""
        load = torch.stack(self.loads).sum(0).float()
        self.loads.clear()
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load)
        return float(load.max() / load.mean())


class Experts(nn.Module):
    """All routed experts of a layer; gate (w1) and up (w3) are stacked in one tensor."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        (rows, cols), _, (outputs, inputs) = config.expert_shapes
        self.gate_up = nn.Parameter(torch.zeros(config.experts, 2 * rows, cols, dtype=dtype))
        self.down = nn.Parameter(torch.zeros(config.experts, outputs, inputs, dtype=dtype))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Sum of weight * expert(x): [tokens, width] in the dtype of the matrices -> float32 [tokens, width]."""
        order = experts.flatten().argsort(stable=True)
        tokens = order // experts.shape[1]
        counts = torch.bincount(experts.flatten(), minlength=len(self.gate_up)).tolist()
        parts = [
            functional.linear(activation(self.config, functional.linear(part, gate_up)), down)
            for part, gate_up, down in zip(
                x[tokens].split(counts), self.gate_up.unbind(), self.down.unbind(), strict=True
            )
        ]
        weighted = torch.cat(parts).float() * weights.flatten()[order].unsqueeze(-1)
        return x.new_zeros(x.shape, dtype=torch.float32).index_add(0, tokens, weighted)


class LatentMoe(nn.Module):
    """Router, experts in a latent space, and the shared expert on the full width."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        if config.latent_size is None or not config.latent_norm:
            raise NotImplementedError("the demo model's experts work in a latent space with a norm")
        self.gate = Router(config, dtype)
        self.experts = Experts(config, dtype)
        self.routed_expert_down_proj = Linear(config.hidden_size, config.latent_size, dtype)
        self.routed_expert_norm = Norm(config.latent_size, config.arithmetic.norm_epsilon, dtype)
        self.routed_expert_up_proj = Linear(config.latent_size, config.hidden_size, dtype)
        self.shared_experts = Mlp(config, config.expert_width * config.shared_experts, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        flat = x.flatten(0, 1)
        routed = self.experts(self.routed_expert_down_proj(flat), *self.gate(flat.float()))
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed)).view(x.shape)
        return routed + self.shared_experts(x)


def mix(running: Tensor, blocks: list[Tensor], norm: Norm, proj: Linear) -> Tensor:
    """Attention residual: blocks and the running sum, weighted by a softmax over their normalised scores."""
    direction = norm.weight.float() * proj.weight[0].float()
    return fused.mix([*blocks, running], direction, norm.epsilon)
