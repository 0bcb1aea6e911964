"""Checkpoints of many shapes whose weights behave like a trained model's, for tests of the forward pass.

``tests.support.checkpoints`` makes valid bytes; here the tensors that decide how long a state remembers and which
experts are chosen get values for which that matters: decays from almost none to fast, correction biases that move
choices, and no two experts alike. Every shape is one combination of widths, layer kinds and switches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.checkpoints import make_config, make_tensors
from tests.support.shards import store, write_json, write_safetensors, write_shards
from tests.support.specs import K3, LINEAR, CheckpointSpec


@dataclass(frozen=True)
class Shape:
    """One model.

    Attributes:
        spec: widths and layer kinds.
        text: members of the text configuration that are not what the spec makes them; None leaves a member out.
        linear: the same within ``linear_attn_config``.
        key_scale: factor on the convolutions of queries and keys; where it is small, so are these, and what is added
            under the root of their norm counts.
        ids_seed: of the token ids that tests feed.
    """

    spec: CheckpointSpec
    text: Mapping[str, Any] = field(default_factory=dict)
    linear: Mapping[str, Any] = field(default_factory=dict)
    key_scale: float = 1.0
    ids_seed: int = 0

    def ids(self, count: int) -> list[int]:
        """So many token ids."""
        return np.random.default_rng(self.ids_seed).integers(0, self.spec.vocab, count).tolist()


_K3 = replace(K3, vision=False, assets=False, vocab=101, layers=4, attention="kkm", experts=6, per_token=2)
_LINEAR = replace(LINEAR, assets=False, vocab=101, layers=4, attention="kkm", experts=6, per_token=2)
_NO_KDA = {"linear_attn_config": None}
_NO_MLA = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))

SHAPES: dict[str, Shape] = {
    "k3": Shape(replace(_K3, seed=100)),
    "k3-odd-widths": Shape(
        replace(
            _K3,
            seed=101,
            hidden=71,
            dense_width=97,
            heads=3,
            q_lora=19,
            kv_lora=13,
            nope=13,
            rope=7,
            value=9,
            kda_heads=5,
            kda_dim=11,
            conv=3,
            moe_width=45,
            latent=33,
            shared=1,
            residual_blocks=3,
            layers=5,
            attention="kmk",
        )
    ),
    "k3-all-kda": Shape(
        replace(_K3, seed=102, attention="k", residual_blocks=1, shared=0, conv=2, kda_heads=6, kda_dim=10),
        text=_NO_MLA,
        linear={"gate_lower_bound": None},
    ),
    "k3-all-mla": Shape(replace(_K3, seed=103, attention="m", heads=4, value=24), text=_NO_KDA),
    "k3-no-shared-key-part": Shape(
        replace(_K3, seed=104, rope=0, attention="km", full_rank_gate=False, mla_gate=False),
        linear={"gate_lower_bound": -3.5},
    ),
    "k3-no-latent": Shape(
        replace(_K3, seed=105, latent=None, latent_norm=False, expert_dtype="F16", shared=1),
        text={"activation_situ_linear_beta": None, "activation_situ_beta": 1.5},
    ),
    "k3-latent-without-norm": Shape(
        replace(_K3, seed=116, latent_norm=False, expert_dtype="BF16", experts=9, per_token=4),
        text={
            "moe_router_activation_func": "softmax",
            "moe_renormalize": False,
            "routed_scaling_factor": 2.5,
            "activation_situ_linear_beta": 2.0,
        },
    ),
    "k3-groups": Shape(
        replace(_K3, seed=107, experts=12, per_token=3),
        text={"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 1.8},
    ),
    "k3-every-second-layer": Shape(
        replace(
            _K3,
            seed=108,
            layers=7,
            first_dense=2,
            moe_frequency=2,
            expert_dtype="F32",
            state_dtype="F32",
            tied=True,
            q_lora=None,
        ),
    ),
    "k3-no-dense-layer": Shape(replace(_K3, seed=109, first_dense=0, residual_blocks=1, attention="mk")),
    "k3-pre-norm": Shape(
        replace(_K3, seed=110, residual_blocks=None, per_token=1, decay_form="heads"), text={"hidden_act": "silu"}
    ),
    "k3-all-experts": Shape(replace(_K3, seed=111, experts=5, per_token=5, residual_blocks=9)),
    "k3-many-heads": Shape(
        replace(_K3, seed=112, kda_heads=20, kda_dim=8, heads=1, layers=3, decay_form="padded", conv=5),
        text={"rms_norm_eps": 1e-2},
    ),
    "k3-one-of-each": Shape(
        replace(
            _K3, seed=114, kda_heads=1, heads=1, experts=1, per_token=1, shared=1, attention="km", residual_blocks=2
        )
    ),
    "k3-no-experts": Shape(
        replace(_K3, seed=113, experts=0, first_dense=9),
        text=dict.fromkeys(("num_experts", "num_experts_per_token", "moe_intermediate_size", "quantization_config")),
    ),
    "linear": Shape(replace(_LINEAR, seed=120), text={"routed_scaling_factor": 2.446}),
    "linear-odd-widths": Shape(
        replace(
            _LINEAR,
            seed=121,
            hidden=53,
            dense_width=77,
            heads=5,
            kv_lora=17,
            nope=6,
            rope=3,
            value=11,
            kda_heads=3,
            kda_dim=13,
            conv=5,
            moe_width=29,
            experts=7,
            per_token=3,
            layers=5,
        )
    ),
    "linear-groups": Shape(
        replace(_LINEAR, seed=122, experts=12, per_token=4, shared=2),
        text={"num_expert_group": 6, "topk_group": 3, "moe_renormalize": False},
    ),
    "linear-bounded-decay": Shape(
        replace(_LINEAR, seed=123, attention="k", conv=3),
        text=_NO_MLA,
        linear={"gate_lower_bound": -2.0},
        key_scale=0.002,
    ),
    "linear-all-mla": Shape(
        replace(_LINEAR, seed=124, attention="m", shared=0, rope=0), text={**_NO_KDA, "rms_norm_eps": 1e-2}
    ),
    "linear-softmax": Shape(
        replace(_LINEAR, seed=125, conv=2, expert_dtype="F32", first_dense=2),
        text={"moe_router_activation_func": "softmax", "routed_scaling_factor": 0.7},
    ),
    "linear-attention-residuals": Shape(
        replace(_LINEAR, seed=137, residual_blocks=2, expert_dtype="MXFP4", q_lora=20, mla_gate=True)
    ),
    "linear-latent": Shape(
        replace(_LINEAR, seed=127, latent=24, latent_norm=True, full_rank_gate=True, tied=True),
        text={"hidden_act": "situ", "activation_situ_beta": 3.0},
        linear={"gate_lower_bound": None},
    ),
    "linear-frequency": Shape(
        replace(
            _LINEAR,
            seed=128,
            layers=6,
            first_dense=0,
            moe_frequency=2,
            experts=8,
            per_token=3,
            expert_dtype="F16",
            conv=1,
        )
    ),
}


def write_model(directory: Path, shape: Shape) -> Path:
    """Write the checkpoint into ``directory`` (made if absent) and return it."""
    spec = shape.spec
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", _config(shape))
    tensors = make_tensors(spec)
    rng = np.random.default_rng([spec.seed, 1])
    bounded = _linear(shape).get("gate_lower_bound") is not None
    softmax = shape.text.get("moe_router_activation_func") == "softmax"
    for name, tensor in tensors.items():
        if name.endswith("dt_bias"):
            # Softplus of it, the step of the decay, is from 0.002 to 1.3: some channels forget within a token, others
            # remember the whole text.
            values = rng.uniform(-6, 1, tensor.shape)
        elif name.endswith("A_log"):
            rates = np.zeros(np.prod(tensor.shape, dtype=int))
            rates[: spec.kda_heads] = np.log(rng.uniform(0.3, 1.5 if bounded else 8, spec.kda_heads))
            values = rates.reshape(tensor.shape)
        elif name.endswith("e_score_correction_bias"):
            values = (0.3 / spec.experts if softmax else 0.1) * rng.standard_normal(tensor.shape)
        elif name.endswith(("q_conv1d.weight", "k_conv1d.weight")) and shape.key_scale != 1:
            values = shape.key_scale * rng.standard_normal(tensor.shape)
        else:
            continue
        tensors[name] = store(values.astype(np.float32), "F32")
    if spec.shards == 1:
        write_safetensors(directory / "model.safetensors", tensors)
    else:
        write_shards(directory, tensors, spec.shards)
    return directory


def _linear(shape: Shape) -> dict[str, Any]:
    spec = make_config(shape.spec)
    text = spec.get("text_config", spec)
    return _changed(text["linear_attn_config"], shape.linear)


def _config(shape: Shape) -> dict[str, Any]:
    config = make_config(shape.spec)
    text = config.get("text_config", config)
    text = _changed(text | {"linear_attn_config": _linear(shape)}, shape.text)
    return config | {"text_config": text} if "text_config" in config else text


def _changed(members: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**members, **changes}
    return {name: value for name, value in merged.items() if name not in changes or value is not None}
