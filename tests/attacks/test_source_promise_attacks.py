"""Configurations and tensors that contradict each other, each with the verdict it must get."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import MoepackError
from formats.families import bind
from tests.attacks.alter import check_refused, configured, document
from tests.support.checkpoints import K3, LINEAR, CheckpointSpec, make_tensors, write_checkpoint
from tests.support.shards import INDEX_NAME, Tensor, write_json, write_shards
from tests.support.spoil import SHARD, TEXT, Attack, file, verdict


def text_config(**members: Any) -> Attack:
    return configured("text_config", **members)


def quantization(change: Callable[[dict[str, Any]], Any]) -> Attack:
    return document("config.json", lambda config: change(config["text_config"]["quantization_config"]))


def weights(**members: Any) -> Attack:
    return configured("text_config.quantization_config.config_groups.group_0.weights", **members)


def ignoring(*patterns: str) -> Attack:
    return quantization(lambda q: q["ignore"].extend(patterns))


def linear_config(**members: Any) -> Attack:
    return configured("text_config.linear_attn_config", **members)


def rewritten(change: Callable[[dict[str, Tensor]], Any], spec: CheckpointSpec = K3) -> Attack:
    """Other tensors under the same configuration, in sound shards."""

    def attack(directory: Path) -> None:
        tensors = make_tensors(spec)
        change(tensors)
        write_shards(directory, tensors, 3)

    return attack


def tensor(name: str, dtype: str, *shape: int, size: int = 1) -> Attack:
    count = size
    for side in shape:
        count *= side
    return rewritten(lambda t: t.__setitem__(name, Tensor(dtype, shape, bytes(count))))


def without_prefix(tensors: dict[str, Tensor]) -> None:
    for name in [n for n in tensors if n.startswith(TEXT + "layers.2.")]:
        tensors[name.removeprefix(TEXT)] = tensors.pop(name)


EXPERT = TEXT + "layers.1.block_sparse_moe.experts.3."

PROMISE_ATTACKS: dict[str, tuple[Attack, str]] = {
    "src-13 a layer without its prefix": (
        rewritten(without_prefix),
        rf"the configuration promises are missing .*expected {TEXT}layers.2.self_attention_res_norm.weight, .*, \.\.\.",
    ),
    "src-13 a norm is missing": (
        rewritten(lambda t: t.pop(TEXT + "norm.weight")),
        rf"1 tensors .* missing .*expected {TEXT}norm.weight,",
    ),
    "src-13 the head is missing": (rewritten(lambda t: t.pop("language_model.lm_head.weight")), "lm_head.weight"),
    "src-14 lists shifted down": (
        linear_config(kda_layers=[0, 1, 3], full_attn_layers=[2]),
        "kda_layers has an entry out of range .*found 0",
    ),
    "src-14 lists shifted up": (
        linear_config(kda_layers=[2, 3, 5], full_attn_layers=[4]),
        "kda_layers has an entry out of range .*found 5",
    ),
    "src-14 lists rotated": (
        linear_config(kda_layers=[2, 3, 1], full_attn_layers=[4]),
        r"layer 2 \(counted from zero\) is of another kind .*expected kda, .*found mla, says .*kv_a_proj_with_mqa",
    ),
    "src-14 a layer in both lists": (linear_config(full_attn_layers=[3, 4]), "layers named never or twice: 4"),
    "src-14 a layer in neither": (linear_config(kda_layers=[1, 2]), "layers named never or twice: 4"),
    "src-14 list of texts": (linear_config(kda_layers=["1", "2", "4"]), "kda_layers has an entry out of range"),
    "src-14 list of reals": (
        linear_config(kda_layers=[1.0, 2, 4]),
        r"kda_layers has an entry out of range .*found 1.0",
    ),
    "src-15 every second layer": (
        text_config(moe_layer_freq=2),
        r"layer 1 .*expected dense MLP, .*found MoE, says .*block_sparse_moe.gate.weight",
    ),
    "src-15 dense layers": (text_config(first_k_dense_replace=0), r"layer 0 .*expected MoE, .*found dense MLP"),
    "src-15 fewer experts": (
        text_config(num_experts=3),
        "an expert that the configuration does not have .*experts 0 to 2 .*experts.3",
    ),
    "src-15 more experts": (text_config(num_experts=5), "experts.4.w1.weight_packed"),
    "src-15 no experts": (text_config(num_experts=0), r"layer 1 .*expected dense MLP"),
    "src-15 experts without end": (
        text_config(num_experts=65536),
        "tensors that the configuration promises are missing",
    ),
    "src-15 layers without end": (
        lambda d: (
            text_config(num_hidden_layers=4096)(d),
            linear_config(kda_layers=list(range(1, 4097)), full_attn_layers=[])(d),
        ),
        "layer 2 .*another kind",
    ),
    "src-15 too many experts a token": (
        text_config(num_experts_per_token=5),
        "more experts a token than there are .*at most 4, found 5",
    ),
    "src-17 everything ignored": (
        ignoring("re:.*experts.*"),
        r"ignore pattern matches routed experts .*found 're:.*experts.*'",
    ),
    "src-17 ignored by class": (ignoring("Linear"), "ignore pattern matches routed experts"),
    "src-17 ignored by name": (
        ignoring(TEXT + "layers.1.block_sparse_moe.experts.0.w1"),
        "ignore pattern matches routed experts",
    ),
    "src-17 not targeted": (
        quantization(lambda q: q["config_groups"]["group_0"].__setitem__("targets", ["re:.*mlp.*"])),
        "no config group targets the packed experts",
    ),
    "src-17 pattern that takes for ever": (ignoring("re:(a+)+(a+)+$"), "cannot be evaluated safely"),
    "src-17 many repetitions": (ignoring("re:.*.*.*.*.*.*.*.*.*x"), "cannot be evaluated safely"),
    "src-17 many alternatives": (ignoring("re:" + "(l|la|lan|)" * 30 + "x"), "cannot be evaluated safely"),
    "dty-04 packed without a configuration": (
        text_config(quantization_config=...),
        "experts are stored in another form .*expected dense experts, found .*weight_packed",
    ),
    "dty-04 dense under a configuration": (
        rewritten(lambda t: t.update(make_tensors(CheckpointSpec(expert_dtype="BF16")))),
        "stored in another form .*expected mxfp4 experts, found .*w1.weight",
    ),
    "dty-05 real scale": (
        tensor(EXPERT + "w1.weight_scale", "BF16", 48, 1, size=2),
        rf"{re.escape(EXPERT)}w1.weight_scale: .*expected U8 \[48, 1\], found BF16",
    ),
    "dty-05 words of eight": (
        tensor(EXPERT + "w1.weight_packed", "I32", 48, 4, size=4),
        r"expected U8 \[48, 16\], found I32 \[48, 4\]",
    ),
    "dty-05 signed packed": (
        tensor(EXPERT + "w1.weight_packed", "I8", 48, 16),
        r"expected U8 \[48, 16\], found I8 \[48, 16\]",
    ),
    "dty-06 groups of sixteen": (
        tensor(EXPERT + "w2.weight_scale", "U8", 32, 3),
        r"expected U8 \[32, 2\], found U8 \[32, 3\]",
    ),
    "dty-06 group size 16 in the configuration": (
        weights(group_size=16),
        "group_size is not that of MXFP4 .*expected 32, found 16",
    ),
    "dty-06 group size true": (weights(num_bits=4.0), "num_bits is not that of MXFP4 .*found 4.0"),
    "dty-06 integers": (weights(type="int"), "type is not that of MXFP4 .*expected float, found 'int'"),
    "dty-06 zero points": (weights(symmetric=False), "no zero points"),
    "dty-06 another method": (
        quantization(lambda q: q.__setitem__("quant_method", "gptq")),
        "expected compressed-tensors, .*found gptq",
    ),
    "dty-06 another format": (
        quantization(lambda q: q.__setitem__("format", "pack-quantized")),
        "quantization method that this family is not read in",
    ),
    "dty-06 no groups": (quantization(lambda q: q.__setitem__("config_groups", {})), "config_groups is absent, empty"),
    "dty-08 FP8 without a scale": (
        tensor(TEXT + "layers.0.mlp.up_proj.weight", "F8_E4M3", 96, 64),
        "FP8 weight without a scale .*found F8_E4M3",
    ),
    "dty-08 FP8 with a scale": (
        rewritten(
            lambda t: t.update(
                {
                    TEXT + "layers.0.mlp.up_proj.weight": Tensor("F8_E4M3", (96, 64), bytes(96 * 64)),
                    TEXT + "layers.0.mlp.up_proj.weight_scale_inv": Tensor("F32", (1, 1), bytes(4)),
                }
            )
        ),
        "FP8 weight with a scale, which this family is not read with",
    ),
    "dty-08 FP8 with an unknown suffix": (
        rewritten(
            lambda t: t.update(
                {
                    "vision_tower.x.weight": Tensor("F8_E5M2", (2, 2), bytes(4)),
                    "vision_tower.x.weight_zoom": Tensor("F32", (1,), bytes(4)),
                }
            )
        ),
        "vision_tower.x.weight: FP8 weight without a scale",
    ),
    "dty-08 FP8 expert": (tensor(EXPERT + "w1.weight_packed", "F8_E4M3", 48, 16), "FP8 weight without a scale"),
    "dty-09 no scale": (
        rewritten(lambda t: t.pop(EXPERT + "w2.weight_scale")),
        rf"1 tensors .*expected {re.escape(EXPERT)}w2.weight_scale",
    ),
    "dty integer norm": (tensor(TEXT + "norm.weight", "I8", 64), "dtype that its role cannot have .*found I8"),
    "shp-04 another latent": (text_config(routed_expert_hidden_size=64), r"expected \[64, 64\], found \[32, 64\]"),
    "shp-04 no latent": (
        text_config(routed_expert_hidden_size=None),
        "says routed_expert_hidden_size, found .*layers.1.block_sparse_moe.routed_expert_down_proj.weight",
    ),
    "shp another hidden size": (
        text_config(hidden_size=128),
        r"embed_tokens.weight: .*expected \[160, 128\], found \[160, 64\]",
    ),
    "shp another rank": (text_config(kv_lora_rank=17), r"expected \[25, 64\], found \[24, 64\]"),
    "shp-05 A_log too short": (
        tensor(TEXT + "layers.0.self_attn.A_log", "F32", 1, size=4),
        r"A_log: .*expected \[16\], found \[1\]",
    ),
    "shp-05 A_log of another shape": (
        tensor(TEXT + "layers.0.self_attn.A_log", "F32", 2, 1, size=4),
        r"found \[2, 1\]",
    ),
    "shp-07 empty expert": (
        text_config(moe_intermediate_size=0),
        "moe_intermediate_size is not an integer in range .*found 0",
    ),
    "config hidden size true": (text_config(hidden_size=True), "hidden_size is not an integer in range .*found True"),
    "config hidden size real": (text_config(hidden_size=64.0), r"hidden_size is not an integer in range .*found 64.0"),
    "config hidden size text": (text_config(hidden_size="64"), "hidden_size is not an integer in range .*found '64'"),
    "config hidden size huge": (text_config(hidden_size=1 << 40), "hidden_size is not an integer in range"),
    "config hidden size absent": (text_config(hidden_size=...), "hidden_size is absent"),
    "config hidden size null": (text_config(hidden_size=None), "hidden_size is absent"),
    "config frequency zero": (text_config(moe_layer_freq=0), "moe_layer_freq is not an integer in range .*found 0"),
    "config flag as text": (text_config(mla_use_output_gate="true"), "mla_use_output_gate is not a boolean"),
    "config flag as number": (text_config(latent_moe_use_norm=1), "latent_moe_use_norm is not a boolean .*found 1"),
    "config strange dtype": (text_config(dtype="float8"), "dtype is none of dense weights .*found 'float8'"),
    "config lists are no object": (text_config(linear_attn_config=[]), "linear_attn_config is not an object"),
    "config no text": (file("config.json", '{"model_type": "kimi_k3"}'), "text_config is absent"),
    "config another family": (
        file("config.json", '{"model_type": "llama", "architectures": ["X"]}'),
        "model family is not known .*found model_type llama, architectures X",
    ),
    "config architectures is no list": (file("config.json", '{"architectures": 5}'), "architectures is not a list"),
    "config model type is no text": (file("config.json", '{"model_type": ["kimi_k3"]}'), "model_type is not a string"),
}


@pytest.mark.parametrize("case", list(PROMISE_ATTACKS))
def test_configuration_and_tensors_disagree(case: str, tmp_path: Path) -> None:
    check_refused(tmp_path, *PROMISE_ATTACKS[case])


def test_dense_expert_of_another_dtype(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LINEAR)
    name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    rewritten(lambda t: t.__setitem__(name, Tensor("I8", (48, 64), bytes(48 * 64))), LINEAR)(tmp_path)
    assert re.search(r"w1.weight: .*expected BF16 or F16 or F32, found I8", verdict(tmp_path))


def test_metadata_alone_cannot_guess_unknown_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    document(INDEX_NAME, lambda index: index["weight_map"].update({"language_model.extra": SHARD}))(tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    assert re.search("language_model.extra: shape of a tensor .* is unknown", verdict(tmp_path, need_headers=False))


def test_two_quantization_configs_must_agree(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = json.loads(json.dumps(config["text_config"]["quantization_config"]))
    write_json(tmp_path / "config.json", config)
    bind(open_checkpoint(tmp_path))
    config["quantization_config"]["ignore"] = []
    write_json(tmp_path / "config.json", config)
    assert "two different quantization_config objects" in verdict(tmp_path)


STRANGE: tuple[Any, ...] = (None, 0, -1, 1, 1.5, True, "x", "", [], [None], {}, {"a": []}, 1 << 24, (1 << 63) + 1)


@pytest.mark.parametrize(
    "place", ["", "text_config", "text_config.linear_attn_config", "vision_config", "quantization"]
)
def test_any_member_of_a_configuration_may_be_anything(place: str, tmp_path: Path) -> None:
    """Whatever stands in a configuration: bound, or refused with a reason, with and without headers."""
    write_checkpoint(tmp_path / "full", replace(K3, layers=3, experts=1, per_token=1, assets=False))
    (tmp_path / "bare").mkdir()
    for name in ("config.json", INDEX_NAME):
        (tmp_path / "bare" / name).write_bytes((tmp_path / "full" / name).read_bytes())
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    inner = config
    for step in {"quantization": "text_config.quantization_config.config_groups.group_0.weights"}.get(
        place, place
    ).split("."):
        inner = inner[step] if step else inner
    for member, value in list(inner.items()):
        for number, strange in enumerate(STRANGE):
            inner[member] = strange
            directory = tmp_path / ("full" if number % 2 else "bare")
            write_json(directory / "config.json", config)
            with contextlib.suppress(MoepackError):
                bind(open_checkpoint(directory, need_headers=False))
        inner[member] = value
