"""The torch model computes what the released code computes, and its chunked recurrence what the plain one does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="torch is not installed; only the demo recipe needs it")
from safetensors import safe_open  # noqa: E402

from recipes.demo import kda, release  # noqa: E402

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    """Training compiles; that needs a compiler, and a minute."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", ["k3-tiny", "k3-small"])
def test_logits_are_those_of_the_released_code(name: str) -> None:
    tower = release.read(DATA / name)
    with safe_open(DATA / name / "golden.safetensors", "pt") as golden:
        ids, expected = golden.get_tensor("input_ids"), golden.get_tensor("logits")
    logits = tower(ids.long())[0]
    assert (logits - expected).abs().max() < 5e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("length", [1, 15, 16, 37, 64])
@pytest.mark.parametrize("floor", [-0.5, -5.0])
def test_chunks_agree_with_the_recurrence(length: int, floor: float) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(3, length, 8, generator=generator) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = floor * torch.rand(3, length, 8, generator=generator)
    beta = torch.rand(3, length, generator=generator)
    exact = kda.recurrence(*(x.double() for x in (q, k, v, g, beta)))
    assert (kda.chunked(q, k, v, g, beta) - exact).abs().max() < 2e-5


def test_chunks_survive_the_strongest_decay() -> None:
    ones = torch.ones(1, 48, 4)
    k = torch.nn.functional.normalize(ones, dim=-1)
    output = kda.chunked(ones, k, ones, -5.0 * ones, torch.ones(1, 48))
    # Every token overwrites the whole state with its own value, up to e^-5: o = q.k v = 2 v.
    assert (output - 2.0).abs().max() < 1e-5
