"""What all fault loops stand on: memory instead of a disk where there is some, and one small checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.memory import memory_folder
from tests.support.packs import Ground, prepare


@pytest.fixture(scope="session")
def scratch_root() -> Iterator[Path]:
    """A folder in memory: thousands of packs flush dozens of files each, and what fails is made up anyway."""
    with memory_folder() as folder:
        yield Path(folder)


@pytest.fixture
def scratch(scratch_root: Path) -> Iterator[Path]:
    """An empty folder for one test."""
    with tempfile.TemporaryDirectory(dir=scratch_root) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def ground(scratch_root: Path) -> Ground:
    """The checkpoint and its undisturbed pack; tests only read it."""
    return prepare(scratch_root / "ground")
