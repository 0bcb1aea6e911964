"""A pruned model is the full one whose dropped experts cannot be chosen; a router in another order is noticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.checkpoint import open_checkpoint
from formats.families import bind
from packer.model_stamp import stamp_of
from packer.pipeline import pack
from packer.planning.plan import make_plan
from packer.prune.plan import LayerKeep, PrunePlan
from packer.recipe.recipe import load_recipe
from runtime.session import Options, open_session

TESTS = Path(__file__).parents[1]
SOURCES = {
    "k3-tiny": TESTS / "data" / "k3-tiny",
    "kimi-linear-tiny": TESTS / "data" / "kimi-linear-tiny",
    "demo": TESTS.parent / "recipes" / "demo" / "checkpoint",
}
RECIPES = {"k3-tiny": "kimi-k3-lossless", "kimi-linear-tiny": "kimi-linear-lossless", "demo": "kimi-k3-lossless"}
NEVER = np.float32(-3e38)  # a correction bias that no score makes up for


def logits_of(model: Path, ids: list[int]) -> np.ndarray:
    with open_session(model, Options(context=64)) as session:
        return np.concatenate([logits for _, logits in session.stream(ids)])


def kept_by_layer(source: Path) -> dict[int, tuple[int, ...]]:
    """Nine experts, others in each layer."""
    rng = np.random.default_rng(3)
    with open_checkpoint(source) as checkpoint:
        architecture = bind(checkpoint).architecture
    return {
        layer: tuple(sorted(int(e) for e in rng.choice(architecture.experts, 9, replace=False)))
        for layer in architecture.moe_layers
    }


def pack_pruned(source: Path, recipe: str, kept: dict[int, tuple[int, ...]], out: Path) -> Path:
    with open_checkpoint(source) as checkpoint:
        model = bind(checkpoint)
        layers = tuple(LayerKeep(layer, experts) for layer, experts in sorted(kept.items()))
        plan = PrunePlan(stamp_of(checkpoint.config_bytes, model.architecture), None, layers)
        pack(checkpoint, model, make_plan(checkpoint, model, load_recipe(recipe), prune=plan), out, jobs=1)
    return out


def with_routers(source: Path, copy: Path, kind: str, change: Callable[[np.ndarray, int], np.ndarray]) -> Path:
    """A copy of a checkpoint whose routers' tensors of one kind are changed layer by layer, as stored."""
    shutil.copytree(source, copy)
    with open_checkpoint(copy) as checkpoint:
        bound = [tensor for tensor in bind(checkpoint).trunk if tensor.role.kind == kind]
        found = [(tensor.role.layer, checkpoint.tensors[tensor.name], checkpoint.read(tensor.name)) for tensor in bound]
    for layer, tensor, data in found:
        values = np.frombuffer(data, {"F32": "<f4", "BF16": "<u2"}[tensor.dtype]).reshape(tensor.shape).copy()
        with (copy / tensor.shard).open("r+b") as file:
            file.seek(tensor.offset)
            file.write(change(values, layer).tobytes())
    return copy


def ids_of(source: Path) -> list[int]:
    """The tokens of the golden tensors where there are any."""
    golden = source / "golden.safetensors"
    return load_file(golden)["input_ids"].reshape(-1).tolist() if golden.exists() else list(range(100, 1700, 50))


@pytest.mark.parametrize("name", SOURCES)
def test_logits_are_those_of_the_full_model_without_the_dropped_experts(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    ids = ids_of(source)
    kept = kept_by_layer(source)

    def forbid(bias: np.ndarray, layer: int) -> np.ndarray:
        dropped = [expert for expert in range(bias.size) if expert not in kept[layer]]
        bias[dropped] = NEVER
        return bias

    pruned = logits_of(pack_pruned(source, RECIPES[name], kept, tmp_path / "pruned"), ids)
    restricted = logits_of(with_routers(source, tmp_path / "restricted", "router_bias", forbid), ids)
    assert (pruned == restricted).all()
    assert not (pruned == logits_of(source, ids)).all()  # the dropped experts would have been chosen

    rotated = with_routers(source, tmp_path / "rotated", "router", lambda rows, layer: np.roll(rows, 1, axis=0))
    wrong = logits_of(pack_pruned(rotated, RECIPES[name], kept, tmp_path / "wrong"), ids)
    assert not np.allclose(wrong, restricted, atol=5e-4)
