"""Interrupted calibrations, what happens to their files, and the refusal to go on."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from formats.errors import FormatError
from packer.calibrate.job import calibrate
from packer.calibrate.texts import Sample
from packer.progress import Progress
from tests.packer.calibrate.test_calibrate import DATA, Stop, job_for

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


def stopped(*_: object, **__: object) -> None:
    raise Stop


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
