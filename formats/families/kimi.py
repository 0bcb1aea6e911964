"""What Kimi K3 and Kimi-Linear share: the tensors that a text configuration promises, by name, role, dtype and shape.

Linear maps are stored [outputs, inputs]; layers are counted from zero.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from formats.errors import FormatError
from formats.families.inventory import Expected, Inventory, tensor_bytes
from formats.families.kimi_config import TextConfig
from formats.families.model import Architecture, ExpertTensor, Role

# Matrices of an expert, in the order of a record, with the names that both families give them.
EXPERT_NAMES = (("gate", "w1"), ("up", "w3"), ("down", "w2"))


@dataclass(frozen=True)
class Release:
    """The habits in which the families differ.

    Attributes:
        family: its name.
        name: the class that its configuration names.
        prefix: before every name of the text tower.
        padded_decay: A_log is a vector padded with zeros, not [1, 1, heads, 1].
        float32_state: convolutions and output norm of kda layers are F32. Shard headers decide; without them the
            total size of the index does.
    """

    family: str
    name: str
    prefix: str
    padded_decay: bool
    float32_state: bool


def text_tensors(config: TextConfig, release: Release) -> tuple[Expected, ...]:
    """Everything of the text tower but its experts, in the order of the forward pass.

    Args:
        config: the configuration.
        release: the family's habits.
    """
    hidden, dtype = config.hidden_size, config.dtype

    def outer(kind: str, name: str, *shape: int, optional: bool = False) -> Expected:
        return Expected(release.prefix + name, Role(kind, part=name), shape, dtype, optional=optional)

    tensors = [outer("embedding", "model.embed_tokens.weight", config.vocab_size, hidden)]
    moe = frozenset(config.moe_layers)
    for layer in range(config.hidden_layers):
        tensors += _layer(config, release, layer, layer in moe)
    if config.residual_blocks is not None:
        tensors.append(outer("residual", "model.output_attn_res_norm.weight", hidden))
        tensors.append(outer("residual", "model.output_attn_res_proj.weight", 1, hidden))
    tensors.append(outer("norm", "model.norm.weight", hidden))
    tensors.append(outer("head", "lm_head.weight", config.vocab_size, hidden, optional=config.tied_embeddings))
    return tuple(tensors)


def _layer(config: TextConfig, release: Release, layer: int, is_moe: bool) -> list[Expected]:
    prefix = f"{release.prefix}model.layers.{layer}."
    hidden, tensors = config.hidden_size, list[Expected]()

    def add(kind: str, name: str, *shape: int, optional: bool = False) -> None:
        tensors.append(Expected(prefix + name, Role(kind, layer, part=name), shape, config.dtype, optional=optional))

    def add_f32(kind: str, name: str, *shape: int, heads: int | None = None) -> None:
        tensors.append(Expected(prefix + name, Role(kind, layer, part=name), shape, "F32", heads))

    def add_state(kind: str, name: str, *shape: int) -> None:
        first, other = ("F32", config.dtype) if release.float32_state else (config.dtype, "F32")
        tensors.append(Expected(prefix + name, Role(kind, layer, part=name), shape, first, other_dtype=other))

    def residual(name: str) -> None:
        if config.residual_blocks is not None:
            add("residual", f"{name}_res_norm.weight", hidden)
            add("residual", f"{name}_res_proj.weight", 1, hidden)

    def mlp(kind: str, name: str, width: int) -> None:
        add(kind, f"{name}.gate_proj.weight", width, hidden)
        add(kind, f"{name}.up_proj.weight", width, hidden)
        add(kind, f"{name}.down_proj.weight", hidden, width)

    residual("self_attention")
    add("norm", "input_layernorm.weight", hidden)
    if config.attention[layer] == "kda":
        width = config.kda_heads * config.kda_dim
        for name in "qkv":
            add("attention", f"self_attn.{name}_proj.weight", width, hidden)
            add_state("conv", f"self_attn.{name}_conv1d.weight", width, 1, config.conv_width)
        add("attention_gate", "self_attn.f_a_proj.weight", config.kda_dim, hidden)
        add("attention_gate", "self_attn.f_b_proj.weight", width, config.kda_dim)
        add_f32("decay", "self_attn.dt_bias", width)
        heads = config.kda_heads
        decay = (max(config.kda_dim, heads),) if release.padded_decay else (1, 1, heads, 1)
        add_f32("decay", "self_attn.A_log", *decay, heads=heads)
        add("attention_gate", "self_attn.b_proj.weight", config.kda_heads, hidden)
        if config.full_rank_gate:
            add("attention", "self_attn.g_proj.weight", width, hidden)
        else:
            add("attention_gate", "self_attn.g_a_proj.weight", config.kda_dim, hidden)
            add("attention_gate", "self_attn.g_b_proj.weight", width, config.kda_dim)
        add_state("norm", "self_attn.o_norm.weight", config.kda_dim)
        add("attention", "self_attn.o_proj.weight", hidden, width)
    else:
        heads, query = config.heads, config.heads * (config.nope_dim + config.rope_dim)
        if config.q_lora_rank is None:
            add("attention", "self_attn.q_proj.weight", query, hidden)
        else:
            add("attention", "self_attn.q_a_proj.weight", config.q_lora_rank, hidden)
            add("norm", "self_attn.q_a_layernorm.weight", config.q_lora_rank)
            add("attention", "self_attn.q_b_proj.weight", query, config.q_lora_rank)
        add("attention", "self_attn.kv_a_proj_with_mqa.weight", config.kv_lora_rank + config.rope_dim, hidden)
        add("norm", "self_attn.kv_a_layernorm.weight", config.kv_lora_rank)
        add(
            "attention", "self_attn.kv_b_proj.weight", heads * (config.nope_dim + config.value_dim), config.kv_lora_rank
        )
        if config.mla_gate:
            add("attention", "self_attn.g_proj.weight", heads * config.value_dim, hidden)
        add("attention", "self_attn.o_proj.weight", hidden, heads * config.value_dim)

    residual("mlp")
    add("norm", "post_attention_layernorm.weight", hidden)
    if not is_moe:
        mlp("dense_mlp", "mlp", config.dense_width)
        return tensors
    moe = "block_sparse_moe"
    add("router", f"{moe}.gate.weight", config.experts, hidden)
    add_f32("router_bias", f"{moe}.gate.e_score_correction_bias", config.experts)
    if config.latent_size is not None:
        add("latent", f"{moe}.routed_expert_down_proj.weight", config.latent_size, hidden)
    if config.latent_norm:
        # Without a latent the norm would act on the full width; releases are not known to ship it then.
        add("norm", f"{moe}.routed_expert_norm.weight", config.expert_input, optional=config.latent_size is None)
    if config.latent_size is not None:
        add("latent", f"{moe}.routed_expert_up_proj.weight", hidden, config.latent_size)
    if config.shared_experts:
        mlp("shared_expert", f"{moe}.shared_experts", config.expert_width * config.shared_experts)
    return tensors


def _expert_modules(prefix: str) -> dict[str, str]:
    """Per matrix the name of its module, with ``{layer}`` and ``{expert}``."""
    base = f"{prefix}model.layers.{{layer}}.block_sparse_moe.experts.{{expert}}."
    return {matrix: base + name for matrix, name in EXPERT_NAMES}


def _expert_tensors(
    config: TextConfig, prefix: str, group: int | None
) -> tuple[dict[str, tuple[ExpertTensor, ...]], tuple[str, ...]]:
    """The tensors of an expert in the announced format, and the names that the other format would have."""
    tensors: dict[str, tuple[ExpertTensor, ...]] = {}
    rivals: list[str] = []
    for (matrix, module), (rows, cols) in zip(_expert_modules(prefix).items(), config.expert_shapes, strict=True):
        if group is None:
            size = tensor_bytes((rows, cols), config.dtype)
            tensors[matrix] = (ExpertTensor(f"{module}.weight", "weight", config.dtype, (rows, cols), size),)
            rivals += [f"{module}.weight_packed", f"{module}.weight_scale"]
        else:
            packed, scale = (rows, -(-cols // 2)), (rows, -(-cols // group))
            tensors[matrix] = (
                ExpertTensor(f"{module}.weight_packed", "packed", "U8", packed, packed[0] * packed[1]),
                ExpertTensor(f"{module}.weight_scale", "scale", "U8", scale, scale[0] * scale[1]),
            )
            rivals.append(f"{module}.weight")
    return tensors, tuple(rivals)


def _group_size(config: TextConfig, prefix: str) -> int | None:
    """The experts' group size, None if they are dense; its patterns must include the first and the last expert."""
    if config.quantization is None:
        return None
    corners = [
        (layer, expert)
        for layer in config.moe_layers[:1] + config.moe_layers[-1:]
        for expert in (0, config.experts - 1)
    ]
    return config.quantization.check_experts(
        module.replace("{layer}", str(layer)).replace("{expert}", str(expert))
        for layer, expert in corners
        for module in _expert_modules(prefix).values()
    )


