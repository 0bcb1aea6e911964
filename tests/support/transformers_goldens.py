"""How the goldens ``tests/data/transformers-*`` were made: by the Kimi-Linear of the library ``transformers``.

An implementation that shares no line with the released modelling code, run in float32 on the CPU on two models whose
shapes the other goldens do not have. No test imports this; it needs torch and transformers (5.24 was used), and the
packages of the tests:

    python -m tests.support.transformers_goldens OUT

writes both checkpoints with their ``golden.safetensors``, laid out as the README beside them says.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers.models.kimi_linear import KimiLinearForCausalLM

from tests.support.model_checkpoints import Shape, write_model
from tests.support.specs import LINEAR

PROMPT, CONTINUATION = 24, 12
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE = replace(LINEAR, assets=False, shards=1, vocab=96, hidden=40, dense_width=56, layers=4, kv_lora=12)
MODELS = {
    "transformers-groups": Shape(
        replace(
            _BASE,
            seed=200,
            attention="kmkm",
            heads=3,
            q_lora=20,
            nope=10,
            rope=6,
            value=14,
            kda_heads=2,
            kda_dim=12,
            conv=3,
            experts=12,
            per_token=4,
            shared=2,
            moe_width=16,
        ),
        text=_IDS | {"num_expert_group": 4, "topk_group": 2, "routed_scaling_factor": 2.446},
    ),
    "transformers-unnormalised": Shape(
        replace(
            _BASE,
            seed=201,
            attention="kkm",
            heads=2,
            nope=8,
            rope=3,
            value=5,
            kda_heads=5,
            kda_dim=7,
            conv=5,
            experts=7,
            per_token=3,
            moe_width=20,
            first_dense=0,
        ),
        text=_IDS | {"moe_renormalize": False, "rms_norm_eps": 1e-3},
    ),
}


def make_golden(directory: Path, ids: list[int]) -> dict[str, np.ndarray]:
    """Logits, layer outputs and routes of ``ids``, and a greedy continuation with the cache."""
    model, loading = KimiLinearForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(loading.values()), loading  # every tensor was found and used
    model.eval()
    golden = {"input_ids": np.array([ids], np.int32)}
    hooks = [layer.register_forward_hook(_keep(golden, number)) for number, layer in enumerate(model.model.layers)]
    hooks += [
        layer.mlp.gate.register_forward_hook(_keep_routes(golden, number))
        for number, layer in enumerate(model.model.layers)
        if hasattr(layer.mlp, "gate")
    ]
    with torch.no_grad():
        golden["logits"] = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
        for hook in hooks:
            hook.remove()
        output, tokens, logits = model(torch.tensor([ids]), use_cache=True), [], []
        for _ in range(CONTINUATION):
            tokens.append(int(output.logits[0, -1].argmax()))
            output = model(torch.tensor([tokens[-1:]]), cache=output.cache, use_cache=True)
            logits.append(output.logits[0, -1].numpy())
    golden["greedy_tokens"], golden["greedy_logits"] = np.array(tokens, np.int32), np.stack(logits)
    return golden


def _keep(golden: dict[str, np.ndarray], layer: int) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        golden[f"layer.{layer}.output"] = output[0].numpy().copy()

    return hook


def _keep_routes(golden: dict[str, np.ndarray], layer: int) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        _, weights, chosen = (tensor.numpy() for tensor in output)
        order = np.argsort(chosen, axis=1)
        golden[f"layer.{layer}.topk_idx"] = np.take_along_axis(chosen, order, 1).astype(np.int32)
        golden[f"layer.{layer}.topk_weight"] = np.take_along_axis(weights, order, 1)

    return hook


def main(out: Path) -> None:
    """Write everything into the folder ``out``."""
    for name, shape in MODELS.items():
        directory = write_model(out / name, shape)
        save_file(make_golden(directory, shape.ids(PROMPT)), directory / "golden.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
