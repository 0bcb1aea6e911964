"""What an interrupted calibration goes on from is proven before anything is computed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from formats.errors import FormatError
from packer.calibrate.job import calibrate
from packer.calibrate.texts import Sample
from packer.progress import Progress
from packer.statistics.file import open_statistics, write_layer
from packer.statistics.types import Provenance, SampleLabel
from packer.storage.system import SYSTEM, Buffer, WriteLost
from tests.packer.calibrate.test_calibrate import ROOT, WINDOW, Stop, counted, job_for
from tests.packer.calibrate.unfinished import (
    DONE,
    FILES,
    MODEL,
    as_dangling_link,
    as_folder,
    as_link,
    as_pipe,
    cut,
    flipped,
    interrupted,
    lengthened,
    refused,
    stopped,
)


def test_the_note_has_length_and_digest_of_what_the_rest_needs(work: Path) -> None:
    note = json.loads((work / "done.json").read_bytes())
    assert note["layers"] == DONE
    assert sorted(note["files"]) == sorted(FILES)
    for name, proof in note["files"].items():
        data = (work / name).read_bytes()
        assert proof == {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    states = 7 * 24 * json.loads((MODEL / "config.json").read_bytes())["text_config"]["hidden_size"] * 4
    assert note["files"]["before-00003.f32"]["bytes"] == states


DAMAGES = {
    "a flipped bit": (flipped, "other bytes than were written"),
    "cut": (cut, "bytes, found"),
    "lengthened": (lengthened, "bytes, found"),
    "missing": (Path.unlink, "found no file"),
    "a folder": (as_folder, "found a folder"),
    "a link": (as_link, "found a link"),
    "a dangling link": (as_dangling_link, "found a link"),
    "a pipe": (as_pipe, "found no regular file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_before_anything_is_computed(name: str, damage: str, work: Path, sample: Sample) -> None:
    change, message = DAMAGES[damage]
    change(work / name)
    error = refused(work, sample)
    assert name in str(error)
    assert message in str(error)
    assert error.hint == "remove the folder and start again"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_calibration(name: str, others: Path, work: Path, sample: Sample) -> None:
    theirs = (others / name).read_bytes()
    ours = blake3((work / name).read_bytes()).hexdigest()
    assert len(theirs) == (work / name).stat().st_size
    (work / name).write_bytes(theirs)
    found = f"(expected {ours}, found {blake3(theirs).hexdigest()})"
    assert (
        str(refused(work, sample))
        == f"{work / name}: work in progress is damaged: other bytes than were written {found}"
    )


def test_the_note_of_another_calibration(others: Path, work: Path, sample: Sample) -> None:
    shutil.copy(others / "done.json", work)
    assert "before-00000.f32: work in progress is damaged" in str(refused(work, sample))


def test_the_command_names_damage_and_ends_with_3(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text(",".join(str(number * 37 % 500) for number in range(10 * WINDOW)))
    arguments = ["calibrate", str(MODEL), "--ids", f"a={ids}", "--window", str(WINDOW), "--out", str(tmp_path / "s")]

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )

    assert run(_ENDED_BEFORE_ITS_RESULT).returncode == -9
    damaged = tmp_path / "s.work" / "layer-00002.safetensors"
    sound = damaged.read_bytes()
    damaged.unlink()
    refusal = run(_COMMAND)
    assert refusal.returncode == 3
    expected = f"{damaged}: work in progress is damaged (expected {len(sound)} bytes, found no file)"
    assert expected in refusal.stderr
    assert "hint: remove the folder and start again\n" in refusal.stderr
    assert "continued" not in refusal.stderr
    damaged.write_bytes(sound)
    assert run(_COMMAND).returncode == 0


_COMMAND = """
import sys
from packer.cli import main
sys.exit(main(sys.argv[1:]))
"""
_ENDED_BEFORE_ITS_RESULT = (
    """
