"""The saved file: read by the safetensors library, complete or not there, never over another."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.errors import EnvironmentProblem, UsageError
from packer.running.logits_file import Table, new_logits_file
from packer.storage.system import SYSTEM, System, WriteLost

TABLES = (Table("input_ids", "I64", (3,)), Table("logits", "F32", (3, 2)))
IDS, LOGITS = np.array([7, 1 << 40, 0]), np.array([[0.5, -1], [3e38, 2], [1e-45, 0]], np.float32)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def write(path: Path, system: System = SYSTEM) -> None:
    with new_logits_file(path, TABLES, system=system) as file:
        file.write("logits", 1, LOGITS[1:])
        file.write("input_ids", 0, IDS)
        file.write("logits", 0, LOGITS[:1])


def test_safetensors_reads_what_was_written_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path)
    found = load_file(path)
    assert set(found) == {"input_ids", "logits"}
    np.testing.assert_array_equal(found["input_ids"], IDS)
    assert found["logits"].tobytes() == LOGITS.tobytes()
    assert names(tmp_path) == ["a.safetensors"]
    assert path.read_bytes()[8 + int.from_bytes(path.read_bytes()[:8], "little") :][:8] == IDS[:1].tobytes()
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_stays_of_an_unfinished_file(error: type[BaseException], tmp_path: Path) -> None:
    def fail() -> None:
        with new_logits_file(tmp_path / "a", TABLES) as file:
            file.write("input_ids", 0, IDS)
            assert names(tmp_path) != []
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


def test_existing_files_are_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="output is there already"):
        write(path)
    path.unlink()
    with pytest.raises(UsageError, match="output is there already"), new_logits_file(path, TABLES):
        path.write_bytes(b"came meanwhile")
    assert path.read_bytes() == b"came meanwhile"
    assert names(tmp_path) == ["a"]
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="output is there already"):
        write(tmp_path / "link")


def no_links(source: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "not permitted")


def test_files_with_names_like_a_temporary_s_stay(tmp_path: Path) -> None:
    mine = {f"a{middle}.part": middle.encode() for middle in ("", f".{os.getpid()}", ".00000000")}
    for name, data in mine.items():
        (tmp_path / name).write_bytes(data)
    write(tmp_path / "a")
    (tmp_path / "a").unlink()
    write(tmp_path / "a", System(link=no_links))
    (tmp_path / "a").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == mine


def test_names_taken_meanwhile_stay_without_hard_links_too(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with (
        pytest.raises(UsageError, match="output is there already"),
        new_logits_file(path, TABLES, system=System(link=no_links)),
    ):
        path.write_bytes(b"came meanwhile")
    assert path.read_bytes() == b"came meanwhile"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("place", [3, -1])
def test_bytes_that_the_device_changed_are_not_published(place: int, tmp_path: Path) -> None:
    """In the header, and in the last row of all, which was not written last."""

    def changing(fd: int, length: int, offset: int) -> bytes:
        data = bytearray(os.pread(fd, length, offset))
        if (offset == 0) == (place == 3):
            data[place] ^= 1
        return bytes(data)

    with pytest.raises(WriteLost, match="other bytes are here than were written"):
        write(tmp_path / "a", System(pread=changing))
    assert names(tmp_path) == []


def test_absent_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        write(tmp_path / "absent" / "a")


def test_full_devices_show_at_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EnvironmentProblem, match="no space left"):
        write(tmp_path / "a")
    assert names(tmp_path) == []


def test_rows_outside_of_their_tensor_are_a_programming_error(tmp_path: Path) -> None:
    for first, rows in ((2, LOGITS[:2]), (0, LOGITS[:, :1]), (-1, LOGITS[:1])):
        with pytest.raises(ValueError, match="rows of logits"), new_logits_file(tmp_path / "a", TABLES) as file:
            file.write("logits", first, rows)
