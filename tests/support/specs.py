"""What the test checkpoints are like: widths, layer patterns and quirks, and the configuration that says so."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tests.support.shards import GROUP

VISION = {
    "_attn_implementation": "flash_attention_2",
    "init_pos_emb_height": 8,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 8,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 32,
    "mm_projector_type": "patchmergerv2",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "qkv_hidden_size": 48,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 64,
    "vt_num_attention_heads": 12,
    "vt_num_hidden_layers": 2,
}


@dataclass(frozen=True)
class CheckpointSpec:
    """What to write.

    Attributes:
        family: ``kimi_k3`` or ``kimi_linear``.
        attention: one letter a layer, ``k`` (kda) or ``m`` (mla), repeated to the number of layers.
        expert_dtype: ``MXFP4``, ``BF16``, ``F16`` or ``F32``.
        latent: width in which experts work, or None.
        decay_form: of A_log: ``heads``, ``padded`` or ``4d``.
        state_dtype: of convolutions and o_norm.
        tied: whether the configuration ties head and embedding; then there is no head.
        shards: 1 means one ``model.safetensors`` without an index, unless ``index`` is set.
        assets: whether tokenizer, template and picture stand beside the weights.
    """

    family: str = "kimi_k3"
    seed: int = 0
    vocab: int = 160
    hidden: int = 64
    layers: int = 4
    attention: str = "kkm"
    dense_width: int = 96
    heads: int = 2
    q_lora: int | None = 24
    kv_lora: int = 16
    nope: int = 16
    rope: int = 8
    value: int = 16
    mla_gate: bool = True
    kda_heads: int = 2
    kda_dim: int = 16
    conv: int = 4
    full_rank_gate: bool = True
    residual_blocks: int | None = 2
    experts: int = 4
    per_token: int = 2
    shared: int | None = 2
    moe_width: int = 48
    latent: int | None = 32
    latent_norm: bool = True
    first_dense: int = 1
    moe_frequency: int = 1
    expert_dtype: str = "MXFP4"
    decay_form: str = "padded"
    state_dtype: str = "BF16"
    tied: bool = False
    vision: bool = True
    shards: int = 3
    index: bool = False
    assets: bool = True

    @property
    def prefix(self) -> str:
        """Before every name of the text tower."""
        return "language_model." if self.family == "kimi_k3" else ""

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with routed experts, counted from zero."""
        return tuple(n for n in range(self.layers) if n >= self.first_dense and n % self.moe_frequency == 0)

    @property
    def expert_shapes(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of gate, up and down."""
        inner = self.latent or self.hidden
        return {"gate": (self.moe_width, inner), "up": (self.moe_width, inner), "down": (inner, self.moe_width)}

    def kind(self, layer: int) -> str:
        """``k`` or ``m``."""
        return self.attention[layer % len(self.attention)]


K3 = CheckpointSpec()
LINEAR = CheckpointSpec(
    family="kimi_linear",
    q_lora=None,
    mla_gate=False,
    full_rank_gate=False,
    residual_blocks=None,
    shared=1,
    latent=None,
    latent_norm=False,
    expert_dtype="BF16",
    decay_form="4d",
    vision=False,
    shards=2,
)

# By name, so that a test can run over all of them.
SPECS = {
    "k3": K3,
    "k3-tiny-like": replace(
        K3,
        hidden=128,
        layers=7,
        attention="kkkmkkm",
        dense_width=256,
        heads=4,
        q_lora=48,
        kv_lora=32,
        nope=32,
        value=32,
        rope=16,
        kda_heads=4,
        kda_dim=32,
        residual_blocks=3,
        experts=16,
        per_token=4,
        moe_width=96,
        latent=64,
        shards=9,
    ),
    "k3-odd-widths": replace(K3, hidden=72, latent=50, moe_width=100, kda_dim=12, kda_heads=3, seed=1),
    "k3-odd-numbers": replace(K3, hidden=71, latent=33, moe_width=97, kv_lora=13, q_lora=19, dense_width=101, seed=2),
    "k3-single-file": replace(K3, shards=1, seed=3),
    "k3-many-shards": replace(K3, shards=40, seed=4),
    "k3-no-latent": replace(K3, latent=None, latent_norm=False, seed=5),
    "k3-no-vision": replace(K3, vision=False, seed=6),
    "k3-dense-experts": replace(K3, expert_dtype="BF16", seed=7),
    "k3-plain": replace(
        K3,
        q_lora=None,
        full_rank_gate=False,
        mla_gate=False,
        residual_blocks=None,
        shared=None,
        decay_form="heads",
        seed=8,
    ),
    "k3-float32-state": replace(K3, state_dtype="F32", moe_frequency=2, first_dense=0, seed=9),
    "k3-tied": replace(K3, tied=True, seed=10),
    "k3-rvq": replace(K3, layers=2, experts=12, moe_width=320, latent=256, vision=False, seed=11),
    "linear": LINEAR,
    "linear-odd-widths": replace(LINEAR, hidden=70, moe_width=37, experts=3, per_token=3, seed=12),
    "linear-float32": replace(LINEAR, expert_dtype="F32", layers=3, seed=13),
    "linear-float16": replace(LINEAR, expert_dtype="F16", layers=3, shared=0, seed=14),
}


def make_config(spec: CheckpointSpec) -> dict[str, Any]:
    """``config.json`` of the family."""
    numbers = range(1, spec.layers + 1)  # the lists count from one
    linear: dict[str, Any] = {
        "kda_layers": [n for n in numbers if spec.kind(n - 1) == "k"],
        "full_attn_layers": [n for n in numbers if spec.kind(n - 1) == "m"],
        "num_heads": spec.kda_heads,
        "head_dim": spec.kda_dim,
        "short_conv_kernel_size": spec.conv,
    }
    if spec.full_rank_gate:
        linear |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    text: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.dense_width,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.heads,
        "hidden_act": "situ" if spec.family == "kimi_k3" else "silu",
        "activation_situ_beta": 4.0 if spec.family == "kimi_k3" else None,
        "activation_situ_linear_beta": 25.0 if spec.family == "kimi_k3" else None,
        "rms_norm_eps": 1e-05,
        "moe_intermediate_size": spec.moe_width,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_experts": spec.experts,
        "num_experts_per_token": spec.per_token,
        "num_shared_experts": spec.shared,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": spec.first_dense,
        "moe_layer_freq": spec.moe_frequency,
        "q_lora_rank": spec.q_lora,
        "kv_lora_rank": spec.kv_lora,
        "qk_nope_head_dim": spec.nope,
        "qk_rope_head_dim": spec.rope,
        "v_head_dim": spec.value,
        "mla_use_nope": True,
        "mla_use_output_gate": spec.mla_gate,
        "linear_attn_config": linear,
        "attn_res_block_size": spec.residual_blocks,
        "routed_expert_hidden_size": spec.latent,
        "latent_moe_use_norm": spec.latent_norm,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": spec.tied,
    }
    if spec.expert_dtype == "MXFP4":
        text["quantization_config"] = _quantization()
    if spec.family == "kimi_linear":
        return text
    config: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "text_config": text,
        "tie_word_embeddings": spec.tied,
    }
    if spec.vision:
        config["vision_config"] = VISION | {"text_hidden_size": spec.hidden}
    return config


def _quantization() -> dict[str, Any]:
    weights = {
        "dynamic": False,
        "group_size": GROUP,
        "num_bits": 4,
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    return {
        "config_groups": {"group_0": {"format": "mxfp4-pack-quantized", "targets": ["Linear"], "weights": weights}},
        "format": "mxfp4-pack-quantized",
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
