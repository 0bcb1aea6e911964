"""Level ``logits`` of ``verify``: figures against their definitions, and what makes it fail."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.errors import FormatError, UsageError
from packer.commands import run
from packer.verify.logits import verify_logits
from packer.verify.logits_parity import compare_models, divergence
from runtime.opening import Options
from runtime.session import open_session
from tests.support.speaking import DATA, Speaking, make_speaking

SMALL = DATA / "k3-small"
IDS = load_file(SMALL / "golden.safetensors")["input_ids"].reshape(-1).tolist()


@pytest.fixture(scope="module")
def lossy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lossy") / "small.moepack"
    assert run(["pack", str(SMALL), str(out), "--quiet", "--jobs", "1", "--effort", "fast"]) == 0
    return out


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Speaking:
    return make_speaking(tmp_path_factory.mktemp("speaking"))


def saved(model: Path, path: Path) -> dict[str, np.ndarray]:
    arguments = ["--ids", ",".join(map(str, IDS)), "--save-logits", str(path), "--layers", "--quiet"]
    assert run(["eval", str(model), *arguments]) == 0
    return load_file(path)


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits.astype(np.float64))  # logits here are small
    return shares / shares.sum(axis=-1, keepdims=True)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_divergence_by_hand() -> None:
    """Shares 1/2, 1/2 against 1/4, 3/4: ln 2 / 2 + ln(2/3) / 2."""
    found = divergence(np.zeros(2, np.float32), np.log(np.array([1, 3])).astype(np.float32))
    assert found == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-7)
    assert divergence(np.array([1, 2], np.float32), np.array([1, 2], np.float32)) == 0.0


@pytest.mark.parametrize("chunk", [3, 64])
def test_figures_are_those_of_the_saved_tensors(
    lossy: Path, chunk: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Worked out again from what ``eval`` saves of both models, all positions at once."""
    source, ours = saved(SMALL, tmp_path / "a"), saved(lossy, tmp_path / "b")
    report = verify_logits(lossy, SMALL, [IDS], Options(context=len(IDS), chunk=chunk))
    assert report.ok
    assert report.level == "logits"
    found = report.to_dict()["logits"]
    p, q = softmax(source["logits"]), softmax(ours["logits"])
    kl = (p * np.log(p / q)).sum(axis=1)
    assert found["positions"] == len(IDS)
    assert found["kl_divergence"]["mean"] == pytest.approx(kl.mean(), rel=1e-6)
    assert found["kl_divergence"]["max"] == pytest.approx(kl.max(), rel=1e-6)
    assert found["kl_divergence"]["max_position"] == kl.argmax()
    assert found["top1_agreement"] == np.mean(p.argmax(1) == q.argmax(1))
    best = [set(np.argsort(-row)[:5]) for row in p]
    agree = [len(these & set(np.argsort(-row)[:5])) / 5 for these, row in zip(best, q, strict=True)]
    assert found["top5_agreement"] == pytest.approx(np.mean(agree))
    difference = source["logits"].astype(np.float64) - ours["logits"]
    assert found["max_difference"] == np.abs(difference).max()
    assert [entry["layer"] for entry in found["layers"]] == [0, 1, 2, 3]
    for entry in found["layers"]:
        mine = source[f"layer.{entry['layer']}.output"].astype(np.float64)
        apart = mine - ours[f"layer.{entry['layer']}.output"]
        assert entry["max_difference"] == np.abs(apart).max()
        assert entry["rel_error"] == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(mine), rel=1e-9)
    for name, shares in (("source", p), ("container", q)):
        loss = -np.mean([math.log(shares[place, IDS[place + 1]]) for place in range(len(IDS) - 1)])
        assert found["loss"][name] == pytest.approx(loss, rel=1e-6)
        assert found["perplexity"][name] == pytest.approx(math.exp(loss), rel=1e-6)
    assert found["kl_divergence"]["mean"] > 1e-4  # there is something to measure


