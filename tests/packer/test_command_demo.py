"""``moepack demo``: every step in its order, and the figures of its table, on a model that takes seconds."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from packer import demonstration
from packer.commands import run
from packer.demonstration import Bundle
from tests.support.speaking import DATA
from tests.support.vocabularies import tokenizer_files

ROOT = Path(__file__).parents[2]


def make_bundle(home: Path, source: str) -> Bundle:
    """A checkpoint with a tokenizer, and texts of 12 and 300 tokens."""
    shutil.copytree(DATA / source, home / "checkpoint")
    for name, data in tokenizer_files(bos_token="[BOS]", add_bos_token=True).items():
        (home / "checkpoint" / name).write_bytes(data)
    texts = {"code": home / "code.txt", "prose": home / "prose.txt"}
    texts["code"].write_text("hello world\n" * 4)
    texts["prose"].write_text("x" * 300)
    return Bundle(home / "checkpoint", texts)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """k3-small, whose experts are large enough for codebooks."""
    return make_bundle(tmp_path_factory.mktemp("bundle"), "k3-small")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first demonstration leaves its containers; the next one finds them complete."""
    return tmp_path_factory.mktemp("out") / "demo"


@pytest.fixture
def bundle(made: Bundle, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """With codebooks that are fitted in a hurry."""
    recipes = {"lossless": ("--recipe", "kimi-k3-lossless"), "3-bit": ("--effort", "fast")}
    monkeypatch.setattr(sys.modules["packer.commands.demo"], "_RECIPES", recipes)
    monkeypatch.setattr(demonstration, "bundled", lambda: made)
    return made


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """k3-tiny, whose experts are too small for codebooks and packed in no time."""
    made = make_bundle(tmp_path / "bundle", "k3-tiny")
    monkeypatch.setattr(demonstration, "bundled", lambda: made)
    return made


def test_every_step_is_shown_and_the_table_comes_last(
    bundle: Bundle, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["demo", "--dir", str(out)]) == 0
    shown = capsys.readouterr().out
    steps = [line.split()[2] for line in shown.splitlines() if line.startswith("$ moepack ")]
    assert steps == ["plan", "pack", "pack", "verify", "verify", "verify", "inspect", "inspect", "plan", "run"]
    assert "level      logits: " in shown
    assert f"$ moepack verify {out / 'demo-3-bit.moepack'} --source {bundle.checkpoint}\n" in shown
    table = shown[shown.index("Held-out text") :].splitlines()
    assert "12 of code, 300 of prose" in table[0]
    assert [line.split()[0] for line in table[-3:]] == ["source", "lossless", "3-bit"]
    assert sorted(path.name for path in out.iterdir()) == [
        "demo-3-bit.moepack",
        "demo-excerpt.txt",
        "demo-lossless.moepack",
    ]


def test_figures_are_those_of_eval(bundle: Bundle, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lossless is the source; each perplexity is what ``eval`` says of the same windows."""
    assert run(["demo", "--dir", str(out), "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    rows = {row["model"]: row for row in json.loads(captured.out)["models"]}
    assert captured.err == ""
    assert list(rows) == ["source", "lossless", "3-bit"]
    models = {
        "source": bundle.checkpoint,
        "lossless": out / "demo-lossless.moepack",
        "3-bit": out / "demo-3-bit.moepack",
    }
    for name, path in models.items():
        assert rows[name]["bytes"] == sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
        for text, file in bundle.texts.items():
            assert run(["eval", str(path), "--text", str(file), "--window", "256", "--json"]) == 0
            expected = json.loads(capsys.readouterr().out)
            cell = rows[name]["texts"][text]
            assert (cell["tokens"], cell["perplexity"]) == (expected["predicted_tokens"], expected["perplexity"])
    for text in bundle.texts:
        lossless, lossy = rows["lossless"]["texts"][text], rows["3-bit"]["texts"][text]
        assert (lossless["kl_divergence"], lossless["top1_agreement"]) == (0.0, 1.0)
        assert lossless["perplexity"] == rows["source"]["texts"][text]["perplexity"]
        assert lossy["kl_divergence"] > 1e-4


def test_nothing_stays_without_a_folder(
    tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert run(["demo", "--json", "--quiet"]) == 0
    assert list(temporary.iterdir()) == []
    assert json.loads(capsys.readouterr().out)["directory"] is None


@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_step_says_what_to_type(
    kept: bool, tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demonstration, and not the step, of which nothing is left without a folder."""

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["packer.commands.pack"], "plan_for", interrupted)
    typed = ["demo", "--dir", str(tmp_path / "out")] if kept else ["demo"]
    assert run(typed) == 130
    shown = capsys.readouterr().err.splitlines()
    assert f"hint: start again with: moepack {' '.join(typed)}" in shown
    assert any("with --dir it stays" in line for line in shown) == (not kept)


def test_a_step_that_fails_ends_it(tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny.checkpoint / "tiktoken.model").write_bytes(b"broken")
    assert run(["demo", "--dir", str(tmp_path / "out"), "--quiet"]) == 3
    captured = capsys.readouterr()
    assert "$ moepack run" not in captured.out
    assert captured.err.startswith("error: tiktoken.model: wrong number of tokens")


def test_files_of_others_are_not_written_over(tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "demo-excerpt.txt").write_text("mine")
    assert run(["demo", "--dir", str(tmp_path)]) == 2
    assert "another file is in the way" in capsys.readouterr().err
    assert (tmp_path / "demo-excerpt.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tiny: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"")
    for name, code in (("file", 4), ("x" * 300, 2)):
        assert run(["demo", "--dir", str(tmp_path / name)]) == code
        assert "cannot make the folder" in capsys.readouterr().err


def test_the_bundled_model_is_there() -> None:
    found = demonstration.bundled()
    assert found.checkpoint == ROOT / "recipes" / "demo" / "checkpoint"
    assert set(found.texts) == {"code", "prose"}
    parts = demonstration.read_texts(found)
    assert all(1 < len(window) <= demonstration.WINDOW for windows in parts.values() for window in windows)
    assert all(sum(map(len, windows)) >= demonstration.TOKENS for windows in parts.values())