import os, signal
from packer.calibrate import job
job.write_statistics = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
"""
    + _COMMAND
)


def test_sums_that_are_damaged_while_it_runs(work: Path, sample: Sample) -> None:
    def damage(progress: Progress) -> None:
        if progress.done_bytes == progress.total_bytes:
            cut(work / "layer-00002.safetensors")

    with ExitStack() as closing, pytest.raises(FormatError, match=r"layer-00002\.safetensors: .* damaged") as found:
        calibrate(job_for(MODEL, sample, work.with_name("s"), closing), progress=damage)
    assert found.value.hint == "remove the folder and start again"
    assert [item.name for item in work.parent.iterdir()] == ["s.work"]


def test_states_that_the_device_loses_are_computed_again(tmp_path: Path, sample: Sample, whole: bytes) -> None:
    """Seen when they are read back, before the note speaks of them."""

    def losing(fd: int, data: Buffer, offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink().name == "before-00003.f32":
            data = bytes([data[0] ^ 1, *data[1:]])
        return os.pwrite(fd, data, offset)

    with ExitStack() as closing, pytest.raises(WriteLost, match=r"before-00003\.f32"):
        calibrate(job_for(MODEL, sample, tmp_path / "s", closing), system=replace(SYSTEM, pwrite=losing))
    assert json.loads((tmp_path / "s.work" / "done.json").read_bytes())["layers"] == 2
    assert counted(MODEL, sample, tmp_path / "s") == whole


def other_layer(work: Path) -> None:
    """Sums of a layer in place of those of another, with a note that says so."""
    recorded(work, "layer-00001.safetensors", (work / "layer-00002.safetensors").read_bytes())


def other_text(work: Path) -> None:
    """Sums of the same layer, made from a text of another name."""
    path = work / "layer-00001.safetensors"
    found = open_statistics(path)
    made = found.provenance
    labels = tuple(SampleLabel(name=f"{one.name}!", tokens=one.tokens, texts=one.texts) for one in made.labels)
    other = Provenance(model=made.model, labels=labels, window=made.window, tool=made.tool)
    write_layer(work / "other", other, 1, found.layer(1))
    recorded(work, path.name, (work / "other").read_bytes())
    (work / "other").unlink()


def recorded(work: Path, name: str, data: bytes) -> None:
    (work / name).write_bytes(data)
    note = json.loads((work / "done.json").read_bytes())
    note["files"][name] = {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    (work / "done.json").write_text(json.dumps(note))


@pytest.mark.parametrize("change", [other_layer, other_text])
def test_sums_of_something_else(change: Callable[[Path], None], work: Path, sample: Sample) -> None:
    change(work)
    error = refused(work, sample)
    assert "layer-00001.safetensors: sums of another calibration or layer" in str(error)


def edited(**changes: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))

    return change


def fewer_files(path: Path) -> None:
    note = json.loads(path.read_bytes())
    del note["files"]["before-00003.f32"]
    path.write_text(json.dumps(note))


def other_length(path: Path) -> None:
    note = json.loads(path.read_bytes())
    note["files"]["before-00003.f32"]["bytes"] -= 4
    path.write_text(json.dumps(note))


NOTES = {
    "a folder": (as_folder, ""),
    "a link": (as_link, "link"),
    "a dangling link": (as_dangling_link, "link"),
    "a pipe": (as_pipe, ""),
    "empty": (lambda path: path.write_bytes(b""), ""),
    "no JSON": (cut, ""),
    "endless": (lambda path: os.truncate(path, 1 << 40), "too long"),
    "of an older release": (lambda path: path.write_text('{"layers": 4}'), "files"),
    "no layer": (edited(layers=0), "expected 1 to 7, found 0"),
    "too many layers": (edited(layers=8), "expected 1 to 7, found 8"),
    "a text for a number": (edited(layers="4"), "wrong type"),
    "other layers": (edited(layers=3), "names other files"),
    "a file too few": (fewer_files, "expected before-00003.f32"),
    "another length": (other_length, "another length"),
}


@pytest.mark.parametrize("kind", NOTES)
def test_a_note_that_cannot_be_gone_by(kind: str, work: Path, sample: Sample) -> None:
    change, message = NOTES[kind]
    change(work / "done.json")
    error = refused(work, sample)
    assert "done.json" in str(error)
    assert message in str(error)
    assert error.hint == "remove the folder and start again"  # type: ignore[attr-defined]


def test_states_are_not_needed_once_all_layers_are_done(tmp_path: Path, sample: Sample, whole: bytes) -> None:
    """Stopped between the last layer and the result."""
    work = interrupted(tmp_path / "s", sample, 6)
    with ExitStack() as closing, pytest.MonkeyPatch.context() as patch:
        patch.setattr("packer.calibrate.job.write_statistics", stopped)
        with pytest.raises(Stop):
            calibrate(job_for(MODEL, sample, tmp_path / "s", closing))
    note = json.loads((work / "done.json").read_bytes())
    assert note["layers"] == 7
    assert not [name for name in note["files"] if name.startswith("before")]
    for states in work.glob("before-*"):
        states.unlink()
    assert counted(MODEL, sample, tmp_path / "s") == whole
    assert not work.exists()
