"""``moepack prune`` as it is typed: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.commands import run

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
        (["--keep", "17"], "cannot keep that number of experts a layer"),
        (["--keep", "many"], "not a number of experts"),
        (["--keep", "8", "--sources", "b"], "no text with this label"),
        (["--keep", "8", "--lossless", "2"], "only mode graded keeps experts lossless"),
        (["--keep", "8", "--mode", "graded", "--lossless", "9"], "more experts lossless than stay"),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    arguments: list[str], message: str, statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["prune", str(statistics), *arguments, "--out", str(tmp_path / "p")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "p").exists()
