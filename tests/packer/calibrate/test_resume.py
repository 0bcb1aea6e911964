"""What an interrupted calibration goes on from is proven before anything is computed; files of others stay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from blake3 import blake3

from formats.errors import FormatError, UsageError
from packer.calibrate.job import calibrate
from packer.calibrate.texts import Sample
from packer.progress import Progress
from packer.statistics.file import open_statistics, write_layer
from packer.statistics.types import Provenance, SampleLabel
from tests.packer.calibrate.test_calibrate import DATA, Stop, counted, job_for, sample_of

MODEL = DATA / "k3-tiny"  # seven layers, the first without experts, blocks of three
DONE = 4
FILES = (
    "before-00000.f32",
    "before-00003.f32",
    "before-00004.f32",
    "layer-00001.safetensors",
    "layer-00002.safetensors",
    "layer-00003.safetensors",
)


def interrupted(out: Path, sample: Sample, layer: int = DONE) -> Path:
    """A run that ended as soon as ``layer`` had begun; its folder."""

    def stop(progress: Progress) -> None:
        if progress.what == f"layer {layer}":
            raise Stop

    with ExitStack() as closing, pytest.raises(Stop):
        calibrate(job_for(MODEL, sample, out, closing), progress=stop)
    return out.with_name(out.name + ".work")


@pytest.fixture(scope="module")
def sample() -> Sample:
    return sample_of(500)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> Path:
    return interrupted(tmp_path_factory.mktemp("begun") / "s", sample)


@pytest.fixture
def work(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path / "s.work")
    return tmp_path / "s.work"


def refused(work: Path, sample: Sample, kind: type[Exception] = FormatError) -> Exception:
    """The error of the same command again, which is to come before any layer is computed."""
    seen: list[Progress] = []
    before = {item.name: item.lstat().st_mtime_ns for item in work.iterdir()}
    with ExitStack() as closing, pytest.raises(kind) as found:
        calibrate(job_for(MODEL, sample, work.with_name("s"), closing), progress=seen.append)
    assert not seen
    assert not work.with_name("s").exists()
    assert {item.name: item.lstat().st_mtime_ns for item in work.iterdir()} == before
    return found.value


def test_the_note_has_length_and_digest_of_what_the_rest_needs(work: Path) -> None:
    note = json.loads((work / "done.json").read_bytes())
    assert note["layers"] == DONE
    assert sorted(note["files"]) == sorted(FILES)
    for name, proof in note["files"].items():
        data = (work / name).read_bytes()
        assert proof == {"bytes": len(data), "blake3": blake3(data).hexdigest()}
    states = 7 * 24 * json.loads((MODEL / "config.json").read_bytes())["text_config"]["hidden_size"] * 4
    assert note["files"]["before-00003.f32"]["bytes"] == states


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthened(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_link(path: Path) -> None:
    moved = path.parent.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


def as_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


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


def test_states_are_not_needed_once_all_layers_are_done(tmp_path: Path, sample: Sample) -> None:
    """Stopped between the last layer and the result."""
    reference = counted(MODEL, sample, tmp_path / "reference")
    work = interrupted(tmp_path / "s", sample, 6)
    with ExitStack() as closing, pytest.MonkeyPatch.context() as patch:
        patch.setattr("packer.calibrate.job.write_statistics", _stopped)
        with pytest.raises(Stop):
            calibrate(job_for(MODEL, sample, tmp_path / "s", closing))
    note = json.loads((work / "done.json").read_bytes())
    assert note["layers"] == 7
    assert not [name for name in note["files"] if name.startswith("before")]
    assert counted(MODEL, sample, tmp_path / "s") == reference
    assert not work.exists()


def _stopped(*_: object, **__: object) -> None:
    raise Stop


@pytest.mark.parametrize("name", ["lock", "identity.json.part"])
def test_files_of_somebody_else_stay(name: str, tmp_path: Path, sample: Sample) -> None:
    (tmp_path / "s.work").mkdir()
    (tmp_path / "s.work" / name).write_text("a text of mine")
    error = refused(tmp_path / "s.work", sample, UsageError)
    assert f"holds something else (found {name})" in str(error)
    assert (tmp_path / "s.work" / name).read_text() == "a text of mine"


@pytest.mark.parametrize("name", [None, "lock"])
def test_what_a_killed_run_left_is_used(name: str | None, tmp_path: Path, sample: Sample) -> None:
    (tmp_path / "s.work").mkdir()
    if name:
        (tmp_path / "s.work" / name).write_text("4711\n")
    counted(MODEL, sample, tmp_path / "s")
    assert not (tmp_path / "s.work").exists()


def test_a_folder_left_beside_a_result_is_named(begun: Path, tmp_path: Path, sample: Sample) -> None:
    shutil.copytree(begun, tmp_path / "s.work")
    (tmp_path / "s").write_bytes(b"mine")
    with ExitStack() as closing, pytest.raises(UsageError, match="output is there already") as found:
        calibrate(job_for(MODEL, sample, tmp_path / "s", closing))
    assert f"if it is complete, {tmp_path / 's.work'} is left over" in str(found.value.hint)
    assert (tmp_path / "s").read_bytes() == b"mine"
    assert (tmp_path / "s.work" / "done.json").exists()
