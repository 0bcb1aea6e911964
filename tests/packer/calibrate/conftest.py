"""Interrupted calibrations, made once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from packer.calibrate.texts import Sample
from tests.packer.calibrate.test_calibrate import counted, sample_of
from tests.packer.calibrate.unfinished import MODEL, interrupted


@pytest.fixture(scope="package")
def sample() -> Sample:
    return sample_of(500)


@pytest.fixture(scope="package")
def begun(tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> Path:
    return interrupted(tmp_path_factory.mktemp("begun") / "s", sample)


@pytest.fixture(scope="package")
def others(tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> Path:
    """Work on the same windows in another order, as far advanced."""
    return interrupted(tmp_path_factory.mktemp("others") / "s", replace(sample, windows=sample.windows[::-1]))


@pytest.fixture(scope="package")
def whole(tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> bytes:
    """What a run makes that nothing disturbs."""
    return counted(MODEL, sample, tmp_path_factory.mktemp("whole") / "s")


@pytest.fixture
def work(begun: Path, tmp_path: Path) -> Path:
    shutil.copytree(begun, tmp_path / "s.work")
    return tmp_path / "s.work"
