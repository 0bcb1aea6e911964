"""The runtime against goldens: the released modelling code's, and those of an independent implementation.

The float64 pass that judges other shapes is held to the same goldens first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import reference_forward as reference
from tests.support.runs import TOLERANCE, Run, continuation, run

DATA = Path(__file__).parent.parent / "data"
MODELS = sorted(path.parent.name for path in DATA.glob("*/golden.safetensors"))
ROUTE_TOLERANCE = 1e-5  # weights are at most of the order of 1


def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(DATA / name / "golden.safetensors")


def compare(found: Run | reference.Result, expected: dict[str, np.ndarray], layers: int) -> None:
    """Logits, choices and every layer of a prompt."""
    outputs = dict(enumerate(found.outputs)) if isinstance(found, reference.Result) else found.outputs
    assert sorted(outputs) == list(range(layers))
    for layer, values in outputs.items():
        np.testing.assert_allclose(values, expected[f"layer.{layer}.output"], rtol=0, atol=TOLERANCE)
    moe_layers = [layer for layer in range(layers) if f"layer.{layer}.topk_idx" in expected]
    assert sorted(found.chosen) == sorted(found.weights) == moe_layers
    for layer in moe_layers:
        np.testing.assert_array_equal(found.chosen[layer], expected[f"layer.{layer}.topk_idx"])
        weights = expected[f"layer.{layer}.topk_weight"]
        np.testing.assert_allclose(found.weights[layer], weights, rtol=0, atol=ROUTE_TOLERANCE)
    np.testing.assert_allclose(found.logits, expected["logits"], rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found.logits.argmax(axis=1), expected["logits"].argmax(axis=1))


def layer_count(expected: dict[str, np.ndarray]) -> int:
    return sum(name.endswith(".output") for name in expected)


def test_there_are_goldens_of_both_families_and_implementations() -> None:
    assert len(MODELS) >= 5
    assert {name.split("-")[0] for name in MODELS} == {"k3", "kimi", "transformers"}


@pytest.mark.parametrize("name", MODELS)
def test_the_float64_pass_agrees(name: str) -> None:
    expected = golden(name)
    ids, greedy = expected["input_ids"][0].tolist(), expected["greedy_tokens"]
    model = reference.load(DATA / name)
    compare(reference.forward(model, ids), expected, layer_count(expected))
    # Judged in one pass: that each token of the continuation is the best after all before it.
    logits = reference.forward(model, ids + greedy.tolist()).logits
    np.testing.assert_array_equal(logits[len(ids) - 1 : -1].argmax(axis=1), greedy)
    np.testing.assert_allclose(logits[len(ids) :], expected["greedy_logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_prompt(name: str) -> None:
    expected = golden(name)
    compare(run(DATA / name, expected["input_ids"][0].tolist()), expected, layer_count(expected))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_continuation(name: str) -> None:
    expected = golden(name)
    tokens, logits = continuation(DATA / name, expected["input_ids"][0].tolist(), len(expected["greedy_tokens"]))
    assert tokens == expected["greedy_tokens"].tolist()
    np.testing.assert_allclose(logits, expected["greedy_logits"], rtol=0, atol=TOLERANCE)
