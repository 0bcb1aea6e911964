"""Names to roles and back, for everything that the configurations can express."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from formats.checkpoint import open_checkpoint
from formats.errors import FormatError, UsageError
from formats.families import MATRICES, TRUNK_KINDS, Model, Role, bind, check_decay
from formats.families.fields import Fields
from formats.families.kimi_config import Arithmetic, read_text_config
from tests.support.checkpoints import K3, LINEAR, SPECS, CheckpointSpec, make_tensors, write_checkpoint
from tests.support.shards import Tensor, write_json, write_shards

DATA = Path(__file__).parents[1] / "data"
RELEASES = ("k3-tiny", "k3-small", "kimi-linear-tiny")


def bound(directory: Path, spec: CheckpointSpec, extra: dict[str, Tensor] | None = None) -> Model:
    write_checkpoint(directory, spec)
    if extra:
        write_shards(directory, make_tensors(spec) | extra, max(2, spec.shards))
    return bind(open_checkpoint(directory))


def unpack_k3(directory: Path) -> Path:
    source = DATA / "k3-metadata"
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    packed = (source / "model.safetensors.index.json.gz").read_bytes()
    (directory / "model.safetensors.index.json").write_bytes(gzip.decompress(packed))
    return directory


# --- the releases -----------------------------------------------------------------------------------------------


def test_k3_at_full_size_binds_from_metadata_alone(tmp_path: Path) -> None:
    """The figures are those of the released index; memory is bounded by the names, not by the weights."""
    unpack_k3(tmp_path)
    program = (
        "import json, resource, sys\n"
        "from formats.checkpoint import open_checkpoint\n"
        "from formats.families import bind\n"
        "checkpoint = open_checkpoint(sys.argv[1], need_headers=False)\n"
        "model = bind(checkpoint)\n"
        "a = model.architecture\n"
        "print(json.dumps({'source': model.source_bytes, 'total': checkpoint.total_size,\n"
        "    'tensors': model.tensor_count,\n"
        "    'experts': model.expert_count, 'expert': model.expert_bytes_in_source, 'trunk': len(model.trunk),\n"
        "    'sum': model.trunk_bytes_in_source + model.expert_count * model.expert_bytes_in_source,\n"
        "    'shapes': a.expert_shapes, 'moe': len(a.moe_layers), 'layers': a.hidden_layers, 'family': a.family,\n"
        "    'mla': [n for n, kind in enumerate(a.attention) if kind == 'mla'],\n"
        "    'unknown': [t.name for t in model.trunk if t.role.kind == 'unknown'],\n"
        "    'rss': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))\n"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(run.stdout)
    assert found["total"] == found["source"] == found["sum"] == 1_560_860_324_864
    assert (found["tensors"], found["experts"], found["expert"]) == (497_220, 82_432, 17_547_264)
    assert found["shapes"] == [[3072, 3584], [3072, 3584], [3584, 3072]]
    assert (found["layers"], found["moe"], found["family"], found["unknown"]) == (93, 92, "kimi_k3", [])
    assert found["trunk"] == 497_220 - 6 * 82_432
    assert found["mla"] == [*range(3, 92, 4), 92]  # 4, 8, ..., 92 and 93, counted from one
    assert found["rss"] < 700 * 1024 * (1024 if sys.platform == "darwin" else 1)


@pytest.mark.parametrize("name", RELEASES)
def test_metadata_alone_gives_the_same_sizes_as_the_headers(name: str, tmp_path: Path) -> None:
    """These ship BF16 convolutions where full K3 has F32; the index's total size tells them apart."""
    for file in ("config.json", "model.safetensors.index.json"):
        (tmp_path / file).write_bytes((DATA / name / file).read_bytes())
    with_headers = bind(open_checkpoint(DATA / name))
    without = bind(open_checkpoint(tmp_path, need_headers=False))
    assert without.architecture == with_headers.architecture
    assert without.trunk == with_headers.trunk
    assert without.expert_tensors == with_headers.expert_tensors
    assert without.source_bytes == with_headers.source_bytes


@pytest.mark.parametrize("name", RELEASES)
def test_every_released_tensor_has_a_known_role(name: str) -> None:
    checkpoint = open_checkpoint(DATA / name)
    model = bind(checkpoint)
    assert sorted(model.names()) == sorted(checkpoint.tensors)
    assert {tensor.role.kind for tensor in model.trunk} <= set(TRUNK_KINDS) - {"unknown"}
    assert model.source_bytes == checkpoint.total_size
    assert model.tensor_count == len(checkpoint.tensors)


