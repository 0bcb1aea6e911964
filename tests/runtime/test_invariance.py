"""What must not show in a result: how weights are stored without loss, how they are read, and how work is cut up.

Each test holds the tolerance of the goldens first, then the stronger claim: the same bits.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from formats.container import open_container
from formats.errors import UsageError
from formats.kernels import paths
from formats.layout import Codec
from runtime.session import Options, open_session
from tests.support import reference_forward as reference
from tests.support.runs import TOLERANCE, Run, run
from tests.support.small_models import Small, pack_lossless

ROOT = Path(__file__).parent.parent.parent
DATA = Path(__file__).parent.parent / "data"
CHECKPOINTS = ("k3-tiny", "k3-small", "kimi-linear-tiny")
TOKENS, CONTEXT = 70, 80  # more than a chunk of 64
LEAST, TWICE = "least", "twice the least"  # budgets


def same(found: Run, expected: Run) -> None:
    """The same numbers within the tolerance, the same choices, and then the same bits of everything."""
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found.logits.argmax(axis=1), expected.logits.argmax(axis=1))
    assert found.bits() == expected.bits()


def least_budget(path: Path, **options: Any) -> int:
    """The smallest budget, as the refusal of a smaller one names it."""
    with pytest.raises(UsageError) as caught:
        open_session(path, Options(budget=1, **options))
    named = re.match(r"at least ([0-9]+) bytes", str(caught.value.expected))
    assert named is not None, str(caught.value)
    return int(named[1])


@pytest.fixture(scope="module", params=["checkpoint", "lossless", "encoded"])
def model(request: pytest.FixtureRequest, small: Small, encoded: Small) -> Path:
    return {"checkpoint": small.checkpoint, "lossless": small.container, "encoded": encoded.container}[request.param]


@pytest.fixture(scope="module")
def ids(small: Small) -> list[int]:
    return small.shape.ids(TOKENS)


@pytest.fixture(scope="module")
def usual(model: Path, ids: list[int]) -> Run:
    """The run that all others are compared with."""
    return run(model, ids, context=CONTEXT)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_lossless_container_is_the_checkpoint(name: str, tmp_path: Path) -> None:
    container = pack_lossless(DATA / name, tmp_path / "lossless.moepack")
    ids = list(range(0, 500, 17))
    same(run(container, ids), run(DATA / name, ids))


def test_encoded_container_is_the_forward_pass_of_what_it_decodes_to(encoded: Small) -> None:
    with open_container(encoded.container) as container:
        codecs = {row.codec for info in container.manifest.layers for row in container.rows(info.layer)}
        assert codecs == {Codec.RVQ}
        assert {info.parameters.get("bits") for info in container.manifest.tensors} >= {4, 8}
    ids = encoded.shape.ids(24)
    expected = reference.forward(reference.load_container(encoded.container), ids)
    assert expected.margin > 1e-4
    found = run(encoded.container, ids)
    for layer, chosen in expected.chosen.items():
        np.testing.assert_array_equal(found.chosen[layer], chosen)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=TOLERANCE)
    source = reference.forward(reference.load(encoded.checkpoint), ids)
    assert np.abs(source.logits - expected.logits).max() > 100 * TOLERANCE  # so it is the decoded weights that count


@pytest.mark.parametrize("chunk", [1, 7, 63, 1000])
def test_chunks(model: Path, ids: list[int], usual: Run, chunk: int) -> None:
    same(run(model, ids, context=CONTEXT, chunk=chunk), usual)


@pytest.mark.parametrize("options", [{"chunk": 1}, {"chunk": 13, "threads": 3}], ids=str)
def test_chunks_of_a_wider_model(ids: list[int], options: dict[str, Any]) -> None:
    """Rows of 256, whose sums numpy cuts in parts, and the released model's own proportions."""
    source = DATA / "k3-small"
    same(run(source, ids, context=CONTEXT, **options), run(source, ids, context=CONTEXT))


def test_feeding_piece_by_piece(model: Path, ids: list[int], usual: Run) -> None:
    with open_session(model, Options(context=CONTEXT, chunk=16)) as session:
        position = 0
        for count in (1, 1, 20, 3, 1, 40, 4):
            latest = session.feed(ids[position : position + count])
            position += count
            assert session.position == position
            assert latest.shape == (session.config.vocab_size,)
            np.testing.assert_allclose(latest, usual.logits[position - 1], rtol=0, atol=TOLERANCE)
            assert latest.tobytes() == usual.logits[position - 1].tobytes()
        assert position == TOKENS