def _layer_marks(config: TextConfig, prefix: str) -> tuple[tuple[int, str, tuple[tuple[str, str], ...]], ...]:
    """Per layer the promised kind, and a name that only a layer of each kind has."""
    marks = []
    moe = frozenset(config.moe_layers)
    for layer in range(config.hidden_layers):
        base = f"{prefix}model.layers.{layer}."
        kinds = (("kda", f"{base}self_attn.A_log"), ("mla", f"{base}self_attn.kv_a_proj_with_mqa.weight"))
        marks.append((layer, config.attention[layer], kinds))
        blocks = (("MoE", f"{base}block_sparse_moe.gate.weight"), ("dense MLP", f"{base}mlp.gate_proj.weight"))
        marks.append((layer, "MoE" if layer in moe else "dense MLP", blocks))
    return tuple(marks)


def build(
    config: TextConfig,
    release: Release,
    towers: tuple[tuple[str, str], ...] = (),
    tower_tensors: tuple[Expected, ...] = (),
) -> Inventory:
    """The inventory of a text tower, with whatever towers stand beside it."""
    group = _group_size(config, release.prefix)
    experts, rivals = _expert_tensors(config, release.prefix, group)
    architecture = Architecture(
        family=release.family,
        name=release.name,
        hidden_layers=config.hidden_layers,
        moe_layers=config.moe_layers,
        experts=config.experts,
        experts_per_token=config.experts_per_token,
        hidden_size=config.hidden_size,
        expert_shapes=config.expert_shapes,
        expert_format="dense" if group is None else "mxfp4",
        expert_dtype=experts["gate"][0].dtype,
        group_size=group,
        vocab_size=config.vocab_size,
        latent_size=config.latent_size,
        attention=config.attention,
        decay_heads=config.kda_heads,
        tied_embeddings=config.tied_embeddings,
    )
    trunk = text_tensors(config, release)
    marks = _layer_marks(config, release.prefix)
    contradiction = partial(_contradiction, config, release)
    return Inventory(architecture, trunk, towers, tower_tensors, experts, rivals, marks, contradiction)


