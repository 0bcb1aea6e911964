"""``moepack eval``: against the goldens, and everything that must not show in its result."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.manifest import WORK_DIR
from packer.commands import run
from tests.support.speaking import DATA, Speaking, make_speaking

ROOT = Path(__file__).parents[2]
TOLERANCE = 5e-4  # between float32 implementations: tests/data/README.md


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Speaking:
    return make_speaking(tmp_path_factory.mktemp("speaking"))


def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(DATA / name / "golden.safetensors")


def listed(ids: Any) -> str:
    return ",".join(str(token) for token in np.asarray(ids).reshape(-1))


@pytest.mark.parametrize("name", ["k3-tiny", "k3-small", "kimi-linear-tiny"])
def test_saved_tensors_are_those_of_the_released_code(name: str, tmp_path: Path) -> None:
    expected = golden(name)
    path = tmp_path / "out.safetensors"
    arguments = ["--ids", listed(expected["input_ids"]), "--save-logits", str(path), "--layers", "--chunk", "5"]
    assert run(["eval", str(DATA / name), *arguments, "--quiet"]) == 0
    found = load_file(path)
    kept = {key for key in expected if key == "logits" or key.startswith("layer.")}
    assert set(found) == kept | {"input_ids"}
    for key in kept:
        if key.endswith("topk_idx"):
            np.testing.assert_array_equal(found[key], expected[key])
        else:
            np.testing.assert_allclose(found[key], expected[key], atol=TOLERANCE, rtol=0)
    np.testing.assert_array_equal(found["logits"].argmax(1), expected["logits"].argmax(1))


def test_greedy_tokens_are_those_of_the_released_code(capsys: pytest.CaptureFixture[str]) -> None:
    expected = golden("k3-tiny")
    arguments = ["--ids", listed(expected["input_ids"]), "-n", str(len(expected["greedy_tokens"].reshape(-1)))]
    assert run(["run", str(DATA / "k3-tiny"), *arguments, "--temperature", "0", "--quiet"]) == 0
    assert capsys.readouterr().out.split() == [str(token) for token in expected["greedy_tokens"].reshape(-1)]


def test_container_checkpoint_and_every_option_save_the_same_bytes(speaking: Speaking, tmp_path: Path) -> None:
    ids = ["--ids", listed(golden("k3-tiny")["input_ids"]), "--layers"]

    def saved(number: int, model: Path, *options: str) -> bytes:
        path = tmp_path / f"{number}.safetensors"
        assert run(["eval", str(model), *ids, "--save-logits", str(path), "--quiet", *options]) == 0
        return path.read_bytes()

    first = saved(0, speaking.source)
    ways = [
        ("--budget", "1GiB"),
        ("--threads", "1", "--trunk", "streamed"),
        ("--no-look-ahead", "--no-read-ahead", "--trunk", "streamed", "--no-record-check"),
        ("--context", "100", "--trunk", "resident"),
    ]
    assert all(saved(number, speaking.container, *way) == first for number, way in enumerate(ways, 1))


def test_perplexity_is_that_of_the_goldens(capsys: pytest.CaptureFixture[str]) -> None:
    """exp of the mean of minus log softmax, from the golden logits in float64."""
    expected = golden("k3-tiny")
    ids, logits = expected["input_ids"].reshape(-1), expected["logits"].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    mean = -float(np.mean([logs[place, ids[place + 1]] for place in range(len(ids) - 1)]))
    assert run(["eval", str(DATA / "k3-tiny"), "--ids", listed(ids), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["loss"] == pytest.approx(mean, abs=TOLERANCE)
    assert document["perplexity"] == pytest.approx(math.exp(mean), rel=TOLERANCE)
    assert (document["tokens"], document["predicted_tokens"]) == (len(ids), len(ids) - 1)
    best = np.argsort(-logits[-1])[:5]
    assert [entry["id"] for entry in document["top"]] == best.tolist()
    assert [entry["logit"] for entry in document["top"]] == pytest.approx(logits[-1][best].tolist(), abs=TOLERANCE)


def test_one_token_has_no_perplexity(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", str(DATA / "k3-tiny"), "--ids", "3"]) == 0
    assert "perplexity" not in capsys.readouterr().out
    assert run(["eval", str(DATA / "k3-tiny"), "--ids", "3", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["loss"], document["perplexity"], document["container_id"]) == (None, None, None)


def test_windows_have_a_fresh_state_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = tmp_path / "whole", [tmp_path / "a", tmp_path / "b"]
    model = str(DATA / "kimi-linear-tiny")
    assert run(["eval", model, "--ids", "1,2,3,4,5", "--window", "3", "--save-logits", str(whole), "--layers"]) == 0
    for path, ids in zip(parts, ("1,2,3", "4,5"), strict=True):
        assert run(["eval", model, "--ids", ids, "--save-logits", str(path), "--layers"]) == 0
    found, expected = load_file(whole), [load_file(path) for path in parts]
    for name in found:
        assert found[name].tobytes() == b"".join(part[name].tobytes() for part in expected), name
    assert "5 in 2 pieces" in capsys.readouterr().out


def test_text_is_read_by_the_model_s_own_tokenizer(
    speaking: Speaking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("hello world")
    assert run(["eval", str(speaking.container), "--text", str(text), "--save-logits", str(tmp_path / "out")]) == 0
    assert load_file(tmp_path / "out")["input_ids"].tolist() == [259, 264]  # hello, and world with its blank
    assert "text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "found none of them"),
        (["--ids", ""], 2, "--ids: no token ids"),
        (["--ids", "1,512"], 2, "entry 2 is no token id (expected 0 to 511, found '512')"),
        (["--ids", "1", "--layers"], 2, "--layers: there is no file to save layers in"),
        (["--ids", "1,2,3", "--context", "2"], 2, "expected at least 3, found 2"),
        (["--ids", "1", "--budget", "1MiB"], 2, "--budget: budget is below what this model needs"),
        (["--ids", "1", "--budget", "lots"], 2, "--budget: not a size"),
        (["--ids", "1", "--threads", "0"], 2, "--threads"),
        (["--ids", "1", "--save-logits", "config.json"], 2, "output is there already"),
        (["--text", "config.json"], 3, "the model comes without a tokenizer"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(DATA / "k3-tiny")
    before = sorted(Path().iterdir())
    assert run(["eval", ".", *arguments]) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("hint: ")]
    assert captured.out == ""
    assert len(lines) == 1
    assert message in lines[0]
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(("name", "code"), [("absent", 2), ("empty", 3)])
def test_models_that_are_none(name: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert run(["eval", str(tmp_path / name), "--ids", "1"]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("command", [["eval", "--ids", "1"], ["run", "--ids", "1"], ["bench", "-n", "1"]])
def test_an_unfinished_pack_can_be_continued(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / WORK_DIR).mkdir()
    assert run([command[0], str(tmp_path), *command[1:]]) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {tmp_path}: ")
    assert hint == "hint: an interrupted pack continues when the same pack command is given again"


@pytest.mark.parametrize("command", [["eval", "--ids", "1"], ["run", "--ids", "1"], ["bench", "-n", "1"]])
def test_a_container_that_lost_its_manifest(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experts").mkdir()
    assert run([command[0], str(tmp_path), *command[1:]]) == 3
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {tmp_path}: ")
    assert hint == "hint: get manifest.json from where the container comes from"


def test_wrt_17_partial_containers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "part.moepack"
    assert run(["pack", str(DATA / "k3-tiny"), str(out), "--layers", "2", "--quiet"]) == 0
    capsys.readouterr()
    for command in (["eval", "--ids", "1"], ["run", "--ids", "1"], ["bench", "-n", "1"]):
        assert run([command[0], str(out), *command[1:], "--quiet"]) == 3
        assert "container is partial" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(signal, "SIGTERM"), reason="no such signal here")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cli_05_stopping_leaves_no_file(number: int, tmp_path: Path) -> None:
    """Many tokens, so that it is still at work when the temporary has appeared."""
    ids = tmp_path / "ids"
    ids.write_text("1 " * 100_000)
    target = tmp_path / "out" / "logits.safetensors"
    target.parent.mkdir()
    command = [sys.executable, "-m", "packer", "eval", str(DATA / "k3-tiny"), "--ids-file", str(ids)]
    process = subprocess.Popen(
        [*command, "--window", "64", "--save-logits", str(target)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(target.parent.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error.splitlines()[0].endswith("error: interrupted")
    assert list(target.parent.iterdir()) == []
