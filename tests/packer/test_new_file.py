"""Where a new file may be written, and where not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from formats.errors import EnvironmentProblem, UsageError
from packer.storage.new_file import check_free
from tests.support.containers import build_container


def test_a_free_name(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")  # not only containers have one
    check_free(tmp_path / "new")


def test_names_that_are_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    container = build_container(tmp_path / "model.moepack")
    for path, what in (
        (tmp_path / "link", "output is there already"),
        (container, "output is there already"),
        (tmp_path / "folder" / "new", "no such folder"),
        (container / "new", "output would lie in a container"),
    ):
        with pytest.raises(UsageError, match=what):
            check_free(path)


def test_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any work is done; the system is asked, for to an administrator permissions say nothing."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    with pytest.raises(EnvironmentProblem, match="cannot create files here: not permitted"):
        check_free(tmp_path / "new")