def test_architecture_of_the_tiny_release() -> None:
    found = bind(open_checkpoint(DATA / "k3-tiny")).architecture
    assert (found.family, found.hidden_layers, found.moe_layers) == ("kimi_k3", 7, (1, 2, 3, 4, 5, 6))
    assert (found.experts, found.experts_per_token, found.hidden_size, found.latent_size) == (16, 4, 128, 64)
    assert found.expert_shapes == ((96, 64), (96, 64), (64, 96))  # SHP-04: in the latent, not in hidden_size
    assert (found.expert_format, found.expert_dtype, found.group_size) == ("mxfp4", "U8", 32)
    assert found.attention == ("kda", "kda", "kda", "mla", "kda", "kda", "mla")
    assert (found.vocab_size, found.decay_heads) == (512, 4)


RELEASED_ARITHMETIC = {
    "k3-tiny": Arithmetic("situ", 4.0, 25.0, 1e-5, "sigmoid", True, 1.0, True, 1, 1, -5.0),
    "k3-small": Arithmetic("situ", 4.0, 25.0, 1e-5, "sigmoid", True, 1.0, True, 1, 1, -5.0),
    "k3-metadata": Arithmetic("situ", 4.0, 25.0, 1e-5, "sigmoid", True, 1.0, True, 1, 1, -5.0),
    "kimi-linear-tiny": Arithmetic("silu", None, None, 1e-5, "sigmoid", True, 2.446, True, 1, 1, None),
}


@pytest.mark.parametrize("name", list(RELEASED_ARITHMETIC))
def test_arithmetic_of_the_releases(name: str) -> None:
    config = json.loads((DATA / name / "config.json").read_text())
    text = Fields(config.get("text_config", config), "config.json")
    assert read_text_config(text).arithmetic == RELEASED_ARITHMETIC[name]


# --- roles ------------------------------------------------------------------------------------------------------

K3_ROLES = {
    "language_model.model.embed_tokens.weight": "embedding",
    "language_model.lm_head.weight": "head",
    "language_model.model.norm.weight": "norm",
    "language_model.model.output_attn_res_norm.weight": "residual",
    "language_model.model.output_attn_res_proj.weight": "residual",
    "language_model.model.layers.1.self_attention_res_norm.weight": "residual",
    "language_model.model.layers.1.mlp_res_proj.weight": "residual",
    "language_model.model.layers.1.input_layernorm.weight": "norm",
    "language_model.model.layers.1.self_attn.q_proj.weight": "attention",
    "language_model.model.layers.1.self_attn.g_proj.weight": "attention",
    "language_model.model.layers.1.self_attn.k_conv1d.weight": "conv",
    "language_model.model.layers.1.self_attn.f_a_proj.weight": "attention_gate",
    "language_model.model.layers.1.self_attn.b_proj.weight": "attention_gate",
    "language_model.model.layers.1.self_attn.A_log": "decay",
    "language_model.model.layers.1.self_attn.dt_bias": "decay",
    "language_model.model.layers.1.self_attn.o_norm.weight": "norm",
    "language_model.model.layers.2.self_attn.q_a_proj.weight": "attention",
    "language_model.model.layers.2.self_attn.q_a_layernorm.weight": "norm",
    "language_model.model.layers.2.self_attn.kv_b_proj.weight": "attention",
    "language_model.model.layers.0.mlp.up_proj.weight": "dense_mlp",
    "language_model.model.layers.1.block_sparse_moe.gate.weight": "router",
    "language_model.model.layers.1.block_sparse_moe.gate.e_score_correction_bias": "router_bias",
    "language_model.model.layers.1.block_sparse_moe.routed_expert_down_proj.weight": "latent",
    "language_model.model.layers.1.block_sparse_moe.routed_expert_norm.weight": "norm",
    "language_model.model.layers.1.block_sparse_moe.shared_experts.gate_proj.weight": "shared_expert",
    "vision_tower.encoder.blocks.0.wqkv.weight": "vision",
    "mm_projector.proj.0.weight": "projector",
}


def test_roles_of_k3(tmp_path: Path) -> None:
    model = bound(tmp_path, K3)
    for name, kind in K3_ROLES.items():
        role = model.role(name)
        assert role is not None
        assert role.kind == kind
        layer = name.partition("layers.")[2].partition(".")[0]
        assert role.layer == (int(layer) if layer else None)


@pytest.mark.parametrize("name", list(SPECS))
def test_names_to_roles_and_back(name: str, tmp_path: Path) -> None:
    model = bound(tmp_path, SPECS[name])
    roles = {source: model.role(source) for source in model.names()}
    assert None not in roles.values()
    assert len(set(roles.values())) == len(roles) == len(make_tensors(SPECS[name]))
    assert {source: model.name_of(role) for source, role in roles.items() if role} == {
        source: source for source in roles
    }
    assert not [tensor.name for tensor in model.trunk if tensor.role.kind == "unknown"]


