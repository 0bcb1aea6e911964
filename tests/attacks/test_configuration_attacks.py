"""Members of a configuration that contradict the tensors, or that no runtime could follow, each with its verdict."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.families import bind
from tests.attacks.alter import configured
from tests.support.checkpoints import K3, LINEAR, CheckpointSpec, make_tensors, write_checkpoint
from tests.support.shards import Tensor, write_shards
from tests.support.spoil import TEXT, verdict

LINEAR_ATTENTION = "text_config.linear_attn_config"
WEIGHTS = "text_config.quantization_config.config_groups.group_0.weights"


# --- SRC-15: tensors of a part that the configuration does not have -----------------------------------------------

MOE = TEXT + "layers.1.block_sparse_moe."
SWITCHED_OFF: dict[str, tuple[str, dict[str, Any], str]] = {
    "no shared experts": ("text_config", {"num_shared_experts": 0}, MOE + "shared_experts.gate_proj.weight"),
    "shared experts null": ("text_config", {"num_shared_experts": None}, MOE + "shared_experts.gate_proj.weight"),
    "shared experts absent": ("text_config", {"num_shared_experts": ...}, MOE + "shared_experts.gate_proj.weight"),
    "no norm of the latent": ("text_config", {"latent_moe_use_norm": False}, MOE + "routed_expert_norm.weight"),
    "norm of the latent absent": ("text_config", {"latent_moe_use_norm": ...}, MOE + "routed_expert_norm.weight"),
    "no gate of mla": ("text_config", {"mla_use_output_gate": False}, TEXT + "layers.2.self_attn.g_proj.weight"),
    "gate of mla absent": ("text_config", {"mla_use_output_gate": ...}, TEXT + "layers.2.self_attn.g_proj.weight"),
    "no residual blocks": (
        "text_config",
        {"attn_res_block_size": None},
        TEXT + "layers.0.self_attention_res_norm.weight",
    ),
    "no latent": (
        "text_config",
        {"routed_expert_hidden_size": None, "moe_intermediate_size": 48},
        MOE + "routed_expert_down_proj.weight",
    ),
}


@pytest.mark.parametrize("need_headers", [True, False])
@pytest.mark.parametrize("case", list(SWITCHED_OFF))
def test_src_15_a_part_is_switched_off(case: str, need_headers: bool, tmp_path: Path) -> None:
    place, members, name = SWITCHED_OFF[case]
    write_checkpoint(tmp_path, K3)
    configured(place, **members)(tmp_path)
    if not need_headers:
        for shard in tmp_path.glob("*.safetensors"):
            shard.unlink()
    found = verdict(tmp_path, need_headers=need_headers)
    assert "tensor that the configuration does not have" in found
    assert f"no such tensor, says {next(iter(members))}, found {name}" in found


STRAY: dict[str, tuple[CheckpointSpec, str, str]] = {
    "direct queries beside low-rank ones": (K3, TEXT + "layers.2.self_attn.q_proj.weight", "q_lora_rank"),
    "low-rank queries beside direct ones": (LINEAR, "model.layers.2.self_attn.q_a_layernorm.weight", "q_lora_rank"),
    "low-rank gate beside a full one": (K3, TEXT + "layers.0.self_attn.g_b_proj.weight", "use_full_rank_gate"),
    "full gate beside a low-rank one": (LINEAR, "model.layers.0.self_attn.g_proj.weight", "use_full_rank_gate"),
    "gate of mla": (LINEAR, "model.layers.2.self_attn.g_proj.weight", "mla_use_output_gate"),
    "latent": (LINEAR, "model.layers.1.block_sparse_moe.routed_expert_up_proj.weight", "routed_expert_hidden_size"),
    "norm of the latent": (
        LINEAR,
        "model.layers.1.block_sparse_moe.routed_expert_norm.weight",
        "latent_moe_use_norm",
    ),
    "residuals": (LINEAR, "model.output_attn_res_proj.weight", "attn_res_block_size"),
    "kda in mla": (K3, TEXT + "layers.2.self_attn.f_a_proj.weight", "kda_layers and full_attn_layers"),
    "low-rank kda in mla": (K3, TEXT + "layers.2.self_attn.g_a_proj.weight", "kda_layers and full_attn_layers"),
    "mla in kda": (K3, TEXT + "layers.0.self_attn.kv_b_proj.weight", "kda_layers and full_attn_layers"),
    "mlp in moe": (
        K3,
        TEXT + "layers.1.mlp.up_proj.weight",
        "first_k_dense_replace, moe_layer_freq or num_experts",
    ),
    "moe in mlp": (
        K3,
        TEXT + "layers.0.block_sparse_moe.gate.e_score_correction_bias",
        "first_k_dense_replace, moe_layer_freq or num_experts",
    ),
    "shared experts in mlp": (
        LINEAR,
        "model.layers.0.block_sparse_moe.shared_experts.up_proj.weight",
        "first_k_dense_replace, moe_layer_freq or num_experts",
    ),
}


@pytest.mark.parametrize("case", list(STRAY))
def test_src_15_one_tensor_too_many(case: str, tmp_path: Path) -> None:
    spec, name, member = STRAY[case]
    write_checkpoint(tmp_path, spec)
    write_shards(tmp_path, make_tensors(spec) | {name: Tensor("BF16", (2, 2), bytes(8))}, 3)
    assert f"no such tensor, says {member}, found {name}" in verdict(tmp_path)


def test_src_15_layers_above_the_last_are_strangers(tmp_path: Path) -> None:
    """Draft layers behind the last one may look like any other; a recipe decides about them."""
    name = TEXT + f"layers.{K3.layers}.self_attn.f_a_proj.weight"
    write_checkpoint(tmp_path, K3)
    write_shards(tmp_path, make_tensors(K3) | {name: Tensor("BF16", (2, 2), bytes(8))}, 3)
    role = bind(open_checkpoint(tmp_path)).role(name)
    assert role is not None
    assert role.kind == "unknown"


# --- members that only a runtime reads ----------------------------------------------------------------------------

NOT_NUMBERS: tuple[Any, ...] = (True, "1", [], {})
NOT_POSITIVE: tuple[Any, ...] = (0, 0.0, -1e-5, *NOT_NUMBERS)
NOT_FLAGS: tuple[Any, ...] = (0, 1, "true", [], {})
NOT_COUNTS: tuple[Any, ...] = (0, -1, 1.0, True, "1", [], 1 << 40)

REFUSED: dict[str, dict[str, tuple[Any, ...]]] = {
    "text_config": {
        "moe_renormalize": NOT_FLAGS,
        "use_grouped_topk": NOT_FLAGS,
        "hidden_act": ("gelu", "", "SiLU", 1, True),
        "moe_router_activation_func": ("tanh", "", 1, ["sigmoid"]),
        "rms_norm_eps": NOT_POSITIVE,
        "routed_scaling_factor": NOT_POSITIVE,
        "activation_situ_beta": NOT_POSITIVE,
        "activation_situ_linear_beta": NOT_POSITIVE,
        "num_expert_group": (*NOT_COUNTS, 3, 8),
        "topk_group": (*NOT_COUNTS, 2),
        "num_experts_per_token": (*NOT_COUNTS, 5),
        "qk_nope_head_dim": NOT_COUNTS,
        "v_head_dim": NOT_COUNTS,
    },
    LINEAR_ATTENTION: {
        "gate_lower_bound": NOT_NUMBERS,
        "head_dim": NOT_COUNTS,
        "num_heads": NOT_COUNTS,
        "short_conv_kernel_size": NOT_COUNTS,
    },
}


@pytest.mark.parametrize(("place", "member"), [(place, name) for place in REFUSED for name in REFUSED[place]])
def test_src_15_what_a_runtime_could_not_follow(place: str, member: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(K3, assets=False))
    for value in REFUSED[place][member]:
        configured(place, **{member: value})(tmp_path)
        found = verdict(tmp_path)
        assert found.startswith("config.json"), found
        assert member in found or re.search("more experts a token", found), found


def test_situ_needs_its_beta(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    configured("text_config", activation_situ_beta=None)(tmp_path)
    assert "activation_situ_beta is absent, yet hidden_act is situ" in verdict(tmp_path)


TAKEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("text_config", {"hidden_act": "silu", "activation_situ_beta": None, "activation_situ_linear_beta": None}),
    ("text_config", {"activation_situ_linear_beta": None}),
    ("text_config", {"moe_router_activation_func": "softmax", "moe_renormalize": False}),
    ("text_config", {"num_expert_group": 2, "topk_group": 1, "use_grouped_topk": True}),
    ("text_config", {"num_expert_group": 4, "topk_group": 4, "use_grouped_topk": False}),
    ("text_config", {"num_expert_group": None, "topk_group": None}),
    ("text_config", {"routed_scaling_factor": 2.446, "rms_norm_eps": 1}),
    ("text_config", {"rms_norm_eps": ..., "routed_scaling_factor": ..., "moe_renormalize": ..., "hidden_act": ...}),
    (LINEAR_ATTENTION, {"gate_lower_bound": None}),
    (LINEAR_ATTENTION, {"gate_lower_bound": -5}),
)


@pytest.mark.parametrize(("place", "members"), TAKEN)
def test_what_a_runtime_can_follow_is_taken(place: str, members: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(K3, assets=False))
    configured(place, **members)(tmp_path)
    bind(open_checkpoint(tmp_path))


# --- DTY-05: what the configuration says about MXFP4 --------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "values"),
    [
        ("scale_dtype", ("torch.bfloat16", "uint8", "torch.float8_e8m0fnu", "", 8, True)),
        ("symmetric", (False, 0, 1, "true")),
        ("zp_dtype", ("torch.int8", False, 0)),
        ("actorder", ("group", "weight", True, False, 0)),
        ("type", ("int", "Float", None, ...)),
        ("num_bits", (8, 4.0, "4", None, ...)),
        ("group_size", (16, 64, 32.0, True, None, ...)),
        ("strategy", ("channel", "tensor_group", None, ...)),
    ],
)
def test_dty_05_the_configuration_says_another_format(member: str, values: tuple[Any, ...], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(K3, assets=False))
    for value in values:
        configured(WEIGHTS, **{member: value})(tmp_path)
        found = verdict(tmp_path)
        assert found.startswith("config.json: quantization_config") or "group_0: weights" in found, found
        assert member in found, found


@pytest.mark.parametrize(
    "members", [{"scale_dtype": ...}, {"scale_dtype": None}, {"symmetric": ...}, {"actorder": None}, {"zp_dtype": ...}]
)
def test_dty_05_what_may_be_absent(members: dict[str, Any], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(K3, assets=False))
    configured(WEIGHTS, **members)(tmp_path)
    bind(open_checkpoint(tmp_path))
