"""Direct reads, and what replaces them: every answer that a system may give to a read, from a script or for real."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from formats.errors import EnvironmentProblem, FormatError
from formats.files import MAX_CALL_BYTES
from runtime.stream.direct import Calls, DirectReads, StreamFile
from runtime.stream.memory import Area

PAGE = 4096
DATA = np.random.default_rng(0).bytes(8 * PAGE)
Read = Callable[[int, Sequence[memoryview], int], int]


class Script:
    """System calls that are noted and may be answered otherwise.

    Attributes:
        preadv: (bytes asked for, offset) of each read.
        direct: what direct mode was set to.
        forgotten: (offset, length) of what was dropped from the cache.
    """

    def __init__(self, *, read: Read = os.preadv, refuse_direct: bool = False) -> None:
        self._read, self._refuse = read, refuse_direct
        self.reads: list[tuple[int, int]] = []
        self.direct: list[bool] = []
        self.forgotten: list[tuple[int, int]] = []

    def preadv(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.reads.append((len(views[0]), offset))
        return self._read(fd, views, offset)

    def set_direct(self, fd: int, direct: bool) -> None:
        if self._refuse and direct:
            raise OSError(errno.EINVAL, "refused")
        self.direct.append(direct)

    def forget(self, fd: int, offset: int, length: int) -> None:
        self.forgotten.append((offset, length))

    @property
    def calls(self) -> Calls:
        return Calls(self.preadv, self.set_direct, self.forget)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "bank").write_bytes(DATA)
    return tmp_path / "bank"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., tuple[DirectReads, StreamFile]]]:
    """Opens the file with the calls of a script, and closes everything afterwards."""
    sets = []

    def open_with(script: Script | None = None, path: Path = path) -> tuple[DirectReads, StreamFile]:
        reads = DirectReads(script.calls) if script else DirectReads()
        sets.append(reads)
        return reads, reads.open(os.open(path, os.O_RDONLY), path.name)

    yield open_with
    for reads in sets:
        reads.close()


def read(file: StreamFile, offset: int = PAGE, length: int = 4 * PAGE) -> bytes:
    area = Area(length)
    file.read(offset, area.view[:length], where="bank: layer 1 expert 2")
    return bytes(area.view[:length])


@pytest.mark.parametrize("folder", ["here", "shm"])
def test_real_reads(folder: str, tmp_path: Path, opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    if folder == "shm" and not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    path = Path("/dev/shm" if folder == "shm" else tmp_path) / f"moepack-{os.getpid()}.bin"
    path.write_bytes(DATA)
    try:
        _, file = opened(path=path)
        assert read(file) == DATA[PAGE : 5 * PAGE]
        assert read(file, 0, len(DATA)) == DATA
        assert read(file, 7 * PAGE, PAGE) == DATA[7 * PAGE :]
    finally:
        path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the flag")
def test_the_flag_is_really_set(path: Path) -> None:
    import fcntl

    fd = os.open(path, os.O_RDONLY)
    reads = DirectReads()
    reads.open(fd, "bank")
    is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
    assert is_direct == (not reads.notes)
    reads.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    reads.close()  # a second time does nothing


def test_one_trial_a_file_system(path: Path, opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    script = Script()
    reads, file = opened(script)
    assert script.reads == [(PAGE, PAGE)]
    reads.open(os.open(path, os.O_RDONLY), "another")
    assert len(script.reads) == 1
    assert read(file) == DATA[PAGE : 5 * PAGE]
    assert script.reads[1:] == [(4 * PAGE, PAGE)]
    assert script.forgotten == []
    assert reads.notes == ()


def refusing(fd: int, views: Sequence[memoryview], offset: int) -> int:
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_refused_when_asked(path: Path, opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    script = Script(refuse_direct=True)
    reads, file = opened(script)
    reads.open(os.open(path, os.O_RDONLY), "another")
    assert read(file) == DATA[PAGE : 5 * PAGE]
    assert script.forgotten == [(PAGE, 4 * PAGE)]  # what was read leaves the cache
    assert len(reads.notes) == 1
    assert "bank" in reads.notes[0]


def test_refused_at_the_first_transfer(path: Path, opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    first = iter([refusing])
    script = Script(read=lambda *call: next(first, os.preadv)(*call))
    reads, file = opened(script)
    reads.open(os.open(path, os.O_RDONLY), "another")
    assert script.direct == [True, False]
    assert read(file) == DATA[PAGE : 5 * PAGE]
    assert len(reads.notes) == 1
    assert script.forgotten == [(PAGE, 4 * PAGE)]


def test_refused_later(opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    """A file whose device refuses although the file system does not is read by the cache, and that is said."""
    answers = iter([os.preadv, refusing])
    script = Script(read=lambda *call: next(answers, os.preadv)(*call))
    reads, file = opened(script)
    assert read(file) == read(file) == DATA[PAGE : 5 * PAGE]
    assert script.direct == [True, True, False]
    assert len(reads.notes) == 1


def test_short_reads_and_interruptions(opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    """Whole pages go on direct; what ends within a page goes on buffered, since no direct read may start there."""
    lengths = iter([PAGE, 2 * PAGE, None, 100, PAGE])

    def short(fd: int, views: Sequence[memoryview], offset: int) -> int:
        length = next(lengths, 1 << 30)
        if length is None:
            raise InterruptedError
        return os.preadv(fd, [views[0][:length]], offset)

    script = Script(read=short)
    reads, file = opened(script)
    assert read(file) == DATA[PAGE : 5 * PAGE]
    rest = 2 * PAGE - 100
    assert script.reads[1:] == [
        (4 * PAGE, PAGE),
        (2 * PAGE, 3 * PAGE),
        (2 * PAGE, 3 * PAGE),
        (rest, 3 * PAGE + 100),
        (rest - PAGE, 4 * PAGE + 100),
    ]
    assert script.direct == [True, True, False]
    assert len(reads.notes) == 1


@pytest.mark.parametrize("end", [2 * PAGE, 2 * PAGE + 7])
def test_a_file_that_was_cut(end: int, path: Path, opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    _, file = opened()
    os.truncate(path, end)
    with pytest.raises(FormatError, match="ends early") as caught:
        read(file)
    assert (caught.value.offset, caught.value.where) == (end, "bank: layer 1 expert 2")
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(errno.EIO, FormatError, 3), (errno.ENOMEM, EnvironmentProblem, 4)]
)
def test_a_device_that_fails(
    number: int, kind: type[Exception], code: int, opened: Callable[..., tuple[DirectReads, StreamFile]]
) -> None:
    def fail(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views[0]) > PAGE and offset == PAGE:
            return os.preadv(fd, [views[0][:PAGE]], offset)
        if offset == 2 * PAGE:
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, views, offset)

    _, file = opened(Script(read=fail))
    with pytest.raises(kind, match="layer 1 expert 2") as caught:
        read(file)
    assert (caught.value.offset, caught.value.exit_code) == (2 * PAGE, code)  # type: ignore[attr-defined]


def test_long_reads_are_split(opened: Callable[..., tuple[DirectReads, StreamFile]]) -> None:
    """One call transfers 2,147,479,552 bytes at the most, so none asks for more than 1 GiB."""
    script = Script(read=lambda fd, views, offset: len(views[0]))
    _, file = opened(script)
    length = 2 * MAX_CALL_BYTES + PAGE
    file.read(0, Area(length).view[:length], where="bank")
    assert script.reads[1:] == [(1 << 30, 0), (1 << 30, 1 << 30), (PAGE, 2 << 30)]


def test_nobody_reads_while_another_thread_turns_direct_mode_off(
    opened: Callable[..., tuple[DirectReads, StreamFile]],
) -> None:
    """Two reads that direct mode refuses: the second one comes while the first is turning it off, and waits for it."""
    leaving, gate = threading.Event(), threading.Event()

    class Slow(Script):
        def set_direct(self, fd: int, direct: bool) -> None:
            if not direct:
                leaving.set()
                assert gate.wait(20)
            super().set_direct(fd, direct)

    def read(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if script.direct[-1] and len(views[0]) % PAGE:
            raise OSError(errno.EINVAL, "not a whole page")
        return os.preadv(fd, views, offset)

    script = Slow(read=read)
    _, file = opened(script)
    found: list[bytes | BaseException] = []

    def get() -> None:
        target = bytearray(100)
        try:
            file.read(0, memoryview(target), where="bank")
            found.append(bytes(target))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=get) for _ in range(2)]
    threads[0].start()
    assert leaving.wait(20)
    threads[1].start()
    time.sleep(0.05)
    gate.set()
    for thread in threads:
        thread.join()
    assert found == [DATA[:100]] * 2
