"""The runtime on models of many shapes against the float64 pass, from a checkpoint and from a lossless container."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support import reference_forward as reference
from tests.support.model_checkpoints import SHAPES, write_model
from tests.support.runs import TOLERANCE, run
from tests.support.small_models import pack_lossless

TOKENS = 24
CHUNK = 7  # so that states are handed from step to step
FLOAT32_MARGIN = 1e-4  # scores of experts that float32 tells apart whatever the order of sums


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    source = write_model(tmp_path / "source", shape)
    ids = shape.ids(TOKENS)
    expected = reference.forward(reference.load(source), ids)
    assert expected.margin > FLOAT32_MARGIN, "another seed is needed: its routes are nearly tied"
    found = run(source, ids, chunk=CHUNK, context=TOKENS)
    assert sorted(found.outputs) == list(range(shape.spec.layers))
    for layer, values in enumerate(expected.outputs):
        np.testing.assert_allclose(found.outputs[layer], values, rtol=0, atol=TOLERANCE)
    assert sorted(found.chosen) == sorted(expected.chosen) == list(shape.spec.moe_layers if shape.spec.experts else ())
    for layer, chosen in expected.chosen.items():
        np.testing.assert_array_equal(found.chosen[layer], chosen)
        np.testing.assert_allclose(found.weights[layer], expected.weights[layer], rtol=0, atol=1e-5)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found.logits.argmax(axis=1), expected.logits.argmax(axis=1))
    if shape.spec.experts:  # without any there is nothing to pack
        container = pack_lossless(source, tmp_path / "lossless.moepack")
        assert run(container, ids, chunk=CHUNK, context=TOKENS).bits() == found.bits()


def test_shapes_differ_in_what_they_are_for() -> None:
    """The list keeps what it was made for when shapes are changed."""
    specs = [shape.spec for shape in SHAPES.values()]
    text = [shape.text for shape in SHAPES.values()]
    assert len(specs) >= 16
    assert {spec.family for spec in specs} == {"kimi_k3", "kimi_linear"}
    assert {spec.expert_dtype for spec in specs} == {"MXFP4", "BF16", "F16", "F32"}
    assert {spec.conv for spec in specs} >= {1, 2, 3, 4, 5}
    assert {spec.residual_blocks for spec in specs} >= {None, 1, 2, 3}
    assert {spec.first_dense for spec in specs} >= {0, 1, 2}
    assert {spec.shared for spec in specs} >= {0, 1, 2}
    assert {"k", "m"} <= {spec.attention for spec in specs}
    assert {spec.rope for spec in specs} >= {0}
    assert any(spec.kda_heads != spec.heads for spec in specs)
    assert any(spec.value != spec.nope for spec in specs)
    assert any(members.get("num_expert_group", 1) > members.get("topk_group", 1) for members in text)
    assert any(members.get("moe_router_activation_func") == "softmax" for members in text)
    assert any(members.get("moe_renormalize") is False for members in text)
