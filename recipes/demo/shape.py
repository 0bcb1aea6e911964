"""The shape of the demo model, as the ``config.json`` of the release would say it."""

from __future__ import annotations

from typing import Any

from formats.families.fields import Fields
from formats.families.kimi_config import TextConfig, read_text_config
from recipes.demo import bpe

VOCABULARY = bpe.RANKS + bpe.SPECIALS
WINDOW = 256  # tokens of a training window

# 3 x 192 x 288 = 165,888 weights an expert, 20,736 vectors of eight: enough for a set of codebooks.
_TEXT: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-05,
    "bos_token_id": bpe.BOS,
    "eos_token_id": bpe.EOS,
    "pad_token_id": VOCABULARY - 1,
    "num_experts": 24,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "moe_intermediate_size": 288,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "routed_expert_hidden_size": 192,
    "latent_moe_use_norm": True,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6],
        "full_attn_layers": [4, 7],
        "num_heads": 4,
        "head_dim": 64,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
    },
    "attn_res_block_size": 3,
    "max_position_embeddings": 4096,
    "quantization_config": {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": True,
                    "type": "float",
                    "zp_dtype": None,
                },
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    },
}

CONFIG: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "bos_token_id": bpe.BOS,
    "eos_token_id": bpe.EOS,
    "pad_token_id": VOCABULARY - 1,
    "ignore_index": -100,
    "tie_word_embeddings": False,
    "text_config": _TEXT,
}


def text_config(config: dict[str, Any]) -> TextConfig:
    """The text tower's part of a ``config.json``, checked."""
    outer = Fields(config, "config.json")
    inner = outer.inner("text_config")
    return read_text_config(inner or outer, outer if inner else None)
