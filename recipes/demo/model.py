"""The whole model, its initial weights, and loading a released checkpoint into it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from formats.families.kimi_config import TextConfig
from recipes.demo.layers import DeltaAttention, Experts, LatentAttention, LatentMoe, Linear, Mlp, Norm, Router, mix


class Layer(nn.Module):
    """One layer: an attention and an MLP or mixture, between attention residuals."""

    def __init__(self, config: TextConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.arithmetic.norm_epsilon
        if config.residual_blocks is None:
            raise NotImplementedError("the demo model has attention residuals")
        self.starts_block = index % config.residual_blocks == 0
        self.self_attention_res_norm = Norm(hidden, epsilon, dtype)
        self.self_attention_res_proj = Linear(hidden, 1, dtype)
        self.input_layernorm = Norm(hidden, epsilon, dtype)
        kind = DeltaAttention if config.attention[index] == "kda" else LatentAttention
        self.self_attn = kind(config, dtype)
        self.mlp_res_norm = Norm(hidden, epsilon, dtype)
        self.mlp_res_proj = Linear(hidden, 1, dtype)
        self.post_attention_layernorm = Norm(hidden, epsilon, dtype)
        if index in config.moe_layers:
            self.block_sparse_moe = LatentMoe(config, dtype)
        else:
            self.mlp = Mlp(config, config.dense_width, dtype)

    def forward(self, running: Tensor, blocks: list[Tensor]) -> Tensor:
        """The running sum after the layer; appends to ``blocks`` where a block starts."""
        state = running
        if blocks:
            state = mix(running, blocks, self.self_attention_res_norm, self.self_attention_res_proj)
        attended = self.self_attn(self.input_layernorm(state)).float()
        if self.starts_block:
            blocks.append(running)
            running = attended
        else:
            running = running + attended
        state = mix(running, blocks, self.mlp_res_norm, self.mlp_res_proj)
        block = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return running + block(self.post_attention_layernorm(state)).float()


class Tower(nn.Module):
    """Embedding, layers and final norm: ``model.*`` of the checkpoint."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.arithmetic.norm_epsilon
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden, dtype=dtype)
        self.layers = nn.ModuleList(Layer(config, index, dtype) for index in range(config.hidden_layers))
        self.output_attn_res_norm = Norm(hidden, epsilon, dtype)
        self.output_attn_res_proj = Linear(hidden, 1, dtype)
        self.norm = Norm(hidden, epsilon, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [B, T] -> float32 [B, T, hidden]."""
        running, blocks = self.embed_tokens(ids).float(), list[Tensor]()
        for layer in self.layers:
            running = layer(running, blocks)
        return self.norm(mix(running, blocks, self.output_attn_res_norm, self.output_attn_res_proj))


class Model(nn.Module):
    """The text tower with its head."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = Tower(config, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [B, T] -> logits [B, T, vocabulary] in the dtype of the head."""
        return self.lm_head(self.model(ids))

    def routers(self) -> list[Router]:
        """The routers in the order of the layers."""
        return [module for module in self.modules() if isinstance(module, Router)]


@torch.no_grad()
def initialize(model: Model, generator: torch.Generator) -> None:
    """Draw initial weights: matrices normal with a deviation of 0.5 / sqrt(inputs), residual scores zero."""
    for name, parameter in model.named_parameters():
        if name.endswith(("res_proj.weight", "A_log")):
            parameter.zero_()
        elif name.endswith("dt_bias"):  # decays a token between e^-0.02 and e^-0.9
            parameter.uniform_(-5.5, -1.5, generator=generator)
        elif name.endswith("conv1d.weight"):
            parameter.normal_(std=0.1, generator=generator)
            parameter[:, :, -1] += 1.0  # starts near the identity
        elif name.endswith("embed_tokens.weight"):
            parameter.normal_(std=0.3, generator=generator)
        elif parameter.ndim > 1:
            parameter.normal_(std=0.5 / math.sqrt(parameter.shape[-1]), generator=generator)


@torch.no_grad()
def load(model: Model, read: Callable[[str], Tensor], read_expert: Callable[[int, int, str], Tensor]) -> None:
    """Fill ``model`` from a checkpoint.

    Args:
        model: of the checkpoint's configuration.
        read: the tensor of a name (without the release's prefix).
        read_expert: the weights of (layer, expert, ``w1``, ``w2`` or ``w3``).
    """
    for name, target in model.state_dict(keep_vars=True).items():
        if ".experts." not in name:
            source = read(name)
            if name.endswith("A_log"):  # padded
                source = source.flatten()[: len(target)]
            target.copy_(source.view(target.shape))
    for index, layer in enumerate(model.model.layers):
        for module in layer.modules():
            if isinstance(module, Experts):
                for expert in range(len(module.down)):
                    both = (read_expert(index, expert, "w1"), read_expert(index, expert, "w3"))
                    module.gate_up[expert].copy_(torch.cat(both))
                    module.down[expert].copy_(read_expert(index, expert, "w2"))
