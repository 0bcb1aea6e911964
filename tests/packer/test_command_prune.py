"""``moepack prune`` as it is typed: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from packer.commands import run
from packer.prune.plan import read_prune_plan
from packer.statistics.file import write_statistics
from tests.support.prunes import made_up_layer, provenance_of

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prune")
    ids = folder / "ids"
    ids.write_text(",".join(str(number * 37 % 500) for number in range(120)))
    out = folder / "stats"
    arguments = ["calibrate", str(DATA / "k3-tiny"), "--ids", f"a={ids}", "--window", "24", "--out", str(out)]
    assert run([*arguments, "--quiet"]) == 0
    return out


def test_the_container_s_size_is_that_of_the_pack(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, source, out = tmp_path / "plan.toml", str(DATA / "k3-tiny"), tmp_path / "out.moepack"
    capsys.readouterr()
    assert run(["prune", str(statistics), "--keep", "9", "--out", str(plan), "--source", source, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kept_experts"] == 6 * 9
    assert 0 < document["retained_saliency"] <= 1
    assert run(["pack", source, str(out), "--prune", str(plan), "--quiet"]) == 0
    assert document["container_bytes"] == sum(file.stat().st_size for file in out.rglob("*") if file.is_file())


def test_without_a_source_the_experts_are_estimated(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prune", str(statistics), "--keep", "50%", "--out", str(tmp_path / "p")]) == 0
    printed = capsys.readouterr().out
    assert "48 of 96 stay, 8 a layer" in printed
    assert "of experts under the default recipe" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "3"], "cannot keep that number of experts a layer"),  # a token uses four
        (["--keep", "17"], "cannot keep that number of experts a layer (expected 4 (experts a token) to 16, found 17)"),
        (
            ["--keep", "1%"],
            "cannot keep that number of experts a layer (expected 4 (experts a token) to 16, found '1%' (0 of 16))",
        ),
        (["--keep", "500%"], "to 16, found '500%' (80 of 16))"),
        (["--keep", "many"], "not a number of experts"),
        (["--keep", "100.5%"], "to 16, found '100.5%' (17 of 16))"),
        (["--keep", "8", "--sources", "b"], "no text with this label"),
        (["--keep", "8", "--lossless", "2"], "only mode graded keeps experts lossless"),
        (["--keep", "8", "--mode", "graded", "--lossless", "9"], "more experts lossless than stay"),
        (["--keep", "8", "--mode", "graded", "--lossless", "150%"], "expected at most 8, found '150%' (12 of 8))"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], message: str, statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prune", str(statistics), *arguments, "--out", str(tmp_path / "p")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_a_share_is_rounded_to_the_nearest(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (share, kept) in enumerate((("33%", 5), ("36%", 6))):  # of 16: 5.28 and 5.76
        assert run(["prune", str(statistics), "--keep", share, "--out", str(tmp_path / str(number))]) == 0
        assert f"stay, {kept} a layer" in capsys.readouterr().out
    assert run(["prune", "--help"]) == 0
    assert "a share is rounded to the nearest number" in " ".join(capsys.readouterr().out.split())


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Statistics of a model with more experts than the floor of mode global keeps: 24, four a token."""
    path = tmp_path_factory.mktemp("many") / "stats"
    provenance = provenance_of(DATA / "k3-tiny", {"a": 500})
    model = msgspec.structs.replace(provenance.model, experts=24)
    provenance = msgspec.structs.replace(provenance, model=model)
    rng = np.random.default_rng(3)
    write_statistics(path, provenance, [1, 2, 3], [made_up_layer(rng, provenance, 64, 96) for _ in range(3)])
    return path


@pytest.mark.parametrize(
    ("keep", "note"),
    [
        (
            "27%",
            "each layer keeps its floor of 6 (--keep, or 4 times the 4 of a token if that is less); from --keep 17",
        ),
        ("16", "each layer keeps its floor of 16 "),
        ("17", None),
        ("24", None),
    ],
)
def test_a_floor_that_leaves_no_choice_is_told(
    keep: str, note: str | None, many_experts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = {}
    for mode in ("uniform", "global"):
        arguments = ["prune", str(many_experts), "--keep", keep, "--mode", mode, "--out", str(tmp_path / mode)]
        assert run(arguments) == 0
        plans[mode] = read_prune_plan(tmp_path / mode).layers
        messages = capsys.readouterr().err
        assert ("note: mode global comes to the same as uniform" in messages) == (mode == "global" and note is not None)
    assert note is None or (note in messages and plans["global"] == plans["uniform"])
    assert (plans["global"] == plans["uniform"]) == (keep != "17")


def test_a_floor_above_all_experts_is_told(
    statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prune", str(statistics), "--keep", "8", "--mode", "global", "--out", str(tmp_path / "p")]) == 0
    assert "with 16 experts a layer no --keep changes that\n" in capsys.readouterr().err


def test_what_is_no_statistics_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "README.md"
    text.write_text("# A text that is no statistics file\n")
    assert run(["prune", str(text), "--keep", "8", "--out", str(tmp_path / "p")]) == 3
    assert capsys.readouterr().err.splitlines() == [
        f"error: {text}: not a statistics file of moepack calibrate",
        "hint: make statistics with moepack calibrate",
    ]
    assert run(["prune", str(DATA / "k3-tiny"), "--keep", "8", "--out", str(tmp_path / "p")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {DATA / 'k3-tiny'}: not a regular file",
        "hint: make statistics with moepack calibrate",
    ]


def test_statistics_are_no_plan(statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = str(DATA / "k3-tiny")
    assert run(["pack", source, str(tmp_path / "o"), "--prune", str(statistics), "--dry-run", "--quiet"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: {statistics}: this is a statistics file, not a prune plan",
        f"hint: make a plan with moepack prune {statistics}",
    ]