def _contradiction(config: TextConfig, release: Release, names: Collection[str]) -> tuple[str, str] | None:
    """One of ``names`` that the text tower has under another configuration, and the member to blame."""
    rich = replace(
        config,
        shared_experts=1,
        latent_norm=True,
        latent_size=config.latent_size or 1,
        mla_gate=True,
        residual_blocks=config.residual_blocks or 1,
    )
    turned = tuple("mla" if kind == "kda" else "kda" for kind in config.attention)
    attention, blocks = "kda_layers and full_attn_layers", "first_k_dense_replace, moe_layer_freq or num_experts"
    others = (
        ("num_shared_experts", replace(config, shared_experts=1)),
        ("latent_moe_use_norm", replace(config, latent_norm=True)),
        ("routed_expert_hidden_size", replace(config, latent_size=config.latent_size or 1)),
        ("mla_use_output_gate", replace(config, mla_gate=True)),
        ("use_full_rank_gate", replace(config, full_rank_gate=not config.full_rank_gate)),
        ("q_lora_rank", replace(config, q_lora_rank=1 if config.q_lora_rank is None else None)),
        ("attn_res_block_size", replace(config, residual_blocks=config.residual_blocks or 1)),
        (attention, replace(rich, attention=turned, full_rank_gate=True, q_lora_rank=1)),
        (attention, replace(rich, attention=turned, full_rank_gate=False, q_lora_rank=None)),
        (blocks, replace(rich, experts=config.experts or 1, first_dense=0, moe_frequency=1)),
        (blocks, replace(rich, experts=0)),
    )
    for member, other in others:
        for expected in text_tensors(other, release):
            if expected.name in names:
                return expected.name, member
    return None


def check_decay(name: str, values: NDArray[np.float32], heads: int, where: str) -> NDArray[np.float32]:
    """The first ``heads`` entries of an A_log; K3 pads it with zeros, and anything else there means another layout.

    Args:
        name: of the tensor, for messages.
        values: float32, of any shape.
        heads: how many entries count.
        where: the shard, for messages.

    Raises:
        FormatError: fewer entries than heads, or an entry past them that is not zero.
    """
    flat = values.reshape(-1)
    if flat.size < heads:
        raise FormatError(
            "A_log has fewer entries than heads", where=f"{where}: {name}", expected=heads, found=flat.size
        )
    tail = np.flatnonzero(flat[heads:])
    if tail.size:
        at = heads + int(tail[0])
        raise FormatError(
            f"A_log is not zero past its {heads} heads: entry {at}",
            where=f"{where}: {name}",
            expected=0,
            found=float(flat[at]),
        )
    return flat[:heads]