def test_expert_roles_and_names(tmp_path: Path) -> None:
    model = bound(tmp_path, K3)
    base = "language_model.model.layers.2.block_sparse_moe.experts.3."
    assert model.expert_names(2, 3) == {
        "gate": (base + "w1.weight_packed", base + "w1.weight_scale"),
        "up": (base + "w3.weight_packed", base + "w3.weight_scale"),
        "down": (base + "w2.weight_packed", base + "w2.weight_scale"),
    }
    assert model.role(base + "w2.weight_scale") == Role("expert", 2, 3, "down", "scale")
    assert model.name_of(Role("expert", 2, 3, "gate", "packed")) == base + "w1.weight_packed"
    strange = (
        base + "w4.weight_packed",
        base.replace("experts.3", "experts.03") + "w1.weight_packed",
        base.replace("experts.3", "experts.4") + "w1.weight_packed",
        base.replace("layers.2", "layers.0") + "w1.weight_packed",
        "x" + base + "w1.weight_packed",
        base.replace(".3.", ".٣.") + "w1.weight_packed",
    )
    assert [model.role(name) for name in strange] == [None] * len(strange)
    for role in (Role("expert", 0, 0, "gate", "packed"), Role("expert", 1, 4, "gate", "packed"), Role("norm", 99)):
        assert model.name_of(role) is None
    for layer, expert in ((0, 0), (4, 0), (1, 4), (1, -1)):
        with pytest.raises(UsageError, match="no such expert"):
            model.expert_names(layer, expert)


def test_dense_expert_names(tmp_path: Path) -> None:
    model = bound(tmp_path, LINEAR)
    assert model.expert_templates["up"] == ("model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",)
    assert model.role("model.layers.1.block_sparse_moe.experts.0.w3.weight") == Role("expert", 1, 0, "up", "weight")


def test_trunk_stands_in_the_order_of_the_forward_pass(tmp_path: Path) -> None:
    extra = {f"zz.{n}": Tensor("U8", (1,), b"x") for n in (10, 9)}
    model = bound(tmp_path, replace(K3, layers=12), extra)
    kinds = [tensor.role.kind for tensor in model.trunk]
    layers = [tensor.role.layer for tensor in model.trunk if tensor.role.layer is not None]
    assert kinds[0] == "embedding"
    assert layers == sorted(layers)
    assert set(layers) == set(range(12))
    tail = [tensor.name for tensor in model.trunk if tensor.role.layer is None][1:]
    assert tail[:4] == [
        "language_model.model.output_attn_res_norm.weight",
        "language_model.model.output_attn_res_proj.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ]
    assert tail[4].startswith("vision_tower.patch_embed")
    assert tail[-5:] == [
        "mm_projector.proj.0.weight", "mm_projector.proj.2.weight", "mm_projector.post_norm.weight", "zz.9", "zz.10",
    ]  # fmt: skip


def test_a_name_that_nobody_knows_is_unknown_not_refused(tmp_path: Path) -> None:
    extra = {
        "language_model.model.layers.1.self_attn.extra.weight": Tensor("BF16", (2, 2), bytes(8)),
        "language_model.model.layers.4.enorm.weight": Tensor("I8", (2,), bytes(2)),
        "language_model.model.layers.4.block_sparse_moe.experts.0.w1.weight_packed": Tensor("U8", (2,), bytes(2)),
        "rotary.inv_freq": Tensor("F32", (), bytes(4)),
    }
    model = bound(tmp_path, K3, extra)
    assert {tensor.name for tensor in model.trunk if tensor.role.kind == "unknown"} == extra.keys()
    assert model.tensor_count == len(make_tensors(K3)) + len(extra)


def test_any_vision_names_are_taken_with_headers(tmp_path: Path) -> None:
    extra = {
        "vision_tower.new.thing": Tensor("F16", (3,), bytes(6)),
        "mm_projector.bias": Tensor("BF16", (), bytes(2)),
    }
    model = bound(tmp_path, K3, extra)
    assert model.role("vision_tower.new.thing") == Role("vision", part="vision_tower.new.thing")
    assert model.role("mm_projector.bias") == Role("projector", part="mm_projector.bias")


# --- what a configuration can express ---------------------------------------------------------------------------

VARIATIONS = {
    "no q_lora": {"q_lora": None},
    "low-rank gate": {"full_rank_gate": False},
    "no output gate": {"mla_gate": False},
    "no residual blocks": {"residual_blocks": None},
    "no latent": {"latent": None, "latent_norm": False},
    "latent without norm": {"latent_norm": False},
    "no shared experts": {"shared": 0},
    "null shared experts": {"shared": None},
    "three shared experts": {"shared": 3},
    "every second layer": {"moe_frequency": 2},
    "every third layer": {"moe_frequency": 3, "layers": 7},
    "no dense layers": {"first_dense": 0},
    "two dense layers": {"first_dense": 2},
    "tied": {"tied": True},
    "dense bf16": {"expert_dtype": "BF16"},
    "dense f16": {"expert_dtype": "F16"},
    "dense f32": {"expert_dtype": "F32"},
    "no vision": {"vision": False},
    "A_log by heads": {"decay_form": "heads"},
    "A_log padded": {"decay_form": "padded"},
    "A_log in four dimensions": {"decay_form": "4d"},
    "only kda": {"attention": "k"},
    "only mla": {"attention": "m"},
    "float32 states": {"state_dtype": "F32"},
    "one expert": {"experts": 1, "per_token": 1},
    "more heads than head_dim": {"kda_heads": 20, "kda_dim": 4},
    "no rope part": {"rope": 0},
}


@pytest.mark.parametrize("family", ["kimi_k3", "kimi_linear"])
@pytest.mark.parametrize("variation", list(VARIATIONS))
def test_variations_of_the_configuration(family: str, variation: str, tmp_path: Path) -> None:
    spec = replace(K3 if family == "kimi_k3" else LINEAR, **VARIATIONS[variation])  # type: ignore[arg-type]
    model = bound(tmp_path, spec)
    assert sorted(model.names()) == sorted(make_tensors(spec))
    assert not [tensor.name for tensor in model.trunk if tensor.role.kind == "unknown"]
    assert model.architecture.moe_layers == spec.moe_layers
    assert model.architecture.expert_shapes == tuple(spec.expert_shapes.values())
    assert model.source_bytes == sum(len(tensor.data) for tensor in make_tensors(spec).values())
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    without = bind(open_checkpoint(tmp_path, need_headers=False))
    assert sorted(without.names()) == sorted(make_tensors(spec))


def test_all_layers_dense(tmp_path: Path) -> None:
    model = bound(tmp_path, replace(K3, first_dense=4))
    assert (model.architecture.moe_layers, model.expert_count) == ((), 0)
    assert sorted(model.names()) == sorted(make_tensors(replace(K3, first_dense=4)))


def test_tied_embeddings_may_still_ship_a_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(K3, tied=True))
    write_shards(tmp_path, make_tensors(K3), 3)
    model = bind(open_checkpoint(tmp_path))
    assert model.role("language_model.lm_head.weight") == Role("head", part="lm_head.weight")


