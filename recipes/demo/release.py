"""A model in the released layout: writing ``checkpoint/``, and reading any such checkpoint back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from formats.families.kimi import text_tensors
from formats.families.kimi_k3 import RELEASE
from recipes.demo import bpe, mxfp4, shape
from recipes.demo.layers import Experts
from recipes.demo.model import Model, load

_INDEX = "model.safetensors.index.json"
_SHARD_BYTES = 10_000_000
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


def write(model: Model, tokenizer: bpe.Tokenizer, folder: Path) -> None:
    """Write configuration, shards, index and tokenizer. Not a bit of a weight is changed.

    Args:
        model: in bfloat16, its experts rounded to MXFP4.
        tokenizer: of the text that the model was trained on.
        folder: made if absent.

    Raises:
        ValueError: a weight would be changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", shape.CONFIG)
    _write_json(folder / "generation_config.json", {"bos_token_id": bpe.BOS, "eos_token_id": bpe.EOS})
    tokenizer.write(folder / "tiktoken.model")
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    shards, sizes = [dict[str, Tensor]()], [0]
    for name, tensor in _tensors(model):
        if sizes[-1] + tensor.nbytes > _SHARD_BYTES:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.nbytes
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, tensors in zip(names, shards, strict=True):
        save_file(tensors, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, tensors in zip(names, shards, strict=True) for name in tensors}
    _write_json(folder / _INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map})


def _tensors(model: Model) -> Iterator[tuple[str, Tensor]]:
    state = model.state_dict()
    experts = {
        index: module
        for index, layer in enumerate(model.model.layers)
        for module in layer.modules()
        if isinstance(module, Experts)
    }
    for expected in text_tensors(model.config, RELEASE):
        source = state[expected.name.removeprefix(RELEASE.prefix)]
        if expected.name.endswith("A_log"):
            source = torch.nn.functional.pad(source, (0, expected.shape[0] - len(source)))
        stored = source.to(_DTYPES[expected.dtype]).reshape(expected.shape).contiguous()
        if not torch.equal(stored.float(), source.float().view(expected.shape)):
            raise ValueError(f"{expected.name} is not exact in {expected.dtype}")
        yield expected.name, stored
        layer = expected.role.layer
        if layer in experts and expected.name.endswith("routed_expert_up_proj.weight"):
            yield from _expert_tensors(
                experts[layer], f"{RELEASE.prefix}model.layers.{layer}.block_sparse_moe.experts."
            )


def _expert_tensors(module: Experts, prefix: str) -> Iterator[tuple[str, Tensor]]:
    for number, (gate_up, down) in enumerate(zip(module.gate_up, module.down, strict=True)):
        gate, up = gate_up.chunk(2)
        for name, weights in (("w1", gate), ("w3", up), ("w2", down)):
            packed, exponents = mxfp4.pack(weights.detach().float())
            yield f"{prefix}{number}.{name}.weight_packed", packed
            yield f"{prefix}{number}.{name}.weight_scale", exponents


def read(folder: Path) -> Model:
    """The model of a checkpoint in the released layout, in float32, for evaluation.

    Args:
        folder: with ``config.json``, an index and shards.
    """
    config = shape.text_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
    tensors = dict[str, Tensor]()
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, "pt") as shard:
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 - it is no mapping

    def read_tensor(name: str) -> Tensor:
        return tensors[RELEASE.prefix + name]

    def read_expert(layer: int, expert: int, matrix: str) -> Tensor:
        base = f"{RELEASE.prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}.{matrix}.weight_"
        return mxfp4.unpack(tensors[base + "packed"], tensors[base + "scale"])

    model = Model(config, torch.float32)
    load(model, read_tensor, read_expert)
    return model.eval()


def _tokenizer_config() -> dict[str, Any]:
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {
            str(token): {"content": bpe.SPECIAL_NAMES.get(token, f"<|reserved_token_{token}|>"), **special}
            for token in range(bpe.RANKS, bpe.RANKS + bpe.SPECIALS)
        },
        "add_bos_token": True,  # every text of the training began with it
        "bos_token": bpe.SPECIAL_NAMES[bpe.BOS],
        "eos_token": bpe.SPECIAL_NAMES[bpe.EOS],
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "tokenizer_class": "TikTokenTokenizer",
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
