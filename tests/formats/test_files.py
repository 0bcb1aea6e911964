"""Files that a user names: what is none is told as that, and a file is read to its end."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from formats.errors import FormatError, UsageError
from formats.files import named_bytes, open_directory
from formats.headers import header_length


def test_a_file_that_says_it_is_empty_is_read_to_its_end() -> None:
    path = Path("/proc/self/cmdline")
    if not path.exists():
        pytest.skip("a system without /proc")
    assert path.stat().st_size == 0
    assert named_bytes(path, at_most=1 << 20) == path.read_bytes() != b""
    with pytest.raises(UsageError, match=r"file is too long .*at most 3 bytes, found more"):
        named_bytes(path, at_most=3)


@pytest.mark.parametrize("length", [0, 1, 65536, 200_000])
def test_all_bytes_and_no_more_than_allowed(length: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(length))
    assert named_bytes(path, at_most=length) == path.read_bytes()
    if length:
        with pytest.raises(UsageError, match=f"too long .*at most {length - 1} bytes, found {length}"):
            named_bytes(path, at_most=length - 1)


def test_a_file_that_grows_meanwhile_is_bounded_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(200_000))
    monkeypatch.setattr("formats.files.file_bytes", lambda fd: 10)  # what it had when it was asked for
    assert named_bytes(path, at_most=200_000) == bytes(200_000)
    with pytest.raises(UsageError, match=r"file is too long .*at most 199999 bytes, found more"):
        named_bytes(path, at_most=199_999)


def test_headers_need_more_than_their_length() -> None:
    for size in (0, 7, 9):
        with pytest.raises(FormatError, match=rf"too short for a header .expected 10 bytes or more, found {size}."):
            header_length((2).to_bytes(8, "little"), size, name="shard")
    assert header_length((2).to_bytes(8, "little"), 10, name="shard") == 2


def test_names_that_no_file_has(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    for name in ("none", "x" * 300, "loop", "file/below"):
        with pytest.raises(UsageError, match="no such file"):
            named_bytes(tmp_path / name, at_most=9)
    for name in ("none", "x" * 300, "loop"):
        with pytest.raises(UsageError, match="no such directory"):
            open_directory(tmp_path / name, where="folder")


def test_what_is_no_regular_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket has to be short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
        os.mkfifo("pipe")
        for name in ("socket", "pipe", "."):
            with pytest.raises(UsageError, match="not a regular file"):
                named_bytes(Path(name), at_most=9)