@pytest.mark.parametrize("hidden", [1, 7, 33, 65])
@pytest.mark.parametrize("width", [1, 31, 34])
def test_odd_widths(hidden: int, width: int, tmp_path: Path) -> None:
    spec = replace(
        K3, hidden=hidden, moe_width=width, latent=None, latent_norm=False, layers=2, vision=False, assets=False
    )
    model = bound(tmp_path, spec)
    for matrix, (rows, cols) in spec.expert_shapes.items():
        packed, scale = model.expert_tensors[matrix]
        assert packed.shape == (rows, (cols + 1) // 2)
        assert scale.shape == (rows, (cols + 31) // 32)


def test_aliases_are_read_everywhere_or_contradict(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, K3)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config["text_config"]
    text["n_routed_experts"] = text.pop("num_experts")
    text["num_experts_per_tok"] = text.pop("num_experts_per_token")
    text["n_shared_experts"] = text.pop("num_shared_experts")
    write_json(tmp_path / "config.json", config)
    model = bind(open_checkpoint(tmp_path))
    assert (model.architecture.experts, model.architecture.experts_per_token) == (4, 2)
    text["num_experts"] = 8
    write_json(tmp_path / "config.json", config)
    with pytest.raises(FormatError, match=r"num_experts and its alias n_routed_experts disagree .*expected 8, found 4"):
        bind(open_checkpoint(tmp_path))


# --- decay ------------------------------------------------------------------------------------------------------


def test_shp_05_decay_of_the_first_heads() -> None:
    values = np.zeros(32, np.float32)
    values[:4] = 1, 2, 3, 4
    assert check_decay("A_log", values, 4, "shard").tolist() == [1, 2, 3, 4]
    assert check_decay("A_log", values[:4].reshape(1, 1, 4, 1), 4, "shard").tolist() == [1, 2, 3, 4]
    values[9] = -0.0
    check_decay("A_log", values, 4, "shard")
    values[10] = 0.5
    with pytest.raises(FormatError, match=r"shard: A_log: A_log is not zero past its 4 heads: entry 10 .*found 0.5"):
        check_decay("A_log", values, 4, "shard")
    with pytest.raises(FormatError, match="fewer entries than heads"):
        check_decay("A_log", values[:3], 4, "shard")


def test_matrices_are_in_the_order_of_a_record() -> None:
    assert MATRICES == ("gate", "up", "down")