VARIATIONS: dict[str, dict[str, Any]] = {
    "least budget": {"budget": LEAST},
    "twice the least budget": {"budget": TWICE},
    "unlimited": {"budget": 1 << 45},
    "one thread": {"threads": 1},
    "two threads": {"threads": 2},
    "five threads": {"threads": 5},
    "no look-ahead": {"look_ahead": False},
    "no read-ahead": {"read_ahead": False, "trunk": "streamed"},
    "trunk resident": {"trunk": "resident"},
    "trunk streamed": {"trunk": "streamed"},
    "records not checked": {"check_records": False},
    "larger state": {"context": 4096},
    "everything small": {
        "budget": LEAST,
        "trunk": "streamed",
        "threads": 1,
        "look_ahead": False,
        "read_ahead": False,
        "check_records": False,
        "chunk": 3,
    },
    "least budget, many threads": {"budget": LEAST, "trunk": "streamed", "threads": 4, "chunk": 33},
}


@pytest.mark.parametrize("options", VARIATIONS.values(), ids=list(VARIATIONS))
def test_options(model: Path, ids: list[int], usual: Run, options: dict[str, Any]) -> None:
    options = {"context": CONTEXT, **options}
    if options.get("budget") in (LEAST, TWICE):
        others = {name: value for name, value in options.items() if name != "budget"}
        options["budget"] = least_budget(model, **others) * (2 if options["budget"] == TWICE else 1)
        with pytest.raises(UsageError, match="budget"):
            open_session(model, Options(**(others | {"budget": least_budget(model, **others) - 1})))
    same(run(model, ids, **options), usual)


def test_budgets_and_trunks_differ_in_what_they_do(small: Small, ids: list[int]) -> None:
    """Otherwise that their results agree would say nothing."""
    least = least_budget(small.container, context=CONTEXT, chunk=5)
    done = {}
    for budget in (least, 1 << 45):
        with open_session(small.container, Options(context=CONTEXT, budget=budget, chunk=5)) as session:
            session.feed(ids)
            assert sum(part.bytes for part in session.plan.parts) <= budget
            done[budget] = session.statistics().stream, session.plan.trunk
    tight, loose = done[least][0], done[1 << 45][0]
    moe_layers, experts = len(small.shape.spec.moe_layers), small.shape.spec.experts
    assert tight.evictions > 0
    assert (loose.evictions, loose.reads) == (0, moe_layers * experts)
    assert tight.bytes_read > 2 * loose.bytes_read
    assert (done[least][1], done[1 << 45][1]) == ("streamed", "resident")


def test_the_same_session_again(model: Path, ids: list[int], usual: Run) -> None:
    """Neither what a cache holds by then nor refused requests nor forgotten tokens show."""
    with open_session(model, Options(context=CONTEXT)) as session:
        session.feed(ids[::-1])
        session.reset()
        assert session.position == 0
        session.feed(ids[:30])
        vocabulary = session.config.vocab_size
        for refused in ([], [vocabulary], [-1], [0, vocabulary, 0], [0] * (CONTEXT - 29)):
            with pytest.raises(UsageError):
                session.feed(refused)
            assert session.position == 30
        latest = session.feed(ids[30:])
        assert latest.tobytes() == usual.logits[-1].tobytes()
        session.feed([0] * (CONTEXT - TOKENS))  # to the very end of the state
        with pytest.raises(UsageError):
            session.feed([0])


@pytest.mark.parametrize("path", paths.available_paths())
def test_kernel_paths(path: str, small: Small, encoded: Small, tmp_path: Path) -> None:
    ids, models = small.shape.ids(9), [small.checkpoint, small.container, encoded.container]
    save = tmp_path / "logits.npz"
    environment = {**os.environ, paths.VARIABLE: path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.support.runs_in_process", save, ",".join(map(str, ids)), *models]
    subprocess.run([str(word) for word in command], env=environment, check=True, timeout=120)
    found = np.load(save)
    for place, model in enumerate(models):
        expected = run(model, ids).logits
        np.testing.assert_allclose(found[str(place)], expected, rtol=0, atol=TOLERANCE)
        assert found[str(place)].tobytes() == expected.tobytes()
