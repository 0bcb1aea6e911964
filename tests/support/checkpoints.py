"""Seeded K3 and Kimi-Linear checkpoints in the released layouts, for tests.

Written from the page on the architecture, without the code under test, so that the two can disagree. Weights are
Gaussian over the root of the columns with a row-wise factor exp(0.2 N(0, 1)); experts are rounded to MXFP4 as the
release does it. The same spec always gives the same bytes.
"""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.shards import Tensor, mxfp4, store, write_json, write_safetensors, write_shards
from tests.support.specs import K3, LINEAR, SPECS, VISION, CheckpointSpec, make_config

__all__ = ["K3", "LINEAR", "SPECS", "CheckpointSpec", "make_config", "make_tensors", "write_checkpoint"]

_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def write_checkpoint(directory: Path, spec: CheckpointSpec) -> Path:
    """Write the checkpoint into ``directory`` (made if absent) and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", make_config(spec))
    tensors = make_tensors(spec)
    if spec.shards == 1 and not spec.index:
        write_safetensors(directory / "model.safetensors", tensors)
    else:
        write_shards(directory, tensors, spec.shards)
    if spec.assets:
        _write_assets(directory, spec)
    return directory


def make_tensors(spec: CheckpointSpec) -> dict[str, Tensor]:
    """Every tensor by its full name, in the order of the forward pass."""
    rng = np.random.default_rng(spec.seed)
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int, dtype: str = "BF16") -> None:
        tensors[name] = store(_weights(rng, shape), dtype)

    def norm(name: str, width: int, dtype: str = "BF16") -> None:
        tensors[name] = store((1 + 0.1 * rng.standard_normal(width)).astype(np.float32), dtype)

    text = spec.prefix
    matrix(f"{text}model.embed_tokens.weight", spec.vocab, spec.hidden)
    for layer in range(spec.layers):
        _make_layer(spec, layer, rng, tensors, matrix, norm)
    if spec.residual_blocks is not None:
        norm(f"{text}model.output_attn_res_norm.weight", spec.hidden)
        matrix(f"{text}model.output_attn_res_proj.weight", 1, spec.hidden)
    norm(f"{text}model.norm.weight", spec.hidden)
    if not spec.tied:
        matrix(f"{text}lm_head.weight", spec.vocab, spec.hidden)
    if spec.vision and spec.family == "kimi_k3":
        _make_vision(spec, matrix, norm)
    return tensors


def _make_layer(
    spec: CheckpointSpec, layer: int, rng: np.random.Generator, tensors: dict, matrix: Any, norm: Any
) -> None:
    base = f"{spec.prefix}model.layers.{layer}."

    def residual(name: str) -> None:
        if spec.residual_blocks is not None:
            norm(f"{base}{name}_res_norm.weight", spec.hidden)
            matrix(f"{base}{name}_res_proj.weight", 1, spec.hidden)

    def mlp(name: str, width: int) -> None:
        matrix(f"{base}{name}.gate_proj.weight", width, spec.hidden)
        matrix(f"{base}{name}.up_proj.weight", width, spec.hidden)
        matrix(f"{base}{name}.down_proj.weight", spec.hidden, width)

    residual("self_attention")
    norm(f"{base}input_layernorm.weight", spec.hidden)
    (_make_kda if spec.kind(layer) == "k" else _make_mla)(spec, f"{base}self_attn.", rng, tensors, matrix, norm)
    residual("mlp")
    norm(f"{base}post_attention_layernorm.weight", spec.hidden)
    if layer not in spec.moe_layers:
        mlp("mlp", spec.dense_width)
        return
    moe = "block_sparse_moe"
    matrix(f"{base}{moe}.gate.weight", spec.experts, spec.hidden)
    bias = (0.01 * rng.standard_normal(spec.experts)).astype(np.float32)
    tensors[f"{base}{moe}.gate.e_score_correction_bias"] = store(bias, "F32")
    if spec.latent is not None:
        matrix(f"{base}{moe}.routed_expert_down_proj.weight", spec.latent, spec.hidden)
        if spec.latent_norm:
            norm(f"{base}{moe}.routed_expert_norm.weight", spec.latent)
        matrix(f"{base}{moe}.routed_expert_up_proj.weight", spec.hidden, spec.latent)
    if spec.shared:
        mlp(f"{moe}.shared_experts", spec.moe_width * spec.shared)
    for expert in range(spec.experts):
        for name, shape in zip(("w1", "w3", "w2"), spec.expert_shapes.values(), strict=True):
            module = f"{base}{moe}.experts.{expert}.{name}"
            if spec.expert_dtype == "MXFP4":
                packed, scale = mxfp4(_weights(rng, shape))
                tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"] = packed, scale
            else:
                matrix(f"{module}.weight", *shape, dtype=spec.expert_dtype)


def _make_kda(spec: CheckpointSpec, base: str, rng: np.random.Generator, tensors: dict, matrix: Any, norm: Any) -> None:
    heads, dim = spec.kda_heads, spec.kda_dim
    width = heads * dim
    for name in "qkv":
        matrix(f"{base}{name}_proj.weight", width, spec.hidden)
        matrix(f"{base}{name}_conv1d.weight", width, 1, spec.conv, dtype=spec.state_dtype)
    matrix(f"{base}f_a_proj.weight", dim, spec.hidden)
    matrix(f"{base}f_b_proj.weight", width, dim)
    tensors[f"{base}dt_bias"] = store(rng.standard_normal(width).astype(np.float32), "F32")
    decay = np.log(rng.uniform(1, 16, heads)).astype(np.float32)
    if spec.decay_form == "padded":
        decay = np.concatenate([decay, np.zeros(max(0, dim - heads), np.float32)])
    elif spec.decay_form == "4d":
        decay = decay.reshape(1, 1, heads, 1)
    tensors[f"{base}A_log"] = store(decay, "F32")
    matrix(f"{base}b_proj.weight", heads, spec.hidden)
    if spec.full_rank_gate:
        matrix(f"{base}g_proj.weight", width, spec.hidden)
    else:
        matrix(f"{base}g_a_proj.weight", dim, spec.hidden)
        matrix(f"{base}g_b_proj.weight", width, dim)
    norm(f"{base}o_norm.weight", dim, spec.state_dtype)
    matrix(f"{base}o_proj.weight", spec.hidden, width)


def _make_mla(spec: CheckpointSpec, base: str, rng: np.random.Generator, tensors: dict, matrix: Any, norm: Any) -> None:
    query = spec.heads * (spec.nope + spec.rope)
    if spec.q_lora is None:
        matrix(f"{base}q_proj.weight", query, spec.hidden)
    else:
        matrix(f"{base}q_a_proj.weight", spec.q_lora, spec.hidden)
        norm(f"{base}q_a_layernorm.weight", spec.q_lora)
        matrix(f"{base}q_b_proj.weight", query, spec.q_lora)
    matrix(f"{base}kv_a_proj_with_mqa.weight", spec.kv_lora + spec.rope, spec.hidden)
    norm(f"{base}kv_a_layernorm.weight", spec.kv_lora)
    matrix(f"{base}kv_b_proj.weight", spec.heads * (spec.nope + spec.value), spec.kv_lora)
    if spec.mla_gate:
        matrix(f"{base}g_proj.weight", spec.heads * spec.value, spec.hidden)
    matrix(f"{base}o_proj.weight", spec.hidden, spec.heads * spec.value)


def _make_vision(spec: CheckpointSpec, matrix: Any, norm: Any) -> None:
    width, inner, attention = VISION["vt_hidden_size"], VISION["vt_intermediate_size"], VISION["qkv_hidden_size"]
    matrix("vision_tower.patch_embed.proj.weight", width, 3, 14, 14)
    matrix("vision_tower.patch_embed.pos_emb.weight", 8, 8, width)
    for block in range(VISION["vt_num_hidden_layers"]):
        base = f"vision_tower.encoder.blocks.{block}."
        norm(f"{base}norm0.weight", width)
        matrix(f"{base}wqkv.weight", 3 * attention, width)
        matrix(f"{base}wo.weight", width, attention)
        norm(f"{base}norm1.weight", width)
        matrix(f"{base}mlp.fc0.weight", inner, width)
        matrix(f"{base}mlp.fc1.weight", width, inner)
    norm("vision_tower.encoder.final_layernorm.weight", width)
    merged = 4 * width
    matrix("mm_projector.proj.0.weight", merged, merged)
    matrix("mm_projector.proj.2.weight", spec.hidden, merged)
    norm("mm_projector.post_norm.weight", spec.hidden)


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    fan_in = math.prod(shape[1:])
    factor = np.exp(0.2 * rng.standard_normal((shape[0],) + (1,) * (len(shape) - 1), np.float32))
    return rng.standard_normal(shape, np.float32) / np.float32(math.sqrt(fan_in)) * factor


def _write_assets(directory: Path, spec: CheckpointSpec) -> None:
    pieces = [bytes([value]) for value in range(256)] + [b"th", b"the", b" the", "漢".encode()]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (directory / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    decoder = {str(len(pieces) + n): {"content": text, "special": True} for n, text in enumerate(("[BOS]", "[EOS]"))}
    write_json(directory / "tokenizer_config.json", {"added_tokens_decoder": decoder, "seed": spec.seed})
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8"
    )
    (directory / "figures").mkdir(exist_ok=True)
    (directory / "figures" / "x.png").write_bytes(_PNG)
    (directory / ".gitattributes").write_text("*.safetensors filter=lfs\n", encoding="utf-8")
