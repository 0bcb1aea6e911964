"""Where a new file may be written, and that it comes there whole, touching nothing that is not its own."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from formats.errors import EnvironmentProblem, MoepackError, UsageError
from packer.storage.new_file import check_free, write_all_new, write_new
from packer.storage.system import System, WriteLost
from tests.support.containers import build_container
from tests.support.faults import Call, Faults, failure, wrapped
from tests.support.powercut import WAYS, Disk, PowerCut

DATA = bytes(range(256)) * 40
NO_LINKS = (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


def names(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir())


def refusing(code: int) -> Call:
    """``link`` on a file system without hard links."""

    def link(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    return link


WAYS_TO_PUBLISH = pytest.mark.parametrize("link", [os.link, refusing(errno.EPERM)], ids=["links", "no links"])


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
        for refuse in (check_free, lambda path: write_new(path, [DATA])):
            with pytest.raises(UsageError, match=what):
                refuse(path)


def test_a_name_is_as_long_as_its_temporary_allows(tmp_path: Path) -> None:
    """14 bytes less than the file system's limit: ``.12345678.part`` is added. Bytes count, not characters."""
    longest = os.pathconf(tmp_path, "PC_NAME_MAX") - 14
    for name in ("a" * longest, "é" * (longest // 2)):
        write_new(tmp_path / name, [DATA])
        assert (tmp_path / name).read_bytes() == DATA
    for name in ("a" * (longest + 1), "é" * (longest // 2 + 1), "a" * (longest + 14), "a" * (longest + 15)):
        for refuse in (check_free, lambda path: write_new(path, [DATA])):
            with pytest.raises(UsageError, match=rf"name is too long \(expected at most {longest} bytes, found"):
                refuse(tmp_path / name)
    assert len(names(tmp_path)) == 2


def test_a_folder_that_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before any work is done; the system is asked, for to an administrator permissions say nothing."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    with pytest.raises(EnvironmentProblem, match="cannot create files here: not permitted"):
        check_free(tmp_path / "new")


@WAYS_TO_PUBLISH
def test_a_file_is_written_whole_and_its_digest_returned(link: Call, tmp_path: Path) -> None:
    found = write_new(tmp_path / "a", [DATA[:5], b"", DATA[5:]], system=System(link=link))
    assert found == (len(DATA), blake3(DATA).digest())
    assert (tmp_path / "a").read_bytes() == DATA
    assert (tmp_path / "a").stat().st_nlink == 1
    assert names(tmp_path) == ["a"]


WRITTEN = ["open", "pwrite", "fsync", "close", "open", "drop_cache", "close"]  # read back afresh, past the cache
FLUSHED = ["open", "fsync", "close"]  # the folder


def test_the_steps_come_in_their_order(tmp_path: Path) -> None:
    faults = Faults()
    write_new(tmp_path / "a", [DATA], system=faults.system)
    kept = [name for name in faults.log if name != "pread"]
    assert kept == [*WRITTEN, "open", "link", *FLUSHED, "close", "unlink"]


def test_the_steps_of_several_files_and_of_no_links(tmp_path: Path) -> None:
    """Both are complete before the first one is published."""
    faults = Faults(link=refusing(errno.EOPNOTSUPP))
    write_all_new({tmp_path / "a": DATA, tmp_path / "b": b"b"}, system=faults.system)
    kept = [name for name in faults.log if name != "pread"]
    one = ["open", "link", "open", "rename", "close"]
    assert kept == [*WRITTEN, *WRITTEN, *one, *one, *FLUSHED, "close", "close", "unlink", "unlink"]
    assert [(tmp_path / name).read_bytes() for name in names(tmp_path)] == [DATA, b"b"]


@WAYS_TO_PUBLISH
def test_files_of_the_user_s_with_names_like_a_temporary_s_stay(link: Call, tmp_path: Path) -> None:
    mine = ("a.part", "a.0000.part", "a.00000000.part")
    for name in mine:
        (tmp_path / name).write_text(name)
    write_new(tmp_path / "a", [DATA], system=System(link=link))
    assert names(tmp_path) == sorted(("a", *mine))
    assert all((tmp_path / name).read_text() == name for name in mine)


def test_even_the_same_random_name_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda count: "0" * 2 * count)
    (tmp_path / "a.00000000.part").write_text("mine")
    with pytest.raises(EnvironmentProblem, match=r"a\.00000000\.part: cannot create: File exists"):
        write_new(tmp_path / "a", [DATA])
    assert names(tmp_path) == ["a.00000000.part"]
    assert (tmp_path / "a.00000000.part").read_text() == "mine"


@WAYS_TO_PUBLISH
@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_a_name_that_is_taken_while_we_write_stays(kind: str, link: Call, tmp_path: Path) -> None:
    path = tmp_path / "a"

    def take() -> Iterator[bytes]:
        yield DATA
        if kind == "file":
            path.write_bytes(b"mine")
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(tmp_path / "nowhere")

    with pytest.raises(UsageError, match="output is there already") as refused:
        write_new(path, take(), system=System(link=link))
    assert (refused.value.where, refused.value.hint) == (str(path), "remove it or choose another name")
    assert names(tmp_path) == ["a"]
    assert path.is_symlink() if kind == "dangling link" else kind == "folder" or path.read_bytes() == b"mine"


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_is_taken_at_the_last_moment_stays(links: bool, tmp_path: Path) -> None:
    path = tmp_path / "a"

    def link(source: Path, target: Path) -> None:
        path.write_bytes(b"mine")
        return (os.link if links else refusing(errno.EPERM))(source, target)

    with pytest.raises(UsageError, match="output is there already"):
        write_new(path, [DATA], system=System(link=link))
    assert names(tmp_path) == ["a"]
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("how", ["replaced", "written into"])
def test_a_reserved_name_that_another_takes_nevertheless_stays(how: str, tmp_path: Path) -> None:
    """Without hard links: another program puts its own file in the place of the reservation, or writes into it."""
    path = tmp_path / "a"

    def opening(name: Path, flags: int, mode: int) -> int:
        fd = os.open(name, flags, mode)
        if name == path:
            if how == "replaced":
                path.unlink()
            path.write_bytes(b"mine")
        return fd

    with pytest.raises(UsageError, match="output is there already"):
        write_new(path, [DATA], system=System(open=opening, link=refusing(errno.EPERM)))
    assert names(tmp_path) == ["a"]
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("code", NO_LINKS)
def test_file_systems_without_links(code: int, tmp_path: Path) -> None:
    write_new(tmp_path / "a", [DATA], system=System(link=refusing(code)))
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == DATA
    with pytest.raises(UsageError, match="output is there already"):
        write_new(tmp_path / "a", [b"another"], system=System(link=refusing(code)))
    assert (tmp_path / "a").read_bytes() == DATA


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path) -> None:
    """Over a network the request is repeated, and finds what the first one made."""
    write_new(tmp_path / "a", [DATA], system=Faults(1, errno.EEXIST, ["link"], late=True).system)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == DATA


CALLS = ("open", "pwrite", "pread", "fsync", "close", "rename", "link")


@WAYS_TO_PUBLISH
@pytest.mark.parametrize(
    ("code", "how"),
    [(errno.ENOSPC, {}), (errno.EIO, {}), (errno.EIO, {"sticky": True}), (errno.EROFS, {"sticky": True})],
)
def test_wrt_01_any_call_that_fails_leaves_all_or_nothing(
    code: int, how: dict[str, Any], link: Call, tmp_path: Path
) -> None:
    failed = 0
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        contents = {folder / "a": DATA, folder / "b": b"b" * 1000}
        faults = Faults(at, code, CALLS, link=link, **how)
        error = failure(lambda contents=contents, faults=faults: write_all_new(contents, system=faults.system))
        if error is not None:
            failed += 1
            assert str(folder) in error.line()
            assert names(folder) == []
            write_all_new(contents)  # as the hint says
        assert {path: path.read_bytes() for path in folder.iterdir()} == contents
        if faults.count < at:
            break
    assert failed > 20


@pytest.mark.parametrize("call", ["link", "rename"])
def test_what_happened_and_is_reported_as_failed_is_taken_back(call: str, tmp_path: Path) -> None:
    link = os.link if call == "link" else refusing(errno.EPERM)
    with pytest.raises(EnvironmentProblem, match="input/output"):
        write_new(tmp_path / "a", [DATA], system=Faults(1, errno.EIO, [call], late=True, link=link).system)
    assert names(tmp_path) == []


def test_a_temporary_that_cannot_be_deleted_in_the_end_is_but_a_second_name(tmp_path: Path) -> None:
    write_new(tmp_path / "a", [DATA], system=Faults(1, errno.EIO, ["unlink"]).system)
    first, second = tmp_path.iterdir()
    assert first.samefile(second)


@WAYS_TO_PUBLISH
def test_an_interrupt_at_any_call_leaves_all_or_nothing(link: Call, tmp_path: Path) -> None:
    interrupted = 0
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        count = 0

        def around(name: str, call: Call, arguments: tuple[Any, ...], at: int = at) -> Any:
            nonlocal count
            count += name != "unlink"
            if name != "unlink" and count == at:
                if name == "close":
                    call(*arguments)
                raise KeyboardInterrupt
            return call(*arguments)

        try:
            write_all_new({folder / "a": DATA, folder / "b": b"b"}, system=wrapped(around, link=link))
        except KeyboardInterrupt:
            interrupted += 1
            assert names(folder) in ([], ["a", "b"])
        else:
            break
    assert interrupted > 20


def test_a_byte_changed_on_the_device_is_found_by_reading_back(tmp_path: Path) -> None:
    def lying(fd: int, length: int, offset: int) -> bytes:
        return os.pread(fd, length, offset).replace(b"\x07", b"\x06")

    with pytest.raises(WriteLost, match="other bytes are here than were written"):
        write_new(tmp_path / "a", [DATA], system=System(pread=lying))
    assert names(tmp_path) == []


@WAYS_TO_PUBLISH
def test_a_second_file_that_cannot_be_had_leaves_the_first_unwritten(link: Call, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for system in (
        Faults(2, errno.ENOSPC, ["pwrite"], link=link).system,
        System(open=taking(second), link=link),
    ):
        with pytest.raises(MoepackError):
            write_all_new({first: DATA, second: b"b"}, system=system)
        assert [name for name in names(tmp_path) if name != "b"] == []
    assert second.read_bytes() == b"mine"


def taking(path: Path) -> Callable[[Path, int, int], int]:
    """``open`` beside another program, which takes a name once both files are complete."""
    count = itertools.count(1)

    def opening(name: Path, flags: int, mode: int) -> int:
        if next(count) == 5:
            path.write_bytes(b"mine")
        return os.open(name, flags, mode)

    return opening


@pytest.mark.parametrize("links", [True, False])
def test_of_several_writers_one_wins(links: bool, tmp_path: Path) -> None:
    """All are complete before any of them publishes."""
    writers = 8
    gate = threading.Barrier(writers)
    outcomes: dict[int, MoepackError | None] = {}

    def link(source: Path, target: Path) -> None:
        gate.wait(timeout=60)
        return (os.link if links else refusing(errno.EPERM))(source, target)

    def write(number: int) -> None:
        try:
            write_new(tmp_path / "a", [bytes([number]) * 100_000], system=System(link=link))
            outcomes[number] = None
        except MoepackError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number, error in outcomes.items() if error is None]
    assert len(outcomes) == writers
    assert {error.what for error in outcomes.values() if error is not None} == {"output is there already"}
    assert (tmp_path / "a").read_bytes() == bytes([winner]) * 100_000
    assert names(tmp_path) == ["a"]


@WAYS_TO_PUBLISH
def test_rel_02_after_a_power_cut_the_name_means_complete_bytes(link: Call, tmp_path: Path) -> None:
    """Or nothing; without hard links it may be the empty reservation."""
    seen = set()
    for at, way in ((at, way) for at in itertools.count(1) for way in WAYS):
        live, found = tmp_path / f"{at}-{way}", tmp_path / f"{at}-{way}-found"
        live.mkdir()
        disk = Disk(live, found, at, way, link=link)
        try:
            write_new(live / "a", [DATA[:5000], DATA[5000:]], system=disk.system)
        except PowerCut:
            left = (found / "a").read_bytes() if (found / "a").exists() else None
            assert left in ((None, DATA) if link is os.link else (None, b"", DATA)), (at, way)
            seen.add(left)
        else:
            break
    assert {None, DATA} <= seen
