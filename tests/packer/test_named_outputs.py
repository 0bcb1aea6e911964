"""Files that a user names on the command line: nothing of the user's is touched, and they are there whole or not."""

from __future__ import annotations

import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from packer import demonstration
from packer.commands import run
from packer.prune.plan import read_prune_plan
from packer.storage import new_file
from tests.support.containers import build_container
from tests.support.faults import Faults
from tests.support.prunes import made_up_statistics

DATA = Path(__file__).parents[1] / "data"
ROOT = Path(__file__).parents[2]
K3 = DATA / "k3-tiny"
RACERS = 4


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("named") / "stats"
    made_up_statistics(K3, path, labels={"a": 500, "b": 300})
    return path


def prune(statistics: Path, out: Path) -> list[str]:
    return ["prune", str(statistics), "--keep", "9", "--out", str(out)]


def calibrate(_: Path, out: Path) -> list[str]:
    ids = out.with_name("ids")
    ids.write_text(",".join(str(number * 37 % 500) for number in range(48)))
    return ["calibrate", str(K3), "--ids", f"a={ids}", "--window", "24", "--out", str(out)]


def evaluate(_: Path, out: Path) -> list[str]:
    return ["eval", str(K3), "--ids", "1,2,3", "--save-logits", str(out)]


def prune_page(statistics: Path, out: Path) -> list[str]:
    pytest.importorskip("matplotlib", reason="pages have drawings, which need the extra report")
    return [*prune(statistics, out.with_name("plan")), "--html", str(out)]


def verify_page(_: Path, out: Path) -> list[str]:
    pytest.importorskip("matplotlib", reason="pages have drawings, which need the extra report")
    container = build_container(out.with_name("model.moepack"))
    return ["verify", str(container), "--level", "structure", "--html", str(out)]


@pytest.mark.parametrize("command", [prune, prune_page, calibrate, evaluate, verify_page])
def test_files_of_the_user_s_beside_an_output_stay(
    command: Callable[[Path, Path], list[str]], statistics: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = command(statistics, out)
    mine = [out.with_name(name) for name in ("out.part", "out.00000000.part", f"out.{os.getpid()}.part", "plan.part")]
    for path in mine:
        path.write_text(path.name)
    before = {path.name for path in tmp_path.iterdir()}
    assert run([*arguments, "--quiet"]) == 0
    assert out.is_file()
    assert {path.name for path in tmp_path.iterdir()} - before <= {"out", "plan"}
    assert all(path.read_text() == path.name for path in mine)


def test_the_demonstration_s_excerpt_touches_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "demo-excerpt.txt.part").write_text("mine")
    path = demonstration.write_excerpt(demonstration.bundled(), tmp_path)
    assert path.stat().st_size > 0
    assert (tmp_path / "demo-excerpt.txt.part").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("call", "at", "code"), [("pwrite", 2, errno.ENOSPC), ("fsync", 2, errno.EIO), ("link", 2, errno.ENOSPC)]
)
def test_a_page_that_cannot_be_written_leaves_no_plan(
    call: str,
    at: int,
    code: int,
    statistics: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the same command can be given again, as the hint says."""
    plan, page = tmp_path / "plan", tmp_path / "page.html"
    arguments = [*prune_page(statistics, page), "--quiet"]
    faults = Faults(at, code, [call])
    with monkeypatch.context() as patched:
        patched.setattr(new_file, "write_all_new", functools.partial(new_file.write_all_new, system=faults.system))
        assert run(arguments) == 4
    said = capsys.readouterr().err
    assert "page.html" in said
    assert "then give the same command again" in said
    assert list(tmp_path.iterdir()) == []
    assert run(arguments) == 0
    assert sorted(tmp_path.iterdir()) == [page, plan]
    assert read_prune_plan(plan).layers


_RACING = """
import sys, time
from pathlib import Path
from packer.storage import new_file
folder, count = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
publish = new_file.publish
def waiting(outputs, **options):
    (folder / outputs[0].temporary.name).touch()
    while len(list(folder.iterdir())) < count:
        time.sleep(0.01)
    publish(outputs, **options)
new_file.publish = waiting
if sys.argv.pop(1) == "no links":
    def link(source, target):
        raise PermissionError(1, "not permitted")
    new_file.SYSTEM = new_file.System(link=link)
    new_file.write_all_new.__kwdefaults__["system"] = new_file.SYSTEM
from packer.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("links", ["links", "no links"])
def test_of_several_processes_one_writes_the_plan(links: str, statistics: Path, tmp_path: Path) -> None:
    """All have their plan complete before any of them publishes it; each would keep another number of experts."""
    ready, folder = tmp_path / "ready", tmp_path / "out"
    ready.mkdir()
    folder.mkdir()
    out = folder / "plan"
    command = [sys.executable, "-c", _RACING, str(ready), str(RACERS), links, "prune", str(statistics)]
    racers = [
        subprocess.Popen(
            [*command, "--keep", str(8 + number), "--out", str(out)],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(RACERS)
    ]
    said = [racer.communicate(timeout=120)[1] for racer in racers]
    codes = [racer.returncode for racer in racers]
    assert sorted(codes) == [0, *[2] * (RACERS - 1)], said
    winner = codes.index(0)
    for text, code in zip(said, codes, strict=True):
        assert code == 0 or f"error: {out}: output is there already\n" in text
    assert [len(layer.keep) for layer in read_prune_plan(out).layers] == [8 + winner] * 6
    assert list(folder.iterdir()) == [out]