def test_lossless_containers_have_no_difference_at_all(
    speaking: Speaking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text("hello world, hello worlds\n" * 3)
    arguments = ["--source", str(speaking.source), "--text", str(text), "--window", "20", "--max-kl", "0"]
    assert run(["verify", str(speaking.container), *arguments, "--json"]) == 0
    found = document(capsys)
    assert (found["level"], found["ok"], found["unaccounted"]) == ("logits", True, 0)
    logits = found["logits"]
    assert logits["kl_divergence"] == {"mean": 0.0, "max": 0.0, "max_position": 0}
    assert (logits["top1_agreement"], logits["top5_agreement"], logits["max_difference"]) == (1.0, 1.0, 0.0)
    assert all(entry["max_difference"] == entry["rel_error"] == 0.0 for entry in logits["layers"])
    assert logits["perplexity"]["source"] == logits["perplexity"]["container"]


def test_a_limit_makes_it_a_check(lossy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", str(lossy), "--source", str(SMALL), "--ids", ",".join(map(str, IDS))]
    assert run([*arguments, "--level", "logits", "--max-kl", "100"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "ok"
    assert any(line.startswith("perplexity source ") for line in shown)
    assert run([*arguments, "--max-kl", "1e-9", "--budget", "1GiB"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "failed: 1 problem"
    [problem] = [line for line in shown if line.startswith("problem ")]
    assert problem.startswith(
        "problem    logits: mean KL divergence is above the limit (expected at most 1e-09, found "
    )


def test_ids_come_from_a_file_too(lossy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ids"
    path.write_text("\n".join(map(str, IDS)))
    assert run(["verify", str(lossy), "--source", str(SMALL), "--level", "logits", "--ids", str(path), "--json"]) == 0
    assert document(capsys)["logits"]["positions"] == len(IDS)


def test_damage_is_named_and_logits_are_left_out(
    speaking: Speaking, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.moepack"
    shutil.copytree(speaking.container, copy)
    bank = next(iter(sorted((copy / "experts").iterdir())))
    data = bytearray(bank.read_bytes())
    data[9000] ^= 1
    bank.write_bytes(data)
    assert run(["verify", str(copy), "--source", str(speaking.source), "--ids", "1,2", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert (found["level"], found["ok"], "logits" in found) == ("parity", False, False)
    assert "logits were not compared" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--ids", "1,2"], 2, "level logits compares with a source, and none is given"),
        (["--level", "logits", "--source", str(SMALL)], 2, "found none of them"),
        (["--source", str(SMALL), "--ids", "1,512"], 2, "entry 2 is no token id"),
        (["--source", str(SMALL), "--ids", "1,2", "--max-kl", "-1"], 2, "--max-kl: limit is negative"),
        (["--source", str(SMALL), "--ids", "1,2", "--max-kl", "nan"], 2, "--max-kl: limit is negative"),
        (["--source", str(SMALL), "--ids", "1,2", "--budget", "2MiB"], 2, "budget is below what this model needs"),
        (["--source", str(SMALL), "--text", __file__], 3, "without a tokenizer"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str], code: int, message: str, lossy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(lossy), *arguments]) == code
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("hint: ")]
    assert captured.out == ""
    assert len(lines) == 1
    assert message in lines[0]


def test_the_least_budget_is_that_of_both_models(lossy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the refusal asks for is enough, and two bytes less is not."""
    arguments = ["verify", str(lossy), "--source", str(SMALL), "--ids", "1,2", "--budget"]
    least = 1 << 20
    for _ in range(2):  # the source's refusal, and then perhaps the container's
        if run([*arguments, str(least)]) == 0:
            break
        found = re.search(r"expected at least (\d+) bytes \(\d+ MiB\) for 2 models", capsys.readouterr().err)
        assert found is not None
        least = int(found[1])
    capsys.readouterr()
    assert run([*arguments, str(least)]) == 0
    assert run([*arguments, str(least - 2)]) == 2
    assert f"expected at least {least} bytes" in capsys.readouterr().err


def test_what_is_not_used_is_said(lossy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logits = {"--source": str(SMALL), "--budget": "1GiB", "--max-kl": "1", "--ids": "1", "--window": "2"}
    arguments = [part for option in logits.items() for part in option]
    assert run(["verify", str(lossy), "--level", "structure", *arguments]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes == [f"note: {option} is not used at level structure" for option in logits]


def test_models_that_walk_out_of_step_are_a_programming_error() -> None:
    with (
        open_session(SMALL, Options(context=8, chunk=4)) as one,
        open_session(SMALL, Options(context=8, chunk=3)) as other,
        pytest.raises(ValueError, match=r"zip|chunks"),
    ):
        compare_models(one, other, [[1, 2, 3, 4, 5, 6]])


def test_errors_of_the_python_call(lossy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more tokens than the state can hold"):
        verify_logits(lossy, SMALL, [IDS], Options(context=2))
    with pytest.raises(FormatError):
        verify_logits(lossy, tmp_path, [IDS], Options())
