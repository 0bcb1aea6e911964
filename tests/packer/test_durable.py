"""Writing durably: section 1.3 of the failure cases, and what each failing system call must lead to."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from formats.errors import EnvironmentProblem, UsageError
from packer.storage import durable
from packer.storage.durable import Extent
from packer.storage.system import SYSTEM, NoSpace, System, WriteLost
from tests.support.faults import Faults, failure

DATA = bytes(range(256)) * 40


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def test_a_file_is_written_whole_and_its_digest_returned(tmp_path: Path) -> None:
    path = tmp_path / "index.bin"
    assert durable.write_file(path, [DATA[:5], b"", DATA[5:]]) == (len(DATA), blake3(DATA).digest())
    assert path.read_bytes() == DATA
    assert names(tmp_path) == ["index.bin"]


def test_an_empty_file_is_a_file(tmp_path: Path) -> None:
    assert durable.write_file(tmp_path / "empty", []) == (0, blake3(b"").digest())
    assert (tmp_path / "empty").read_bytes() == b""


def test_the_steps_come_in_their_order(tmp_path: Path) -> None:
    faults = Faults()
    seen: list[tuple[int, bytes]] = []

    def intent(length: int, digest: bytes) -> None:
        faults.log.append("intent")
        seen.append((length, digest))
        assert names(tmp_path) == ["a.part"]

    durable.write_file(tmp_path / "a", [DATA], before_rename=intent, system=faults.system)
    assert seen == [(len(DATA), blake3(DATA).digest())]
    kept = [name for name in faults.log if name not in ("pread", "unlink")]
    assert kept == [
        *("open", "pwrite", "fsync", "close"),
        *("open", "drop_cache", "close"),  # afresh, past the cache
        *("intent", "rename"),
        *("open", "fsync", "close"),  # the directory
    ]


def test_wrt_03_short_and_interrupted_writes_are_continued(tmp_path: Path) -> None:
    interrupts = iter([True, False, True, True, False])

    def short(fd: int, data: Any, offset: int) -> int:
        if next(interrupts, False):
            raise InterruptedError(errno.EINTR, "interrupted")
        return os.pwrite(fd, data[:7], offset)

    path = tmp_path / "a"
    durable.write_file(path, [DATA], system=Faults(pwrite=short).system)
    assert path.read_bytes() == DATA


def test_wrt_03_interrupted_and_short_reads_are_continued(tmp_path: Path) -> None:
    interrupts = iter([True, False, True])

    def short(fd: int, length: int, offset: int) -> bytes:
        if next(interrupts, False):
            raise InterruptedError(errno.EINTR, "interrupted")
        return os.pread(fd, min(length, 1000), offset)

    assert durable.write_file(tmp_path / "a", [DATA], system=Faults(pread=short).system)[0] == len(DATA)


def test_wrt_03_no_call_is_longer_than_a_gibibyte(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def record(_fd: int, data: Any, offset: int) -> int:
        calls.append((offset, len(data)))
        return len(data)

    output = durable.create(tmp_path / "a")
    with mmap.mmap(-1, (2 << 30) + 5) as area, memoryview(area) as view:  # never touched, so it takes no memory
        durable.write_at(output, 64, view, system=Faults(pwrite=record).system)
    durable.abandon(output)
    assert calls == [(64, 1 << 30), (64 + (1 << 30), 1 << 30), (64 + (2 << 30), 5)]


def test_a_device_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="no more bytes"):
        durable.write_file(tmp_path / "a", [DATA], system=Faults(pwrite=lambda *_: 0).system)
    assert names(tmp_path) == []


def test_wrt_01_no_space_at_any_call(tmp_path: Path) -> None:
    """Each call in turn finds the device full: nothing half-made gets the name, and the next run succeeds."""
    for at in range(1, 100):
        folder = tmp_path / str(at)
        path = folder / "a"
        path.parent.mkdir()
        path.write_bytes(b"old")
        faults = Faults(at, errno.ENOSPC)
        error = failure(lambda folder=folder, faults=faults: make(folder, faults.system))
        if error is None:
            assert at > 10  # mkdir, unlink, rename, and what opens, writes and flushes files and directories
            return
        assert error.exit_code == 4
        assert "no space left" in error.line()
        assert "available" in error.line()
        assert "same command again" in (error.hint or "")
        renamed = "rename" in [name for name in faults.log if name != "available"][:-1]
        assert path.read_bytes() == (DATA if renamed else b"old")
        make(folder, SYSTEM)
        assert path.read_bytes() == DATA
        assert names(folder) == ["a", "sub"]
    pytest.fail("no run passed untouched")


def make(folder: Path, system: System) -> None:
    durable.make_directory(folder / "sub", system=system)
    durable.write_file(folder / "a", [DATA[:100], DATA[100:]], needed=len(DATA), system=system)


def test_wrt_01_bytes_needed_and_available_are_shown(tmp_path: Path) -> None:
    faults = Faults(2, errno.EDQUOT, watch=["pwrite"], available=lambda _path: 1234)
    with pytest.raises(NoSpace, match=r"quota.*at|at byte 100.*quota") as caught:
        durable.write_file(tmp_path / "a", [DATA[:100], DATA[100:]], needed=5_000_000, system=faults.system)
    assert caught.value.expected == "4999900 bytes"
    assert caught.value.found == "1234 bytes available"
    assert caught.value.where == str(tmp_path / "a.part")


def test_wrt_01_what_is_written_already_is_not_needed_again(tmp_path: Path) -> None:
    """The device takes 6000 bytes of a piece and is full then: the rest is what there must be room for."""

    def filling(fd: int, data: Any, offset: int) -> int:
        if offset == 6000:
            raise OSError(errno.ENOSPC, "full")
        return os.pwrite(fd, data[:3000], offset)

    for needed, missing in ((None, len(DATA) - 6000), (len(DATA), len(DATA) - 6000), (50_000, 44_000)):
        faults = Faults(pwrite=filling, available=lambda _path: 0)
        with pytest.raises(NoSpace, match="at byte 6000") as caught:
            durable.write_file(tmp_path / "a", [DATA], needed=needed, system=faults.system)
        assert caught.value.expected == f"{missing} bytes"
        assert caught.value.found == "0 bytes available"


def test_wrt_01_what_is_set_aside_already_is_not_needed_again(tmp_path: Path) -> None:
    """Some file systems keep what they found before space ran out."""

    def half(fd: int, offset: int, length: int) -> None:
        os.pwrite(fd, bytes(length // 2), offset)
        os.fsync(fd)  # its blocks count once they are there
        raise OSError(errno.ENOSPC, "full")

    output = durable.create(tmp_path / "a")
    with pytest.raises(NoSpace) as caught:
        durable.set_length(output, 2 << 20, system=Faults(allocate=half, available=lambda _path: 0).system)
    missing = int(str(caught.value.expected).removesuffix(" bytes"))
    assert (1 << 20) - 65536 <= missing <= 1 << 20
    durable.abandon(output)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_wrt_02_a_failed_flush_is_not_tried_again(tmp_path: Path, code: int) -> None:
    faults = Faults(1, code, watch=["fsync"])  # the second flush would succeed
    with pytest.raises(WriteLost):
        durable.write_file(tmp_path / "a", [DATA], system=faults.system)
    assert faults.log.count("fsync") == 1
    assert names(tmp_path) == []  # the temporary is gone, to be built again


def test_wrt_02_an_error_that_appears_on_close(tmp_path: Path) -> None:
    calls = iter(range(10))

    def failing(fd: int) -> None:
        os.close(fd)
        if next(calls) == 0:
            raise OSError(errno.EIO, "late")

    with pytest.raises(WriteLost, match="close"):
        durable.write_file(tmp_path / "a", [DATA], system=Faults(close=failing).system)
    assert names(tmp_path) == []


def test_rel_03_a_byte_changed_on_the_device_is_found_by_reading_back(tmp_path: Path) -> None:
    def lying(fd: int, length: int, offset: int) -> bytes:
        piece = bytearray(os.pread(fd, length, offset))
        if piece:
            piece[-1] ^= 1
        return bytes(piece)

    with pytest.raises(WriteLost, match="other bytes are here than were written"):
        durable.write_file(tmp_path / "a", [DATA], system=Faults(pread=lying).system)
    assert names(tmp_path) == []


def test_reading_back_leaves_the_cache_aside_and_covers_extents(tmp_path: Path) -> None:
    path = tmp_path / "bank"
    path.write_bytes(DATA)
    extents = [Extent(0, 10, blake3(DATA[:10]).digest()), Extent(4096, 100, blake3(DATA[4096:4196]).digest())]
    dropped: list[tuple[int, int]] = []
    faults = Faults(drop_cache=lambda _fd, offset, length: dropped.append((offset, length)))
    found = durable.read_back(path, extents, system=faults.system)
    assert found == blake3(DATA[:10] + DATA[4096:4196]).digest()
    assert dropped == [(0, 10), (4096, 100)]
    with pytest.raises(WriteLost, match="at byte 4096"):
        durable.read_back(path, [extents[0], Extent(4096, 100, bytes(32))])
    with pytest.raises(WriteLost, match="ends before"):
        durable.read_back(path, [Extent(len(DATA) - 1, 2, bytes(32))])


def test_a_read_error_while_reading_back_loses_the_file(tmp_path: Path) -> None:
    with pytest.raises(WriteLost, match="input/output"):
        durable.write_file(tmp_path / "a", [DATA], system=Faults(1, errno.EIO, watch=["pread"]).system)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "not permitted"),
        (errno.EPERM, "not permitted"),
        (errno.EFBIG, "largest size"),
        (errno.EIO, "input/output"),
        (errno.EMFILE, "open files"),
        (errno.ENAMETOOLONG, "name too long"),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwrite", "rename", "mkdir"])
def test_wrt_16_trouble_of_the_environment_names_the_path(tmp_path: Path, code: int, word: str, call: str) -> None:
    faults = Faults(1, code, watch=[call])
    with pytest.raises(EnvironmentProblem) as caught:
        make(tmp_path, faults.system)
    assert caught.value.exit_code == 4
    assert word in caught.value.line().lower()
    assert str(tmp_path) in caught.value.line()


def test_wrt_16_a_file_size_limit(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # Python ignores it by default; pytest may have changed that
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
        with pytest.raises(EnvironmentProblem, match="largest size"):
            durable.write_file(tmp_path / "a", [bytes(1 << 19)] * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == []


def test_a_leftover_is_in_the_way_of_create_and_replaced_by_write_file(tmp_path: Path) -> None:
    (tmp_path / "a.part").write_bytes(b"left over, and longer than what follows")
    with pytest.raises(UsageError, match=r"a\.part"):
        durable.create(tmp_path / "a")
    durable.write_file(tmp_path / "a", [b"new"])
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_link_in_the_place_of_the_temporary_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "a.part").symlink_to(victim)
    with pytest.raises(UsageError):
        durable.create(tmp_path / "a")
    with pytest.raises(EnvironmentProblem):
        durable.reopen(tmp_path / "a")
    durable.write_file(tmp_path / "a", [b"new"])
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "a").is_symlink()


def test_a_bank_is_continued_at_any_place(tmp_path: Path) -> None:
    path = tmp_path / "layer-00001.bank"
    assert durable.reopen(path) is None
    output = durable.create(path)
    durable.set_length(output, len(DATA))
    durable.write_at(output, 4096, DATA[4096:])
    durable.flush(output)
    durable.close(output)
    again = durable.reopen(path)
    assert again is not None
    durable.set_length(again, len(DATA))  # keeps what is there
    durable.write_at(again, 0, memoryview(DATA)[:4096])
    durable.flush(again)
    durable.close(again)
    assert durable.file_digest(again.temporary) == (len(DATA), blake3(DATA).digest())
    durable.publish(path)
    assert path.read_bytes() == DATA
    assert names(tmp_path) == [path.name]


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_that_cannot_set_space_aside(tmp_path: Path, code: int) -> None:
    output = durable.create(tmp_path / "a")
    durable.set_length(output, 10_000, system=Faults(1, code, watch=["allocate"]).system)
    durable.close(output)
    assert output.temporary.stat().st_size == 10_000


def test_wrt_01_space_is_missed_before_the_work(tmp_path: Path) -> None:
    output = durable.create(tmp_path / "a")
    with pytest.raises(NoSpace) as caught:
        durable.set_length(output, 10_000, system=Faults(1, errno.ENOSPC, watch=["allocate"]).system)
    assert caught.value.expected == "10000 bytes"
    durable.abandon(output)
    assert names(tmp_path) == []


def test_bytes_of_any_buffer_are_written(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<u2").reshape(2, 3)
    durable.write_file(tmp_path / "a", [values.data, bytearray(b"x")])
    assert (tmp_path / "a").read_bytes() == values.tobytes() + b"x"


def test_a_directory_is_made_once_and_durably(tmp_path: Path) -> None:
    faults = Faults()
    durable.make_directory(tmp_path / "d", system=faults.system)
    assert faults.log == ["mkdir", "open", "fsync", "close"]
    durable.make_directory(tmp_path / "d")
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="not a directory"):
        durable.make_directory(tmp_path / "f")


def test_an_interrupt_while_writing_leaves_no_temporary(tmp_path: Path) -> None:
    def pieces() -> Any:
        yield DATA
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        durable.write_file(tmp_path / "a", pieces())
    assert names(tmp_path) == []
