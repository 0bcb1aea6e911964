"""The journal: torn ends, damage, identities, full devices, and the lock."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import EnvironmentProblem, FormatError, UsageError
from packer.storage.journal import (
    Entry,
    FileDone,
    FileIntent,
    RecordDone,
    ShardSeen,
    TensorDone,
    UnitDone,
    open_or_create,
    read_journal,
    remove_journal,
    reserve_path,
)
from packer.storage.lock import exclusive
from packer.storage.system import NoSpace
from tests.support.faults import Faults

IDENTITY: dict[str, Any] = {
    "format_version": 1,
    "tool": "0.1.0",
    "recipe": {"name": "kimi-k3", "experts": {"codec": "rvq", "stages": 3}, "families": ["kimi_k3"]},
    "source": {"shards": [{"name": "a", "bytes": 3}], "commit": None},
    "selection": {"layers": [1, 2]},
    "seed": 0,
}
DIGEST = "0123456789abcdef" * 4
ENTRIES: tuple[Entry, ...] = (
    ShardSeen("model-00001-of-000005.safetensors", 1 << 40, DIGEST, (1, 2, 1_700_000_000_123_456_789, 4)),
    UnitDone(
        "layer-00001/0-1",
        records=(RecordDone(0, DIGEST, (0.1, 0.25, 1e-300), 0.2), RecordDone(1, DIGEST, (0, 0, 0), 0)),
    ),
    UnitDone("trunk/embedding", tensors=(TensorDone('model."é漢🙂"\n', DIGEST, DIGEST, 0.0065, -100),)),
    FileIntent("experts/layer-00001.bank", 8192, DIGEST),
    FileDone("experts/layer-00001.bank", 8192, DIGEST),
)


def write(path: Path, entries: tuple[Entry, ...] = ENTRIES) -> bytes:
    with open_or_create(path, IDENTITY) as journal:
        for entry in entries:
            journal.append(entry)
    return path.read_bytes()


def forge(number: int, entry: Any, **more: Any) -> bytes:
    """A line that checks, whatever it says."""
    body = json.dumps({"seq": number, "entry": entry, **more}, separators=(",", ":"))[:-1].encode()
    return body + b',"check":"' + blake3(body).hexdigest()[:16].encode() + b'"}\n'


def test_entries_come_back_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    contents = read_journal(path)
    assert contents.identity == IDENTITY
    assert contents.entries == ENTRIES
    assert contents.torn_bytes == 0
    with open_or_create(path, IDENTITY) as journal:
        assert journal.entries == ENTRIES
        journal.append(FileDone("trunk.bin", 1, DIGEST))
    assert read_journal(path).entries == (*ENTRIES, FileDone("trunk.bin", 1, DIGEST))


def test_every_line_is_json_with_a_number_and_a_check_over_the_rest(tmp_path: Path) -> None:
    data = write(tmp_path / "journal")
    for number, line in enumerate(data.splitlines(keepends=True)):
        document = json.loads(line)
        assert list(document) == ["seq", "entry", "check"]
        assert document["seq"] == number
        body = line[: line.rindex(b',"check"')]
        assert document["check"] == blake3(body).hexdigest()[:16]


def test_the_same_entries_give_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a") == write(tmp_path / "b")


def test_appending_flushes_before_it_returns(tmp_path: Path) -> None:
    faults = Faults()
    with open_or_create(tmp_path / "journal", IDENTITY, system=faults.system) as journal:
        faults.log.clear()
        journal.append(ENTRIES[0])
        assert faults.log == ["pwrite", "fsync"]


def test_wrt_09_a_torn_tail_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)
    start = data.rindex(b"\n", 0, len(data) - 1) + 1
    for cut in range(start, len(data)):
        path.write_bytes(data[:cut])
        contents = read_journal(path)
        assert contents.entries == ENTRIES[:-1]
        assert (contents.whole_bytes, contents.torn_bytes) == (start, cut - start)
        assert path.read_bytes() == data[:cut]  # reading changes nothing
        with open_or_create(path, IDENTITY) as journal:
            assert journal.entries == ENTRIES[:-1]
            journal.append(ENTRIES[-1])
        assert path.read_bytes() == data


def test_wrt_09_a_last_line_with_a_hole_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)
    start = data.rindex(b"\n", 0, len(data) - 1) + 1
    path.write_bytes(data[: start + 20] + bytes(30) + data[start + 50 :])
    assert read_journal(path).entries == ENTRIES[:-1]
    path.write_bytes(data + bytes(4096))
    assert read_journal(path).entries == ENTRIES


def test_wrt_09_any_changed_byte_before_the_last_line_is_refused_with_line_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)
    last = data.rindex(b"\n", 0, len(data) - 1) + 1
    starts = [0] + [at + 1 for at in range(last) if data[at : at + 1] == b"\n"]
    for at in [at for at in range(last) if at % 3 == 0 or at + 1 in starts]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(FormatError) as caught:
            read_journal(path)
        line = max(number for number, start in enumerate(starts) if start <= at)
        assert f"line {line + 1}" in caught.value.line(), at
        assert caught.value.offset == starts[line]
        assert "--restart" in (caught.value.hint or "")


def test_wrt_09_a_lost_repeated_or_exchanged_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    lines = write(path).splitlines(keepends=True)
    for changed in (
        lines[:2] + lines[3:],
        lines[:2] + lines[1:],
        [lines[0], lines[2], lines[1], *lines[3:]],
        lines[1:],
        [*lines, lines[-1]],
    ):
        path.write_bytes(b"".join(changed))
        with pytest.raises(FormatError, match="line"):
            read_journal(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"{}",
        b"{}\n",
        b"shopping list\nmilk\n",
        bytes(5000),
        forge(0, {"kind": "identity"}),
        forge(0, {"kind": "identity", "version": 1, "identity": []}),
        forge(0, {"kind": "identity", "version": 2, "identity": {}}),
        forge(0, {"kind": "identity", "version": True, "identity": {}}),
        forge(0, ["identity"]),
    ],
)
def test_what_is_no_journal_is_refused_and_left_alone(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        open_or_create(path, IDENTITY)
    assert path.read_bytes() == data
    assert [item.name for item in tmp_path.iterdir()] == ["journal"]


@pytest.mark.parametrize(
    "line",
    [
        forge(1, {"kind": "unit"}),
        forge(1, {"kind": "other", "name": "x"}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1.0, "blake3": DIGEST}),
        forge(1, {"kind": "done", "name": "x", "bytes": -1, "blake3": DIGEST}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1 << 63, "blake3": DIGEST}),
        forge(1, {"kind": "done", "name": "x", "bytes": True, "blake3": DIGEST}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST[1:]}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST + "\n"}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST.upper()}),
        forge(1, {"kind": "done", "name": "", "bytes": 1, "blake3": DIGEST}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST, "more": 1}),
        forge(1, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST}, more=1),
        forge(2, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST}),
        forge(True, {"kind": "done", "name": "x", "bytes": 1, "blake3": DIGEST}),
        forge(1, {"kind": "unit", "unit": "u", "records": [[0, DIGEST, [0, 0], 0]]}),
        forge(1, {"kind": "unit", "unit": "u", "records": [[0, DIGEST, [0, 0, -1], 0]]}),
        forge(1, {"kind": "unit", "unit": "u", "records": [[0, DIGEST, [0, 0, 1e39], 0]]}),
        forge(1, {"kind": "unit", "unit": "u", "records": [[0, DIGEST, [0, 0, 0], 0, 0, 0]]}),
        forge(1, {"kind": "unit", "unit": "u", "records": [[0, DIGEST, [0, 0, 0], 0, -1]]}),
        forge(1, {"kind": "unit", "unit": "u", "tensors": [["t", DIGEST, DIGEST, 0, 101]]}),
        forge(1, {"kind": "unit", "unit": "u"}).replace(b'"u"', b'"v"', 1)[:-30] + b'":1}\n' + forge(2, {}),
        forge(1, [[[]]] * 100_000),
        forge(1, json.loads("[" * 500 + "]" * 500)),
        forge(1, {"kind": "unit", "unit": "u", "records": float("nan")}),
        forge(1, {"kind": "unit", "unit": "u", "records": 10**400}),
        forge(1, {"kind": "unit", "unit": "\ud800"}),
    ],
)
def test_a_line_that_checks_is_still_not_believed(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    data = write(path, ()) + line
    path.write_bytes(data)
    with pytest.raises(FormatError):
        read_journal(path)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.binary(max_size=300), st.integers(0, 5), st.booleans())
def test_random_bytes_lead_to_a_format_error_or_to_earlier_entries(
    tmp_path_factory: Any, junk: bytes, at: int, end: bool
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal"
    lines = write(path).splitlines(keepends=True)
    lines[at] = junk + b"\n" * end
    path.write_bytes(b"".join(lines))
    try:
        contents = read_journal(path)
    except FormatError:
        return
    assert at == 5
    assert contents.entries == ENTRIES[:4]


def test_a_journal_that_is_no_regular_file_or_endless_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentProblem):
        open_or_create(tmp_path / "link", IDENTITY)
    assert not (tmp_path / "elsewhere").exists()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FormatError, match="regular"):
        open_or_create(tmp_path / "fifo", IDENTITY)
    with (tmp_path / "long").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(FormatError, match="too long"):
        read_journal(tmp_path / "long")


def test_wrt_10_every_difference_of_the_identity_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    data = write(path)
    other = json.loads(json.dumps(IDENTITY))
    other["recipe"]["experts"] = {"codec": "rvq", "stages": 2, "entries": 16}
    other["source"]["commit"] = "abc"
    other["seed"] = 1
    other["selection"] = None
    del other["tool"]
    with pytest.raises(UsageError) as caught:
        open_or_create(path, other)
    for part in (
        "recipe.experts.stages was 3, is 2",
        "recipe.experts.entries was absent, is 16",
        'source.commit was null, is "abc"',
        "seed was 0, is 1",
        "selection.layers.0 was 1, is absent",
        "selection was absent, is null",
        'tool was "0.1.0", is absent',
    ):
        assert part in caught.value.line()
    assert "families" not in caught.value.line()
    assert "--restart" in (caught.value.hint or "")
    assert path.read_bytes() == data


def test_wrt_10_another_recipe_is_said_first_and_many_differences_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path)
    other = json.loads(json.dumps(IDENTITY)) | {f"key{number}": number for number in range(20)}
    other["recipe"]["name"] = "kimi-k3-lossless"
    with pytest.raises(UsageError) as caught:
        open_or_create(path, other)
    listed = caught.value.line().split("begun with: ")[1].split("; ")
    assert listed[0] == 'recipe.name was "kimi-k3", is "kimi-k3-lossless"'
    assert len(listed) == 9
    assert listed[8] == "and 13 more"  # 21 differences, 8 of them listed


@pytest.mark.parametrize(("one", "two"), [(1, True), (1, 1.0), (1, "1"), ({}, []), (None, 0), ([1], [1, 2])])
def test_wrt_10_values_of_other_types_differ(tmp_path: Path, one: object, two: object) -> None:
    open_or_create(tmp_path / "journal", {"x": one}).close()
    with pytest.raises(UsageError, match="x"):
        open_or_create(tmp_path / "journal", {"x": two})


def test_wrt_10_the_same_identity_in_another_order_is_the_same(tmp_path: Path) -> None:
    open_or_create(tmp_path / "journal", {"a": 1, "b": (1, 2)}).close()
    open_or_create(tmp_path / "journal", {"b": [1, 2], "a": 1}).close()


def test_wrt_01_the_reserve_is_given_up_when_the_device_is_full(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for call in ("pwrite", "fsync"):
        with open_or_create(path, IDENTITY) as journal:
            assert reserve_path(path).stat().st_size == 1 << 20
        faults = Faults(1, errno.ENOSPC, watch=[call])
        with open_or_create(path, IDENTITY, system=faults.system) as journal:
            journal.append(ENTRIES[0])
            assert not reserve_path(path).exists()
    assert read_journal(path).entries == (ENTRIES[0], ENTRIES[0])
    open_or_create(path, IDENTITY).close()
    assert reserve_path(path).exists()  # the next run sets it aside again


def test_wrt_01_without_a_reserve_the_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def full(fd: int, data: Any, offset: int) -> int:
        if offset < len(before) + 10:
            return os.pwrite(fd, data[:10], offset)
        raise OSError(errno.ENOSPC, "full")

    before = write(path)
    journal = open_or_create(path, IDENTITY, system=Faults(pwrite=full).system)
    with pytest.raises(NoSpace, match="no space"):
        journal.append(ENTRIES[0])
    assert path.read_bytes() == before
    with pytest.raises(EnvironmentProblem, match="failed earlier"):
        journal.append(ENTRIES[0])
    journal.close()
    assert read_journal(path).entries == ENTRIES


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_wrt_02_a_line_that_was_not_flushed_is_not_believed_later(tmp_path: Path, call: str) -> None:
    path = tmp_path / "journal"
    before = write(path)
    journal = open_or_create(path, IDENTITY, system=Faults(1, errno.EIO, watch=[call]).system)
    with pytest.raises(EnvironmentProblem, match="input/output"):
        journal.append(ENTRIES[0])
    with pytest.raises(EnvironmentProblem, match="failed earlier"):
        journal.append(ENTRIES[0])
    journal.close()
    assert path.read_bytes() == before


def test_wrt_01_any_failing_call_while_beginning_or_continuing(tmp_path: Path) -> None:
    for at in range(1, 200):
        path = tmp_path / str(at)
        faults = Faults(at, errno.ENOSPC)
        try:
            with open_or_create(path, IDENTITY, system=faults.system) as journal:
                journal.append(ENTRIES[0])
        except EnvironmentProblem:
            pass
        else:
            if faults.count < at:
                assert at > 15
                return
        with open_or_create(path, IDENTITY) as journal:
            assert journal.entries in ((), ENTRIES[:1])
    pytest.fail("no run passed untouched")


def test_an_interrupted_append_cannot_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    def interrupted(fd: int, data: Any, offset: int) -> int:
        os.pwrite(fd, data, offset)
        raise KeyboardInterrupt

    before = write(path)
    journal = open_or_create(path, IDENTITY, system=Faults(pwrite=interrupted).system)
    with pytest.raises(KeyboardInterrupt):
        journal.append(ENTRIES[1])
    with pytest.raises(EnvironmentProblem):
        journal.append(ENTRIES[0])
    journal.close()
    assert path.read_bytes() == before


def test_threads_may_append_together(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with open_or_create(path, IDENTITY) as journal:
        threads = [
            threading.Thread(target=lambda n=n: [journal.append(FileDone(f"{n}/{i}", i, DIGEST)) for i in range(10)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    entries = read_journal(path).entries
    assert {entry.name for entry in entries if isinstance(entry, FileDone)} == {
        f"{n}/{i}" for n in range(4) for i in range(10)
    }


def test_a_journal_is_removed_with_its_reserve(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    remove_journal(tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []
    remove_journal(tmp_path / "journal")


def test_wrt_08_the_second_holder_is_refused_and_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with exclusive(path):
        before = (path.read_bytes(), path.stat().st_mtime_ns)
        with (
            pytest.raises(EnvironmentProblem, match=f"another process.*process {os.getpid()}") as caught,
            exclusive(path),
        ):
            pytest.fail("both hold the lock")
        assert caught.value.exit_code == 4
        assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert not path.exists()
    with exclusive(path):
        pass


def test_wrt_08_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from packer.storage.lock import exclusive\n"
        "with exclusive(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, cwd=root, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(EnvironmentProblem, match=f"process {child.pid}"), exclusive(path):
            pytest.fail("both hold the lock")
        child.kill()
    assert path.read_text() == f"{child.pid}\n"  # left behind by the dead, and in nobody's way
    with exclusive(path):
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_lock_file_whose_name_was_taken_away_meanwhile_is_not_held(tmp_path: Path) -> None:
    """The holder deletes the file just before a second process locks what it has opened."""
    path = tmp_path / "lock"
    calls = []

    def lock(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
            path.write_text("another")

    with exclusive(path, system=Faults(lock=lock).system):
        assert len(calls) == 2
        assert path.read_text() == f"{os.getpid()}\n"


def test_a_lock_file_with_strange_contents_or_a_full_device(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_bytes(b"\x1b[31m\xff" * 100)
    with exclusive(path, system=Faults(1, errno.ENOSPC, watch=["pwrite"]).system):
        pass

    def busy(fd: int) -> None:
        raise BlockingIOError(errno.EAGAIN, "busy")

    path.write_bytes(b"\x1b[31m\xff" * 100)
    with pytest.raises(EnvironmentProblem) as caught, exclusive(path, system=Faults(lock=busy).system):
        pass
    assert caught.value.found is None
    with (
        pytest.raises(EnvironmentProblem, match="lock"),
        exclusive(path, system=Faults(1, errno.ENOLCK, watch=["lock"]).system),
    ):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(EnvironmentProblem), exclusive(tmp_path / "lock"):
        pass
    assert (tmp_path / "victim").read_text() == "precious"
