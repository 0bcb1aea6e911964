"""The folder for work in progress: what may be somebody else's stays, what a killed run left is used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from formats.errors import UsageError
from packer.calibrate.job import calibrate
from packer.calibrate.texts import Sample
from tests.packer.calibrate.test_calibrate import Stop, counted, job_for
from tests.packer.calibrate.unfinished import (
    MODEL,
    as_dangling_link,
    as_folder,
    as_link,
    as_pipe,
    cut,
    refused,
    stopped,
)


@pytest.mark.parametrize("name", ["lock", "identity.json.part"])
def test_files_of_somebody_else_stay(name: str, tmp_path: Path, sample: Sample) -> None:
    (tmp_path / "s.work").mkdir()
    (tmp_path / "s.work" / name).write_text("a text of mine")
    error = refused(tmp_path / "s.work", sample, UsageError)
    assert f"holds something else (found {name})" in str(error)
    assert (tmp_path / "s.work" / name).read_text() == "a text of mine"


@pytest.mark.parametrize("change", [as_folder, as_link, as_dangling_link, as_pipe])
@pytest.mark.parametrize("name", ["lock", "identity.json.part"])
def test_what_is_no_file_of_ours_stays(
    name: str, change: Callable[[Path], None], tmp_path: Path, sample: Sample
) -> None:
    (tmp_path / "s.work").mkdir()
    (tmp_path / "s.work" / name).touch()  # as an empty file it could be ours
    change(tmp_path / "s.work" / name)
    assert f"holds something else (found {name})" in str(refused(tmp_path / "s.work", sample, UsageError))


@pytest.mark.parametrize("name", ["thesis.txt", "done.json", "before-00000.f32", "identity.json"])
def test_a_lock_beside_files_of_somebody_else_stays(name: str, tmp_path: Path, sample: Sample) -> None:
    """What could be ours alone is not ours there."""
    (tmp_path / "s.work").mkdir()
    (tmp_path / "s.work" / name).write_text("{}")
    (tmp_path / "s.work" / "lock").write_text("4711\n")
    assert "something else" in str(refused(tmp_path / "s.work", sample, UsageError))
    assert (tmp_path / "s.work" / "lock").read_text() == "4711\n"
    assert (tmp_path / "s.work" / name).read_text() == "{}"


def test_a_lock_of_somebody_else_stays_in_work_of_ours(work: Path, sample: Sample) -> None:
    (work / "lock").write_text("of my bicycle")
    assert "holds something else (found lock)" in str(refused(work, sample, UsageError))
    assert (work / "lock").read_text() == "of my bicycle"


@pytest.mark.parametrize("change", [cut, as_folder, as_dangling_link, as_pipe])
def test_an_identity_that_cannot_be_read(change: Callable[[Path], None], work: Path, sample: Sample) -> None:
    change(work / "identity.json")
    error = refused(work, sample)
    assert "identity.json" in str(error)
    assert error.hint == "name another result, or remove the folder"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [None, "lock", "empty lock", "identity.json.part"])
def test_what_a_killed_run_left_is_used(
    name: str | None, begun: Path, tmp_path: Path, sample: Sample, whole: bytes
) -> None:
    work = tmp_path / "s.work"
    work.mkdir()
    if name == "identity.json.part":
        (work / name).write_bytes((begun / "identity.json").read_bytes()[:40])
    elif name:
        (work / "lock").write_text("" if name.startswith("empty") else "4711\n")
    assert counted(MODEL, sample, tmp_path / "s") == whole
    assert not work.exists()


@pytest.mark.parametrize("gone", [(), ("done.json",), ("done.json", "layer-00001.safetensors", "before-00003.f32")])
def test_a_run_killed_behind_its_result(gone: tuple[str, ...], tmp_path: Path, sample: Sample, whole: bytes) -> None:
    """The folder is named as long as the result is there; without it, the same command makes the same again."""
    with ExitStack() as closing, pytest.MonkeyPatch.context() as patch:
        patch.setattr("packer.calibrate.job._remove_work", stopped)
        with pytest.raises(Stop):
            calibrate(job_for(MODEL, sample, tmp_path / "s", closing))
    work = tmp_path / "s.work"
    for name in gone:
        (work / name).unlink()
    with ExitStack() as closing, pytest.raises(UsageError, match="output is there already") as found:
        calibrate(job_for(MODEL, sample, tmp_path / "s", closing))
    assert str(work) in str(found.value.hint)
    assert (tmp_path / "s").read_bytes() == whole
    (tmp_path / "s").unlink()
    assert counted(MODEL, sample, tmp_path / "s") == whole
    assert not work.exists()


def test_a_folder_left_beside_a_result_is_named(begun: Path, tmp_path: Path, sample: Sample) -> None:
    shutil.copytree(begun, tmp_path / "s.work")
    (tmp_path / "s").write_bytes(b"mine")
    with ExitStack() as closing, pytest.raises(UsageError, match="output is there already") as found:
        calibrate(job_for(MODEL, sample, tmp_path / "s", closing))
    assert f"if it is complete, {tmp_path / 's.work'} is left over" in str(found.value.hint)
    assert (tmp_path / "s").read_bytes() == b"mine"
    assert (tmp_path / "s.work" / "done.json").exists()
